"""The service in front of vLLM: the Compose file and the chart's values name settings that start, without a model."""

from __future__ import annotations

import itertools
import re
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from rag_posfix.generation.remote.address import parse_remote
from rag_posfix.pipeline.build import build_pipeline
from rag_posfix.settings import RemoteSettings, Settings
from tests.support.compose_file import compose_parser, with_defaults
from tests.support.helm_chart import manifests, one_of

FOLDER = Path(__file__).resolve().parents[2] / "deployments" / "vllm"
COMPOSE = (FOLDER / "compose.yaml").read_text("utf-8")
VALUES = yaml.safe_load((FOLDER / "values.yaml").read_text("utf-8"))


def settings_of(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Settings:
    """Read the settings of a container, in a folder of this test."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return Settings(cache_dir=tmp_path, remote=RemoteSettings())


def check(settings: Settings) -> None:
    """The settings make a pipeline that judges on the server; nothing is loaded or sent for that."""
    with closing(build_pipeline(settings)) as pipeline:
        assert pipeline.generator.model_id == "served"
        assert pipeline.generator.context_window == 8192
        assert getattr(pipeline.reranker, "name", "") == "yes_no"
        assert (pipeline.defaults.order, pipeline.defaults.mitigation.name) == ("reverse", "none")
    assert settings.remote.concurrency == 64


def test_the_compose_specification_accepts_the_file():
    parsed = compose_parser()(with_defaults(COMPOSE))
    parsed.validate()
    assert {"service", "vllm-0", "vllm-1"} <= set(parsed.service_names())


def test_the_containers_settings_start_without_a_model(monkeypatch, tmp_path):
    service = yaml.safe_load(with_defaults(COMPOSE))["services"]["service"]
    environment = {
        name: value for name, value in service["environment"].items() if not name.startswith("RAG_POSFIX_SERVICE_")
    }
    check(settings_of(environment, monkeypatch, tmp_path))
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_server_and_service_agree_on_name_and_window():
    services = yaml.safe_load(with_defaults(COMPOSE))["services"]
    assert services["vllm-0"]["command"] == services["vllm-1"]["command"]
    command = services["vllm-0"]["command"]
    options = dict(itertools.pairwise(command))
    assert options["--served-model-name"] == "served"
    assert options["--max-model-len"] == services["service"]["environment"]["RAG_POSFIX_REMOTE_CONTEXT_WINDOW"]
    assert all("ports" not in services[name] for name in ("vllm-0", "vllm-1")), "only the service is reachable"


def test_the_service_names_each_server_and_each_server_has_a_gpu_of_its_own():
    services = yaml.safe_load(with_defaults(COMPOSE))["services"]
    servers = {name: each for name, each in services.items() if name.startswith("vllm")}
    model = parse_remote(services["service"]["environment"]["RAG_POSFIX_MODEL"])
    hosts = [urlsplit(url).hostname for url in model.urls]
    assert sorted(hosts) == sorted(servers) == sorted(services["service"]["depends_on"])
    devices = [each["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for each in servers.values()]
    assert len({tuple(ids) for ids in devices}) == len(servers)
    assert len(parse_remote(VALUES["model"]["name"]).urls) == 2


def test_every_variable_is_in_the_example():
    used = set(re.findall(r"\$\{(\w+)", COMPOSE))
    example = (FOLDER / ".env.example").read_text("utf-8")
    assert used == set(re.findall(r"^(\w+)=", example, re.MULTILINE))
    assert "RAG_POSFIX_SERVICE_API_KEY=\n" in example


def test_the_chart_renders_the_values_and_the_pod_starts_with_them(monkeypatch, tmp_path):
    assert {"Deployment", "Service", "ConfigMap"} <= {each["kind"] for each in manifests(VALUES)}
    (container,) = one_of("Deployment", VALUES)["spec"]["template"]["spec"]["containers"]
    shared = next(each["data"] for each in manifests(VALUES) if each["kind"] == "ConfigMap")
    environment = {**shared, **{each["name"]: each["value"] for each in container["env"] if "value" in each}}
    used = {
        name: value
        for name, value in environment.items()
        if name.startswith("RAG_POSFIX_") and not name.startswith(("RAG_POSFIX_SERVICE_", "RAG_POSFIX_CACHE_DIR"))
    }
    check(settings_of(used, monkeypatch, tmp_path))
