"""Prompts of probes: random tokens, and keys and values with a gold pair."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.record import counted
from rag_posfix.generation.model.kv_cache import GrowingCache
from rag_posfix.plan.layout import Span
from rag_posfix.probing.subject import LanguageModel, Subject, Watch


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
LETTERS = "abcdefghjkmnpqrstuvwxyz"


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
            records = _pairs(generator, pairs)
        prompts.append(_prompt(model, records, number % pairs))
        needed = len(prompts[-1].ids) + len(prompts[-1].answer)
        if needed > model.longest:
            raise ConfigError(
                f"pairs={pairs} make prompts of {needed} tokens, the context of this model has {model.longest}; "
                "use fewer"
            )
    return prompts


def _pairs(generator: random.Random, count: int) -> list[tuple[str, str]]:
    keys: dict[str, str] = {}
    while len(keys) < count:
        keys["".join(generator.choices(LETTERS, k=5))] = "".join(generator.choices("0123456789", k=4))
    return list(keys.items())


def _prompt(model: LanguageModel, records: Sequence[tuple[str, str]], gold: int) -> KeyValuePrompt:
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
