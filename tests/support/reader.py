"""A generator that answers rerankers from a table, and counts what it was asked to read."""

from __future__ import annotations

from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import Chunk, Generation, MitigationInfo, Usage
from tests.support.toy_encoder import ToyEncoder


class ScriptedReader(Generator):
    """Has all readings of an engine.

    ``values`` gives a number for the text of a passage; ``tokens`` the attention to each token of a text, from
    (question, text); ``written`` what it answers; ``before_each`` is called before each reading. ``seen`` holds the
    texts of each prompt that was read, in its order; ``waiting`` counts readings that have not got past
    ``before_each``.
    """

    model_id = "scripted"
    fingerprint = "scripted"
    capabilities = frozenset({"likelihood", "first_token", "attention"})

    def __init__(self, values=None, tokens=None, written="", context_window=100_000, before_each=lambda: None):
        self.values, self.tokens, self.written = values, tokens, written
        self.context_window = context_window
        self.encoder = ToyEncoder()
        self.seen = []
        self.salts = []
        self.waiting = 0
        self.before_each = before_each

    def texts(self, layout):
        return [self.encoder.decode(layout.tokens(span)) for span in layout.texts]

    def _read(self, layout, salt, together=True):
        passages = [len(span) for span in layout.passages]
        around = len(layout.prefix) + len(layout.suffix)
        assert around + (sum if together else max)(passages) <= self.context_window
        self.waiting += 1
        self.before_each()
        self.waiting -= 1
        self.seen.append(self.texts(layout))
        self.salts.append(salt)

    def describe(self, choice):
        return MitigationInfo("none", "none", False)

    def question_likelihood(self, layout, salt="", *, bare=False):
        self._read(layout, salt, together=False)
        return tuple(self.values[text] for text in (*self.texts(layout), *([""] if bare else [])))

    def first_token_log_probs(self, layout, tokens, salt=""):
        self._read(layout, salt, together=False)
        self.suffixes = [*getattr(self, "suffixes", []), self.encoder.decode(layout.tokens(layout.suffix))]
        return [tuple(self.values[text][token] for token in tokens) for text in (*self.texts(layout), "")]

    def question_attention(self, layouts, salt="", check=None, layers=None, heads=None):
        self.layers, self.heads = layers, heads
        found = []
        for layout in layouts:
            check()
            self._read(layout, salt)
            question = self.encoder.decode(layout.tokens(layout.question))
            rows = []
            for text, span, inside in zip(self.texts(layout), layout.passages, layout.texts, strict=True):
                rows.append(
                    (9.0,) * (inside.start - span.start)
                    + tuple(self.tokens(question, text))
                    + (99.0 * len(question),) * (span.stop - inside.stop)
                )
            found.append(tuple(rows))
        return found

    def passage_attention(self, layouts, salt="", check=None):
        found = []
        for layout in layouts:
            check()
            self._read(layout, salt)
            texts = self.texts(layout)
            found.append(tuple(self.values(text, place) for place, text in enumerate(texts)))
        return found

    def stream(self, request):
        assert len(request.layout.token_ids) + request.sampling.max_tokens <= self.context_window
        self._read(request.layout, request.salt)
        text = self.written(self.texts(request.layout)) if callable(self.written) else self.written
        for letter in text:
            yield Chunk(letter)
        usage = Usage(len(request.layout.token_ids), len(text))
        yield Chunk("", Generation(text, tuple(range(len(text))), "stop", usage))


def scores(documents):
    return {document.page_content: document.metadata["relevance_score"] for document in documents}


def order(documents):
    return [document.page_content for document in documents]


def raw(documents):
    return {document.page_content: document.metadata["reranking"]["raw_score"] for document in documents}
