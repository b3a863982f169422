"""What the code of tests may not do: depend on another test, on luck, on private names, or check nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.architecture import CodeRule, ImportRule, Source, read_sources
from tests.support.code_of_tests import silent_tests, unseeded_draws, uses_private_name

ROOT = Path(__file__).resolve().parents[1]
RULES = [
    ImportRule(
        why="no test imports another test: what several folders need is in tests/support",
        files=("tests/*",),
        never=("tests.test_*", "tests.*.test_*"),
    ),
    CodeRule(
        why="a test asks public names; private ones may change without a test that fails",
        finds=uses_private_name,
        # Neither transformers nor torch has a public way to ask.
        but=("tests/support/attention_hook.py", "tests/support/device_twin.py"),
    ),
]


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    found = read_sources(ROOT, ("tests",))
    assert any(source.path == "tests/test_architecture_of_tests.py" for source in found)
    return found


@pytest.mark.parametrize("rule", RULES, ids=[rule.why for rule in RULES])
def test_tests_keep_the_rule(rule: ImportRule | CodeRule, sources: list[Source]) -> None:
    assert rule.violations(sources) == []


def test_every_test_asserts_something(sources: list[Source]) -> None:
    assert silent_tests(sources) == []


def test_random_input_is_seeded(sources: list[Source]) -> None:
    assert [found for source in sources for found in unseeded_draws(source)] == []


# The checker itself: code and what is wrong, or nothing wrong, with it.


def in_a_test(body: str) -> Source:
    return Source("tests/unit/test_a.py", f"def test_a():\n    {body}")


@pytest.mark.parametrize(
    "body",
    [
        "from tests.unit.test_b import helper",
        "from rag_posfix.text import _clean",
        "engine._prefill(1)",
        "make().engine._state",
        "monkeypatch.setattr(engine, '_state', 1)",
        "monkeypatch.setattr('rag_posfix.text._clean', 1)",
        "getattr(engine, '_state')",
    ],
)
def test_private_names_and_imports_of_tests_are_found(body: str) -> None:
    assert [found for rule in RULES for found in rule.violations([in_a_test(body)])]


@pytest.mark.parametrize(
    "body",
    [
        "from __future__ import annotations",
        "from tests.support.clock import Clock",
        "self._calls = 1",
        "super()._text()",
        "engine.__class__",
        "os._exit(1)",
        "monkeypatch.setattr(Engine, '__init__', 1)",
    ],
)
def test_public_names_and_own_attributes_are_allowed(body: str) -> None:
    assert [found for rule in RULES for found in rule.violations([in_a_test(body)])] == []


@pytest.mark.parametrize(
    "body", ["torch.randn(3)", "torch.rand_like(x)", "random.random()", "random.Random()", "np.random.default_rng()"]
)
def test_draws_without_a_seed_are_found(body: str) -> None:
    assert unseeded_draws(in_a_test(body))


@pytest.mark.parametrize(
    "body",
    [
        "torch.randn(3, generator=generator)",
        "torch.manual_seed(0); torch.randn(3)",
        "random.Random(5).random()",
        "np.random.default_rng(5).normal()",
        "torch.random.get_rng_state()",
    ],
)
def test_seeded_draws_are_allowed(body: str) -> None:
    assert unseeded_draws(in_a_test(body)) == []


HELPERS = "\ndef helper():\n    inner()\n\ndef inner():\n    assert x\n\ndef idle():\n    pass\n"


@pytest.mark.parametrize("body", ["engine.answer()", "idle()", "lambda: x"])
def test_a_test_without_an_assertion_is_found(body: str) -> None:
    source = Source("tests/unit/test_a.py", f"def test_a():\n    {body}\n{HELPERS}")
    assert silent_tests([source]) == ["tests/unit/test_a.py:1: test_a asserts nothing"]


@pytest.mark.parametrize("body", ["assert x", "with pytest.raises(ValueError): x()", "helper()", "wait_until(x)"])
def test_an_assertion_in_a_helper_counts(body: str) -> None:
    support = Source("tests/support/a.py", "def wait_until(x):\n    assert x")
    assert silent_tests([support, Source("tests/unit/test_a.py", f"def test_a():\n    {body}\n{HELPERS}")]) == []
