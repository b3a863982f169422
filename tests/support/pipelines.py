"""Pipelines over a scripted generator, a retriever of three documents and a reranker by length."""

from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.caching.answers.tiered import TieredAnswerCache
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline.pipeline import Pipeline
from tests.support.toy_encoder import ToyEncoder

ROME = Document(page_content="Rome lies on the Tiber. It is old.", id="rome")


PARIS = Document(page_content="Paris lies on the Seine. It is big.", id="paris")


BREAD = Document(page_content="Bread is baked in ovens.", id="bread")


SOUND = {
    "text": "stored",
    "finish_reason": "stop",
    "prompt_tokens": 5,
    "completion_tokens": 1,
    "cached_tokens": 0,
    "attention": {},
}


QUESTION = "Which river does Rome have, the Tiber?"


class Counting(FakeGenerator):
    """Counts the answers that it computes."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.computed = 0
        self.closed_after = None

    def generate(self, request):
        self.computed += 1
        return super().generate(request)

    def stream(self, request):
        given = 0
        try:
            for chunk in super().stream(request):
                given += 1
                yield chunk
        finally:
            self.closed_after = given


class Shelf:
    """A retriever that has three documents."""

    def __init__(self):
        self.asked = []

    def retrieve(self, question, k):
        self.asked.append((question, k))
        found = [ROME, PARIS, BREAD][:k]
        return [
            Document(page_content=d.page_content, id=d.id, metadata={"relevance_score": 0.9 - 0.2 * i})
            for i, d in enumerate(found)
        ]


class ByLength:
    """A reranker that likes short documents: best first, as rerankers answer."""

    def __init__(self):
        self.calls = 0

    def compress_documents(self, documents, query, callbacks=None):
        self.calls += 1
        scored = [
            Document(
                page_content=d.page_content,
                id=d.id,
                metadata={**d.metadata, "relevance_score": 10 / len(d.page_content)},
            )
            for d in documents
        ]
        return sorted(scored, key=lambda d: -d.metadata["relevance_score"])


def pipeline(*, window=8192, order_invariant=True, **options):
    generator = Counting(ToyEncoder(), window, order_invariant=order_invariant)
    return Pipeline(generator, Assembler(generator.encoder, window), **options)


def memory_cache():
    return TieredAnswerCache([MemoryTier()])


def ids(answer):
    return [document.id for document in answer.documents]
