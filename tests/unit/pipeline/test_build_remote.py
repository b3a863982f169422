"""A pipeline whose model is on a server: what works, and what is refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document

from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.pipeline import build as module
from rag_posfix.pipeline.build import build_engine, build_pipeline
from rag_posfix.pipeline.pipeline import Pipeline, Question
from rag_posfix.settings import RemoteSettings, Settings
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.upstream import Reply, Upstream, as_json, error, first_passage, judging, streamed, upstream, whole

TEXTS = ("Bread is baked in ovens.", "Paris lies on the Seine.", "Rome lies on the Tiber.")
SCORED = [
    Document(page_content=text, id=text[:4], metadata={"relevance_score": 1 / (2 + i)}) for i, text in enumerate(TEXTS)
]


@pytest.fixture
def server() -> Iterator[Upstream]:
    with upstream(first_passage) as found:
        yield found


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pipeline]:
    monkeypatch.setattr(module, "SentenceEmbeddings", lambda _name, **_: LetterEmbeddings())

    def built(model: str, **changes: Any) -> Pipeline:
        return build_pipeline(Settings(**{"model": model, "mitigation": "none", "cache_dir": tmp_path, **changes}))

    return built


def test_documents_are_scored_and_put_in_the_order_asked_for(build, server: Upstream):
    unscored = [Document(page_content=text) for text in TEXTS]
    with closing(build(server.model, order="reverse")) as pipeline:
        answer = pipeline.ask(Question("Rome lies where?", documents=unscored))
    scores = [document.score for document in answer.documents]
    assert scores == sorted(scores)
    assert len(set(scores)) == 3
    content = server.bodies[0]["messages"][-1]["content"]
    assert sorted(TEXTS, key=content.index) == [document.text for document in answer.documents]
    assert answer.text == answer.documents[0].text
    assert answer.mitigation == "none"


@pytest.mark.parametrize(("reason", "cached"), [("eos", True), ("ran_out_of_ink", False)])
def test_an_answer_that_ended_for_an_unknown_reason_is_not_cached_and_warns(build, reason: str, cached: bool):
    with upstream(whole("On the Tiber.", reason)) as server, closing(build(server.model)) as pipeline:
        question = Question("Where is Rome?", documents=SCORED)
        answer = pipeline.ask(question)
        assert answer.cached is False
        assert any("a reason that is not known" in warning for warning in answer.warnings) is not cached
        assert pipeline.ask(question).cached is cached
    with upstream(streamed("On the Tiber.", finish=reason)) as server, closing(build(server.model)) as pipeline:
        question = Question("Where is Paris?", documents=SCORED)
        list(pipeline.stream(question))
        assert list(pipeline.stream(question))[-1].answer.cached is cached


def test_an_order_by_scores_makes_the_answer_independent_of_the_given_order(build, server: Upstream):
    with closing(build(server.model, order="reverse")) as pipeline:
        found = {
            pipeline.ask(Question("Where?", documents=documents, use_cache=False)).text
            for documents in (SCORED, SCORED[::-1], [SCORED[1], SCORED[0], SCORED[2]])
        }
    assert found == {TEXTS[2]}
    assert len(server.bodies) == 3


def test_quotes_are_cited_and_nothing_is_attributed_by_attention(build, server: Upstream):
    with closing(build(server.model)) as pipeline:
        answer = pipeline.ask(Question("Where?", documents=SCORED))
    assert [(one.text, one.document_ids, one.origin) for one in answer.citations] == [
        ("Bread is baked in ovens.", ("Brea",), "quote")
    ]
    assert [document.attention for document in answer.documents] == [0.0, 0.0, 0.0]


def test_answers_are_cached_by_url_and_name(build, server: Upstream):
    question = Question("Where?", documents=SCORED)
    with closing(build(server.model)) as first, closing(build(server.model.replace("tiny", "other"))) as other_name:
        assert not first.ask(question).cached
        assert first.ask(question).cached
        assert not other_name.ask(question).cached
        with upstream(streamed("x")) as elsewhere, closing(build(elsewhere.model)) as other_url:
            assert not list(other_url.stream(question))[-1].answer.cached
            assert list(other_url.stream(question))[-1].answer.cached
    assert len(server.bodies) == 2


def test_documents_are_judged_by_the_server_and_the_best_are_read(build, server: Upstream):
    odds = {"Bread": -3.0, "Paris": 2.0, "Rome": 1.0}

    def judging_server(body: dict[str, Any]) -> Reply:
        if not body.get("logprobs"):
            return first_passage(body)
        content = body["messages"][-1]["content"]
        value = next((odds[word] for word in odds if word in content), 0.0)
        return as_json(judging("Yes", {"Yes": value - 5, "No": -5.0}))

    server.replies[:] = [judging_server]
    with closing(build(server.model, reranker="yes_no:top_n=2", order="reverse")) as pipeline:
        questions = [Question("Where?", documents=[Document(text) for text in texts]) for texts in permutations(TEXTS)]
        answers = [pipeline.ask(question) for question in questions]
    assert {tuple(document.text for document in answer.documents) for answer in answers} == {(TEXTS[2], TEXTS[1])}
    assert {answer.text for answer in answers} == {TEXTS[2]}
    judged = [body for body in server.bodies if body.get("logprobs")]
    assert len(judged) == 5, "three passages, none, and one that finds the form; judgements are cached"
    assert answers[0].usage.prompt_tokens == 40 + 5 * 10
    assert answers[1].usage.prompt_tokens == 40


@pytest.fixture
def build_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Pipeline]:
    """Build a pipeline of a model alone, as ``--model`` does."""
    monkeypatch.setattr(module, "SentenceEmbeddings", lambda _name, **_: LetterEmbeddings())
    return lambda model: build_pipeline(Settings(model=model, cache_dir=tmp_path))


def test_a_model_on_a_server_needs_no_other_setting(build_default, server: Upstream, caplog):
    """Six passages; the odds grow with their number, so the best five are 1 to 5, the best last."""

    def judging_server(body: dict[str, Any]) -> Reply:
        if not body.get("logprobs"):
            return first_passage(body)
        number = next((n for n in range(6) if f"Ship {n} " in body["messages"][-1]["content"]), 0)
        return as_json(judging("Yes", {"Yes": number - 5.0, "No": -5.0}))

    server.replies[:] = [judging_server]
    ships = [Document(f"Ship {number} sank.") for number in (3, 0, 5, 1, 4, 2)]
    with closing(build_default(server.model)) as pipeline:
        answer = pipeline.ask(Question("Which?", documents=ships))
    assert [document.text for document in answer.documents] == [f"Ship {number} sank." for number in range(1, 6)]
    (line,) = [record.getMessage() for record in caplog.records if record.name == "rag_posfix.pipeline.defaults"]
    assert "judges each passage and reads the best five: 12 requests for a question with 10 passages" in line


def test_a_server_without_log_probabilities_reads_the_best_by_embedding(build_default, server: Upstream, caplog):
    server.replies[:] = [lambda body: first_passage(body) if "messages" in body else error(404, "no such route")]
    with closing(build_default(server.model)) as pipeline:
        pipeline.ask(Question("Where?", documents=[Document(text) for text in TEXTS]))
        asked = len(server.bodies)
        pipeline.ask(Question("Where is it?", documents=[Document(text) for text in TEXTS]))
    assert len(server.bodies) == asked + 1, "what the server gives is asked once"
    assert "it gives no log-probabilities, so it reads the best five by embedding: one request" in caplog.text


def test_a_named_order_or_reranker_reads_one_plain_prompt(build_default, server: Upstream, tmp_path: Path):
    with closing(build_pipeline(Settings(model=server.model, order="reverse", cache_dir=tmp_path))) as pipeline:
        assert pipeline.ask(Question("Where?", documents=SCORED)).mitigation == "none"
    assert len(server.bodies) == 1


def test_a_removed_document_drops_its_judgements(build, server: Upstream):
    server.replies[:] = [lambda body: as_json(judging("Yes", {"Yes": -1.0, "No": -2.0}))]
    documents = [Document(text) for text in TEXTS[:2]]
    with closing(build(server.model, reranker="yes_no")) as pipeline:
        for expected in (4, 0, 1):
            server.bodies.clear()
            pipeline.preview(Question("Where?", documents=documents))
            assert len(server.bodies) == expected
            if expected == 0:
                pipeline.invalidate(documents[:1])


def test_settings_of_the_server_are_used(build, server: Upstream):
    remote = RemoteSettings(api_key="sk-1", context_window=500, max_tokens_field="max_completion_tokens")
    with closing(build(server.model, remote=remote, max_tokens=9)) as pipeline:
        assert pipeline.generator.context_window == 500
        pipeline.ask(Question("Where?", documents=SCORED))
    assert server.headers[0]["authorization"] == "Bearer sk-1"
    assert server.bodies[0]["max_completion_tokens"] == 9
    assert "sk-1" not in repr(remote)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mitigation": "default"}, UnsupportedModelError, r"set mitigation='none' .*order='reverse'"),
        ({"mitigation": "parallel_encoding"}, UnsupportedModelError, "'parallel_encoding' needs the weights"),
        ({"reranker": "attention_sorting"}, ConfigError, "one of the rerankers cross_encoder, embedding, endpoint"),
        ({"reranker": "in_context"}, ConfigError, "one of the rerankers cross_encoder, embedding, endpoint"),
        ({"tp": 2}, ConfigError, "tp splits weights in this process"),
        ({"device_map": "auto"}, ConfigError, "device_map splits weights in this process"),
    ],
)
def test_what_needs_the_weights_is_refused_at_construction(build, server: Upstream, changes, error, message):
    with pytest.raises(error, match=message):
        build(server.model, **changes)
    assert server.bodies == []


def test_a_question_with_another_method_is_refused_before_a_request(build, server: Upstream):
    with closing(build(server.model)) as pipeline:
        question = Question("Where?", documents=SCORED, mitigation=module.MitigationChoice("default"))
        with pytest.raises(UnsupportedModelError, match="mitigation='none'"):
            pipeline.stream(question)
    assert server.bodies == []


def test_what_reads_weights_says_that_there_are_none():
    with pytest.raises(UnsupportedModelError, match=r"is on a server, .*eval positions and permutations"):
        build_engine(Settings(model="openai:m@http://127.0.0.1:1/v1"))
