"""Reranking experiment on a test collection: runs, measures, paired tests, a record, a figure and a page."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_posfix.contracts.method_spec import MethodSpec, parse_method
from rag_posfix.errors import ConfigError, UnknownNameError
from rag_posfix.evaluation.data.collection import BeirFiles, Collection, beir_files, load_collection, load_topics
from rag_posfix.evaluation.data.trec import write_text
from rag_posfix.evaluation.ranking.first_stage import (
    FIRST_STAGE,
    FIRST_STAGES,
    FirstStage,
    candidates_of,
    open_first_stage,
    retrieve,
    run_as_first_stage,
)
from rag_posfix.evaluation.ranking.measures import (
    EvaluatedRun,
    compare_runs,
    evaluate_run,
    parse_measures,
    per_query,
    run_files,
    summarize_run,
)
from rag_posfix.evaluation.ranking.rankings import (
    Ranker,
    RankJournal,
    RerankerChoice,
    check_rerankers,
    local_ranker,
    open_reranker,
    rerank,
)
from rag_posfix.evaluation.ranking.report import check_matplotlib, draw_runs, render_page
from rag_posfix.evaluation.ray_workers import connect_ray
from rag_posfix.evaluation.record import ExperimentRecord, Progress, environment, file_digest, silent
from rag_posfix.settings import Settings

if TYPE_CHECKING:
    from rag_posfix.reranking.build import RerankerModels

__all__ = ["RerankingRecord", "evaluate_reranking"]

JOURNAL = "rerank-journal.jsonl"


@dataclass(frozen=True, slots=True, eq=False)
class RerankingRecord(ExperimentRecord):
    """What ``evaluate_reranking`` returns; ``files`` also has the page and the plot."""

    def to_json(self) -> dict[str, Any]:
        """Return the summary with the paths of runs, counts, and the paths of record, page and plot."""
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
        ray: Retrieve and rank on a Ray cluster.
        ray_actors: Processes there that search, and after them those that hold a reranker.
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
    actors = ray_actors if ray else 0
    paths = {} if out is None else run_files(out, [FIRST_STAGE, *(choice.label for choice in rerankers)])
    with connect_ray() if ray else nullcontext():  # one cluster for both stages
        with _stage(run or spec, collection, chosen, models, actors, out, progress) as stage:
            first = retrieve(stage, topics, depth, journal, progress)
        candidates = candidates_of(topics, first, collection)
        runs = [evaluate_run(first, topics, parsed, paths.get(FIRST_STAGE))]
        with _rankers(chosen, models, actors) as open_ranker:
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
        "rerankers": {choice.label: choice.recorded_parameters for choice in rerankers},
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


def _stage(
    stage: FirstStage | MethodSpec,
    collection: Collection,
    settings: Settings,
    models: Callable[[], RerankerModels],
    ray_actors: int,
    out: Path | None,
    progress: Progress,
) -> AbstractContextManager[FirstStage]:
    """Return a first stage that reads a run, searches in this process, or on a Ray cluster until the block ends."""
    if isinstance(stage, FirstStage):
        return nullcontext(stage)
    if ray_actors:
        from rag_posfix.evaluation.ranking.ray_backend import ray_first_stage

        return ray_first_stage(stage, collection, settings, ray_actors, out, progress)
    return nullcontext(open_first_stage(stage, collection, lambda: models().embeddings(), out, progress))


@contextmanager
def _rankers(
    settings: Settings, models: Callable[[], RerankerModels], ray_actors: int
) -> Iterator[Callable[[RerankerChoice], Ranker]]:
    """Yield a function that makes rankers: in this process, or on a Ray cluster until the block ends."""
    if ray_actors:
        from rag_posfix.evaluation.ranking.ray_backend import ray_rankers

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
    plot, page = out / "rerank.png", out / "rerank.html"
    image = draw_runs({FIRST_STAGE: record.summary["first_stage"], **record.summary["runs"]})
    write_text(plot, [image])
    write_text(page, [render_page(record.head, record.rows, image)])
    written = record.write(out)
    return replace(written, files={**written.files, "page": page, "plot": plot})
