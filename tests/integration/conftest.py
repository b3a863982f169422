from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.redis_server import RedisServer


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """A running, empty Redis."""
    shared_redis.command("FLUSHALL")
    return shared_redis


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random model with a chat template. It writes nonsense."""
    from tests.support.tool_models import save_chat_model

    return save_chat_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def tiny(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands of this process use that model, counts of letters for vectors, and every passage that they find."""
    monkeypatch.setattr("rag_posfix.pipeline.build.SentenceEmbeddings", lambda name, **_: LetterEmbeddings(name))
    monkeypatch.setenv("RAG_POSFIX_MODEL", str(tiny_model))
    monkeypatch.setenv("RAG_POSFIX_MIN_RELEVANCE", "off")
    return tiny_model


@pytest.fixture(scope="session")
def packaged_metadata() -> dict[str, Any]:
    """Tokenizer and shape of the packaged model, by dtype and device."""
    return {}


@pytest.fixture(autouse=True)
def _weights_are_read_once(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, packaged_metadata: dict[str, Any]
) -> None:
    """Pipelines that tests build on the packaged weights in this process share those of ``engine``."""
    if request.node.get_closest_marker("weights") is None:
        return
    import rag_posfix
    from rag_posfix.generation import deferred, load
    from rag_posfix.generation.engine import Engine
    from rag_posfix.pipeline import build

    engine: Engine = request.getfixturevalue("engine")
    originals = load.load_engine, load.read_metadata

    def load_engine(model: str = "smollm2", *, cache_dir: Any = None, **options: Any) -> Engine:
        if model == "smollm2" and all(value in (None, "auto") for value in options.values()):
            return Engine(engine.loaded, engine.encoder, engine.model_id, engine.fingerprint)
        return originals[0](model, cache_dir=cache_dir, **options)

    def read_metadata(model: str, *, adapter: Any = None, cache_dir: Any, **options: str) -> Any:
        if model != "smollm2" or adapter is not None:
            return originals[1](model, adapter=adapter, cache_dir=cache_dir, **options)
        key = repr(sorted(options.items()))
        if key not in packaged_metadata:
            packaged_metadata[key] = originals[1](model, cache_dir=cache_dir, **options)
        return packaged_metadata[key]

    for module in (rag_posfix, load, build):
        monkeypatch.setattr(module, "load_engine", load_engine, raising=False)
    for module in (deferred, load, build):
        monkeypatch.setattr(module, "read_metadata", read_metadata)
