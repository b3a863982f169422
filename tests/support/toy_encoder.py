"""A byte-level tokenizer with a ChatML template: deterministic, exact for any text, no weights, no dependencies.

Token 0 to 255 are bytes; control tokens follow. One token per byte makes every expected number easy to work out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rag_posfix.contracts.generator import ChatMessage, TokenEncoder
from rag_posfix.text import clean_text

CONTROL_TOKENS = {"<|im_start|>": 256, "<|im_end|>": 257, "<|endoftext|>": 258}


class ToyEncoder(TokenEncoder):
    """Encodes each part of a prompt alone."""

    vocab_size = 259
    eos_ids = frozenset({257})
    control_ids = frozenset(CONTROL_TOKENS.values())
    has_chat_template = True

    def encode_text(self, text: str) -> list[int]:
        return list(clean_text(text).encode())

    def encode_answer(self, text: str) -> list[int]:
        return self.encode_text(text)

    def encode_template(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in re.split("(" + "|".join(map(re.escape, CONTROL_TOKENS)) + ")", text):
            ids += [CONTROL_TOKENS[piece]] if piece in CONTROL_TOKENS else list(piece.encode())
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode_template(clean_text(text))

    def token_bytes(self, token_id: int) -> bytes:
        names = {number: name.encode() for name, number in CONTROL_TOKENS.items()}
        return names.get(token_id) or bytes([token_id])

    def decode(self, token_ids: Sequence[int]) -> str:
        names = {number: name.encode() for name, number in CONTROL_TOKENS.items()}
        return b"".join(names.get(token) or bytes([token]) for token in token_ids).decode("utf-8", "replace")

    def decode_answer(self, token_ids: Sequence[int]) -> str:
        return self.decode([token for token in token_ids if token < 256])

    def render_chat(self, messages: Sequence[ChatMessage], *, open_answer: bool = True) -> str:
        turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
        return "".join(turns) + ("<|im_start|>assistant\n" if open_answer else "")


class RecordingEncoder(ToyEncoder):
    """Keeps what it encodes in ``encoded``, so that tests see repeated work."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode_text(self, text: str) -> list[int]:
        self.encoded.append(text)
        return super().encode_text(text)


class MarkedEncoder(ToyEncoder):
    """Has the control tokens of ``last_but_not_late`` too."""

    vocab_size = 261
    marks = ("<|embed_token|>", "<|rerank_token|>")

    def encode_template(self, text: str) -> list[int]:
        pieces = re.split("(" + "|".join(map(re.escape, self.marks)) + ")", text)
        ids = [[259 + self.marks.index(p)] if p in self.marks else ToyEncoder.encode_template(self, p) for p in pieces]
        return [token for piece in ids for token in piece]
