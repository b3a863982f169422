"""What the chart makes beyond the Deployment: routes, claims, the index Job, monitoring, weights, and a RayService."""

from __future__ import annotations

import json
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from rag_posfix.settings import ServiceSettings, Settings
from rag_posfix_api.ray_serve.application import ApplicationOptions
from tests.deployments.helm_chart import manifests, merged, one_of, rendered, values_of

ROOT = Path(__file__).resolve().parents[2]
CUSTOM_KINDS = {"HTTPRoute", "PrometheusRule", "RayService"}
"""Kinds without a schema in Kubernetes; fields are asserted below."""
TOKEN = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
KEY = {"name": "RAG_POSFIX_REMOTE_API_KEY", "valueFrom": {"secretKeyRef": {"name": "engine", "key": "api-key"}}}
FOLDERS = {"name": "/weights/Qwen2.5-7B-Instruct", "embeddingModel": "/weights/all-MiniLM-L6-v2"}
AWS_CLI = "docker.io/amazon/aws-cli:2.31.0@sha256:" + "0" * 64
DOCUMENTS = {
    "extraVolumes": [{"name": "documents", "persistentVolumeClaim": {"claimName": "documents", "readOnly": True}}],
    "extraVolumeMounts": [{"name": "documents", "mountPath": "/documents", "readOnly": True}],
}
EVERYTHING = {
    "model": FOLDERS,
    "ingress": {"enabled": True, "className": "nginx", "hosts": ["answers.example"], "tlsSecret": "certificate"},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway", "namespace": "web"}]},
    "data": {"size": "1Gi"},
    "index": {"size": "5Gi", "storageClassName": "fast", "accessMode": "ReadWriteMany"},
    "indexJob": {"enabled": True, "args": ["--passage-tokens", "200"]},
    "weights": {
        "source": "hub", "size": "40Gi", "hub": [{"repository": "Qwen/Qwen2.5-7B-Instruct", "revision": "a0"}],
        "env": [TOKEN],
    },
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True},
    "extraEnv": [KEY],
    **DOCUMENTS,
}  # fmt: skip
RAY = {"data": {"maxCollections": 0}, "ray": {"enabled": True, "workers": 2, "maxReplicas": 4}}


def rendered_with(*changes, name="laptop"):
    values = values_of(name)
    for change in changes:
        values = merged(values, change)
    return values


@pytest.fixture(scope="module")
def everything():
    return rendered_with(EVERYTHING)


@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_kubernetes_schemas_accept_every_object(everything, version):
    objects = manifests(everything) + manifests(merged(everything, {"indexJob": {"schedule": "0 3 * * *"}}))
    kinds = {each["kind"] for each in objects}
    assert {"Ingress", "HTTPRoute", "PersistentVolumeClaim", "Job", "CronJob", "PrometheusRule"} <= kinds
    for each in objects:
        if each["kind"] not in CUSTOM_KINDS:
            kubernetes_validate.validate(each, version, strict=True)


def test_routes_lead_to_the_service_and_wait_longer_than_it_does(everything):
    service = one_of("Service", everything)
    name, (port,) = service["metadata"]["name"], [port["port"] for port in service["spec"]["ports"]]
    ingress = one_of("Ingress", everything)["spec"]
    (path,) = ingress["rules"][0]["http"]["paths"]
    assert path["backend"]["service"] == {"name": name, "port": {"number": port}}
    assert ingress["tls"] == [{"secretName": "certificate", "hosts": ["answers.example"]}]
    (rule,) = one_of("HTTPRoute", everything)["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": name, "port": port}]
    assert int(rule["timeouts"]["request"].removesuffix("s")) > ServiceSettings().request_timeout_seconds


def test_claims_that_the_chart_makes_are_mounted_and_stay_with_their_data(everything):
    claims = {
        each["metadata"]["name"]: each for each in manifests(everything) if each["kind"] == "PersistentVolumeClaim"
    }
    assert all(each["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"} for each in claims.values())
    index = claims["answers-rag-posfix-index"]["spec"]
    assert index["resources"]["requests"]["storage"] == "5Gi"
    assert (index["storageClassName"], index["accessModes"]) == ("fast", ["ReadWriteMany"])
    deployment = one_of("Deployment", everything)["spec"]
    volumes = {each["name"]: each for each in deployment["template"]["spec"]["volumes"]}
    mounted = {volumes[part]["persistentVolumeClaim"]["claimName"] for part in ("data", "index", "weights")}
    assert mounted == set(claims)
    assert deployment["strategy"]["rollingUpdate"]["maxSurge"] == 0  # one pod writes the data
    named = merged(everything, {"index": {"existingClaim": "mine"}})
    assert "answers-rag-posfix-index" not in {each["metadata"]["name"] for each in manifests(named)}


def test_init_containers_have_the_settings_and_their_own_variables_and_may_reach_the_hub(everything):
    pod = one_of("Deployment", everything)["spec"]["template"]["spec"]
    (fetch,), (service,) = pod["initContainers"], pod["containers"]
    assert fetch["envFrom"] == service["envFrom"]
    assert fetch["env"] == [{"name": "HF_HUB_OFFLINE", "value": "0"}, TOKEN]
    assert service["env"] == [KEY]
    assert " ".join(fetch["command"]) == (
        "hf download Qwen/Qwen2.5-7B-Instruct --revision a0 --local-dir /weights/Qwen2.5-7B-Instruct"
    )
    mounts = {each["name"]: each.get("readOnly", False) for each in fetch["volumeMounts"]}
    assert mounts["weights"] is False
    assert {each["name"]: each.get("readOnly", False) for each in service["volumeMounts"]}["weights"] is True


@pytest.mark.parametrize("source", ["fetch", "s3"])
def test_init_containers_have_no_secret_of_the_service(source):
    named = rendered_with(
        {"weights": {"source": source, "s3": {"uri": "s3://bucket/models", "image": AWS_CLI}}},
        {
            "model": (FOLDERS if source == "s3" else {}) | {"dtype": "float32"},
            "auth": {"existingSecret": "key", "allowAnonymous": False},
            "extraEnv": [KEY],
        },
        {"redis": {"existingSecret": "redis"}, "index": {"size": "1Gi"}, "indexJob": {"enabled": True}, **DOCUMENTS},
    )
    pods = [one_of(kind, named)["spec"]["template"]["spec"] for kind in ("Deployment", "Job")]
    assert [pod["initContainers"][0]["env"] for pod in pods] == [[{"name": "HF_HUB_OFFLINE", "value": "0"}]] * 2


def test_weights_come_from_a_bucket_by_an_image_that_is_named():
    source = {"source": "s3", "s3": {"uri": "s3://bucket/models", "image": AWS_CLI}}
    pod = one_of("Deployment", rendered_with({"model": FOLDERS, "weights": source}))["spec"]["template"]["spec"]
    (fetch,) = pod["initContainers"]
    assert (fetch["image"], fetch["command"][-2:]) == (AWS_CLI, ["s3://bucket/models", "/weights"])
    (volume,) = [each for each in pod["volumes"] if each["name"] == "weights"]
    assert volume == {"name": "weights", "emptyDir": {}}


def test_the_index_job_writes_the_claim_that_the_service_reads(everything):
    (job,) = one_of("Job", everything)["spec"]["template"]["spec"]["containers"]
    mounts = {each["name"]: each for each in job["volumeMounts"]}
    assert mounts["index"] == {"name": "index", "mountPath": "/index", "readOnly": False}
    assert mounts["documents"]["mountPath"] in job["args"]
    assert "data" not in mounts
    assert (
        job["args"][job["args"].index("--out") + 1]
        == one_of("ConfigMap", without_dashboard(everything))["data"]["RAG_POSFIX_INDEX"]
    )
    cron = one_of("CronJob", merged(everything, {"indexJob": {"schedule": "0 3 * * *"}}))["spec"]
    assert cron["jobTemplate"]["spec"]["template"]["spec"]["containers"] == [job]
    assert (cron["schedule"], cron["concurrencyPolicy"]) == ("0 3 * * *", "Forbid")
    selector = one_of("Deployment", everything)["spec"]["selector"]["matchLabels"].items()
    labels = one_of("Job", everything)["spec"]["template"]["metadata"]["labels"].items()
    assert not selector <= labels, "the Service would send questions to the Job"


def without_dashboard(values):
    return merged(values, {"dashboard": {"enabled": False}})


def test_alerts_and_dashboard_are_the_shipped_files(everything):
    rule = one_of("PrometheusRule", everything)
    assert rule["spec"] == yaml.safe_load((ROOT / "deployments/prometheus/alerts.yml").read_text("utf-8"))
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    (dashboard,) = [each for each in manifests(everything) if each["metadata"]["name"].endswith("-dashboard")]
    shipped = json.loads((ROOT / "deployments/grafana/rag-posfix.json").read_text("utf-8"))
    assert json.loads(dashboard["data"]["rag-posfix.json"]) == shipped
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_egress_rules_of_ones_own_are_added_to_the_others():
    engine = {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"protocol": "TCP", "port": 8443}]}
    values = rendered_with({"networkPolicy": {"extraEgress": [engine]}}, name="production")
    policy = one_of("NetworkPolicy", values)
    assert policy["spec"]["egress"][-1] == engine
    assert len(policy["spec"]["egress"]) == 3
    kubernetes_validate.validate(policy, "1.37", strict=True)


@pytest.mark.slow
def test_a_ray_service_is_what_ray_serve_and_the_application_take(tmp_path):
    schema = pytest.importorskip("ray.serve.schema", reason="the extra ray is not installed")
    values = rendered_with(RAY, {"ingress": {"enabled": True, "hosts": ["a.example"]}})
    kinds = {each["kind"] for each in manifests(values)}
    assert not {"Deployment", "Service"} & kinds
    spec = one_of("RayService", values)["spec"]
    config = yaml.safe_load(spec["serveConfigV2"])
    (application,) = schema.ServeDeploySchema.model_validate(config).applications
    options = ApplicationOptions(**application.args)
    assert (options.min_replicas, options.max_replicas, options.downscale_delay_seconds) == (1, 4, 600)
    assert config["http_options"]["host"] == "0.0.0.0"
    assert config["http_options"]["request_timeout_s"] > ServiceSettings().request_timeout_seconds
    cluster = spec["rayClusterConfig"]
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text("utf-8").split()
    assert cluster["authOptions"] == {"mode": "token"}
    (path,) = one_of("Ingress", values)["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"] == {"name": "answers-rag-posfix-serve-svc", "port": {"number": 8000}}


@pytest.mark.parametrize("ray", [False, True], ids=["deployment", "ray"])
def test_the_notes_name_what_is_there(ray):
    changes = [RAY] if ray else []
    values = rendered_with({"ingress": {"enabled": True, "hosts": ["a.example"]}}, *changes)
    notes = rendered(values)["NOTES.txt"]
    (path,) = one_of("Ingress", values)["spec"]["rules"][0]["http"]["paths"]
    backend = path["backend"]["service"]
    assert f"port-forward service/{backend['name']} 8000:{backend['port']['number']}\n" in notes
    assert f"at port {backend['port']['number']} of the Service" in notes
    commands = {"RayService": "get rayservice ", "Deployment": "rollout status deployment/"}
    kind, other = ("RayService", "Deployment") if ray else ("Deployment", "RayService")
    assert f"{commands[kind]}{one_of(kind, values)['metadata']['name']}\n" in notes
    assert commands[other] not in notes


def test_other_settings_are_another_cluster_of_ray():
    def nodes(*changes):
        cluster = one_of("RayService", rendered_with(RAY, *changes))["spec"]["rayClusterConfig"]
        return [group["template"]["metadata"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]

    before, after = nodes(), nodes({"model": {"maxTokens": 99}})
    assert len({node["annotations"]["checksum/settings"] for node in (*before, *after)}) == 2
    for node in nodes({"podLabels": {"team": "search"}, "podAnnotations": {"reviewed": "yes"}}):
        assert (node["labels"]["team"], node["annotations"]["reviewed"]) == ("search", "yes")


def test_nodes_of_ray_are_pods_with_the_environment_of_the_service():
    values = rendered_with(RAY, {"autoscaling": {"engine": "none"}}, name="gpu")
    values = merged(values, {"podDisruptionBudget": {"enabled": False}, "serviceMonitor": {"enabled": False}})
    cluster = one_of("RayService", values)["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["maxReplicas"] == 2
    for template in (cluster["headGroupSpec"]["template"], workers["template"]):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "a", **template["metadata"]},
            "spec": template["spec"],
        }
        kubernetes_validate.validate(pod, "1.37", strict=True)
        (container,) = template["spec"]["containers"]
        assert container["envFrom"] == [{"configMapRef": {"name": "answers-rag-posfix"}}]
        assert template["spec"]["terminationGracePeriodSeconds"] > ServiceSettings().request_timeout_seconds
        assert container["livenessProbe"]["exec"]["command"][0] == "python"
        assert "readinessProbe" in container  # else KubeRay adds one with wget, which the image does not have
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    data = one_of("ConfigMap", values)["data"]
    assert Settings(model=data["RAG_POSFIX_MODEL"]).model == "/weights/qwen2.5-7b-instruct"
