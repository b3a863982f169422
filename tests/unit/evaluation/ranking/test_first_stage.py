import pytest
from langchain_core.documents import Document

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.collection import Collection, Topic
from rag_posfix.evaluation.ranking.first_stage import FirstStage, candidates_of, retrieve, run_as_first_stage
from rag_posfix.evaluation.ranking.rankings import RankedTopics, Ranking, RankJournal


class TestFirstStage:
    topics = (Topic("1", "first", {"a": 1}), Topic("2", "second", {"b": 1}))
    collection = Collection(
        {name: Document(id=name, page_content=name * 3, metadata={"title": name}) for name in "abc"}, "digest", {}
    )

    def stage(self, identity="stage"):
        asked = []

        def rank_all(topics, depth):
            for index, topic in enumerate(topics):
                asked.append((topic.id, depth))
                yield index, Ranking(("b", "a")[:depth], (0.75, 0.5)[:depth], 0.5)

        return FirstStage("toy", identity, rank_all), asked

    def test_each_topic_is_asked_once_and_another_depth_or_stage_asks_again(self, tmp_path):
        path = tmp_path / "journal.jsonl"
        stage, asked = self.stage()
        for depth in (2, 2, 1):
            retrieve(stage, self.topics, depth, RankJournal(path))
        assert asked == [("1", 2), ("2", 2), ("1", 1), ("2", 1)]
        other, asked = self.stage("another")
        assert retrieve(other, self.topics, 2, RankJournal(path)).reused == frozenset()
        assert len(asked) == 2

    def test_candidates_are_copies_in_order_with_the_scores_of_the_first_stage(self):
        found = candidates_of(self.topics, retrieve(self.stage()[0], self.topics, 2, RankJournal()), self.collection)
        assert [(d.id, d.page_content, d.metadata) for d in found[0].documents] == [
            ("b", "bbb", {"title": "b", "relevance_score": 0.75}),
            ("a", "aaa", {"title": "a", "relevance_score": 0.5}),
        ]
        assert self.collection.documents["b"].metadata == {"title": "b"}

    def test_a_run_is_a_first_stage_with_as_many_documents_as_are_asked_for(self, tmp_path):
        path = tmp_path / "bm25.trec"
        path.write_text("1 Q0 a 1 12.5 t\n1 Q0 c 2 25 t\n1 Q0 b 3 0 t\n9 Q0 z 1 1 t\n")
        stage, names = run_as_first_stage(path)
        assert names == {"a", "b", "c", "z"}
        found = retrieve(stage, self.topics, 2, RankJournal(tmp_path / "journal.jsonl"))
        assert (found.rankings["1"].ids, found.rankings["1"].scores) == (("c", "a"), (25.0, 12.5))
        assert found.rankings["2"].ids == ()
        assert not (tmp_path / "journal.jsonl").exists()
        documents = candidates_of(self.topics, found, self.collection)[0].documents
        assert [d.metadata["relevance_score"] for d in documents] == [1.0, 0.5]

    def test_a_run_that_names_a_document_that_the_corpus_lacks_is_refused(self):
        found = RankedTopics("first_stage", {"1": Ranking(("z",), (1.0,), 0.0)}, frozenset())
        with pytest.raises(EvaluationError, match="ranks document 'z' for query '1', but the corpus has no such"):
            candidates_of(self.topics[:1], found, self.collection)
