"""A ``TokenEncoder`` for models whose tokenizer is on another machine: exact text, estimated numbers of tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rag_posfix.contracts.generator import ChatMessage, TokenEncoder
from rag_posfix.text import clean_text

_PIECE = re.compile(r" ?[A-Za-z]{1,6}|[0-9]| {1,4}|\n{1,2}|[\s\S]")
_MARK = b"\x01"  # before the bytes of a piece, so that leading zero bytes survive


class PieceEncoder(TokenEncoder):
    """Encodes text into pieces that hold their own characters. Decoding gives exactly the cleaned text back.

    A piece is up to six ASCII letters with the space before them, a digit, up to four spaces, up to two line breaks,
    or one other character. English prose has about as many pieces as a vocabulary of 32,000 to 128,000 entries has
    tokens for it; the number is an estimate. There are no control tokens: text of a document cannot forge a
    turn, because messages are sent as messages. Each part is encoded alone, so that decoding it gives the message.
    """

    def encode_text(self, text: str) -> list[int]:
        """Return the pieces of ``text`` as numbers."""
        return [_number(piece) for piece in _PIECE.findall(clean_text(text))]

    def encode_template(self, text: str) -> list[int]:
        """Return the pieces of ``text``; there are no control tokens."""
        return [_number(piece) for piece in _PIECE.findall(text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the exact text of pieces."""
        return b"".join(_bytes(number) for number in token_ids).decode("utf-8", "replace")

    def render_chat(self, messages: Sequence[ChatMessage], *, open_answer: bool = True) -> str:
        """Return the messages as ChatML, whose marks stand for those that the server will add."""
        turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
        return "".join(turns) + ("<|im_start|>assistant\n" if open_answer else "")


def _number(piece: str) -> int:
    return int.from_bytes(_MARK + piece.encode("utf-8", "replace"), "big")


def _bytes(number: int) -> bytes:
    return number.to_bytes((number.bit_length() + 7) // 8, "big")[1:]
