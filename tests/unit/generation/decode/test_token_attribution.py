"""Which passages tokens come from: what the trace says, that it changes no answer, and where it is silent."""

from dataclasses import replace

import pytest
import torch

from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.generation.decode import question_scores
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.generation.decode.question_scores import AttributionTracker, attribution_layers
from rag_posfix.generation.engine import Engine
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.patching.attention_hook import Observer
from rag_posfix.plan.plan import Plan, RowPlan
from tests.support.number_encoder import NumberEncoder
from tests.support.tiny import loaded_model, toy_layout
from tests.unit.generation.together import generate_together

LAYOUT = toy_layout(relevance=(0.9, 0.2, 0.5, 0.4))
TOKENS = 5
SECOND = torch.tensor([0.0, 1.0])


@pytest.fixture(scope="module")
def engine():
    return Engine(loaded_model(), NumberEncoder(), "tiny", "print")


def request(name, attribution=True, layout=LAYOUT):
    choice = MitigationChoice(name, dict(MITIGATIONS.get(name).example))
    return GenerationRequest(layout, choice, Sampling(max_tokens=TOKENS), attribution=attribution)


@pytest.mark.parametrize("name", MITIGATIONS.names())
def test_every_method_says_where_each_token_comes_from_and_answers_as_without(engine, name):
    plain, traced = engine.generate(request(name, attribution=False)), engine.generate(request(name))
    assert plain.sources == ()
    assert (traced.text, traced.token_ids, traced.attention) == (plain.text, plain.token_ids, plain.attention)
    assert len(traced.sources) == len(traced.token_ids) == TOKENS
    assert traced.sources[-1].end == len(traced.text)
    for source in traced.sources:
        assert len(source.shares) == LAYOUT.n_passages
        assert all(share >= 0 for share in source.shares)
        assert sum(source.shares) == pytest.approx(1.0, abs=1e-5)


def test_sources_end_with_the_text_that_a_stop_string_has_cut(engine):
    ids = engine.generate(request("none")).token_ids
    sampling = Sampling(max_tokens=TOKENS, stop=(f",{ids[1]},{ids[2]},",))
    cut = engine.generate(replace(request("none"), sampling=sampling))
    first = len(str(ids[0]))
    assert cut.text == str(ids[0])
    assert [source.end for source in cut.sources] == [first] * 3, "the comma of the first token is cut too"


def test_the_first_token_comes_from_where_the_prompt_looked(engine):
    for name in ("none", "parallel_encoding", "context_experts"):
        session = engine.open(LAYOUT, request(name).mitigation, TOKENS)
        session.attribute_tokens()
        session.next_log_probs()
        (first,) = session.token_shares()
        total = sum(first)
        assert tuple(share / total for share in first) == pytest.approx(session.attention())


def test_the_shares_of_rows_are_summed_by_their_weights(engine):
    # Two rows of all passages, weights 3/4 and 1/4:
    # .75 * (.4, .4, .2, 0) + .25 * (0, .2, .2, .6) = (.3, .35, .2, .15).
    # Then 0 and 1: what the second row attends to. The weights of the last call before a token is taken count.
    session = engine.open(LAYOUT, MitigationChoice("multi_base", {"factors": (1.0, 1.9)}), TOKENS)
    tracker = AttributionTracker(session.batches, torch.tensor([(0.4, 0.4, 0.2, 0.0), (0.0, 0.2, 0.2, 0.6)]))
    tracker.weigh_rows(torch.tensor([1.0, 0.0]))
    tracker.weigh_rows(torch.tensor([0.75, 0.25]))
    tracker.take(())
    tracker.weigh_rows(torch.tensor([0.0, 1.0]))
    assert tracker.shares() == [pytest.approx((0.3, 0.35, 0.2, 0.15)), pytest.approx((0.0, 0.2, 0.2, 0.6))]


@pytest.mark.parametrize("layout", [LAYOUT, toy_layout((7, 4))], ids=["four passages", "two passages"])
def test_the_shares_are_those_of_the_plain_attention(engine, layout):
    """Compared with attention that transformers computes spelled out, in the layers that are watched."""
    generation = engine.generate(request("none", layout=layout))
    model = loaded_model().model
    model.set_attn_implementation("eager")
    ids = torch.tensor([[*layout.token_ids, *generation.token_ids[:-1]]])
    with torch.inference_mode():
        attentions = model(ids, output_attentions=True).attentions
    layers = sorted(attribution_layers(len(attentions)))
    for number, source in enumerate(generation.sources[1:], start=1):
        at = len(layout.token_ids) - 1 + number
        row = torch.stack([attentions[layer][0, :, at].mean(dim=0) for layer in layers]).mean(dim=0)
        mass = torch.stack([row[span.slice].sum() for span in layout.passages])
        assert source.shares == pytest.approx((mass / mass.sum()).tolist(), abs=1e-5)


def test_each_row_of_a_batch_has_the_passages_of_its_own_tokens():
    # Two rows of one batch: passages of 7 and 4 tokens, and of 6 and 5; the second row writes.
    loaded, layout = loaded_model(), toy_layout((7, 4, 6, 5))
    rows = (RowPlan(passages=(0, 1)), RowPlan(passages=(2, 3)))
    both = Plan(rows=rows, combine=lambda scores: (scores.log_probs[1], SECOND), independent_passages=True)
    found = Session(loaded, layout, both)
    assert [batch.n_rows for batch in found.batches] == [2]
    alone = Session(loaded, layout.select((2, 3)), Plan(independent_passages=True))
    for session in (found, alone):
        session.attribute_tokens()
        for token in (9, 11):
            session.next_log_probs()
            session.advance(token)
    for shares, expected in zip(found.token_shares(), alone.token_shares(), strict=True):
        assert shares == pytest.approx((0.0, 0.0, *expected), abs=1e-6)


def test_rows_of_one_passage_need_no_attention(engine, monkeypatch):
    """Their shares are the weights that the plan gives the rows: nothing is looked at."""
    monkeypatch.setattr(Observer, "observes", lambda self, layer: self.layers is None)
    with_weights = engine.generate(request("context_experts")).sources
    assert any(source.shares != with_weights[0].shares for source in with_weights)
    monkeypatch.setattr(question_scores, "Observer", None)
    assert engine.generate(request("context_experts")).sources == with_weights


def test_answers_written_together_are_traced_as_alone(engine):
    asked = [request(name) for name in ("none", "parallel_windows", "context_experts")]
    asked.append(request("none", attribution=False))
    together = generate_together(engine, asked)
    for one, other in zip(together, [engine.generate(each) for each in asked], strict=True):
        assert one.token_ids == other.token_ids
        assert len(one.sources) == len(other.sources)
        for here, there in zip(one.sources, other.sources, strict=True):
            assert (here.end, here.shares) == (there.end, pytest.approx(there.shares, abs=1e-5))


def test_a_prompt_without_passages_has_nothing_to_tell(engine):
    assert engine.generate(request("none", layout=toy_layout(lengths=()))).sources == ()


def test_a_model_whose_layers_forget_tells_only_what_needs_no_attention():
    forgetful = loaded_model("mistral", sliding_window=16)
    engine = Engine(forgetful, NumberEncoder(), "tiny", "print")
    assert not forgetful.keeps_all_keys
    assert engine.generate(request("none")).sources == ()
    assert len(engine.generate(request("context_experts")).sources) == TOKENS


@pytest.mark.parametrize(
    ("n_layers", "expected"),
    [(30, {15, 18, 22, 26}), (32, {16, 20, 24, 28}), (3, {1, 2}), (1, {0}), (8, {4, 5, 6, 7})],
)
def test_four_layers_of_the_upper_half_are_watched(n_layers, expected):
    assert attribution_layers(n_layers) == expected
