import dataclasses
import itertools
import math
from collections import defaultdict
from contextlib import closing

import pytest
from langchain_core.documents import Document

from rag_posfix.errors import ConfigError
from rag_posfix.generation.remote.generator import open_remote
from rag_posfix.reranking import YesNoReranker
from rag_posfix.reranking.yes_no import TEMPLATES, JudgeTemplate, read_template
from tests.support.reader import ScriptedReader, order, raw, scores
from tests.support.upstream import as_json, judging, upstream

JUDGE = JudgeTemplate(yes=("Y", "y"), no=("N",))
"""With spellings of one byte, which are tokens of the toy encoder."""


def documents(*texts):
    return [Document(page_content=text) for text in texts]


def first_token(yes, yes_too, no):
    return {ord("Y"): math.log(yes), ord("y"): math.log(yes_too), ord("N"): math.log(no)}


def judged(values, *texts, **parameters):
    reader = ScriptedReader(values, context_window=parameters.pop("context_window", 100_000))
    reranker = YesNoReranker(generator=reader, **{"template": JUDGE, **parameters})
    return reranker.compress_documents(documents(*texts), "why?"), reader


VALUES = {"a": first_token(0.3, 0.3, 0.2), "b": first_token(0.1, 0.1, 0.4), "": first_token(0.2, 0.2, 0.2)}


def test_the_score_is_the_odds_of_yes_against_those_without_a_passage():
    # a: (.3 + .3) / .2 = 3 and without a passage .4 / .2 = 2, so odds of 1.5, a probability of .6;
    # b: .2 / .4 = .5 against 2 is 1/4, a probability of .2.
    result, _ = judged(VALUES, "b", "a")
    assert order(result) == ["a", "b"]
    assert raw(result) == pytest.approx({"a": math.log(1.5), "b": math.log(0.25)})
    assert scores(result) == pytest.approx({"a": 0.6, "b": 0.2})


def test_without_calibration_the_score_is_the_probability_of_yes():
    result, _ = judged(VALUES, "a", "b", calibrate=False)
    assert scores(result) == pytest.approx({"a": 0.75, "b": 1 / 3})


@pytest.mark.parametrize(("calibrate", "odds"), [(True, 1.5), (False, 3.0)])
def test_calibration_of_a_servers_judgements_is_by_choice(calibrate, odds):
    # Odds of .6 / .2 = 3 with the passage, .4 / .2 = 2 without one.
    def judge(body):
        is_passage = "tower" in body["messages"][-1]["content"]
        return as_json(judging("Y", {"Y": math.log(0.6 if is_passage else 0.4), "N": math.log(0.2)}))

    with upstream(judge) as server, closing(open_remote(server.model)) as generator:
        reranker = YesNoReranker(generator=generator, template=JUDGE, calibrate=calibrate)
        result = reranker.compress_documents(documents("a tower"), "why?")
    assert raw(result) == {"a tower": pytest.approx(math.log(odds))}


@pytest.mark.parametrize(
    ("mass", "top_n", "expected"),
    [
        (0.6, None, ["a"]),  # .6 of .6 + .2 + .1 is .67
        (0.7, None, ["a", "b"]),  # .89
        (0.9, None, ["a", "b", "c"]),
        (0.9, 2, ["a", "b"]),
        (0.7, 2, ["a"]),  # .6 of .8 is .75
    ],
)
def test_mass_returns_the_fewest_passages_whose_scores_sum_to_that_share(mass, top_n, expected):
    # c: odds of 2 / 9 against 2 without a passage, 1 / 9, a probability of .1.
    values = {**VALUES, "c": first_token(0.05, 0.05, 0.45)}
    result, _ = judged(values, "c", "b", "a", mass=mass, top_n=top_n)
    assert order(result) == expected


@pytest.mark.parametrize(
    ("all_from", "top_n", "expected"),
    [(0.6, None, 3), (0.61, 1, 1), (0.6, 1, 1), (0.2, 1, 2), (0.1, 1, 3), (0.0, 2, 3), (0.9, 2, 2)],
)
def test_all_further_passages_with_a_score_are_returned_beyond_the_first(all_from, top_n, expected):
    values = {**VALUES, "c": first_token(0.05, 0.05, 0.45)}  # scores: a .6, b .2, c .1
    result, _ = judged(values, "c", "b", "a", all_from=all_from - 1e-9 if all_from else 0.0, top_n=top_n)
    assert order(result) == ["a", "b", "c"][:expected]


def test_a_passage_that_meets_the_mass_exactly_is_the_last():
    # Judged as without a passage: scores of .5 each, and half of them is one of two.
    result, _ = judged(dict.fromkeys(("a", "b", ""), VALUES[""]), "a", "b", mass=0.5)
    assert len(result) == 1


def test_a_copy_of_the_question_is_no_evidence():
    question = "who built the old tower?"
    values = {**VALUES, f"{question} b": first_token(0.8, 0.1, 0.1), question: first_token(0.8, 0.1, 0.1)}
    for texts in itertools.permutations(("a", f"{question} b", question)):
        reranker = YesNoReranker(generator=ScriptedReader(values, context_window=100_000), template=JUDGE)
        result = reranker.compress_documents(documents(*texts), question)
        left_out = {d.page_content: d.metadata["reranking"].get("question_copies") for d in result}
        assert raw(result) == pytest.approx({"a": math.log(1.5), question: 0.0, f"{question} b": math.log(0.25)})
        assert left_out == {"a": None, question: "left out", f"{question} b": "left out"}
    counted = YesNoReranker(generator=reranker.generator, template=JUDGE, question_copies=True)
    assert order(counted.compress_documents(documents("a", question), question)) == [question, "a"]


def test_scores_are_the_same_for_every_order_and_batch_size():
    values = {**VALUES, "cc": first_token(0.2, 0.1, 0.6)}
    expected = scores(judged(values, "a", "b", "cc")[0])
    for texts in itertools.permutations(("a", "b", "cc")):
        for batch_size in (1, 2):
            assert scores(judged(values, *texts, batch_size=batch_size)[0]) == expected


def test_the_prompt_begins_as_that_of_an_answer_and_ends_with_the_judges_question():
    _, reader = judged(VALUES, "a")
    (suffix,) = reader.suffixes
    assert suffix.startswith("Question: why?\nDoes the passage above contain the answer")
    assert suffix.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("text", "best"),
    # Windows of 62 characters (64 tokens less the separator) from 0, 46, 92 and 138: the g of the best one.
    [("g" * 60 + "m" * 100, 60 / 62), ("m" * 46 + "g" * 60 + "m" * 54, 60 / 62), ("m" * 100 + "g" * 60, 1.0)],
    ids=["first", "second", "last"],
)
def test_a_long_document_has_the_score_of_its_best_window(text, best):
    class Windows(ScriptedReader):
        def first_token_log_probs(self, layout, tokens, salt=""):
            share = [0.9 * window.count("g") / max(len(window), 1) + 0.05 for window in (*self.texts(layout), "")]
            return [tuple(math.log((p, p, 1 - p)["YyN".index(chr(token))]) for token in tokens) for p in share]

    reranker = YesNoReranker(generator=Windows(), template=JUDGE, window_tokens=64, calibrate=False)
    (result,) = reranker.compress_documents(documents(text), "why?")
    odds = 2 * (0.9 * best + 0.05) / (1 - (0.9 * best + 0.05))
    assert result.metadata["relevance_score"] == pytest.approx(odds / (1 + odds))
    assert result.metadata["reranking"]["windows"] == 4


def test_windows_overlap_by_a_quarter_and_are_the_whole_document():
    text = "".join(f"{number:02d}" for number in range(80))  # 160 characters, each stretch of them once
    _, reader = judged(defaultdict(lambda: VALUES[""]), text, window_tokens=64)
    windows = [window for batch in reader.seen for window in batch]
    # 64 tokens less the separator: 62 characters, of which 62 * 3 / 4 = 46 are not in the next window.
    assert sorted(windows, key=text.index) == [text[start : start + 62] for start in (0, 46, 92, 138)]


def test_qwen3_reranker_reads_the_question_before_the_passage():
    values = defaultdict(lambda: {ord("y"): -1.0, ord("n"): -2.0})
    layouts = []

    class Keeping(ScriptedReader):
        def first_token_log_probs(self, layout, tokens, salt=""):
            layouts.append(self.encoder.decode(layout.token_ids))
            return super().first_token_log_probs(layout, tokens, salt)

    template = TEMPLATES["qwen3_reranker"]
    toy = dataclasses.replace(template, yes=("y",), no=("n",))
    YesNoReranker(generator=Keeping(values), template=toy).compress_documents(documents("Rome."), "why?")
    # The user's turn of the model card, with the assistant's turn begun.
    assert layouts == [
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: why?\n<Document>: Rome.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ]


def test_without_spellings_of_one_token_first_tokens_that_differ_count():
    # " Yes" and " No" begin with the same byte, "Yes" and "No" do not: odds of .6 to .3, without a passage 1 to 1.
    values = {"a": first_token(0.6, 0.1, 0.3), "": first_token(0.5, 0.1, 0.5)}
    result, _ = judged(values, "a", template=JudgeTemplate(yes=("Yes", " Yes"), no=("No", " No")))
    assert raw(result) == pytest.approx({"a": math.log(2)})


def test_spellings_that_begin_alike_are_an_error():
    with pytest.raises(ConfigError, match="begin with the same tokens of scripted"):
        judged(VALUES, "a", template=JudgeTemplate(yes=("yes",), no=("yea",)))


def test_a_template_is_read_from_a_file_and_must_hold_the_question(tmp_path):
    file = tmp_path / "judge.toml"
    file.write_text('after = "{question} Is it answered?"\nyes = ["ja"]\nno = ["nein"]\n')
    reranker = YesNoReranker(generator=ScriptedReader({}), **read_template(str(file)))
    assert reranker.template == JudgeTemplate(after="{question} Is it answered?", yes=("ja",), no=("nein",))
    assert read_template("qwen3_reranker") == {"template": "qwen3_reranker"}
    with pytest.raises(ConfigError, match="neither a shipped template"):
        read_template(str(tmp_path / "missing.toml"))
    with pytest.raises(ConfigError, match="question"):
        JudgeTemplate(after="Is it answered?")


def test_an_unknown_template_is_refused_when_the_reranker_is_made():
    with pytest.raises(ConfigError, match="qwen3_reranker"):
        YesNoReranker(generator=ScriptedReader({}), template="qwen4")
