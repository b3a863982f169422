from dataclasses import replace

import pytest
import torch

from rag_posfix.attention.masks import windows_mask, windows_of
from rag_posfix.attention.rope import SelectedAttention, deviation, first_tokens, largest
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import ConfigError
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.generation.engine import Engine
from rag_posfix.mitigations import create
from rag_posfix.plan.layout import Span
from rag_posfix.plan.plan import Plan, RowPlan
from tests.support.number_encoder import NumberEncoder
from tests.support.tiny import FAMILIES, loaded_model, stock_model, toy_layout


def said(loaded, layout, **parameters):
    session = Session(loaded, layout, create("blended", parameters).plan(layout, loaded.spec.shape))
    first = session.next_log_probs()
    session.advance(7)
    return torch.stack((first, session.next_log_probs()))


def stock(loaded, layout, row=None):
    session = Session(loaded, layout, Plan(rows=(row or RowPlan(),)))
    first = session.next_log_probs()
    session.advance(7)
    return torch.stack((first, session.next_log_probs()))


def test_the_tokens_that_deviate_most_are_chosen():
    kept = torch.zeros(1, 2, 6, 2)
    fresh = kept.clone()
    fresh[0, 0, 0, 0] = 9.0  # a token of the prefix: never chosen
    fresh[0, 1, 2, 1] = 1.0  # 1
    fresh[0, 0, 3] = torch.tensor([2.0, 1.0])  # 4 + 1
    fresh[0, 1, 5, 0] = -2.0  # 4
    assert largest(deviation(fresh, kept), 1, 0.4).tolist() == [3, 5]
    assert largest(deviation(fresh, kept), 1, 0.41).tolist() == [2, 3, 5], "rounded up"
    assert largest(deviation(fresh, kept), 1, 0.0).tolist() == []
    assert largest(deviation(kept, kept), 1, 0.2).tolist() == [1], "of equals the first"


def test_the_first_tokens_of_each_passage():
    assert first_tokens([(2, 6), (6, 9), (9, 9)], 0.5).tolist() == [2, 3, 6, 7]
    assert first_tokens([], 0.5).tolist() == []


@pytest.mark.parametrize("family", FAMILIES)
def test_reading_everything_again_is_the_unmodified_model(family):
    loaded, layout = loaded_model(family), toy_layout()
    for choose in ("deviation", "first", "query"):
        found = said(loaded, layout, fraction=1.0, choose=choose)
        assert float((found - stock(loaded, layout)).abs().max()) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_reading_nothing_again_is_the_prompt_with_passages_hidden_from_each_other(family):
    """Keys that were moved are the keys of the place that they were moved to, also under YaRN and Llama 3's scaling.

    Without a prefix: passages that see one were nearer to it when they were read apart.
    """
    loaded, layout = loaded_model(family), toy_layout(prefix=0)
    hidden = RowPlan(mask=windows_mask(layout, windows_of(layout, None)))
    found = said(loaded, layout, fraction=0.0, choose="first")
    assert float((found - stock(loaded, layout, hidden)).abs().max()) < 1e-5


def test_the_more_is_read_again_the_nearer_it_comes():
    loaded, layout = loaded_model(), toy_layout((20, 15, 25, 18))
    base = stock(loaded, layout)
    errors = [float((said(loaded, layout, fraction=f) - base).abs().mean()) for f in (0.0, 0.3, 0.6, 1.0)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 100 * errors[-1]


def test_tokens_that_are_read_again_see_all_up_to_themselves():
    chosen = torch.tensor([6, 13, 14, 30])
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 8, 4, 8), (1, 2, 31, 8), (1, 2, 31, 8)
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)

    class Given:
        pass

    given = Given()
    given.query, given.key, given.value, given.scaling = query, key, value, 0.4
    found, _ = SelectedAttention(chosen)(given)
    for i, token in enumerate(chosen.tolist()):
        for head in range(8):
            scores = (key[0, head // 4, : token + 1] @ query[0, head, i]) * 0.4
            expected = scores.softmax(0) @ value[0, head // 4, : token + 1]
            assert torch.allclose(found[0, head, i], expected, atol=1e-5)


@pytest.mark.parametrize("order", [(2, 0, 3, 1), (3, 1, 0)])
def test_passages_are_found_wherever_they_stand(order):
    loaded, layout = loaded_model(), toy_layout()
    engine = Engine(loaded, NumberEncoder(), "tiny", "print", passages=PassageStore([MemoryTier()]))
    engine.open(layout, MitigationChoice("parallel_windows"))  # reads passages as this method does
    asked = layout.select(order)
    session = engine.open(asked, MitigationChoice("blended"))
    passages = asked.suffix.start - 5
    assert session.cached_tokens == asked.suffix.start - -(-15 * passages // 100)
    assert torch.allclose(session.next_log_probs(), said(loaded, asked)[0], atol=1e-5)


@pytest.mark.parametrize("layers", [2, 3, 4])
def test_the_deviation_is_measured_in_the_last_of_the_first_layers(layers, monkeypatch):
    seen = []

    def watched(fresh, kept):
        seen.append(fresh.clone())
        return deviation(fresh, kept)

    monkeypatch.setattr("rag_posfix.generation.prefill.per_passage.deviation", watched)
    loaded, layout = loaded_model(num_hidden_layers=4), toy_layout()
    said(loaded, layout, layers=layers)
    (batch,) = Session(loaded, layout, Plan()).batches
    whole = batch.cache.layers[layers - 1].values[:, :, : layout.suffix.start]
    torch.testing.assert_close(seen, [whole], atol=1e-5, rtol=0)


def test_layers_beyond_the_depth_of_the_model_are_refused():
    loaded, layout = loaded_model(num_hidden_layers=4), toy_layout()
    whole = said(loaded, layout, fraction=0.0, layers=4)  # every layer of every token is computed
    assert float((whole - stock(loaded, layout)).abs().max()) < 1e-5
    message = "blended: layers=5 must be at most 4, the layers of this model; lower layers, or use choose='first'"
    for prompt in (layout, toy_layout(lengths=())):
        with pytest.raises(ConfigError, match=message):
            create("blended", {"layers": 5}).plan(prompt, loaded.spec.shape)
    with pytest.raises(ConfigError, match="layers=1"):
        create("blended", {"layers": 1})
    first = create("blended", {"layers": 5, "choose": "first"}).plan(layout, loaded.spec.shape)
    assert first.blend.by == "first"


def test_one_passage_needs_no_correction():
    loaded, layout = loaded_model(), toy_layout((9,))
    for fraction in (0.0, 0.5):
        assert float((said(loaded, layout, fraction=fraction) - stock(loaded, layout)).abs().max()) < 1e-5


def test_the_tokens_that_the_question_attends_to_are_chosen(monkeypatch):
    """By the attention of the stock model, whose passages do not see each other: they were read apart."""
    scores = []

    def chosen(values, start, fraction):
        scores.append((values.clone(), start))
        return largest(values, start, fraction)

    monkeypatch.setattr("rag_posfix.generation.prefill.per_passage.largest", chosen)
    layout = toy_layout((6, 4, 5), prefix=0)
    said(loaded_model(), layout, choose="query")
    ((values, start),) = scores
    n_tokens, first = layout.question.stop, layout.suffix.start
    positions = torch.arange(n_tokens)
    visible = windows_mask(layout, windows_of(layout, None))(positions[:, None], positions[None])
    bias = torch.zeros(1, 1, n_tokens, n_tokens).masked_fill(~visible, float("-inf"))
    model = stock_model()
    model.set_attn_implementation("eager")
    ids = torch.tensor([layout.token_ids[:n_tokens]])
    attentions = model(ids, attention_mask=bias, output_attentions=True).attentions
    expected = torch.stack([weights[0, :, layout.question.start :, :first] for weights in attentions]).mean((0, 1, 2))
    assert start == 0
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)


def test_a_question_before_the_passages_leaves_the_choice_to_the_end_of_the_prompt():
    loaded, layout = loaded_model(), toy_layout()
    before = replace(layout, question=Span(1, 3))
    assert torch.isfinite(said(loaded, before, choose="query")).all()
