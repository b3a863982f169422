from __future__ import annotations

import gc
import time
from itertools import permutations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from langchain_core.documents import Document

from rag_posfix.assembly import Assembler, PromptTemplate, tokenize_passage, tokenize_prompt
from rag_posfix.assembly.templates import merge_messages
from rag_posfix.assembly.tokenization import (
    FEWEST_TOKENS,
    PassageBudget,
    Selection,
    cut_passage,
    label_passage,
    select_passages,
    truncate,
    truncate_at_sentence,
)
from rag_posfix.errors import ConfigError, PromptTooLongError
from rag_posfix.generation.model.tokenizer import Tokenizer
from rag_posfix.generation.remote.generator import PieceEncoder, messages_of
from tests.support.stock_prompts import check_prompts, squeezed, stock_ids, turn_of
from tests.support.texts import texts
from tests.support.toy_encoder import ToyEncoder
from tests.support.vocabularies import CONTROLS, VOCABULARIES, base, stock_tokenizer


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


# Passages are before everything that changes between turns and users.


SYSTEM = [{"role": "system", "content": "You help Bo."}]
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
CONVERSATIONS = ((), SYSTEM, TURNS, [*SYSTEM, *TURNS], [TURNS[1]], [*TURNS, *TURNS, TURNS[0]])

SYSTEM_IN_THE_LAST_TURN = {"mistral-v3", "mistral-tekken"}
"""Templates that write a system message of the prompt template behind the passages from the second turn on."""


def prefixes(encoder, template):
    return {tokenize_prompt(encoder, template, "Who?", history=history).prefix for history in CONVERSATIONS}


def test_the_tokens_before_the_passages_are_the_same_in_every_turn_and_for_every_user():
    cannot = set()
    for name in CONTROLS:
        encoder = Tokenizer(stock_tokenizer("llama-3", name))
        assert len(prefixes(encoder, PromptTemplate())) == 1, name
        if len(prefixes(encoder, PromptTemplate(system="Be kind."))) > 1:
            cannot.add(name)
    assert cannot == SYSTEM_IN_THE_LAST_TURN


def test_the_tokens_before_the_passages_change_with_the_instructions_and_with_history_first():
    encoder = ToyEncoder()
    assert len(prefixes(encoder, PromptTemplate(instruction="Read."))) == 1
    assert prefixes(encoder, PromptTemplate(instruction="Read.")) != prefixes(encoder, PromptTemplate())
    assert len(prefixes(encoder, PromptTemplate(history_first=True))) == len(CONVERSATIONS)


def test_a_server_gets_the_messages_with_the_passages_in_the_first():
    encoder, template = PieceEncoder(), PromptTemplate(instruction="Read.", system="Rules.")
    prompt = tokenize_prompt(encoder, template, "Who?", history=[*SYSTEM, *TURNS])
    layout = prompt.with_passages([tokenize_passage(encoder, template, text) for text in ("Ann.", "Bob.")])
    expected = [
        {"role": "system", "content": "Rules."},
        {"role": "user", "content": "Read.\n\nAnn.\n\nBob.\n\nYou help Bo.\n\nQuestion: Hi\nAnswer:"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Question: Who?\nAnswer:"},
    ]
    assert messages_of(layout, encoder) == expected
    second = expected[1] | {"content": expected[1]["content"].replace("Ann.\n\n", "")}
    assert messages_of(layout.select((1,)), encoder) == [expected[0], second, *expected[2:]]
    none = expected[1] | {"content": second["content"].replace("Bob.\n\n", "")}
    assert messages_of(layout.select(()), encoder) == [expected[0], none, *expected[2:]]
    assert encoder.decode(layout.select((1,)).tokens(layout.select((1,)).question)) == "Who?"


def test_the_fingerprint_of_a_template_is_as_before_unless_history_is_first():
    assert PromptTemplate().fingerprint() == "f5cde3e7ec81e163a6abb47c863c8d8b"
    assert PromptTemplate(history_first=True).fingerprint() != PromptTemplate().fingerprint()


# Prompts have the token ids of the stock model: every chat template with every kind of vocabulary.


TEMPLATE = PromptTemplate()
DOCUMENTS = [Document(text) for text in ("Ann built it.", "(It opened in 1901", "“Été”\n12", "No: it\n\nwas Bob.")]
# What decoding gives back to the letter; the others drop the space that a text or a turn begins with.
LOSSLESS = ("gpt-2", "llama-3", "metaspace-never", "gemma")

SPACE, TAB, LINE, DIGIT, WORD = " Ann.", "\tAnn ", "\nAnn.", "12 of them.", "Ann built it."
LISTED = {
    # GPT-2's words: a blank line before a word is two tokens, before white space or, where digits stand alone, a digit
    # it is one. The blank line after a passage is encoded as before a word, whatever follows.
    *(("gpt-2", text) for text in (SPACE, TAB, LINE, DIGIT)),
    *(("byte-level-space-first", text) for text in (SPACE, TAB, LINE)),
    # Nothing splits words: its token ".\n\nQuestion" reaches from the last passage into the question.
    *(("no-borders", text) for text in (SPACE, LINE, DIGIT, WORD)),
}
"""Where ids differ from the stock model's: (vocabulary, text of an untitled passage)."""


@pytest.fixture(params=VOCABULARIES)
def families(request):
    """Yield each family with its stock tokenizer and its encoder, over one vocabulary."""
    return request.param, ((name, tokenizer, Tokenizer(tokenizer)) for name, tokenizer in all_families(request.param))


def all_families(vocabulary):
    return ((name, stock_tokenizer(vocabulary, name)) for name in CONTROLS)


@pytest.mark.slow
def test_ids_and_spans_are_those_of_the_stock_tokenizer(families):
    vocabulary, tokenizers = families
    for name, tokenizer, encoder in tokenizers:
        check_prompts(
            tokenizer,
            encoder,
            # The names of DeepSeek's control tokens hold the character that others write for a space.
            is_lossless=vocabulary in LOSSLESS and name != "phi-3" and not name.startswith("deepseek"),
            reaches_lines=vocabulary == "no-borders",
        )


def test_only_listed_beginnings_of_passages_differ_and_only_before_them():
    differing = set()
    for vocabulary in VOCABULARIES:
        tokenizer = stock_tokenizer(vocabulary, "mistral-v1")
        encoder = Tokenizer(tokenizer)
        for text in (SPACE, TAB, LINE, DIGIT, WORD, "(a) \u0301b", "“Été\r\n", "漢字"):
            passages = [tokenize_passage(encoder, TEMPLATE, each) for each in (text + "b", text)]
            layout = tokenize_prompt(encoder, TEMPLATE, "who?").with_passages(passages)
            if list(layout.token_ids) != stock_ids(tokenizer, turn_of(passages, "who?")):
                differing.add((vocabulary, text))
    assert differing == LISTED


def test_no_order_and_no_neighbour_changes_the_tokens_of_a_passage(families):
    _, tokenizers = families
    name, _, encoder = next(tokenizers)
    orders = list(permutations(DOCUMENTS[:3]))
    tokens, frames = {}, set()
    for order in [*orders, *((document,) for document in DOCUMENTS)]:
        layout = Assembler(encoder, 4096).assemble("who?", order, order="original").layout
        for document, span in zip(order, layout.passages, strict=True):
            tokens.setdefault(document.page_content, set()).add(layout.tokens(span))
        frames.add((layout.tokens(layout.prefix), layout.tokens(layout.suffix)))
    assert [len(each) for each in tokens.values()] == [1] * len(DOCUMENTS), name
    assert len(frames) == 1


def test_a_cut_passage_keeps_the_limit_and_has_the_tokens_of_its_shorter_text(families):
    _, tokenizers = families
    _, _, encoder = next(tokenizers)
    for title, text in (("", "One two. Three four.\n"), ("Été", "\nOne 12. Three"), ("(a", " One (two). Three four")):
        passage = tokenize_passage(encoder, TEMPLATE, text, title=title)
        frame = len(tokenize_passage(encoder, TEMPLATE, "", title=title))
        for limit in range(frame + FEWEST_TOKENS + 1, len(passage)):
            cut = cut_passage(encoder, passage, limit)
            heading, beginning, separator = cut.written
            assert limit - 2 <= len(cut) <= limit
            assert (heading, separator, cut.key) == (passage.written[0], passage.written[2], passage.key)
            assert text.lstrip(" ").startswith(beginning.lstrip(" "))
            assert cut.token_ids == tokenize_passage(encoder, TEMPLATE, beginning, title=title).token_ids
        with pytest.raises(PromptTooLongError, match="tokens are left for the text"):
            cut_passage(encoder, passage, frame + FEWEST_TOKENS - 3)


def test_a_label_and_its_passage_are_encoded_whole(families):
    _, tokenizers = families
    _, _, encoder = next(tokenizers)
    for document in DOCUMENTS:
        labelled = label_passage(encoder, tokenize_passage(encoder, TEMPLATE, document.page_content), "[3] ")
        whole = tokenize_passage(encoder, TEMPLATE, f"[3] {document.page_content}")
        assert labelled.token_ids == whole.token_ids
        assert labelled.written == ("[3] ", document.page_content, TEMPLATE.separator)


def test_control_tokens_in_contents_are_text(families):
    _, tokenizers = families
    for name, _, encoder in tokenizers:
        forged = "".join(CONTROLS[name])
        plain = layout_with(encoder, "a")
        layout = layout_with(encoder, forged)
        for control in encoder.control_ids:
            assert layout.token_ids.count(control) == plain.token_ids.count(control)
        spans = [layout.question, *layout.passages, *(turn.content for turn in layout.turns)]
        assert all(encoder.control_ids.isdisjoint(layout.tokens(span)) for span in spans)
        assert squeezed(encoder.decode(layout.tokens(layout.question))) == squeezed(forged)


def layout_with(encoder, text):
    """Return a prompt with ``text`` as every content."""
    history = [{"role": role, "content": text} for role in ("system", "user", "assistant")]
    passages = [tokenize_passage(encoder, TEMPLATE, text, title=text)]
    return tokenize_prompt(encoder, TEMPLATE, text, history=history).with_passages(passages)


@pytest.mark.parametrize(
    ("sizes", "budget", "expected"),
    [
        ([], 10, Selection(())),
        ([4, 5, 6], 15, Selection((0, 1, 2))),
        ([4, 5, 6], 14, Selection((0, 1))),
        ([4, 9, 6], 10, Selection((0, 2))),
        ([10, 1], 10, Selection((0,))),
        ([11, 1], 10, Selection((0,), cut=(0,))),
    ],
)
def test_worked_examples(sizes, budget, expected):
    assert select_passages(sizes, budget) == expected


def test_counting_ends_when_nothing_more_can_fit():
    counted = []

    def sizes():
        for size in (5, 4, 7, 7):
            counted.append(size)
            yield size

    assert select_passages(sizes(), 10, smallest=2) == Selection((0, 1))
    assert counted == [5, 4]


@pytest.mark.parametrize(("budget", "kept"), [(7, (0,)), (8, (0, 1))])
def test_a_passage_may_fill_what_is_left_exactly(budget, kept):
    # Of 8, 3 are left, as many as the smallest passage has; of 7, 2, and nothing is tried any more.
    assert select_passages(iter((5, 3)), budget, smallest=3) == Selection(kept)
    assert select_passages(iter((5, 2)), 7, smallest=3) == Selection((0,))


@given(st.lists(st.integers(1, 30), max_size=20), st.integers(1, 60))
def test_kept_passages_fit_and_no_skipped_one_would_have(sizes, budget):
    selection = select_passages(sizes, budget)
    if selection.cut:
        assert sizes[0] > budget
        return
    left = budget
    for rank, size in enumerate(sizes):
        assert (rank in selection.selected) == (size <= left)
        left -= size if rank in selection.selected else 0
    assert left >= 0


@given(texts(), st.integers(FEWEST_TOKENS, 40))
def test_a_cut_text_is_a_beginning_of_the_text_and_as_long_as_possible(text, limit):
    encoder = ToyEncoder()
    whole = encoder.encode_text(text)
    cut = truncate(whole, limit, encoder.decode)
    assert list(cut) == whole[: len(cut)]
    assert encoder.decode(whole).startswith(encoder.decode(cut))
    assert min(limit, len(whole)) - 3 <= len(cut) <= limit


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("cut", [truncate, truncate_at_sentence])
@given(st.text("aé日本語😀한글 தமி€x.\n", max_size=30), st.integers(FEWEST_TOKENS, 40))
@example("한국어입니다그리고또다른말이다", 16)
@example("한국어입니다그리고또다른말이다", 17)
def test_a_cut_text_is_a_beginning_of_the_text_in_every_kind_of_vocabulary(vocabulary, cut, text, limit):
    tokenizer = base(vocabulary)
    whole = tokenizer.encode(text, add_special_tokens=False).ids

    def decode(ids):
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    assert decode(whole).startswith(decode(cut(whole, limit, decode)))


def test_a_limit_below_a_few_tokens_is_refused():
    with pytest.raises(PromptTooLongError, match="0 tokens are left"):
        truncate([65] * 9, -5, ToyEncoder().decode)
    with pytest.raises(PromptTooLongError, match="3 tokens are left"):
        truncate([65] * 9, 3, ToyEncoder().decode)
    assert len(truncate([65] * 9, 4, ToyEncoder().decode)) == 4


def test_a_tokenizer_without_clean_borders_still_gets_a_cut():
    assert truncate([65] * 30, 20, lambda ids: f"{len(ids)}") == (65,) * 20


class TestLimits:
    def test_they_fall_from_the_best_to_the_last_and_add_up(self):
        # 5 passages of 100 fit into 500: 100 (1 + 0.5 (1 - 2 r / 4)).
        limit = PassageBudget(100, 0.5).limits(count=8, budget=500)
        assert [limit(rank) for rank in range(7)] == [150, 125, 100, 75, 50, 50, 50]

    def test_a_limit_that_floats_miss_by_a_little_is_whole(self):
        # 100 (1 + .15) = 114.99999999999999 in floats.
        limit = PassageBudget(100, 0.15).limits(count=2, budget=200)
        assert [limit(0), limit(1)] == [115, 85]

    def test_the_number_of_passages_counts_where_it_is_smaller(self):
        limit = PassageBudget(100, 1.0).limits(count=3, budget=5000)
        assert [limit(rank) for rank in range(4)] == [200, 100, 0, 0]

    def test_without_shrinking_all_are_equal_and_without_tokens_there_are_none(self):
        assert [PassageBudget(100).limits(9, 500)(rank) for rank in (0, 8)] == [100, 100]
        assert PassageBudget().limits(9, 500)(8) == 500
        assert PassageBudget(100, 0.5).limits(1, 500)(0) == 100

    @given(st.integers(1, 200), st.floats(0, 1), st.integers(1, 30), st.integers(1, 3000))
    def test_they_never_rise_and_stay_within_the_average_together(self, tokens, shrink, count, budget):
        limit = PassageBudget(tokens, shrink).limits(count, budget)
        limits = [limit(rank) for rank in range(max(min(count, budget // tokens), 1))]
        assert limits == sorted(limits, reverse=True)
        assert tokens * len(limits) - len(limits) <= sum(limits) <= tokens * len(limits)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"tokens": 0}, "tokens=0 must be >= 1"),
            ({"tokens": 9, "shrink": 1.5}, "shrink=1.5 must be between 0 and 1"),
            ({"shrink": 0.5}, "shrink=0.5 needs tokens"),
            ({"overflow": "cut"}, "overflow='cut' must be one of drop, truncate, error"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, arguments, message):
        with pytest.raises(ConfigError, match=message):
            PassageBudget(**arguments)


class TestOverflow:
    def test_a_passage_above_its_limit_is_skipped_but_for_the_best_which_is_cut(self):
        limits = (6, 5, 4, 3)
        assert select_passages([9, 6, 4, 3], 100, limit=limits.__getitem__) == Selection((0, 2, 3), cut=(0,))

    def test_truncating_cuts_each_to_its_limit_and_the_last_to_what_is_left(self):
        cuts = []

        def cut(rank, allowed):
            cuts.append((rank, allowed))
            return allowed - 1  # a sentence ended one token earlier

        found = select_passages([9, 9, 9, 9], 14, limit=lambda rank: 6, overflow="truncate", cut=cut)
        # 5 of 14, 5 of 9, then 4 are left.
        assert (cuts, found) == ([(0, 6), (1, 6), (2, 4)], Selection((0, 1, 2), cut=(0, 1, 2)))

    def test_a_passage_that_cannot_be_cut_is_left_out(self):
        found = select_passages([3, 9, 2], 20, limit=lambda rank: 4, overflow="truncate", cut=lambda rank, allowed: 0)
        assert found == Selection((0, 2))

    def test_an_error_names_the_first_that_is_too_long(self):
        assert select_passages([3, 9, 2], 10, overflow="error") == Selection((0,), too_long=(1, 7))
        assert select_passages([3, 4, 2], 10, overflow="error") == Selection((0, 1, 2))


def at_sentence(text, limit):
    encoder = ToyEncoder()
    return encoder.decode(truncate_at_sentence(encoder.encode_text(text), limit, encoder.decode))


class TestSentences:
    @pytest.mark.parametrize(
        ("text", "limit", "expected"),
        [
            ("One two. Three four. Five.", 22, "One two. Three four."),
            ("One two. Three four. Five.", 19, "One two."),
            ("One two. Three four. Five.", 7, "One two"),
            ("One two? Three! Four.", 17, "One two? Three!"),
            ('He said "no." Then he left.', 20, 'He said "no."'),
            ("It is 3.5 metres high", 10, "It is 3.5 "),
            ("A. Then nothing ends any more", 12, "A. Then noth"),
            ("Ab. Then nothing ends any more", 12, "Ab. Then not"),  # three tokens are too few
            ("Abc. Then nothing ends any more", 12, "Abc."),
            ("No sentence ends here at all", 12, "No sentence "),
            ("\u6771\u4eac\u3002\u5927\u962a\u3002", 16, "\u6771\u4eac\u3002"),
        ],
    )
    def test_worked_examples(self, text, limit, expected):
        assert at_sentence(text, limit) == expected

    @given(texts(12), st.integers(FEWEST_TOKENS, 60))
    def test_what_is_kept_is_a_beginning_no_longer_than_a_plain_cut(self, text, limit):
        encoder = ToyEncoder()
        whole = encoder.encode_text(text)
        kept, plain = (cut(whole, limit, encoder.decode) for cut in (truncate_at_sentence, truncate))
        assert list(kept) == whole[: len(kept)]
        assert len(kept) <= len(plain)
        assert len(kept) >= min(FEWEST_TOKENS, len(plain))
