"""The dashboard and the alert rules ask only for metrics, labels and values that a running service exposes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from langchain_core.documents import BaseDocumentCompressor

from rag_posfix.caching.answers.tiered import TieredAnswerCache
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.reranking import GuardedReranker
from rag_posfix.settings import Settings
from rag_posfix_api.app import create_app
from rag_posfix_api.http import errors
from tests.services.promql import Exposed, exposed_by, problems
from tests.support.serving import BRIDGE, CHAT, WordReranker, chat, limits, make_pipeline

DEPLOYMENTS = Path(__file__).resolve().parents[2] / "deployments"
DASHBOARD = json.loads((DEPLOYMENTS / "grafana" / "rag-posfix.json").read_text("utf-8"))
RULES = [
    rule
    for group in yaml.safe_load((DEPLOYMENTS / "prometheus" / "alerts.yml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
SPECS = errors.ERRORS.values()
"""What the service answers where a request fails."""
CLOSED = {
    "code": frozenset({"ok", *(spec.code for spec in SPECS)}),
    "dialect": frozenset({"none", "openai", "responses", "anthropic", "cohere", "jina", "vllm", "tei"}),
    "work": frozenset({"answer", "score"}),
    "kind": frozenset({"read", "reused", "generated", "prompt", "cached", "completion"}),
    "result": frozenset({"hit", "miss", "off", "skipped"}),
    "reason": frozenset({"error", "timeout"}),
    "action": frozenset({"write", "read"}),
}


@pytest.fixture(scope="module")
def exposed() -> Exposed:
    """What a service exposes that has answered and reranked."""

    class Words(BaseDocumentCompressor):
        def compress_documents(self, documents: Any, query: str, callbacks: Any = None) -> Any:
            return WordReranker().compress_documents(documents, query)

    pipeline = make_pipeline(
        reranker=GuardedReranker(reranker=Words()),
        cache=TieredAnswerCache([MemoryTier(max_entries=10)]),
        passages=PassageStore([MemoryTier(10**6)]),
    )
    app = create_app(Settings(), pipeline, limits())
    with TestClient(app) as client:
        assert client.post(CHAT, json=chat(documents=[BRIDGE])).status_code == 200
        assert client.post("/v1/rerank", json={"query": "a", "documents": ["a"]}).status_code == 200
        return exposed_by(app.state.service.metrics.registry, CLOSED)


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions_of_the_dashboard() -> Iterator[tuple[str, str]]:
    for panel in panels():
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]


def filled(expression: str) -> str:
    """Return an expression with the variables of the dashboard replaced, as Grafana does."""
    failures = variables()["failures"]["query"]
    return expression.replace("$__rate_interval", "5m").replace("$instance", ".*").replace("$failures", failures)


def variables() -> Mapping[str, Mapping[str, Any]]:
    return {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}


@pytest.mark.parametrize(
    "expression",
    [pytest.param(expression, id=where) for where, expression in expressions_of_the_dashboard()],
)
def test_a_panel_asks_for_what_exists(expression: str, exposed: Exposed):
    assert problems(filled(expression), exposed) == []
    assert "$" not in filled(expression), "a variable that the dashboard does not have"


@pytest.mark.parametrize("rule", [pytest.param(rule, id=rule["alert"]) for rule in RULES])
def test_an_alert_asks_for_what_exists(rule: Mapping[str, Any], exposed: Exposed):
    assert problems(rule["expr"], exposed) == []
    assert re.fullmatch(r"RagPosfix[A-Za-z]+", rule["alert"])
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
    told = {name for text in rule["annotations"].values() for name in re.findall(r"\$labels\.(\w+)", text)}
    kept = re.findall(r"by \(([^)]*)\)", rule["expr"])
    if kept:  # the labels of the alert are those that its expression groups by
        assert told <= set(re.split(r", ?", kept[0]))


def test_every_failure_of_the_service_is_an_alert_and_on_the_dashboard():
    """Not in the alert: ``not_ready`` has an alert of its own, ``stopping`` is each orderly stop of a replica."""
    failures = {spec.code for spec in SPECS if spec.status >= 500} - {"not_ready", "stopping"}
    (failing,) = [rule["expr"] for rule in RULES if rule["alert"] == "RagPosfixFailing"]
    (alerted,) = re.findall(r'code=~"([^"]+)"', failing)
    assert set(alerted.split("|")) == failures
    shown = variables()["failures"]
    assert shown["current"] == {"text": shown["query"], "value": shown["query"]}
    assert set(shown["query"].split("|")) == failures | {"not_ready"}


def test_every_metric_of_the_service_is_on_the_dashboard_or_is_named_here_with_the_reason(exposed: Exposed):
    asked = " ".join(expression for _, expression in expressions_of_the_dashboard())
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exposed.labels if not name.endswith("_created")}
    elsewhere = {
        "rag_posfix_info",  # version and model: for joins
        "rag_posfix_tokens_total",  # what clients see as usage; the dashboard has the work of the model
        "rag_posfix_cache_tier_entries",  # bytes say more
        "rag_posfix_passage_pending_writes",  # the lost ones are shown
        "rag_posfix_malformed_answers_total",  # how many are too many depends on the model
        "rag_posfix_unsupported_total",  # and here on what is asked
        "rag_posfix_kv_cache_bytes",  # the dashboard has the batch and the queue
        "rag_posfix_tenant_model_seconds_total",  # tenants are for dashboards of the operator
        "rag_posfix_tenant_requests_total",
        "rag_posfix_tenant_tokens_total",
    }
    hidden = {name for name in families if name.startswith("rag_posfix") and name not in asked}
    assert hidden == elsewhere


def test_the_page_has_every_metric_with_its_labels(exposed: Exposed):
    page = (DEPLOYMENTS.parent / "docs" / "observability.md").read_text("utf-8")
    told = {
        name: frozenset(re.findall(r"`(\w+)`", labels))
        for name, labels in re.findall(r"^\| `(rag_posfix_\w+)` \| ([^|]*)\|", page, re.MULTILINE)
    }
    families: dict[str, frozenset[str]] = {}
    for name, labels in exposed.labels.items():
        if name.startswith("rag_posfix") and not name.endswith("_created"):
            family = re.sub(r"_(bucket|count|sum)$", "", name)
            families[family] = families.get(family, frozenset()) | (labels - {"le"})
    assert told == families


def test_the_legend_names_labels_that_the_expression_keeps():
    for panel in panels():
        for target in panel["targets"]:
            named = set(re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"]))
            kept = {label for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(", ")}
            assert named <= kept, panel["title"]


def test_the_dashboard_can_be_imported_anywhere():
    assert variables()["datasource"]["type"] == "datasource"
    assert variables()["datasource"]["query"] == "prometheus"
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, "no data source of one machine"
        assert panel["description"].endswith("."), panel["title"]
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(rag_posfix_requests[5m])", "metric 'rag_posfix_requests' does not exist"),
        ("rag_posfix_ready{model='x'}", "rag_posfix_ready has no label 'model'"),
        ("sum by (route) (rag_posfix_ready)", "rag_posfix_ready has no label 'route' to group by"),
        (
            "rate(rag_posfix_requests_total{code=~'ok|fine'}[5m])",
            "rag_posfix_requests_total: code is never 'fine'",
        ),
    ],
)
def test_the_check_finds_what_does_not_exist(expression: str, problem: str, exposed: Exposed):
    assert problems(expression, exposed) == [problem]
    with pytest.raises(ValueError, match=r"unclosed|unexpected|left paren"):
        problems("rate(rag_posfix_ready[5m]", exposed)
