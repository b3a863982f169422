"""Text 3 on real text: perplexity of prose and code, and what heads of CoPE count in sentences and paragraphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rag_posfix.evaluation.figures import OTHER_COLORS, finish_axes, new_column
from rag_posfix.evaluation.record import Progress
from rag_posfix.lab.claims.base import Claim, Condition, Evidence, trained_decoder
from rag_posfix.lab.claims.contextual import better, compare_encodings, cope, lab_sizes
from rag_posfix.lab.contextual_maps import COUNTERS, above_others, mean_gates, record_cope
from rag_posfix.lab.encodings import Decoder, create_encoding
from rag_posfix.lab.experiment import RunConfig, TrainingSettings, new_decoder
from rag_posfix.lab.probing.base import estimate
from rag_posfix.lab.tasks import TRAINED
from rag_posfix.lab.tasks.text import PARAGRAPH, PROSE, SENTENCE_ENDS, Text, vocabulary_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("word", "other sign", "sentence end", "paragraph end")
SHOWN = 48
"""Words of the text in the figure."""


def kinds_of(tokens: Sequence[str]) -> Tensor:
    """Return the index in ``KINDS`` of each token, (len(tokens),)."""
    ends = {**dict.fromkeys(SENTENCE_ENDS, 2), PARAGRAPH: 3}
    return torch.tensor([ends.get(token, 0 if token[:1].isalnum() or token[:1] in "<_" else 1) for token in tokens])


def real_maps(
    _: None,
    progress: Progress,
    *,
    steps: int,
    p_max: int,
    length: int,
    words: int,
    texts: int,
    width: int,
    layers: int,
) -> Evidence:
    """Train CoPE on prose, choose the heads that count sentences and paragraphs, and test them on other excerpts.

    The same is done with the decoder before training: a head chosen among many opens more on ends by chance.
    """
    settings = TrainingSettings(steps, evaluate_every=steps, examples=2, width=width, layers=layers)
    task = Text(PROSE, length, words)
    config = RunConfig(task, create_encoding("cope", {"p_max": p_max}), settings, seed=0)
    decoder, vocabulary = trained_decoder(config, progress), vocabulary_of(PROSE, words)
    kinds = kinds_of(vocabulary)
    with progress("reading other excerpts"):
        trained = _counters(decoder, task, kinds, texts)
        untrained = _counters(new_decoder(config, torch.device("cpu")), task, kinds, texts)
    shown, numbers = _shown(task, kinds), {}
    maps: dict[str, Any] = {}
    for name, (differences, (layer, head, query)) in trained.items():
        numbers[f"gate on {name} less that on others"] = estimate(differences)
        numbers[f"the same before training, {name}"] = estimate(untrained[name][0])
        numbers[f"after less before training, {name}"] = estimate(differences - untrained[name][0])
        title = f"{name}: layer {layer}, head {head}, queries: {KINDS[query]}"
        maps[title] = record_cope(decoder, shown[None]).weights[layer][0, head].tolist()
    tokens = [vocabulary[index] for index in shown.tolist()]
    return Evidence(numbers, partial(_draw_maps, maps, tokens, kinds[shown].tolist()))


def _counters(decoder: Decoder, task: Text, kinds: Tensor, texts: int) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """Return of each counter its differences on excerpts that did not choose it; layer, head and kind of query."""

    def gates(first: int, count: int) -> Tensor:
        read = (task.excerpts(TRAINED, 1, torch.Generator().manual_seed(first + number))[0] for number in range(count))
        return mean_gates(decoder, read, kinds, len(KINDS))

    fitted, tested = gates(0, texts), [gates(seed, 1) for seed in range(texts, 2 * texts)]
    counters = {}
    for name, kind in COUNTERS.items():
        above = above_others(fitted, kind, KINDS)
        best = above.flatten().argmax()
        differences = torch.stack([above_others(each, kind, KINDS).flatten()[best] for each in tested])
        counters[name] = differences, tuple(int(index) for index in torch.unravel_index(best, above.shape))
    return counters


def _shown(task: Text, kinds: Tensor) -> Tensor:
    """Return the first held-out excerpt that has a paragraph end, and the most sentence ends of fifty such."""
    excerpts = [task.excerpts("x2", 1, torch.Generator().manual_seed(seed))[0, :SHOWN] for seed in range(200)]
    with_end = [ids for ids in excerpts if (kinds[ids[4:-4]] == 3).any()][:50] or excerpts
    return max(with_end, key=lambda ids: int((kinds[ids] == 2).sum()))


def _draw_maps(maps: dict[str, Any], tokens: Sequence[str], kinds: Sequence[int]) -> Figure:
    """Return an attention map per counter, the ends of what it counts as lines."""
    figure, column = new_column(len(maps), 6.2)
    for axes, (title, values), kind in zip(column, maps.items(), (2, 3), strict=True):
        image = axes.imshow(values, aspect="auto", cmap="viridis", vmax=0.3)  # queries downwards, as text is read
        figure.colorbar(image, ax=axes, shrink=0.6, label="attention, up to .3")
        for place in (place for place, of in enumerate(kinds) if of == kind):
            axes.axvline(place, color=OTHER_COLORS[2], linewidth=0.6)
            axes.axhline(place, color=OTHER_COLORS[2], linewidth=0.6)
        for ticks in (axes.set_xticks, axes.set_yticks):
            ticks(range(len(tokens)), [token[:12] for token in tokens], fontsize=5)
        axes.tick_params(axis="x", rotation=90)
        finish_axes(axes, f"attention of the counter of\n{title}", "key", "query", legend=False)
    return figure


_FULL = {"seeds": 3, "steps": 10_000, "width": 256, "layers": 4, "length": 1024, "words": 4096}

REAL_TEXT = (
    Claim(
        3, "real-text",
        "CoPE has a lower perplexity on prose than RoPE and relative positions, also at five times the length.",
        compare_encodings("text", cope, "rope", "shaw"),
        (*better(("rope", "shaw"), TRAINED), *better(("rope", "shaw"), "x5")),
        lab_sizes(seeds=2, steps=400, length=48, examples=64, source=PROSE, words=512), _FULL, reads_model=False,
        see="The perplexity of held-out prose by encoding and length, each seed a mark.",
        beware="The reference of Python, 117,000 words, not Wikitext; give another text with --size source=FILE.",
    ),
    Claim(
        3, "code", "CoPE has a lower perplexity on code than RoPE, also at five times the length.",
        compare_encodings("text", cope, "rope"), (*better(("rope",), TRAINED), *better(("rope",), "x5")),
        lab_sizes(seeds=2, steps=400, length=48, examples=64, source="code", words=512), _FULL, reads_model=False,
        see="The perplexity of held-out code by encoding and length, each seed a mark.",
        beware="Modules of one library, the held-out ones at the end of the alphabet; two seeds are few.",
    ),
    Claim(
        3, "real-maps", "In real text gates of CoPE open on the ends of sentences and of paragraphs.", real_maps,
        (
            *(Condition(f"gate on {name} less that on others", above=0.1) for name in COUNTERS),
            *(Condition(f"after less before training, {name}", above=0) for name in COUNTERS),
        ),
        {"steps": 400, "p_max": 8, "length": 64, "words": 512, "texts": 16, "width": 64, "layers": 2},
        {"steps": 10_000, "length": 512, "words": 4096, "texts": 64, "width": 256, "layers": 4}, reads_model=False,
        see="The attention of the best counters on real sentences and paragraphs, the ends that they count as lines.",
        beware="A difference of 1 is a perfect counter, one of 0.1 a tendency; one small decoder with one seed.",
    ),
)  # fmt: skip
