"""The configuration of deployments/ray: what Ray Serve and this program accept, and what is refused."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import yaml
from fastapi.testclient import TestClient
from pydantic import ValidationError

from rag_posfix.errors import ConfigError
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline import build
from rag_posfix.retrieval.embeddings import SentenceEmbeddings
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.settings import ServiceSettings, Settings
from rag_posfix_api.ray_serve.application import (
    ApplicationOptions,
    ModelParts,
    application,
    build_ingress,
    describe_model,
    load_model,
    make_application,
    router_config,
)
from tests.support.toy_encoder import ToyEncoder
from tests.support.waiting import wait_until

# Of Ray's own models, when a test is the first to import them.
pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = yaml.safe_load((ROOT / "deployments" / "ray" / "serve.yaml").read_text())
(APPLICATION,) = CONFIGURATION["applications"]


def test_ray_serve_accepts_the_configuration():
    schema = pytest.importorskip("ray.serve.schema", reason="the extra ray is not installed")
    read = schema.ServeDeploySchema.model_validate(CONFIGURATION)
    assert [one.name for one in read.applications] == ["rag-posfix"]
    assert read.http_options.host == "0.0.0.0"  # a load balancer reaches every machine,
    assert APPLICATION["args"]["allow_anonymous"] is False  # with a key
    assert CONFIGURATION["http_options"]["request_timeout_s"] > ServiceSettings().request_timeout_seconds


def test_its_import_path_is_the_application_and_its_args_are_options():
    name, _, attribute = APPLICATION["import_path"].partition(":")
    assert getattr(sys.modules[name], attribute) is application
    options = ApplicationOptions(**APPLICATION["args"])
    assert options.router == "overlap"
    assert Settings(**options.settings).mitigation == "parallel_windows"
    assert ServiceSettings(**options.service).max_concurrent == 4


def test_the_application_is_made_of_an_ingress_and_a_model(tmp_path):
    pytest.importorskip("ray.serve", reason="the extra ray is not installed")
    from ray.serve._private.build_app import build_app

    service = {"data_dir": str(tmp_path), "max_concurrent": 4}
    args = {**APPLICATION["args"], "service": service, "allow_anonymous": True}
    built = build_app(application(args), name="a", default_runtime_env={})
    model, ingress = sorted(built.deployments, key=lambda one: one.name, reverse=True)
    assert (model.name, ingress.name) == ("Model", "Ingress")
    assert model.max_ongoing_requests == 4 + 32
    assert model.ray_actor_options["num_cpus"] == 1


@pytest.mark.parametrize(("fields", "seconds"), [({}, 310), ({"graceful_shutdown_seconds": 0}, 0)])
def test_replicas_that_are_stopped_finish_their_answers_and_scaling_waits_as_it_is_told(fields, seconds, tmp_path):
    pytest.importorskip("ray.serve", reason="the extra ray is not installed")
    from ray.serve._private.build_app import build_app
    from ray.serve.deployment import deployment_to_schema

    fields |= {"upscale_delay_seconds": 5, "downscale_delay_seconds": 60, "service": {"data_dir": str(tmp_path)}}
    built = build_app(application({"allow_anonymous": True, **fields}), name="a", default_runtime_env={})
    configs = {each.name: deployment_to_schema(each) for each in built.deployments}
    assert {config.graceful_shutdown_timeout_s for config in configs.values()} == {seconds}
    scaling = configs["Model"].autoscaling_config
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (5, 60)


@pytest.mark.parametrize(
    ("fields", "name", "kwargs"),
    [
        ({}, "OverlapRouter", {"queue_weight": 0.25}),
        ({"queue_weight": 1, "router_options": {"max_age_seconds": 5}}, "OverlapRouter",
         {"queue_weight": 1, "max_age_seconds": 5}),
        ({"router": "power_of_two"}, "PowerOfTwoChoicesRequestRouter", {}),
    ],
)  # fmt: skip
def test_the_router_of_the_options_is_one_that_ray_loads(fields, name, kwargs):
    config = pytest.importorskip("ray.serve.config", reason="the extra ray is not installed")
    made = config.RequestRouterConfig(**router_config(ApplicationOptions(sketch_seconds=2, **fields)))
    assert made.get_request_router_class().__name__ == name
    assert made.request_router_kwargs == kwargs
    assert made.request_routing_stats_period_s == 2


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"unknown": 1}, "unknown"),
        ({"max_replicas": 0}, "max_replicas"),
        ({"sketch_seconds": 0}, "sketch_seconds"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas=3 must be at most max_replicas=2"),
    ],
)
def test_wrong_options_are_refused(fields, told):
    with pytest.raises(ValidationError, match=told):
        ApplicationOptions(**fields)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "there is no API key.*or set allow_anonymous"),
        ({"max_replicas": "many"}, "options of the application: max_replicas: Input should be a valid integer"),
        ({"min_replicas": 3}, "options of the application: Value error, min_replicas=3 must be at most"),
        (
            {"allow_anonymous": True, "settings": {"modle": "a"}},
            "Settings has no parameter 'modle'",
        ),
    ],
)
def test_what_cannot_work_is_refused(fields, told, tmp_path):
    service = {"data_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match=told):
        application({"service": service, **fields})


def test_a_model_on_a_server_is_refused():
    with pytest.raises(ConfigError, match="replicas would only pass requests on"):
        describe_model(Settings(model="openai:a@http://127.0.0.1:1/v1"))


def test_the_ingress_knows_the_model_with_its_adapter(tmp_path):
    """Without it the answer cache of the ingress would take the answers of the base for those of the adapter."""
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        describe_model(Settings(adapter=tmp_path))


@pytest.mark.slow
@pytest.mark.weights
def test_the_ingress_alone_opens_the_vector_stores_of_its_environment(tmp_path, monkeypatch):
    pytest.importorskip("ray.serve", reason="the extra ray is not installed")
    from langchain_qdrant import QdrantVectorStore

    for name in ("RAG_POSFIX_RETRIEVER", "RAG_POSFIX_SERVICE_COLLECTION_STORE"):
        QdrantVectorStore.from_texts(
            ["The ferry leaves at nine."], SentenceEmbeddings(), path=str(tmp_path / name), collection_name="docs"
        ).client.close()
        monkeypatch.setenv(name, f"qdrant:path={tmp_path / name},collection=docs")
    options = ApplicationOptions(service={"data_dir": str(tmp_path)}, allow_anonymous=True)
    parts = ModelParts(load_model, lambda settings: FakeGenerator(ToyEncoder()))
    client = TestClient(build_ingress(options, parts, handle=MagicMock()))
    assert client.get("/readyz").status_code == 200
    pipeline = client.app.state.service.pipeline
    (passage,) = pipeline.find_passages("When does the ferry leave?")
    assert passage.page_content == "The ferry leaves at nine."
    assert client.app.state.service.collections.external.identity == "qdrant:docs"
    assert client.post("/v1/collections", json={"name": "notes"}).status_code == 201

    def stop(settings):
        raise ConfigError(f"a replica opens {settings.retriever}")

    monkeypatch.setattr(build, "build_pipeline", stop)
    with pytest.raises(ConfigError, match="a replica opens dense"):
        load_model(Settings())


def test_without_the_extra_the_message_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    parts = ModelParts(lambda settings: None, lambda settings: None)
    with pytest.raises(ConfigError, match=r"ray is not installed.*'\.\[ray,server\]'"):
        make_application(ApplicationOptions(allow_anonymous=True), parts)


@pytest.mark.slow
@pytest.mark.weights
def test_each_ingress_follows_the_folder_of_its_index(tmp_path):
    pytest.importorskip("ray.serve", reason="the extra ray is not installed")

    def write(*texts):
        store = FaissVectorStore.from_texts(list(texts), SentenceEmbeddings())
        store.save(tmp_path / "index")

    write("The ferry leaves at nine.")
    options = ApplicationOptions(
        settings={"index": str(tmp_path / "index")},
        service={"data_dir": str(tmp_path), "index_check_seconds": 0.1},
        allow_anonymous=True,
    )
    parts = ModelParts(load_model, lambda settings: FakeGenerator(ToyEncoder()))
    with ExitStack() as stack:
        ingresses = [
            stack.enter_context(TestClient(build_ingress(options, parts, handle=MagicMock()))) for _ in range(2)
        ]
        write("The ferry leaves at nine.", "The train leaves at noon.")
        for client in ingresses:
            pipeline = client.app.state.service.pipeline
            wait_until(lambda found=pipeline.find_passages: "noon" in str(found("When does the train leave?")))
