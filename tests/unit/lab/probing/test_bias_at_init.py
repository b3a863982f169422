"""The influence of each position in decoders whose curve is known from their mask."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.lab.encodings import Decoder, DecoderShape, create_encoding
from rag_posfix.lab.probing.bias_at_init import BiasAtInit, create_untrained, forward_of, influence, shares
from tests.unit.lab.probing.probed import small_decoder, tiny_model

IDS = torch.randint(0, 50, (1, 64), generator=torch.Generator().manual_seed(3))


def even_decoder(layers):
    """Return a NoPE decoder whose attention is uniform: its queries and keys are 0."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Decoder(create_encoding("nope"), DecoderShape(50, layers=layers, width=32)).eval()
    with torch.no_grad():
        for layer in model.layers:
            layer.project.weight[: 2 * 32] = 0
            layer.project.bias[: 2 * 32] = 0
    return model


def curve(model):
    return influence(forward_of(model), IDS, torch.Generator().manual_seed(0))


def test_one_layer_of_uniform_attention_depends_on_all_earlier_tokens_alike():
    found = curve(even_decoder(1))
    assert float(found.sum()) == pytest.approx(1)
    # Norms of tokens differ a little, and with them the gradients of the layer norm; there is no trend.
    ratios = shares(found)
    assert ratios["first"] == pytest.approx(1, abs=0.2)
    assert ratios["last"] == pytest.approx(1, abs=0.2)
    assert found[-1] > 10 * found[:-1].mean()  # the residual stream


def test_deeper_models_depend_more_on_the_first_tokens():
    # Two layers: token t reaches the last through all s >= t, each of which reads it with 1 / s.
    first = [shares(curve(even_decoder(layers)))["first"] for layers in (1, 2, 6)]
    assert first[0] < first[1] < first[2]


def test_an_untrained_model_has_the_configuration_and_other_weights():
    model = tiny_model()
    made = create_untrained(model, 0)
    trained = model.engine.loaded.model
    assert made.config.to_dict() == trained.config.to_dict()
    assert not torch.equal(made.lm_head.weight, trained.lm_head.weight)
    assert torch.equal(made.lm_head.weight, create_untrained(model, 0).lm_head.weight)


@pytest.mark.parametrize("subject", [tiny_model(), small_decoder("alibi")], ids=["language model", "decoder"])
@pytest.mark.slow
def test_both_kinds_of_models_are_probed(subject, tmp_path):
    record = BiasAtInit(strings=2, tokens=40, seeds=2).run(subject, out=tmp_path)
    for found in record.summary["curves"].values():
        assert sum(found) == pytest.approx(1)
    assert len(record.summary["untrained_spread"]) == 40
    counts = {name: share["last"]["n"] for name, share in record.summary["shares"].items()}
    assert counts == {"trained": 2, "untrained": 4}
    assert set(record.files) == {"record", "svg", "png"}
