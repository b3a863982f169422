"""Reranking experiment on a test collection: runs, measures, paired tests, a record, a figure and a page.

Recall of the gold passage by its position in a reranker's input.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_posfix.contracts.method_spec import MethodSpec, parse_method
from rag_posfix.errors import ConfigError, UnknownNameError
from rag_posfix.evaluation.data.collection import (
    BeirFiles,
    beir_files,
    load_collection,
    load_topics,
    write_text,
)
from rag_posfix.evaluation.data.questions import (
    GoldPosition,
    PositionExample,
    checked_positions,
    data_facts,
    hostile_id,
    position_label,
    take_examples,
    with_hostile_passage,
)
from rag_posfix.evaluation.figures import CAPTIONS, check_matplotlib, draw_runs, with_figure
from rag_posfix.evaluation.pages import html_figure, html_page, html_table
from rag_posfix.evaluation.ranking.first_stage import (
    FIRST_STAGE,
    FIRST_STAGES,
    candidates_of,
    open_first_stage,
    retrieve,
    run_as_first_stage,
)
from rag_posfix.evaluation.ranking.rankings import (
    EvaluatedRun,
    OpenedReranker,
    QueryCandidates,
    Ranker,
    Ranking,
    RankJournal,
    RerankerChoice,
    check_rerankers,
    compare_runs,
    evaluate_run,
    local_ranker,
    open_reranker,
    parse_measures,
    per_query,
    rerank,
    rerank_one,
    run_files,
    summarize_run,
)
from rag_posfix.evaluation.ray_map import connect_ray, ray_map
from rag_posfix.evaluation.record import ExperimentRecord, Progress, environment, file_digest, silent
from rag_posfix.evaluation.statistics import bootstrap_interval, difference_interval, holm, mean, randomisation_p
from rag_posfix.settings import Settings

if TYPE_CHECKING:
    from rag_posfix.reranking.build import RerankerModels

__all__ = ["GoldRank", "RerankingRecord", "evaluate_reranking", "evaluate_reranking_positions"]


RerankerOpener = Callable[[RerankerChoice, Settings], OpenedReranker]

QUERIES_PER_CALL = 4

_MAX_QUERIES = 100


def render_page(head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], figure: bytes) -> str:
    """Return the page of a record of ``evaluate_reranking``, with its figure as PNG."""
    summary, settings = head["summary"], head["settings"]
    runs = {FIRST_STAGE: summary["first_stage"], **summary["runs"]}
    measures = list(summary["first_stage"]["ci95"])
    said = (
        f"{head['at']}: {summary['n']} topics of {head['data']['corpus']['name']}, "
        f"{settings['depth']} candidates each from {settings['first_stage']}."
    )
    pairs = {"What the files hold": head["counts"], "Settings": settings, "Versions": head["versions"]}
    sections = [
        f"<h1>Reranking evaluation</h1>\n<p>{escape(said)}</p>",
        _runs_table(runs, measures),
        html_figure(figure, "Measures of each run, and quality against time"),
        _comparisons_table(summary["significance"]),
        _queries_table(rows, list(runs), measures[0]),
        *(html_table([("name", "value"), *values.items()], title) for title, values in pairs.items()),
    ]
    return html_page("Reranking evaluation", sections)


def _runs_table(runs: Mapping[str, Mapping[str, Any]], measures: Sequence[str]) -> str:
    rows = [["run", *measures, "seconds per query", "calls", "tokens read"]]
    for label, run in runs.items():
        values = [f"{run[name]:.3f} ({run['ci95'][name][0]:.3f} to {run['ci95'][name][1]:.3f})" for name in measures]
        calls = "" if run["calls"] is None else f"{run['calls']:.1f}"
        rows.append([label, *values, f"{run['seconds']:.3f}", calls, f"{run['tokens_read']:.0f}"])
    return html_table(rows, "Mean over topics (95 % interval)")


def _comparisons_table(comparisons: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        [
            f"{c['a']} against {c['b']}", c["measure"], f"{c['difference']:+.3f}",
            f"{c['ci95'][0]:+.3f} to {c['ci95'][1]:+.3f}", f"{c['p_randomisation']:.4f}", f"{c['p_t']:.4f}",
            f"{c['p_holm']:.4f}", f"{c['better']} / {c['worse']}",
        ]
        for c in comparisons
    ]  # fmt: skip
    head = ["runs", "measure", "difference", "95 % interval", "p", "p (t-test)", "p (Holm)", "better / worse"]
    title = "Differences, queries paired; p by randomisation, then corrected over all pairs of runs"
    return html_table([head, *rows], title)


def _queries_table(rows: Iterable[Mapping[str, Any]], labels: Sequence[str], measure: str) -> str:
    values: dict[str, dict[str, float]] = {}
    for row in rows:
        values.setdefault(row["query"], {})[row["run"]] = row[measure]
    spread = sorted(values, key=lambda query: min(values[query].values()) - max(values[query].values()))
    cells = [[query, *(f"{values[query][name]:.3f}" for name in labels)] for query in spread[:_MAX_QUERIES]]
    title = f"{measure} per query, the {len(cells)} of {len(values)} queries on which runs differ most first"
    return html_table([["query", *labels], *cells], title)


JOURNAL = "rerank-journal.jsonl"


@dataclass(frozen=True, slots=True, eq=False)
class RerankingRecord(ExperimentRecord):
    """What ``evaluate_reranking`` returns; ``files`` also has the page and the figure."""

    def to_json(self) -> dict[str, Any]:
        """Return the summary with the paths of runs, counts, and the paths of record, page and figure."""
        folder = self.files["record"].parent if "record" in self.files else None

        def located(run: Mapping[str, Any]) -> dict[str, Any]:
            return {**run, "run_file": None if folder is None else str(folder / run["run_file"])}

        return {
            **self.summary,
            "runs": {label: located(run) for label, run in self.summary["runs"].items()},
            "first_stage": located(self.summary["first_stage"]),
            "counts": dict(self.head["counts"]),
            **{name: str(path) for name, path in self.files.items()},
        }


def evaluate_reranking(
    data: Path | BeirFiles,
    rerankers: Sequence[RerankerChoice],
    *,
    first_stage: str | Path = "bm25",
    depth: int = 20,
    measures: str = "",
    limit: int | None = None,
    skip: int = 0,
    binary: bool = False,
    titles: bool = True,
    fresh: bool = False,
    ray: bool = False,
    ray_actors: int = 2,
    settings: Settings | None = None,
    out: Path | None = None,
    progress: Progress = silent,
) -> RerankingRecord:
    """Rerank a first stage's candidates with each reranker and measure the rankings.

    The first stage is asked once per topic and every reranker is given the same candidates. The record has one row per
    run and query; its summary has ``runs``, ``first_stage`` (both as ``summarize_run`` describes), ``significance``
    (``compare_runs``) and ``n``. With ``out``, runs, a figure and a page are written there too, and every ranking
    goes to ``rerank-journal.jsonl`` as soon as it is made: the same call, or one with more topics or rerankers,
    computes only what is missing. Names, parameters,
    measures and files are checked before a model is loaded.

    Args:
        rerankers: All are given the same candidates; none measures the first stage alone.
        first_stage: ``bm25``, ``dense`` or ``hybrid``, with parameters as in ``bm25:k1=1.2``; or the path of a TREC
            run.
        depth: Candidates per topic.
        measures: Measures besides nDCG@10, RR@10, R@10 and P@1, as ir-measures names them, separated by commas.
        limit: Maximum number of judged topics.
        skip: Number of judged topics to leave out at the start.
        binary: Count every grade above 0 as 1.
        titles: Keep titles of documents; without, documents are their text alone.
        fresh: Recompute what is in the journal.
        ray: Rank on a Ray cluster; candidates are retrieved in this process.
        ray_actors: Processes there that hold a reranker.
        settings: Models; read from the environment if None.
        out: Folder for everything that is written; None writes nothing.
        progress: Progress callback (``evaluation.record.Progress``).

    Raises:
        ConfigError: a reranker, a measure or the first stage is wrong, or the extra ``eval`` is not installed.
        EvaluationError: a file is missing or malformed, or a reranker failed on a query.
    """
    chosen = settings or Settings()
    spec = _checked_first_stage(rerankers, first_stage, depth, out)
    parsed = parse_measures(measures)
    files = beir_files(data, None, None) if isinstance(data, Path) else data
    topics, topic_counts = load_topics(files, limit=limit, skip=skip, binary=binary)
    journal = RankJournal(None if out is None else out / JOURNAL, fresh=fresh)

    @functools.cache
    def models() -> RerankerModels:  # loads the model libraries, which BM25 alone does not need
        from rag_posfix.pipeline.build import build_reranker_models

        return build_reranker_models(chosen)

    run, names = run_as_first_stage(first_stage) if isinstance(first_stage, Path) else (None, None)
    collection = load_collection(files.corpus, topics, titles=titles, only=names)
    paths = {} if out is None else run_files(out, [FIRST_STAGE, *(choice.label for choice in rerankers)])
    stage = run or open_first_stage(spec, collection, lambda: models().embeddings(), out, progress)
    first = retrieve(stage, topics, depth, journal, progress)
    candidates = candidates_of(topics, first, collection)
    runs = [evaluate_run(first, topics, parsed, paths.get(FIRST_STAGE))]
    with _rankers(chosen, models, ray_actors if ray else 0) as open_ranker:
        for choice in rerankers:
            ranked = rerank(open_ranker(choice), candidates, journal, progress)
            runs.append(evaluate_run(ranked, topics, parsed, paths.get(choice.label)))
    used = {
        "first_stage": stage.name, "first_stage_parameters": dict(spec.parameters), "depth": depth, "limit": limit,
        "skip": skip, "binary": binary, "titles": titles, "ray": ray, "model": chosen.model,
        "embedding_model": chosen.embedding_model, "dtype": chosen.dtype, "device": chosen.device,
        "rankings_of_earlier_runs_by": journal.sources,
    }  # fmt: skip
    head = {
        "kind": "rerank",
        **environment(),
        "data": _data_facts(files, first_stage),
        "rerankers": {choice.label: dict(choice.parameters) for choice in rerankers},
        "settings": used,
        "counts": {**collection.counts, **topic_counts},
        "summary": summarize_runs(runs, stage.name, len(topics)),
    }
    return _written(RerankingRecord(head, list(per_query(runs, topics))), out)


def _checked_first_stage(
    rerankers: Sequence[RerankerChoice], first_stage: str | Path, depth: int, out: Path | None
) -> MethodSpec:
    """Check names and parameters; return the first stage, without parameters if it is a run."""
    if depth < 1:
        raise ConfigError(f"depth={depth} must be at least 1: candidates per topic")
    spec = MethodSpec("run")
    if not isinstance(first_stage, Path):
        spec = parse_method(first_stage, "first stage", "k1=1.2")
        if spec.name not in FIRST_STAGES:
            names = ", ".join(FIRST_STAGES.names())
            raise UnknownNameError(f"first stage {spec.name!r} must be one of {names}, or the path of a TREC run")
        FIRST_STAGES.check(spec)
    check_rerankers(rerankers)
    if out is not None:
        check_matplotlib()
    return spec


class _Ranking:
    """A reranker, which ranks the candidates of a few queries at a time."""

    def __init__(self, opener: RerankerOpener, choice: RerankerChoice, settings: Settings) -> None:
        self._reranker = opener(choice, settings)

    def identity(self) -> str:
        return self._reranker.identity

    def rank(self, queries: Sequence[QueryCandidates]) -> list[Ranking]:
        return [rerank_one(self._reranker, candidates) for candidates in queries]


@contextmanager
def ray_rankers(
    settings: Settings, actors: int, opener: RerankerOpener | None = None
) -> Iterator[Callable[[RerankerChoice], Ranker]]:
    """Connect to Ray and yield a function that makes rankers there.

    A ranker is used up before the next one is made: its processes end then, and at the end of the block.

    Args:
        actors: Processes that hold a reranker, each with one CPU.
        opener: Makes a reranker in a process; by name from the registry if None.
    """
    with connect_ray() as ray, ExitStack() as running:

        def ranker(choice: RerankerChoice) -> Ranker:
            running.close()
            calls = running.enter_context(ray_map(ray, actors, _Ranking, opener or _open_reranker, choice, settings))

            def rank_all(queries: Sequence[QueryCandidates]) -> Iterator[tuple[int, Ranking]]:
                starts = range(0, len(queries), QUERIES_PER_CALL)
                given = [(queries[start : start + QUERIES_PER_CALL],) for start in starts]
                for number, rankings in calls("rank", given):
                    yield from enumerate(rankings, start=starts[number])

            # Asked of a process there: this one need not be able to load the model.
            ((_, identity),) = calls("identity", [()])
            return Ranker(choice.label, identity, rank_all)

        yield ranker


def _open_reranker(choice: RerankerChoice, settings: Settings) -> OpenedReranker:
    from rag_posfix.pipeline.build import build_reranker_models

    return open_reranker(choice, build_reranker_models(settings))


@contextmanager
def _rankers(
    settings: Settings, models: Callable[[], RerankerModels], ray_actors: int
) -> Iterator[Callable[[RerankerChoice], Ranker]]:
    """Yield a function that makes rankers: in this process, or on a Ray cluster until the block ends."""
    if ray_actors:
        with ray_rankers(settings, ray_actors) as open_ranker:
            yield open_ranker
    else:
        yield lambda choice: local_ranker(open_reranker(choice, models()))


def _data_facts(files: BeirFiles, first_stage: str | Path) -> dict[str, dict[str, str]]:
    """Return names and digests of the files; names without the folders of this machine."""
    paths = {"corpus": files.corpus, "queries": files.queries, "qrels": files.qrels}
    if isinstance(first_stage, Path):
        paths["run"] = first_stage
    return {
        kind: {"name": f"{path.absolute().parent.name}/{path.name}", "sha256": file_digest(path)}
        for kind, path in paths.items()
    }


def summarize_runs(runs: Sequence[EvaluatedRun], first_stage: str, n_topics: int) -> dict[str, Any]:
    """Return ``runs``, ``first_stage``, ``significance`` (every run against each before it) and ``n``, the topics."""
    summaries = {run.ranked.label: summarize_run(run) for run in runs}
    first = summaries.pop(FIRST_STAGE)
    return {
        "runs": summaries,
        "first_stage": {**first, "name": first_stage},
        "significance": compare_runs(runs),
        "n": n_topics,
    }


def _written(record: RerankingRecord, out: Path | None) -> RerankingRecord:
    """Return the record with its files: head, rows, figure and page."""
    if out is None:
        return record
    written = with_figure(record.write(out), draw_runs, CAPTIONS["rerank"])
    page = out / "rerank.html"
    write_text(page, [render_page(record.head, record.rows, written.files["png"].read_bytes())])
    return replace(written, files={**written.files, "page": page})


CUTS = (1, 3)
_POSITIONS_JOURNAL = "rerank-positions-journal.jsonl"


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
    journal = RankJournal(None if out is None else out / _POSITIONS_JOURNAL, fresh=fresh)
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
