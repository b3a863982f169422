import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rag_posfix.generation.decode.answer_writer import TextStream


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


def test_plain_text_comes_token_by_token():
    assert run(b"abc")[:2] == (["a", "b", "c"], "")


def test_a_character_split_over_tokens_comes_whole():
    assert run("é!".encode())[:2] == (["", "é", "!"], "")
    assert run("😀".encode())[:2] == (["", "", "", "😀"], "")


def test_half_a_character_at_the_end_is_shown_as_a_replacement():
    pieces, rest, stream = run("a😀".encode()[:3])
    assert (pieces, rest, stream.text) == (["a", "", ""], "\ufffd", "a\ufffd")


def test_a_stop_string_cuts_the_answer_before_it():
    pieces, rest, stream = run(b"one. two", stop=[". "])
    assert (pieces, rest) == (["o", "n", "e", "", ""], "")
    assert (stream.text, stream.stopped) == ("one", True)


def test_what_may_become_a_stop_string_is_held_back_until_it_cannot():
    assert run(b"a\n\nb", stop=["\n\nQ"])[0] == ["a", "", "", "\n\nb"]


def test_the_longest_beginning_of_a_stop_string_is_held_back():
    # After "aa" both letters may begin "aab"; the third "a" frees the first.
    assert run(b"aaa", stop=["aab"])[:2] == (["", "", "a"], "aa")


def test_held_back_text_comes_at_the_end():
    pieces, rest, stream = run(b"a\n", stop=["\n\n"])
    assert (pieces, rest, stream.text, stream.stopped) == (["a", ""], "\n", "a\n", False)


def test_the_first_of_several_stop_strings_in_the_text_wins():
    stream = TextStream(lambda ids: "x END y STOP z" if ids else "", ["STOP", "END"])
    assert stream.push(1) == "x "
    assert (stream.text, stream.stopped, stream.finish()) == ("x ", True, "")


def test_text_before_a_stop_string_comes_with_it_though_another_one_has_begun():
    # "a" may begin "abX"; "b" ends the answer before anything else could be told.
    pieces, rest, stream = run(b"ab", stop=["b", "abX"])
    assert (pieces, rest, stream.text, stream.stopped) == (["", "a"], "", "a", True)


def test_a_stop_string_over_a_split_character_is_found():
    assert run("aé!b".encode(), stop=["é!"])[2].text == "a"


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


def test_each_token_is_decoded_with_a_few_neighbours_only():
    lengths = []

    def decode(ids):
        lengths.append(len(ids))
        return "x" * len(ids)

    stream = TextStream(decode)
    for token in range(200):
        stream.push(token)
    assert max(lengths) <= 5
    assert stream.text == "x" * 200


tokens = st.lists(st.integers(0, 260) | st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xE2, 0x82, 0xAC]), max_size=40)
bytes_of_text = st.text(max_size=20).map(lambda text: list(text.encode()))


@given(tokens | bytes_of_text)
@example([0xE2, 0x82, 0xAC, 256, 0xE2, 257, 0x82, 258, 0xAC])
@example([0xEF, 0xBF, 0xBD])
@example([0xE2, 0x82, 0x61, 0xE2])
def test_the_pieces_are_the_text_decoded_as_a_whole(data):
    pieces, rest, stream = run(data)
    assert "".join(pieces) + rest == stream.text == decode_bytes(data)


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


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_no_tokens_are_no_text(stop):
    assert run(b"", stop)[:2] == ([], "")
