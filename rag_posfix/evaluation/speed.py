"""What a method costs: time to first token, decoding speed and memory, as ratios to the stock model in one process.

Unmodified and method take turns: every reading of a method stands between two of the stock model and is divided by
their mean, so that a machine that slows down or speeds up slows or speeds both. A ratio is the median over repeats.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch

from rag_posfix.assembly.layout import Passage, open_frame
from rag_posfix.assembly.prompt import PromptTemplate
from rag_posfix.attention.spans import Layout
from rag_posfix.demo_data import load_passages, load_questions
from rag_posfix.errors import EvaluationError, PromptTooLongError, RagPosfixError
from rag_posfix.evaluation.labels import label
from rag_posfix.evaluation.memory import PeakMemory, peak_memory
from rag_posfix.evaluation.record import environment
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.request import MitigationChoice
from rag_posfix.patching.install import stock_twin
from rag_posfix.protocols import TokenEncoder
from rag_posfix.text import content_hash

__all__ = ["UNMODIFIED", "Bench", "Reading", "bench_layout", "bench_record", "measure", "summarize_speed"]

UNMODIFIED = "unmodified"
WORDS_APART = 97
"""Passages start this many words apart in the shipped corpus; it shares no divisor with the corpus, so all differ."""
MEMORY_TOKENS = 4

Run: TypeAlias = Callable[[int], tuple[float, float]]
"""(new tokens) -> (seconds to the first token, seconds of the decode steps)."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One prompt, read and continued.

    Attributes:
        repeat: Which round.
        name: Label of the method, or ``unmodified``.
        ttft_s: Seconds until the first token was known.
        decode_tokens_per_s: Tokens per second after it.
    """

    repeat: int
    name: str
    ttft_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that was measured.

    Attributes:
        readings: In the order in which they were taken: unmodified, method, unmodified, method, ..., unmodified.
        memory: By name; None where the system does not tell.
        refused: Methods that did not run, with the reason.
    """

    readings: tuple[Reading, ...]
    memory: Mapping[str, PeakMemory | None]
    refused: Mapping[str, str]


def bench_layout(encoder: TokenEncoder, documents: int, tokens: int) -> Layout:
    """Return a prompt with ``documents`` different passages of exactly ``tokens`` tokens, of real words.

    Raises:
        EvaluationError: fewer passages or tokens than a prompt can be made of.
    """
    template = PromptTemplate()
    separator = tuple(encoder.encode_text(template.separator))
    if documents < 1 or tokens <= len(separator):
        raise EvaluationError(
            f"documents={documents} and tokens={tokens} must be at least 1 and {len(separator) + 1} (every passage "
            "ends in a separator); give larger numbers"
        )
    words = " ".join(document.page_content for document in load_passages()).split()
    passages = []
    for index in range(documents):
        ids = _words_as_tokens(encoder, words, index * WORDS_APART, tokens - len(separator))
        relevance = 1.0 - 0.9 * index / documents  # all different: methods may sort by it
        passages.append(Passage((), ids, separator, content_hash("", encoder.decode(ids)), relevance))
    question = load_questions()[0].question
    return open_frame(encoder, template, question, with_passages=True).around(passages)


def _words_as_tokens(encoder: TokenEncoder, words: Sequence[str], start: int, count: int) -> tuple[int, ...]:
    """Return ``count`` tokens of the words from ``start`` on, beginning again at the end."""
    ids: list[int] = []
    taken = 0
    while len(ids) < count:
        taken += count
        ids = encoder.encode_text(" ".join(words[i % len(words)] for i in range(start, start + taken)))
    return tuple(ids[:count])


def measure(
    engine: Engine,
    layout: Layout,
    choices: Sequence[MitigationChoice],
    *,
    repeats: int = 3,
    new_tokens: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> Bench:
    """Time the stock model and each method on one prompt, in turns, after one untimed round that measures memory.

    Raises:
        EvaluationError: a number is out of range, or every method was refused.
        PromptTooLongError: the stock model itself cannot read the prompt.
    """
    if repeats < 1 or new_tokens < 1:
        raise EvaluationError(f"repeats={repeats} and new_tokens={new_tokens} must both be at least 1")
    _check_length(engine, layout, new_tokens)
    choices = list({label(choice): choice for choice in choices}.values())
    steps = _Steps(progress, total=2 + len(choices) + repeats * (2 * len(choices) + 1))
    stock = _stock(engine, layout)
    stock(MEMORY_TOKENS)  # the first use of weights maps them, and sets up threads and kernels
    steps.advance()
    memory = {UNMODIFIED: peak_memory(lambda: stock(MEMORY_TOKENS), engine.loaded.device)}
    steps.advance()
    runs: dict[str, Run] = {}
    refused: dict[str, str] = {}
    for choice in choices:
        name, run = label(choice), _method(engine, layout, choice, new_tokens)
        try:
            memory[name] = peak_memory(_short(run), engine.loaded.device)
            runs[name] = run
        except RagPosfixError as error:
            refused[name] = str(error)
        steps.advance()
    if not runs:
        raise EvaluationError(f"no method is left to measure: {'; '.join(refused.values()) or 'none was given'}")
    steps.total -= repeats * 2 * len(refused)
    readings: list[Reading] = []
    for repeat in range(repeats):
        for name, run in _turns(stock, runs):
            first, rest = run(new_tokens)
            readings.append(Reading(repeat, name, first, new_tokens / rest))
            steps.advance()
    return Bench(tuple(readings), memory, refused)


def summarize_speed(bench: Bench) -> dict[str, Any]:
    """Return the stock model's medians, and each method's ratios: method / unmodified, neighbours in time."""
    stock = [reading for reading in bench.readings if reading.name == UNMODIFIED]
    base = bench.memory[UNMODIFIED]
    paired: dict[str, list[tuple[float, float]]] = {}
    for i, reading in enumerate(bench.readings):
        if reading.name != UNMODIFIED:
            before, after = bench.readings[i - 1], bench.readings[i + 1]
            ttft = reading.ttft_s / statistics.mean((before.ttft_s, after.ttft_s))
            speed = statistics.mean((before.decode_tokens_per_s, after.decode_tokens_per_s))
            paired.setdefault(reading.name, []).append((ttft, reading.decode_tokens_per_s / speed))
    methods = {}
    for name, ratios in paired.items():
        cold, decode = (statistics.median(column) for column in zip(*ratios, strict=True))
        methods[name] = {
            "ttft_cold_ratio": cold,
            "ttft_warm_ratio": None,  # until passages are kept between questions
            "decode_ratio": decode,
            **_memory_ratios(bench.memory[name], base),
        }
    return {
        UNMODIFIED: {
            "ttft_s": statistics.median(reading.ttft_s for reading in stock),
            "decode_tokens_per_s": statistics.median(reading.decode_tokens_per_s for reading in stock),
            "peak_memory_bytes": None if base is None else base.peak_bytes,
            "extra_memory_bytes": None if base is None else base.extra_bytes,
        },
        "methods": methods,
        "refused": dict(bench.refused),
    }


def bench_record(engine: Engine, bench: Bench, summary: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """Return the record of a bench: what ran, on what, and every reading."""
    device = engine.loaded.device
    return {
        "kind": "bench",
        **environment(),
        "model": engine.model_id,
        "model_fingerprint": engine.fingerprint,
        "dtype": str(engine.loaded.model.dtype).removeprefix("torch."),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "settings": settings,
        "summary": summary,
        "memory": {name: None if found is None else asdict(found) for name, found in bench.memory.items()},
        "readings": [asdict(reading) for reading in bench.readings],
    }


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


def _check_length(engine: Engine, layout: Layout, new_tokens: int) -> None:
    needed = len(layout.token_ids) + max(new_tokens, MEMORY_TOKENS) + 1
    if needed > engine.context_window:
        raise PromptTooLongError(
            f"prompt and answer take {needed} tokens, but the context window is {engine.context_window}; use fewer "
            "documents, fewer tokens per document or fewer new tokens"
        )


def _turns(stock: Run, runs: Mapping[str, Run]) -> Iterator[tuple[str, Run]]:
    for name, run in runs.items():
        yield UNMODIFIED, stock
        yield name, run
    yield UNMODIFIED, stock


def _short(run: Run) -> Callable[[], object]:
    return lambda: run(MEMORY_TOKENS)


def _stock(engine: Engine, layout: Layout) -> Run:
    """Return a run of transformers' own attention, its own cache and a plain loop. No mask, no plan, no observer."""
    model = stock_twin(engine.loaded.model, engine.loaded.spec)
    ids = torch.tensor([layout.token_ids], device=engine.loaded.device)

    @torch.inference_mode()
    def run(new_tokens: int) -> tuple[float, float]:
        started = _now(ids.device)
        output = model(ids, use_cache=True, logits_to_keep=1)
        token = int(output.logits[0, -1].argmax())
        first = _now(ids.device)
        for _ in range(new_tokens):
            step = torch.tensor([[token]], device=ids.device)
            output = model(step, past_key_values=output.past_key_values, use_cache=True)
            token = int(output.logits[0, -1].argmax())
        return first - started, _now(ids.device) - first

    return run


def _method(engine: Engine, layout: Layout, choice: MitigationChoice, longest: int) -> Run:
    """Return a run of the method through the engine's public calls."""
    device = engine.loaded.device

    def run(new_tokens: int) -> tuple[float, float]:
        started = _now(device)
        session = engine.open(layout, choice, max(longest, new_tokens) + 1)
        token = int(session.next_log_probs().argmax())
        first = _now(device)
        for _ in range(new_tokens):
            session.advance(token)
            token = int(session.next_log_probs().argmax())
        return first - started, _now(device) - first

    return run


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _memory_ratios(found: PeakMemory | None, base: PeakMemory | None) -> dict[str, float | None]:
    if found is None or base is None:
        return {"memory_ratio": None, "memory_extra_ratio": None}
    extra = found.extra_bytes / base.extra_bytes if base.extra_bytes else None
    return {"memory_ratio": found.peak_bytes / base.peak_bytes, "memory_extra_ratio": extra}
