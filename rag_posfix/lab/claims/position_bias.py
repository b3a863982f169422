"""Text 1: where the position bias of a trained decoder comes from, and what changes it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.evaluation.data.questions import key_value_pairs
from rag_posfix.evaluation.figures import (
    OTHER_COLORS,
    draw_curves,
    draw_estimates,
    draw_map,
    draw_numbers,
    finish_axes,
    new_column,
)
from rag_posfix.evaluation.record import ExperimentRecord, Progress, counted
from rag_posfix.lab.claims.base import Claim, Condition, Evidence, by_probe, exact
from rag_posfix.lab.claims.contextual import compare_encodings, lab_sizes
from rag_posfix.lab.claims.longbench import LONGBENCH
from rag_posfix.lab.claims.without_positions import CHANGED, FREE, MASKED, NOTHING, PLACED, order_effects
from rag_posfix.lab.encodings import Encoding, create_encoding
from rag_posfix.lab.probing.attention_edit import scaled_score
from rag_posfix.lab.probing.attention_mass import AttentionMass, slot_masses
from rag_posfix.lab.probing.base import StateSums, estimate, intervals_by_group, sums_by_group
from rag_posfix.lab.probing.bias_at_init import BiasAtInit
from rag_posfix.lab.probing.hidden_geometry import HiddenGeometry, chance_of, decompose
from rag_posfix.lab.probing.positional_dimensions import (
    PositionalDimensions,
    find_channels,
    mean_hidden_states,
    rank_channels,
)
from rag_posfix.lab.probing.positional_vectors import PositionalVectors, estimate_of_layer
from rag_posfix.lab.probing.rope_waveform import deepest_troughs, own_waveform
from rag_posfix.lab.probing.scale_trials import scaled_attention
from rag_posfix.lab.probing.subject import (
    Change,
    LanguageModel,
    Subject,
    Watch,
    after_context,
    answer_loss,
    key_value_prompt,
    key_value_prompts,
    language_model,
    random_strings,
    states_of,
)
from rag_posfix.mitigations.hidden_scaling import default_layers
from rag_posfix.plan.plan import Capability, HiddenScale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FACTORS = (-1.0, 0.0, 1.0, 2.0)
"""Factors of the hidden channel; 1 changes nothing."""
ANIMALS = ("cat", "mouse", "dog", "bird", "fish", "fox", "wolf", "horse", "cow", "pig")


def attention_ends(record: ExperimentRecord) -> dict[str, dict[str, Any]]:
    """Return the mass of the first and the last slot over that of the middle half, of pairs nobody asks for."""
    ratios = []
    for row in record.rows:
        slots, gold = row["slots"], row["gold"]
        count = len(slots)
        middle = [slots[slot] for slot in range(count // 4, count - count // 4) if slot != gold]
        if gold not in (0, count - 1):
            ratios.append([slots[end] * len(middle) / sum(middle) for end in (0, -1)])
    first, last = torch.tensor(ratios).unbind(dim=1)
    return {"first over middle": estimate(first), "last over middle": estimate(last)}


def answer_losses(subject: Subject, progress: Progress, *, pairs: int, rounds: int) -> Evidence:
    """Measure the loss of the answer by the position of the pair that has it."""
    model = language_model(subject, "lost-in-the-middle")
    with progress("reading prompts") as report:
        losses = [
            answer_loss(
                model.read(prompt.with_answer[:, len(prompt.context) :], keep=len(prompt.answer), prefix=prefix)[0],
                prompt,
            )
            for prompt, prefix, _ in after_context(model, key_value_prompts(model, pairs, pairs * rounds), report)
        ]
    by_round = torch.stack(losses).view(rounds, pairs)
    middle = by_round[:, pairs // 4 : pairs - pairs // 4].mean(dim=1)
    numbers = {
        f"middle less {name}": estimate(middle - by_round[:, end]) for name, end in (("first", 0), ("last", -1))
    }

    def draw() -> Figure:
        figure, (axes,) = new_column(1)
        draw_estimates(axes, range(pairs), map(estimate, by_round.unbind(dim=1)), fmt="o-", color=OTHER_COLORS[1])
        finish_axes(axes, f"{rounds} sets of pairs, 95 % interval", "position of the gold pair, from 0",
                    "loss of the answer", legend=False)  # fmt: skip
        return figure

    return Evidence(numbers, draw)


def answer_accuracy(
    subject: Subject, progress: Progress, *, pairs: int, more: int, positions: int, sets: int
) -> Evidence:
    """Measure the share of answers that are exactly right by the position of the pair, with two numbers of pairs.

    An answer is right if each of its tokens is the likeliest after the tokens before it, as in greedy decoding.
    """
    model, numbers, panels = language_model(subject, "key-value-accuracy"), {}, {}
    for label, count in (("fewer pairs", pairs), ("more pairs", more)):
        places = torch.linspace(0, count - 1, positions).round().int().tolist()
        table = _right_answers(model, count, places, sets, progress)
        ends, middle = table[:, [0, -1]].mean(dim=1), table[:, 1:-1].mean(dim=1)
        numbers[f"{label}, ends less middle"] = estimate(ends - middle)
        columns = dict(zip(places, map(estimate, table.unbind(dim=1)), strict=True))
        numbers |= {f"{label}, position {place}": measured for place, measured in columns.items()}
        panels[count] = columns

    def draw() -> Figure:
        figure, every = new_column(len(panels))
        for axes, (count, columns) in zip(every, panels.items(), strict=True):
            draw_estimates(axes, columns, columns.values(), fmt="o-", color=OTHER_COLORS[1])
            finish_axes(axes, f"{count} pairs, {sets} sets, 95 % interval", "position of the pair, from 0",
                        "right answers", legend=False)  # fmt: skip
        return figure

    return Evidence(numbers, draw)


def _right_answers(model: LanguageModel, count: int, places: Sequence[int], sets: int, progress: Progress) -> Tensor:
    """Return 1 where the answer is right, (sets, places)."""
    prompts = [
        key_value_prompt(model, key_value_pairs(random.Random(number), count), place)
        for number in range(sets)
        for place in places
    ]
    if (needed := max(len(prompt.ids) + len(prompt.answer) for prompt in prompts)) > model.longest:
        raise ConfigError(f"{count} pairs make {needed} tokens, the context of this model has {model.longest}")
    correct = []
    with progress(f"reading {count} pairs") as report:
        for prompt, prefix, _ in after_context(model, prompts, report):
            ids = prompt.with_answer[:, len(prompt.context) :]
            logits = model.read(ids, keep=len(prompt.answer), prefix=prefix)[0]
            correct.append(float(logits.argmax(dim=-1).tolist() == list(prompt.answer)))
    return torch.tensor(correct).view(sets, len(places))


def factor_attention(subject: Subject, progress: Progress, *, strings: int, tokens: int) -> Evidence:
    """Scale the channel that follows the position, and measure the last token's attention by position."""
    model = language_model(subject, "channel-factors")
    if (lacks := model.engine.loaded.spec.shape.lacks.get(Capability.HIDDEN_CHANNEL)) is not None:
        raise UnsupportedModelError(f"hidden_scaling cannot run on this model: {lacks}")
    with progress("random text, choosing the channel") as report:
        means, _ = mean_hidden_states(subject, strings, tokens, 0, report)
    channel, layers = find_channels(subject, means, 1)[0].channel, default_layers(model.n_layers)
    rows = []
    with progress("random text, scaling it") as report:
        for ids in random_strings(model, strings, tokens, 1, report):
            scaled = [scaled_attention(model, ids, HiddenScale(channel, factor, layers))[1:] for factor in FACTORS]
            rows.append(torch.stack([row / row.sum() for row in scaled]))
    shares = torch.stack(rows)  # (strings, factors, T - 1), without token 0
    quarter = tokens // 4
    first, last = shares[..., :quarter].sum(dim=-1), shares[..., -quarter:].sum(dim=-1)
    unchanged = FACTORS.index(1.0)
    numbers = {}
    for index, factor in enumerate(FACTORS):
        if factor != 1:
            numbers[f"first quarter, factor {factor:g}, less unchanged"] = estimate(
                first[:, index] - first[:, unchanged]
            )
            numbers[f"last quarter, factor {factor:g}, less unchanged"] = estimate(last[:, index] - last[:, unchanged])
    mean = shares.mean(dim=0)
    smooth, x = mean.unfold(1, 4, 4).mean(dim=-1), "position from 1, in steps of 4"
    curves = {f"factor {factor:g}": smooth[index].tolist() for index, factor in enumerate(FACTORS)}
    less = {name: (row - smooth[unchanged]).tolist() for name, row in zip(curves, smooth, strict=True)}
    drawn = {
        f"channel {channel}, {strings} strings, without token 0": (curves, x, "share of attention"),
        "less that of the unchanged model": (less, x, "share of attention"),
    }
    panels = {f"{name}, less unchanged": ({name: values}, x, "share of attention") for name, values in less.items()}
    del panels["factor 1, less unchanged"]  # zeros
    return Evidence(numbers, partial(draw_curves, drawn), panels)


def factor_losses(record: ExperimentRecord) -> dict[str, dict[str, Any]]:
    """Return the loss on prompts that chose nothing by factor of the chosen channel, less that without a change."""
    head = record.head
    if "held_out" not in head:
        raise UnsupportedModelError(f"hidden_scaling cannot run on this model: {head['refused']}")
    held = head["held_out"]
    changes = {dose["factor"]: dose["change"] for dose in held["doses"]}
    return {
        "chosen factor": exact(head["factor"]),
        "loss, chosen factor, less unchanged": changes[head["factor"]],
        "loss, chosen channel less random ones": held["causality"]["chosen_less_random"],
        **{f"loss, factor {factor:g}, less unchanged": change for factor, change in changes.items()},
    }


def init_shares(record: ExperimentRecord) -> dict[str, dict[str, Any]]:
    """Return the shares of first and last tokens before and after training."""
    shares = record.summary["shares"]
    return {f"{name}, {part} tenth": shares[name][part] for name in shares for part in ("first", "last")}


def cat_and_mouse(subject: Subject, progress: Progress, *, sentences: int) -> Evidence:
    """Exchange subject and object of a sentence."""
    model = language_model(subject, "cat-and-mouse")
    draws, encode = random.Random(0), model.engine.encoder.encode_text

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(sentences):
            eater, eaten = draws.sample(ANIMALS, 2)
            sentence, exchanged = (
                torch.tensor([encode(f"The {first} eats the {second}.")])
                for first, second in ((eater, eaten), (eaten, eater))
            )
            yield sentence, exchanged

    with progress("reading sentences"):
        numbers = order_effects(model, pairs())
    return Evidence(
        numbers, partial(draw_numbers, numbers, f"{sentences} sentences, animals exchanged", CHANGED, "log")
    )


EDITED, SINK = "edited position, after over before", "token 0, after over before"
UNCHANGED = Change()


def last_attention(model: Subject, ids: Tensor, change: Change = UNCHANGED) -> Tensor:
    """Return the attention of the last token in each layer and head, (L, H, T) float32."""
    rows: dict[int, Tensor] = {}

    def keep(layer: int, weights: Tensor) -> None:
        rows[layer] = weights[0, :, -1].float().cpu()

    model.read(ids, Watch(weights=keep), change)
    return torch.stack([rows[layer] for layer in sorted(rows)])


def relative_positions(subject: Subject, progress: Progress, *, strings: int, tokens: int, shift: int) -> Evidence:
    """Shift all position ids, and double all distances."""
    model = language_model(subject, "relative-positions")
    ids = torch.arange(tokens)
    curves = torch.zeros(3, tokens)
    moved: dict[str, list[float]] = {"all positions shifted": [], "all distances doubled": []}
    with progress("reading random text, positions changed") as report:
        for string in random_strings(model, strings, tokens, 0, report):
            before = last_attention(model, string, Change(ids))
            curves[0] += before.mean(dim=(0, 1)) / strings
            for row, values, positions in zip((1, 2), moved.values(), (ids + shift, 2 * ids), strict=True):
                after = last_attention(model, string, Change(positions))
                curves[row] += after.mean(dim=(0, 1)) / strings
                values.append(float((after - before).abs().sum(dim=-1).mean()) / 2)
    numbers = {name: estimate(torch.tensor(values)) for name, values in moved.items()}
    labels = ("as trained", f"all shifted by {shift}", "all distances doubled")
    drawn = {label: row[1:].log().tolist() for label, row in zip(labels, curves, strict=True)}
    panel = (drawn, "position, from 1", "log of the mean attention")
    return Evidence(numbers, partial(draw_curves, {f"last token, {strings} strings, without token 0": panel}))


def trough_attention(subject: Subject, progress: Progress, *, strings: int, tokens: int) -> Evidence:
    """Compare attention at the troughs of the rotary waveform with that at the peaks around them."""
    wave, _, _ = own_waveform(subject, torch.arange(tokens - 1))
    peaks = deepest_troughs(-wave, tokens)
    triples = [
        (max(before), trough, min(behind))
        for trough in deepest_troughs(wave)
        if (before := [peak for peak in peaks if peak < trough]) and (behind := [p for p in peaks if p > trough])
    ]
    with progress("reading random text") as report:
        curves = torch.stack(
            [
                last_attention(subject, ids).clamp(min=1e-30).log().mean(dim=(0, 1)).flip(-1)
                for ids in random_strings(subject, strings, tokens, 0, report)
            ]
        )  # (strings, T), by distance
    near, trough, far = (curves[:, list(at)].mean(dim=1) for at in zip(*triples, strict=True))
    numbers = {"log attention, trough less peaks": estimate(trough - (near + far) / 2)}
    panels = {
        "waveform of two equal vectors": ({"": wave.tolist()}, "distance", "W"),
        f"attention, {strings} strings": ({"": curves.mean(dim=0)[1:-1].tolist()}, "distance", "mean log attention"),
    }
    return Evidence(numbers, partial(draw_curves, panels))


def additivity(subject: Subject, progress: Progress, *, pairs: int, sets: int) -> Evidence:
    """Put every pair into every slot, twice with other neighbours; split attention into pair, slot and the rest."""
    model = language_model(subject, "additive")
    shares: dict[str, list[Tensor]] = {"attention": [], "log attention": []}
    with progress("reading prompts") as report:
        for number in counted(range(sets), report):
            records = key_value_pairs(random.Random(number), pairs)
            squares = [_square(model, records, step) for step in (1, -1)]
            for name, tables in (("attention", squares), ("log attention", [table.log() for table in squares])):
                shares[name].append(variance_shares(*tables))
    numbers = {}
    for name, rows in shares.items():
        every = torch.stack(rows)
        for index, part in enumerate(("pair", "slot", "the rest", "interaction: the rest that repeats")):
            numbers[f"{name}, {part}"] = estimate(every[:, index])
    title = f"{sets} sets of {pairs} pairs x {pairs} slots"
    return Evidence(numbers, partial(draw_numbers, numbers, title, "share of variance"))


def _square(model: LanguageModel, records: Sequence[tuple[str, str]], step: int) -> Tensor:
    """Return the attention to each pair in each slot, (pairs, slots); the first pair is asked for.

    The pair in slot k of prompt r is r + step k: a step of -1 turns the neighbours of every pair around.
    """
    count = len(records)
    orders = [[(turn + step * slot) % count for slot in range(count)] for turn in range(count)]
    prompts = [key_value_prompt(model, [records[pair] for pair in order], order.index(0)) for order in orders]
    masses = slot_masses(model, prompts)[0].mean(dim=(1, 2)).double()  # (prompts, slots)
    table = torch.zeros(count, count, dtype=torch.float64)
    table[torch.tensor(orders), torch.arange(count)] = masses
    return table


def variance_shares(table: Tensor, again: Tensor) -> Tensor:
    """Return the shares of rows, columns and the rest in the variance of a table, and of the rest that a second has.

    Formula: a_ik = mu + row_i + column_k + rest_ik; the shared rest is sum rest rest' / sqrt(sum a^2 sum a'^2).
    """
    parts = []
    for values in (table, again):
        centred = values - values.mean()
        rows, columns = centred.mean(dim=1, keepdim=True), centred.mean(dim=0, keepdim=True)
        parts.append((centred, rows.expand_as(centred), columns.expand_as(centred), centred - rows - columns))
    totals = [part[0].square().sum() for part in parts]
    first = [part.square().sum() / totals[0] for part in parts[0][1:]]
    second = [part.square().sum() / totals[1] for part in parts[1][1:]]
    shared = (parts[0][3] * parts[1][3]).sum() / (totals[0] * totals[1]).sqrt()
    return torch.stack([*((a + b) / 2 for a, b in zip(first, second, strict=True)), shared])


def channel_monotony(subject: Subject, progress: Progress, *, strings: int, held_out: int, tokens: int) -> Evidence:
    """Choose the channel that follows the position on some strings, and test it on others, beside random channels."""
    with progress("random text, choosing the channel") as report:
        means, _ = mean_hidden_states(subject, strings, tokens, 0, report)
    best = find_channels(subject, means, 1)[0]
    others = torch.randperm(subject.width, generator=torch.Generator().manual_seed(0))[:8]
    channels = torch.cat((torch.tensor([best.channel]), others))
    skip = tokens // 10
    signs = _rank_correlation(means[:, skip:, channels]).sign()
    with progress("random text, testing it") as report:
        states = states_of(subject, held_out, tokens, 1, report)
        tested = torch.stack([signs * _rank_correlation(state[:, skip:, channels]) for state in states])
    inside = tested[:, list(best.layers)].mean(dim=1)  # (strings, channels)
    numbers = {
        "rank correlation of the channel": estimate(inside[:, 0]),
        "rank correlation of random channels": estimate(inside[:, 1:].mean(dim=1)),
        "layers in one direction": exact(len(best.layers)),
        "channels that follow": exact(len(rank_channels(means, None))),
    }
    middle = best.layers[len(best.layers) // 2]
    by_layer = tested.mean(dim=0)
    curves = {f"channel {best.channel}": by_layer[:, 0].tolist(), "random": by_layer[:, 1:].mean(dim=1).tolist()}
    panels = {
        f"{held_out} other strings": (curves, "layer", "rank correlation"),
        f"before layer {middle}, {strings} strings": (
            {"": means[middle, skip:, best.channel].tolist()}, f"position, from {skip}", f"channel {best.channel}",
        ),
    }  # fmt: skip
    return Evidence(numbers, partial(draw_curves, panels))


def _rank_correlation(values: Tensor) -> Tensor:
    """Return Spearman's correlation of each channel with the position; (L, T, C) -> (L, C)."""
    ranks = values.argsort(dim=1).argsort(dim=1).double()
    positions = torch.arange(values.shape[1], dtype=torch.float64)[:, None]
    centred, places = ranks - ranks.mean(dim=1, keepdim=True), positions - positions.mean()
    correlation: Tensor = (centred * places).sum(dim=1) / places.square().sum()
    return correlation


def doubled_score(
    subject: Subject, progress: Progress, *, strings: int, tokens: int, position: int, factor: float
) -> Evidence:
    """Multiply the last token's score for one position in all layers and heads."""
    model = language_model(subject, "doubled-score")
    change = Change(scores=scaled_score(position, factor))
    with progress("reading random text") as report:
        read = random_strings(model, strings, tokens, 0, report)
        both = torch.stack(
            [
                torch.stack([last_attention(model, ids, each).mean(dim=(0, 1)) for each in (UNCHANGED, change)])
                for ids in read
            ]
        )  # (strings, 2, T)
    numbers = {
        EDITED: estimate(both[:, 1, position] / both[:, 0, position]),
        SINK: estimate(both[:, 1, 0] / both[:, 0, 0]),
    }
    before, after = both.mean(dim=0)[:, 1:].tolist()
    panel = ({"before": before, f"score {position} times {factor:g}": after}, "position, from 1", "attention")
    return Evidence(numbers, lambda: draw_curves({f"last token, {strings} strings, without token 0": panel}))


def geometry_numbers(record: ExperimentRecord) -> dict[str, dict[str, Any]]:
    """Return rank and smoothness of the position part in the middle layer, with those of random vectors.

    Formula: the mean of n strings has residual / (n - 1) of the variance by chance, white over positions; smoothness
        without chance is (position f - chance f_0) / (position - chance), f the measured share and f_0 that of noise.
    """
    summary, settings = record.summary, record.head["settings"]
    layer, n = summary["layers"][len(summary["layers"]) // 2], summary["contexts"]
    count, (low, high) = settings["tokens"] - settings["skip"], layer["ci95"]["rank"]
    noise, white = chance_of(count, summary["width"])
    smooth = [layer["low_frequencies"], *layer["ci95"]["low_frequencies"]]
    chance = layer["residual"] / (n - 1)
    left = max(layer["position"] - chance, 1e-12)
    net = [(layer["position"] * share - chance * white) / left for share in smooth]
    return {
        "share in low frequencies": {"value": smooth[0], "ci95": smooth[1:], "n": n},
        "share in low frequencies, without chance": {"value": net[0], "ci95": net[1:], "n": n},
        "share of random vectors in low frequencies": exact(white),
        "rank over that of random vectors": {
            "value": layer["rank"] / noise, "ci95": [low / noise, high / noise], "n": n,
        },
    }  # fmt: skip


def position_heads(subject: Subject, progress: Progress, *, strings: int, tokens: int, skip: int) -> Evidence:
    """Measure each head's share of position, and the largest one on strings that did not choose it."""

    def outputs() -> Iterator[Tensor]:
        with progress("reading random text") as report:
            for ids in random_strings(subject, strings, tokens, 0, report):
                layers: dict[int, Tensor] = {}

                def keep(layer: int, attended: Tensor, layers: dict[int, Tensor] = layers) -> None:
                    layers[layer] = attended[0].float().cpu()

                subject.read(ids, Watch(attended=keep))
                yield torch.cat([layers[layer] for layer in sorted(layers)])  # (L H, T, D)

    parts = sums_by_group(outputs(), skip)

    def shares(sums: StateSums) -> Tensor:
        every = decompose(sums).shares[0]
        net: Tensor = every - (1 - every) / (sums.count - 1)  # see without_chance
        return net

    best = int(shares(StateSums.merged(parts[::2])).argmax())

    def statistics(sums: StateSums) -> Tensor:
        every = shares(sums)
        return torch.stack([every[best], every.median(), every[best] - every.median()])

    tested = parts[1::2]
    layer, head = divmod(best, subject.n_heads)
    values, n = statistics(StateSums.merged(tested)).tolist(), StateSums.merged(tested).count
    names = (f"layer {layer}, head {head}", "median head", "largest less median")
    numbers = {
        name: {"value": value, "ci95": interval, "n": n}
        for name, value, interval in zip(names, values, intervals_by_group(tested, statistics), strict=True)
    }

    def draw() -> Figure:
        figure, (axes,) = new_column(1)
        every = shares(StateSums.merged(parts)).view(-1, subject.n_heads)
        draw_map(figure, axes, every.tolist(), cmap="viridis", vmin=0)
        finish_axes(axes, f"share of position, {strings} strings", "head", "layer", legend=False)
        return figure

    return Evidence(numbers, draw)


def vector_numbers(record: ExperimentRecord) -> dict[str, dict[str, Any]]:
    """Return share and similarity in the second and the middle layer, the share without that of chance."""
    summary: Mapping[str, Any] = record.summary
    n, middle = summary["strings"], len(summary["share_of_variance"]) // 2
    numbers = {}
    for name, layer in (("second", min(1, middle)), ("middle", middle)):
        for key, text in (("similarity_to_next", "similarity to the next position"), ("share_of_variance", "share")):
            numbers[f"{text}, {name} layer"] = {**estimate_of_layer(summary, key, layer), "n": n}
    return numbers


def stable_mask(sizes: Mapping[str, Any]) -> Encoding:
    """Return StableMask beside RoPE for the trained length: that of a text, or of pairs and questions."""
    length = sizes["length"] if "length" in sizes else 2 * (sizes["pairs"] + sizes["questions"])
    return create_encoding("stable_mask", {"train_length": length, "positions": "rope"})


PAIRS = {"pairs": 8, "rounds": 3}
TEXTS_16 = {"strings": 16, "tokens": 128}

POSITION_BIAS = (
    Claim(
        1, "u-curve",
        "Attention to what nobody asks for is a U over the prompt: its ends get more than its middle.",
        by_probe(AttentionMass, attention_ends),
        (Condition("first over middle", above=1), Condition("last over middle", above=1)), PAIRS,
        {"pairs": 16, "rounds": 8}, see="The attention of the last token by layer and head, and by slot.",
        beware="Attention is not the answer: see lost-in-the-middle for answers.",
    ),
    Claim(
        1, "lost-in-the-middle",
        "What is asked for is read best at the ends of the prompt and worst in its middle.", answer_losses,
        (Condition("middle less first", above=0), Condition("middle less last", above=0)),
        {"pairs": 8, "rounds": 6}, {"pairs": 20, "rounds": 24},
        see="The loss of the answer by the position of the pair that has it.",
        beware="Short prompts of keys and values; passages of text may have another curve.",
    ),
    Claim(
        1, "causal-mask", "The causal mask alone, before any training, favours the first tokens.",
        by_probe(BiasAtInit, init_shares), (Condition("untrained, first tenth", above=1),),
        {"strings": 6, "tokens": 48, "seeds": 1}, {"strings": 24, "tokens": 256, "seeds": 3},
        see="How much the last token depends on each position, before and after training; 1 is the mean.",
        beware="The residual stream and the encoding of the untrained model act too, not the mask alone.",
    ),
    Claim(
        1, "cat-and-mouse",
        "Only positions or the causal mask tell 'the cat eats the mouse' from 'the mouse eats the cat'.",
        cat_and_mouse,
        (Condition(FREE, below=NOTHING), Condition(MASKED, above=0.01), Condition(PLACED, above=0.01)),
        {"sentences": 8}, {"sentences": 64},
        see="How much the output after the last word changes if both animals change places.",
        beware="Another output is not an understood sentence.",
    ),
    Claim(
        1, "relative-positions", "With RoPE attention depends on the distance m - n alone.", relative_positions,
        (Condition("all positions shifted", below=0.01), Condition("all distances doubled", above=0.05)),
        {"strings": 4, "tokens": 64, "shift": 100}, {"strings": 24, "tokens": 512, "shift": 1000},
        see="The last token's attention by position: the same if all are shifted, another if distances are doubled.",
        beware="The model still knows absolute positions by the causal mask and by its first token.",
    ),
    Claim(
        1, "trough", "At a trough of the rotary waveform a token gets less attention than at the peaks around it.",
        trough_attention, (Condition("log attention, trough less peaks", below=0),), {"strings": 16, "tokens": 192},
        {"strings": 64, "tokens": 2048},
        see="The waveform of two equal vectors, and the mean log attention of the last token, by distance.",
        beware="Queries and keys of a trained model are not equal vectors; heads may use other frequencies.",
    ),
    Claim(
        1, "additive",
        "Attention to a passage is relevance plus the bias of its slot plus noise, without an interaction.",
        additivity, (Condition("attention, interaction: the rest that repeats", below=0.1),),
        {"pairs": 5, "sets": 5}, {"pairs": 10, "sets": 24},
        see="The shares of pair, slot and the rest in the variance; what of the rest repeats with other neighbours.",
        beware="One pair is asked for, the others are alike: relevance has two levels here.",
    ),
    Claim(
        1, "hidden-channel",
        "A hidden channel rises or falls with the position through the layers, whatever the text.",
        channel_monotony, (Condition("rank correlation of the channel", above=0.3),),
        {"strings": 16, "held_out": 8, "tokens": 128}, {"strings": 64, "held_out": 32, "tokens": 1000},
        see="The rank correlation of channel and position by layer on other strings, and the channel's mean.",
        beware="A channel that follows the position need not cause the bias.",
    ),
    Claim(
        1, "doubled-score",
        "Doubling one score of the last token moves its attention to that position, and the sink stays.",
        doubled_score,
        (Condition(EDITED, above=1.2), Condition(SINK, above=0.9)),
        {"strings": 8, "tokens": 64, "position": 25, "factor": 2.0},
        {"strings": 48, "tokens": 256, "position": 25, "factor": 2.0},
        see="The attention of the last token by position, before and after; token 0 is left out.",
        beware="More attention to a position need not change the answer: see the probe attention-edit.",
    ),
    Claim(
        1, "geometry", "The position part of hidden states has a low rank and low frequencies.",
        by_probe(HiddenGeometry, geometry_numbers),
        (Condition("share in low frequencies", above=0.5), Condition("rank over that of random vectors", below=0.5)),
        {"contexts": 16, "tokens": 128}, {"contexts": 128, "tokens": 512},
        see="Shares, rank and smoothness by layer, and the main directions of the position part.",
        beware="Of random tokens; the mean over strings has a part of chance, which is of high rank.",
    ),
    Claim(
        1, "position-heads", "A few heads carry the position.", position_heads,
        (Condition("largest less median", above=0.2),), {**TEXTS_16, "skip": 4},
        {"strings": 64, "tokens": 512, "skip": 4},
        see="The share of position in the output of each head, without the share of chance.",
        beware="A head that carries the position need not be used for it.",
    ),
    Claim(
        1, "position-vectors",
        "Hidden states are a position vector plus a content vector; position vectors form after the first layers.",
        by_probe(PositionalVectors, vector_numbers),
        (
            Condition("similarity to the next position, second layer", below=0.3),
            Condition("similarity to the next position, middle layer", above=0.3),
            Condition("share, middle layer", above=0),
        ),
        TEXTS_16, {"strings": 64, "tokens": 512},
        see="The share of position by layer without the share of chance, and the cosine of positions.",
        beware="Random tokens have no grammar; position vectors of texts may be larger.",
    ),
    Claim(
        1, "channel-factors", "A factor above 1 of the channel favours first tokens, one below 0 last tokens.",
        factor_attention,
        (
            Condition("first quarter, factor 2, less unchanged", above=0),
            Condition("last quarter, factor -1, less unchanged", above=0),
        ),
        {"strings": 12, "tokens": 192}, {"strings": 64, "tokens": 1000},
        see="The last token's attention by position with each factor of the channel, and less that of factor 1.",
        beware="Attention to random tokens, in the scaled layers; the answer may not follow it.",
    ),
    Claim(
        1, "model-factors", "Each model has a channel and a factor that make retrieval better.",
        by_probe(PositionalDimensions, factor_losses),
        (
            Condition("loss, chosen factor, less unchanged", below=0),
            Condition("loss, chosen channel less random ones", below=0),
        ),
        {"strings": 12, "tokens": 192, "pairs": 5, "prompts": 10, "top": 4},
        {"strings": 64, "tokens": 1000, "pairs": 40, "prompts": 100, "top": 10},
        see="The channels that follow the position, and the loss by factor on prompts that chose nothing.",
        beware="A channel that lowers the loss no more than random ones of its size is no positional one.",
    ),
    Claim(
        1, "stable-mask", "Pseudo-scores above the diagonal improve RoPE in contexts longer than those of training.",
        compare_encodings("language", stable_mask, "rope"), (Condition("stable_mask less rope, x5", below=0),),
        lab_sizes(seeds=2, steps=400, length=48, examples=64),
        {"seeds": 3, "steps": 10_000, "width": 256, "layers": 4, "length": 512}, reads_model=False,
        see="The perplexity by encoding and length, each seed a mark.",
        beware="Generated text of 45 words; both ends of an interval over two seeds are the seeds.",
    ),
    Claim(
        1, "stable-mask-pairs", "Pseudo-scores above the diagonal help RoPE read more pairs than in training.",
        compare_encodings("key_value", stable_mask, "rope"), (Condition("stable_mask less rope, longer", below=0),),
        lab_sizes(seeds=2, steps=600, pairs=8, questions=8), {"seeds": 3, "steps": 2000}, reads_model=False,
        see="The error in percent by encoding and number of pairs, each seed a mark.",
        beware="Compare only if the error in the distribution is near 0; two seeds are few.",
    ),
    Claim(
        1, "key-value-accuracy", "With 75 and 140 pairs answers are right more often at the ends than in the middle.",
        answer_accuracy,
        (Condition("fewer pairs, ends less middle", above=0), Condition("more pairs, ends less middle", above=0)),
        {"pairs": 75, "more": 140, "positions": 5, "sets": 4}, {"positions": 15, "sets": 100},
        see="The share of right answers by the position of the pair that has it.",
        beware="Keys of five letters and values of four digits, shorter than the paper's; all or nothing.",
    ),
    LONGBENCH,
)  # fmt: skip
