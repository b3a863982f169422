import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import ConfigError, PromptTooLongError, UnknownNameError, UnsupportedModelError
from rag_posfix.generation.engine import Engine, TextEncoder
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.retrieval.embeddings import SentenceEmbeddings
from tests.support.number_encoder import NumberEncoder
from tests.support.tiny import stock_model, toy_layout

RELEVANCE = (0.9, 0.2, 0.5, 0.4)


def engine_of(loaded, **options):
    return Engine(loaded, NumberEncoder(**options), "tiny", "print")


def request(mitigation="none", layout=None, parameters=None, **sampling):
    layout = layout or toy_layout(relevance=RELEVANCE)
    return GenerationRequest(layout, choice(mitigation, parameters), Sampling(**sampling))


def choice(mitigation, parameters=None):
    """A method, with the parameters of its example where it needs some and is given none."""
    example = MITIGATIONS.get(mitigation).example if mitigation in MITIGATIONS.names() else {}
    return MitigationChoice(mitigation, {**example, **(parameters or {})})


def greedy(loaded, count=8, mitigation="none"):
    """The first greedy tokens, with no end."""
    return engine_of(loaded).generate(request(mitigation, max_tokens=count)).token_ids


def test_it_follows_the_protocol(loaded):
    engine = engine_of(loaded)
    assert isinstance(engine, Generator)
    assert (engine.model_id, engine.fingerprint, engine.context_window) == ("tiny", "print", 512)


def test_the_unmodified_answer_is_that_of_the_stock_model(loaded):
    layout = toy_layout()
    ids = torch.tensor([layout.token_ids])
    expected = stock_model().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    generation = engine_of(loaded).generate(request(layout=layout, max_tokens=12))
    assert generation.token_ids == tuple(expected[0, len(layout.token_ids) :].tolist())


def test_max_tokens_end_an_answer(loaded):
    generation = engine_of(loaded).generate(request(max_tokens=3))
    assert generation.finish_reason == "length"
    assert len(generation.token_ids) == 3
    assert generation.text == "".join(f"{token}," for token in generation.token_ids)
    assert (generation.usage.prompt_tokens, generation.usage.completion_tokens) == (39, 3)
    assert generation.usage.cached_tokens == 0
    assert set(generation.timings) == {"prefill", "decode"}


def test_an_end_token_ends_an_answer_and_is_counted_but_not_shown(loaded):
    tokens = greedy(loaded)
    end = next(i for i, token in enumerate(tokens) if i and token not in tokens[:i])
    generation = engine_of(loaded, eos_ids={tokens[end]}).generate(request(max_tokens=8))
    assert generation.token_ids == tokens[: end + 1]
    assert generation.finish_reason == "stop"
    assert generation.text == "".join(f"{token}," for token in tokens[:end])
    assert generation.usage.completion_tokens == end + 1


def test_a_stop_string_over_two_tokens_ends_an_answer(loaded):
    tokens = greedy(loaded)
    whole = "".join(f"{token}," for token in tokens)
    stop = f",{str(tokens[2])[0]}"
    generation = engine_of(loaded).generate(request(max_tokens=8, stop=(stop,)))
    assert generation.finish_reason == "stop"
    assert generation.text == whole[: whole.index(stop)]
    assert len(generation.token_ids) <= 3


def test_a_stop_string_that_shows_only_at_the_end_is_a_stop(loaded):
    class Halves(NumberEncoder):
        def decode_answer(self, token_ids):
            return "".join("a.\ufffd" for _ in token_ids)

    generation = Engine(loaded, Halves(), "tiny", "print").generate(request(max_tokens=1, stop=(".",)))
    assert (generation.text, generation.finish_reason) == ("a", "stop")


@pytest.mark.parametrize("mitigation", MITIGATIONS.names())
def test_the_stream_is_the_answer_in_pieces(loaded, mitigation):
    engine = engine_of(loaded)
    chunks = list(engine.stream(request(mitigation, max_tokens=6)))
    assert [chunk.generation for chunk in chunks[:-1]] == [None] * 6
    whole = engine.generate(request(mitigation, max_tokens=6))
    assert "".join(chunk.text for chunk in chunks) == chunks[-1].generation.text == whole.text
    assert chunks[-1].generation.token_ids == whole.token_ids


@pytest.mark.parametrize("mitigation", MITIGATIONS.names())
def test_attention_to_the_passages_sums_to_one(loaded, mitigation):
    attention = engine_of(loaded).generate(request(mitigation, max_tokens=1)).attention
    assert len(attention) == 4
    assert sum(attention) == pytest.approx(1, abs=1e-5)
    assert min(attention) >= 0


@pytest.mark.parametrize("mitigation", MITIGATIONS.names())
def test_a_prompt_without_passages_is_answered(loaded, mitigation):
    generation = engine_of(loaded).generate(request(mitigation, layout=toy_layout(()), max_tokens=3))
    assert len(generation.token_ids) == 3
    assert generation.attention == ()


def test_no_step_runs_before_its_text_is_asked_for(loaded, passes):
    stream = engine_of(loaded).stream(request(max_tokens=6))
    assert passes == []
    next(stream)
    assert passes == [39]
    next(stream)
    assert passes == [39, 1]
    stream.close()
    assert passes == [39, 1]


def test_the_last_token_is_not_read(loaded, passes):
    engine_of(loaded).generate(request(max_tokens=3))
    assert passes == [39, 1, 1]


def test_seeded_sampling_repeats_and_differs_from_other_seeds(loaded):
    engine = engine_of(loaded)

    def answer(seed):
        return engine.generate(request(max_tokens=12, temperature=5.0, seed=seed)).token_ids

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "fits"), [((7, 4, 9, 6), 473, True), ((7, 4, 9, 6), 474, False), ((600,), 1, False)]
)
def test_a_prompt_beyond_the_context_window_is_refused_before_any_work(loaded, passes, lengths, max_tokens, fits):
    engine = engine_of(loaded)
    asked = request(layout=toy_layout(lengths), max_tokens=max_tokens)
    if fits:
        assert engine.stream(asked)
    else:
        for entry in (engine.generate, engine.stream):
            with pytest.raises(PromptTooLongError, match=rf"max_tokens={max_tokens} more, but .* window is 512"):
                entry(asked)
    assert passes == []


def test_short_answers_need_room_in_the_context_window_too(loaded, passes):
    # 5 + 480 + 8 tokens leave 19: enough for an answer of 3, too few for short answers of 24.
    asked = request("passage_answers", toy_layout((480,)), max_tokens=3)
    with pytest.raises(PromptTooLongError, match="max_tokens=24 more"):
        engine_of(loaded).generate(asked)
    assert passes == []
    assert engine_of(loaded).stream(request("passage_answers", toy_layout((480,)), {"answer_tokens": 3}, max_tokens=3))


def test_the_chosen_passage_answers_as_if_it_were_the_only_one(loaded):
    layout = toy_layout(relevance=RELEVANCE)
    generation = engine_of(loaded).generate(request("passage_answers", layout, max_tokens=6))
    selected_row = generation.attention.index(1.0)
    alone = engine_of(loaded).generate(request("none", layout.select((selected_row,)), max_tokens=6))
    assert generation.token_ids == alone.token_ids


@pytest.mark.parametrize(
    ("mitigation", "weighted"), [("none", False), ("committee", False), ("context_experts", True)]
)
def test_shares_of_experts_that_read_one_passage_each_are_weights(loaded, mitigation, weighted):
    generation = engine_of(loaded).generate(request(mitigation, toy_layout(relevance=RELEVANCE), max_tokens=2))
    assert generation.weighted is weighted


def test_the_end_tokens_and_the_text_reach_the_short_answers(loaded, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "rag_posfix.generation.decode.answer_writer.write_candidates", lambda *given: seen.append(given[-1]) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        engine_of(loaded, eos_ids={7}).generate(request("passage_answers", max_tokens=2))
    assert seen[0].eos_ids == {7}
    assert seen[0].decode([3, 7]) == "3,"


def test_experts_read_alone_may_be_longer_together_than_the_window(loaded):
    layout = toy_layout((200, 200, 200))
    assert len(layout.token_ids) == 613
    assert len(engine_of(loaded).generate(request("context_experts", layout, max_tokens=2)).token_ids) == 2


def test_bad_requests_raise_when_a_stream_is_opened(loaded, passes):
    engine = engine_of(loaded)
    unscored = toy_layout()
    for error, message, asked in (
        (UnknownNameError, "Did you mean 'context_experts'", request("context_expert")),
        (
            ConfigError,
            "has no parameter 'expert'. Did you mean 'experts'",
            request(parameters={"expert": 1}, mitigation="context_experts"),
        ),
        (ConfigError, "none has no parameter 'x'. It takes: none", request(parameters={"x": 1})),
        (ConfigError, "carry no relevance", request("context_experts", unscored, {"experts": 2})),
    ):
        with pytest.raises(error) as caught:
            engine.stream(asked)
        assert message in str(caught.value)
    assert passes == []


def test_a_model_that_lacks_what_a_method_needs_is_refused_before_any_work(loaded, passes, monkeypatch):
    method = MITIGATIONS.get("context_experts")
    monkeypatch.setattr(method, "requires", frozenset({"a miracle"}))
    with pytest.raises(UnsupportedModelError, match="context_experts needs a miracle"):
        engine_of(loaded).stream(request("context_experts"))
    assert passes == []


def test_describe_checks_a_mitigation_without_running_it(loaded, passes):
    engine = engine_of(loaded)
    info = engine.describe(MitigationChoice("context_experts", {"answer_weight": 0.5}))
    assert (info.name, info.order_invariant) == ("context_experts", True)
    assert info.fingerprint != engine.describe(MitigationChoice("context_experts")).fingerprint
    assert engine.describe(MitigationChoice()).order_invariant is False
    with pytest.raises(ConfigError, match="answer_weight=2 must be a number between 0 and 1"):
        engine.describe(MitigationChoice("context_experts", {"answer_weight": 2}))
    assert passes == []


@pytest.mark.parametrize("mitigation", MITIGATIONS.names())
def test_the_score_of_an_answer_is_the_mean_of_its_steps(loaded, mitigation):
    engine = engine_of(loaded)
    layout = toy_layout(relevance=RELEVANCE)
    answer = [17, 99, 3, 17]
    session = engine.open(layout, choice(mitigation), 4)
    steps = []
    for token in answer:
        steps.append(float(session.next_log_probs()[token]))
        session.advance(token)
    assert engine.score(layout, answer, choice(mitigation)) == pytest.approx(sum(steps) / 4, abs=1e-4)


@pytest.mark.parametrize("mitigation", MITIGATIONS.names())
def test_the_next_token_has_probabilities_that_sum_to_one(loaded, mitigation):
    log_probs = engine_of(loaded).next_log_probs(toy_layout(relevance=RELEVANCE), choice(mitigation))
    assert log_probs.dtype == torch.float32
    assert float(log_probs.exp().sum()) == pytest.approx(1, abs=1e-4)


def test_a_cue_ends_an_answer_and_is_no_stop_string(loaded):
    tokens = greedy(loaded)
    whole = "".join(f"{token}," for token in tokens)
    cue = f",{str(tokens[2])[0]}"
    generation = engine_of(loaded).generate(replace(request(max_tokens=8), cues=(cue,)))
    assert (generation.finish_reason, generation.stop_string) == ("stop", None)
    assert generation.text == whole[: whole.index(cue)]


# Many texts are embedded in batches on several cores, and their vectors are those of the model.


class LengthEncoder(torch.nn.Module):
    """A sentence encoder whose vector is the length of the text; notes how it is run."""

    device = torch.device("cpu")

    def __init__(self, meeting):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.meeting = meeting

    def __deepcopy__(self, memo):
        other = LengthEncoder(self.meeting)
        other.weight = memo[id(self.weight)]
        return other

    def encode_document(self, texts, **_):
        self.meeting.note((threading.get_ident(), id(self), self.weight.data_ptr(), torch.get_num_threads()))
        return np.array([[len(text)] for text in texts], dtype="float64")


class Meeting:
    """Two threads meet once, so that neither can do all the work."""

    def __init__(self):
        self.barrier = threading.Barrier(2)
        self.notes = []

    def note(self, what):
        self.notes.append(what)
        if len(self.notes) <= 2:
            self.barrier.wait(60)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_every_core_has_a_model_of_its_own_with_shared_weights_and_one_thread(two_threads):
    meeting = Meeting()
    vectors = TextEncoder(LengthEncoder(meeting), batch_size=3)(["a" * number for number in range(10)])
    assert vectors.dtype == np.float32
    assert vectors[:, 0].tolist() == list(range(10)), "in the order of the texts"
    threads, models, weights, threads_inside = map(set, zip(*meeting.notes, strict=True))
    assert (len(meeting.notes), len(threads), len(models), len(weights), threads_inside) == (4, 2, 2, 1, {1})
    assert torch.get_num_threads() == 2, "as before"


@pytest.mark.weights
@pytest.mark.slow
def test_vectors_of_many_texts_are_those_of_the_model(two_threads):
    texts = [f"The lighthouse number {number} was built in {1800 + number}." for number in range(20)]
    many = SentenceEmbeddings(batch_size=4, encoder=TextEncoder)
    plain = SentenceEmbeddings(batch_size=4)
    found, expected = torch.tensor(many.embed_documents(texts)), torch.tensor(plain.embed_documents(texts))
    assert float((found * expected).sum(1).min()) > 0.9995
    assert many.embed_documents(texts[:4]) == plain.embed_documents(texts[:4]), "one batch is the model's own"
