"""An encoder without a tokenizer: one token per word."""

from __future__ import annotations

from rag_posfix.contracts.generator import TokenEncoder


class WordEncoder(TokenEncoder):
    """One token per word; a line break is one too. A prompt is what the user says."""

    eos_ids = frozenset()

    def __init__(self):
        self.words = []

    def encode_text(self, text):
        found = text.replace("\n", " \n ").split(" ")
        return [self._number(word) for word in found if word]

    def encode_template(self, text):
        return self.encode_text(text)

    def decode(self, token_ids):
        return " ".join(self.words[token] for token in token_ids)

    decode_answer = decode

    def render_chat(self, messages, *, open_answer=True):
        return " user: " + "".join(message["content"] for message in messages) + (" answer: " if open_answer else "")

    def _number(self, word):
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)
