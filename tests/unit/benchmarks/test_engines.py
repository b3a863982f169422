"""The benchmark of servers, on a scripted one: what it sends in which order, and which answers change."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.engines import documents_of, main, orders_of
from tests.support.upstream import Reply, as_json, first_passage, judging, upstream


def server(body: dict[str, Any]) -> Reply:
    """Believe in long passages, and answer with the first one of the prompt."""
    if not body.get("logprobs"):
        return first_passage(body)
    return as_json(judging("Yes", {"Yes": -1 / len(body["messages"][-1]["content"]), "No": -1.0}))


def test_documents_have_the_length_that_is_asked_for():
    documents = documents_of(5, 120, "x")
    assert {len(document.page_content.split()) for document in documents} == {92}
    assert len({document.page_content for document in documents}) == 5


def test_orders_differ_and_are_all_where_there_are_few():
    documents = documents_of(3, 20, "x")
    ids = [[document.id for document in order] for order in orders_of(documents, 24)]
    assert (len(ids), len({tuple(each) for each in ids})) == (6, 6)
    ids = [[document.id for document in order] for order in orders_of(documents_of(4, 20, "x"), 23)]
    assert (len(ids), len({tuple(each) for each in ids})) == (23, 23)


@pytest.mark.slow
def test_answers_of_the_plain_prompt_change_and_those_of_the_judged_do_not(tmp_path):
    with upstream(server) as running:
        arguments = ["--documents", "4", "--tokens", "20", "--questions", "20", "--concurrent", "2", "--best", "2"]
        summary = main(["--model", running.model, *arguments, "--ordered", "2", "--out", str(tmp_path)])
    assert summary["changed"] == {"plain": {"orders": 2, "same_order": 0}, "judged": {"orders": 0, "same_order": 0}}
    assert len(summary["judged"]["questions_per_s_by_ten"]) == 2
    assert summary["plain"]["not_judged"] == summary["judged"]["not_judged"] == 0
    assert summary["plain"]["cached_share"] == 0.4  # 16 of 40
    assert summary["ratios"].keys() == {"first_token_cold", "first_token_warm", "questions_per_s"}
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
