"""The small decoder with every encoding: decoding step by step, its files, generation, and that it learns."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from rag_posfix.errors import ConfigError, UnknownNameError
from rag_posfix.lab.encodings import ENCODINGS, Decoder, DecoderShape, create_encoding, load_decoder

SHAPE = DecoderShape(vocabulary=11, layers=2, heads=2, width=16, inner=32)
VARIANTS = [
    *(name for name, cls in ENCODINGS.items() if cls.causal),
    "nope per head", "cope shared", "stable_mask alibi", "stable_mask none", "rope ntk",
    "drope dropped", "drope growth",
]  # fmt: skip
PARAMETERS = {
    "nope per head": ("nope", {"per_head": True, "scale": 1.3}),
    "cope": ("cope", {"p_max": 5}),
    "cope shared": ("cope", {"p_max": 5, "shared": True}),
    "stable_mask": ("stable_mask", {"train_length": 7}),
    "stable_mask alibi": ("stable_mask", {"train_length": 7, "positions": "alibi"}),
    "stable_mask none": ("stable_mask", {"train_length": 20, "positions": "none"}),
    "drope dropped": ("drope", {}),
    "drope growth": ("drope", {"growth": 0.7, "train_length": 5}),
    "rope_nope": ("rope_nope", {"every": 2}),
    "rope ntk": ("rope", {"ntk": 2.0, "interpolation": 1.5}),
}


def decoder(variant, shape=SHAPE, seed=0):
    """Return a decoder whose parameters are random, those that start at zero too."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = Decoder(create_encoding(*PARAMETERS.get(variant, (variant, {}))), shape)
        with torch.no_grad():
            for parameter in made.positions.parameters():
                parameter.add_(torch.rand_like(parameter))
    if variant.startswith("drope "):
        made.positions.finalize()
    return made.eval()


def tokens(n, batch=2, seed=1):
    return torch.randint(0, 11, (batch, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_decoding_step_by_step_gives_the_logits_of_one_pass(variant):
    model, ids = decoder(variant), tokens(12)
    whole, _ = model(ids)
    first, past = model(ids[:, :4])
    parts = [first]
    for part in (ids[:, 4:7], *ids[:, 7:].split(1, dim=1)):  # three at once, then one by one
        logits, past = model(part, past)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_no_logit_depends_on_a_later_token(variant):
    model, ids = decoder(variant), tokens(10)
    changed = ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 11
    torch.testing.assert_close(model(ids)[0][:, :6], model(changed)[0][:, :6], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_is_trained(variant):
    model, ids = decoder(variant).train(), tokens(12)
    logits, _ = model(ids)
    cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    without = [name for name, one in model.named_parameters() if one.grad is None or not one.grad.abs().sum() > 0]
    assert without == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_decoder_is_loaded_with_equal_logits(variant, tmp_path):
    model, ids = decoder(variant), tokens(9)
    model.save(tmp_path / "new")
    loaded = load_decoder(tmp_path / "new").eval()
    assert loaded.encoding == model.encoding
    assert loaded.shape == SHAPE
    assert torch.equal(loaded(ids)[0], model(ids)[0])


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.slow
def test_it_learns_to_repeat_a_pattern_and_generates_it(norm):
    model = decoder("rope", DecoderShape(vocabulary=11, layers=1, heads=2, width=32, inner=64, norm=norm)).train()
    ids = torch.tensor([[1, 2, 3, 4] * 4])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        logits, _ = model(ids)
        loss = cross_entropy(logits[0, :-1], ids[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert model.generate(ids[:, :6], 6).tolist() == [[3, 4, 1, 2, 3, 4]]
    assert model.training


def test_the_most_likely_tokens_are_those_of_a_pass_over_all_and_drawn_ones_repeat_with_their_seed():
    model, ids = decoder("cope"), tokens(5)
    written = model.generate(ids, 4)
    logits, _ = model(torch.cat((ids, written), dim=1))
    assert torch.equal(logits[:, 4:-1].argmax(dim=-1), written)
    drawn = [
        model.generate(ids, 12, temperature=2.0, generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert model.generate(ids, 0).shape == (2, 0)


@pytest.mark.parametrize(
    ("arguments", "options"), [((tokens(0), 2), {}), ((tokens(2), -1), {}), ((tokens(2), 2), {"temperature": 1.0})]
)
def test_what_cannot_be_generated_is_refused(arguments, options):
    with pytest.raises(ConfigError, match="cannot generate"):
        decoder("nope").generate(*arguments, **options)


def test_files_that_are_missing_damaged_or_of_another_decoder_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no decoder that can be loaded"):
        load_decoder(tmp_path)
    decoder("rope").save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    config["encoding"] = {"name": "learned", "parameters": {"max_positions": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(ConfigError, match=r"model\.safetensors does not fit"):
        load_decoder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(ConfigError, match="holds no decoder that can be loaded"):
        load_decoder(tmp_path)
    with pytest.raises(ConfigError, match="cannot save a decoder"):
        decoder("rope").save(tmp_path / "config.json" / "new")


def test_shapes_and_names_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="width=18 must be a multiple of twice heads=4"):
        DecoderShape(vocabulary=4, heads=4, width=18)
    with pytest.raises(UnknownNameError, match="unknown encoding 'ropes'"):
        create_encoding("ropes", {})
    with pytest.raises(ConfigError, match=r"ntk=2\.0 needs heads of at least 4 channels"):
        create_encoding("rope", {"ntk": 2.0}).build(DecoderShape(vocabulary=4, heads=2, width=4))
    with pytest.raises(ConfigError, match="max_distance=16 must be above half of buckets=32"):
        create_encoding("t5", {"max_distance": 16})
    with pytest.raises(ConfigError, match="every=4 must be at most layers=2, or no layer is without positions"):
        create_encoding("rope_nope").build(SHAPE)


def test_a_label_names_what_differs_from_the_defaults_and_aliases_are_known():
    assert create_encoding("cope", {"p_max": 16, "shared": False}).label == "cope:p_max=16"
    assert create_encoding("relative").label == "shaw"
    for name, cls in ENCODINGS.items():
        assert cls.name == name
        assert cls.paper
        assert "Formula:" in (cls.__doc__ or "")
        assert "Source:" in (cls.__doc__ or "")
