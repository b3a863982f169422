"""Each encoding against values worked by hand, and against the encodings that it becomes in special cases."""

from __future__ import annotations

import math

import pytest
import torch

from rag_posfix.errors import ConfigError
from rag_posfix.lab.encodings import DecoderShape, cope, create_encoding
from rag_posfix.lab.encodings.alibi import alibi_slopes
from rag_posfix.lab.encodings.base import attend_scores
from rag_posfix.lab.encodings.cope import contextual_positions
from rag_posfix.lab.encodings.rope import RotaryAngles
from rag_posfix.lab.encodings.sinusoidal import sinusoids
from rag_posfix.lab.encodings.t5 import bucket_of


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def shape(**changes):
    return DecoderShape(**{"vocabulary": 8, "layers": 1, "heads": 2, "width": 8, "inner": 16, **changes})


def built(name, sizes=None, **parameters):
    return create_encoding(name, parameters).build(sizes or shape())


def states(generator, *, heads=2, tokens=6, size=4, batch=2):
    return [torch.randn(batch, heads, tokens, size, generator=generator) for _ in range(3)]


def with_constant_product(generator, product, tokens=6, size=4):
    """Return queries and keys whose scalar products are all ``product``; queries differ from each other."""
    query = torch.randn(1, 1, tokens, size, generator=generator)
    query[..., 0] = 1.0
    key = torch.zeros(1, 1, tokens, size)
    key[..., 0] = product
    return query, key


def test_sinusoids_by_hand():
    # width 4, base 100: wavelengths of 1 and 100^(1/2) = 10 radians; position 2: sin 2, cos 2, sin 0.2, cos 0.2
    expected = [0.9092974, -0.4161468, 0.1986693, 0.9800666]
    assert sinusoids(torch.tensor([2]), 4, 100.0)[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_sinusoids_are_added_with_norm_one_from_the_place_where_a_text_continues():
    module = built("sinusoidal")
    whole = module.embed(torch.zeros(1, 7, 8), 0)
    assert torch.equal(module.embed(torch.zeros(1, 2, 8), 5), whole[:, 5:])
    torch.testing.assert_close(whole.norm(dim=-1), torch.ones(1, 7))


def test_a_learned_vector_is_added_and_there_is_none_after_the_last():
    module = built("learned", max_positions=4)
    added = module.embed(torch.zeros(1, 2, 8), 2)
    assert torch.equal(added[0], dict(module.named_parameters())["table"][2:4])
    with pytest.raises(ConfigError, match="5 tokens has no position vector after 4"):
        module.embed(torch.zeros(1, 3, 8), 2)


def test_buckets_of_t5_by_hand():
    # 8 buckets: 0 to 3 alone. Then 4 + floor(4 log(d / 4) / log(64 / 4)): log4(d / 4) * 2, so 4 to 7 -> 4,
    # 8 to 15 -> 5, 16 to 31 -> 6, and 7 from 32 on, also beyond max_distance = 64. The future is bucket 0.
    distance = torch.tensor([-3, 0, 1, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 1000])
    assert bucket_of(distance, 8, 64).tolist() == [0, 0, 1, 3, 4, 4, 5, 5, 6, 6, 7, 7, 7, 7]


def test_t5_adds_its_bias_to_scores():
    module = built("t5", shape(heads=1, width=4), buckets=4, max_distance=8)
    with torch.no_grad():
        module.bias.copy_(torch.tensor([[0.0, math.log(3), 5.0, 5.0]]))
    # Query 1 sees key 0 at distance 1, with the bias ln 3, and itself: shares 3/4 and 1/4.
    value = torch.tensor([[8.0, 0, 0, 0], [0, 8, 0, 0]]).view(1, 1, 2, 4)
    out = module.attend(0, torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), value)
    assert out[0, 0].flatten().tolist() == pytest.approx([8, 0, 0, 0, 6, 2, 0, 0])


def test_slopes_of_alibi_by_hand():
    assert alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    # Three heads: those of 2, 2^-4 and 2^-8, then the first of every second slope of 4 heads, 2^-2.
    assert alibi_slopes(3) == [2**-4, 2**-8, 2**-2]


def test_alibi_subtracts_the_slope_times_the_distance():
    module = built("alibi", shape(heads=1, width=4))  # one head: slope 2^-8
    value = torch.eye(3).view(1, 1, 3, 3)
    out = module.attend(0, torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), torch.nn.functional.pad(value, (0, 1)))
    weights = [math.exp(-distance / 256) for distance in (2, 1, 0)]
    assert out[0, 0, 2, :3].tolist() == pytest.approx([one / sum(weights) for one in weights])


def test_angles_of_rope_by_hand():
    # D = 4, base 100: pairs turn by 1 and 100^(-1/2) = 0.1 per position.
    at = torch.tensor([0, 3])
    assert RotaryAngles(100.0).angles(at, 4).tolist() == [[0, 0], pytest.approx([3, 0.3])]
    assert RotaryAngles(100.0, interpolation=2.0).angles(at, 4)[1].tolist() == pytest.approx([1.5, 0.15])
    # NTK factor 3: base 100 * 3^(4/2) = 900, so the second pair turns by 1/30.
    assert RotaryAngles(100.0, ntk=3.0).angles(at, 4)[1].tolist() == pytest.approx([3, 0.1])


def test_scores_of_rope_depend_on_the_distance_only(generator):
    query, key = (torch.randn(1, 1, 1, 8, generator=generator).expand(1, 1, 9, 8) for _ in range(2))
    query, key = RotaryAngles().rotate(query, key)
    scores = (query @ key.transpose(-1, -2))[0, 0]
    for distance in range(9):
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), atol=1e-5, rtol=0)
    assert float((scores[8, 0] - scores[8, 8]).abs()) > 0.1


def test_rope_changes_when_keys_change_places_and_nope_does_not_but_for_the_mask(generator):
    query, key, value = states(generator)
    order = [3, 0, 2, 1, 4, 5]
    for name, changes in (("rope", True), ("nope", False)):
        # The last query sees all keys, as if there were no mask; query 2 does not.
        before = built(name).attend(0, query, key, value)
        after = built(name).attend(0, query, key[:, :, order], value[:, :, order])
        assert torch.allclose(before[:, :, 5], after[:, :, 5], atol=1e-6) is not changes
        assert not torch.allclose(before[:, :, 2], after[:, :, 2], atol=1e-3)


def test_the_variance_of_nope_falls_as_one_over_the_place(generator):
    # Queries of nearly 0 attend evenly, so the output at place n is a mean of n independent values of variance 1.
    # A variance from 400 * 64 draws has a relative standard error of sqrt(2 / 25600) = 0.9 %.
    query, key, value = (torch.randn(400, 2, 64, 32, generator=generator) for _ in range(3))
    out = built("nope", shape(width=64)).attend(0, query * 1e-3, key, value)
    variance = out.var(dim=(0, 1, 3))
    torch.testing.assert_close(variance * torch.arange(1, 65), torch.ones(64), atol=0.05, rtol=0)


def test_a_scale_of_nope_multiplies_scores_and_a_head_has_its_own_of_at_least_one(generator):
    query, key, value = states(generator)
    expected = built("nope").attend(0, 1.6 * query, key, value)
    torch.testing.assert_close(built("nope", scale=1.6).attend(0, query, key, value), expected)
    module = built("nope", scale=1.6, per_head=True)
    torch.testing.assert_close(module.attend(0, query, key, value), expected)
    with torch.no_grad():
        module.scale[0, 0] = 0.5
    plain = built("nope").attend(0, query, key, value)
    torch.testing.assert_close(module.attend(0, query, key, value)[:, 0], plain[:, 0])


def test_drope_equals_rope_before_the_drop_and_nope_after_it(generator):
    query, key, value = states(generator)
    module = built("drope", base=50.0)
    rotated = built("rope", base=50.0).attend(0, query, key, value)
    assert torch.equal(module.attend(0, query, key, value), rotated)
    for _ in range(2):  # training says so before every step
        module.finalize()
        assert torch.equal(module.attend(0, query, key, value), built("nope").attend(0, query, key, value))
    assert not torch.allclose(rotated, module.attend(0, query, key, value), atol=1e-3)


def test_scores_of_drope_grow_with_the_logarithm_beyond_the_trained_length(generator):
    query, key, value = states(generator, tokens=8)
    module = built("drope", growth=0.5, train_length=4)
    assert torch.equal(module.attend(0, query, key, value), built("rope").attend(0, query, key, value))
    module.finalize()
    # Queries at positions 2 and 4 are within the trained length: beta = 1. Position 6: 1 + ln(1.5) / 2 = 1.2027.
    # Position 8: 1 + ln(2) / 2 = 1.3466.
    found = module.attend(0, query, key, value)
    for index, beta in ((1, 1.0), (3, 1.0), (5, 1.2027326), (7, 1.3465736)):
        seen = slice(0, index + 1)
        expected = built("nope", scale=beta).attend(
            0, query[:, :, index : index + 1], key[:, :, seen], value[:, :, seen]
        )
        torch.testing.assert_close(found[:, :, index : index + 1], expected)


def test_every_third_layer_of_rope_nope_has_no_rotation_and_all_others_rotate(generator):
    query, key, value = states(generator)
    rotated, plain = (built(name).attend(0, query, key, value) for name in ("rope", "nope"))
    module = built("rope_nope", shape(layers=7), every=3)
    unrotated = [torch.equal(module.attend(layer, query, key, value), plain) for layer in range(7)]
    assert unrotated == [False, False, True, False, False, True, False]
    for layer in (0, 1, 3, 4, 6):
        assert torch.equal(module.attend(layer, query, key, value), rotated)


def test_shaw_by_hand():
    module = built("shaw", shape(heads=1, width=4), max_distance=1)
    with torch.no_grad():
        module.vectors[0, 1] = torch.tensor([2 * math.log(2), 0, 0, 0])  # 2 = sqrt(D)
    # Scores of query 2: distances 2 and 1 are both clipped to 1 and score ln 2, itself 0: shares 2/5, 2/5, 1/5.
    query = torch.tensor([1.0, 0, 0, 0]).expand(1, 1, 3, 4)
    value = torch.eye(4)[:3].view(1, 1, 3, 4)
    out = module.attend(0, query, torch.zeros(1, 1, 3, 4), value)
    assert out[0, 0, 2].tolist() == pytest.approx([0.4, 0.4, 0.2, 0])


def test_contextual_positions_by_hand():
    # Query 2 with gates 0.5, 1, 0.25: itself 0.25, key 1 1.25, key 0 1.75. Query 1 sees keys 0 and 1 only.
    gates = torch.tensor([[0.9, 0.9, 0.9], [0.5, 1.0, 0.9], [0.5, 1.0, 0.25]])
    expected = torch.tensor([[0.9, 0.0, 0.0], [1.5, 1.0, 0.0], [1.75, 1.25, 0.25]])
    torch.testing.assert_close(contextual_positions(gates, 9), expected)
    torch.testing.assert_close(contextual_positions(gates, 1), expected.clamp(max=1))


def interpolate(by_position, positions):
    """Return a value between those of the two nearest whole positions."""
    floor = positions.detach().floor()
    low, high = (by_position.gather(-1, whole.long()) for whole in (floor, positions.detach().ceil()))
    return low + (positions - floor) * (high - low)


def test_a_fractional_position_lies_between_two_whole_ones_and_passes_a_gradient():
    positions = torch.tensor([[0.0, 1.25, 2.0]], requires_grad=True)
    found = interpolate(torch.tensor([[10.0, 20.0, 60.0]]), positions)
    assert found.tolist() == [[10.0, 30.0, 60.0]]  # 0.75 * 20 + 0.25 * 60
    found.sum().backward()
    assert positions.grad.tolist() == [[0.0, 40.0, 0.0]]  # 60 - 20; floor = ceiling at whole positions


def cope_with_whole_tensors(module, query, key, value, divide):
    """Return attention by the formula of the paper, each tensor whole."""
    scaling = query.shape[-1] ** -0.5
    positions = contextual_positions(module.gates(query, key), module.p_max)
    placed = interpolate(query @ module.table[0].T, positions)
    scored, keys = module.content(query, key) or (query, key)
    return attend_scores(scored @ keys.mT * scaling + placed * (scaling if divide else 1.0), value)


COPES = [
    ("cope", {"p_max": 4}), ("cope", {"p_max": 1}), ("cope", {"p_max": 300}), ("cope", {"p_max": 8, "divide": False}),
    ("cope", {"p_max": 8, "gate": "softmax"}), ("cope_rope", {"p_max": 8}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "parameters"), COPES, ids=lambda each: str(each))
@pytest.mark.parametrize(("n_query", "n_key"), [(1, 1), (6, 6), (150, 150), (1, 70), (70, 140)])
@pytest.mark.parametrize("product", [None, 0.0, -300.0, 100.0], ids=["any gate", "half open", "closed", "open"])
def test_tiles_of_cope_and_their_gradients_are_those_of_whole_tensors(
    name, parameters, n_query, n_key, product, generator, monkeypatch
):
    monkeypatch.setattr(cope, "CPU_SCORES", 5 * min(n_query, cope.QUERIES) * n_key)  # groups of 5 and of 1 heads
    module = built(name, **parameters)
    with torch.no_grad():
        module.table.copy_(torch.randn(module.table.shape, generator=generator))
    query, key, value = (torch.randn(3, 2, n, 4, generator=generator) for n in (n_query, n_key, n_key))
    if product is not None:  # of gates that are half open every second position is whole
        query[..., 0], key = 1.0, torch.zeros_like(key)
        key[..., 0] = product
    grad = torch.randn(3, 2, n_query, 4, generator=generator)
    inputs = [each.requires_grad_() for each in (query, key, value, module.table)]
    expected = cope_with_whole_tensors(module, query, key, value, parameters.get("divide", True))
    found = module.attend(0, query, key, value)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for gradient, whole in zip(*(torch.autograd.grad(out, inputs, grad) for out in (found, expected)), strict=True):
        torch.testing.assert_close(gradient, whole, rtol=1e-5, atol=1e-5 * max(1.0, abs(product or 0)))


@pytest.mark.parametrize(("name", "parameters"), COPES, ids=lambda each: str(each))
def test_gradients_of_cope_are_those_of_differences_in_double_precision(name, parameters, generator):
    module = built(name, **parameters).double()
    inputs = [torch.randn(1, 2, n, 4, generator=generator).double().requires_grad_() for n in (3, 5, 5)]
    assert torch.autograd.gradcheck(lambda *states: module.attend(0, *states), inputs)


def test_cope_keeps_no_tensor_of_all_queries_and_keys_and_returns_the_dtype_that_it_is_given(generator):
    kept = []
    module, (query, key, value) = built("cope"), states(generator, tokens=300)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        out = module.attend(0, query.requires_grad_(), key, value)
    assert max(kept) == query.numel()
    half = module.attend(0, *(each.detach().bfloat16() for each in (query, key, value)))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), out, atol=0.05, rtol=0.05)


def test_cope_with_all_gates_open_is_clipped_relative_position(generator):
    query, key = with_constant_product(generator, 100.0)  # sigmoid(100 / 2) is 1 in float32
    value = torch.randn(1, 1, 6, 4, generator=generator)
    small = shape(heads=1, width=4)
    cope, shaw = built("cope", small, p_max=4), built("shaw", small, max_distance=3)
    table = torch.randn(1, 5, 4, generator=generator)
    with torch.no_grad():
        cope.table.copy_(table)
        shaw.vectors.copy_(table[:, 1:])  # the query itself counts, so position p is distance p - 1
    torch.testing.assert_close(cope.attend(0, query, key, value), shaw.attend(0, query, key, value))


def test_cope_with_all_gates_closed_has_all_keys_at_the_first_position(generator):
    query, key = with_constant_product(generator, -300.0)  # sigmoid(-150) is 0 in float32
    value = torch.randn(1, 1, 6, 4, generator=generator)
    small = shape(heads=1, width=4)
    cope = built("cope", small, p_max=4)
    with torch.no_grad():
        cope.table.copy_(torch.randn(1, 5, 4, generator=generator))
    torch.testing.assert_close(cope.attend(0, query, key, value), built("nope", small).attend(0, query, key, value))


def test_cope_adds_position_scores_after_the_division_where_asked(generator):
    query, key, value = states(generator)
    divided, whole = built("cope", p_max=8), built("cope", p_max=8, divide=False)
    table = torch.randn(1, 9, 4, generator=generator)
    with torch.no_grad():
        divided.table.copy_(table)
        whole.table.copy_(table / 2)  # sqrt(D)
    torch.testing.assert_close(divided.attend(0, query, key, value), whole.attend(0, query, key, value))


def test_softmax_gates_of_a_query_sum_to_one_so_that_no_position_is_above_one(generator):
    query, key = with_constant_product(generator, 100.0)  # equal scores: the query in place i has i + 1 gates alike
    gates = built("cope", shape(heads=1, width=4), gate="softmax").gates(query, key)[0, 0]
    assert gates.sum(dim=-1).tolist() == pytest.approx([1] * 6)
    assert gates[3].tolist() == pytest.approx([0.25] * 4 + [0, 0])
    assert contextual_positions(gates, 8)[3].tolist() == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0])


def test_cope_has_a_table_per_layer_or_one_for_all():
    layers = shape(layers=3)
    assert [built("cope", layers, shared=shared).table.shape[0] for shared in (False, True)] == [3, 1]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("cope", {"p_max": 4}), ("cope_rope", {"p_max": 4}), ("shaw", {"max_distance": 3}), ("nope", {"per_head": True})],
)
def test_each_layer_has_the_positions_of_its_own_table(name, parameters, generator):
    query, key, value = states(generator)
    layers, one = built(name, shape(layers=3), **parameters), built(name, **parameters)
    (tables,), (table,) = list(layers.parameters()), list(one.parameters())
    with torch.no_grad():
        tables.copy_(2 * torch.rand(tables.shape, generator=generator) + 1)
    outputs = [layers.attend(layer, query, key, value) for layer in range(3)]
    for layer, output in enumerate(outputs):
        with torch.no_grad():
            table.copy_(tables[layer : layer + 1])
        torch.testing.assert_close(output, one.attend(0, query, key, value))
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)


def test_cope_with_rope_is_rope_while_its_table_is_zero_and_cope_without_rotation(generator):
    query, key, value = states(generator)
    both = built("cope_rope", p_max=8)
    torch.testing.assert_close(both.attend(0, query, key, value), built("rope").attend(0, query, key, value))
    # One token is at position 0, where nothing rotates.
    cope = built("cope", p_max=8)
    with torch.no_grad():
        both.table.fill_(0.3)
        cope.table.fill_(0.3)
    first = [part[:, :, :1] for part in (query, key, value)]
    torch.testing.assert_close(both.attend(0, *first), cope.attend(0, *first))
    assert not torch.allclose(both.attend(0, query, key, value), cope.attend(0, query, key, value), atol=1e-3)


@pytest.mark.parametrize("positions", ["none", "rope", "alibi"])
def test_the_extra_key_of_stable_mask_is_the_whole_matrix_of_pseudo_scores(positions, generator):
    query, key, value = states(generator)
    n, gamma = 9, 0.3  # the text is shorter than in training
    found = built("stable_mask", gamma=gamma, train_length=n, positions=positions).attend(0, query, key, value)
    if positions == "rope":
        query, key = RotaryAngles().rotate(query, key)
    scores = torch.zeros(2, 2, 6, n)
    scores[..., :6] = query @ key.transpose(-1, -2) / 2
    if positions == "alibi":
        apart = torch.arange(6)[:, None] - torch.arange(n)
        scores = scores - torch.tensor(alibi_slopes(2))[:, None, None] * apart
    causal = torch.ones(6, n).tril()
    pseudo = -gamma * torch.arange(n).float() * (1 - causal)  # -gamma (j - 1) with j from 1
    kept = ((scores * causal + pseudo).softmax(dim=-1) * causal)[..., :6]
    torch.testing.assert_close(found, kept @ value)
    if positions == "none":  # the share that is missing tells the row
        assert (kept.sum(dim=-1)[0, 0].max() < 1).item()


def test_rows_after_the_length_of_training_have_no_pseudo_scores(generator):
    query, key, value = states(generator)
    found = built("stable_mask", train_length=3, positions="none").attend(0, query, key, value)
    plain = built("nope").attend(0, query, key, value)
    torch.testing.assert_close(found[:, :, 2:], plain[:, :, 2:])
    assert not torch.allclose(found[:, :, :2], plain[:, :, :2], atol=1e-3)
