"""What every registered mitigation gets tested for free. A new method needs no line here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import typing

import pytest
import torch

from rag_posfix.attention.masks import materialize
from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.generation.prefill.per_passage import copy_kv, encode_passages, resolve
from rag_posfix.generation.prefill.prefill import prefill_calibrated
from rag_posfix.mitigations import MITIGATIONS, create
from rag_posfix.plan.plan import Capability
from tests.support.tiny import FAMILIES, loaded_model, stock_model, toy_layout

METHODS = MITIGATIONS.names()
INVARIANT = [name for name, cls in MITIGATIONS.items() if cls.order_invariant]
RELEVANCE = (0.9, 0.2, 0.4, 0.3)
FLOAT32 = 1e-5
TOKENS = (5, 9, 11, 20)
SHORTER = {"passage_answers": {"answer_tokens": 3}}
"""Parameters of a method that writes a draft: each of its 24 tokens costs a pass over every row."""
ORDERS = {"llama": tuple(itertools.permutations(range(4)))}
A_FEW = ((1, 2, 3, 0), (2, 3, 0, 1), (3, 0, 1, 2), (3, 2, 1, 0), (1, 0, 3, 2))
"""Each passage comes at each place, and each pair of passages in both orders."""


@pytest.fixture(scope="module")
def llama():
    return loaded_model()


def layout():
    return toy_layout(relevance=RELEVANCE)


def example(name, parameters=None):
    """Return the method with parameters; where it needs some and is given none, with those of its example."""
    return create(name, {**SHORTER.get(name, {}), **MITIGATIONS.get(name).example, **(parameters or {})})


def session(loaded, name, prompt=None, parameters=None, **changes):
    prompt = prompt or layout()
    plan = example(name, parameters).checked_plan(prompt, loaded.spec.shape)
    return Session(loaded, prompt, dataclasses.replace(plan, **changes))


@functools.cache
def model_of(family):
    """Return the model that all tests of a family read; no test changes it."""
    return loaded_model(family)


def served(name, families=FAMILIES):
    """Return the families that the method serves."""
    return [family for family in families if create(name).refusal(model_of(family).spec.shape) is None]


def neutral(loaded, name, prompt):
    return session(loaded, name, prompt, MITIGATIONS.get(name).identity_parameters)


INDEPENDENT = [
    name for name in METHODS if example(name).plan(layout(), model_of("llama").spec.shape).independent_passages
]
SERVED = [(name, family) for name in METHODS for family in served(name)]


def by_family(names):
    """Return cases of methods and Llama, and slow ones of each method and every third of the other families.

    The methods begin at different families, so that each family is read by several methods.
    """
    others = [family for family in FAMILIES if family != "llama"]
    return [
        pytest.param(name, family, marks=[] if family == "llama" else pytest.mark.slow)
        for name, family in SERVED
        if name in names and (family == "llama" or (others.index(family) + names.index(name)) % 3 == 0)
    ]


def stock_logits(model, ids):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=True).logits


@pytest.mark.parametrize("name", METHODS)
def test_the_model_is_bit_identical_to_the_stock_one_after_use(name, llama):
    ids = list(layout().token_ids)
    before = stock_logits(llama.model, ids)
    used = session(llama, name)
    used.advance(7)
    assert torch.equal(stock_logits(llama.model, ids), before)
    assert torch.equal(before, stock_logits(stock_model(), ids))


@pytest.mark.parametrize("name", METHODS)
def test_the_model_is_bit_identical_to_the_stock_one_after_an_exception(name, llama):
    ids = list(layout().token_ids)
    before = stock_logits(llama.model, ids)
    running = session(llama, name)
    with pytest.raises((IndexError, RuntimeError)):
        running.advance(10**6)
    assert torch.equal(stock_logits(llama.model, ids), before)


@pytest.mark.parametrize(("name", "family"), by_family(INVARIANT))
def test_every_order_of_four_passages_gives_the_same_log_probabilities(name, family):
    """All 24 orders on one family; on the others, which differ in positions and norms, a few."""
    loaded = model_of(family)
    base = session(loaded, name).next_log_probs()
    for order in ORDERS.get(family, A_FEW):
        found = session(loaded, name, layout().select(order)).next_log_probs()
        assert float((found - base).abs().max()) < FLOAT32, order


@pytest.mark.parametrize(
    ("name", "parameters", "rows"),
    [
        # Ranked b a c d: equal relevance by content. Of each row the passages, in their order.
        ("canonical_rotations", {}, ["dcab", "bdca", "abdc", "cabd"]),
        ("canonical_rotations", {"rows": 2}, ["dcab", "bdca"]),
        ("committee", {}, ["a", "b", "c", "d", "", "dcab"]),
        ("committee", {"experts": 2, "joint_order": "best_first"}, ["a", "b", "", "ba"]),
        ("context_experts", {}, ["a", "b", "c", "d", ""]),
        ("context_experts", {"experts": 2}, ["a", "b", ""]),
        ("passage_answers", {}, ["a", "b", "c", "d", ""]),
        ("inter_document", {}, ["abcd"]),
        ("parallel_windows", {"windows": 2}, ["abcd"]),
        ("parallel_encoding", {}, ["abcd"]),
        ("set_prompting", {}, ["abcd"]),
        ("sorted_inter_document", {}, ["cdba"]),  # the smallest tokens, 10 of a, next to the question
        ("sorted_inter_document", {"sort": "relevance"}, ["cdab"]),
    ],
)
def test_ties_of_relevance_are_broken_by_content_in_every_order(name, parameters, rows, llama):
    texts = {"a": (10, 0.5), "b": (20, 0.9), "c": (40, 0.5), "d": (30, 0.5)}
    for keys in itertools.permutations(texts):
        prompt = toy_layout((1, 1, 1, 1), prefix=0, relevance=tuple(texts[key][1] for key in keys))
        ids = (*(texts[key][0] for key in keys), *prompt.token_ids[4:])
        plan = create(name, parameters).plan(dataclasses.replace(prompt, token_ids=ids, keys=keys), llama.spec.shape)
        assert ["".join(keys[i] for i in row.passages) for row in plan.rows] == rows


@pytest.mark.slow
@pytest.mark.parametrize("name", INVARIANT)
def test_every_order_gives_the_same_attention_to_each_passage(name, llama):
    base = session(llama, name).attention()
    for order in A_FEW:
        found = session(llama, name, layout().select(order)).attention()
        assert [found[order.index(i)] for i in range(4)] == pytest.approx(base, abs=1e-6)


def test_the_unmodified_model_does_depend_on_order(llama):
    base = session(llama, "none").next_log_probs()
    found = session(llama, "none", layout().select((3, 2, 1, 0))).next_log_probs()
    assert float((found - base).abs().max()) > 1e-3


@pytest.mark.parametrize(("name", "family"), SERVED)
def test_passages_are_declared_independent_if_and_only_if_reading_them_apart_changes_nothing(name, family):
    """Compares keys and values of each passage in rows read whole with those of the passage read after the prefix."""
    loaded, prompt = model_of(family), layout()
    plan = example(name).checked_plan(prompt, loaded.spec.shape)
    with torch.inference_mode():
        decided, groups = prefill_calibrated(loaded, prompt, dataclasses.replace(plan, independent_passages=False))
        whole = [(group.batch, row) for group in groups for row in range(group.batch.n_rows)]
        differences = []
        for row_plan, (batch, row) in zip(decided.rows, whole, strict=True):
            if row_plan.all_passages:  # declared not to be independent
                continue
            apart, _ = encode_passages(loaded, prompt, [resolve(row_plan, prompt, loaded.device)], None)
            for passage, start, stop in batch.passage_spans[row]:
                states = apart[passage, float(batch.positions[row, start])]
                differences.append(float((copy_kv(batch, start, stop, row) - states).abs().max()))
    assert plan.independent_passages == (max(differences) < FLOAT32), differences


@pytest.mark.parametrize(("name", "family"), by_family(INDEPENDENT))
def test_passage_by_passage_equals_reading_each_row_whole(name, family):
    loaded = model_of(family)
    fast = session(loaded, name)
    plain = session(loaded, name, independent_passages=False)
    for token in TOKENS:
        assert float((fast.next_log_probs() - plain.next_log_probs()).abs().max()) < FLOAT32
        fast.advance(token)
        plain.advance(token)


@pytest.mark.parametrize("name", METHODS)
def test_decoding_step_by_step_equals_scoring_at_once(name, llama):
    running = session(llama, name)
    at_once = running.score(TOKENS)
    stepwise = []
    for token in TOKENS:
        stepwise.append(float(running.next_log_probs()[token]))
        running.advance(token)
    assert at_once == pytest.approx(stepwise, abs=FLOAT32)


@pytest.mark.parametrize("name", [n for n in METHODS if not MITIGATIONS.get(n).uses_last_prompt_token])
def test_prefill_of_x_and_y_equals_prefill_of_x_then_step_y(name, llama):
    short = layout()
    longer = dataclasses.replace(
        short,
        token_ids=(*short.token_ids, *TOKENS),
        suffix=dataclasses.replace(short.suffix, stop=short.suffix.stop + len(TOKENS)),
    )
    plans = [example(name).plan(prompt, llama.spec.shape) for prompt in (short, longer)]
    stepped, whole = Session(llama, short, plans[0]), Session(llama, longer, plans[1])
    for token in TOKENS:
        stepped.advance(token)
    assert float((stepped.next_log_probs() - whole.next_log_probs()).abs().max()) < FLOAT32


@pytest.mark.parametrize("name", METHODS)
def test_one_passage_equals_the_unmodified_model(name, llama):
    one = toy_layout((7,), relevance=(0.8,))
    found = neutral(llama, name, one).next_log_probs()
    assert float((found - session(llama, "none", one).next_log_probs()).abs().max()) < FLOAT32


@pytest.mark.parametrize("name", METHODS)
def test_without_passages_it_is_the_unmodified_model(name, llama):
    empty = toy_layout(())
    found = neutral(llama, name, empty).next_log_probs()
    assert float((found - session(llama, "none", empty).next_log_probs()).abs().max()) < FLOAT32


@pytest.mark.parametrize(("name", "family"), [pair for pair in SERVED if MITIGATIONS.get(pair[0]).neutral_is_identity])
def test_with_neutral_parameters_it_is_the_unmodified_model_bit_for_bit(name, family):
    loaded = model_of(family)
    found, plain = neutral(loaded, name, layout()), session(loaded, "none")
    for token in TOKENS:
        assert torch.equal(found.next_log_probs(), plain.next_log_probs())
        found.advance(token)
        plain.advance(token)


@pytest.mark.parametrize("name", METHODS)
def test_without_passages_there_is_no_attention_to_them(name, llama):
    empty = toy_layout(())
    assert session(llama, name, empty).attention() == ()


@pytest.mark.parametrize("name", METHODS)
def test_two_identical_passages_and_no_prefix_are_no_trouble(name, llama):
    twins = toy_layout((6, 4), prefix=0, relevance=(0.5, 0.5)).select((0,))
    assert torch.isfinite(session(llama, name, twins).next_log_probs()).all()
    double = dataclasses.replace(toy_layout((6, 6), relevance=(0.5, 0.5)), keys=("same", "same"))
    assert torch.isfinite(session(llama, name, double).next_log_probs()).all()


@pytest.mark.parametrize("name", [name for name in METHODS if not MITIGATIONS.get(name).compares_kv_heads])
def test_grouped_query_heads_equal_expanded_ones(name):
    grouped = loaded_model("llama")
    expanded = loaded_model("llama", num_key_value_heads=8)
    weights = grouped.model.state_dict()
    for key in list(weights):
        if "k_proj" in key or "v_proj" in key:
            heads = weights[key].view(2, 8, -1)  # (Hkv, D, hidden)
            weights[key] = heads.repeat_interleave(4, dim=0).reshape(64, -1)
    expanded.model.load_state_dict(weights)
    left, right = session(grouped, name), session(expanded, name)
    left.advance(5)
    right.advance(5)
    assert float((left.next_log_probs() - right.next_log_probs()).abs().max()) < FLOAT32


@pytest.mark.parametrize("name", METHODS)
def test_bfloat16_is_float32_within_rounding(name):
    exact, rounded = loaded_model(), loaded_model()
    rounded.model.to(torch.bfloat16)
    left, right = session(exact, name).next_log_probs(), session(rounded, name).next_log_probs()
    assert float((left.exp() - right.exp()).abs().max()) < 0.02


@pytest.mark.parametrize("name", METHODS)
def test_positions_are_finite_and_cover_the_row(name, llama):
    prompt = layout()
    for row in example(name).plan(prompt, llama.spec.shape).rows:
        seen = prompt if row.passages is None else prompt.select(row.passages)
        length = len(seen.token_ids)
        if row.positions is not None:
            assert row.positions.shape == (1, length)
            assert row.positions.dtype == torch.float32
            assert torch.isfinite(row.positions).all()
            assert (row.positions >= 0).all()
        if row.mask is not None:
            matrix = materialize(row.mask, length, length)
            assert matrix.dtype == torch.bool
            assert matrix.diagonal().all(), "every token sees itself"


@pytest.mark.slow
def test_threads_with_different_plans_do_not_disturb_each_other(llama):
    alone = {name: session(llama, name).next_log_probs() for name in METHODS}
    wrong: list[str] = []

    def work(name):
        for _ in range(4):
            if not torch.equal(session(llama, name).next_log_probs(), alone[name]):
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in METHODS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def other(method, field):
    """Return the method with another allowed value of one parameter."""
    value = getattr(method, field)
    hint = typing.get_type_hints(type(method))[field]
    literals = [x for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) is typing.Literal
                for x in typing.get_args(part)]  # fmt: skip
    numbers = [value / 2, value + 1] if isinstance(value, int | float) and not isinstance(value, bool) else []
    known = (0.5, 3, 1000, True, False, (1.0, 1.5), (0.5, 0.3, 0.2, 0.1), ("none",))
    for candidate in (*literals, *numbers, *known):
        if candidate != value:
            with contextlib.suppress(ConfigError):
                return dataclasses.replace(method, **{field: candidate})
    raise AssertionError(f"no other value of {field} is known")


@pytest.mark.parametrize("name", METHODS)
def test_the_fingerprint_changes_with_every_parameter(name):
    base = example(name)
    prints = {base.fingerprint()}
    fields = dataclasses.fields(base)
    for field in fields:
        prints.add(other(base, field.name).fingerprint())
    assert len(prints) == 1 + len(fields)
    assert example(name).fingerprint() == base.fingerprint()


@pytest.mark.parametrize("name", METHODS)
def test_without_parameters_it_can_be_made_and_plans_or_says_what_it_needs(name, llama):
    method = create(name)
    if not method.example:
        method.plan(layout(), llama.spec.shape)
        return
    with pytest.raises(ConfigError, match=f"{name}: .*{min(method.example)}"):
        method.plan(layout(), llama.spec.shape)


@pytest.mark.parametrize("name", METHODS)
def test_what_it_was_given_is_not_changed_by_the_caller_later(name):
    def is_frozen(value):  # a list could be appended to after the fingerprint was taken
        return all(map(is_frozen, value)) if isinstance(value, tuple) else isinstance(value, bool | int | float | str)

    for field, value in dataclasses.asdict(example(name)).items():
        assert value is None or is_frozen(value), f"{field} is {value!r}"


@pytest.mark.parametrize("name", METHODS)
def test_a_model_that_lacks_what_it_needs_is_refused_by_name(name, llama):
    method = create(name)
    bare = dataclasses.replace(llama.spec.shape, capabilities=frozenset())
    if not method.needs():
        assert method.refusal(bare) is None
        return
    with pytest.raises(UnsupportedModelError, match=f"{name} needs .*{min(method.needs())}"):
        method.checked_plan(layout(), bare)


@pytest.mark.parametrize("name", METHODS)
def test_attention_of_its_own_needs_a_plain_softmax(name, llama):
    method = example(name)
    rows = method.plan(layout(), llama.spec.shape).rows
    assert Capability.SOFTMAX in method.needs() or all(row.attend is None for row in rows)


@pytest.mark.parametrize("name", METHODS)
def test_it_is_described_by_its_registry_entry(name):
    cls = MITIGATIONS.get(name)
    assert cls.name == name
    assert cls.__module__.rsplit(".", 1)[-1] == name, "file name = registry name"
    assert not cls.paper or "http" in cls.paper
    for part in ("Source:", "Formula:", "Differs from the paper:", "Helps:", "Hurts:", "Cost:", "Limits:"):
        assert part in (cls.__doc__ or ""), part
    assert cls.requires <= set(Capability)


def test_an_unknown_parameter_is_refused_with_what_is_allowed():
    with pytest.raises(ConfigError, match=r"context_experts has no parameter 'expert'\. Did you mean 'experts'\?"):
        create("context_experts", {"expert": 3})
