"""The sets of other languages as questions with passages."""

from benchmarks.language_sets import SETS, main
from rag_posfix.evaluation.data.questions import load_examples


def test_every_question_has_its_passage_and_those_of_the_others(tmp_path):
    main([str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in SETS.glob("*.jsonl")}
    examples = load_examples(tmp_path / "fr.jsonl")
    assert len(examples) == 10
    for example in examples:
        assert any(answer in example.gold[0].page_content for answer in example.answers)
        assert len(example.documents(10, 4)) == 10
