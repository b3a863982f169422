"""The shipped OpenAPI document against the service: schemathesis with all checks, on a generator without weights."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from pydantic import SecretStr
from schemathesis import engine
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events

from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.settings import Settings
from rag_posfix_api.app import create_app
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.order_biased import OrderBiasedGenerator
from tests.support.serving import BRIDGE, ListRetriever, WordReranker, limits, make_pipeline

DOCUMENT = Path(__file__).parents[2] / "docs" / "openapi.json"
KEY = "operator"

SETTINGS: dict[str, Any] = {
    "seed": 1,
    "continue-on-failure": True,
    "suppress-health-check": ["too_slow"],  # which depends on the clock
    # Without a limit on the time: every operation gets as many examples as every other.
    "generation": {"max-examples": 10, "deterministic": True, "database": "none", "no-shrink": True},
    "headers": {"Authorization": f"Bearer {KEY}"},
}

NOT_IN_A_SCHEMA = (
    "the last message",  # is the user's, and not blank: JSON Schema has no word for a last entry
    "unknown mitigation",  # names are those of a registry that applications extend
    "unknown order",
    "unknown index",
    "unknown reranker",
    "no parameter",
    "must be parameter=value",  # in the text of an order, which has a syntax of its own
    "unknown template",
    "takes no template of this kind",  # a setting of the service
    "prompt template",  # a heading holds {title}
    "arrangement",  # a text with a syntax of its own
    "context window",  # depends on the tokenizer
    "the model's vectors have",  # so many numbers, depending on the embedding model
    "the vocabulary has tokens",  # as many as the model has
    "max_tokens_in_flight",  # a setting of the service
    "is given twice",  # one of two fields, at different depths
    "documents and a collection are given",
    "documents and a filter are given",
    "filter",  # a language of its own
    "text.format",  # likewise
    "writes no JSON by a schema",  # depends on the generator
    "response_format",  # a schema in JSON Schema, which the service reads
    "is the id of no call before it",  # of an earlier message
    "a block of type 'tool_",  # a call of the user, a result of the model
    "an item of type",  # 'message' without a role
    "needs a name of 1 to 128",  # a tool of an old call
    "a tool_choice of type",  # with the name of a tool of the request
    "tool_choice=",
    "a tool of type",
    "the name of a packaged model",  # or the file of a profile, a parameter of an order
    "is not supported; use one of system",  # the role of results of tools, where the format takes none
    "tool_calls is not supported here",  # of a message that is no answer
    "is not supported here; leave it out",  # a further field, whose name hypothesis took from the modules in memory
    "the arguments of a call must be",  # JSON in a text
    "guided_grammar",
    "is empty; give",  # Python's white space has U+001C to U+001F, and JSON Schema's has not
)
"""Beginnings of the messages that refuse a body for a rule that JSON Schema cannot state."""

CANCELLED_AND_READABLE = "/precompute"
"""DELETE on this path cancels a job; its state remains readable."""


class PrecomputingGenerator(OrderBiasedGenerator):
    """Gives attention, and counts the tokens of passages that it is told to read ahead."""

    passages = PassageStore([MemoryTier(1 << 20)])
    capabilities = frozenset({"log_probs", "attention", "precompute"})
    kv_bytes_per_token = 1

    def precompute(self, layout: Any, mitigation: Any, salt: str = "") -> int:
        return sum(len(span) for span in layout.passages)


def refused_by_unstated_rule(response: Any) -> bool:
    """Whether a response with status 400 names one of these rules."""
    return response.status_code == 400 and any(rule in response.text for rule in NOT_IN_A_SCHEMA)


def is_expected(check: str, interaction: Any) -> bool:
    """Whether a check fails by a rule that the schema cannot express."""
    if check == "use_after_free":
        return interaction.request.uri.endswith(CANCELLED_AND_READABLE)
    return check == "positive_data_acceptance" and refused_by_unstated_rule(interaction.response)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # schemathesis and its parts warn of each other
def test_the_service_is_what_its_document_says(tmp_path: Path):
    pipeline = make_pipeline(
        PrecomputingGenerator(),
        retriever=ListRetriever(BRIDGE),
        reranker=WordReranker(),
        embeddings=LetterEmbeddings(),
    )
    service = limits(data_dir=tmp_path, api_key=SecretStr(KEY), max_collections=100_000)
    app = create_app(Settings(), pipeline, service)
    schema = schemathesis.openapi.from_asgi(
        "/openapi.json", app, config=SchemathesisConfig.from_dict(SETTINGS), headers=SETTINGS["headers"]
    )
    assert schema.raw_schema["paths"] == json.loads(DOCUMENT.read_text())["paths"]
    failures: list[str] = []
    answered: Counter[str] = Counter()
    for event in engine.from_schema(schema).execute():
        assert not isinstance(event, events.FatalError | events.NonFatalError), event
        if not isinstance(event, events.ScenarioFinished):
            continue
        for case, checks in event.recorder.checks.items():
            interaction = event.recorder.interactions[case]
            if event.recorder.label != "Stateful tests":
                answered[event.recorder.label] += interaction.response.status_code < 300
            for check in checks:
                if check.failure_info is None or is_expected(check.name, interaction):
                    continue
                message = " ".join(check.failure_info.failure.message.split())
                sent = f"{interaction.request.method} {interaction.request.uri} {interaction.request.body!r:.200}"
                got = f"{interaction.response.status_code} {interaction.response.text:.300}"
                failures.append(f"{event.recorder.label} {check.name}: {message} | {sent} | {got}")
    assert not failures, "\n".join(failures)
    operations = {f"{method.upper()} {path}" for path, item in schema.raw_schema["paths"].items() for method in item}
    assert set(answered) == operations
    # These need an id or a collection that few examples have; the tests of keys and collections call them.
    rarely = {
        "DELETE /admin/keys/{key_id}",
        "DELETE /v1/collections/{name}/documents/{document_id}",
        "DELETE /v1/collections/{name}/precompute",
    }
    assert {operation for operation, count in answered.items() if not count} <= rarely
