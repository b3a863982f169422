"""The service in front of vLLM: the Compose file and the chart's values name settings that start, without a model."""

from __future__ import annotations

import importlib.util
import itertools
import re
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from fastapi.testclient import TestClient

from rag_posfix.checkpoints import WEIGHTS, fetched_folder
from rag_posfix.cli import index
from rag_posfix.generation.remote.connection import parse_remote
from rag_posfix.pipeline.build import build_pipeline
from rag_posfix.settings import RemoteSettings, Settings
from rag_posfix_api.app import create_app
from tests.deployments.compose_file import compose_parser, with_defaults
from tests.deployments.helm_chart import manifests, one_of
from tests.support.command_line import command_line
from tests.support.serving import limits
from tests.support.waiting import wait_until

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
    assert {"service", "weights", "vllm-0", "vllm-1"} <= set(parsed.service_names())


def container_of_compose() -> tuple[dict[str, str], list[str]]:
    """Return the environment of the service and the command that fetches its weights, from the Compose file."""
    services = yaml.safe_load(with_defaults(COMPOSE))["services"]
    weights, service = services["weights"], services["service"]
    assert service["depends_on"]["weights"] == {"condition": "service_completed_successfully"}
    assert (weights["image"], weights["build"]) == (service["image"], service["build"])
    assert "cache:/cache" in weights["volumes"]
    assert "cache:/cache" in service["volumes"]
    networks = yaml.safe_load(COMPOSE)["networks"]
    assert not any(networks[name].get("internal") for name in weights["networks"]), "it reaches the package index"
    return service["environment"], weights["command"]


def container_of_chart() -> tuple[dict[str, str], list[str]]:
    """Return the same from the chart with the values of this folder."""
    pod = one_of("Deployment", VALUES)["spec"]["template"]["spec"]
    (container,), (fetch,) = pod["containers"], pod["initContainers"]
    shared = next(each["data"] for each in manifests(VALUES) if each["kind"] == "ConfigMap")
    own = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    return shared | own, fetch["command"]


def fetch_into(cache: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsysbinary) -> None:
    """Run the command that fetches weights in the state of a first start: none in site-packages, an empty cache.

    What it would fetch is linked from the packages that are installed here.
    """
    find_spec = importlib.util.find_spec
    sites = {
        package: Path(next(iter(find_spec(package).submodule_search_locations)))
        for name in ("smollm2", "minilm")
        for package in WEIGHTS[name].packages
    }

    def link(name: str, folder: Path) -> None:
        target = fetched_folder(name, folder)
        target.mkdir(parents=True)
        for package in WEIGHTS[name].packages:
            (target / package).symlink_to(sites[package])

    monkeypatch.setattr(index, "fetch", link)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in sites else find_spec(name, *more)
    )
    monkeypatch.setenv("RAG_POSFIX_CACHE_DIR", str(cache))
    program, *arguments = command
    assert program == "rag-posfix"
    assert command_line(capsysbinary)(*arguments)[0] == 0


@pytest.mark.weights
@pytest.mark.parametrize("container", [container_of_compose, container_of_chart], ids=["compose", "chart"])
def test_the_service_starts_with_the_weights_that_are_fetched_for_it(container, monkeypatch, tmp_path, capsysbinary):
    """It embeds a question when it starts; the servers of the model may still be down then."""
    environment, command = container()
    fetch_into(tmp_path, command, monkeypatch, capsysbinary)
    urls = parse_remote(environment["RAG_POSFIX_MODEL"]).urls
    nobody = ",".join(f"http://127.0.0.1:{port}/v1" for port, _ in enumerate(urls, start=1))
    used = {
        name: value
        for name, value in environment.items()
        if name.startswith("RAG_POSFIX_") and not name.startswith(("RAG_POSFIX_SERVICE_", "RAG_POSFIX_CACHE_DIR"))
    }
    used |= {"RAG_POSFIX_MODEL": f"openai:served@{nobody}", "RAG_POSFIX_REMOTE_RETRIES": "0"}
    app = create_app(settings_of(used, monkeypatch, tmp_path), service=limits(data_dir=tmp_path / "data"))
    service = app.state.service
    with TestClient(app) as client:
        wait_until(lambda: service.is_ready or service.failure is not None, seconds=120)
        assert service.failure is None
        assert client.get("/readyz").status_code == 200


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
    assert sorted(hosts) == sorted(servers) == sorted(set(services["service"]["depends_on"]) - {"weights"})
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
    environment, _ = container_of_chart()
    used = {
        name: value
        for name, value in environment.items()
        if name.startswith("RAG_POSFIX_") and not name.startswith(("RAG_POSFIX_SERVICE_", "RAG_POSFIX_CACHE_DIR"))
    }
    check(settings_of(used, monkeypatch, tmp_path))
