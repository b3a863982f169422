"""Rankings of a first stage or a reranker, their journal, and rerankers by name with a count of their model's work.

Measures of rankings by ir-measures over pytrec-eval, with intervals, costs and paired comparisons.

Reranking in experiments: a reranker that fails is an error, and never leaves the documents in their order.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from langchain_core.documents import BaseDocumentCompressor, Document

from rag_posfix.contracts.answer import collected_warnings
from rag_posfix.contracts.method_spec import MethodSpec, parse_method
from rag_posfix.contracts.retrieval import Reranker
from rag_posfix.errors import ConfigError, EvaluationError, RerankingError, missing_extra
from rag_posfix.evaluation.data.collection import Qrels, Run, Topic, decreasing, write_run
from rag_posfix.evaluation.record import LineJournal, Progress, file_digest, silent
from rag_posfix.evaluation.statistics import compare_all, difference_interval, mean
from rag_posfix.reranking import RERANKERS
from rag_posfix.reranking.build import RerankerModels, build_reranker
from rag_posfix.retrieval.embeddings import embedding_identity
from rag_posfix.text import content_hash

if TYPE_CHECKING:
    from ir_measures.measures import Measure

__all__ = ["RerankerChoice"]


def rerank_or_raise(
    reranker: Reranker, documents: Sequence[Document], question: str, *, label: str, query: str
) -> Sequence[Document]:
    """Return what a reranker returns; ``label`` and ``query``, the question's id, are for messages.

    Raises:
        RerankingError: it failed or was late.
    """
    with collected_warnings() as warnings:
        try:
            returned = reranker.compress_documents(documents, question)
        except Exception as error:
            raise RerankingError(
                f"{label} failed on query {query!r} ({type(error).__name__}: {error}); what was ranked before is kept"
            ) from error
    if warnings:
        raise RerankingError(f"{label} failed on query {query!r}: {warnings[0]}; what was ranked before is kept")
    return returned


KEY_VERSION = 2
"""2: prompts have the tokens of the stock model."""

RerankerChoice = MethodSpec
"""A reranker by name, with its parameters."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents for one query, best first.

    Attributes:
        ids: Their ids.
        scores: Their scores, not increasing.
        seconds: Time to rank them.
        calls: Answers that the model was asked to write, where the reranker counts them (``generations``).
        forward_passes: Forward passes of the generator, 0 where there is none.
        tokens_read: Tokens in these, padding included.
    """

    ids: tuple[str, ...]
    scores: tuple[float, ...]
    seconds: float
    calls: int | None = None
    forward_passes: int = 0
    tokens_read: int = 0

    def cost(self) -> dict[str, Any]:
        """Return what the ranking cost: all but documents and scores."""
        names = ("seconds", "calls", "forward_passes", "tokens_read")
        return {name: getattr(self, name) for name in names}


_NAMES = {field.name for field in fields(Ranking)}


@dataclass(frozen=True, slots=True)
class QueryCandidates:
    """A query and the documents that are reranked for it.

    Attributes:
        query: The query's id.
        question: Its text.
        documents: As the first stage ordered them, with ``metadata["relevance_score"]`` in [0, 1] where it scores.
    """

    query: str
    question: str
    documents: tuple[Document, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RankedTopics:
    """The rankings of one system.

    Attributes:
        label: Names it.
        rankings: By query id, in the order of the topics; a ranking may be empty.
        reused: Queries with a ranking from an earlier run.
    """

    label: str
    rankings: Mapping[str, Ranking]
    reused: frozenset[str]

    def run(self) -> dict[str, dict[str, float]]:
        """Return scores as written and measured: strictly decreasing within each query, without empty queries."""
        return {
            query: dict(zip(ranking.ids, decreasing(ranking.scores), strict=True))
            for query, ranking in self.rankings.items()
            if ranking.ids
        }


class RankJournal(LineJournal[Ranking]):
    """Rankings by key, in memory and, with a path, in a file that only grows (see ``LineJournal``).

    Args:
        fresh: Start without the rankings of earlier runs. They stay in the file.
    """

    def __init__(self, path: Path | None = None, *, fresh: bool = False) -> None:
        super().__init__("ranking", _read_ranking, path, fresh=fresh)


def _read_ranking(row: Any) -> Ranking | None:
    ids, scores, seconds = row["ids"], row["scores"], row["seconds"]
    counts = [row["forward_passes"], row["tokens_read"], *([] if row["calls"] is None else [row["calls"]])]
    complete = (
        set(row) == _NAMES
        and len(ids) == len(scores)
        and all(isinstance(name, str) for name in ids)
        and all(isinstance(score, float) for score in (*scores, seconds))
        and all(isinstance(count, int) for count in counts)
    )
    return Ranking(**{**row, "ids": tuple(ids), "scores": tuple(scores)}) if complete else None


def retrieval_key(identity: str, question: str, depth: int) -> str:
    """Return a digest of everything that a ranking of the first stage with this ``identity`` depends on."""
    return content_hash(json.dumps([KEY_VERSION, "retrieve", identity, question, depth]))


def rerank_key(identity: str, candidates: QueryCandidates) -> str:
    """Return a digest of everything that a ranking of the reranker with this ``identity`` depends on."""
    documents = [
        [d.id, d.metadata.get("title", ""), d.page_content, d.metadata.get("relevance_score")]
        for d in candidates.documents
    ]
    return content_hash(json.dumps([KEY_VERSION, "rerank", identity, candidates.question, documents]))


def checked_ranking(
    label: str, query: str, candidates: Sequence[Document], returned: Sequence[Document]
) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return ids and scores of the returned documents, highest score first, equal scores as they were returned."""
    candidate_ids = {document.id for document in candidates}
    scores: dict[str, float] = {}
    for document in returned:
        name = str(document.id)
        if document.id not in candidate_ids or name in scores:
            problem = "twice" if name in scores else "that it was not given"
            raise EvaluationError(f"{label} returned document {document.id!r} of query {query!r} {problem}")
        score = (document.metadata or {}).get("relevance_score")
        if not isinstance(score, int | float) or isinstance(score, bool) or not math.isfinite(score):
            raise EvaluationError(
                f"{label} scored document {name!r} of query {query!r} {score!r}; metadata['relevance_score'] must be "
                "a finite number"
            )
        scores[name] = float(score)
    ranked = sorted(scores.items(), key=lambda pair: -pair[1])
    return tuple(name for name, _ in ranked), tuple(score for _, score in ranked)


def relevance(scores: Sequence[float]) -> list[float]:
    """Return scores of one query, from best to worst, as relevance in [0, 1], the input of rerankers.

    Scores in [0, 1] stay. Others that are not negative are divided by the highest; with a negative one among them only
    the order is kept: 1, (n - 1) / n, ..., 1 / n.
    """
    if all(0.0 <= score <= 1.0 for score in scores):
        return list(scores)
    if min(scores) >= 0.0:
        return [score / max(scores) for score in scores]
    return [1.0 - index / len(scores) for index in range(len(scores))]


def rank_missing(
    label: str,
    queries: Sequence[str],
    keys: Sequence[str],
    rank: Callable[[Sequence[int]], Iterable[tuple[int, Ranking]]],
    journal: RankJournal,
    report: Callable[[int, int], None],
) -> RankedTopics:
    """Rank every query without a ranking in the journal; each new ranking is added to it at once.

    Args:
        rank: Yields (index, ranking) of the queries with these numbers, in any order.
    """
    rankings = {number: ranking for number, key in enumerate(keys) if (ranking := journal.get(key)) is not None}
    reused = frozenset(queries[number] for number in rankings)
    missing = [number for number in range(len(keys)) if number not in rankings]
    report(len(rankings), len(keys))
    for index, ranking in rank(missing):
        number = missing[index]
        journal.add(keys[number], ranking)
        rankings[number] = ranking
        report(len(rankings), len(keys))
    return RankedTopics(label, {query: rankings[number] for number, query in enumerate(queries)}, reused)


@dataclass(frozen=True, slots=True, eq=False)
class OpenedReranker:
    """A reranker with its loaded model.

    Attributes:
        label: Name and parameters.
        identity: Digest of the reranker, its parameters and its weights.
        reranker: The reranker.
    """

    label: str
    identity: str
    reranker: Reranker


@dataclass(frozen=True, slots=True, eq=False)
class Ranker:
    """A reranker and where it runs.

    Attributes:
        label: Names it in results.
        identity: All that its rankings depend on besides the candidates.
        rank_all: Yields (index, ranking) of queries, in any order.
    """

    label: str
    identity: str
    rank_all: Callable[[Sequence[QueryCandidates]], Iterable[tuple[int, Ranking]]]


def check_rerankers(choices: Sequence[RerankerChoice]) -> None:
    """Check names and parameters without making a reranker: errors are reported before a model is loaded."""
    labels = [choice.label for choice in choices]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"reranker {label!r} occurs twice with the same parameters; remove one of them")
    for choice in choices:
        RERANKERS.check(choice)


def open_reranker(choice: RerankerChoice, models: RerankerModels) -> OpenedReranker:
    """Return a reranker with its loaded model."""
    reranker = build_reranker(choice, models)
    return OpenedReranker(choice.label, reranker_identity(choice.name, reranker), reranker)


def reranker_identity(name: str, reranker: BaseDocumentCompressor) -> str:
    """Return a digest of a reranker, its parameters and its weights."""
    values = reranker.model_dump(mode="json", include=set(RERANKERS.parameters(name)))
    models = {}
    for field in RerankerModels.__slots__:
        if field in type(reranker).model_fields:
            model: Any = getattr(reranker, field)
            fingerprint = getattr(model, "fingerprint", None)
            device = getattr(getattr(model, "loaded", None), "device", "")
            models[field] = f"{fingerprint} {device}" if isinstance(fingerprint, str) else embedding_identity(model)
    named = [parse_method(text, "reranker", "top_n=5") for text in values.get("scorers") or ()]
    folders = _folder_digests(named if "generator" in models else [MethodSpec(name, values)])
    identity = [name, values, models, *([folders] if folders else [])]
    return content_hash(json.dumps(identity, sort_keys=True))


def _folder_digests(specs: Sequence[MethodSpec]) -> dict[str, str]:
    """Return digests of the folders that rerankers name as their models, whose weights may change in training."""
    digests: dict[str, str] = {}
    for spec in specs:
        model = spec.parameters.get("model")
        if isinstance(model, str) and Path(model).is_dir():
            files = sorted(path for path in Path(model).rglob("*") if path.is_file())
            digests[model] = content_hash(*(f"{path.relative_to(model)} {file_digest(path)}" for path in files))
    return digests


def rerank_one(opened_reranker: OpenedReranker, candidates: QueryCandidates) -> Ranking:
    """Rank copies of the candidates of one query; without candidates the reranker is not called."""
    if not candidates.documents:
        return Ranking((), (), 0.0)
    reranker = opened_reranker.reranker
    copies = [Document(id=d.id, page_content=d.page_content, metadata=dict(d.metadata)) for d in candidates.documents]
    before = getattr(reranker, "generations", None)
    with count_work(getattr(reranker, "generator", None)) as work:
        started = time.perf_counter()
        returned = rerank_or_raise(
            reranker, copies, candidates.question, label=opened_reranker.label, query=candidates.query
        )
        seconds = time.perf_counter() - started
    ids, scores = checked_ranking(opened_reranker.label, candidates.query, candidates.documents, returned)
    after = getattr(reranker, "generations", None)
    calls = after - before if isinstance(before, int) and isinstance(after, int) else None
    return Ranking(ids, scores, seconds, calls, work.forward_passes, work.tokens)


def local_ranker(opened_reranker: OpenedReranker) -> Ranker:
    """Return a ranker that runs a reranker in this process, one query after the other."""

    def rank_all(queries: Sequence[QueryCandidates]) -> Iterator[tuple[int, Ranking]]:
        for index, candidates in enumerate(queries):
            yield index, rerank_one(opened_reranker, candidates)

    return Ranker(opened_reranker.label, opened_reranker.identity, rank_all)


def rerank(
    ranker: Ranker, queries: Sequence[QueryCandidates], journal: RankJournal, progress: Progress = silent
) -> RankedTopics:
    """Rank the candidates of every query without a ranking in the journal."""

    def rank(missing: Sequence[int]) -> Iterable[tuple[int, Ranking]]:
        return ranker.rank_all([queries[number] for number in missing])

    ids = [candidates.query for candidates in queries]
    keys = [rerank_key(ranker.identity, candidates) for candidates in queries]
    with progress(ranker.label) as report:
        return rank_missing(ranker.label, ids, keys, rank, journal, report)


@dataclass(slots=True)
class ModelWork:
    """The forward passes of a generator for all callers, and the tokens in them, padding included."""

    forward_passes: int = 0
    tokens: int = 0


@contextmanager
def count_work(generator: object | None) -> Iterator[ModelWork]:
    """Count the work of ``generator`` during the block; zero without a model in this process."""
    work = ModelWork()
    model = getattr(getattr(generator, "loaded", None), "model", None)
    if model is None:
        yield work
        return

    def count(_module: Any, _arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        token_ids = named.get("input_ids")
        work.forward_passes += 1
        work.tokens += 0 if token_ids is None else int(token_ids.numel())

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield work
    finally:
        handle.remove()


DEFAULT_MEASURES = ("nDCG@10", "RR@10", "R@10", "P@1")

Measures: TypeAlias = "Sequence[Measure]"
"""What to compute, as ``parse_measures`` returns it."""

MeasureValues = dict[str, dict[str, float]]
"""Measure -> query id -> value."""


def parse_measures(text: str = "") -> list[Measure]:
    """Return the default measures and those of ``text``, each once.

    Args:
        text: Names of ir-measures, separated by commas: ``AP``, ``Success@5``, ``P(rel=2)@5``.
    """
    irm = _import()
    names = [*DEFAULT_MEASURES, *(name.strip() for name in re.split(r",(?![^()]*\))", text) if name.strip())]
    measures: dict[str, Measure] = {}
    for name in names:
        measure = _parse(irm, name)
        measures.setdefault(str(measure), measure)
    return list(measures.values())


def compute_measures(measures: Measures, qrels: Qrels, run: Run) -> MeasureValues:
    """Return the value of each measure for each judged query.

    Measures are defined by trec_eval: nDCG has linear gains and log2 discounts, grades of 1 and above are relevant in
    the other measures, documents without judgement are not relevant, and recall includes judged documents that are not
    in the collection. A judged query without a ranking scores 0 and counts in every mean, as with ``trec_eval -c``.
    """
    irm = _import()
    scores = {query: dict(ranked) for query, ranked in run.items() if ranked}
    try:
        evaluator = irm.evaluator(list(measures), {query: dict(grades) for query, grades in qrels.items()})
        values: MeasureValues = {str(measure): {} for measure in measures}
        for metric in evaluator.iter_calc(scores):
            values[str(metric.measure)][metric.query_id] = float(metric.value)
    except Exception as error:  # programs outside of this one compute some measures, each failing in its own way
        names = ", ".join(map(str, measures))
        raise EvaluationError(f"ir-measures failed on {names} ({type(error).__name__}: {error})") from error
    for name, column in values.items():
        for query in qrels:
            if not math.isfinite(column.get(query, math.nan)):
                raise EvaluationError(f"measure {name} has no value for query {query!r}; leave the measure out")
    return {name: {query: column[query] for query in qrels} for name, column in values.items()}


def _parse(irm: Any, name: str) -> Measure:
    try:
        measure: Any = irm.parse_measure(name)
        measure.validate_params()
        if measure.params.get("cutoff", 1) < 1:
            raise ValueError("the cutoff must be at least 1")  # pytrec-eval ends the process over 0
        irm.evaluator([measure], {})
    except NameError as error:
        near = difflib.get_close_matches(re.split(r"[@(]", name)[0], list(irm.measures.registry), n=3, cutoff=0.5)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(f"unknown measure {name!r}.{hint} ir-measures lists what there is") from error
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"measure {name!r} cannot be computed ({error}); write it as nDCG@10 or P(rel=2)@5, and install what "
            "ir-measures needs for it"
        ) from error
    parsed: Measure = measure
    return parsed


def _import() -> Any:
    try:
        import ir_measures
        import pytrec_eval  # noqa: F401
    except ImportError as error:
        raise missing_extra(str(error.name), "eval") from error
    return ir_measures


@dataclass(frozen=True, slots=True, eq=False)
class EvaluatedRun:
    """The rankings of one system, their measures, and the file of the TREC run if one was written."""

    ranked: RankedTopics
    values: MeasureValues
    file: Path | None


def run_files(folder: Path, labels: Sequence[str]) -> dict[str, Path]:
    """Return a file in ``folder`` for the run of each label, no two alike."""
    names: dict[str, Path] = {}
    for label in labels:
        plain = re.sub(r"[^\w.=+-]+", "-", label).strip("-.") or "run"
        number, path = 1, folder / f"{plain}.trec"
        while path in names.values():
            number += 1
            path = folder / f"{plain}-{number}.trec"
        names[label] = path
    return names


def evaluate_run(
    ranked: RankedTopics, topics: Sequence[Topic], measures: Measures, file: Path | None = None
) -> EvaluatedRun:
    """Measure rankings by exactly the scores that a TREC run of them holds, and write that run to ``file``."""
    run = ranked.run()
    if file is not None:
        write_run(file, run, file.stem)
    return EvaluatedRun(ranked, compute_measures(measures, {topic.id: topic.grades for topic in topics}, run), file)


def summarize_run(evaluated: EvaluatedRun) -> dict[str, Any]:
    """Return means over the topics, their intervals, and what a query cost.

    ``seconds``, ``forward_passes``, ``tokens_read`` and ``calls`` are means per query that had candidates; ``calls``
    (answers that the model was asked to write) is None where the reranker does not count them. ``ci95`` is the
    interval of each mean, queries resampled. ``run_file`` is the name of the TREC run, None where none was written.
    """
    rankings = list(evaluated.ranked.rankings.values())
    ranked = [ranking for ranking in rankings if ranking.ids]
    seconds = [ranking.seconds for ranking in ranked]
    calls = [float(ranking.calls) for ranking in ranked if ranking.calls is not None]
    values = {name: list(by_query.values()) for name, by_query in evaluated.values.items()}
    return {
        **{name: mean(scores) for name, scores in values.items()},
        "seconds": mean(seconds),
        "run_file": None if evaluated.file is None else evaluated.file.name,
        "run_sha256": None if evaluated.file is None else file_digest(evaluated.file),
        "ci95": {name: list(difference_interval(scores)) for name, scores in values.items()},
        "seconds_median": statistics.median(seconds) if seconds else 0.0,
        "calls": mean(calls) if calls else None,
        "forward_passes": mean([float(ranking.forward_passes) for ranking in ranked]),
        "tokens_read": mean([float(ranking.tokens_read) for ranking in ranked]),
        "queries": len(rankings),
        "queries_without_documents": len(rankings) - len(ranked),
        "reused": len(evaluated.ranked.reused),
    }


def compare_runs(runs: Sequence[EvaluatedRun]) -> list[dict[str, Any]]:
    """Return the comparison of every run with each before it, by every measure (see ``Comparison``)."""
    return [
        asdict(comparison)
        for name in runs[0].values
        for comparison in compare_all(name, {run.ranked.label: list(run.values[name].values()) for run in runs})
    ]


def per_query(runs: Sequence[EvaluatedRun], topics: Sequence[Topic]) -> Iterator[dict[str, Any]]:
    """Yield one row per system and query: its measures, its cost and its ranking."""
    for run in runs:
        for topic in topics:
            ranking = run.ranked.rankings[topic.id]
            yield {
                "query": topic.id,
                "run": run.ranked.label,
                **{name: values[topic.id] for name, values in run.values.items()},
                **ranking.cost(),
                "documents": list(ranking.ids),
                "reused": topic.id in run.ranked.reused,
            }
