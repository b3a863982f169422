import math
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytrec_eval

from rag_posfix.errors import ConfigError, EvaluationError, UnknownNameError
from rag_posfix.evaluation.data.collection import read_run
from rag_posfix.evaluation.ranking.rankings import RerankerChoice, local_ranker, open_reranker
from rag_posfix.evaluation.ranking.reranking import evaluate_reranking, render_page
from rag_posfix.evaluation.record import read_record
from rag_posfix.pipeline.build import build_reranker_models
from rag_posfix.settings import Settings
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.rerank_data import CORPUS, QRELS, write_collection

EMBEDDING = RerankerChoice("embedding")
MEASURES = ("nDCG@10", "RR@10", "R@10", "P@1")


@pytest.fixture
def embeddings(monkeypatch):
    made = LetterEmbeddings()
    monkeypatch.setattr("rag_posfix.pipeline.build.SentenceEmbeddings", lambda model, **_: made)
    return made


@pytest.fixture
def evaluate(tmp_path, embeddings):
    def call(rerankers=(EMBEDDING,), collection=None, **options):
        folder = write_collection(tmp_path / "beir", **(collection or {}))
        options = {"out": tmp_path / "out", "depth": 3, "settings": Settings(), **options}
        return evaluate_reranking(folder, list(rerankers), **options).to_json()

    return call


def without_time(found):
    return {name: value for name, value in found.items() if "seconds" not in name and name != "reused"}


def test_measures_in_the_result_are_those_of_the_run_files_by_trec_eval(evaluate):
    found = evaluate(measures="AP")
    qrels = {}
    for query, document, grade in QRELS:
        qrels.setdefault(query, {})[document] = grade
    names = {"nDCG@10": "ndcg_cut_10", "RR@10": "recip_rank", "R@10": "recall_10", "P@1": "P_1", "AP": "map"}
    for one in (found["first_stage"], found["runs"]["embedding"]):
        run = {query: dict(ranked) for query, ranked in read_run(Path(one["run_file"])).items()}
        theirs = pytrec_eval.RelevanceEvaluator(qrels, set(names.values())).evaluate(run)
        for ours, trec_name in names.items():
            assert one[ours] == pytest.approx(math.fsum(row[trec_name] for row in theirs.values()) / len(qrels)), ours
        assert one["seconds"] > 0
        assert one["queries_without_documents"] == 0
    assert found["n"] == 3
    assert found["first_stage"]["name"] == "bm25"


def test_the_record_says_what_ran_on_what_and_holds_a_row_per_query_and_run(evaluate, tmp_path):
    found = evaluate([EMBEDDING, RerankerChoice("embedding", {"top_n": 1})], depth=2)
    written = read_record(Path(found["record"]))
    record = written.head
    assert record["kind"] == "rerank"
    assert {"versions", "git", "at", "python"} <= set(record)
    assert all(len(part["sha256"]) == 64 for part in record["data"].values())
    assert str(tmp_path) not in Path(found["record"]).read_text("utf-8"), "a path says nothing elsewhere"
    assert Path(found["record"]).with_name(record["summary"]["first_stage"]["run_file"]).is_file()
    assert record["rerankers"] == {"embedding": {}, "embedding:top_n=1": {"top_n": 1}}
    assert (record["settings"]["depth"], record["settings"]["first_stage"]) == (2, "bm25")
    assert record["counts"]["documents_without_text"] == 1
    rows = {(row["run"], row["query"]): row for row in written.rows}
    assert len(rows) == len(written.rows) == 3 * 3
    assert set(MEASURES) < set(rows["first_stage", "1"])
    assert rows["first_stage", "1"]["documents"] == ["d1", "d4"]
    assert [len(rows["embedding:top_n=1", query]["documents"]) for query in "123"] == [1, 1, 1]
    assert not any(row["reused"] for row in written.rows)
    for label in ("first_stage", "embedding", "embedding:top_n=1"):
        one = {**record["summary"]["runs"], "first_stage": record["summary"]["first_stage"]}[label]
        for name in MEASURES:
            assert one[name] == pytest.approx(sum(rows[label, query][name] for query in "123") / 3)
    pairs = {(one["a"], one["b"]) for one in record["summary"]["significance"]}
    assert pairs == {
        ("embedding", "first_stage"), ("embedding:top_n=1", "first_stage"), ("embedding:top_n=1", "embedding")
    }  # fmt: skip


@pytest.mark.slow
def test_the_same_job_again_computes_nothing_and_finds_the_same(evaluate, embeddings):
    first = evaluate(first_stage="dense")
    texts = len(embeddings.texts)
    again = evaluate(first_stage="dense")
    assert len(embeddings.texts) == texts
    assert (again["runs"]["embedding"]["reused"], again["first_stage"]["reused"]) == (3, 3)
    assert without_time(again["runs"]["embedding"]) == without_time(first["runs"]["embedding"])
    more = evaluate([EMBEDDING, RerankerChoice("embedding", {"top_n": 2})], first_stage="dense")
    assert [more["runs"][label]["reused"] for label in more["runs"]] == [3, 0]
    fresh = evaluate(first_stage="dense", fresh=True)
    assert fresh["runs"]["embedding"]["reused"] == 0


@pytest.mark.slow
def test_other_documents_are_another_first_stage_and_other_candidates(evaluate):
    evaluate(first_stage="dense")
    changed = [*CORPUS[:-1], {"_id": "d5", "text": "Bread and a bridge, a lighthouse and a river."}]
    found = evaluate(first_stage="dense", collection={"corpus": changed})
    assert found["first_stage"]["reused"] == 0
    assert evaluate(depth=2)["first_stage"]["reused"] == 0


def test_embedding_the_documents_goes_on_where_it_was_interrupted(evaluate, embeddings, monkeypatch):
    monkeypatch.setattr("rag_posfix.evaluation.ranking.first_stage.DOCUMENTS_PER_BATCH", 1)
    monkeypatch.setattr("rag_posfix.evaluation.ranking.first_stage.BATCHES_PER_SAVE", 1)
    embed = LetterEmbeddings.embed_documents

    def interrupted(self, texts):
        if len(self.texts) == 2:
            raise KeyboardInterrupt
        return embed(self, texts)

    with monkeypatch.context() as patched:
        patched.setattr(LetterEmbeddings, "embed_documents", interrupted)
        with pytest.raises(KeyboardInterrupt):
            evaluate([], first_stage="dense")
    done = list(embeddings.texts)
    evaluate([], first_stage="dense")
    texts = embeddings.texts
    assert len(done) == 2
    assert len(set(texts)) == len(texts) == 4  # the document without text is not embedded


def test_hybrid_and_bm25_take_parameters_and_say_what_they_take(evaluate):
    hybrid = evaluate([], first_stage="hybrid:fusion=score:k1=1.2")
    assert hybrid["first_stage"]["name"] == "hybrid"
    assert hybrid["runs"] == {}
    assert hybrid["significance"] == []
    for name, said in [("dense", "It takes: none"), ("bm25", "It takes: k1, b"), ("hybrid", "It takes: fusion")]:
        with pytest.raises(ConfigError, match=f"first stage {name} has no parameter 'depth'.*{said}"):
            evaluate([], first_stage=f"{name}:depth=3")
    with pytest.raises(ConfigError, match="first stage hybrid: fusion='none' must be 'rank' or 'score', or None"):
        evaluate([], first_stage="hybrid:fusion=none")


@pytest.mark.parametrize("first_stage", ["bm25:k1=null:b=null", "hybrid:fusion=null:weights=null:candidates=null"])
def test_a_parameter_that_is_null_has_its_default(evaluate, first_stage):
    default = evaluate([], first_stage=first_stage.partition(":")[0])
    assert without_time(evaluate([], first_stage=first_stage)["first_stage"]) == without_time(default["first_stage"])


def test_a_query_without_candidates_scores_zero_and_is_counted(evaluate):
    collection = {"queries": [{"_id": "1", "text": "lighthouse"}, {"_id": "2", "text": "zzz"}]}
    found = evaluate(collection=collection)
    for one in (found["first_stage"], found["runs"]["embedding"]):
        assert one["queries_without_documents"] == 1
        assert one["P@1"] == 0.5
        assert set(read_run(Path(one["run_file"]))) == {"1"}


def test_a_run_of_another_system_is_reranked_and_only_its_documents_are_needed(evaluate, tmp_path, embeddings):
    run = tmp_path / "theirs.trec"
    run.write_text("1 Q0 d4 1 9 x\n1 Q0 d2 2 8 x\n2 Q0 d3 1 7.5 x\n3 Q0 d2 1 7 x\n3 Q0 d4 2 7 x\n")
    found = evaluate(first_stage=run)
    assert found["first_stage"]["name"] == "theirs.trec"
    assert found["first_stage"]["seconds"] == 0.0
    # Equal scores: trec_eval puts d4 before d2.
    assert [name for name, _ in read_run(Path(found["first_stage"]["run_file"]))["3"]] == ["d4", "d2"]
    assert set(embeddings.texts) == {
        "A lighthouse keeper bakes bread near the bridge.", "The Ostrel bridge crosses the river Venn.",
        "Rye bread from Tull is baked for nine hours.",
    }  # fmt: skip
    run.write_text("1 Q0 gone 1 9 x\n")
    with pytest.raises(EvaluationError, match="ranks document 'gone' for query '1', but the corpus has no such"):
        evaluate(first_stage=run)


def test_judged_documents_that_nobody_can_find_lower_recall_and_are_counted(evaluate):
    found = evaluate(collection={"qrels": [("1", "d1", 1), ("1", "gone", 1)]})
    assert found["counts"]["judged_documents_not_in_corpus"] == 1
    assert found["runs"]["embedding"]["R@10"] == 0.5


def test_with_ray_rerankers_run_there_and_rankings_go_to_the_same_journal(evaluate, monkeypatch):
    asked = []

    @contextmanager
    def ray_rankers(settings, actors):
        asked.append(actors)
        parts = build_reranker_models(settings)
        yield lambda choice: local_ranker(open_reranker(choice, parts))

    monkeypatch.setattr("rag_posfix.evaluation.ranking.reranking.ray_rankers", ray_rankers)
    there = evaluate(first_stage="hybrid:k1=1.2", ray=True, ray_actors=5)
    assert asked == [5]
    assert read_record(Path(there["record"])).head["settings"]["ray"] is True
    here = evaluate(first_stage="hybrid:k1=1.2")
    for one, other in ((here["first_stage"], there["first_stage"]), (here["runs"], there["runs"])):
        one, other = one.get("embedding", one), other.get("embedding", other)
        assert one["reused"] == 3
        assert without_time(one) == without_time(other)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"depth": 0}, ConfigError, "depth=0 must be at least 1"),
        (
            {"first_stage": "splade"},
            UnknownNameError,
            "first stage 'splade' must be one of bm25, dense, hybrid",
        ),
        ({"measures": "nDGC@10"}, ConfigError, "unknown measure 'nDGC@10'"),
        ({"collection": {"qrels": [("8", "d1", 1)]}}, EvaluationError, "no query of"),
        (
            {"collection": {"corpus": [{"_id": "a", "text": " "}]}},
            EvaluationError,
            "no document of the corpus has",
        ),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_loaded_or_written(
    evaluate, tmp_path, embeddings, options, kind, said
):
    with pytest.raises(kind, match=said):
        evaluate(**options)
    assert embeddings.texts == []
    assert not (tmp_path / "out").exists()


def test_what_names_hold_is_text_on_the_page_and_no_markup(evaluate):
    found = evaluate()
    record = read_record(Path(found["record"]))
    record.head["data"]["corpus"]["name"] = "<script>alert(1)</script>"
    for row in record.rows:
        row["query"] = f"<b>&{row['query']}"
    page = render_page(record.head, record.rows, b"")
    assert ("<script" in page, "<b>" in page, "&lt;script&gt;alert(1)" in page) == (False, False, True)
    written = Path(found["page"]).read_text("utf-8")
    assert re.findall(r'(?:src|href)="(.{22})', written) == ["data:image/png;base64,"]
    for words in ("embedding", "first_stage", "nDCG@10", "3 topics of", "p (Holm)", "bm25"):
        assert words in written
    assert Path(found["png"]).read_bytes().startswith(b"\x89PNG")


def test_without_a_folder_nothing_is_written_and_the_same_is_found(tmp_path, evaluate, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = evaluate(first_stage="dense")
    before = sorted(tmp_path.rglob("*"))
    found = evaluate(first_stage="dense", out=None)
    assert sorted(tmp_path.rglob("*")) == before
    assert "record" not in found
    assert found["runs"]["embedding"]["run_file"] is None
    for one in ("nDCG@10", "ci95", "queries"):
        assert found["runs"]["embedding"][one] == written["runs"]["embedding"][one]


@pytest.mark.slow
def test_bm25_alone_needs_no_model_library(tmp_path):
    folder = write_collection(tmp_path / "beir")
    code = (
        "import sys; from pathlib import Path; from rag_posfix.evaluation import evaluate_reranking; "
        f"found = evaluate_reranking(Path({str(folder)!r}), [], depth=3).summary['first_stage']['queries']; "
        "print(found, [name for name in ('torch', 'transformers', 'faiss') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "3 []\n"
