"""Prompts have the token ids of the stock model: every chat template with every kind of vocabulary."""

from itertools import permutations

import pytest
from langchain_core.documents import Document

from rag_posfix.assembly import Assembler, PromptTemplate, tokenize_passage, tokenize_prompt
from rag_posfix.assembly.tokenization import FEWEST_TOKENS, cut_passage, label_passage
from rag_posfix.errors import PromptTooLongError
from rag_posfix.generation.model.tokenizer import Tokenizer
from tests.support.stock_prompts import check_prompts, squeezed, stock_ids, turn_of
from tests.support.vocabularies import CONTROLS, VOCABULARIES, stock_tokenizer

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
