"""A whole reranking evaluation: files in; runs, measures, a record, a picture and a page out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.data.beir import BeirFiles
from rag_posfix.evaluation.data.collection import Collection, Topic, load_collection, load_topics
from rag_posfix.evaluation.data.files import write_text
from rag_posfix.evaluation.ranking.candidates import (
    RerankerChoice,
    check_distinct,
    check_reranker,
    open_reranker,
    parts_of,
)
from rag_posfix.evaluation.ranking.first_stage import (
    FirstStage,
    Progress,
    check_first_stage,
    open_first_stage,
    run_as_first_stage,
    silent,
)
from rag_posfix.evaluation.ranking.measures import parse_measures
from rag_posfix.evaluation.ranking.page import render_page
from rag_posfix.evaluation.ranking.plot import check_matplotlib, draw_runs
from rag_posfix.evaluation.ranking.rankings import RankJournal
from rag_posfix.evaluation.ranking.rerank import FIRST_STAGE, Ranker, candidates_of, local_ranker, rerank, retrieve
from rag_posfix.evaluation.ranking.summary import MeasuredRun, comparisons, measure_run, per_query, run_files, summary
from rag_posfix.evaluation.record import environment, file_digest, write_record
from rag_posfix.reranking.build import RerankerModels
from rag_posfix.settings import Settings

__all__ = ["JOURNAL", "RerankJob", "run_rerank_job"]

JOURNAL = "rerank-journal.jsonl"


@dataclass(frozen=True, slots=True)
class RerankJob:
    """What is evaluated.

    Attributes:
        files: The collection.
        rerankers: All are given the same candidates.
        out: Folder for everything that is written.
        first_stage: One of ``FIRST_STAGES``, or None for ``run``.
        first_stage_parameters: Its own.
        run: A TREC run in place of a first stage.
        depth: Candidates per topic.
        measures: Measures besides the default ones, separated by commas.
        limit: Topics at most.
        skip: Topics left out at the start.
        binary: Count every grade above 0 as 1.
        titles: Keep titles of documents.
        fresh: Compute anew what the journal holds.
        ray: Rank on a Ray cluster.
        actors: Processes there that hold a reranker.
    """

    files: BeirFiles
    rerankers: Sequence[RerankerChoice]
    out: Path
    first_stage: str | None = "bm25"
    first_stage_parameters: Mapping[str, Any] = field(default_factory=dict)
    run: Path | None = None
    depth: int = 20
    measures: str = ""
    limit: int | None = None
    skip: int = 0
    binary: bool = False
    titles: bool = True
    fresh: bool = False
    ray: bool = False
    actors: int = 2

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ConfigError(f"depth={self.depth} must be at least 1: candidates per topic")
        if (self.first_stage is None) == (self.run is None):
            raise ConfigError("a reranking evaluation needs either a first stage or a run, not both")
        if self.first_stage is not None:
            check_first_stage(self.first_stage, self.first_stage_parameters)
        check_distinct(self.rerankers)


def run_rerank_job(job: RerankJob, settings: Settings, progress: Progress = silent) -> dict[str, Any]:
    """Evaluate rerankers and return ``runs``, ``first_stage``, ``significance``, ``n``, ``record`` and file names.

    The first stage is asked once per topic and every reranker is given the same candidates. Rankings go to
    ``out/rerank-journal.jsonl`` as they are made: the same job, or one with more topics or rerankers, computes what is
    missing. What is wrong with a name, a parameter, a measure or a file is told before a model is loaded.

    Args:
        job: What to evaluate.
        settings: Models.
        progress: Shows how far it is.

    Raises:
        ConfigError: a reranker, a measure or the first stage is at fault, or the extra ``eval`` is not installed.
        EvaluationError: a file is missing or malformed, or a reranker failed on a query.
    """
    measures = parse_measures(job.measures)
    check_matplotlib()
    for choice in job.rerankers:
        check_reranker(choice)
    topics, counts = load_topics(job.files, limit=job.limit, skip=job.skip, binary=job.binary)
    journal = RankJournal(job.out / JOURNAL, fresh=job.fresh)
    parts = parts_of(settings)
    stage, collection = _first_stage(job, topics, parts, progress)
    found = retrieve(stage, topics, job.depth, journal, progress)
    candidates = candidates_of(topics, found, collection)
    files = run_files(job.out, [FIRST_STAGE, *(choice.label for choice in job.rerankers)])
    runs = [measure_run(found, topics, measures, files[FIRST_STAGE])]
    with _where(job, settings, parts) as open_ranker:
        for choice in job.rerankers:
            ranked = rerank(open_ranker(choice), candidates, journal, progress)
            runs.append(measure_run(ranked, topics, measures, files[choice.label]))
    return _finish(job, settings, stage, {**collection.counts, **counts}, topics, runs, journal.sources)


def _first_stage(
    job: RerankJob, topics: list[Topic], parts: RerankerModels, progress: Progress
) -> tuple[FirstStage, Collection]:
    if job.run is not None:
        stage, names = run_as_first_stage(job.run)
        return stage, load_collection(job.files.corpus, topics, titles=job.titles, only=names)
    collection = load_collection(job.files.corpus, topics, titles=job.titles)
    name = job.first_stage or ""
    stage = open_first_stage(name, job.first_stage_parameters, collection, parts.embeddings, job.out, progress)
    return stage, collection


@contextmanager
def _where(job: RerankJob, settings: Settings, parts: RerankerModels) -> Iterator[Callable[[RerankerChoice], Ranker]]:
    """Yield what makes rankers: in this process, or on a Ray cluster that is left at the end."""
    if job.ray:
        from rag_posfix.evaluation.ranking.ray_backend import ray_rankers

        with ray_rankers(settings, job.actors) as open_ranker:
            yield open_ranker
        return

    yield lambda choice: local_ranker(open_reranker(choice, parts))


def _finish(
    job: RerankJob,
    settings: Settings,
    stage: FirstStage,
    counts: Mapping[str, int],
    topics: Sequence[Topic],
    runs: Sequence[MeasuredRun],
    sources: Sequence[str],
) -> dict[str, Any]:
    """Write the record, the picture and the page, and return the summary."""
    summaries = {run.ranked.label: summary(run) for run in runs}
    result: dict[str, Any] = {
        "runs": {label: found for label, found in summaries.items() if label != FIRST_STAGE},
        "first_stage": {**summaries[FIRST_STAGE], "name": stage.name},
        "significance": comparisons(runs),
        "n": len(topics),
    }
    record = {
        "kind": "rerank",
        **environment(),
        "data": {
            part: {"name": f"{path.absolute().parent.name}/{path.name}", "sha256": file_digest(path)}
            for part, path in {**asdict(job.files), **({"run": job.run} if job.run else {})}.items()
        },
        "rerankers": {choice.label: dict(choice.parameters) for choice in job.rerankers},
        "settings": {
            "first_stage": stage.name, "first_stage_parameters": dict(job.first_stage_parameters), "depth": job.depth,
            "limit": job.limit, "skip": job.skip, "binary": job.binary, "titles": job.titles, "ray": job.ray,
            "model": settings.model, "embedding_model": settings.embedding_model, "dtype": settings.dtype,
            "device": settings.device, "rankings_of_earlier_runs_by": list(sources),
        },
        "counts": dict(counts),
        "summary": _beside(result),
        "rows": list(per_query(runs, topics)),
    }  # fmt: skip
    picture, page = job.out / "rerank.png", job.out / "rerank.html"
    image = draw_runs(summaries)
    write_text(picture, [image])
    write_text(page, [render_page(record, image)])
    return {
        **result,
        "counts": dict(counts),
        "record": str(write_record(job.out, "rerank", record)),
        "page": str(page),
        "plot": str(picture),
    }


def _beside(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary for the record, which lies beside the runs: their names say where, on any machine."""

    def named(found: Mapping[str, Any]) -> dict[str, Any]:
        return {**found, "run_file": Path(found["run_file"]).name}

    runs = {label: named(found) for label, found in result["runs"].items()}
    return {**result, "runs": runs, "first_stage": named(result["first_stage"])}
