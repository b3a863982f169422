"""Whether a reranker finds the gold passage wherever it stands in the list that comes in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rag_posfix.evaluation.data.datasets import PositionExample
from rag_posfix.evaluation.ranking.first_stage import Progress, silent
from rag_posfix.evaluation.ranking.rankings import Candidates, Ranking, RankJournal
from rag_posfix.evaluation.ranking.rerank import Ranker, rerank
from rag_posfix.evaluation.ranking.significance import difference_interval, holm, randomisation_p
from rag_posfix.evaluation.statistics import bootstrap_interval, mean

__all__ = ["GoldRank", "rank_gold_places", "summarize_gold_places"]

CUTS = (1, 3)


@dataclass(frozen=True, slots=True)
class GoldRank:
    """Where one reranker put the gold passage of one question.

    Attributes:
        question: The question's id.
        reranker: Label of the reranker.
        gold_position: Place of the gold passage in the list that came in, from 0.
        gold_rank: Its place in the list that came out, from 0; None where the reranker left it out.
        seconds: Time to rank the list.
        calls: Answers that the model was asked to write, where the reranker counts them.
        forward_passes: Forward passes of the generator.
        tokens_read: Tokens in these, padding included.
        reused: An earlier run ranked the same list.
    """

    question: str
    reranker: str
    gold_position: int
    gold_rank: int | None
    seconds: float
    calls: int | None
    forward_passes: int
    tokens_read: int
    reused: bool


def rank_gold_places(
    ranker: Ranker,
    examples: Sequence[PositionExample],
    *,
    gold_positions: Sequence[int],
    n_documents: int,
    journal: RankJournal,
    progress: Progress = silent,
) -> list[GoldRank]:
    """Rank the passages of every question with the gold passage at each place.

    The other passages keep their order. Passages come without scores: a reranker sees the question, the texts and the
    order, nothing that tells which passage is gold. Passages with equal scores keep the order that came in.

    Args:
        ranker: The reranker.
        examples: The questions.
        gold_positions: Places of the gold passage, from 0.
        n_documents: Passages per list.
        journal: Rankings of earlier runs, and where new ones go.
        progress: Shows how far it is.

    Raises:
        EvaluationError: too few passages, a place outside of the list, or the reranker failed.
    """
    asked = [(example, place) for example in examples for place in gold_positions]
    queries = [
        Candidates(f"{example.id}@{place}", example.question, tuple(example.documents(n_documents, place)))
        for example, place in asked
    ]
    found = rerank(ranker, queries, journal, progress)
    return [
        _gold_rank(ranker.label, example, place, found.rankings[query.query], query.query in found.reused)
        for (example, place), query in zip(asked, queries, strict=True)
    ]


def summarize_gold_places(rows: Sequence[GoldRank]) -> dict[str, Any]:
    """Return recall of the gold passage per reranker and place, mean, worst, spread, and intervals by question.

    ``recall@1`` is the share of questions whose gold passage is ranked first, ``recall@3`` among the first three. For
    each of them ``spread`` is the best place minus the worst. ``first_minus_last`` compares the first place asked for
    with the last, questions paired, and ``p`` is that of a randomisation test, ``p_holm`` after Holm's correction over
    the rerankers and both cuts. ``rankings_that_change`` is the share of questions whose gold passage ends at another
    rank from another place: 0 for a scorer that does not look at the order.

    Args:
        rows: Every question at every place under every reranker.
    """
    labels = list(dict.fromkeys(row.reranker for row in rows))
    result = {label: _summary([row for row in rows if row.reranker == label]) for label in labels}
    pairs = [result[label][f"recall@{cut}"]["first_minus_last"] for label in labels for cut in CUTS]
    for pair, corrected in zip(pairs, holm([pair["p"] for pair in pairs]), strict=True):
        pair["p_holm"] = corrected
    return {
        "rerankers": result,
        "n": len({row.question for row in rows}),
        "reused": sum(row.reused for row in rows),
    }


def _gold_rank(label: str, example: PositionExample, place: int, ranking: Ranking, reused: bool) -> GoldRank:
    gold = str(example.gold.id)
    cost = {name: value for name, value in asdict(ranking).items() if name not in ("ids", "scores")}
    rank = ranking.ids.index(gold) if gold in ranking.ids else None
    return GoldRank(example.id, label, place, rank, reused=reused, **cost)


def _summary(rows: Sequence[GoldRank]) -> dict[str, Any]:
    table: dict[int, list[GoldRank]] = {}
    for row in rows:
        table.setdefault(row.gold_position, []).append(row)
    ranks = zip(*([row.gold_rank for row in found] for found in table.values()), strict=True)
    calls = [float(row.calls) for row in rows if row.calls is not None]
    return {
        "places": {str(place): _at_place(found) for place, found in table.items()},
        **{f"recall@{cut}": _over_places(list(table.values()), cut) for cut in CUTS},
        "rankings_that_change": mean([float(len(set(found)) > 1) for found in ranks]),
        "seconds": mean([row.seconds for row in rows]),
        "calls": mean(calls) if calls else None,
        "forward_passes": mean([float(row.forward_passes) for row in rows]),
        "tokens_read": mean([float(row.tokens_read) for row in rows]),
    }


def _at_place(rows: Sequence[GoldRank]) -> Mapping[str, Any]:
    values = {f"recall@{cut}": _recalls(rows, cut) for cut in CUTS}
    return {
        **{name: mean(found) for name, found in values.items()},
        "ci95": {name: list(difference_interval(found)) for name, found in values.items()},
        "seconds": mean([row.seconds for row in rows]),
    }


def _over_places(columns: Sequence[Sequence[GoldRank]], cut: int) -> dict[str, Any]:
    """Return what recall at one cut is over places: its mean, its worst, how far places differ."""
    recalls = [_recalls(rows, cut) for rows in columns]
    means = [mean(found) for found in recalls]
    table = list(zip(*recalls, strict=True))

    def interval(statistic: Callable[[Sequence[float]], float]) -> list[float]:
        return list(bootstrap_interval(table, statistic))

    differences = [first - last for first, last in zip(recalls[0], recalls[-1], strict=True)]
    return {
        "mean": mean(means),
        "mean_ci95": interval(mean),
        "worst": min(means),
        "worst_ci95": interval(min),
        "spread": _spread(means),
        "spread_ci95": interval(_spread),
        "first_minus_last": {
            "difference": mean(differences),
            "ci95": list(difference_interval(differences)),
            "p": randomisation_p(differences),
        },
    }


def _recalls(rows: Iterable[GoldRank], cut: int) -> list[float]:
    return [float(row.gold_rank is not None and row.gold_rank < cut) for row in rows]


def _spread(means: Sequence[float]) -> float:
    return max(means) - min(means)
