"""What the heads of a trained CoPE count: gates by kind of word, and attention maps on a text with sentence ends."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.figures import OTHER_COLORS, finish_axes, new_column, with_figure
from rag_posfix.evaluation.record import ExperimentRecord, Progress, environment, silent
from rag_posfix.lab.encodings.base import Positions
from rag_posfix.lab.encodings.cope import CopePositions, contextual_positions
from rag_posfix.lab.encodings.decoder import Decoder, load_decoder
from rag_posfix.lab.tasks.language import KINDS, NAMES, WORDS, Language, sentences, token_ids_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN_SENTENCES = 8
COUNTERS = {"sentences": "sentence end", "paragraphs": "paragraph end"}
"""What a head may count, and the kind of word with open gates."""
CAPTION = (
    "How far each head's gates open more on ends than on other words, and the attention of the best counters; do not "
    "conclude that a head counts whose difference is near that of an untrained decoder."
)


class RecordingCope(Positions):
    """The contextual positions of a decoder, which keep the gates and the attention probabilities of each layer.

    Attributes:
        gates, weights: By layer, (B, H, T, T).
    """

    def __init__(self, positions: CopePositions) -> None:
        super().__init__()
        self.positions = positions
        self.gates: dict[int, Tensor] = {}
        self.weights: dict[int, Tensor] = {}

    def embed(self, states: Tensor, start: int) -> Tensor:
        """Return what the encoding makes of embeddings."""
        return self.positions.embed(states, start)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention as it is; with the identity as values it is the probabilities."""
        unit = torch.eye(key.shape[2], dtype=value.dtype, device=value.device).expand(*key.shape[:2], -1, -1)
        self.gates[layer] = self.positions.gates(query, key)
        self.weights[layer] = self.positions.attend(layer, query, key, unit)
        return self.weights[layer] @ value


@torch.inference_mode()
def record_cope(decoder: Decoder, ids: Tensor) -> RecordingCope:
    """Return gates and attention probabilities of every layer while a decoder reads a text.

    Args:
        decoder: A decoder with the encoding ``cope`` or one that derives from it.
        ids: (1, T).
    """
    positions = decoder.positions
    if not isinstance(positions, CopePositions):
        raise ConfigError(
            f"the decoder has the encoding {decoder.encoding.label}, which has no gates; give one that was trained "
            "with cope or cope_rope"
        )
    recording = RecordingCope(positions)
    decoder.eval()(ids.to(decoder.embedding.device), positions=recording)
    return recording


def gates_by_kind(decoder: Decoder, texts: int, words: int, seed: int = 0, people: int = len(NAMES)) -> Tensor:
    """Return the mean gate by kind of query and kind of key, over all keys at or before the query.

    Formula: G(l, h, a, b) = mean of g_ij(l, h) over texts and over i >= j with word i of kind a and word j of kind b;
        0 if no text has such words.

    Args:
        decoder: As for ``record_cope``.
        people: Of the texts, as in ``sentences``.

    Shapes:
        returns: (L, H, len(KINDS), len(KINDS)) float64.
    """
    kind_of = {word: index for index, kind in enumerate(KINDS.values()) for word in kind}
    kinds = torch.tensor([kind_of[word] for word in WORDS])
    read = (torch.tensor(_text(random.Random(seed + number), words, people)) for number in range(texts))
    return mean_gates(decoder, read, kinds, len(KINDS))


def mean_gates(decoder: Decoder, texts: Iterable[Tensor], kinds: Tensor, n_kinds: int) -> Tensor:
    """Return the mean gate by kind of query and kind of key; see ``gates_by_kind``.

    Shapes:
        texts: (T,) each. kinds: (vocabulary,), of each token. returns: (L, H, n_kinds, n_kinds) float64.
    """
    sums = torch.zeros(decoder.shape.layers, decoder.shape.heads, n_kinds, n_kinds, dtype=torch.float64)
    counts = torch.zeros(n_kinds, n_kinds, dtype=torch.float64)
    for ids in texts:
        seen = torch.ones(len(ids), len(ids), dtype=torch.float64).tril()
        is_kind = (kinds[ids][:, None] == torch.arange(n_kinds)).double()  # (T, K)
        counts += is_kind.T @ seen @ is_kind
        for layer, gates in record_cope(decoder, ids[None]).gates.items():
            sums[layer] += is_kind.T @ (gates[0].double().cpu() * seen) @ is_kind
    return sums / counts.clamp(min=1)


def map_contextual_positions(
    folder: Path, *, texts: int = 16, words: int = 128, seed: int = 0, people: int = len(NAMES),
    out: Path | None = None, progress: Progress = silent,
) -> ExperimentRecord:  # fmt: skip
    """Show which heads of a trained CoPE count sentences, and which count paragraphs.

    A head counts a kind of word for a kind of query if the gates of these queries are open on these words and closed
    on all others. The best counter is the head and the kind of query whose mean gate on the kind is farthest above the
    largest mean gate on another kind. A difference of 1 is a perfect counter, one of 0 or less no counter. The largest
    of many differences is above 0 by chance: compare with an untrained decoder.

    Source: Golovneva et al. (2024), Contextual Position Encoding, section 5.4 and its attention maps,
        https://arxiv.org/abs/2405.18719
    Differs from the paper: a small decoder on generated text (the task ``language``) instead of Wikitext.

    Args:
        people: Of the texts, as the decoder was trained with (``language:people=N``).
    """
    decoder = load_decoder(folder)
    if decoder.shape.vocabulary != len(WORDS):
        raise ConfigError(
            f"the decoder in {folder} knows {decoder.shape.vocabulary} tokens, the text of the task language has "
            f"{len(WORDS)}; give a decoder that was trained on language"
        )
    people = Language(people=people).people  # rejects numbers that the task rejects
    with progress("reading texts"):
        gates = gates_by_kind(decoder, texts, words, seed, people)
    token_ids = _figure_text(seed, people)
    summary = {
        "kinds": list(KINDS),
        "gates": gates.tolist(),
        "counters": {name: _counter(decoder, gates, kind, token_ids) for name, kind in COUNTERS.items()},
        "text": [WORDS[token_id] for token_id in token_ids],
    }
    head = {
        "kind": "lab-maps",
        **environment(),
        "encoding": decoder.encoding.label,
        "settings": {"texts": texts, "words": words, "seed": seed, "people": people},
        "summary": summary,
    }
    return with_figure(ExperimentRecord(head).write(out), draw_maps, CAPTION)


def above_others(gates: Tensor, kind: str, kinds: Sequence[str] = tuple(KINDS)) -> Tensor:
    """Return how far the mean gate on a kind of key is above the largest one on another kind.

    Shapes:
        gates: (..., len(kinds)). returns: (...).
    """
    index = kinds.index(kind)
    other_gates = gates.clone()
    other_gates[..., index] = -1
    return gates[..., index] - other_gates.amax(dim=-1)


def _counter(decoder: Decoder, gates: Tensor, kind: str, token_ids: list[int]) -> dict[str, Any]:
    """Return the head and kind of query that count a kind best, with positions and attention on the shown text."""
    above = above_others(gates, kind)  # (L, H, K)
    layer, head, query = (int(index) for index in torch.unravel_index(above.argmax(), above.shape))
    gate = float(gates[layer, head, query, list(KINDS).index(kind)])
    difference = float(above[layer, head, query])
    recording = record_cope(decoder, torch.tensor([token_ids]))
    positions = contextual_positions(recording.gates[layer], decoder.encoding.parameters["p_max"])
    return {
        "layer": layer,
        "head": head,
        "query": list(KINDS)[query],
        "gate": gate,
        "largest_other_gate": gate - difference,
        "difference": difference,
        "positions_of_last": positions[0, head, -1].tolist(),
        "attention": recording.weights[layer][0, head].tolist(),
    }


def draw_maps(head: Mapping[str, Any]) -> Figure:
    """Return what each head counts by kind of query, and for each counter its attention map with the ends as lines."""
    summary = head["summary"]
    figure, column = new_column(2 * len(COUNTERS), 3.6)
    counters, maps = column[: len(COUNTERS)], column[len(COUNTERS) :]
    gates = torch.tensor(summary["gates"])
    n_heads = gates.shape[1]
    names = [f"layer {index // n_heads}, head {index % n_heads}" for index in range(gates.shape[0] * n_heads)]
    for axes, kind in zip(counters, COUNTERS.values(), strict=True):
        image = axes.imshow(
            above_others(gates, kind).flatten(0, 1).numpy(), aspect="auto", vmin=0, vmax=1, cmap="viridis"
        )
        figure.colorbar(image, ax=axes, shrink=0.85)
        axes.set_xticks(range(len(summary["kinds"])), summary["kinds"], rotation=30, ha="right", fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        finish_axes(axes, f"gate on a {kind} less the largest other gate", "kind of the query", "", legend=False)
    for axes, (name, counter) in zip(maps, summary["counters"].items(), strict=True):
        image = axes.imshow(counter["attention"], aspect="auto", cmap="viridis", vmax=0.3)
        figure.colorbar(image, ax=axes, shrink=0.85, label="attention, up to .3")
        for position, word in enumerate(summary["text"]):
            if word in KINDS[COUNTERS[name]]:
                axes.axvline(position, color=OTHER_COLORS[2], linewidth=0.6)
                axes.axhline(position, color=OTHER_COLORS[2], linewidth=0.6)
        title = f"{name}: layer {counter['layer']}, head {counter['head']}, queries: {counter['query']}"
        finish_axes(axes, f"attention of the counter of\n{title}", "key (word)", "query (word)", legend=False)
    return figure


def _text(draw: random.Random, words: int, people: int) -> list[int]:
    return list(
        islice((token_id for sentence in sentences(draw, people) for token_id in token_ids_of(sentence)), words)
    )


def _figure_text(seed: int, people: int) -> list[int]:
    """Return the text of the figure: two paragraphs."""
    text = islice(sentences(random.Random(seed), people), SHOWN_SENTENCES)
    return [token_id for sentence in text for token_id in token_ids_of(sentence)]
