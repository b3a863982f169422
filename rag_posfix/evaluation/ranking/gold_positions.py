"""Recall of the gold passage by its position in a reranker's input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.data.datasets import data_facts, take_examples
from rag_posfix.evaluation.data.position_example import GoldPosition, PositionExample, position_label
from rag_posfix.evaluation.progress import Progress, silent
from rag_posfix.evaluation.ranking.rankings import QueryCandidates, Ranking, RankJournal
from rag_posfix.evaluation.ranking.rerankers import (
    Ranker,
    RerankerChoice,
    check_distinct,
    check_reranker_choice,
    local_ranker,
    open_reranker,
    rerank,
)
from rag_posfix.evaluation.record import ExperimentRecord, environment
from rag_posfix.evaluation.statistics import (
    bootstrap_interval,
    difference_interval,
    holm,
    mean,
    randomisation_p,
)
from rag_posfix.settings import Settings

__all__ = [
    "JOURNAL",
    "GoldRank",
    "evaluate_reranking_positions",
    "rank_gold_positions",
    "summarize_gold_ranks",
]

CUTS = (1, 3)
JOURNAL = "rerank-positions-journal.jsonl"


@dataclass(frozen=True, slots=True)
class GoldRank:
    """The rank of the gold passage of one question by one reranker.

    Attributes:
        question: The question's id.
        reranker: Label of the reranker.
        gold_position: Position of the gold passage in the input, from 0; positions of several.
        gold_rank: Its rank in the output, from 0; None if it is not in the output.
        seconds: Time to rank the list.
        calls: Number of generations, if the reranker counts them.
        forward_passes: Forward passes of the generator.
        tokens_read: Tokens in these, padding included.
        reused: Whether the ranking is from the journal.
    """

    question: str
    reranker: str
    gold_position: GoldPosition
    gold_rank: int | None
    seconds: float
    calls: int | None
    forward_passes: int
    tokens_read: int
    reused: bool


def evaluate_reranking_positions(
    data: Path | Sequence[PositionExample],
    rerankers: Sequence[RerankerChoice],
    *,
    gold_positions: Sequence[GoldPosition] = (0, 4, 9),
    documents: int = 10,
    limit: int | None = None,
    skip: int = 0,
    fresh: bool = False,
    settings: Settings | None = None,
    out: Path | None = None,
    progress: Progress = silent,
) -> ExperimentRecord:
    """Put the gold passage at each position of the list that a reranker is given: recall@1 and recall@3 per position.

    The record has one row per question, reranker and position (``GoldRank``); ``summarize_gold_ranks`` describes its
    summary. With ``out``, every ranking goes to ``rerank-positions-journal.jsonl`` there as soon as it is made.

    Args:
        data: A file of Lost-in-the-Middle or HotpotQA rows or in SQuAD's format, or questions.
        rerankers: At least one.
        gold_positions: Positions of the gold passage in the list, from 0, each once.
        documents: Number of passages per list.
        limit: Maximum number of questions.
        skip: Number of questions to leave out at the start.
        fresh: Recompute what is in the journal.
        settings: Models; read from the environment if None.
        out: Folder for the record and the journal; None writes nothing.
        progress: Progress callback (``evaluation.progress``).

    Raises:
        ConfigError: a reranker, a gold position or the model is wrong.
        EvaluationError: the file cannot be used, too few passages, or a reranker failed.
    """
    if not rerankers or not gold_positions:
        raise ConfigError(
            f"{len(rerankers)} rerankers at {len(gold_positions)} gold positions; give at least one of each"
        )
    if len(set(gold_positions)) < len(gold_positions):
        raise ConfigError(f"gold_positions={list(gold_positions)} has a position twice; remove one of them")
    check_distinct(rerankers)
    for choice in rerankers:
        check_reranker_choice(choice)
    examples = take_examples(data, limit, skip)
    for example in examples:  # before any model: too few distractors are told at once
        for gold_position in gold_positions:
            example.documents(documents, gold_position)
    chosen = settings or Settings()
    journal = RankJournal(None if out is None else out / JOURNAL, fresh=fresh)
    from rag_posfix.pipeline.build import build_reranker_models

    parts = build_reranker_models(chosen)
    rows: list[GoldRank] = []
    for choice in rerankers:
        rows += rank_gold_positions(
            local_ranker(open_reranker(choice, parts)), examples, gold_positions=gold_positions,
            n_documents=documents, journal=journal, progress=progress,
        )  # fmt: skip
    head = {
        "kind": "rerank-positions",
        **environment(),
        "data": data_facts(data),
        "rerankers": {choice.label: dict(choice.parameters) for choice in rerankers},
        "settings": {
            "documents": documents, "gold_positions": list(gold_positions), "limit": limit, "skip": skip,
            "model": chosen.model, "embedding_model": chosen.embedding_model, "dtype": chosen.dtype,
            "device": chosen.device, "rankings_of_earlier_runs_by": journal.sources,
        },
        "summary": summarize_gold_ranks(rows),
    }  # fmt: skip
    return ExperimentRecord(head, [asdict(row) for row in rows]).write(out)


def rank_gold_positions(
    ranker: Ranker,
    examples: Sequence[PositionExample],
    *,
    gold_positions: Sequence[GoldPosition],
    n_documents: int,
    journal: RankJournal,
    progress: Progress = silent,
) -> list[GoldRank]:
    """Rank the passages of every question with the gold passage at each position.

    The other passages keep their order. Passages come without scores: a reranker sees the question, the texts and the
    order, nothing that tells which passage is gold. Passages with equal scores keep the order that came in.

    Args:
        gold_positions: Positions of the gold passage, from 0.
        n_documents: Number of passages per list.
        journal: Rankings of earlier runs, and where new ones go.
        progress: Progress callback (``evaluation.progress``).

    Raises:
        EvaluationError: too few passages, a position outside of the list, or the reranker failed.
    """
    asked = [(example, position) for example in examples for position in gold_positions]
    queries = [
        QueryCandidates(
            f"{example.id}@{position_label(position)}",
            example.question,
            tuple(example.documents(n_documents, position)),
        )
        for example, position in asked
    ]
    found = rerank(ranker, queries, journal, progress)
    return [
        _gold_rank(ranker.label, example, position, found.rankings[query.query], query.query in found.reused)
        for (example, position), query in zip(asked, queries, strict=True)
    ]


def summarize_gold_ranks(rows: Sequence[GoldRank]) -> dict[str, Any]:
    """Return recall of the gold passage per reranker and position, mean, worst, spread, and intervals by question.

    ``recall@1`` is the share of questions whose gold passage is ranked first, ``recall@3`` among the first three; they
    stand under ``places`` by gold position. For each of them ``spread`` is the best position minus the worst.
    ``first_minus_last`` compares the first position asked for with the last, questions paired, and ``p`` is that of a
    randomisation test, ``p_holm`` after Holm's correction over the rerankers and both cuts. ``rankings_that_change``
    is the share of questions whose gold passage ends at another rank from another position: 0 for a scorer that does
    not look at the order.

    Args:
        rows: Every question at every position under every reranker.
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


def _gold_rank(
    label: str, example: PositionExample, position: GoldPosition, ranking: Ranking, reused: bool
) -> GoldRank:
    gold = {str(one.id) for one in example.gold}
    cost = {name: value for name, value in asdict(ranking).items() if name not in ("ids", "scores")}
    rank = max(map(ranking.ids.index, gold)) if gold <= set(ranking.ids) else None
    return GoldRank(example.id, label, position, rank, reused=reused, **cost)


def _summary(rows: Sequence[GoldRank]) -> dict[str, Any]:
    table: dict[GoldPosition, list[GoldRank]] = {}
    for row in rows:
        table.setdefault(row.gold_position, []).append(row)
    ranks = zip(*([row.gold_rank for row in found] for found in table.values()), strict=True)
    calls = [float(row.calls) for row in rows if row.calls is not None]
    return {
        "places": {position_label(position): _at_position(found) for position, found in table.items()},
        **{f"recall@{cut}": _over_positions(list(table.values()), cut) for cut in CUTS},
        "rankings_that_change": mean([float(len(set(found)) > 1) for found in ranks]),
        "seconds": mean([row.seconds for row in rows]),
        "calls": mean(calls) if calls else None,
        "forward_passes": mean([float(row.forward_passes) for row in rows]),
        "tokens_read": mean([float(row.tokens_read) for row in rows]),
    }


def _at_position(rows: Sequence[GoldRank]) -> Mapping[str, Any]:
    values = {f"recall@{cut}": _recalls(rows, cut) for cut in CUTS}
    return {
        **{name: mean(found) for name, found in values.items()},
        "ci95": {name: list(difference_interval(found)) for name, found in values.items()},
        "seconds": mean([row.seconds for row in rows]),
    }


def _over_positions(columns: Sequence[Sequence[GoldRank]], cut: int) -> dict[str, Any]:
    """Return what recall at one cut is over gold positions: its mean, its worst, how far positions differ."""
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
