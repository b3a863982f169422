"""Public entry points with wrong values raise ``RagPosfixError`` and nothing else, where the value is given."""

import inspect
import itertools
from pathlib import Path

import pytest
from langchain_core.documents import Document

from rag_posfix import (
    BM25Retriever,
    FaissVectorStore,
    HybridRetriever,
    MitigationChoice,
    PassageRetriever,
    Pipeline,
    PosfixRAG,
    PosfixRetriever,
    Question,
    RagPosfixChatModel,
    RagPosfixError,
    RagPosfixStore,
    Sampling,
    SentenceEmbeddings,
    Settings,
    build_pipeline,
    document_block,
    load_engine,
    read_documents,
)
from rag_posfix.errors import ConfigError, UnknownNameError, UnsupportedModelError
from rag_posfix.pipeline.pipeline import Defaults
from rag_posfix.retrieval.ingest.passages import PassageSize
from rag_posfix.settings import (
    CacheSettings,
    PassageStoreSettings,
    RemoteSettings,
    ServiceSettings,
    TelemetrySettings,
)
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.pipelines import pipeline

DOCUMENT = Document(page_content="Rome lies on the Tiber.", id="rome")
FILE = Path(__file__).parents[2] / "SECURITY.md"
WRONG = [None, -1, 2.5, float("nan"), True, "nope", "", b"x", ["x"], {"a": 1}, object()]


def store():
    return FaissVectorStore.from_texts(["Rome", "Paris"], LetterEmbeddings())


def entry_points():
    """Yield (name, function, arguments that are right)."""
    words, nearest = BM25Retriever.from_documents([DOCUMENT]), PassageRetriever(store=store())
    asked, model = pipeline(), RagPosfixChatModel(generator=pipeline().generator)
    yield "Question", Question, {"text": "Where?", "documents": [DOCUMENT]}
    yield "Sampling", Sampling, {}
    yield "MitigationChoice", MitigationChoice, {"name": "none"}
    yield "Defaults", Defaults, {}
    settings = (Settings, ServiceSettings, CacheSettings, PassageStoreSettings, RemoteSettings, TelemetrySettings)
    for cls in settings:
        yield cls.__name__, cls, {}
    yield "Pipeline.ask", asked.ask, {"question": "Where?", "documents": [DOCUMENT]}
    yield "Pipeline.stream", asked.stream, {"question": "Where?", "documents": [DOCUMENT]}
    yield "PosfixRAG", PosfixRAG, {"pipeline": pipeline()}
    yield "PosfixRAG.invoke", PosfixRAG(pipeline=pipeline()).invoke, {"input": {"question": "Q", "documents": ["x"]}}
    yield "PosfixRetriever", PosfixRetriever, {"base_retriever": words}
    yield "RagPosfixChatModel", RagPosfixChatModel, {"model_name": "smollm2"}
    yield "RagPosfixChatModel.bind_tools", model.bind_tools, {"tools": []}
    yield "RagPosfixChatModel.with_structured_output", model.with_structured_output, {"schema": {}}
    yield "RagPosfixStore", RagPosfixStore, {"cache": object()}
    yield "SentenceEmbeddings", SentenceEmbeddings, {}
    yield "BM25Retriever.from_documents", BM25Retriever.from_documents, {"documents": [DOCUMENT]}
    yield "BM25Retriever.retrieve", words.retrieve, {"question": "Where?", "k": 1}
    yield "PassageRetriever", PassageRetriever, {"store": store()}
    yield "PassageRetriever.retrieve", nearest.retrieve, {"question": "Where?", "k": 1}
    yield "HybridRetriever", HybridRetriever, {"retrievers": [words, nearest]}
    yield "FaissVectorStore", FaissVectorStore, {"embeddings": LetterEmbeddings()}
    yield "FaissVectorStore.from_texts", FaissVectorStore.from_texts, {"texts": ["x"], "embedding": LetterEmbeddings()}
    yield "FaissVectorStore.similarity_search", store().similarity_search, {"query": "Rome", "k": 1}
    mmr = store().max_marginal_relevance_search
    yield "FaissVectorStore.max_marginal_relevance_search", mmr, {"query": "Rome", "k": 1}
    yield "FaissVectorStore.add_documents", store().add_documents, {"documents": [DOCUMENT]}
    yield "FaissVectorStore.load", FaissVectorStore.load, {"folder": "missing", "embeddings": LetterEmbeddings()}
    yield "read_documents", read_documents, {"paths": FILE}
    yield "FaissVectorStore.from_files", FaissVectorStore.from_files, {"paths": FILE, "embeddings": LetterEmbeddings()}
    yield "PassageSize", PassageSize, {}
    yield "Pipeline.preview", asked.preview, {"question": Question("Where?", [DOCUMENT])}
    yield "Pipeline.with_filter", asked.with_filter, {"metadata_filter": {"year": 1}}
    yield "Pipeline.with_tenant", asked.with_tenant, {"tenant": "a"}
    yield "Pipeline.invalidate", asked.invalidate, {"documents": [DOCUMENT]}
    yield "Pipeline.batch", asked.batch, {"questions": [Question("Where?", [DOCUMENT])]}
    yield "document_block", document_block, {"document": DOCUMENT}
    yield "build_pipeline", build_pipeline, {"index": "missing", "generator": pipeline().generator}
    yield "load_engine", load_engine, {"model": "./missing"}


def parameters_of(function):
    if hasattr(function, "model_fields"):  # without those that langchain adds
        return [name for name in function.model_fields if name in inspect.get_annotations(function)]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, value in inspect.signature(function).parameters.items() if value.kind in kinds]


ENTRY_POINTS = {name: (function, arguments) for name, function, arguments in entry_points()}


@pytest.mark.parametrize("name", ENTRY_POINTS)
@pytest.mark.slow
def test_wrong_values_raise_errors_of_this_package_only(name):
    function, arguments = ENTRY_POINTS[name]
    escaped = []
    for parameter, value in itertools.product(parameters_of(function), WRONG):
        try:
            function(**{**arguments, parameter: value})
        except RagPosfixError as error:
            if not str(error):
                escaped.append(f"{name}({parameter}={value!r}): no message")
        except Exception as error:
            escaped.append(f"{name}({parameter}={value!r}): {type(error).__name__}: {error}")
    assert not escaped, "\n".join(escaped)


def test_documents_go_by_position_and_everything_else_by_name():
    asked = pipeline()
    assert [document.id for document in asked.ask("Where does Rome lie?", [DOCUMENT]).documents] == ["rome"]
    *_, last = asked.stream("Where does Rome lie?", [DOCUMENT])
    assert [document.id for document in last.answer.documents] == ["rome"]
    for function in (Question, Pipeline.ask, Pipeline.stream):
        names = inspect.signature(function).parameters
        by_position = [name for name, value in names.items() if value.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        assert [name for name in by_position if name != "self"] in (["text", "documents"], ["question", "documents"])
    with pytest.raises(ConfigError, match="give them to it"):
        asked.ask(Question("Where?"), [DOCUMENT])


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"mitigation": "nope"}, UnknownNameError, "unknown mitigation 'nope'. Did you mean 'none'"),
        ({"mitigation": "context_experts:expertz=3"}, ConfigError, "Did you mean 'experts'"),
        ({"mitigation": "context_experts:experts=0"}, ConfigError, "experts=0 must be a whole number >= 1"),
        ({"order": "revers"}, UnknownNameError, "Did you mean 'reverse'"),
        ({"order": "random:x=1"}, ConfigError, "order random has no parameter 'x'"),
        ({"reranker": "listwize"}, UnknownNameError, "Did you mean 'listwise'"),
    ],
)
@pytest.mark.parametrize("cls", [Settings, Question])
def test_methods_are_checked_where_they_are_named(cls, fields, error, message):
    with pytest.raises(error, match=message):
        cls(**({"text": "Where?"} if cls is Question else {}), **fields)


def test_a_question_takes_methods_as_text_and_answers_with_them():
    question = Question("Where does Rome lie?", [DOCUMENT], mitigation="context_experts:experts=2")
    assert question.mitigation == MitigationChoice("context_experts", {"experts": 2})
    assert pipeline().ask(Question("Where does Rome lie?", [DOCUMENT], mitigation="none")).mitigation == "none"
    assert Sampling(stop="END").stop == ("END",)


def test_a_wrong_variable_is_named_and_a_secret_is_not_shown(monkeypatch):
    monkeypatch.setenv("RAG_POSFIX_SERVICE_PORT", "abc")
    with pytest.raises(ConfigError, match=r"^RAG_POSFIX_SERVICE_PORT='abc' must be a valid integer$"):
        ServiceSettings()
    monkeypatch.setenv("RAG_POSFIX_INDEXES", "{a")
    with pytest.raises(ConfigError, match=r"^RAG_POSFIX_INDEXES='{a' must be JSON"):
        Settings()
    with pytest.raises(ConfigError, match=r"^setting api_key must be ") as caught:
        ServiceSettings(api_key=["hunter2"], port=1)
    assert "hunter2" not in str(caught.value)


def test_tools_are_refused_with_a_reason():
    model = RagPosfixChatModel(generator=pipeline().generator)
    with pytest.raises(UnsupportedModelError, match="takes no tools"):
        model.bind_tools([print])


def test_a_folder_and_one_field_go_as_text(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"note": "x", "story": "Rome lies on the Tiber."}\n', "utf-8")
    (document,) = read_documents(str(tmp_path), fields="text=story")
    assert (document.page_content, document.metadata["note"]) == ("Rome lies on the Tiber.", "x")
