"""Claims of the texts: verdicts follow from intervals, errors stay in their row, and each claim can be measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.evaluation.figures import draw_numbers
from rag_posfix.evaluation.record import read_head, silent
from rag_posfix.lab.claims import CLAIMS, Claim, Condition, Evidence, base, reproduce, with_sizes
from rag_posfix.lab.claims.base import FAILED, NO_MODEL, NOT_SEEN, NOT_TESTABLE, SEEN, exact, judge
from rag_posfix.lab.claims.position_bias import (
    answer_accuracy,
    doubled_score,
    relative_positions,
    variance_shares,
)
from rag_posfix.lab.claims.real_text import KINDS, kinds_of
from rag_posfix.lab.claims.without_model import mask_and_distance, rollout, splines
from rag_posfix.lab.claims.without_positions import FREE, MASKED, MASKED_ONE, decoding_share, permutation
from rag_posfix.lab.experiment import TrainingSettings
from rag_posfix.lab.probing.base import estimate
from rag_posfix.lab.probing.positional_vectors import without_chance
from rag_posfix.lab.probing.subject import LanguageModel
from rag_posfix.lab.tasks import TASKS
from rag_posfix.lab.tasks.text import PARAGRAPH
from tests.support.command_line import command_line
from tests.unit.lab.probing.probed import small_decoder, tiny_model

MEASURED = [claim for claim in CLAIMS if claim.measure is not None]
TRAINED = {"seeds": 1, "steps": 1, "examples": 2, "width": 8, "layers": 1}
TINY = {
    "u-curve": {"pairs": 4, "rounds": 1},
    "lost-in-the-middle": {"pairs": 4, "rounds": 2},
    "causal-mask": {"strings": 2, "tokens": 32, "seeds": 1},
    "cat-and-mouse": {"sentences": 2},
    "relative-positions": {"strings": 2, "tokens": 16, "shift": 7},
    "trough": {"strings": 2, "tokens": 64},
    "additive": {"pairs": 3, "sets": 2},
    "hidden-channel": {"strings": 2, "held_out": 2, "tokens": 64},
    "doubled-score": {"strings": 2, "tokens": 16, "position": 3, "factor": 2.0},
    "geometry": {"contexts": 4, "tokens": 24},
    "position-heads": {"strings": 4, "tokens": 16, "skip": 4},
    "position-vectors": {"strings": 4, "tokens": 24},
    "causes": {"questions": 1, "pairs": 2, "positions": 2, "strings": 2, "tokens": 64},
    "channel-factors": {"strings": 2, "tokens": 64},
    "model-factors": {"strings": 2, "tokens": 64, "pairs": 2, "prompts": 2, "top": 1},
    "key-value-accuracy": {"pairs": 3, "more": 4, "positions": 3, "sets": 1},
    "cost": {"tokens": 8, "batch": 1, "width": 8, "repeats": 2},
    "sigmoid-gates": {**TRAINED, "tokens": 2, "blanks": 2},
    "stable-mask": {**TRAINED, "length": 8},
    "stable-mask-pairs": {**TRAINED, "pairs": 2, "questions": 1},
    "mask-and-distance": {"tokens": 16, "layers": 3, "decay": 0.9},
    "splines": {
        "seeds": 1,
        "steps": 1,
        "length": 4,
        "symbols": 5,
        "width": 8,
        "control_points": 4,
        "examples": 2,
    },
    "word-counting": {"limit": 2},
    "bound": {"strings": 2, "farthest": 4},
    "flip-flop": {**TRAINED, "pairs": 2, "ignored": 0.4},
    "selective-copy": {**TRAINED, "tokens": 2, "blanks": 2},
    "counting": {**TRAINED, "operations": 6},
    "language": {**TRAINED, "length": 8},
    "gates": {"steps": 1, "p_max": 4, "length": 32, "texts": 2},
    "real-text": {**TRAINED, "length": 8, "source": "prose", "words": 16},
    "code": {**TRAINED, "length": 8, "source": "prose", "words": 16},  # to read all code takes a second
    "real-maps": {"steps": 1, "p_max": 4, "length": 32, "words": 64, "texts": 2, "width": 8, "layers": 1},
    "permutation": {"strings": 2, "tokens": 8},
    "norm-and-direction": {"seeds": 2, "strings": 4, "tokens": 16},
    "neighbours": {"words": 8, "steps": 1, "batch": 1, "width": 8},
    "decoded-position": {"seeds": 2, "strings": 4, "tokens": 16},
    "dispersion": {"seeds": 2, "strings": 3, "tokens": 16},
}
"""Sizes of claims that are measured in milliseconds."""


def claim_of(measure, *conditions, name="given", **changes):
    return Claim(2, name, f"What {name} says.", measure, conditions, reads_model=False, **changes)


def given(value, low, high):
    numbers = {"number": {"value": value, "ci95": [low, high], "n": 9}}
    return lambda subject, progress: Evidence(numbers, lambda: draw_numbers(numbers, "title", "x"))


def failing(error):
    def measure(subject, progress):
        raise error

    return measure


@pytest.mark.parametrize(
    ("condition", "verdict"),
    [
        (Condition("number", above=0.1), SEEN),
        (Condition("number", above=0.2), NOT_SEEN),  # 0.2 is inside of 0.15 to 0.4
        (Condition("number", below=0.5), SEEN),
        (Condition("number", below=0.3), NOT_SEEN),  # the value .25 is below, the interval is not
        (Condition("number", above=0.1, below=0.3), NOT_SEEN),
    ],
)
def test_a_claim_is_seen_if_the_whole_interval_is_on_its_side_of_the_bounds(condition, verdict):
    outcome = judge(claim_of(given(0.25, 0.15, 0.4), condition), None, NO_MODEL, full=False)
    assert outcome.verdict == verdict
    assert outcome.reason == ("" if verdict == SEEN else f"does not hold: {condition}")


def test_errors_of_a_claim_and_of_a_model_are_rows_of_the_page_and_lose_no_other(tmp_path, caplog):
    claims = [
        claim_of(failing(RuntimeError("<size> 3")), name="broken"),
        claim_of(failing(ConfigError("too long")), name="refused"),
        claim_of(None, name="absent", missing="no data here"),
        claim_of(given(1.0, 0.9, 1.1), Condition("number", above=0), name="measured"),
        Claim(2, "of-model", "Of a model.", given(1.0, 0.9, 1.1), (Condition("number", above=0),)),
    ]

    def open_model(name):
        if name == "lost":
            raise UnsupportedModelError("no such model")
        return small_decoder()

    records = reproduce(claims, ["lost", "here"], open_model, out=tmp_path)
    assert list(records) == [2]
    rows = [(row["claim"], row["model"], row["verdict"], row["reason"]) for row in records[2].summary["claims"]]
    assert rows == [
        ("broken", NO_MODEL, FAILED, "RuntimeError: <size> 3"),
        ("refused", NO_MODEL, NOT_TESTABLE, "too long"),
        ("absent", NO_MODEL, NOT_TESTABLE, "no data here"),
        ("measured", NO_MODEL, SEEN, ""),
        ("of-model", "lost", NOT_TESTABLE, "no such model"),
        ("of-model", "here", SEEN, ""),
    ]
    assert read_head(records[2].files["record"])["summary"] == records[2].summary
    page = records[2].files["page"].read_text("utf-8")
    assert page.count("data:image/png;base64,") == 2
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert "RuntimeError: &lt;size&gt; 3" in page
    assert "rag-posfix lab reproduce 2 --claim of-model --out reproduced" in page
    assert "the claim broken of text 2 failed" in caplog.text


def test_full_replaces_the_small_sizes_that_it_names(tmp_path):
    seen = []

    def measure(subject, progress, **sizes):
        seen.append(sizes)
        return given(1.0, 1.0, 1.0)(subject, progress)

    claim = claim_of(measure, small={"strings": 2, "tokens": 8}, full={"tokens": 64})
    for full in (False, True):
        judge(claim, None, NO_MODEL, full)
    assert seen == [{"strings": 2, "tokens": 8}, {"strings": 2, "tokens": 64}]
    assert claim.command(full=True).endswith("--claim given --full --out reproduced")


def test_sizes_replace_those_of_claims_that_have_them_also_with_full():
    one, other = with_sizes(
        [claim_of(None, small={"position": 25, "tokens": 64}, full={"position": 9, "tokens": 256}), claim_of(None)],
        {"position": 40},
    )
    assert ({**one.small, **one.full}, one.small) == ({"position": 40, "tokens": 256}, {"position": 40, "tokens": 64})
    assert one.command(full=True).endswith("--claim given --size position=40 --full --out reproduced")
    assert other.options == ""
    with pytest.raises(
        ConfigError, match="--size 'place' is not a size of these claims; choose from: position, tokens"
    ):
        with_sizes([one], {"place": 3})


@pytest.mark.parametrize("text", sorted({claim.text for claim in CLAIMS}))
def test_claims_of_a_text_have_names_of_their_own_and_say_what_to_see_or_what_lacks(text):
    claims = [claim for claim in CLAIMS if claim.text == text]
    assert len({claim.name for claim in claims}) == len(claims)
    for claim in claims:
        assert claim.says.endswith(".")
        if claim.measure is None:
            assert claim.missing, claim.name
        else:
            assert claim.conditions, claim.name
            assert claim.see.endswith("."), claim.name
            assert claim.beware.endswith("."), claim.name
            assert claim.full.keys() <= claim.small.keys(), claim.name


@pytest.mark.parametrize("claim", MEASURED, ids=lambda claim: f"{claim.text}-{claim.name}")
def test_the_conditions_of_a_claim_name_numbers_that_it_measures(claim):
    sizes = TINY[claim.name]
    assert sizes.keys() == claim.small.keys()
    evidence = claim.measure(tiny_model(600) if claim.reads_model else None, silent, **sizes)
    assert {condition.number for condition in claim.conditions} <= evidence.numbers.keys()
    assert all(number.keys() == {"value", "ci95", "n"} for number in evidence.numbers.values())
    json.dumps(evidence.numbers)


@pytest.mark.slow
@pytest.mark.parametrize("claim", MEASURED, ids=lambda claim: f"{claim.text}-{claim.name}")
def test_a_claim_starts_with_full_if_what_full_replaces_is_tiny(claim):
    tiny = TINY[claim.name]
    wrong = dict.fromkeys(claim.full)  # small sizes that no measurement takes
    replaced = replace(claim, small={**tiny, **wrong}, full={name: tiny[name] for name in claim.full})
    outcome = judge(replaced, tiny_model(600) if claim.reads_model else None, "tiny", full=True)
    assert outcome.verdict in {SEEN, NOT_SEEN}, outcome.reason
    assert outcome.figure


def test_the_published_size_of_flip_flop_is_256_wide_with_4_heads_4_layers_and_10000_steps():
    (claim,) = (claim for claim in CLAIMS if claim.name == "flip-flop")
    sizes = {**claim.small, **claim.full}
    settings = TrainingSettings(steps=sizes["steps"], width=sizes["width"], layers=sizes["layers"])
    assert (settings.width, settings.heads, settings.layers, settings.steps) == (256, 4, 4, 10_000)
    assert TASKS.presets("flip_flop")["flip_flop_published"].items() <= sizes.items()


def test_only_bidirectional_attention_without_positions_keeps_the_output_of_a_permuted_text():
    numbers = permutation(tiny_model(), silent, strings=3, tokens=12).numbers
    assert numbers[FREE]["value"] < 1e-5
    assert numbers[MASKED_ONE]["value"] < 1e-5  # the set of keys of the last query is the same in one layer
    rest = [entry["value"] for name, entry in numbers.items() if not name.startswith((FREE, MASKED_ONE))]
    assert len(rest) == 3
    assert min(rest) > 1e-4
    assert MASKED in numbers


def test_a_score_times_one_leaves_attention_as_it_is():
    numbers = doubled_score(tiny_model(), silent, strings=2, tokens=16, position=3, factor=1.0).numbers
    assert [entry["value"] for entry in numbers.values()] == pytest.approx([1, 1])


def test_an_answer_is_right_if_each_of_its_tokens_is_the_likeliest(monkeypatch):
    read_now = []

    def contexts(model, prompts, report):
        for prompt in prompts:
            read_now[:] = [prompt]
            yield prompt, None, {}

    def read(self, ids, keep, prefix):
        (prompt,) = read_now
        tokens = torch.tensor(prompt.answer)
        tokens[-1] += prompt.gold == 1  # of the pair in the middle, the last token alone is wrong
        return torch.nn.functional.one_hot(tokens, self.vocabulary).float()[None]

    monkeypatch.setattr("rag_posfix.lab.claims.position_bias.after_context", contexts)
    monkeypatch.setattr(LanguageModel, "read", read)
    numbers = answer_accuracy(tiny_model(600), silent, pairs=3, more=4, positions=3, sets=2).numbers
    of = {name: entry["value"] for name, entry in numbers.items() if name.startswith("fewer")}
    assert of == {
        "fewer pairs, ends less middle": 1, "fewer pairs, position 0": 1, "fewer pairs, position 1": 0,
        "fewer pairs, position 2": 1,
    }  # fmt: skip


def test_rope_keeps_attention_if_all_positions_are_shifted_and_not_if_distances_double():
    numbers = relative_positions(tiny_model(), silent, strings=2, tokens=16, shift=7).numbers
    assert numbers["all positions shifted"]["value"] < 1e-5 < 1e-4 < numbers["all distances doubled"]["value"]


def test_a_table_of_pairs_plus_slots_has_no_interaction_and_a_product_has_one():
    pair, slot = torch.tensor([[3.0], [0.0], [0.0]]).double(), torch.tensor([[2.0, 0.0, 1.0]]).double()
    # Rows deviate by 2, -1, -1 from their mean: 6 x 3 cells; columns by 1, -1, 0: 2 x 3 cells; so 18 and 6 of 24.
    assert variance_shares(pair + slot, pair + slot).tolist() == pytest.approx([0.75, 0.25, 0, 0])
    # Both means are 1. The rest of a product is the product of the deviations: 6 x 2 = 12, beside 18 and 6 as above.
    assert variance_shares(pair * slot, pair * slot).tolist() == pytest.approx([18 / 36, 6 / 36, 12 / 36, 12 / 36])
    rest = pair * slot - 2 * (pair - 1) * (slot - 1)  # the same, with the rest turned around
    assert variance_shares(pair * slot, rest)[3] == pytest.approx(-12 / 36)


def test_the_share_that_the_mean_of_strings_without_positions_has_by_chance_is_taken_off():
    assert without_chance(1 / 8, 8) == pytest.approx(0)  # the mean of 8 independent strings has 1 / 8 of the variance
    assert without_chance(1.0, 8) == 1


def test_log_position_is_decoded_from_itself_and_not_from_noise():
    position = torch.arange(1, 33).log().double()[None, :, None].expand(8, -1, 1)
    assert decoding_share(position) == pytest.approx(1, abs=1e-4)  # 1 less the penalty's square, 1e-6
    noise = torch.randn(64, 32, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert abs(decoding_share(noise)) < 0.02


def test_a_claim_that_no_text_has_is_told_with_those_that_there_are(tmp_path, capsysbinary):
    code, _, error = command_line(capsysbinary)("lab", "reproduce", "2", "--claim", "nope", "--out", tmp_path)
    assert code == 1
    assert "--claim 'nope' is not a claim of these texts; choose from: permutation, " in " ".join(error.split())


def test_without_a_packaged_model_the_command_says_how_to_name_or_fetch_one(tmp_path, capsysbinary, monkeypatch):
    monkeypatch.setattr("rag_posfix.cli.lab.is_here", lambda _name, _folder: False)
    code, _, error = command_line(capsysbinary)("lab", "reproduce", "2", "--claim", "permutation", "--out", tmp_path)
    assert code == 1
    assert "no packaged model is here; name one with --model, or run: " in " ".join(error.split())


def test_an_exact_number_has_no_width():
    assert exact(0.5)["ci95"] == estimate(torch.tensor([0.5]))["ci95"]


@pytest.mark.slow
def test_the_command_writes_the_page_of_a_text_and_prints_its_verdicts(tmp_path, capsysbinary):
    call = command_line(capsysbinary)
    code, printed, _ = call("lab", "reproduce", "2", "--claim", "dispersion", "--json", "--out", tmp_path)
    assert code == 0
    record = json.loads(printed)["2"]
    assert [(row["claim"], row["model"]) for row in record["claims"]] == [("dispersion", NO_MODEL)]
    assert record["page"] == str(tmp_path / "text-2.html")


def panels_of(values):
    return {"curve": ({"value": values}, "x", "y")}


def test_what_models_share_is_drawn_side_by_side(tmp_path, monkeypatch):
    drawn = []
    for name in ("draw_by_model", "draw_curves"):
        real = getattr(base, name)
        monkeypatch.setattr(base, name, lambda *args, real=real: drawn.append(args[0]) or real(*args))

    def measure(subject, progress):
        numbers = {name: {"value": 1.0, "ci95": [0.5, 1.5], "n": 9} for name in ("shared", subject)}
        numbers["exact"] = exact(3)
        return Evidence(numbers, lambda: draw_numbers(numbers, "title", "x"), panels_of([1.0, 2.0]))

    claim = Claim(2, "of-model", "Of a model.", measure, (Condition("shared", above=0),))
    records = reproduce([claim], ["one", "two"], lambda name: name, out=tmp_path)
    page = records[2].files["page"].read_text("utf-8")
    assert page.count('alt="of-model, models side by side"') == 2
    by_model, curves = drawn[-2:]
    assert {model: list(numbers) for model, numbers in by_model.items()} == {"one": ["shared"], "two": ["shared"]}
    assert curves == {"curve": ({"one": [1.0, 2.0], "two": [1.0, 2.0]}, "x", "y")}
    drawn.clear()
    reproduce([claim], ["one"], lambda name: name, out=tmp_path / "alone")
    assert not drawn  # it has its own figure alone


def test_the_mask_draws_attention_to_the_first_token_and_a_decay_to_the_last():
    # Two layers of ((I + A) / 2)^2 over two tokens, rows (1, 0) and (1/2, 1/2): the last row of the half sum is
    # (1/4, 3/4), and its square (1/4 + 3/16, 9/16).
    assert rollout(torch.ones(2, 2).double().tril(), 2).tolist() == pytest.approx([7 / 16, 9 / 16])
    numbers = mask_and_distance(None, silent, tokens=40, layers=6, decay=0.9).numbers
    assert numbers["causal mask, first over middle"]["value"] > 1 > numbers["causal mask, last over middle"]["value"]
    assert numbers["distance, first over middle"]["value"] < 1 < numbers["distance, last over middle"]["value"]


@pytest.mark.slow
def test_a_spline_reconstructs_rising_sequences_and_not_those_in_random_order():
    sizes = {"seeds": 1, "steps": 60, "length": 6, "symbols": 6, "width": 16, "control_points": 5, "examples": 32}
    numbers = splines(None, silent, **sizes).numbers
    assert numbers["rising less random order"]["ci95"][0] > 0


def test_ends_of_sentences_and_paragraphs_are_kinds_of_their_own():
    tokens = ("<other>", "_name", "word", "collections.abc", ",", ".", "?", PARAGRAPH)
    assert [KINDS[kind] for kind in kinds_of(tokens)] == [*["word"] * 4, "other sign", *["sentence end"] * 2, KINDS[3]]
