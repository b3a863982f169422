from __future__ import annotations

import math
import time
from collections import Counter

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rag_posfix.contracts.request import (
    MIN_LOGPROB,
    Chunk,
    GenerationRequest,
    MitigationChoice,
    Sampling,
    ScoredToken,
    TokenScore,
)
from rag_posfix.errors import ConfigError, GenerationError, PromptTooLongError
from rag_posfix.generation.batching.scheduler import BatchingGenerator
from rag_posfix.generation.decode.answer_writer import (
    FirstSentence,
    Sampler,
    StopMatcher,
    TextStream,
    choose_together,
    score_tokens,
)
from rag_posfix.generation.engine import Engine
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.plan.layout import Layout
from tests.support.number_encoder import NumberEncoder
from tests.support.tiny import VOCABULARY, loaded_model, stock_model, toy_layout
from tests.support.vocabularies import VOCABULARIES, base
from tests.unit.generation.together import generate_together

HALF_AND_LESS = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()


def drawn(sampling, log_probs=HALF_AND_LESS, count=400):
    sampler = Sampler(sampling)
    return [sampler.choose(log_probs) for _ in range(count)]


def test_greedy_takes_the_first_of_equals():
    tie = torch.tensor([0.1, 0.3, 0.3, 0.3]).log()
    assert {Sampler(Sampling()).choose(tie) for _ in range(20)} == {1}


def test_the_same_seed_draws_the_same_tokens():
    sampling = Sampling(temperature=1.0, seed=7)
    assert drawn(sampling) == drawn(sampling)
    assert drawn(sampling) != drawn(Sampling(temperature=1.0, seed=8))


def test_without_a_seed_every_sampler_draws_differently():
    assert drawn(Sampling(temperature=1.0)) != drawn(Sampling(temperature=1.0))


def test_draws_follow_the_probabilities():
    counts = Counter(drawn(Sampling(temperature=1.0, seed=1), count=4000))
    # 4000 draws: expected 400, 2000, 600, 1000; four standard deviations of the largest are 127.
    assert all(abs(counts[token] - expected) < 127 for token, expected in enumerate((400, 2000, 600, 1000)))


def test_temperature_sharpens_by_dividing_the_log_probabilities():
    # At temperature 0.5 probabilities are squared: 0.01, 0.25, 0.0225, 0.0625, so the second takes 0.25/0.345 = 0.725.
    counts = Counter(drawn(Sampling(temperature=0.5, seed=1), count=4000))
    assert counts[1] / 4000 == pytest.approx(0.725, abs=0.03)


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, {1}), (2, {1, 3}), (3, {1, 2, 3}), (4, {0, 1, 2, 3}), (9, {0, 1, 2, 3}), (0, {0, 1, 2, 3})]
)
def test_top_k_keeps_that_many_tokens(top_k, kept):
    assert set(drawn(Sampling(temperature=1.0, top_k=top_k, seed=1))) == kept


def test_top_k_keeps_the_first_of_equals_and_no_more_than_k():
    tie = torch.tensor([0.1, 0.3, 0.3, 0.3]).log()
    assert set(drawn(Sampling(temperature=1.0, top_k=2, seed=1), tie)) == {1, 2}


# Sorted 0.5, 0.25, 0.15, 0.1; before them stand 0, 0.5, 0.75, 0.9.
@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, {1}), (0.49, {1}), (0.51, {1, 3}), (0.76, {1, 2, 3}), (0.91, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    assert set(drawn(Sampling(temperature=1.0, top_p=top_p, seed=1))) == kept


# Four equal scores are 1/4 each, exactly: before the tokens stand 0, 1/4, 1/2, 3/4. What is reached exactly is enough.
@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.25, {0}),
        (math.nextafter(0.25, 1), {0, 1}),
        (0.75, {0, 1, 2}),
        (math.nextafter(0.75, 1), {0, 1, 2, 3}),
        (1.0, {0, 1, 2, 3}),
    ],
)
def test_top_p_that_is_reached_exactly_needs_no_further_token(top_p, kept):
    assert set(drawn(Sampling(temperature=1.0, top_p=top_p, seed=1), torch.zeros(4))) == kept


def test_top_p_close_to_1_still_leaves_out_what_is_beyond_it():
    # 16 equal tokens: 15 of them reach 15/16 = .9375.
    assert set(drawn(Sampling(temperature=1.0, top_p=15 / 16, seed=1), torch.zeros(16))) == set(range(15))


def test_top_p_counts_what_top_k_left():
    # Of 0.5 and 0.25 the first holds two thirds.
    assert set(drawn(Sampling(temperature=1.0, top_k=2, top_p=0.6, seed=1))) == {1}
    assert set(drawn(Sampling(temperature=1.0, top_k=2, top_p=0.7, seed=1))) == {1, 3}


def test_an_impossible_token_is_never_drawn():
    scores = torch.tensor([-math.inf, 0.0, -math.inf])
    assert set(drawn(Sampling(temperature=5.0, seed=1), scores)) == {1}


@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 5e-324])
def test_a_temperature_close_to_zero_is_almost_greedy(temperature):
    assert set(drawn(Sampling(temperature=temperature, seed=1), count=50)) == {1}


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**64 - 1])
def test_every_allowed_seed_seeds(seed):
    sampling = Sampling(temperature=1.0, seed=seed)
    assert drawn(sampling, count=20) == drawn(sampling, count=20)


def test_no_global_random_state_is_touched():
    before = torch.random.get_rng_state()
    drawn(Sampling(temperature=1.0, seed=1))
    drawn(Sampling(temperature=1.0))
    assert torch.equal(before, torch.random.get_rng_state())


def decode_bytes(ids):
    """Each token is one byte; 256 and above are control tokens without text."""
    return bytes(token for token in ids if token < 256).decode("utf-8", "replace")


def run(data, stop=()):
    """Return what each push gave, what the end gave, and the stream."""
    stream = TextStream(decode_bytes, stop)
    pieces = []
    for token in data:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return pieces, stream.finish(), stream


@pytest.mark.parametrize(
    ("text", "stop", "pieces", "end", "stopped"),
    [
        ("abc", [], ["a", "b", "c"], "", False),
        ("😀", [], ["", "", "", "😀"], "", False),  # a character that is split over tokens comes whole
        (b"a\xf0\x9f", [], ["a", "", ""], "", False),  # half of one is left out
        ("one. two", [". "], ["o", "n", "e", "", ""], "", True),
        ("a\n\nb", ["\n\nQ"], ["a", "", "", "\n\nb"], "", False),  # held back until it cannot become a stop string
        ("aaa", ["aab"], ["", "", "a"], "aa", False),  # both letters may begin "aab"; the third frees the first
        ("a\n", ["\n\n"], ["a", ""], "\n", False),  # held back to the end
        ("ab", ["b", "abX"], ["", "a"], "", True),  # "a" may begin "abX"; "b" ends the answer before that is known
    ],
)
def test_text_comes_as_soon_as_no_character_and_no_stop_string_can_change_it(text, stop, pieces, end, stopped):
    found, rest, stream = run(text.encode() if isinstance(text, str) else text, stop)
    assert (found, rest, stream.stopped) == (pieces, end, stopped)
    assert stream.text == "".join(pieces) + end


def test_the_first_of_several_stop_strings_in_the_text_wins():
    stream = TextStream(lambda ids: "x END y STOP z" if ids else "", ["STOP", "END"])
    assert stream.push(1) == "x "
    assert (stream.text, stream.stopped, stream.finish()) == ("x ", True, "")


def test_a_stop_string_in_text_that_waits_for_the_rest_of_a_character_is_found_at_the_end():
    names = {0: b"a", 1: b"b.\xf0\x9f"}
    stream = TextStream(lambda ids: b"".join(names[i] for i in ids).decode("utf-8", "replace"), ["."])
    assert [stream.push(0), stream.push(1)] == ["a", ""]
    assert stream.stopped is False
    assert stream.finish() == "b"
    assert (stream.text, stream.stopped) == ("ab", True)


def test_a_decoder_that_drops_the_space_before_the_first_word_keeps_the_spaces_between_words():
    words = [" the", " cat", " sat", " on", " the", " mat", "s", "."]
    stream = TextStream(lambda ids: "".join(words[i] for i in ids).removeprefix(" "))
    assert [stream.push(i) for i in range(8)] == ["the", " cat", " sat", " on", " the", " mat", "s", "."]


# Of four tokens a character, a character and the four before it.
@pytest.mark.parametrize(("text", "most"), [("x" * 200, 5), ("😀" * 50, 20)])
def test_each_token_is_decoded_with_a_few_neighbours_only(text, most):
    lengths = []

    def decode(ids):
        lengths.append(len(ids))
        return decode_bytes(ids)

    stream = TextStream(decode)
    for token in text.encode():
        stream.push(token)
    assert max(lengths) <= most
    assert stream.text == text


tokens = st.lists(st.integers(0, 260) | st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xE2, 0x82, 0xAC]), max_size=40)
bytes_of_text = st.text(max_size=20).map(lambda text: list(text.encode()))


@given(tokens | bytes_of_text)
@example([0xE2, 0x82, 0xAC, 256, 0xE2, 257, 0x82, 258, 0xAC])
@example([0xEF, 0xBF, 0xBD])
@example([0xE2, 0x82, 0x61, 0xE2])
def test_the_pieces_are_the_text_decoded_as_a_whole(data):
    pieces, rest, stream = run(data)
    assert "".join(pieces) + rest == stream.text == decode_bytes(data).rstrip("\ufffd")


def write(vocabulary, text, stop=()):
    """Return the pieces of a text that is written with a vocabulary, and the text that its tokens decode to."""
    tokenizer = base(vocabulary)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    stream = TextStream(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True), stop)
    pieces = [stream.push(token) for token in ids if not stream.stopped]
    return [*pieces, stream.finish()], tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@given(st.text("aé日本語😀한글தமி€x .\n", max_size=25))
@example("한국어 입니다")
@example("답: 日本語 ok")
@example("x €€€ y")
def test_the_pieces_are_the_text_in_every_kind_of_vocabulary(vocabulary, text):
    pieces, decoded = write(vocabulary, text)
    assert "".join(pieces) == decoded


def test_each_of_several_characters_of_byte_tokens_comes_when_it_is_complete():
    pieces, decoded = write("metaspace-never", "한국어입니다.")
    assert decoded == "한국어입니다."
    assert [piece for piece in pieces if piece] == [*decoded]


def test_a_stop_string_of_byte_tokens_is_found():
    assert "".join(write("metaspace-never", "한국어입니다. 그리고", ["입니다"])[0]) == "한국어"


@given(st.text("ab.é", max_size=30), st.lists(st.text("ab.é", min_size=1, max_size=4), min_size=1, max_size=3))
def test_with_stop_strings_the_pieces_are_what_stands_before_the_first_that_completes(text, stops):
    expected, found = text, False
    for end in range(len(text) + 1):
        places = [at for stop in stops if (at := text[:end].find(stop)) >= 0]
        if places:
            expected, found = text[: min(places)], True
            break
    pieces, rest, stream = run(text.encode(), stops)
    assert "".join(pieces) + rest == stream.text == expected
    assert stream.stopped is found


@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.lists(st.text("abc", max_size=4), max_size=12))
def test_it_finds_what_a_search_of_the_whole_text_finds(stops: list[str], pieces: list[str]):
    matcher, text = StopMatcher(stops), ""
    for piece in pieces:
        text += piece
        found = matcher.push(piece)
        expected = min((at for at in map(text.find, stops) if at >= 0), default=None)
        assert found == expected
        if found is not None:
            return
        ends = [size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])]
        assert matcher.undecided == max(ends, default=0)


@pytest.mark.parametrize(
    ("stop", "text", "start"),
    [("aab", "aaab", 1), ("abac", "ababac", 2), ("aabaaa", "aabaabaaa", 3), ("aaa", "aabaa", None), ("ab", "ab", 0)],
)
def test_a_failed_match_goes_on_from_its_longest_border(stop, text, start):
    assert StopMatcher([stop]).push(text) == start
    letters = StopMatcher([stop])
    found = [letters.push(letter) for letter in text]
    assert found == [None] * (len(text) - 1) + [start]


def test_long_stop_strings_cost_no_more_than_the_text():
    """Each token was compared with every beginning of every stop string."""
    stops = ["b" + "a" * size for size in range(4000, 4004)]
    stream = TextStream(lambda ids: "a" * len(ids), stops)
    started = time.process_time()
    for _ in range(5000):
        stream.push(0)
    assert stream.text == "a" * 5000
    assert time.process_time() - started < 2


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_not_finite_are_an_error_that_names_the_dtype(temperature, value):
    sampler, broken = Sampler(Sampling(temperature=temperature, seed=1)), torch.full((4,), value)
    with pytest.raises(GenerationError, match=r"not finite .*RAG_POSFIX_DTYPE"):
        sampler.choose(broken)
    with pytest.raises(GenerationError, match="not finite"):
        choose_together([sampler, Sampler(Sampling())], [broken, torch.tensor([-0.1, -3.0, -5.0, -6.0])])


def test_samplers_together_choose_the_likeliest_tokens_of_large_vocabularies():
    scores = torch.full((300_001,), -20.0)
    scores[299_999] = -0.1
    assert choose_together([Sampler(Sampling())] * 2, [scores, scores]) == [299_999, 299_999]


# The end of an answer's first sentence, token by token.


@pytest.mark.parametrize(
    ("tokens", "over"),
    [
        (["Rome"], False),
        (["Rome", "."], False),  # "Rome.org" is one word
        (["Rome", ".", " It"], True),
        (["It cost 3", ".", "5", " m"], False),
        (["\n", "\n", "Rome"], False),
        (["Rome", "\n"], True),
        (["\u516d\u4e2a\u6708", "\u3002"], True),
        (["Rome", ".", " It", *[" is"] * 20], True),
    ],
)
def test_the_first_sentence_ends_with_a_stop_and_a_space_or_with_a_line(tokens, over):
    state = FirstSentence(lambda ids: "".join(tokens[i] for i in ids))
    for token in range(len(tokens)):
        state = state.add(token)
    assert state.has_ended == over


def test_without_text_no_sentence_ends():
    assert not FirstSentence().add(1).add(2).has_ended


# Scores of allowed tokens alone: those of the combined distribution, pooled rows included.


@pytest.fixture(scope="module")
def tiny():
    return Engine(loaded_model(), NumberEncoder(eos_ids={2}), "tiny", "print")


@pytest.mark.parametrize("method", ["none", "context_experts", "committee"])
def test_allowed_tokens_keep_the_combined_score_and_all_others_have_none(tiny, method):
    session = tiny.open(toy_layout(), MitigationChoice(method))
    free = session.next_log_probs()
    allowed = torch.zeros(VOCABULARY - 5, dtype=torch.bool)  # shorter than the scores, as masks of tokenizers may be
    allowed[[7, 50, 99]] = True
    masked = session.next_log_probs(allowed)
    assert masked.isfinite().nonzero().flatten().tolist() == [7, 50, 99]
    torch.testing.assert_close(masked[[7, 50, 99]], free[[7, 50, 99]], rtol=0, atol=0)


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
