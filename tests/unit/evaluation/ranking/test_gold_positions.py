import pytest
from langchain_core.documents import Document

from rag_posfix.evaluation.data.questions import PositionExample, with_hostile_passage
from rag_posfix.evaluation.ranking.rankings import OpenedReranker, RankJournal, local_ranker
from rag_posfix.evaluation.ranking.reranking import GoldRank, rank_gold_positions, summarize_gold_ranks
from tests.support.rerank_data import ByLength
from tests.support.tiny_evaluation import EXAMPLES


class AsItCame(ByLength):
    """Scores by the position in the list: as biased as a scorer can be."""

    def compress_documents(self, documents, query, callbacks=None):
        self.asked.append([d.id for d in documents])
        return [
            Document(id=d.id, page_content=d.page_content, metadata={"relevance_score": 1 / (1 + position)})
            for position, d in enumerate(documents)
        ]


def ranks(reranker, positions=(0, 1, 3), journal=None):
    ranker = local_ranker(OpenedReranker(type(reranker).__name__, type(reranker).__name__, reranker))
    return rank_gold_positions(
        ranker, EXAMPLES, gold_positions=positions, n_documents=4, journal=journal or RankJournal()
    )


def row(question, position, rank, label="a"):
    return GoldRank(question, label, position, rank, 0.5, None, 0, 0, False)


def test_the_gold_passage_stands_at_each_position_and_the_others_keep_their_order():
    reranker = AsItCame()
    found = ranks(reranker)
    assert reranker.asked[:3] == [
        ["g0", "d00", "d01", "d02"],
        ["d00", "g0", "d01", "d02"],
        ["d00", "d01", "d02", "g0"],
    ]
    assert [(one.question, one.gold_position, one.gold_rank) for one in found[:4]] == [
        ("0", 0, 0), ("0", 1, 1), ("0", 3, 3), ("1", 0, 0),
    ]  # fmt: skip


def test_passages_come_without_scores():
    class Looking(ByLength):
        def compress_documents(self, documents, query, callbacks=None):
            assert all("relevance_score" not in d.metadata for d in documents)
            return super().compress_documents(documents, query)

    assert len(ranks(Looking())) == 9


def test_an_unbiased_scorer_has_the_same_recall_everywhere_and_a_biased_one_has_not():
    # "gold 0" is shorter than "other 00": the gold passage is always first.
    unbiased = summarize_gold_ranks(ranks(ByLength()))["rerankers"]["ByLength"]
    assert [one["recall@1"] for one in unbiased["places"].values()] == [1.0, 1.0, 1.0]
    assert unbiased["recall@1"]["spread"] == unbiased["rankings_that_change"] == 0.0
    assert unbiased["recall@1"]["first_minus_last"]["p"] == 1.0
    found = summarize_gold_ranks(ranks(AsItCame()))
    biased = found["rerankers"]["AsItCame"]
    assert [one["recall@1"] for one in biased["places"].values()] == [1.0, 0.0, 0.0]
    assert [one["recall@3"] for one in biased["places"].values()] == [1.0, 1.0, 0.0]
    assert biased["recall@1"]["mean"] == pytest.approx(1 / 3)
    assert (biased["recall@1"]["worst"], biased["recall@1"]["spread"]) == (0.0, 1.0)
    assert biased["recall@1"]["spread_ci95"] == [1.0, 1.0]
    assert biased["rankings_that_change"] == 1.0
    # Three questions, all 1 against 0: 2 of 8 sign patterns; two cuts in the family.
    first_minus_last = biased["recall@1"]["first_minus_last"]
    assert (first_minus_last["difference"], first_minus_last["p"], first_minus_last["p_holm"]) == (1.0, 0.25, 0.5)
    assert found["n"] == 3


def test_intervals_are_by_question():
    rows = [row(str(q), position, rank) for q in range(40) for position, rank in ((0, q % 2), (4, 0))]
    found = summarize_gold_ranks(rows)["rerankers"]["a"]
    low, high = found["places"]["0"]["ci95"]["recall@1"]
    assert low < 0.5 < high
    assert found["places"]["4"]["ci95"]["recall@1"] == [1.0, 1.0]
    assert found["recall@1"]["first_minus_last"]["difference"] == -0.5
    assert found["recall@1"]["first_minus_last"]["ci95"] == pytest.approx([low - 1, high - 1])


def test_a_gold_passage_that_was_left_out_is_not_found():
    found = summarize_gold_ranks([row("0", 0, None), row("1", 0, 2)])["rerankers"]["a"]["places"]["0"]
    assert (found["recall@1"], found["recall@3"]) == (0.0, 0.5)


def two_golds(name="two"):
    return PositionExample(
        id=name, question="Who?", answers=("so",),
        gold=tuple(Document(page_content=f"gold {n}", id=f"g{n}") for n in range(2)),
        distractors=tuple(Document(page_content=f"distractor {n}", id=f"d{n}") for n in range(4)),
    )  # fmt: skip


class LeavesOut(AsItCame):
    """Returns the first three passages alone."""

    def compress_documents(self, documents, query, callbacks=None):
        return super().compress_documents(documents, query)[:3]


@pytest.mark.parametrize(
    ("reranker", "ranks_at"),
    [
        # As they came: how many passages that are not gold come before the later of the two.
        (AsItCame, {(0, 1): 0, (0, 4): 3, (4, 0): 3, (1, 2): 1, (2, 3): 2}),
        # "gold 0" and "gold 1" are the shortest: first and second wherever they stand.
        (ByLength, {(0, 1): 0, (0, 4): 0, (4, 0): 0, (1, 2): 0, (2, 3): 0}),
        # Where one of the two is not among the three that are kept, they are not found together.
        (LeavesOut, {(0, 1): 0, (0, 4): None, (4, 0): None, (1, 2): 1, (2, 3): None}),
    ],
)
def test_of_two_gold_passages_the_lower_rank_counts(reranker, ranks_at):
    ranker = local_ranker(OpenedReranker("a", "a", reranker()))
    found = rank_gold_positions(
        ranker, [two_golds()], gold_positions=list(ranks_at), n_documents=5, journal=RankJournal()
    )
    assert {one.gold_position: one.gold_rank for one in found} == ranks_at


def test_recall_of_two_gold_passages_needs_both_among_the_first():
    # Passages before the lower one that are not gold: 1 and 2 are among the first three, 3 is not.
    rows = [row(str(q), (0, 4), rank) for q, rank in enumerate((1, 2, 3, None))]
    rows += [row(str(q), (1, 2), 2) for q in range(4)]
    found = summarize_gold_ranks(rows)["rerankers"]["a"]
    assert list(found["places"]) == ["0+4", "1+2"]
    assert [one["recall@1"] for one in found["places"].values()] == [0.0, 0.0]
    assert [one["recall@3"] for one in found["places"].values()] == [0.5, 1.0]
    assert (found["recall@3"]["worst"], found["recall@3"]["spread"]) == (0.5, 0.5)
    assert found["recall@3"]["first_minus_last"]["difference"] == -0.5
    assert found["rankings_that_change"] == 0.75  # the second question has rank 2 at both


def test_the_correction_is_over_all_rerankers_and_both_cuts():
    # Five questions. a: first from place 0 and sixth from place 4, in both cuts 5 differences of 1: p = 2 / 2^5.
    # b: first from both places. Of four values 1/16, 1/16, 1, 1 the first becomes 4/16, and so does the second.
    rows = [row(str(q), 0, 0, label) for q in range(5) for label in "ab"]
    rows += [row(str(q), 4, {"a": 5, "b": 0}[label], label) for q in range(5) for label in "ab"]
    found = summarize_gold_ranks(rows)["rerankers"]
    pairs = [found[label][f"recall@{cut}"]["first_minus_last"] for label in "ab" for cut in (1, 3)]
    assert [pair["p"] for pair in pairs] == [1 / 16, 1 / 16, 1.0, 1.0]
    assert [pair["p_holm"] for pair in pairs] == [1 / 4, 1 / 4, 1.0, 1.0]


def test_each_list_is_ranked_once_however_often_it_is_asked_for(tmp_path):
    path = tmp_path / "journal.jsonl"
    ranks(AsItCame(), positions=(0, 1), journal=RankJournal(path))
    again = AsItCame()
    found = ranks(again, positions=(0, 1, 3), journal=RankJournal(path))
    assert len(again.asked) == 3
    assert [one.reused for one in found] == [True, True, False] * 3
    assert summarize_gold_ranks(found)["reused"] == 6


def test_the_share_of_rankings_with_the_hostile_passage_first_is_reported():
    # An echo is the longest text: never first by length; as they came it is first where the gold passage is not.
    examples = with_hostile_passage(EXAMPLES, "echo")
    for reranker, share in ((ByLength(), 0.0), (AsItCame(), 0.5)):
        ranker = local_ranker(OpenedReranker("r", "r", reranker))
        rows = rank_gold_positions(
            ranker, examples, gold_positions=(0, 1), n_documents=4, journal=RankJournal(), hostile="echo"
        )
        assert summarize_gold_ranks(rows)["rerankers"]["r"]["hostile_first"] == share
    assert "hostile_first" not in summarize_gold_ranks(ranks(ByLength()))["rerankers"]["ByLength"]
