"""Speed experiment: time to first token, decoding speed and memory, as ratios to the stock model in one process.

Stock model and method are measured in alternation. Every reading of a method is divided by the mean of the readings of
the stock model before and after it, so that changes in the speed of the machine cancel. A ratio is the median of
rounds.

Timed runs on a prompt of an exact size: the stock model, a method or several requests; and peak memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch

from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.assembly.tokenization import TokenizedPassage, tokenize_prompt
from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.kv.store import KVCodec, PassageStore
from rag_posfix.caching.redis import RedisTier
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.generator import TokenEncoder
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.demo_data import load_passages, load_questions
from rag_posfix.errors import EvaluationError, PromptTooLongError, RagPosfixError
from rag_posfix.evaluation.record import ExperimentRecord, Progress, environment, model_facts, silent
from rag_posfix.generation.batching.scheduler import advance_batch
from rag_posfix.generation.engine import Engine
from rag_posfix.mitigations import MITIGATIONS, create
from rag_posfix.patching.install import stock_copy
from rag_posfix.plan.layout import Layout, Span
from rag_posfix.settings import Settings
from rag_posfix.text import content_hash

__all__ = ["measure_speed"]


WORDS_APART = 97
"""Passages start this many words apart in the shipped corpus; it shares no divisor with the corpus, so all differ."""

_STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Written to ``clear_refs`` this makes Linux set VmHWM, the peak memory of a process, to its memory now."""

TimedRun: TypeAlias = Callable[[int], tuple[float, float]]
"""(new tokens) -> (seconds to the first token, seconds of the decode steps)."""


def bench_layout(encoder: TokenEncoder, documents: int, tokens: int) -> Layout:
    """Return a prompt with ``documents`` different passages of exactly ``tokens`` tokens, of real words."""
    template = PromptTemplate()
    separator = tuple(encoder.encode_text(template.separator))
    if documents < 1 or tokens <= len(separator):
        raise EvaluationError(
            f"documents={documents} and tokens={tokens} must be at least 1 and {len(separator) + 1} (every passage "
            "ends in a separator); give larger numbers"
        )
    words = " ".join(document.page_content for document in load_passages()).split()
    count = tokens - len(separator)
    passages = []
    for index in range(documents):
        ids: list[int] = []
        end = start = index * WORDS_APART
        while len(ids) < count:  # the words begin again at the end
            end += count
            ids = encoder.encode_text(" ".join(words[i % len(words)] for i in range(start, end)))
        ids = ids[:count]
        relevance = 1.0 - 0.9 * index / documents  # all different: methods may sort by it
        text = encoder.decode(ids)
        written, key = ("", text, template.separator), content_hash("", text)
        passages.append(TokenizedPassage((*ids, *separator), Span(0, len(ids)), written, key, relevance))
    question = load_questions()[0].question
    return tokenize_prompt(encoder, template, question).with_passages(passages)


def stock_run(engine: Engine, layout: Layout) -> TimedRun:
    """Return a run of transformers' own attention, its own cache and a plain loop. No mask, no plan, no observer."""
    model = stock_copy(engine.loaded.model, engine.loaded.spec)
    ids = torch.tensor([layout.token_ids], device=engine.loaded.device)

    @torch.inference_mode()
    def run(new_tokens: int) -> tuple[float, float]:
        started = _synchronized_time(ids.device)
        output = model(ids, use_cache=True, logits_to_keep=1)
        token = int(output.logits[0, -1].argmax())
        first = _synchronized_time(ids.device)
        for _ in range(new_tokens):
            step = torch.tensor([[token]], device=ids.device)
            output = model(step, past_key_values=output.past_key_values, use_cache=True)
            token = int(output.logits[0, -1].argmax())
        return first - started, _synchronized_time(ids.device) - first

    return run


def method_run(engine: Engine, layout: Layout, choice: MitigationChoice, longest: int) -> TimedRun:
    """Return a run of the method through the engine's public calls."""
    device = engine.loaded.device

    def run(new_tokens: int) -> tuple[float, float]:
        started = _synchronized_time(device)
        session = engine.open(layout, choice, max(longest, new_tokens) + 1)
        token = int(session.next_log_probs().argmax())
        first = _synchronized_time(device)
        for _ in range(new_tokens):
            session.advance(token)
            token = int(session.next_log_probs().argmax())
        return first - started, _synchronized_time(device) - first

    return run


def _synchronized_time(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def concurrent_run(engine: Engine, layout: Layout, choice: MitigationChoice, count: int) -> Callable[[int], float]:
    """Return a run of ``count`` equal requests that decode together: (new tokens) -> seconds of the decode steps."""
    device = engine.loaded.device

    def run(new_tokens: int) -> float:
        sessions = [engine.open(layout, choice, new_tokens + 1) for _ in range(count)]
        started = _synchronized_time(device)
        for _ in range(new_tokens):
            advance_batch(sessions, [int(session.next_log_probs().argmax()) for session in sessions])
        return _synchronized_time(device) - started

    return run


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Peak memory of one piece of work, weights included, and the same less the memory before the work began."""

    peak_bytes: int
    extra_bytes: int


def peak_memory(action: Callable[[], object], device: torch.device) -> PeakMemory | None:
    """Run ``action`` and return its peak memory; None if the operating system does not report it.

    On a GPU the value counts torch's tensors there, otherwise the resident memory of this process; Linux records its
    maximum.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        action()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
        return PeakMemory(peak, peak - before)
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)  # release memory that is held for reuse, which would hide a lower peak
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
        before = _status_bytes("VmRSS")
    except (OSError, ValueError):  # not Linux, or a sandbox without these files
        action()
        return None
    action()
    peak = _status_bytes("VmHWM")
    return PeakMemory(peak, max(peak - before, 0))


def _status_bytes(key: str) -> int:
    for line in _STATUS.read_text("utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise ValueError(f"{_STATUS} has no {key}")


UNMODIFIED = "unmodified"
MEMORY_TOKENS = 4
STORE_BYTES = 8 * 1024**3


@dataclass(frozen=True, slots=True)
class Reading:
    """The times of one prompt: prefill and decoding.

    Attributes:
        repeat: Number of the round.
        name: Label of the method, or ``unmodified``.
        ttft_s: Seconds to the first token.
        decode_tokens_per_s: Tokens per second after it.
        warm_ttft_s: Seconds to the first token with cached prefix and passages, by store.
        together_tokens_per_s: Tokens per second of several concurrent requests in total, None if not measured.
    """

    repeat: int
    name: str
    ttft_s: float
    decode_tokens_per_s: float
    warm_ttft_s: Mapping[str, float] = field(default_factory=dict)
    together_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class SpeedMeasurement:
    """Readings of all methods on one prompt.

    Attributes:
        readings: In the order of measurement: unmodified, method, unmodified, method, ..., unmodified.
        memory: Peak memory by name; None if the operating system does not report it.
        refused: Methods that did not run, with the reason.
    """

    readings: tuple[Reading, ...]
    memory: Mapping[str, PeakMemory | None]
    refused: Mapping[str, str]


def measure_speed(
    choices: Sequence[MitigationChoice] | None = None,
    *,
    documents: int = 20,
    tokens: int = 150,
    repeats: int = 3,
    new_tokens: int = 16,
    together: int = 0,
    warm: bool = True,
    redis_url: str | None = None,
    engine: Engine | None = None,
    settings: Settings | None = None,
    out: Path | None = None,
    progress: Progress = silent,
) -> ExperimentRecord:
    """Return time to first token, tokens per second and memory of each method, as ratios to the unmodified model.

    The record has one row per reading (``Reading``); ``summarize_speed`` describes its summary.

    Args:
        choices: The methods; every registered one if None.
        repeats: Rounds; ratios are medians over them.
        new_tokens: Decode steps per round.
        together: Requests that decode together in a further reading; 0 takes none.
        warm: Also time the first token with passages kept in memory and on disk, in a temporary folder.
        redis_url: Also keep passages in this Redis; what it holds stays.
        engine: The model; loaded by ``settings`` if None.
        settings: Read from the environment if None.
        out: Folder for the record; None writes nothing.
        progress: Progress callback (``evaluation.record.Progress``).

    Raises:
        ConfigError: a method, the model or a setting is wrong.
        EvaluationError: a number is out of range, or every method was refused.
        PromptTooLongError: the stock model itself cannot read the prompt.
    """
    for choice in choices or ():
        create(choice.name, choice.parameters)
    if engine is None:
        with progress("loading the model"):
            from rag_posfix.pipeline.build import build_engine

            engine = build_engine(settings or Settings())
    layout = bench_layout(engine.encoder, documents, tokens)
    if choices is None:
        choices = [MitigationChoice(name) for name in MITIGATIONS.names()]
    with _passage_stores(warm, redis_url) as stores, progress("measuring") as report:
        measured = time_methods(
            engine, layout, choices, repeats=repeats, new_tokens=new_tokens, stores=stores, together=together,
            progress=report,
        )  # fmt: skip
    facts = model_facts(engine)
    prompt = {"documents": documents, "tokens_per_document": tokens, "prompt_tokens": len(layout.token_ids)}
    device = engine.loaded.device
    head = {
        "kind": "bench",
        **environment(),
        **facts,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "settings": {
            "documents": documents, "tokens": tokens, "repeats": repeats, "new_tokens": new_tokens,
            "together": together,
        },
        "summary": {
            **summarize_speed(measured), **{name: facts[name] for name in ("model", "device", "dtype")}, **prompt,
        },
        "memory": {name: None if peak is None else asdict(peak) for name, peak in measured.memory.items()},
    }  # fmt: skip
    return ExperimentRecord(head, [asdict(reading) for reading in measured.readings]).write(out)


@contextmanager
def _passage_stores(warm: bool, redis_url: str | None) -> Iterator[dict[str, PassageStore]]:
    """Open one passage KV store per tier, so that each tier is timed alone."""
    stores: dict[str, PassageStore] = {}
    with TemporaryDirectory(prefix="rag-posfix-bench-") as folder:
        if warm:
            stores["memory"] = PassageStore([MemoryTier(STORE_BYTES)])
            disk = DiskTier(Path(folder), KVCodec(), max_bytes=STORE_BYTES)
            stores["disk"] = PassageStore([disk], queue_bytes=STORE_BYTES)
        if redis_url is not None:
            redis = RedisTier(redis_url, KVCodec(), timeout_seconds=5.0, max_bytes=STORE_BYTES)
            stores["redis"] = PassageStore([redis], queue_bytes=STORE_BYTES)
        try:
            yield stores
        finally:
            for store in stores.values():
                store.close()


def time_methods(
    engine: Engine,
    layout: Layout,
    choices: Sequence[MitigationChoice],
    *,
    repeats: int = 3,
    new_tokens: int = 16,
    stores: Mapping[str, PassageStore] | None = None,
    together: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> SpeedMeasurement:
    """Time the stock model and each method on one prompt, in turns, after one untimed round that measures memory.

    Args:
        stores: Warm readings are taken from each of these, by name; they are filled first.
        together: Requests that decode together in another reading; 0 takes none.
    """
    if repeats < 1 or new_tokens < 1:
        raise EvaluationError(f"repeats={repeats} and new_tokens={new_tokens} must both be at least 1")
    needed = len(layout.token_ids) + max(new_tokens, MEMORY_TOKENS) + 1
    if needed > engine.context_window:
        raise PromptTooLongError(
            f"prompt and answer take {needed} tokens, but the context window is {engine.context_window}; use fewer "
            "documents, fewer tokens per document or fewer new tokens"
        )
    choices = list({choice.label: choice for choice in choices}.values())
    steps = _Steps(progress, total=2 + len(choices) + repeats * (2 * len(choices) + 1))
    engine = engine.with_passages(None)
    stock = stock_run(engine, layout)
    stock(MEMORY_TOKENS)  # the first use of weights maps them, and sets up threads and kernels
    steps.advance()
    memory = {UNMODIFIED: peak_memory(partial(stock, MEMORY_TOKENS), engine.loaded.device)}
    steps.advance()
    runs: dict[str, TimedRun] = {}
    refused: dict[str, str] = {}
    for choice in choices:
        name, run = choice.label, method_run(engine, layout, choice, new_tokens)
        try:
            memory[name] = peak_memory(partial(run, MEMORY_TOKENS), engine.loaded.device)
            runs[name] = run
        except RagPosfixError as error:
            refused[name] = str(error)
        steps.advance()
    if not runs:
        raise EvaluationError(f"no method is left to measure: {'; '.join(refused.values()) or 'none was given'}")
    # Stores hold memory: they are filled when the memory of all methods has been measured.
    extras = {
        choice.label: _Extras.of(engine, layout, choice, stores or {}, together)
        for choice in choices
        if choice.label in runs
    }
    steps.total -= repeats * 2 * len(refused)
    readings: list[Reading] = []
    for repeat in range(repeats):
        for name, run in _turns(stock, runs):
            first, decode_seconds = run(new_tokens)
            more = extras[name].read(new_tokens) if name in extras else ({}, None)
            readings.append(Reading(repeat, name, first, new_tokens / decode_seconds, *more))
            steps.advance()
    return SpeedMeasurement(tuple(readings), memory, refused)


def summarize_speed(measured: SpeedMeasurement) -> dict[str, Any]:
    """Return the stock model's medians, and each method's ratios: method / unmodified, neighbours in time."""
    stock = [reading for reading in measured.readings if reading.name == UNMODIFIED]
    base = measured.memory[UNMODIFIED]
    paired: dict[str, list[_Ratios]] = {}
    for i, reading in enumerate(measured.readings):
        if reading.name != UNMODIFIED:
            before, after = measured.readings[i - 1], measured.readings[i + 1]
            paired.setdefault(reading.name, []).append(_ratios(reading, before, after))
    methods = {
        name: {**_medians(ratios), **_memory_ratios(measured.memory[name], base)} for name, ratios in paired.items()
    }
    return {
        UNMODIFIED: {
            "ttft_s": statistics.median(reading.ttft_s for reading in stock),
            "decode_tokens_per_s": statistics.median(reading.decode_tokens_per_s for reading in stock),
            "peak_memory_bytes": None if base is None else base.peak_bytes,
            "extra_memory_bytes": None if base is None else base.extra_bytes,
        },
        "methods": methods,
        "refused": dict(measured.refused),
    }


@dataclass(frozen=True, slots=True)
class _Extras:
    """Further readings of a method: warm first tokens, by store, and several requests together."""

    warm: Mapping[str, TimedRun]
    together: Callable[[int], float] | None
    count: int

    @classmethod
    def of(
        cls, engine: Engine, layout: Layout, choice: MitigationChoice, stores: Mapping[str, PassageStore], count: int
    ) -> _Extras:
        """Fill the stores and return the runs; a method that finds nothing in them has no warm runs."""
        warm: dict[str, TimedRun] = {}
        for name, store in stores.items():
            warm_engine = engine.with_passages(store)
            warm_engine.open(layout, choice)
            store.flush()
            if warm_engine.open(layout, choice).cached_tokens:
                warm[name] = method_run(warm_engine, layout, choice, 1)
        filled = engine.with_passages(next(iter(stores.values()), None))  # prefill is not what is timed
        several = concurrent_run(filled, layout, choice, count) if count else None
        return cls(warm, several, count)

    def read(self, new_tokens: int) -> tuple[dict[str, float], float | None]:
        """Return seconds to the first token by store, and tokens per second of all requests together."""
        warm = {name: run(1)[0] for name, run in self.warm.items()}
        rate = None if self.together is None else self.count * new_tokens / self.together(new_tokens)
        return warm, rate


_Ratios = dict[str, float]


def _ratios(reading: Reading, before: Reading, after: Reading) -> _Ratios:
    """Return a reading over the mean of its neighbours; decoding together over decoding alone."""
    ttft = statistics.mean((before.ttft_s, after.ttft_s))
    speed = statistics.mean((before.decode_tokens_per_s, after.decode_tokens_per_s))
    ratios = {"ttft_cold_ratio": reading.ttft_s / ttft, "decode_ratio": reading.decode_tokens_per_s / speed}
    ratios.update({f"ttft_warm_{name}_ratio": seconds / ttft for name, seconds in reading.warm_ttft_s.items()})
    if reading.together_tokens_per_s is not None:
        ratios["together_ratio"] = reading.together_tokens_per_s / reading.decode_tokens_per_s
    return ratios


def _medians(ratios: Sequence[_Ratios]) -> dict[str, float | None]:
    """Return each ratio's median over rounds. ``ttft_warm_ratio`` is the ratio of the first store."""
    medians: dict[str, float | None] = {
        name: statistics.median(round_[name] for round_ in ratios) for name in ratios[0]
    }
    warm = next((value for name, value in medians.items() if name.startswith("ttft_warm_")), None)
    return {"ttft_warm_ratio": warm, **medians}


@dataclass(slots=True)
class _Steps:
    """Counts what was done, for a progress bar."""

    progress: Callable[[int, int], None] | None
    total: int
    done: int = 0

    def advance(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)


def _turns(stock: TimedRun, runs: Mapping[str, TimedRun]) -> Iterator[tuple[str, TimedRun]]:
    for name, run in runs.items():
        yield UNMODIFIED, stock
        yield name, run
    yield UNMODIFIED, stock


def _memory_ratios(peak: PeakMemory | None, base: PeakMemory | None) -> dict[str, float | None]:
    if peak is None or base is None:
        return {"memory_ratio": None, "memory_extra_ratio": None}
    extra = peak.extra_bytes / base.extra_bytes if base.extra_bytes else None
    return {"memory_ratio": peak.peak_bytes / base.peak_bytes, "memory_extra_ratio": extra}
