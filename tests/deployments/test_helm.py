"""The chart: rendered by Helm's SDK, linted, checked against Kubernetes' schemas, and what it refuses."""

from __future__ import annotations

import json
import re

import helm_python
import httpx2
import kubernetes_validate
import pytest
import yaml

from rag_posfix.checkpoints import WEIGHTS
from rag_posfix.settings import CacheSettings, PassageStoreSettings, ServiceSettings, Settings
from tests.deployments.helm_chart import (
    CHART,
    GOLDEN,
    VALUE_SETS,
    golden_text,
    manifests,
    merged,
    one_of,
    rendered,
    values_of,
)
from tests.support.serving import make_pipeline, post, serving

KUBERNETES = ("1.28", "1.37")
CUSTOM_KINDS = {"ServiceMonitor", "ScaledObject"}
"""Kinds of the Prometheus operator and of KEDA: Kubernetes has no schema of them; fields are asserted below."""
LONGEST_CUT_SECONDS = 5


def pod_of(values):
    return one_of("Deployment", values)["spec"]["template"]["spec"]


def container_of(values):
    (container,) = pod_of(values)["containers"]
    return container


@pytest.mark.parametrize("name", VALUE_SETS)
def test_what_is_rendered_is_the_golden_file(name):
    """After a change that is meant: python -m tests.deployments.helm_chart."""
    assert (GOLDEN / f"{name}.yaml").read_text("utf-8") == golden_text(name)


def test_a_method_is_set_only_where_the_values_name_it(monkeypatch):
    """What is set counts as named, and a large model then keeps the method of small ones."""

    def named(values):
        data = one_of("ConfigMap", values)["data"]
        with monkeypatch.context() as patch:
            for name in ("RAG_POSFIX_MITIGATION", "RAG_POSFIX_ORDER"):
                patch.setenv(name, data[name]) if name in data else patch.delenv(name, raising=False)
            settings = Settings()
        return {name: getattr(settings, name) for name in ("mitigation", "order") if name in settings.model_fields_set}

    laptop = values_of("laptop")
    assert named(laptop) == {}
    chosen = {"mitigation": "none", "order": "reverse"}
    assert named(merged(laptop, {"model": chosen})) == chosen


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_chart_is_linted(name):
    report = helm_python.lint(CHART, values_of(name), strict=True)
    assert report["errors"] == []
    assert [one["error"] for one in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", VALUE_SETS)
def test_kubernetes_schemas_accept_what_is_rendered(name, version):
    found = manifests(values_of(name))
    assert {"Deployment", "Service", "ConfigMap", "ServiceAccount"} <= {one["kind"] for one in found}
    for one in found:
        if one["kind"] not in CUSTOM_KINDS:
            kubernetes_validate.validate(one, version, strict=True)


def test_kubernetes_schemas_would_refuse_a_misspelt_field():
    deployment = one_of("Deployment", values_of("laptop"))
    deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, "1.37", strict=True)


def test_every_object_of_the_schema_refuses_unknown_keys():
    free = []

    def walk(node, path):
        if isinstance(node, dict):
            if node.get("type") == "object" and node.get("additionalProperties") is not False:
                free.append(path)
            for key, value in node.items():
                walk(value, f"{path}/{key}")
        elif isinstance(node, list):
            for number, value in enumerate(node):
                walk(value, f"{path}/{number}")

    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    walk(schema, "")
    maps = ("nnotations", "abels", "nodeSelector")  # names are the user's
    kubernetes = (
        "/properties/affinity/properties/", "/properties/global", "/properties/extraVolume",
        "/properties/networkPolicy/properties/extraEgress",
    )  # fmt: skip
    assert [path for path in free if not path.endswith(maps) and not path.startswith(kubernetes)] == []


def test_every_value_is_in_the_schema_and_every_property_has_a_default():
    def keys(values):
        return {key: keys(value) for key, value in values.items() if isinstance(value, dict)} | {
            key: None for key, value in values.items() if not isinstance(value, dict)
        }

    def described(schema, definitions):
        schema = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        return schema.get("properties", {}), schema

    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    defaults = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))

    def compare(values, node, path):
        properties, _ = described(node, schema["$defs"])
        if not properties or not values:
            return
        assert set(values) - {"cpu", "memory"} <= set(properties), path
        missing = set(properties) - set(values) - {"global", "ephemeral-storage", "cpu"}
        assert not missing, (path, missing)
        for key, value in values.items():
            if isinstance(value, dict):
                compare(value, properties[key], f"{path}/{key}")

    compare(keys(defaults), schema, "")


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_config_map_holds_settings_that_the_service_reads(name, monkeypatch):
    data = one_of("ConfigMap", values_of(name))["data"]
    names = {
        (model.model_config["env_prefix"] + field).upper()
        for model in (Settings, CacheSettings, PassageStoreSettings, ServiceSettings)
        for field in model.model_fields
    }
    assert {key for key in data if key.startswith("RAG_POSFIX_")} <= names
    for key, value in data.items():
        monkeypatch.setenv(key, value)
    service = ServiceSettings()
    assert (service.host, service.port) == ("0.0.0.0", 8000)
    assert Settings().passages.memory_bytes == int(data["RAG_POSFIX_PASSAGES_MEMORY_BYTES"])


@pytest.mark.parametrize("name", VALUE_SETS)
def test_variables_of_the_service_object_do_not_reach_the_settings(name):
    """Kubernetes would set RAG_POSFIX_SERVICE_HOST to the address of a Service called rag-posfix."""
    assert pod_of(values_of(name))["enableServiceLinks"] is False


@pytest.mark.parametrize("name", VALUE_SETS)
def test_probes_ask_the_paths_of_the_service(name):
    container = container_of(values_of(name))
    paths = {probe: container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/readyz", "readiness": "/readyz", "liveness": "/livez"}


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_grace_of_a_pod_is_longer_than_its_drain(name):
    values = values_of(name)
    data = one_of("ConfigMap", values)["data"]
    drain = int(data["RAG_POSFIX_SERVICE_SHUTDOWN_TIMEOUT_SECONDS"])
    assert pod_of(values)["terminationGracePeriodSeconds"] >= drain + LONGEST_CUT_SECONDS + 5


@pytest.mark.parametrize("name", VALUE_SETS)
def test_containers_are_confined(name):
    pod = pod_of(values_of(name))
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["runAsUser"] == 10001
        assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/cache", "/tmp"}


def test_keys_and_collections_of_tenants_are_on_the_claim_that_is_named():
    values = merged(values_of("laptop"), {"data": {"existingClaim": "keys"}})
    (volume,) = [volume for volume in pod_of(values)["volumes"] if volume["name"] == "data"]
    assert volume["persistentVolumeClaim"] == {"claimName": "keys"}
    (mount,) = [mount for mount in container_of(values)["volumeMounts"] if mount["name"] == "data"]
    assert mount["mountPath"] == one_of("ConfigMap", values)["data"]["RAG_POSFIX_SERVICE_DATA_DIR"]
    assert "readOnly" not in mount


def test_weights_are_fetched_by_an_init_container_or_mounted_and_never_both():
    laptop, production = pod_of(values_of("laptop")), pod_of(values_of("production"))
    (fetch,) = laptop["initContainers"]
    assert fetch["command"] == ["rag-posfix", "models", "fetch", "smollm2", "minilm"]
    assert "initContainers" not in production
    assert {"name": "weights", "mountPath": "/weights", "readOnly": True} in production["containers"][0][
        "volumeMounts"
    ]


def test_secrets_are_referred_to_and_never_written():
    values = values_of("production")
    entries = container_of(values)["env"]
    references = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in entries if "valueFrom" in one}
    assert references == {
        "RAG_POSFIX_SERVICE_API_KEY": {"name": "rag-posfix-key", "key": "api-key"},
        "RAG_POSFIX_CACHE_REDIS_URL": {"name": "rag-posfix-redis", "key": "answers-url"},
        "RAG_POSFIX_PASSAGES_REDIS_URL": {"name": "rag-posfix-redis", "key": "passages-url"},
    }
    assert all(one["kind"] != "Secret" for name in VALUE_SETS for one in manifests(values_of(name)))


def test_the_hpa_follows_requests_in_flight_and_never_the_cpu():
    spec = one_of("HorizontalPodAutoscaler", values_of("gpu"))["spec"]
    (metric,) = spec["metrics"]
    assert metric["pods"]["metric"]["name"] == "rag_posfix_in_flight_requests"
    assert metric["pods"]["target"] == {"type": "AverageValue", "averageValue": "6"}
    assert "replicas" not in one_of("Deployment", values_of("gpu"))["spec"]


def test_keda_follows_the_time_in_the_queue_and_the_requests_in_flight():
    spec = one_of("ScaledObject", values_of("production"))["spec"]
    queue, in_flight = (trigger["metadata"] for trigger in spec["triggers"])
    assert {trigger["type"] for trigger in spec["triggers"]} == {"prometheus"}
    assert 'rag_posfix_queue_duration_seconds_bucket{work="answer",namespace="rag"' in queue["query"]
    assert queue["threshold"] == "1"
    assert in_flight["query"].startswith("sum(rag_posfix_in_flight_requests{")
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (4, 24)


def test_the_metrics_that_scale_are_metrics_of_the_service():
    with serving(make_pipeline()) as url:
        assert post(url).status_code == 200
        text = httpx2.get(f"{url}/metrics", timeout=60).text
    assert "rag_posfix_in_flight_requests 0.0" in text
    assert re.search(r'^rag_posfix_queue_duration_seconds_bucket\{.*work="answer".*\} 1.0$', text, re.MULTILINE)


def test_only_dns_and_redis_may_be_reached():
    spec = one_of("NetworkPolicy", values_of("production"))["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    dns, redis = spec["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    assert [port["port"] for port in redis["ports"]] == [6379]
    assert redis["to"] == values_of("production")["networkPolicy"]["redisTo"]


def test_the_service_monitor_scrapes_the_port_of_the_service():
    values = values_of("production")
    spec = one_of("ServiceMonitor", values)["spec"]
    (endpoint,) = spec["endpoints"]
    (port,) = one_of("Service", values)["spec"]["ports"]
    assert port["name"] == "http", "metrics are not in the Service: they need no key"
    ports = {port["name"]: port["containerPort"] for port in container_of(values)["ports"]}
    assert (ports[endpoint["targetPort"]], endpoint["path"]) == (9464, "/metrics")
    labels = one_of("Service", values)["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()


def test_metrics_are_served_without_a_key_only_where_prometheus_is_to_scrape_them():
    values = values_of("laptop")
    assert [port["name"] for port in container_of(values)["ports"]] == ["http"]
    assert "RAG_POSFIX_SERVICE_METRICS_ADDRESS" not in one_of("ConfigMap", values)["data"]


def test_a_gpu_pod_asks_for_its_gpus_and_is_replaced_without_a_spare_one():
    values = merged(values_of("gpu"), {"gpu": {"count": 2}, "model": {"tensorParallel": 2}})
    assert container_of(values)["resources"]["limits"]["nvidia.com/gpu"] == 2
    strategy = one_of("Deployment", values)["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxSurge": 0, "maxUnavailable": 1}
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container_of(values)["volumeMounts"]


QDRANT = "qdrant:url=http://qdrant.search:6333,collection=docs"


def test_vector_stores_are_settings_and_those_with_passwords_are_in_a_secret():
    settings = {"retriever": QDRANT, "existingSecret": "stores", "collectionStoreKey": "collections"}
    values = merged(values_of("laptop"), {"retrieval": settings})
    assert one_of("ConfigMap", values)["data"]["RAG_POSFIX_RETRIEVER"] == QDRANT
    (entry,) = [one for one in container_of(values)["env"] if "valueFrom" in one]
    reference = {"secretKeyRef": {"name": "stores", "key": "collections"}}
    assert entry == {"name": "RAG_POSFIX_SERVICE_COLLECTION_STORE", "valueFrom": reference}
    plain = merged(values_of("laptop"), {"retrieval": {"collectionStore": QDRANT, "retriever": "hybrid"}})
    data = one_of("ConfigMap", plain)["data"]
    assert (data["RAG_POSFIX_SERVICE_COLLECTION_STORE"], data["RAG_POSFIX_RETRIEVER"]) == (QDRANT, "hybrid")
    assert not {"RAG_POSFIX_RETRIEVER", "RAG_POSFIX_SERVICE_COLLECTION_STORE"} & set(
        one_of("ConfigMap", values_of("laptop"))["data"]
    )


def test_vector_store_may_be_reached_where_the_network_is_closed():
    peers = [{"podSelector": {"matchLabels": {"app": "qdrant"}}}]
    changes = {"index": {"existingClaim": ""}, "retrieval": {"retriever": QDRANT}}
    values = merged(values_of("production"), {**changes, "networkPolicy": {"vectorStoreTo": peers}})
    *_, store = one_of("NetworkPolicy", values)["spec"]["egress"]
    assert (store["to"], store["ports"]) == (peers, [{"protocol": "TCP", "port": 6333}])


REFUSED = [
    ("laptop", {"replica": 2}, "replica"),
    ("laptop", {"model": {"dtyp": "float32"}}, "dtyp"),
    ("laptop", {"probes": {"startup": {"path": "/"}}}, "path"),
    ("laptop", {"replicas": 0}, "replicas"),
    ("laptop", {"replicas": "2"}, "replicas"),
    ("laptop", {"image": {"tag": "latest"}}, "tag"),
    ("laptop", {"image": {"digest": "sha256:12"}}, "digest"),
    ("laptop", {"auth": {"allowAnonymous": False}}, "auth"),
    ("laptop", {"securityContext": {"runAsUser": 0}}, "runAsUser"),
    ("laptop", {"autoscaling": {"engine": "cpu"}}, "engine"),
    ("laptop", {"drain": {"marginSeconds": 1}}, "marginSeconds"),
    ("laptop", {"cache": {"passagesMemoryBytes": 100}}, "passagesMemoryBytes"),
    ("laptop", {"extraEnv": [{"name": "RAG_POSFIX_CACHE_REDIS_URL", "value": "redis://:p@h"}]}, "extraEnv"),
    ("laptop", {"extraEnv": [{"name": "RAG_POSFIX_SERVICE_PORT", "value": "1"}]}, "extraEnv"),
    ("laptop", {"weights": {"source": "volume"}}, "needs weights.existingClaim"),
    ("laptop", {"redis": {"existingSecret": "r"}}, "model.dtype=auto with redis.existingSecret"),
    ("laptop", {"drain": {"noticeSeconds": 11}}, "drain.noticeSeconds=11 must be at most drain.timeoutSeconds=10"),
    ("laptop", {"model": {"device": "cuda"}}, "model.device=cuda needs gpu.enabled=true"),
    ("laptop", {"replicas": 2}, "data.maxCollections=100 with up to 2 replicas: each replica would have"),
    ("production", {"data": {"maxCollections": 1}}, "data.maxCollections=1 with up to 24 replicas"),
    ("laptop", {"podDisruptionBudget": {"enabled": True}}, "needs two replicas or more, there may be 1"),
    ("laptop", {"networkPolicy": {"enabled": True}}, "weights.source=fetch needs networkPolicy.weightsTo"),
    ("gpu", {"gpu": {"count": 2}}, "model.tensorParallel=1 must be gpu.count=2"),
    ("gpu", {"auth": {"allowAnonymous": True}}, "contradict each other"),
    ("gpu", {"autoscaling": {"minReplicas": 9}}, "autoscaling.minReplicas=9 must be at most"),
    ("gpu", {"autoscaling": {"inFlightPerPod": 40}}, "autoscaling.inFlightPerPod=40 is never exceeded"),
    ("gpu", {"podDisruptionBudget": {"maxUnavailable": 2}}, "must be below the 2 replicas"),
    ("production", {"autoscaling": {"keda": {"prometheusAddress": ""}}}, "needs autoscaling.keda.prometheusAddress"),
    ("production", {"networkPolicy": {"redisTo": []}}, "needs networkPolicy.redisTo"),
    ("laptop", {"retrieval": {"retriever": "faiss"}}, "retriever"),
    ("laptop", {"retrieval": {"retriever": "qdrant:url=http://q,collection=a,api_key=b"}}, "retriever"),
    (
        "laptop",
        {"retrieval": {"collectionStore": "pgvector:url=postgresql://a:b@c/d,collection=e"}},
        "collectionStore",
    ),
    ("laptop", {"retrieval": {"retrieverKey": "a"}}, "each of these needs retrieval.existingSecret"),
    ("laptop", {"retrieval": {"existingSecret": "a"}}, "retrieval.existingSecret needs retrieval.retrieverKey"),
    ("laptop", {"retrieval": {"existingSecret": "a", "retrieverKey": "b", "retriever": "hybrid"}}, "are both set"),
    ("production", {"retrieval": {"retriever": QDRANT}}, "questions are answered from one of them"),
    ("production", {"retrieval": {"collectionStore": QDRANT}}, "needs networkPolicy.vectorStoreTo"),
    ("laptop", {"extraEnv": [{"name": "RAG_POSFIX_RETRIEVER", "value": "bm25"}]}, "extraEnv"),
    ("laptop", {"extraEnv": [{"name": "HF_TOKEN", "value": "hf_1"}]}, "extraEnv"),
    ("laptop", {"extraEnv": [{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "b"}}}]}, "extraEnv"),
    ("laptop", {"extraVolumes": ["data"]}, "extraVolumes"),
    ("laptop", {"data": {"size": "1"}}, "size"),
    ("laptop", {"weights": {"source": "hub"}}, "weights.source=hub needs weights.hub"),
    ("laptop", {"weights": {"source": "hub", "hub": [{"repository": "Qwen/a"}]}}, "revision"),
    ("laptop", {"weights": {"source": "s3", "s3": {"uri": "s3://a"}}}, "and weights.s3.image"),
    ("laptop", {"weights": {"s3": {"image": "aws-cli:2.31.0"}}}, "image"),
    ("laptop", {"indexJob": {"enabled": True}}, "indexJob.enabled needs index.existingClaim or index.size"),
    ("laptop", {"ingress": {"enabled": True}}, "ingress.enabled needs ingress.hosts"),
    ("laptop", {"httpRoute": {"enabled": True}}, "httpRoute.enabled needs httpRoute.parentRefs"),
    ("laptop", {"ray": {"enabled": True}}, "data.maxCollections=100 with ray.enabled"),
    ("gpu", {"ray": {"enabled": True}}, "set autoscaling.engine=none"),
    (
        "laptop",
        {"data": {"maxCollections": 0}, "ray": {"enabled": True, "minReplicas": 2}},
        "ray.minReplicas=2 must be",
    ),
]


@pytest.mark.parametrize("model", WEIGHTS)
@pytest.mark.parametrize("key", ["name", "embeddingModel"])
def test_a_packaged_model_that_nothing_fetches_is_refused(key, model):
    """The pod would look for its weights in an empty cache, and end at its start."""
    folders = {"name": "/weights/a", "embeddingModel": "/weights/b"}
    named = {"model": {**folders, key: model}, "weights": {"names": [*WEIGHTS]}}
    assert pod_of(merged(values_of("laptop"), named))["initContainers"][0]["command"][3:] == [*WEIGHTS]
    not_named = merged(named, {"weights": {"names": sorted({*WEIGHTS} - {model})}})
    for values in (merged(values_of("gpu"), named), merged(values_of("laptop"), not_named)):
        with pytest.raises(helm_python.HelmError) as refused:
            rendered(values)
        assert f"model.{key}={model} is a packaged model, which nothing would fetch" in str(refused.value)


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED, ids=[json.dumps(each[1]) for each in REFUSED])
def test_values_that_cannot_work_are_refused(name, changes, message):
    with pytest.raises(helm_python.HelmError) as refused:
        rendered(merged(values_of(name), changes))
    assert message in str(refused.value)


def test_the_chart_without_a_decision_about_keys_is_refused():
    with pytest.raises(helm_python.HelmValuesError, match="auth"):
        rendered({})
