"""The shipped OpenAPI document against the service: schemathesis with all checks, on the fake generator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from schemathesis import engine
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events

from rag_posfix.settings import Settings
from rag_posfix_api.app import create_app
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.serving import BRIDGE, ListRetriever, WordReranker, limits, make_pipeline

DOCUMENT = Path(__file__).parents[2] / "docs" / "openapi.json"

SETTINGS: dict[str, Any] = {
    "seed": 1,
    "max-time": 55,
    "continue-on-failure": True,
    "generation": {"max-examples": 3, "deterministic": True, "database": "none", "no-shrink": True},
}

NOT_IN_A_SCHEMA = (
    "the last message",  # is the user's, and not blank: JSON Schema has no word for a last entry
    "unknown mitigation",  # names are those of a registry that applications extend
    "unknown order",
    "unknown index",
    "unknown reranker",
    "no parameter",
    "arrangement",  # a text with a syntax of its own
    "context window",  # depends on the tokenizer
    "the model's vectors have",  # so many numbers, depending on the embedding model
    "the vocabulary has tokens",  # as many as the model has
    "max_tokens_in_flight",  # a setting of the service
    "is given twice",  # one of two fields, at different depths
    "documents and a collection are given",
)
"""Beginnings of the messages that refuse a body for a rule that JSON Schema cannot state."""

OWN_ROUTES = r"^/(admin|v1/(collections|evaluate|posfix))"
"""Routes that no other wire format has. Their documents do not state their states yet: a collection that must exist, a
key that must have a scope, a generator that must give attention."""


def refused_by_unstated_rule(response: Any) -> bool:
    """Whether a response with status 400 names one of these rules."""
    return response.status_code == 400 and any(rule in response.text for rule in NOT_IN_A_SCHEMA)


@pytest.mark.filterwarnings("ignore")  # schemathesis and its parts warn of each other
def test_the_service_is_what_its_document_says():
    pipeline = make_pipeline(retriever=ListRetriever(BRIDGE), reranker=WordReranker(), embeddings=LetterEmbeddings())
    app = create_app(Settings(), pipeline, limits())
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, config=SchemathesisConfig.from_dict(SETTINGS))
    assert schema.raw_schema["paths"] == json.loads(DOCUMENT.read_text())["paths"]
    schema = schema.exclude(path_regex=OWN_ROUTES)
    failures, calls = [], 0
    for event in engine.from_schema(schema).execute():
        assert not isinstance(event, events.FatalError | events.NonFatalError), event
        if not isinstance(event, events.ScenarioFinished):
            continue
        calls += len(event.recorder.interactions)
        for case, checks in event.recorder.checks.items():
            for check in checks:
                response = event.recorder.interactions[case].response
                if check.failure_info is None or (
                    check.name == "positive_data_acceptance" and refused_by_unstated_rule(response)
                ):
                    continue
                failures.append(f"{event.recorder.label} {check.name}: {check.failure_info.failure.message}")
    assert failures == []
    assert calls > 50  # a busy machine reaches the time limit before all of them
