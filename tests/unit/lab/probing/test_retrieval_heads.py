import dataclasses
import json

import pytest
import torch
from langchain_core.documents import Document

from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation.data.questions import PositionExample
from rag_posfix.generation.decode.question_scores import question_attention, question_attention_by_head
from rag_posfix.lab.probing import retrieval_heads as module
from rag_posfix.lab.probing.retrieval_heads import best_heads, gold_ranks, probe_retrieval_heads
from rag_posfix.plan.bias_profile import read_head_list
from rag_posfix.reranking.in_context import InContextReranker
from tests.support.tiny import loaded_model, toy_layout
from tests.support.tiny_evaluation import CountedForwards, tiny_engine

EXAMPLES = [
    PositionExample(
        str(n), "Which?", ("x",), (Document(id=f"g{n}", page_content=f"gold {n}"),),
        tuple(Document(id=f"d{n}{i}", page_content=f"other {i} {n}") for i in range(3)),
    )
    for n in range(6)
]  # fmt: skip


def planted(loaded, layouts):
    """Layer 1, head 3 attends to the gold passage under the question; the others attend alike to all tokens."""
    found = []
    for layout, asked in zip(layouts, (False, True), strict=True):
        attention = torch.full((2, 4, len(layout.token_ids)), 1e-3)
        for span in layout.passages:
            text = bytes(token for token in layout.tokens(span) if token < 256)
            if asked and b"gold" in text:
                attention[1, 3, span.start : span.stop] = 0.5
            if asked and b"other 1" in text:  # a head that finds another passage
                attention[0, 2, span.start : span.stop] = 0.5
        found.append(attention)
    return found


def test_a_planted_head_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "question_attention_by_head", planted)
    record = probe_retrieval_heads(tiny_engine(400), EXAMPLES, documents=4, keep=1, out=tmp_path)
    assert record.head["heads"] == [[1, 3]]
    assert record.head["gains"] == [1.0]
    assert record.head["held_out"] == {"recall_at_1": 1.0, "recall_at_3": 1.0}
    assert read_head_list(record.to_json()["profile"]) == {"heads": [[1, 3]]}


def test_passages_are_shuffled_the_same_way_for_the_same_seed():
    engine = tiny_engine(400)
    scores, gold = module.passage_scores(engine, EXAMPLES, 4)
    again, same = module.passage_scores(engine, EXAMPLES, 4)
    assert torch.equal(scores, again)
    assert torch.equal(gold, same)
    assert gold.sum(dim=1).tolist() == [1] * 6
    assert len(set(gold.int().argmax(dim=1).tolist())) > 1
    assert scores.shape == (6, *scores.shape[1:3], 4)


def test_the_gain_by_hand():
    # Two questions, one layer, two heads, three passages. Head 0: ranks 1 and 3: (1 + 1 / log2 4) / 2 = .75.
    # Head 1: ranks 2 and 2: 1 / log2 3 = .6309.
    scores = torch.tensor([[[[0.9, 0.1, 0.0], [0.5, 0.6, 0.0]]], [[[0.3, 0.2, 0.1], [0.0, 0.9, 0.5]]]])
    gold = torch.tensor([[True, False, False], [False, False, True]])
    assert gold_ranks(scores, gold).tolist() == [[[1, 2]], [[3, 2]]]
    heads, gains = best_heads(scores, gold, 2)
    assert heads == [(0, 0), (0, 1)]
    assert gains == pytest.approx([0.75, 0.63093], abs=1e-5)


def test_a_tie_counts_against_the_gold_passage():
    assert gold_ranks(torch.tensor([[0.5, 0.5, 0.5]]), torch.tensor([[False, True, False]])).tolist() == [3]


def test_of_two_gold_passages_the_best_is_ranked_and_the_other_left_out():
    gold = torch.tensor([[True, False, True, False]])
    # .9 and .8 are gold: the best is first. .2 and .3 are gold: .5 alone is before .3, so it is second, not third.
    # .5 and .1 are gold, and .5 is not: equal scores count against gold.
    rows = torch.tensor([[[0.8, 0.5, 0.9, 0.1], [0.2, 0.5, 0.3, 0.1], [0.5, 0.5, 0.1, 0.4]]])
    assert gold_ranks(rows, gold).tolist() == [[1, 2, 2]]


def test_a_head_that_reads_both_gold_passages_has_the_full_gain(monkeypatch):
    monkeypatch.setattr(module, "question_attention_by_head", planted)
    two = [
        dataclasses.replace(one, gold=(*one.gold, Document(id=f"h{one.id}", page_content=f"more gold {one.id}")))
        for one in EXAMPLES
    ]
    record = probe_retrieval_heads(tiny_engine(400), two, documents=4, keep=1)
    assert record.head["heads"] == [[1, 3]]
    assert record.head["gains"] == [1.0]
    assert record.head["held_out"] == {"recall_at_1": 1.0, "recall_at_3": 1.0}
    with pytest.raises(EvaluationError, match="question 0: documents=2 leave no passage beside its 2 gold ones"):
        probe_retrieval_heads(tiny_engine(400), two, documents=2)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_heads_together_are_the_sum_over_heads(family):
    loaded, layout = loaded_model(family), toy_layout()
    (by_head,) = question_attention_by_head(loaded, [layout])
    (whole,) = question_attention(loaded, [layout])
    (some,) = question_attention(loaded, [layout], heads=[(0, 1), (2, 7)])
    for span, all_heads, two in zip(layout.passages, whole, some, strict=True):
        assert torch.allclose(by_head.sum(dim=(0, 1))[span.slice], torch.tensor(all_heads), atol=1e-4)
        assert torch.allclose((by_head[0, 1] + by_head[2, 7])[span.slice], torch.tensor(two), atol=1e-6)


def test_the_reranker_scores_by_the_heads_that_are_given():
    engine = tiny_engine(600)
    documents = [Document(page_content=text) for text in ("gold one", "other two", "third text")]
    found = InContextReranker(generator=engine, heads=((0, 0),)).compress_documents(documents, "Which?")
    everything = InContextReranker(generator=engine).compress_documents(documents, "Which?")
    raw = [one.metadata["reranking"]["raw_score"] for one in (*found, *everything)]
    assert len(set(raw)) == 6
    with pytest.raises(ValueError, match="exclude each other"):
        InContextReranker(generator=engine, heads=((0, 0),), layers=(1,))


def test_bad_input_is_told_before_a_prompt_is_read(tmp_path):
    engine = tiny_engine(400)
    with pytest.raises(ConfigError, match="1 questions with 4 passages"):
        probe_retrieval_heads(engine, EXAMPLES[:1], documents=4)
    with pytest.raises(EvaluationError, match="documents=9"):
        probe_retrieval_heads(engine, EXAMPLES, documents=9)
    path = tmp_path / "heads.json"
    path.write_text(json.dumps({"profile": []}))
    with pytest.raises(ConfigError, match="holds no heads"):
        read_head_list(str(path))


def test_a_prompt_that_is_longer_than_the_context_is_told_before_one_is_read():
    # Every prompt of these questions has 250 tokens, one for each byte.
    assert module.passage_scores(tiny_engine(250), EXAMPLES, 4)[0].shape[0] == 6
    engine = tiny_engine(249)
    told = "question 0: 4 passages make a prompt of 250 tokens, the context of this model has 249; use fewer documents"
    with CountedForwards(engine) as counted, pytest.raises(EvaluationError, match=told):
        probe_retrieval_heads(engine, EXAMPLES, documents=4)
    assert counted.shapes == []
