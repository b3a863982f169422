"""The engine: runs any plan on one patched model, whatever method made it.

A sentence encoder over many texts: each core computes its own batches, in bfloat16 where that is fast.

One model on all cores waits after every operation for the slowest core. Batches of their own need no waiting, which
matters most where other programs use the cores too.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rag_posfix.checkpoints import PROJECTED
from rag_posfix.contracts.generator import Generator, display_name
from rag_posfix.contracts.request import Chunk, GenerationRequest, MitigationChoice, MitigationInfo, ScoredToken
from rag_posfix.errors import ConfigError, PromptTooLongError, RagPosfixError, UnsupportedModelError
from rag_posfix.generation.decode.answer_writer import AnswerWriter, Session, prefill_with_logprobs
from rag_posfix.generation.decode.question_scores import (
    AnswerText,
    check_finite,
    first_token_log_probs,
    question_attention,
    question_likelihood,
)
from rag_posfix.generation.model.sequence_batch import LoadedModel, projected_states
from rag_posfix.generation.model.tokenizer import Tokenizer
from rag_posfix.generation.prefill.per_passage import KVLookup, ResolvedRow, can_share_batch, passage_starts, resolve
from rag_posfix.generation.prefill.prefill import cached_segments, passage_attention, prefill_ahead
from rag_posfix.mitigations import MITIGATIONS, Mitigation, create
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Plan

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rag_posfix.caching.kv.store import PassageStore


class Engine(Generator):
    """Answers prompts with a patched model.

    Several threads may call it; each answer keeps its own state.

    Attributes:
        loaded: The model with the attention hook on it.
        encoder: The tokenizer that prompts must be counted and encoded with.
        model_id: Name of the model for responses and cache keys.
        fingerprint: Identity of weights and dtype.
        passages: The passage KV store, for prompts that hold the same passages; None keeps nothing. It belongs to
            whoever made it.
    """

    capabilities = frozenset({"log_probs", "likelihood", "first_token", "attention", "states", "steps"})
    encoder: Tokenizer

    def __init__(
        self,
        loaded: LoadedModel,
        encoder: Tokenizer,
        model_id: str,
        fingerprint: str,
        passages: PassageStore | None = None,
    ) -> None:
        self.loaded = loaded
        self.encoder = encoder
        self.model_id = model_id
        self.fingerprint = fingerprint
        self.context_window = loaded.spec.shape.context_window
        self.passages: PassageStore | None = passages
        if passages is not None:
            self.capabilities = self.capabilities | {"precompute"}

    def with_passages(self, passages: PassageStore | None) -> Engine:
        """Return an engine over the same model that keeps keys and values in ``passages``; this one stays as it is."""
        return Engine(self.loaded, self.encoder, self.model_id, self.fingerprint, passages)

    @property
    def hidden_size(self) -> int:
        """Channels of the hidden state, a measure of the model's size."""
        return self.loaded.spec.shape.hidden_size

    @property
    def kv_bytes_per_token(self) -> int:
        """2 L Hkv D times the size of the dtype."""
        return 2 * prod(self.loaded.entry_sizes) * int(self.loaded.model.dtype.itemsize)

    def open(
        self,
        layout: Layout,
        mitigation: MitigationChoice | None = None,
        max_tokens: int = 1,
        salt: str = "",
    ) -> Session:
        """Read a prompt and return the session that continues it; ``salt`` as in the request.

        Raises:
            ConfigError: unknown mitigation or parameter.
            UnsupportedModelError: the model cannot be served by the mitigation.
            PromptTooLongError: prompt and ``max_tokens`` exceed the context window; raised before any work.
        """
        choice = mitigation or MitigationChoice()
        return self.prefill(layout, self.plan(layout, choice, max_tokens), choice, salt)

    def precompute(self, layout: Layout, mitigation: MitigationChoice, salt: str = "") -> int:
        """Read prefix and passages of a prompt into the passage KV store; return how many tokens had to be read.

        The suffix is not read: any question may follow.

        Raises:
            ConfigError: the engine has no store, or the mitigation does not encode passages independently.
            UnsupportedModelError: the model cannot be served by the mitigation.
        """
        method = create(mitigation.name, mitigation.parameters)
        kv_lookup = self._lookup(self.loaded, salt, self.describe(mitigation).fingerprint)
        if kv_lookup is None:
            raise ConfigError("precomputing needs a passage store; give the engine one, or turn it on in the settings")
        rows = self._independent_rows(layout, method)
        if not rows:
            methods = ", ".join(self._methods_to_precompute(layout))
            raise ConfigError(
                f"{mitigation.name} does not read passages independently of each other on "
                f"{display_name(self.model_id)}, so they cannot be precomputed; "
                + (f"use one of {methods}" if methods else "no method does on this model")
            )
        if not self._positions_independent(layout, method, rows):
            raise ConfigError(
                f"{mitigation.name} with these parameters places a passage by the length of those around it, so that "
                "it cannot be precomputed; use the default parameters"
            )
        with torch.inference_mode():
            return prefill_ahead(self.loaded, layout, rows, kv_lookup)

    def cached_segments(self, request: GenerationRequest) -> tuple[bool, ...]:
        """Return whether the store has the keys and values of the prefix, and of each passage, of a prompt.

        Runs no model. Errors as those of ``open``.
        """
        layout = request.layout
        plan = self.plan(layout, request.mitigation, request.sampling.max_tokens)
        loaded = self._loaded_by(layout, plan)
        kv_lookup = self._lookup(loaded, request.salt, self.describe(request.mitigation).fingerprint)
        if kv_lookup is None or loaded.spec.ranks.count > 1:
            return (False,) * (layout.n_passages + 1)
        return cached_segments(loaded, plan.layout or layout, plan, kv_lookup)

    def _independent_rows(self, layout: Layout, method: Mitigation) -> list[ResolvedRow]:
        """Return the rows of the passages, or none if the method on this model does not encode them independently."""
        plan = method.checked_plan(layout, self.loaded.spec.shape)
        rows = [resolve(row, layout, self.loaded.device) for row in plan.rows if not row.all_passages]
        loaded = self.loaded
        whole = loaded.kept is not None or loaded.snapshots is not None  # prefix and passage are stored together
        independent = whole or (loaded.keeps_all_keys and can_share_batch(rows))
        return rows if plan.independent_passages and independent else []

    def _methods_to_precompute(self, layout: Layout) -> Iterator[str]:
        for name in MITIGATIONS.names():
            with suppress(RagPosfixError):  # it needs parameters, or another model
                if self._independent_rows(layout, create(name)):
                    yield name

    def _positions_independent(self, layout: Layout, method: Mitigation, rows: Sequence[ResolvedRow]) -> bool:
        """Return whether the shortest passage has the positions that it has as the only passage."""
        if layout.n_passages < 2:
            return True
        shortest = min(range(layout.n_passages), key=lambda i: len(layout.passages[i]))
        alone = layout.select((shortest,))
        plan = method.checked_plan(alone, self.loaded.spec.shape)
        resolved = [resolve(row, alone, self.loaded.device) for row in plan.rows if not row.all_passages]
        return passage_starts(resolved, 0) == passage_starts(rows, shortest)

    def describe(self, choice: MitigationChoice) -> MitigationInfo:
        return mitigation_info(choice)

    def next_log_probs(self, layout: Layout, mitigation: MitigationChoice | None = None) -> Tensor:
        """Return the log-probabilities of the first token of the answer, (V,) float32."""
        return self.open(layout, mitigation).next_log_probs()

    def score(self, layout: Layout, answer: Sequence[int], mitigation: MitigationChoice | None = None) -> float:
        """Return the mean log-probability per token of a given answer."""
        return sum(self.open(layout, mitigation, len(answer)).score(answer)) / len(answer)

    def question_likelihood(self, layout: Layout, salt: str = "", *, bare: bool = False) -> tuple[float, ...]:
        """Return for each passage the mean log-probability of the question's tokens after that passage alone.

        All passages are read together, each followed by the suffix. With ``bare`` the last value is that of the
        question without a passage. Salt as in ``GenerationRequest``.

        Raises:
            PromptTooLongError: a passage with prefix and suffix exceeds the context window.
        """
        loaded = self._loaded_alone(layout)
        return question_likelihood(loaded, layout, self._lookup(loaded, salt), bare=bare)

    def first_token_log_probs(self, layout: Layout, tokens: Sequence[int], salt: str = "") -> list[tuple[float, ...]]:
        """Return the log-probability of each of ``tokens`` as the first token of the answer, (N + 1, len(tokens)).

        Row k is the prompt with passage k alone, the last row the prompt without passages.

        Args:
            layout: The passages, and the suffix that each of them is followed by. All are read together.
            tokens: Token ids.
            salt: As in ``GenerationRequest``.

        Raises:
            PromptTooLongError: a passage with prefix and suffix exceeds the context window.
        """
        loaded = self._loaded_alone(layout)
        return first_token_log_probs(loaded, layout, tokens, self._lookup(loaded, salt))

    @torch.inference_mode()
    def projected_states(self, token_ids: Sequence[int], marked: Sequence[int]) -> list[tuple[float, ...]]:
        """Return the state of each marked token of a prompt after the model's projector, (len(marked), P).

        Args:
            token_ids: The full prompt.
            marked: Indices of tokens, from 0.

        Raises:
            ConfigError: the model has no projector.
            PromptTooLongError: the prompt exceeds the context window.
        """
        if not self.loaded.projector:
            raise ConfigError(
                f"{display_name(self.model_id)} has no projector (tensors projector.N.weight of a {PROJECTED}), so "
                "its states cannot be compared; use a model of this kind, such as model=jinaai/jina-reranker-v3"
            )
        self._check_prompt(len(token_ids))
        states = projected_states(self.loaded, token_ids, marked).float()
        return [tuple(map(check_finite, row)) for row in states.tolist()]

    def _loaded_alone(self, layout: Layout) -> LoadedModel:
        """Return the model as it reads each passage alone. Errors as those of ``_check_prompt``."""
        longest = len(layout.prefix) + len(layout.suffix) + max(map(len, layout.passages), default=0)
        self._check_prompt(longest)
        return self.loaded.reading(longest)

    def question_attention(
        self,
        layouts: Sequence[Layout],
        salt: str = "",
        check: Callable[[], None] | None = None,
        layers: Collection[int] | None = None,
        heads: Collection[tuple[int, int]] | None = None,
    ) -> list[tuple[tuple[float, ...], ...]]:
        """Return the attention of each prompt's suffix to each token of each passage.

        Summed over layers and heads, averaged over the tokens of the suffix.

        Args:
            layouts: Prompts that differ in their suffix alone: what they share is read once.
            check: Called before each suffix is read; what it raises ends the reading.
            layers: Which layers count, from 0; all if None.
            heads: Which query heads count, as (layer, head) from 0, in place of ``layers``; all if None.

        Raises:
            ConfigError: the prompts differ in more, or the model has no such layer.
            PromptTooLongError: one exceeds the context window.
        """
        loaded = self._loaded_for(layouts)
        return question_attention(loaded, layouts, self._lookup(loaded, salt), check, layers, heads)

    @torch.inference_mode()
    def passage_attention(
        self, layouts: Sequence[Layout], salt: str = "", check: Callable[[], None] | None = None
    ) -> list[tuple[float, ...]]:
        """Return for each prompt and passage the mean attention per token that the prompt's last token pays to it.

        Averaged over layers and heads. The first prompt is read whole; of the others, what follows the tokens that
        they share with it.

        ``check`` is called before each further prompt is read; what it raises ends the reading.

        Raises:
            PromptTooLongError: one exceeds the context window.
        """
        loaded = self._loaded_for(layouts)
        measured, _ = passage_attention(loaded, layouts, 0, self._lookup(loaded, salt), check)
        return [tuple(map(check_finite, row)) for row in measured.tolist()]

    def _loaded_for(self, layouts: Sequence[Layout]) -> LoadedModel:
        """Return the model as it reads prompts that begin alike. Errors as those of ``_check_prompt``."""
        if (plain := self.loaded.spec.unhooked) is not None:
            raise UnsupportedModelError(
                f"{display_name(self.model_id)} runs without the attention hook ({plain.reason}), so its attention "
                "cannot be measured; use the likelihood, yes_no, embedding or cross_encoder reranker"
            )
        longest = max((len(layout.token_ids) for layout in layouts), default=0)
        self._check_prompt(longest)
        return self.loaded.reading(longest)

    def _lookup(self, loaded: LoadedModel, salt: str, method: str = "") -> KVLookup | None:
        """Return the store as a method sees it; without its identity, as prompts see it that are read unmodified."""
        if self.passages is None:
            return None
        frequencies = "" if loaded is self.loaded else "+extended"  # keys have other angles
        return KVLookup(self.passages, self.fingerprint + frequencies, method, salt)

    def _check_prompt(self, n_tokens: int) -> None:
        if self.loaded.spec.ranks.count > 1:
            raise UnsupportedModelError(
                f"{display_name(self.model_id)} is split over {self.loaded.spec.ranks.count} processes, which read "
                "no passages for rerankers; serve it with tp=1, or use the embedding or the cross_encoder reranker"
            )
        if n_tokens > self.context_window:
            raise PromptTooLongError(
                f"a prompt of {n_tokens} tokens exceeds the context window of {self.context_window}; use fewer or "
                "shorter passages"
            )

    def check_json_schema(self, schema: str) -> None:
        """Raise if no answer can follow a JSON schema; runs no model.

        Raises:
            ConfigError: the schema is wrong or has a part that cannot be enforced, or llguidance is not installed.
            UnsupportedModelError: the tokenizer cannot be restricted.
        """
        self.encoder.json_grammars.check(schema)

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer piece by piece; the last chunk carries the whole.

        Errors as those of ``open``; they raise here, before the first piece is requested. Closing the iterator stops
        the computation: no step runs unless its text is requested.
        """
        return self._stream(request, self.plan(request.layout, request.mitigation, request.sampling.max_tokens))

    def _stream(self, request: GenerationRequest, plan: Plan) -> Iterator[Chunk]:
        prompt: Sequence[ScoredToken] = ()
        if request.prompt_scored:
            session, prompt = prefill_with_logprobs(self.open, request, self.encoder.token_bytes)
        else:
            session = self.prefill(request.layout, plan, request.mitigation, request.salt)
        yield from self.resume(session, request, prompt=prompt)

    def resume(
        self,
        session: Session,
        request: GenerationRequest,
        advance: Callable[[int], None] | None = None,
        prompt: Sequence[ScoredToken] = (),
    ) -> Iterator[Chunk]:
        """Decode from a session that has read the request's prompt; as ``stream`` otherwise.

        Args:
            advance: Called with each token in the place of ``session.advance``.
            prompt: The tokens of the prompt with their log-probabilities, if requested.
        """
        advance = advance or session.advance
        writer = AnswerWriter(self.encoder, session, request, prompt)
        while not writer.done:
            if (chunk := writer.write(writer.next_log_probs())).text:
                yield chunk
            if not writer.done:
                advance(writer.last)
        yield writer.end()

    def prefill(
        self,
        layout: Layout,
        plan: Plan,
        choice: MitigationChoice | None = None,
        salt: str = "",
    ) -> Session:
        """Read a prompt under a plan that was made for it by ``plan``, and return the session that continues it.

        Args:
            choice: What the plan was made by; without it the passage KV store is neither read nor written.
            salt: As in ``GenerationRequest``.
        """
        kv_lookup, loaded = None, self._loaded_by(layout, plan)
        # Ranks of a split model store no passages: they would have to find the same, and each has its own heads.
        if choice is not None and self.loaded.spec.ranks.count == 1:
            kv_lookup = self._lookup(loaded, salt, self.describe(choice).fingerprint)
        text = AnswerText(self.encoder.eos_ids, self.encoder.decode_answer)
        return Session(loaded, layout, plan, text, kv_lookup)

    def plan(self, layout: Layout, choice: MitigationChoice, max_tokens: int) -> Plan:
        """Return what a mitigation does with a prompt. Runs no model. Errors as those of ``open``."""
        if self.loaded.projector:
            raise UnsupportedModelError(
                f"{display_name(self.model_id)} is a reranker ({PROJECTED}) and writes no answers; serve another "
                "model and use this one as reranker=last_but_not_late:model=NAME"
            )
        method, spec = create(choice.name, choice.parameters), self.loaded.spec
        if spec.windowed is not None and method.refusal(spec.shape) and not method.refusal(spec.windowed.shape):
            plan = replace(method.checked_plan(layout, spec.windowed.shape), fits_windows=True)
        else:
            plan = method.checked_plan(layout, spec.shape)
            if plan.independent_passages and spec.windowed is not None:  # each is read once where all keys are kept
                needed = max(_lengths(layout, plan)) + _answer_tokens(plan, max_tokens)
                plan = replace(plan, fits_windows=needed <= spec.windowed.shape.context_window)
        if spec.unhooked is not None and not plan.reads_plain_prompts:
            raise UnsupportedModelError(
                f"{choice.name} changes more than the rows that are read, and {display_name(self.model_id)} runs "
                f"without the attention hook ({spec.unhooked.reason}); rag-posfix verify lists what it supports"
            )
        self._check_length(layout, plan, max_tokens)
        return plan

    def _loaded_by(self, layout: Layout, plan: Plan) -> LoadedModel:
        """Return the model as it reads a plan: within its sliding windows, or by the length of the longest row."""
        within = self.loaded.spec.windowed
        if plan.fits_windows and within is not None:
            return replace(self.loaded, spec=within)
        return self.loaded.reading(max(_lengths(layout, plan)))

    def _check_length(self, layout: Layout, plan: Plan, max_tokens: int) -> None:
        """Reject a plan whose longest row would leave the positions that the model was trained for."""
        window, max_tokens = self.context_window, _answer_tokens(plan, max_tokens)
        needed, original = max(_lengths(layout, plan)), self.loaded.spec.original_window
        within = self.loaded.spec.windowed
        if plan.fits_windows and within is not None and needed + max_tokens > within.shape.context_window:
            raise PromptTooLongError(
                f"the prompt takes {needed} positions and max_tokens={max_tokens} more, but the method needs all keys "
                f"and the model's sliding windows keep {within.shape.context_window}; use fewer or shorter passages, "
                "lower max_tokens, or a method that rag-posfix verify lists as supported at any length"
            )
        if needed + max_tokens > window:
            raise PromptTooLongError(
                f"the prompt takes {needed} tokens and max_tokens={max_tokens} more, but the context window is "
                f"{window}; use fewer or shorter passages, or lower max_tokens"
            )
        if original is not None and needed <= original < needed + max_tokens - 1:  # the last token is not read
            raise PromptTooLongError(
                f"the prompt takes {needed} tokens and max_tokens={max_tokens} leads beyond {original}, where the "
                f"model's rotary frequencies change for the whole prompt; set max_tokens to at most "
                f"{original - needed + 1}, or use fewer or shorter passages"
            )


def _answer_tokens(plan: Plan, max_tokens: int) -> int:
    """Return the most tokens that are written after a row."""
    return max_tokens if plan.draft is None else max(max_tokens, plan.draft.max_tokens)


def _lengths(layout: Layout, plan: Plan) -> list[int]:
    """Return how many positions each prompt of a plan takes."""
    lengths = [len(prompt.token_ids) for prompt in plan.calibration.layouts] if plan.calibration else []
    for row in plan.rows:
        if row.positions is not None:
            lengths.append(int(row.positions.max()) + 1)
        elif row.passages is not None:
            lengths.append(len(layout.select(row.passages).token_ids))
        else:
            lengths.append(len(layout.token_ids))
    return lengths


def mitigation_info(choice: MitigationChoice) -> MitigationInfo:
    """Check a mitigation and its parameters and return what caching needs to know of it.

    Raises:
        UnknownNameError: no such mitigation.
        ConfigError: an unknown parameter, or a value out of range.
    """
    method = create(choice.name, choice.parameters)
    return MitigationInfo(method.name, method.fingerprint(), method.is_order_invariant)


def cpu_has_bfloat16() -> bool:
    """Return whether the processor has instructions for bfloat16; without them it is emulated, slower than float32."""
    import torch

    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16") or able.get("bf16"))


class TextEncoder:
    """Encodes texts with one model on several cores.

    Layers are computed in bfloat16 where the processor has instructions for it, and sums and norms in float32: vectors
    of all-MiniLM-L6-v2 then have a cosine of at least .9995 with those in float32. A model that is not on the CPU
    encodes all texts itself, as it is.

    Args:
        model: A SentenceTransformer. Weights are shared; every core has its own tokenizer.
    """

    def __init__(self, model: Any, batch_size: int = 16) -> None:
        import torch

        self._batch_size = batch_size
        on_cpu = model.device.type == "cpu"
        self._bfloat16 = on_cpu and cpu_has_bfloat16()
        copies = torch.get_num_threads() - 1 if on_cpu else 0
        shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
        self._models = [model, *(copy.deepcopy(model, dict(shared)) for _ in range(copies))]
        self._lock = threading.Lock()

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return one unit vector per text; texts of similar length side by side need the least padding."""
        import numpy as np
        import torch

        size = self._batch_size
        batches = [list(texts[start : start + size]) for start in range(0, len(texts), size)]
        workers = min(len(self._models), len(batches))
        with self._lock:
            if workers == 1:
                return np.concatenate([self._encode(self._models[0], batch) for batch in batches])
            free = list(self._models)
            before = torch.get_num_threads()

            def encode(batch: list[str]) -> NDArray[np.float32]:
                model = free.pop()  # as many models as workers: never empty
                try:
                    return self._encode(model, batch)
                finally:
                    free.append(model)

            try:
                with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                    return np.concatenate(list(pool.map(encode, batches)))
            finally:
                torch.set_num_threads(before)  # threads that start later inherit a worker's number

    def _encode(self, model: Any, batch: list[str]) -> NDArray[np.float32]:
        import torch

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._bfloat16):
            vectors = model.encode_document(
                batch, batch_size=self._batch_size, show_progress_bar=False, convert_to_numpy=True,
                normalize_embeddings=True,
            )  # fmt: skip
        embeddings: NDArray[np.float32] = vectors.astype("float32")
        return embeddings
