import gc
import time

import pytest

from rag_posfix.assembly.templates import PromptTemplate, merge_messages
from rag_posfix.assembly.tokenization import tokenize_passage, tokenize_prompt
from rag_posfix.errors import ConfigError
from tests.support.toy_encoder import ToyEncoder


class Losing(ToyEncoder):
    """Leaves system messages out."""

    def render_chat(self, messages, *, open_answer=True):
        return super().render_chat([m for m in messages if m["role"] != "system"], open_answer=open_answer)


class Repeating(ToyEncoder):
    """Writes the whole chat twice."""

    def render_chat(self, messages, *, open_answer=True):
        return super().render_chat([*messages, *messages], open_answer=open_answer)


class SystemLast(ToyEncoder):
    """Writes the system message into the last turn, as some Mistral templates do, and trims contents."""

    def render_chat(self, messages, *, open_answer=True):
        system = [m["content"].strip() + "|" for m in messages if m["role"] == "system"]
        others = [m["content"].strip() for m in messages if m["role"] != "system"]
        return "<|im_start|>" + "/".join([*others[:-1], "".join(system) + others[-1]]) + "<|im_end|>"


def layout_of(encoder, question, passages=(), *, template=None, history=()):
    prompt = tokenize_prompt(
        encoder, template or PromptTemplate(), question, history=history, has_passages=bool(passages)
    )
    return prompt.with_passages(passages)


def test_the_spans_of_the_layout_are_those_of_the_parts():
    encoder = ToyEncoder()
    passages = [tokenize_passage(encoder, PromptTemplate(), "Ann.", title="T", relevance=2.0)]
    layout = layout_of(encoder, "Who?", passages)
    start = layout.passages[0].start
    assert encoder.decode(layout.token_ids[:start]).endswith("Give a short answer.\n\n")
    assert (layout.texts[0].start, layout.texts[0].stop) == (start + 2, start + 6)
    assert layout.passages[0].stop == layout.texts[0].stop + 2
    assert layout.relevance == (1.0,)


def test_a_template_moves_messages_and_trims_their_contents():
    layout = layout_of(
        SystemLast(),
        " Who? ",
        history=[
            {"role": "system", "content": "S"},
            {"role": "user", "content": " A"},
            {"role": "assistant", "content": "B "},
        ],
    )
    assert ToyEncoder().decode(layout.token_ids) == "<|im_start|>A/B/S|Who?<|im_end|>"
    assert ToyEncoder().decode(layout.tokens(layout.question)) == "Who?"


def test_a_template_that_trims_contents_trims_the_ends_of_the_whole_turn_alone():
    template = PromptTemplate(instruction=" \nRead. ", separator=" | ", question_prefix=" Q: ", answer_cue=" A: ")
    passages = [tokenize_passage(ToyEncoder(), template, " Ann ")]
    layout = layout_of(SystemLast(), " Who? ", passages, template=template)
    assert ToyEncoder().decode(layout.token_ids) == "<|im_start|>Read. \n\n Ann  |  Q:  Who?  A:<|im_end|>"
    history = [{"role": "user", "content": " A "}]
    assert ToyEncoder().decode(layout_of(SystemLast(), "Who? ", history=history).token_ids) == (
        "<|im_start|>A \n\nWho?<|im_end|>"
    )


def test_a_system_message_that_the_template_loses_is_an_error():
    with pytest.raises(ConfigError, match=r"wrote message 0 \(system\) 0 times, must be once") as error:
        layout_of(Losing(), "Who?", history=[{"role": "system", "content": "S"}])
    assert "\n" not in str(error.value)


def test_a_message_that_the_template_repeats_is_an_error():
    with pytest.raises(ConfigError, match=r"wrote message 0 \(user\) 2 times"):
        layout_of(Repeating(), "Who?")


def test_an_empty_passage_and_empty_pieces_are_allowed():
    encoder = ToyEncoder()
    template = PromptTemplate(instruction="", separator="", question_prefix="", answer_cue="")
    layout = layout_of(encoder, "Who?", [tokenize_passage(encoder, template, "")], template=template)
    assert len(layout.passages[0]) == len(layout.texts[0]) == 0
    assert encoder.decode(layout.token_ids) == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"


def test_equal_content_gives_equal_segments_and_keys_wherever_it_stands():
    encoder = ToyEncoder()
    one, two = (tokenize_passage(encoder, PromptTemplate(), text) for text in ("Ann.", "Bob."))
    first, second = (layout_of(encoder, "Who?", passages) for passages in ([one, two], [two, one]))
    assert first.keys == second.keys[::-1]
    assert [first.tokens(s) for s in first.passages] == [second.tokens(s) for s in second.passages][::-1]
    assert first.tokens(first.prefix) == second.tokens(second.prefix)
    assert first.tokens(first.suffix) == second.tokens(second.suffix)


def test_the_cost_of_messages_in_a_row_grows_with_their_length():
    messages = [{"role": "user", "content": "x"}] * 400_000
    started = time.process_time()
    (merged,) = merge_messages(messages)
    assert len(merged["content"]) == 3 * len(messages) - 2
    assert time.process_time() - started < 5  # 42 s with texts that are joined one by one


@pytest.mark.slow
def test_the_cost_of_a_conversation_grows_with_its_length_and_not_with_its_square():
    def seconds(pairs: int) -> float:
        turns = [{"role": role, "content": "x"} for role in ("user", "assistant")] * pairs
        gc.disable()  # its cost grows with everything that the tests before have left in memory
        try:
            started = time.thread_time()
            prompt = tokenize_prompt(ToyEncoder(), PromptTemplate(), "Why?", history=turns)
            ended = time.thread_time()
        finally:
            gc.enable()
        assert len(prompt) > len(turns)
        return ended - started

    times = [(seconds(1_000), seconds(4_000)) for _ in range(3)]  # other programs may slow one of them down
    assert min(long for _, long in times) < 8 * min(short for short, _ in times)  # 4 if linear, 16 with a square
