"""Old spellings of parameters, attributes and fields work with a warning; what is stored keeps them."""

from __future__ import annotations

import dataclasses
import json
from typing import ClassVar

import pytest

from rag_posfix.contracts.method_spec import parse_method
from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.ranking.rankings import open_reranker
from rag_posfix.mitigations import MITIGATIONS, create
from rag_posfix.mitigations.base import Mitigation
from rag_posfix.parameters import accept_old_names
from rag_posfix.pipeline.pipeline import Defaults
from rag_posfix.plan.plan import Plan
from rag_posfix.reranking import RERANKERS, ListwiseReranker
from rag_posfix.reranking.build import RerankerModels
from rag_posfix.text import content_hash
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.order_biased import OrderBiasedGenerator

# Both spellings have one fingerprint. It changed once, with question_copies: answers cached before are not reused.
RENAMED = [
    ("context_experts", {}, {}, "8430f7b20c93e7ae765a49b860d8c487"),
    (
        "context_experts",
        {"hold": 0.0, "relevance": "given", "pool": "max"},
        {"answer_weight": 0.0, "relevance": "score", "pool": "max"},
        "a7f6b399e958af1b95f5cf2ee8bb74b3",
    ),
    ("committee", {"relevance": "given"}, {"relevance": "score"}, "3628dc849f008071ee241627462261fc"),
    (
        "passage_answers",
        {"relevance": "given", "lift_weight": 2.0},
        {"relevance": "score", "share_weight": 2.0},
        "beecec9aa46be87f8ed4695a9fd80092",
    ),
    (
        "stack",
        {"methods": ["none", {"name": "context_experts", "hold": 0.5, "relevance": "given"}]},
        {"methods": ["none", {"name": "context_experts", "answer_weight": 0.5, "relevance": "score"}]},
        "ae8dda83e4cb9a2b2ec161d9e9220459",
    ),
]


@pytest.mark.parametrize(("name", "old", "new", "fingerprint"), RENAMED)
def test_fingerprints_are_those_of_the_old_spelling(name, old, new, fingerprint):
    assert create(name, new).fingerprint() == fingerprint
    if old != new:
        with pytest.warns(DeprecationWarning, match="is now .*; the old spelling works until 1.0"):
            assert create(name, old) == create(name, new)


def test_records_have_the_old_spelling_whichever_was_typed():
    label = "context_experts:hold=0:relevance=given"
    for text in (label, "context_experts:answer_weight=0:relevance=score"):
        assert parse_method(text, "mitigation", "").label == label
    spec = parse_method("default:answer_weight=0", "mitigation", "")
    assert (spec.label, spec.recorded_parameters) == ("default:hold=0", {"hold": 0})
    assert parse_method("rankgpt:order=input", "reranker", "").label == "rankgpt:order=given"


def test_a_parameter_by_both_names_is_an_error():
    with pytest.raises(ConfigError, match="hold and answer_weight are the same parameter; give answer_weight alone"):
        create("context_experts", {"hold": 1.0, "answer_weight": 1.0})


def test_rerankers_take_the_old_order_and_are_identified_by_it():
    with pytest.warns(DeprecationWarning, match="order=given is now order=input"):
        assert ListwiseReranker(generator=OrderBiasedGenerator(), order="given").order == "input"
    with pytest.warns(DeprecationWarning, match="order=given is now order=input"):
        RERANKERS.check(parse_method("in_context:order=given", "reranker", ""))
    models = RerankerModels(embeddings=LetterEmbeddings, generator=OrderBiasedGenerator)
    new = open_reranker(parse_method("listwise:order=input", "reranker", ""), models)
    values = {"order": "given", "window": 20, "stride": None, "max_document_tokens": 512, "top_n": None}
    generator = {"generator": f"{OrderBiasedGenerator().fingerprint} "}
    assert new.identity == content_hash(json.dumps(["listwise", values, generator], sort_keys=True))
    assert new.label == "listwise:order=given"


def test_defaults_take_and_show_attribution_by_its_old_name():
    assert Defaults(attribution=False).attribution is False
    with pytest.warns(DeprecationWarning, match="traced is now attribution"):
        old = Defaults(traced=False)
    assert old == Defaults(attribution=False)
    with pytest.warns(DeprecationWarning, match="traced is now attribution"):
        assert old.traced is False
    with pytest.warns(DeprecationWarning, match="traced is now attribution"):
        assert dataclasses.replace(old, traced=True) == Defaults()


def test_a_renamed_field_keeps_its_checks_and_the_class_its_signature():
    @accept_old_names
    @dataclasses.dataclass
    class Limits:
        renamed: ClassVar[dict[str, str]] = {"most": "max_rows"}
        max_rows: int = 3

    assert Limits(5).max_rows == Limits(max_rows=5).max_rows == 5
    with pytest.raises(TypeError, match="fewest"):
        Limits(fewest=1)


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("neutral", "identity_parameters", {"share": 0.0}),
        ("decides_at_prompt_end", "uses_last_prompt_token", True),
        ("tells_key_heads_apart", "compares_kv_heads", True),
        ("holds_methods", "nested_methods", "methods"),
    ],
)
def test_class_attributes_of_methods_are_read_by_their_old_names(old, new, value):
    body = {"name": "mine", old: value, "plan": lambda self, layout, model: Plan()}
    with pytest.warns(DeprecationWarning, match=f"Mine.{old} is now {new}"):
        mine = type("Mine", (Mitigation,), body)
    assert getattr(mine, new) == value
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        assert getattr(mine, old) == value
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        assert getattr(MITIGATIONS.get("none"), old) == getattr(Mitigation, new)
