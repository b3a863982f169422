"""What a question attends to: equal to the stock model's own attention, and read in two short passes."""

import dataclasses
import itertools

import pytest
import torch

from rag_posfix.attention.masks import last_query_attention
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import ConfigError, PromptTooLongError, UnsupportedModelError
from rag_posfix.generation.batching.scheduler import BatchingGenerator
from rag_posfix.generation.decode.question_scores import question_attention
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.patching.spec import Ranks
from rag_posfix.plan.layout import Span
from tests.support.number_encoder import NumberEncoder
from tests.support.stepped import RecordingEngine
from tests.support.tiny import FAMILIES, loaded_model, stock_model, toy_layout

LAYOUT = toy_layout()
T, AT = len(LAYOUT.token_ids), LAYOUT.suffix.start


def asking(*suffix):
    """The same passages with another suffix."""
    return dataclasses.replace(
        LAYOUT,
        token_ids=(*LAYOUT.token_ids[:AT], *suffix),
        suffix=Span(AT, AT + len(suffix)),
        question=Span(AT + 1, AT + len(suffix)),
    )


OTHER = asking(7, 9, 30)


def eager(family, layout, layers=slice(None), **overrides):
    """The same from all attention matrices of the model as it comes: (layers, heads, T, T)."""
    model = stock_model(family, **overrides)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(torch.tensor([layout.token_ids]), output_attentions=True, use_cache=False)
    attention = torch.stack(output.attentions)[:, 0]
    paid = attention[layers, :, layout.suffix.slice].mean(dim=2).sum(dim=(0, 1))
    return [paid[span.slice].tolist() for span in layout.passages]


def engine_of(loaded, store=None):
    return Engine(loaded, NumberEncoder(), "tiny", "print", passages=store)


@pytest.fixture(scope="module")
def loaded():
    return loaded_model()


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_the_stock_models_attention_matrices_say(family):
    for layout, found in zip([LAYOUT, OTHER], question_attention(loaded_model(family), [LAYOUT, OTHER]), strict=True):
        for one, expected in zip(found, eager(family, layout), strict=True):
            assert one == pytest.approx(expected, abs=2e-6)


def test_layers_that_are_named_count_alone():
    loaded = loaded_model()
    for layer in range(loaded.spec.shape.n_layers):
        found = question_attention(loaded, [LAYOUT, OTHER], layers=(layer,))
        for layout, passages in zip([LAYOUT, OTHER], found, strict=True):
            for one, expected in zip(passages, eager("llama", layout, slice(layer, layer + 1)), strict=True):
                assert one == pytest.approx(expected, abs=2e-6)


def test_layers_and_heads_that_are_named_are_summed(loaded):
    (found,) = question_attention(loaded, [LAYOUT], layers=(2, 0))
    for one, expected in zip(found, eager("llama", LAYOUT, [0, 2]), strict=True):
        assert one == pytest.approx(expected, abs=2e-6)
    # Every head of the same two layers.
    heads = [(layer, head) for layer in (2, 0) for head in range(8)]
    (by_head,) = question_attention(loaded, [LAYOUT], heads=heads)
    for one, other in zip(found, by_head, strict=True):
        assert one == pytest.approx(other, abs=2e-6)


@pytest.mark.parametrize(
    "chosen",
    [
        {"layers": ()}, {"layers": (-1,)}, {"layers": (0, 3)}, {"heads": ()}, {"heads": [(3, 0)]}, {"heads": [(0, 8)]},
        {"heads": [(-1, 0)]}, {"heads": [(0, -1)]},
    ],
)  # fmt: skip
def test_a_layer_or_head_that_the_model_does_not_have_is_refused(loaded, chosen):
    with pytest.raises(ConfigError, match="layers, 0 to 2" if "layers" in chosen else "layers 0 to 2, heads 0 to 7"):
        question_attention(loaded, [LAYOUT], **chosen)


def test_layers_that_forget_keys_are_read_whole_and_say_the_same():
    window = {"sliding_window": 12}
    loaded = loaded_model("mistral", **window)
    assert not loaded.keeps_all_keys
    found = question_attention(loaded, [LAYOUT, OTHER])
    for layout, passages in zip([LAYOUT, OTHER], found, strict=True):
        for one, expected in zip(passages, eager("mistral", layout, **window), strict=True):
            assert one == pytest.approx(expected, abs=2e-6)
    assert set(found[0][0][:4]) == {0.0}, "no layer sees the first passage from the question"


def test_passages_are_read_once_and_each_question_in_one_short_pass(loaded, passes):
    engine_of(loaded).question_attention([LAYOUT, OTHER, LAYOUT])
    assert passes == [AT, T - AT, 3, T - AT]


def test_the_first_question_leaves_nothing_behind_for_the_second(loaded):
    engine = engine_of(loaded)
    alone = engine.question_attention([OTHER])
    assert engine.question_attention([LAYOUT, OTHER])[1:] == alone


def test_what_the_store_holds_is_not_read_again_and_says_the_same(loaded, passes):
    store = PassageStore([MemoryTier()])
    engine = engine_of(loaded, store)
    cold = engine.question_attention([LAYOUT])
    bounds = [0, *LAYOUT.boundaries]
    assert passes == [*(b - a for a, b in itertools.pairwise(bounds)), T - AT]
    passes.clear()
    assert engine.question_attention([LAYOUT]) == cold
    assert passes == [T - AT]
    passes.clear()
    request = GenerationRequest(LAYOUT, MitigationChoice("none"), Sampling(max_tokens=1))
    assert engine.generate(request).usage.cached_tokens == AT, "an answer of the unmodified model finds them too"
    assert engine.question_attention([LAYOUT], salt="another tenant") == cold
    assert sum(passes[1:]) == T


def test_prompts_that_differ_before_their_suffix_are_refused(loaded):
    with pytest.raises(ConfigError, match="2 prompts differ before their suffix"):
        question_attention(loaded, [LAYOUT, toy_layout(seed=1)])
    assert question_attention(loaded, []) == []


def test_it_can_be_stopped_between_two_questions(loaded, passes):
    calls = []

    def check():
        calls.append(len(passes))
        if len(calls) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        engine_of(loaded).question_attention([LAYOUT, OTHER], check=check)
    assert calls == [1, 2]
    assert passes == [AT, T - AT]


def test_a_prompt_beyond_the_context_window_is_refused_before_any_work(loaded, passes):
    engine, long = engine_of(loaded), toy_layout((600,))
    asked = (engine.question_likelihood, long), (engine.question_attention, [long]), (engine.passage_attention, [long])
    for function, given in asked:
        with pytest.raises(PromptTooLongError, match="613 tokens exceeds the context window of 512"):
            function(given)
    assert passes == []


def test_a_model_that_is_split_is_refused(loaded):
    split = LoadedModel(loaded.model, dataclasses.replace(loaded.spec, ranks=Ranks(2, 0, None)))
    with pytest.raises(UnsupportedModelError, match="split over 2 processes"):
        engine_of(split).question_attention([LAYOUT])


def test_a_batching_generator_hands_it_on_or_says_that_it_cannot(loaded):
    engine = engine_of(loaded)
    batching = BatchingGenerator(engine)
    assert "attention" in engine.capabilities & batching.capabilities
    assert batching.question_attention([LAYOUT]) == engine.question_attention([LAYOUT])
    assert batching.question_likelihood(LAYOUT) == engine.question_likelihood(LAYOUT)
    assert batching.passage_attention([LAYOUT]) == engine.passage_attention([LAYOUT])
    with pytest.raises(UnsupportedModelError, match="RecordingEngine reads no passages"):
        BatchingGenerator(RecordingEngine()).question_likelihood(LAYOUT)


def test_passage_attention_is_the_mean_per_token_of_the_last_row(loaded):
    model = stock_model()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(torch.tensor([LAYOUT.token_ids]), output_attentions=True)
    last = torch.stack(output.attentions)[:, 0, :, -1].mean(dim=(0, 1))
    expected = [float(last[span.slice].mean()) for span in LAYOUT.passages]
    assert engine_of(loaded).passage_attention([LAYOUT])[0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("count", [1, 3, 70])
def test_several_queries_are_averaged_causally_block_by_block(count):
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn((2, heads, n, 4), generator=generator) for heads, n in ((4, 70), (2, 80)))
    scores = query @ key.repeat_interleave(2, dim=1).transpose(-1, -2) * 0.5
    seen = torch.arange(80) <= torch.arange(10, 80)[:, None]
    expected = scores.masked_fill(~seen, float("-inf")).softmax(-1)[:, :, -count:].mean(dim=(1, 2))
    assert torch.allclose(last_query_attention(query, key, None, 0.5, count=count), expected, atol=1e-6)
    for mask in (seen[None, None], torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None]):
        assert torch.allclose(last_query_attention(query, key, mask, 0.5, count=count), expected, atol=1e-6)


def test_padding_in_front_gets_nothing():
    query, key = torch.ones((2, 1, 2, 4)), torch.ones((2, 1, 5, 4))
    found = last_query_attention(query, key, None, 1.0, starts=(0, 3), count=2)
    # Row 0: 4 and 5 keys, evenly. Row 1: keys 3, and 3 with 4: (1 + 1/2) / 2 and (0 + 1/2) / 2.
    assert found[0].tolist() == pytest.approx([(1 / 4 + 1 / 5) / 2] * 4 + [1 / 10])
    assert found[1].tolist() == pytest.approx([0, 0, 0, 0.75, 0.25])


@pytest.mark.parametrize(("asked", "expected"), [({"layers": [0]}, []), ({"heads": [(1, 2)]}, [0]), ({}, [0, 1])])
def test_layers_after_the_last_one_that_counts_do_not_run(loaded, asked, expected):
    read = []
    handles = [
        layer.mlp.register_forward_hook(lambda module, arguments, output, number=number: read.append(number))
        for number, layer in enumerate(loaded.model.model.layers)
    ]
    question_attention(loaded, [LAYOUT, OTHER], **asked)
    for handle in handles:
        handle.remove()
    # Passages once, each suffix once. The perceptron of the last layer that counts gives nothing that is looked at.
    assert read == expected * 3


def test_what_the_store_keeps_is_read_in_all_layers(loaded):
    store = PassageStore([MemoryTier(1 << 20)])
    engine = engine_of(loaded, store)
    short = engine.question_attention([LAYOUT], layers=[0])
    assert short == engine_of(loaded).question_attention([LAYOUT], layers=[0])
    request = GenerationRequest(LAYOUT, MitigationChoice("none"), Sampling(max_tokens=3))
    assert engine.generate(request).token_ids == engine_of(loaded).generate(request).token_ids
