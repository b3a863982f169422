"""Timed runs on a prompt of an exact size: the stock model, a method or several requests; and peak memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.assembly.tokenization import TokenizedPassage, tokenize_prompt
from rag_posfix.contracts.generator import TokenEncoder
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.demo_data import load_passages, load_questions
from rag_posfix.errors import EvaluationError
from rag_posfix.generation.batching.requests import advance_batch
from rag_posfix.generation.engine import Engine
from rag_posfix.patching.install import stock_copy
from rag_posfix.plan.layout import Layout, Span
from rag_posfix.text import content_hash

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
