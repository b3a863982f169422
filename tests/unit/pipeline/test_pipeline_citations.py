"""Citations in the answers of a pipeline."""

from dataclasses import replace

import pytest
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.assembly.tokenization import PassageBudget
from rag_posfix.contracts.answer import Citation
from rag_posfix.contracts.request import PromptTemplate, Sampling, TokenSource
from rag_posfix.pipeline.pipeline import Defaults, Pipeline, Question
from tests.support.pipelines import BREAD, QUESTION, ROME, SOUND, Counting, memory_cache
from tests.support.toy_encoder import ToyEncoder

LONG = f"{ROME.page_content} {'word ' * 3000}"
"""A text of which a prompt holds the beginning."""


class Tracing(Counting):
    """Says of each word which passage it comes from: all from the one it answers with."""

    answer = ""

    def generate(self, request):
        generation = super().generate(request)
        if not request.attribution:
            return generation
        text, shares = self.answer or generation.text, generation.attention
        ends = [end for end in range(1, len(text) + 1) if text[end - 1 : end].isalnum()]
        return replace(generation, text=text, sources=tuple(TokenSource(end, shares) for end in ends))


class Paraphrasing(Tracing):
    """Answers with a sentence of which the passage has one word."""

    answer = "Old walls surround everything."


class Quoting(Tracing):
    """Answers with a sentence of the passage."""

    answer = "Rome lies on the Tiber"


class TestCitations:
    def asked(self, documents, generator_type=Tracing, **options):
        generator = generator_type(ToyEncoder())
        made = Pipeline(generator, Assembler(generator.encoder, 8192), cache=memory_cache(), **options)
        return made, made.ask(Question(QUESTION, documents))

    def test_a_sentence_is_cited_by_attention_if_it_has_no_quote(self):
        _, quoted = self.asked([BREAD, ROME])
        _, answer = self.asked([BREAD, ROME], Paraphrasing)
        text = Paraphrasing.answer
        assert quoted.citations == (Citation(0, 22, "Rome lies on the Tiber", ("rome",), "quote", (None,)),)
        assert answer.citations == (Citation(0, len(text), text, ("rome",), "attention", (None,)),)
        assert [one["from"] for one in answer.to_dict()["citations"]] == ["attention"]
        assert "origin" not in answer.to_dict()["citations"][0]

    @pytest.mark.parametrize("generator_type", [Quoting, Paraphrasing])
    @pytest.mark.parametrize(("first", "page"), [("", 3), ("The Po is long. " * 9, 5)])
    def test_a_citation_names_the_page_of_its_sentence(self, first, page, generator_type):
        text = f"{first}Rome lies on the Tiber. It is old."
        pages = {"page": 3, "pages": [3, 5], "page_starts": [0, len(first) or len(text) - 3]}
        _, answer = self.asked([BREAD, Document(text, id="rome", metadata=pages)], generator_type)
        (citation,) = answer.citations
        assert (citation.document_ids, citation.pages) == (("rome",), (page,))

    @pytest.mark.parametrize(
        ("metadata", "page"),
        [
            ({"page": 4}, 4),
            ({"page": 4, "pages": [4, 5]}, 4),
            ({"page": 4, "pages": "45", "page_starts": [0, 1]}, 4),
            ({"page": 4, "pages": [4, "x"], "page_starts": [0, 1]}, 4),
            ({"page": 4, "pages": [4, 5], "page_starts": [9, 0]}, 4),
            ({"pages": [4, 5], "page_starts": [0, 1]}, 4),
        ],
    )
    def test_metadata_that_is_damaged_leaves_the_page_on_which_a_passage_begins(self, metadata, page):
        _, answer = self.asked([BREAD, ROME.model_copy(update={"metadata": metadata})])
        assert answer.citations[0].pages == (page,)

    def test_attention_to_a_passage_without_a_word_of_the_sentence_is_no_citation(self):
        class Straying(Tracing):
            def generate(self, request):
                generation = super().generate(request)
                shares = tuple(reversed(generation.attention))  # to the passage about bread
                sources = tuple(TokenSource(source.end, shares) for source in generation.sources)
                return replace(generation, attention=shares, sources=sources)

        generator = Straying(ToyEncoder())
        made = Pipeline(generator, Assembler(generator.encoder, 8192))
        answer = made.ask(Question(QUESTION, [BREAD, ROME]))
        assert {document.id: document.attention for document in answer.documents}["bread"] == 1.0
        assert [citation.origin for citation in answer.citations] == ["quote"]

    def test_weights_of_experts_have_their_own_name_and_attention_until_1_0(self):
        made, attended = self.asked([BREAD, ROME])
        assert {document.weight for document in attended.documents} == {None}

        class Weighing(Tracing):
            def generate(self, request):
                return replace(super().generate(request), weighted=True)

        generator = Weighing(ToyEncoder())
        made = Pipeline(generator, Assembler(generator.encoder, 8192), cache=memory_cache())
        for _ in range(2):  # the second one is cached
            documents = made.ask(Question(QUESTION, [BREAD, ROME])).to_dict()["documents"]
            assert [document["weight"] for document in documents] == [document["attention"] for document in documents]
            assert sum(document["weight"] for document in documents) == pytest.approx(1)

    def test_no_passage_is_cited_where_none_dominates(self):
        other = Document(page_content="The Tiber floods.", id="other")
        _, answer = self.asked([ROME, other])  # they share 3 and 2 words with the question
        assert {citation.origin for citation in answer.citations} == {"quote"}

    def test_tracing_can_be_turned_off(self):
        _, answer = self.asked([BREAD, ROME], defaults=Defaults(attribution=False))
        assert {citation.origin for citation in answer.citations} == {"quote"}

    def test_answers_with_and_without_tracing_are_kept_apart(self):
        cache = memory_cache()
        for attribution, cached in ((False, False), (True, False), (False, True), (True, True)):
            made, _ = self.asked([], Paraphrasing, defaults=Defaults(attribution=attribution))
            made.cache = cache
            answer = made.ask(Question(QUESTION, [BREAD, ROME]))
            assert answer.cached is cached
            assert ("attention" in {citation.origin for citation in answer.citations}) is attribution

    @pytest.mark.parametrize(
        ("template", "change"),
        [(None, {"page_content": LONG + "another end"}), (PromptTemplate(heading=""), {"metadata": {"title": "No"}})],
    )
    def test_a_hit_has_the_attention_to_passages_that_are_equal_where_they_are_read(self, template, change):
        generator = Tracing(ToyEncoder())
        made = Pipeline(generator, Assembler(generator.encoder, 400), cache=memory_cache())
        read = {"page_content": LONG + "end", "metadata": {"title": "Rome"}}
        first, second = (
            made.ask(Question("Tiber?", [Document(**each)], template=template, sampling=Sampling(max_tokens=10)))
            for each in (read, {**read, **change})
        )
        assert (first.cached, second.cached) == (False, True)
        assert [document.attention for document in second.documents] == [1.0]
        assert [c.origin for c in second.citations] == [c.origin for c in first.citations] != []

    def test_passages_that_begin_alike_and_are_cut_have_their_own_attention(self):
        class Attending(Tracing):
            def generate(self, request):
                return replace(super().generate(request), attention=(0.75, 0.25))

        generator, budget = Attending(ToyEncoder()), PassageBudget(200, overflow="truncate")
        made = Pipeline(generator, Assembler(generator.encoder, 8192, budget=budget), cache=memory_cache())
        for _ in range(2):  # the second one is cached
            answer = made.ask(Question(QUESTION, [Document(page_content=LONG + end) for end in ("end", "other")]))
            assert [document.attention for document in answer.documents] == [0.75, 0.25]

    @pytest.mark.parametrize("generator_type", [Tracing, Paraphrasing])
    def test_a_hit_cites_the_ids_of_the_new_question(self, generator_type):
        made, first = self.asked([BREAD, ROME], generator_type)
        renamed = Document(page_content=ROME.page_content, id="seven hills")
        answer = made.ask(Question(QUESTION, [renamed, BREAD]))
        assert answer.cached
        assert answer.citations == (replace(first.citations[0], document_ids=("seven hills",)),)

    def test_an_answer_that_was_kept_before_there_were_claims_is_read(self):
        made, _ = self.asked([BREAD, ROME])
        for old in ({}, {"claims": []}):
            made.cache.get = lambda key, old=old: {**SOUND, **old}
            answer = made.ask(Question(QUESTION, [BREAD, ROME]))
            assert (answer.text, answer.cached, answer.citations) == ("stored", True, ())

    @pytest.mark.parametrize(
        "claims",
        [None, {}, [[0, 3]], [[0, 3, []]], [[0, 3, {"k": "x"}]], [[3, 3, {}]], [[0, 7, {}]], [[-1, 3, {}]], ["abc"]],
    )
    def test_claims_that_are_damaged_are_a_miss(self, claims):
        made, _ = self.asked([BREAD, ROME])
        made.cache.get = lambda key: {**SOUND, "claims": claims}
        assert made.ask(Question(QUESTION, [BREAD, ROME])).cached is False
