"""Models that are probed, language models and small decoders, and what a probe watches and changes in them.

Prompts of probes: random tokens, and keys and values with a gold pair.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rag_posfix.attention.masks import scores, weigh
from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.evaluation.data.questions import key_value_pairs
from rag_posfix.evaluation.record import counted, model_facts
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.sequence_batch import GrowingCache
from rag_posfix.lab.encodings import Decoder, Positions
from rag_posfix.patching.attention_hook import ForwardContext, Overrides, active
from rag_posfix.plan.layout import Span
from rag_posfix.plan.plan import AttentionInput, AttentionOverride, Capability, MaskFunction
from rag_posfix.settings import Settings

ByLayer = Callable[[int, Tensor], None]


@dataclass(frozen=True, slots=True, eq=False)
class Watch:
    """What a probe receives while a model reads. Each is called with the layer, from 0, and a tensor; None: not asked.

    Attributes:
        states: The residual stream as it enters the layer, (B, T, width).
        inputs: What the layer's attention reads: the residual stream after the layer's first norm, (B, T, width).
        weights: Attention probabilities of all heads, (B, H, T, T) float32, one layer at a time.
        attended: What attention returns before its output projection, (B, H, T, D).
    """

    states: ByLayer | None = None
    inputs: ByLayer | None = None
    weights: ByLayer | None = None
    attended: ByLayer | None = None

    @property
    def attention(self) -> bool:
        """Whether attention is computed the plain way, so that it can be watched."""
        return self.weights is not None or self.attended is not None


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What a probe changes in one pass; None changes nothing.

    Attributes:
        positions: Position ids, (T,) or (B, T), in place of 0, 1, 2 and so on.
        mask: Which key each query sees, in place of the causal mask; may differ by row.
        scores: Returns other attention scores, given the layer and (B, H, T, T) float32 scores that are scaled and
            masked.
    """

    positions: Tensor | None = None
    mask: MaskFunction | None = None
    scores: Callable[[int, Tensor], Tensor] | None = None

    @property
    def attention(self) -> bool:
        """Whether attention is computed the plain way; at a step back of positions transformers hides all before."""
        return self.positions is not None or self.mask is not None or self.scores is not None


class Subject(Protocol):
    """A model that can be probed: a loaded language model, or a small decoder of ``rag_posfix.lab.encodings``."""

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        ...

    @property
    def n_heads(self) -> int:
        """Number of query heads of a layer."""
        ...

    @property
    def width(self) -> int:
        """Channels of a hidden state."""
        ...

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        ...

    @property
    def longest(self) -> int:
        """The largest number of tokens that a probe may read at a time."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """Return what a record says of the model: ``model``, ``model_fingerprint``, ``dtype``, ``device``."""
        ...

    def read(self, ids: Tensor, watch: Watch = ..., change: Change = ..., keep: int = 1) -> Tensor:
        """Return the logits of the last ``keep`` tokens, (B, keep, vocabulary) float32; the watch receives the rest.

        Args:
            ids: (B, T) token ids without padding.
        """
        ...


@dataclass(frozen=True, eq=False)
class WatchedAttention(AttentionOverride):
    """Causal softmax(QK^T scaling)V in float32, watched and changed.

    Cost: the (B, Hq, T, T) scores of one layer at a time.

    Attributes:
        watch: Who receives probabilities and outputs.
        change: Another mask, or other scores.
    """

    watch: Watch
    change: Change
    layers: range | None = None
    standard_from: int | None = None

    def __call__(self, inputs: AttentionInput) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, Hq, Tq, D), and None: nobody else observes a probe's pass."""
        n_key, device = inputs.key.shape[2], inputs.key.device
        key_at = torch.arange(n_key, device=device)[None, :]
        query_at = torch.arange(inputs.start, n_key, device=device)[:, None]
        mask = self.change.mask
        seen = key_at <= query_at if mask is None else mask(query_at, key_at)
        attention_scores = scores(inputs.query, inputs.key, inputs.scaling).masked_fill(~seen, float("-inf"))
        if self.change.scores is not None:
            attention_scores = self.change.scores(inputs.layer, attention_scores)
        probabilities = attention_scores.softmax(dim=-1)
        attended = weigh(probabilities, inputs.value)
        if self.watch.weights is not None:
            self.watch.weights(inputs.layer, probabilities)
        if self.watch.attended is not None:
            self.watch.attended(inputs.layer, attended)
        return attended, None


LONGEST = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class SmallDecoder:
    """A small decoder that probes read. Implements ``Subject``.

    Attention probabilities are what the encoding returns for the identity matrix as values, since attention is linear
    in its values. That holds for every encoding.

    Attributes:
        decoder: The decoder.
        name: Its name in records.
    """

    decoder: Decoder
    name: str = "decoder"

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return self.decoder.shape.layers

    @property
    def n_heads(self) -> int:
        """Number of heads of a layer."""
        return self.decoder.shape.heads

    @property
    def width(self) -> int:
        """Channels of a hidden state."""
        return self.decoder.shape.width

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.decoder.shape.vocabulary

    @property
    def longest(self) -> int:
        """The number of learned positions, or a number that nothing reaches."""
        return int(self.decoder.encoding.parameters.get("max_positions", LONGEST))

    def facts(self) -> Mapping[str, Any]:
        """Return name, encoding, digest of the weights, dtype and device."""
        weights = self.decoder.embedding
        digest = hashlib.sha256(weights.detach().cpu().numpy().tobytes()).hexdigest()[:16]
        return {
            "model": self.name,
            "encoding": self.decoder.encoding.label,
            "model_fingerprint": digest,
            "dtype": str(weights.dtype).removeprefix("torch."),
            "device": str(weights.device),
        }

    @torch.inference_mode()
    def read(self, ids: Tensor, watch: Watch = Watch(), change: Change = Change(), keep: int = 1) -> Tensor:
        """Read tokens in one pass; see ``Subject.read``."""
        if change.attention:
            raise UnsupportedModelError(
                f"positions, mask and scores of a small decoder belong to its encoding "
                f"({self.decoder.encoding.label}) and cannot be changed; give a language model with --model"
            )
        positions = _Watched(self.decoder.positions, watch) if watch.attention else None

        def enters(layer: int, states: Tensor) -> None:
            if watch.states is not None:
                watch.states(layer, states)
            if watch.inputs is not None:
                watch.inputs(layer, self.decoder.layer_input(layer, states))

        logits, _ = self.decoder(ids.to(self.decoder.embedding.device), positions=positions, on_states=enters)
        last: Tensor = logits[:, -keep:].float()
        return last


class _Watched(Positions):
    """The positions of a decoder, watched."""

    def __init__(self, positions: Positions, watch: Watch) -> None:
        super().__init__()
        self.positions, self.watch = positions, watch

    def embed(self, states: Tensor, start: int) -> Tensor:
        return self.positions.embed(states, start)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended = self.positions.attend(layer, query, key, value)
        if self.watch.weights is not None:
            unit = torch.eye(key.shape[2], dtype=value.dtype, device=value.device)
            self.watch.weights(
                layer, self.positions.attend(layer, query, key, unit.expand(*key.shape[:2], -1, -1)).float()
            )
        if self.watch.attended is not None:
            self.watch.attended(layer, attended)
        return attended


def is_decoder_folder(folder: Path) -> bool:
    """Return whether a folder holds a decoder that ``Decoder.save`` wrote, such as one of ``rag-posfix lab run``."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and {"encoding", "shape"} <= config.keys()


@dataclass(frozen=True, slots=True, eq=False)
class LanguageModel:
    """A loaded language model that probes read. Implements ``Subject``.

    Attributes:
        engine: The model with its tokenizer.
    """

    engine: Engine

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return self.engine.loaded.spec.shape.n_layers

    @property
    def n_heads(self) -> int:
        """Number of query heads of a layer."""
        return self.engine.loaded.spec.shape.n_heads

    @property
    def width(self) -> int:
        """Channels of a hidden state."""
        return self.engine.loaded.spec.shape.hidden_size

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.engine.loaded.model.config.get_text_config().vocab_size)

    @property
    def longest(self) -> int:
        """The context window."""
        return self.engine.context_window

    def facts(self) -> Mapping[str, Any]:
        """Return name, fingerprint, dtype and device."""
        return model_facts(self.engine)

    def read_prefix(self, ids: Sequence[int], watch: Watch = Watch(), rows: int = 1) -> GrowingCache:
        """Return keys and values of first tokens, after which passes of so many rows read on."""
        self._needs_all_keys()
        cache = GrowingCache(self.n_layers)
        self.read(torch.tensor([ids]), watch, prefix=cache)
        return cache if rows == 1 else cache.copy(len(ids), torch.zeros(rows, dtype=torch.long))

    @torch.inference_mode()
    def read(
        self,
        ids: Tensor,
        watch: Watch = Watch(),
        change: Change = Change(),
        keep: int = 1,
        prefix: GrowingCache | None = None,
    ) -> Tensor:
        """Read tokens in one pass; see ``Subject.read``.

        Without anything to watch or change in attention the model's own attention runs.

        Args:
            prefix: Keys and values of the tokens before these; those of these are appended.
        """
        before = 0 if prefix is None else prefix.get_seq_length()
        position_ids = torch.arange(before + ids.shape[1]) if change.positions is None else change.positions
        loaded = self.engine.loaded.reading(int(position_ids.max()) + 1)
        ids = ids.to(loaded.device)
        positions = position_ids.to(loaded.device).view(-1, position_ids.shape[-1]).expand(ids.shape[0], -1)
        overrides = Overrides()
        if watch.attention or change.attention:
            self._needs_all_keys()
            overrides = Overrides(attend=WatchedAttention(watch, change))
        context = ForwardContext(overrides, positions.float(), loaded.spec, on_hidden_states=watch.inputs)
        with active(context):
            output = loaded.model(
                input_ids=ids, position_ids=positions[:, before:], past_key_values=prefix,
                use_cache=prefix is not None, logits_to_keep=keep, output_hidden_states=watch.states is not None,
            )  # fmt: skip
        if watch.states is not None:  # the last of them comes after the last norm, and enters no layer
            for layer, states in enumerate(output.hidden_states[:-1]):
                watch.states(layer, states)
        logits: Tensor = output.logits.float()
        return logits

    def _needs_all_keys(self) -> None:
        if not self.engine.loaded.keeps_all_keys:
            raise UnsupportedModelError(
                f"the attention of {self.engine.model_id} cannot be probed: some of its layers see a window of the "
                "last tokens only; choose a model whose every layer sees all tokens"
            )
        lacks = self.engine.loaded.spec.shape.lacks
        if Capability.SOFTMAX in lacks:
            raise UnsupportedModelError(
                f"the attention of {self.engine.model_id} cannot be probed: {lacks[Capability.SOFTMAX]}"
            )


def language_model(subject: Subject, probe: str) -> LanguageModel:
    """Return the subject if it is a language model."""
    if not isinstance(subject, LanguageModel):
        raise UnsupportedModelError(
            f"the probe {probe} reads text, and a small decoder has no tokenizer; give a language model with --model"
        )
    return subject


def open_subject(settings: Settings) -> Subject:
    """Return the model of the settings, loaded."""
    folder = Path(settings.model)
    if is_decoder_folder(folder):
        from rag_posfix.generation.load import usable_device
        from rag_posfix.lab.encodings import load_decoder

        return SmallDecoder(load_decoder(folder, usable_device(settings.device)).eval(), folder.name)
    from rag_posfix.pipeline.build import build_engine

    engine = build_engine(settings)
    if (plain := engine.loaded.spec.unhooked) is not None:
        raise UnsupportedModelError(
            f"{engine.model_id} runs without the attention hook ({plain.reason}) and cannot be probed; choose a model "
            "that rag-posfix verify reads with the attention hook"
        )
    return LanguageModel(engine)


def check_length(subject: Subject, tokens: int, fewest: int = 2) -> None:
    """Check that a model reads so many tokens at a time."""
    if not fewest <= tokens <= subject.longest:
        raise ConfigError(
            f"strings of tokens={tokens} cannot be probed; give {fewest} to {subject.longest}, the context of this "
            "model"
        )


def random_strings(
    subject: Subject,
    strings: int,
    tokens: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
    words: int | None = None,
) -> Iterator[Tensor]:
    """Yield strings of random tokens, each (1, tokens); the same for the same seed.

    Args:
        words: Each string has at most so many different tokens, drawn for it, so that strings differ in their content
            as texts do; None draws every token from the whole vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in counted(range(strings), progress):
        if words is None:
            yield torch.randint(0, subject.vocabulary, (1, tokens), generator=generator)
        else:
            vocabulary = torch.randint(0, subject.vocabulary, (words,), generator=generator)
            yield vocabulary[torch.randint(0, words, (1, tokens), generator=generator)]


def states_of(
    subject: Subject,
    strings: int,
    tokens: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
    words: int | None = None,
) -> Iterator[Tensor]:
    """Yield the residual stream that enters each layer, (L, tokens, width) float32 on the CPU, string by string.

    Args: as ``random_strings``.
    """
    for ids in random_strings(subject, strings, tokens, seed, progress, words):
        residual = torch.zeros(subject.n_layers, tokens, subject.width)

        def keep(layer: int, states: Tensor, residual: Tensor = residual) -> None:
            residual[layer] = states[0].float().cpu()

        subject.read(ids, Watch(states=keep))
        yield residual


States = Mapping[int, Tensor]
"""Layer -> what its attention reads, (1, T, width)."""

TASK = "Find the value of the key in the data.\n\n"


@dataclass(frozen=True, slots=True)
class KeyValuePrompt:
    """A prompt with pairs of keys and values, and a question for the value of one key.

    Attributes:
        ids: Tokens of the prompt.
        pairs: Tokens of each pair.
        keys: Tokens of each key, within the pair.
        values: Tokens of each value, within the pair.
        gold: The pair that is asked for.
        answer: Tokens of its value.
    """

    ids: tuple[int, ...]
    pairs: tuple[Span, ...]
    keys: tuple[Span, ...]
    values: tuple[Span, ...]
    gold: int
    answer: tuple[int, ...]

    @property
    def tensor(self) -> Tensor:
        """The tokens of the prompt, (1, T)."""
        return torch.tensor([self.ids])

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens before the question."""
        return self.ids[: self.pairs[-1].stop]

    @property
    def with_answer(self) -> Tensor:
        """The tokens of the prompt and of its answer without the last, (1, T + A - 1)."""
        return torch.tensor([self.ids + self.answer[:-1]])


def key_value_prompts(model: LanguageModel, pairs: int, count: int, seed: int = 0) -> list[KeyValuePrompt]:
    """Return prompts with the gold pair at each position in turn.

    Keys are five random letters, values four random digits. Prompt n asks for the pair at position n modulo ``pairs``;
    the pairs of each ``pairs`` prompts in a row are the same and only the question differs.

    Source: Liu et al. (2024), Lost in the Middle, section 3, https://arxiv.org/abs/2307.03172
    Differs from the paper: keys and values are short, so that small models can copy them.

    Args:
        pairs: Pairs of a prompt, 2 or more.
    """
    generator = random.Random(seed)
    prompts = []
    for number in range(count):
        if number % pairs == 0:
            records = key_value_pairs(generator, pairs)
        prompts.append(key_value_prompt(model, records, number % pairs))
        needed = len(prompts[-1].ids) + len(prompts[-1].answer)
        if needed > model.longest:
            raise ConfigError(
                f"pairs={pairs} make prompts of {needed} tokens, the context of this model has {model.longest}; "
                "use fewer"
            )
    return prompts


def key_value_prompt(model: LanguageModel, records: Sequence[tuple[str, str]], gold: int) -> KeyValuePrompt:
    """Return the prompt with these pairs in their order that asks for the key of one."""
    encode = model.engine.encoder.encode_text
    ids = list(model.engine.encoder.encode_prompt(TASK))
    spans, keys, values = [], [], []
    before_key = len(encode("Key:"))
    answer: tuple[int, ...] = ()
    for position, (key, value) in enumerate(records):
        start = len(ids)
        keys.append(Span(start + before_key, start + len(encode(f"Key: {key}"))))
        ids += encode(f"Key: {key}\nValue:")
        value_ids = encode(f" {value}")
        values.append(Span(len(ids), len(ids) + len(value_ids)))
        ids += value_ids + encode("\n\n")
        spans.append(Span(start, len(ids)))
        answer = tuple(value_ids) if position == gold else answer
    ids += encode(f"The value of the key asked for:\nKey: {records[gold][0]}\nValue:")
    return KeyValuePrompt(tuple(ids), tuple(spans), tuple(keys), tuple(values), gold, answer)


def after_context(
    model: LanguageModel, prompts: Sequence[KeyValuePrompt], progress: Callable[[int, int], None] | None = None
) -> Iterator[tuple[KeyValuePrompt, GrowingCache, States]]:
    """Yield each prompt with keys, values and states of the tokens before its question; neighbours may share them."""
    ids: tuple[int, ...] = ()
    for prompt in counted(prompts, progress):
        if ids != prompt.context:
            ids, states = prompt.context, dict[int, Tensor]()
            prefix = model.read_prefix(ids, Watch(inputs=states.__setitem__))
        yield prompt, prefix.branch(), states


def answer_loss(logits: Tensor, prompt: KeyValuePrompt) -> Tensor:
    """Return the loss of an answer, -log p per token, given the prompt and the tokens before; () float64.

    Shapes:
        logits: (A, vocabulary).
    """
    return cross_entropy(logits.double().cpu(), torch.tensor(prompt.answer))
