"""Models of real shapes with random weights, made on the device, and prompts of random tokens."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.patching.install import install, verify
from rag_posfix.plan.layout import Layout, Span

PREFIX_TOKENS, SUFFIX_TOKENS = 32, 32

_LLAMA_8B: Mapping[str, Any] = MappingProxyType({
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
})  # fmt: skip
_QWEN3_8B: Mapping[str, Any] = MappingProxyType({
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
})  # fmt: skip
_SMOLLM2_135M: Mapping[str, Any] = MappingProxyType({
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
})  # fmt: skip
_TINY: Mapping[str, Any] = MappingProxyType({
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": False,
})  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A configuration of transformers, with the numbers of the published model.

    Attributes:
        name: Of the model whose shape it has.
        family: ``Llama`` for ``LlamaConfig`` and ``LlamaForCausalLM``.
        spread: Standard deviation of the weights; None leaves them as transformers initialises them.
    """

    name: str
    family: str
    config: Mapping[str, Any] = field(repr=False)
    spread: float | None = None


@dataclass(frozen=True)
class Size:
    """Passages of a prompt, and tokens of each."""

    passages: int
    tokens: int

    @property
    def label(self) -> str:
        """Return a text such as ``20x500``."""
        return f"{self.passages}x{self.tokens}"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the tokens of each passage."""
        return (self.tokens,) * self.passages


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        exact: Small models of the part on exactness.
        methods: All that are measured, those that the asks are about first; None is every registered one.
        cells: Models and prompts of the part on first tokens, the most important first.
        ask_size: The prompt of the asks, in the first model.
        several: The prompt of requests that decode together.
        batches: Numbers of requests that decode together.
        repeats: Readings of each number; their median is kept.
        new_tokens: Decode steps per reading.
        copied_bytes: What is copied to measure the bus.
    """

    name: str
    exact: tuple[Model, ...]
    methods: tuple[str, ...] | None
    cells: tuple[tuple[Model, Size], ...]
    ask_size: Size
    several: Size
    batches: tuple[int, ...]
    repeats: int
    new_tokens: int
    copied_bytes: int

    @property
    def model(self) -> Model:
        """The model that the asks are about."""
        return self.cells[0][0]


_LLAMA, _QWEN, _SMOL = (
    Model("Llama-3.1-8B", "Llama", _LLAMA_8B),
    Model("Qwen3-8B", "Qwen3", _QWEN3_8B),
    Model("SmolLM2-135M", "Llama", _SMOLLM2_135M),
)
_EXACT = (
    Model("tiny-llama", "Llama", _TINY, spread=0.08),
    Model("tiny-qwen3", "Qwen3", {**_TINY, "head_dim": 16}, spread=0.08),
)
"""Small models whose logits differ much from token to token, so that a wrong computation shows."""

_LARGE, _MIDDLE = Size(20, 500), Size(20, 150)
_OTHERS = (Size(50, 150), Size(10, 150), Size(5, 150))

REAL = Scale(
    name="real",
    exact=_EXACT,
    methods=None,
    cells=(
        *((_LLAMA, size) for size in (_LARGE, _MIDDLE)),
        *((_SMOL, size) for size in (_MIDDLE, Size(50, 150))),
        *((_QWEN, size) for size in (_LARGE, _MIDDLE)),
        *((_LLAMA, size) for size in _OTHERS),
        *((_SMOL, size) for size in (Size(10, 150), Size(5, 150), _LARGE)),
        *((_QWEN, size) for size in _OTHERS),
    ),
    ask_size=_LARGE,
    several=_MIDDLE,
    batches=(1, 8, 32),
    repeats=2,
    new_tokens=16,
    copied_bytes=1 << 30,
)
TINY = Scale(
    name="tiny",
    exact=_EXACT[:1],
    methods=("none", "parallel_encoding", "context_experts", "inter_document", "hidden_scaling"),
    cells=(
        (Model("tiny-llama", "Llama", _TINY), Size(3, 12)),
        (Model("tiny-qwen3", "Qwen3", {**_TINY, "head_dim": 16}), Size(2, 8)),
    ),
    ask_size=Size(3, 12),
    several=Size(2, 8),
    batches=(1, 3),
    repeats=1,
    new_tokens=2,
    copied_bytes=1 << 20,
)


class RandomTokens:
    """The tokenizer of random tokens: every token is text and none ends an answer."""

    eos_ids: frozenset[int] = frozenset()

    def decode_answer(self, token_ids: Sequence[int]) -> str:
        """Return the tokens' numbers."""
        return " ".join(map(str, token_ids))


def loaded_model(model: Model, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Return a model with random weights and the attention hook, checked; the same weights on every call.

    Weights are made on the device and in the dtype that they have, so that no other memory is needed. With ``spread``
    they are made on the CPU in float32 first: then they are the same numbers on every device.
    """
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{model.family}Config")(**model.config)
    make = transformers.AutoModelForCausalLM.from_config
    if model.spread is None:
        with torch.device(device):
            network = make(config, dtype=dtype, attn_implementation="sdpa").eval()
    else:
        network = make(config, dtype=torch.float32, attn_implementation="sdpa").eval()
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, model.spread)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        network = network.to(device=device, dtype=dtype)
    spec = install(network)
    verify(network, spec)
    return LoadedModel(network, spec)


def engine_of(loaded: LoadedModel, name: str) -> Engine:
    """Return an engine over a model of random tokens."""
    encoder: Any = RandomTokens()
    return Engine(loaded, encoder, name, f"{name}-random")


def random_layout(vocabulary: int, lengths: Sequence[int], seed: int = 0) -> Layout:
    """Return a prompt of random tokens, its passages all different and of exactly these lengths."""
    random = torch.Generator().manual_seed(seed)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, vocabulary, (count,), generator=random).tolist())

    passages = [draw(length) for length in lengths]
    starts = list(itertools.accumulate(lengths, initial=PREFIX_TOKENS))
    spans = tuple(Span(*pair) for pair in itertools.pairwise(starts))
    end = starts[-1] + SUFFIX_TOKENS
    return Layout(
        token_ids=(*draw(PREFIX_TOKENS), *itertools.chain(*passages), *draw(SUFFIX_TOKENS)),
        prefix=Span(0, PREFIX_TOKENS),
        passages=spans,
        texts=spans,
        suffix=Span(starts[-1], end),
        question=Span(starts[-1] + 4, end - 8),
        keys=tuple("-".join(map(str, passage[:16])) for passage in passages),
        relevance=tuple(1.0 - 0.9 * index / len(lengths) for index in range(len(lengths))),
    )


def free_memory(device: torch.device) -> None:
    """Return unused memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
