"""Prompts beside the encoding of the same text by the tokenizer's own ``apply_chat_template``."""

from __future__ import annotations

import re

from langchain_core.documents import Document

from rag_posfix.assembly import PromptTemplate, tokenize_passage, tokenize_prompt

TEMPLATE = PromptTemplate()
HISTORY_FIRST = PromptTemplate(history_first=True)
HISTORY = [
    {"role": "system", "content": "Be brief, please."},
    {"role": "user", "content": " Hi (there):\n"},
    {"role": "assistant", "content": " Hello! "},
]
DOCUMENTS = [
    Document("The bridge was built by Ann Mora.", metadata={"title": "Arvo bridge"}),
    Document("It opened in 1901, on a Monday", metadata={"title": "(Opening)"}),
    Document("“Été” is a word; so is 漢字"),
    Document("Lines\nof  a\n\n  list:", metadata={"title": "A list of 12"}),
]
QUESTIONS = (("who built it?", ()), (" 12 of the (old) bridges\nor été ", HISTORY))


def stock_ids(tokenizer, content, history=()):
    messages = [*history, {"role": "user", "content": content}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def turn_of(passages, question):
    """Return the content of the user's turn as text."""
    written = "".join("".join(passage.written) for passage in passages)
    return TEMPLATE.opening + written + TEMPLATE.question_prefix + question + TEMPLATE.answer_cue


def passages_first(passages, question, history):
    """Return the messages of a prompt whose passages are in the first turn of the user."""
    if not history:
        return [{"role": "user", "content": turn_of(passages, question)}]
    system, first, reply = (message["content"] for message in history)
    written = "".join("".join(passage.written) for passage in passages)
    contents = [TEMPLATE.question_prefix + asked + TEMPLATE.answer_cue for asked in (first, question)]
    return [
        {"role": "user", "content": f"{TEMPLATE.opening}{written}{system}\n\n{contents[0]}"},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": contents[1]},
    ]


def squeezed(text):
    """Return a text without spaces and what stands for them in vocabularies."""
    return re.sub(r"[\s\u2581]", "", text)


def check_prompts(tokenizer, encoder, *, is_lossless, reaches_lines=False):
    """Check the ids of prompts with and without passages and history, their text, and the spans of contents.

    ``is_lossless``: decoding gives the text back to the letter. ``reaches_lines``: tokens reach across line breaks, so
    that a span may hold more than its content.
    """
    rows = [(document.page_content, document.metadata.get("title", "")) for document in DOCUMENTS]
    passages = [tokenize_passage(encoder, TEMPLATE, text, title=title) for text, title in rows]
    for question, history in QUESTIONS:
        chat = tokenize_prompt(encoder, TEMPLATE, question, history=history, has_passages=False).with_passages(())
        asked = tokenize_prompt(encoder, TEMPLATE, question, history=history).with_passages(passages)
        last = tokenize_prompt(encoder, HISTORY_FIRST, question, history=history).with_passages(passages)
        for layout, messages in (
            (chat, [*history, {"role": "user", "content": question}]),
            (last, [*history, {"role": "user", "content": turn_of(passages, question)}]),
            (asked, passages_first(passages, question, history)),
        ):
            *earlier, content = messages
            content = content["content"]
            assert list(layout.token_ids) == stock_ids(tokenizer, content, earlier)
            rendered = encoder.render_chat(messages)
            assert squeezed(encoder.decode(layout.token_ids)) == squeezed(rendered)
            assert encoder.decode(layout.token_ids) == rendered or not is_lossless
            contents = [message["content"] for message in messages]
            spans = [layout.question, *layout.texts, *(turn.content for turn in layout.turns)]
            texts = [question, *(text for text, _ in rows[: layout.n_passages]), *contents]
            for span, text in zip(spans, texts, strict=True):
                shown = squeezed(encoder.decode(layout.tokens(span)))
                assert shown == squeezed(text) or (reaches_lines and squeezed(text) in shown)
