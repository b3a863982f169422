import math

import pytest
import torch

from rag_posfix.contracts.request import (
    MIN_LOGPROB,
    Chunk,
    GenerationRequest,
    MitigationChoice,
    Sampling,
    ScoredToken,
    TokenScore,
)
from rag_posfix.errors import ConfigError, PromptTooLongError
from rag_posfix.generation.batching.scheduler import BatchingGenerator
from rag_posfix.generation.decode.answer_writer import score_tokens
from rag_posfix.generation.engine import Engine
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.plan.layout import Layout
from tests.support.number_encoder import NumberEncoder
from tests.support.tiny import loaded_model, stock_model, toy_layout
from tests.unit.generation.together import generate_together

PROMPT = tuple(range(20, 37))


@pytest.fixture(scope="module")
def engine():
    return Engine(loaded_model(), NumberEncoder(), "tiny", "print")


@pytest.fixture
def loaded_engine_of(engine):
    return lambda **options: Engine(engine.loaded, NumberEncoder(**options), "tiny", "print")


def plain(max_tokens=3, top_logprobs=2, **fields):
    """A request to continue ``PROMPT`` with log-probabilities."""
    sampling = Sampling(max_tokens=max_tokens, top_logprobs=top_logprobs)
    return GenerationRequest(Layout.plain(PROMPT), MitigationChoice("none"), sampling, **fields)


def letters(token):
    return "abcd"[token].encode()


def test_scores_are_normalised_and_the_likeliest_come_first():
    # 0.5, 0.1, 0.2, 0.2 of a total of 1, but given twice as large: the sum is 2.
    scores = torch.tensor([[1.0, 0.2, 0.4, 0.4]]).log()
    (one,) = score_tokens(scores, [1], [7], 2, letters)
    assert (one.token.data, one.start) == (b"b", 7)
    assert one.token.log_prob == pytest.approx(math.log(0.1))
    assert one.top[0].data == b"a"
    assert [other.log_prob for other in one.top] == pytest.approx([math.log(0.5), math.log(0.2)])


def test_impossible_tokens_have_the_least_log_probability_and_no_more_than_all_tokens_are_listed():
    scores = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).log()
    (one,) = score_tokens(scores, [1], [0], 20, letters)
    assert one.token.log_prob == MIN_LOGPROB
    assert len(one.top) == 4


def test_a_token_of_half_a_character_has_no_text():
    assert TokenScore("é".encode()[:1], -1.0).text is None
    assert TokenScore("é".encode(), -1.0).text == "é"


@pytest.mark.parametrize("count", [-1, 21])
def test_the_number_of_alternatives_is_bounded(count):
    with pytest.raises(ConfigError, match=f"top_logprobs={count} must be between 0 and 20"):
        Sampling(top_logprobs=count)


@pytest.mark.parametrize("together", [False, True])
def test_the_prompt_and_the_answer_have_the_log_probabilities_of_a_plain_forward(engine, together):
    request = plain(prompt_scored=True)
    generator = BatchingGenerator(engine) if together else engine
    generation = generator.generate(request)
    ids = torch.tensor([[*PROMPT, *generation.token_ids]])
    with torch.no_grad():
        expected = stock_model()(ids).logits[0].log_softmax(-1)
    first, *others = (*generation.prompt_log_probs, *generation.log_probs)
    assert first == ScoredToken(TokenScore(b"20,", None), 0)
    found = [one.token.log_prob for one in others]
    assert found == pytest.approx(expected[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist(), abs=1e-4)
    best = expected[:-1].topk(2)
    assert [[int(t.data[:-1]) for t in one.top] for one in others] == best.indices.tolist()
    assert [[t.log_prob for t in one.top] for one in others] == [
        pytest.approx(v, abs=1e-4) for v in best.values.tolist()
    ]
    # Each token takes three characters: "20,". Those of the answer count from the answer's beginning.
    assert [one.start for one in generation.prompt_log_probs] == [3 * i for i in range(len(PROMPT))]
    assert generation.log_probs[0].start == 0
    if together:
        generator.close()


def test_a_prompt_that_is_read_for_scores_in_parts_has_the_same_ones(engine, monkeypatch):
    whole = engine.generate(plain(prompt_scored=True))
    monkeypatch.setattr("rag_posfix.generation.decode.answer_writer.MAX_SCORE_ELEMENTS", 131 * 5)
    parts = engine.generate(plain(prompt_scored=True))
    assert parts.token_ids == whole.token_ids
    for one, other in zip(parts.prompt_log_probs[1:], whole.prompt_log_probs[1:], strict=True):
        assert one.token.log_prob == pytest.approx(other.token.log_prob, abs=1e-4)


def test_scored_prompts_have_no_passages_and_fit_the_window(engine):
    with pytest.raises(ConfigError, match="has 4; leave them out"):
        engine.generate(GenerationRequest(toy_layout(), MitigationChoice("none"), prompt_scored=True))
    with pytest.raises(PromptTooLongError):
        engine.generate(plain(max_tokens=500, prompt_scored=True))


def test_a_combined_answer_has_the_log_probabilities_of_the_combined_distribution(engine):
    layout = toy_layout(relevance=(0.9, 0.2, 0.5, 0.4))
    choice = MitigationChoice("context_experts", dict(MITIGATIONS.get("context_experts").example))
    generation = engine.generate(GenerationRequest(layout, choice, Sampling(max_tokens=2, top_logprobs=20)))
    expected = engine.next_log_probs(layout, choice).log_softmax(-1)
    token = generation.token_ids[0]
    assert generation.log_probs[0].token.log_prob == pytest.approx(float(expected[token]), abs=1e-5)
    assert [t.log_prob for t in generation.log_probs[0].top] == pytest.approx(
        expected.topk(20).values.tolist(), abs=1e-5
    )


def test_answers_without_the_request_have_none(engine):
    generation = engine.generate(plain(top_logprobs=None))
    assert (generation.log_probs, generation.prompt_log_probs) == ((), ())


def test_a_stream_brings_each_token_once_with_its_piece(engine):
    request = plain(max_tokens=6, top_logprobs=0)
    chunks: list[Chunk] = list(engine.stream(request))
    whole = chunks[-1].generation
    assert whole is not None
    assert [one for chunk in chunks for one in chunk.log_probs] == list(whole.log_probs)
    assert all(one.top == () for one in whole.log_probs)
    written = 0
    for chunk in chunks[:-1]:
        assert all(written <= one.start < written + len(chunk.text) for one in chunk.log_probs)
        written += len(chunk.text)


@pytest.mark.parametrize("held_back", ["{1},x", ",{1},x", "{1},{2},x"])
def test_a_token_is_sent_with_the_piece_in_which_its_text_begins_and_neither_before_nor_later(engine, held_back):
    ids = engine.generate(plain(max_tokens=4)).token_ids
    stop = held_back.replace("{1}", str(ids[1])).replace("{2}", str(ids[2]))  # never found
    sampling = Sampling(max_tokens=4, stop=(stop,), top_logprobs=0)
    chunks = list(engine.stream(GenerationRequest(Layout.plain(PROMPT), MitigationChoice("none"), sampling)))
    starts, sent, written = [one.start for one in chunks[-1].generation.log_probs], 0, 0
    for chunk in chunks:
        sent, written = sent + len(chunk.log_probs), written + len(chunk.text)
        assert sent == sum(start < written for start in starts)
    assert "".join(chunk.text for chunk in chunks) == "".join(f"{token}," for token in ids)


def test_tokens_of_a_stop_string_and_of_the_end_start_where_the_text_ends_or_later(loaded_engine_of):
    ids = loaded_engine_of().generate(plain(max_tokens=4)).token_ids
    cut = len(f"{ids[0]},")
    stop = GenerationRequest(
        Layout.plain(PROMPT),
        MitigationChoice("none"),
        Sampling(max_tokens=4, stop=(f"{ids[1]},{ids[2]},",), top_logprobs=0),
        attribution=True,
    )
    *_, last = loaded_engine_of().stream(stop)
    generation = last.generation
    assert (generation.text, generation.finish_reason) == (f"{ids[0]},", "stop")
    assert [one.start for one in generation.log_probs] == [0, cut, cut + len(f"{ids[1]},")]
    *_, last = loaded_engine_of(eos_ids=[ids[1]]).stream(plain(max_tokens=4, top_logprobs=0))
    assert (last.generation.text, last.generation.finish_reason) == (f"{ids[0]},", "stop")
    assert [one.start for one in last.generation.log_probs] == [0, cut]
    assert [one.token.data for one in last.log_probs] == [f"{ids[1]},".encode()], "with the end, not before"


def test_answers_that_are_decoded_together_have_their_own(engine):
    requests = [plain(), plain(max_tokens=5, top_logprobs=1), plain(top_logprobs=None)]
    alone = [engine.generate(one) for one in requests]
    for one, other in zip(generate_together(engine, requests), alone, strict=True):
        assert len(one.log_probs) == len(other.log_probs)
        for left, right in zip(one.log_probs, other.log_probs, strict=True):
            assert left.token.data == right.token.data
            assert left.token.log_prob == pytest.approx(right.token.log_prob, abs=1e-4)
