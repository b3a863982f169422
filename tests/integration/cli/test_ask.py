"""``ask``, and the answers that ``cache`` keeps."""

from __future__ import annotations

import pytest

QUESTION = "Who designed the Maravel lighthouse?"


@pytest.mark.slow
@pytest.mark.weights
def test_the_real_model_answers_from_the_right_passage_and_prints_it(run, index):
    found = run("ask", QUESTION, "--index", index, "--min-relevance", "off", "--max-tokens", "16", "--json").json
    assert "Ilse Korvanth" in found["answer"]
    assert found["documents"][0]["attention"] > 0.5
    assert found["citations"][0]["document_ids"] == ["lighthouse"]
    printed = run("ask", QUESTION, "--index", index, "--max-tokens", "16")
    assert printed.code == 0
    assert "Ilse Korvanth" in printed.out
    assert "facts.jsonl" in printed.out


class TestAsk:
    @pytest.fixture
    def index(self, tiny_index):
        return tiny_index

    def test_json_holds_the_answer_and_where_it_comes_from(self, run, index):
        result = run("ask", QUESTION, "--index", index, "--max-tokens", "16", "--json")
        assert result.code == 0
        found = result.json
        assert {"answer", "documents", "citations", "usage", "cached", "mitigation", "order", "timings"} <= set(found)
        assert found["answer"]
        assert (found["mitigation"], found["order"], found["cached"]) == ("context_experts", "relevance", False)
        assert [document["position"] for document in found["documents"]] == [0, 1, 2]
        assert set(found["documents"][0]) == {
            "id", "score", "position", "attention", "weight", "title", "source", "page", "pages", "page_starts", "text"
        }  # fmt: skip
        assert found["documents"][0]["id"] == "lighthouse"
        assert sum(document["attention"] for document in found["documents"]) == pytest.approx(1)
        assert set(found["usage"]) == {"prompt_tokens", "completion_tokens", "cached_tokens"}
        assert {"retrieve", "assemble", "cache", "queue", "prefill", "decode"} == set(found["timings"])

    @pytest.mark.slow
    def test_the_second_time_the_answer_comes_from_the_cache_on_disk_if_there_is_one(
        self, run, index, cache_dir, monkeypatch
    ):
        arguments = ["ask", QUESTION, "--index", index, "--max-tokens", "4", "--json"]
        assert run(*arguments).json["cached"] is False
        assert run(*arguments).json["cached"] is False  # answers are kept in memory only
        assert not (cache_dir / "answers").exists()
        monkeypatch.setenv("RAG_POSFIX_KEEP_ON_DISK", "true")
        assert run(*arguments).json["cached"] is False
        assert run(*arguments).json["cached"] is True
        assert run(*arguments, "--no-cache").json["cached"] is False

    def test_a_filter_by_a_field_that_no_passage_has_names_the_fields_that_there_are(self, run, index):
        result = run("ask", QUESTION, "--index", index, "--filter", "colour=red", "--filter", "end=58")
        assert result.code == 3
        assert "no passage has the field 'colour'; fields: end, source, start, title" in " ".join(result.out.split())
        assert "no passage has" not in run("ask", QUESTION, "--index", index, "--filter", "end=1").out
        shown = run("prompt", QUESTION, "--index", index, "--filter", "colour=red")
        assert "no passage has the field 'colour'" in " ".join(shown.err.split())

    def test_the_options_choose_method_order_and_number(self, run, index):
        found = run(
            "ask", QUESTION, "--index", index, "--mitigation", "context_experts:experts=1:pool=max", "--order",
            "reverse", "--k", "2", "--max-tokens", "1", "--json",
        ).json  # fmt: skip
        assert (found["order"], len(found["documents"])) == ("reverse", 2)
        assert found["documents"][0]["score"] < found["documents"][1]["score"]
        assert found["usage"]["completion_tokens"] == 1

    def test_a_reranker_chooses_among_what_was_retrieved(self, run, index):
        options = ["--reranker", "likelihood:batch_size=2", "--max-tokens", "2", "--no-cache", "--json"]
        all_three = run("ask", QUESTION, "--index", index, *options).json["documents"]
        assert len(all_three) == 3
        best = max(all_three, key=lambda document: document["score"])
        found = run("ask", QUESTION, "--index", index, "--k", "1", *options).json
        assert [document["id"] for document in found["documents"]] == [best["id"]]
        assert 0 < found["documents"][0]["score"] < 1
        assert "rerank" in found["timings"]

    def test_without_a_passage_it_says_so_and_ends_with_3_unless_memory_is_allowed(self, run, index):
        arguments = ["ask", "Zyzzyva?", "--index", index, "--retriever", "bm25", "--max-tokens", "2"]
        for options in ([], ["--stream"]):
            result = run(*arguments, *options)
            assert (result.code, result.out.splitlines()[0]) == (3, "No passage was found that answers this question.")
            assert "--allow-ungrounded answers from its memory" in result.out
        refused = run(*arguments, "--json")
        assert (refused.code, refused.json["grounded"], refused.json["usage"]["prompt_tokens"]) == (3, False, 0)
        allowed = run(*arguments, "--allow-ungrounded", "--json")
        assert (allowed.code, allowed.json["grounded"], allowed.json["documents"]) == (0, False, [])
        assert allowed.json["usage"]["completion_tokens"] > 0

    def test_without_json_answer_and_sources_are_printed(self, run, index):
        plain = run("ask", QUESTION, "--index", index, "--max-tokens", "16")
        streamed = run("ask", QUESTION, "--index", index, "--max-tokens", "16", "--stream", "--no-cache")
        for result in (plain, streamed):
            assert result.code == 0
            assert "[1] " in result.out
            assert "facts.jsonl" in result.out
            assert "prompt tokens" in result.out
        assert plain.out.splitlines()[0] == streamed.out.splitlines()[0]


class TestCache:
    def test_answers_are_counted_and_cleared(self, run, cache_dir):
        from rag_posfix.caching.answers.tiered import build_answer_cache
        from rag_posfix.settings import CacheSettings

        cache = build_answer_cache(CacheSettings(disk_bytes=10_000_000), cache_dir)  # of a process with other settings
        cache.put("one", {"text": "1"})
        cache.put("two", {"text": "2"})
        cache.close()
        assert run("cache", "stats", "--json").json["tiers"][1]["entries"] == 2
        assert "disk" in run("cache", "stats").out
        assert run("cache", "clear").out == "dropped 2 answers and 0 passages\n"
        assert run("cache", "stats", "--json").json["tiers"][1]["entries"] == 0

    def test_a_cache_that_is_turned_off_is_an_error(self, run, monkeypatch):
        monkeypatch.setenv("RAG_POSFIX_CACHE_ENABLED", "false")
        assert run("cache", "stats", "--json").error["type"] == "CacheError"
        assert run("cache", "clear", "--json").error["type"] == "CacheError"

    def test_passages_on_disk_are_counted_and_cleared(self, run, cache_dir, monkeypatch):
        from rag_posfix.caching.kv.store import build_passage_store
        from rag_posfix.settings import PassageStoreSettings
        from tests.support.passages import entry

        monkeypatch.setenv("RAG_POSFIX_PASSAGES_DISK_BYTES", "1000000")
        store = build_passage_store(PassageStoreSettings(), cache_dir)
        store.put_many({"one": entry(1), "two": entry(2), "three": entry(3)})
        store.close()
        found = run("cache", "stats", "--json").json["passages"]
        assert [(tier["name"], tier["entries"]) for tier in found["tiers"]] == [("memory", 0), ("disk", 3)]
        assert found["bytes"] == found["tiers"][1]["bytes"] > 3 * entry().n_bytes
        assert "passages" in run("cache", "stats").out
        monkeypatch.setenv("RAG_POSFIX_CACHE_ENABLED", "false")
        assert run("cache", "stats", "--json").json["tiers"] == []
        assert run("cache", "clear", "--json").json == {"cleared": 0, "cleared_passages": 3}
        assert run("cache", "stats", "--json").json["passages"]["bytes"] == 0

    def test_a_passage_store_that_is_turned_off_is_none(self, run, monkeypatch):
        monkeypatch.setenv("RAG_POSFIX_PASSAGES_ENABLED", "false")
        assert run("cache", "stats", "--json").json["passages"] is None
        assert run("cache", "clear", "--json").json == {"cleared": 0, "cleared_passages": 0}
