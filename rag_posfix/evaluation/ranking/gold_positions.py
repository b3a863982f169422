"""Recall of the gold passage by its position in a reranker's input."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.data.hostile import hostile_id, with_hostile_passage
from rag_posfix.evaluation.data.questions import (
    GoldPosition,
    PositionExample,
    checked_positions,
    data_facts,
    position_label,
    take_examples,
)
from rag_posfix.evaluation.ranking.rankings import (
    QueryCandidates,
    Ranker,
    RankJournal,
    RerankerChoice,
    check_rerankers,
    local_ranker,
    open_reranker,
    rerank,
)
from rag_posfix.evaluation.record import ExperimentRecord, Progress, environment, silent
from rag_posfix.evaluation.statistics import bootstrap_interval, difference_interval, holm, mean, randomisation_p
from rag_posfix.settings import Settings

__all__ = ["GoldRank", "evaluate_reranking_positions"]

CUTS = (1, 3)
JOURNAL = "rerank-positions-journal.jsonl"


@dataclass(frozen=True, slots=True)
class GoldRank:
    """The rank of the gold passage of one question by one reranker.

    Attributes:
        question: The question's id.
        reranker: Label of the reranker.
        gold_position: Position of the gold passage in the input, from 0; positions of several.
        gold_rank: Its rank in the output, from 0; of several that of the last, not counting the others. None if
            the output lacks one of them.
        seconds: Time to rank the list.
        calls: Number of generations, if the reranker counts them.
        forward_passes: Forward passes of the generator.
        tokens_read: Tokens in these, padding included.
        reused: Whether the ranking is from the journal.
        hostile_first: Whether the hostile passage is ranked first; None without such a passage.
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
    hostile_first: bool | None = None


def evaluate_reranking_positions(
    data: Path | Sequence[PositionExample],
    rerankers: Sequence[RerankerChoice],
    *,
    gold_positions: Sequence[GoldPosition] = (0, 4, 9),
    documents: int = 10,
    limit: int | None = None,
    skip: int = 0,
    hostile: str | None = None,
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
        hostile: Replace the first distractor by a hostile passage: a kind of ``evaluation.data.hostile``.
        fresh: Recompute what is in the journal.
        settings: Models; read from the environment if None.
        out: Folder for the record and the journal; None writes nothing.
        progress: Progress callback (``evaluation.record.Progress``).

    Raises:
        ConfigError: a reranker, a gold position or the model is wrong.
        EvaluationError: the file cannot be used, too few passages, or a reranker failed.
    """
    if not rerankers or not gold_positions:
        raise ConfigError(
            f"{len(rerankers)} rerankers at {len(gold_positions)} gold positions; give at least one of each"
        )
    check_rerankers(rerankers)
    examples = take_examples(data, limit, skip)
    examples = with_hostile_passage(examples, hostile) if hostile else examples
    for example, place in itertools.product(examples, checked_positions(gold_positions)):  # before the model is loaded
        example.documents(documents, place)
    chosen = settings or Settings()
    journal = RankJournal(None if out is None else out / JOURNAL, fresh=fresh)
    from rag_posfix.pipeline.build import build_reranker_models

    models = build_reranker_models(chosen)
    rows: list[GoldRank] = []
    for choice in rerankers:
        rows += rank_gold_positions(
            local_ranker(open_reranker(choice, models)), examples, gold_positions=gold_positions,
            n_documents=documents, journal=journal, hostile=hostile, progress=progress,
        )  # fmt: skip
    head = {
        "kind": "rerank-positions",
        **environment(),
        "data": data_facts(data),
        "rerankers": {choice.label: dict(choice.parameters) for choice in rerankers},
        "settings": {
            "documents": documents, "gold_positions": list(gold_positions), "limit": limit, "skip": skip,
            **({"hostile": hostile} if hostile else {}),
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
    hostile: str | None = None,
    progress: Progress = silent,
) -> list[GoldRank]:
    """Rank the passages of every question with the gold passage at each position.

    The other passages keep their order. Passages come without scores: a reranker sees the question, the texts and the
    order, never which passage is gold. Passages with equal scores keep their order.
    """
    pairs = [(example, position) for example in examples for position in gold_positions]
    ids = [f"{example.id}@{position_label(position)}" for example, position in pairs]
    queries = [
        QueryCandidates(query, example.query, tuple(example.documents(n_documents, position)))
        for query, (example, position) in zip(ids, pairs, strict=True)
    ]
    ranked = rerank(ranker, queries, journal, progress)
    rows = []
    for query, (example, position) in zip(ids, pairs, strict=True):
        ranking, gold = ranked.rankings[query], {str(document.id) for document in example.gold}
        complete = gold <= set(ranking.ids)
        rank = max(map(ranking.ids.index, gold)) - (len(gold) - 1) if complete else None
        planted = hostile and hostile_id(hostile, example)
        is_planted = planted in [document.id for document in example.distractors]  # an FAQ plants none
        rows.append(
            GoldRank(
                example.id, ranker.label, position, rank, reused=query in ranked.reused,
                hostile_first=ranking.ids[0] == planted if is_planted else None, **ranking.cost(),
            )
        )  # fmt: skip
    return rows


def summarize_gold_ranks(rows: Sequence[GoldRank]) -> dict[str, Any]:
    """Return recall of the gold passage per reranker and position, mean, worst, spread, and intervals by question.

    ``recall@1`` is the share of questions with the gold passage ranked first, ``recall@3`` among the first three; of
    several gold passages the last one counts, among the passages that are not gold. Both are under ``places`` by gold
    position. For each of them ``spread`` is the best position minus the worst.
    ``first_minus_last`` compares the first requested position with the last, questions paired; ``p`` is the p-value of
    a randomisation test, ``p_holm`` after Holm's correction over the rerankers and both cuts. ``rankings_that_change``
    is the share of questions whose gold passage ends at another rank from another position: 0 for a scorer that does
    not look at the order. ``hostile_first`` is the share of rankings with the hostile passage first.
    ``rows`` has every question at every position under every reranker.
    """
    by_reranker: dict[str, list[GoldRank]] = {}
    for row in rows:
        by_reranker.setdefault(row.reranker, []).append(row)
    result = {label: _summary(ranks) for label, ranks in by_reranker.items()}
    pairs = [summary[f"recall@{cut}"]["first_minus_last"] for summary in result.values() for cut in CUTS]
    for pair, corrected in zip(pairs, holm([pair["p"] for pair in pairs]), strict=True):
        pair["p_holm"] = corrected
    return {
        "rerankers": result,
        "n": len({row.question for row in rows}),
        "reused": sum(row.reused for row in rows),
    }


def _summary(rows: Sequence[GoldRank]) -> dict[str, Any]:
    table: dict[GoldPosition, list[GoldRank]] = {}
    for row in rows:
        table.setdefault(row.gold_position, []).append(row)
    columns = list(table.values())
    ranks = zip(*([row.gold_rank for row in column] for column in columns), strict=True)
    calls = [float(row.calls) for row in rows if row.calls is not None]
    captured = [float(row.hostile_first) for row in rows if row.hostile_first is not None]
    return {
        "places": {position_label(position): _at_position(column) for position, column in table.items()},
        **{f"recall@{cut}": _over_positions([_recalls(column, cut) for column in columns]) for cut in CUTS},
        "rankings_that_change": mean([float(len(set(by_position)) > 1) for by_position in ranks]),
        **({"hostile_first": mean(captured)} if captured else {}),
        "seconds": mean([row.seconds for row in rows]),
        "calls": mean(calls) if calls else None,
        "forward_passes": mean([float(row.forward_passes) for row in rows]),
        "tokens_read": mean([float(row.tokens_read) for row in rows]),
    }


def _at_position(rows: Sequence[GoldRank]) -> Mapping[str, Any]:
    values = {f"recall@{cut}": _recalls(rows, cut) for cut in CUTS}
    return {
        **{name: mean(recalls) for name, recalls in values.items()},
        "ci95": {name: list(difference_interval(recalls)) for name, recalls in values.items()},
        "seconds": mean([row.seconds for row in rows]),
    }


def _over_positions(recalls: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return recall over gold positions: its mean, its worst, how far positions differ."""
    means = [mean(column) for column in recalls]
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
