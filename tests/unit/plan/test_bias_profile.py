import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.errors import ConfigError
from rag_posfix.plan.bias_profile import bias_profile_from, packaged_profiles, read_head_list, scaled, stretched

SHAPES = {"smollm2": (30, 9), "gemma3-270m": (18, 4)}


def test_a_profile_is_stretched_and_scaled_by_hand():
    # 4, 2, 6 over five slots is 4, 3, 2, 4, 6 with mean 3.8; measured mean 7.6: twice as much.
    measured = [7.6] * 5
    assert scaled([4.0, 2.0, 6.0], measured) == pytest.approx((8.0, 6.0, 4.0, 8.0, 12.0))
    assert scaled([4.0, 2.0], [1.0, 5.0]) == pytest.approx((4.0, 2.0))


@given(
    st.lists(st.floats(0, 1e6), min_size=2, max_size=12).filter(any),
    st.lists(st.floats(0, 1e3), min_size=1, max_size=12),
)
def test_a_scaled_profile_has_the_mean_of_what_was_measured(profile, measured):
    found = scaled(profile, measured)
    assert len(found) == len(measured)
    if any(found):
        assert sum(found) == pytest.approx(sum(measured), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("slots", "count"), [(2, 5), (3, 3), (7, 4), (4, 2)])
def test_stretching_is_linear_interpolation_with_aligned_ends(slots, count):
    profile = torch.rand(slots, generator=torch.Generator().manual_seed(slots))
    expected = torch.nn.functional.interpolate(profile[None, None], size=count, mode="linear", align_corners=True)
    assert stretched(profile.tolist(), count) == pytest.approx(expected[0, 0].tolist(), rel=1e-5)


def test_a_profile_that_mirrors_itself_does_so_for_every_number_of_slots():
    # Rounding of one half alone would break the tie between a slot and its mirror image.
    profile = (0.7, 0.1, 0.3, 0.1, 0.7)
    for count in range(2, 40):
        found = stretched(profile, count)
        assert found == found[::-1]


def test_the_packaged_models_have_profiles():
    assert packaged_profiles() == tuple(sorted(SHAPES))


@pytest.mark.parametrize("model", sorted(SHAPES))
def test_a_packaged_profile_has_a_value_per_slot_and_heads_that_the_model_has(model):
    slots = bias_profile_from("slots")(model)["slots"]
    assert len(slots) == 10
    assert slots.index(max(slots)) == 9, "both models pay most attention to the last passage"
    layers, heads = SHAPES[model]
    found = read_head_list(model)["heads"]
    assert len({tuple(head) for head in found}) == len(found) == 8
    assert all(0 <= layer < layers and 0 <= head < heads for layer, head in found)


def test_a_file_with_the_name_of_a_packaged_model_is_that_file(tmp_path, monkeypatch):
    (tmp_path / "smollm2").write_text("[3, 4]")
    monkeypatch.chdir(tmp_path)
    assert bias_profile_from("slots")("smollm2") == {"slots": (3, 4)}


def test_a_name_that_is_neither_a_file_nor_a_packaged_model_is_refused():
    with pytest.raises(ConfigError, match="'smollm3' cannot be read"):
        read_head_list("smollm3")
