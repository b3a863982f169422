"""The prompt that is timed has an exact size."""

from __future__ import annotations

import pytest

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.speed.runs import bench_layout
from tests.support.word_encoder import WordEncoder


class TestLayout:
    @pytest.mark.parametrize(("documents", "tokens"), [(1, 3), (20, 150), (60, 20)])
    def test_every_passage_has_exactly_the_tokens_asked_for_and_none_is_like_another(self, documents, tokens):
        layout = bench_layout(WordEncoder(), documents, tokens)
        assert [len(span) for span in layout.passages] == [tokens] * documents
        assert len(set(layout.keys)) == documents
        assert len(set(layout.relevance)) == documents
        assert len(layout.question) > 0

    def test_a_passage_longer_than_the_corpus_begins_again(self):
        layout = bench_layout(WordEncoder(), 1, 12_000)
        assert len(layout.passages[0]) == 12_000

    def test_a_passage_reads_as_text_and_ends_in_its_separator(self):
        encoder = WordEncoder()
        layout = bench_layout(encoder, 2, 12)
        text = encoder.decode(layout.tokens(layout.passages[0]))
        # The corpus begins so; the separator is two line breaks, two of the twelve tokens.
        assert text == "The Maravel lighthouse stands on Cape Sorrin, at the northern \n \n"

    @pytest.mark.parametrize(("documents", "tokens"), [(0, 10), (3, 2)])
    def test_sizes_that_leave_no_text_are_refused(self, documents, tokens):
        with pytest.raises(
            EvaluationError, match=f"documents={documents} and tokens={tokens} must be at least 1 and 3"
        ):
            bench_layout(WordEncoder(), documents, tokens)
