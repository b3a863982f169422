"""What the code of tests may not do: depend on another test, on luck, on private names, or check nothing."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

import pytest

from tests.support.source_files import Source, dotted, imported_names, read_sources

CHECKS = frozenset(
    [
        "assert",
        "pytest.raises",
        "pytest.warns",
        "pytest.fail",
        "torch.testing.assert_close",
        "np.testing.assert_allclose",
    ]
)
"""What can fail a test."""
GLOBAL_STATE = ("random.", "np.random.", "torch.rand", "torch.normal", "torch.bernoulli", "torch.multinomial")
"""Beginnings of functions that draw random numbers from a state that all tests share."""
USES_TORCH_INTERNALS = "tests/support/device_twin.py"
"""Torch has no public way to ask what it asks."""
STATE = ("get_state", "get_rng_state", "set_state", "set_rng_state", "seed", "manual_seed")


@dataclass
class Scope:
    """A file or a function: its calls, and the names that it calls, imports or takes as arguments."""

    name: str
    calls: list[ast.Call] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    imports: list[str] = field(default_factory=list)


def scopes(source: Source) -> list[Scope]:
    """Return the file and its functions. What is in a function is in those around it too."""
    found = [Scope("")]
    waiting: list[tuple[ast.AST, tuple[Scope, ...]]] = [(source.tree, (found[0],))]
    while waiting:
        node, around = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(Scope(node.name, names={argument.arg for argument in node.args.args}))
            around = (*around, found[-1])
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            for scope in around:
                scope.calls.append(node)
                scope.names |= {name, name.split(".")[-1]}
        elif isinstance(node, ast.Assert):
            for scope in around:
                scope.names.add("assert")
        found[0].imports += imported_names(node)
        waiting.extend((child, around) for child in ast.iter_child_nodes(node))
    return found


def forbidden_names(file: Scope) -> list[str]:
    """Other tests (what several need is in a helper), and private names, which may change without a failure.

    Private attributes are for ruff to find.
    """
    of_tests = [name for name in file.imports if re.match(r"(\.|tests\.(.*\.)?)test_", name)]
    private = [name for name in file.imports if is_private(name.split(".")[-1])]
    named = [
        argument.value
        for call in file.calls
        if dotted(call.func).split(".")[-1] in ("getattr", "setattr", "delattr")
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
    return of_tests + private + [name for name in named if any(map(is_private, name.split(".")))]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def unseeded_draws(function: Scope) -> list[str]:
    """Random numbers from a generator without a seed, or from the global one in a function that does not seed it."""
    calls = [] if "torch.manual_seed" in function.names else function.calls
    return [dotted(call.func) for call in calls if draws_unseeded(call)]


def draws_unseeded(call: ast.Call) -> bool:
    name = dotted(call.func).replace("numpy.", "np.")
    if name in ("random.Random", "np.random.default_rng"):
        return not call.args
    if not name.startswith(GLOBAL_STATE) or name.split(".")[-1] in STATE:
        return False
    return not any(keyword.arg == "generator" for keyword in call.keywords)


def checking_names(functions: list[Scope], known: frozenset[str]) -> frozenset[str]:
    """Return the names of functions that assert something, themselves or in those that they use, with ``known``."""
    while more := {one.name for one in functions if one.name not in known and one.names & known}:
        known |= more
    return known


def offenders(source: Source, known: frozenset[str]) -> list[str]:
    """Return what is wrong with a file of tests; ``known`` names can fail a test."""
    file, *functions = scopes(source)
    checking = checking_names(functions, known)
    silent = [one.name for one in functions if one.name.startswith("test_") and one.name not in checking]
    return forbidden_names(file) + [name for one in functions for name in unseeded_draws(one)] + silent


@pytest.fixture(scope="module")
def known() -> frozenset[str]:
    helpers = [source for source in read_sources("tests") if "/test_" not in source.path]
    shared = [function for source in helpers for function in scopes(source)[1:]]
    return checking_names(shared, CHECKS)


@pytest.mark.parametrize("part", range(6))
def test_a_test_imports_no_test_and_no_private_name_seeds_what_it_draws_and_asserts(part, known) -> None:
    sources = [one for one in read_sources("tests", part=part, parts=6) if one.path != USES_TORCH_INTERNALS]
    assert [(source.path, found) for source in sources if (found := offenders(source, known))] == []


# The checker itself: code of a test, and what is wrong with it.

HELPERS = """
def helper():
    inner()
def inner():
    assert x
def idle():
    pass
"""


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("from tests.unit.test_b import helper; assert 1", ["tests.unit.test_b.helper"]),
        ("from .test_b import helper; assert 1", [".test_b.helper"]),
        ("from tests.support.clock import Clock; assert 1", []),
        ("from rag_posfix.text import _clean; assert 1", ["rag_posfix.text._clean"]),
        ("monkeypatch.setattr('rag_posfix.text._clean', 1); assert 1", ["rag_posfix.text._clean"]),
        ("getattr(engine, '__class__'); assert 1", []),
        ("torch.randn(3); random.random(); assert 1", ["random.random", "torch.randn"]),
        ("random.Random(); np.random.default_rng(); assert 1", ["np.random.default_rng", "random.Random"]),
        ("torch.manual_seed(0); torch.randn(3); assert 1", []),
        ("torch.randn(3, generator=g); random.Random(5).random(); torch.random.get_rng_state(); assert 1", []),
        ("engine.answer()", ["test_a"]),
        ("idle()", ["test_a"]),
        ("lambda: x", ["test_a"]),
        ("with pytest.raises(ValueError): x()", []),
        ("helper()", []),
        ("shared()", []),
    ],
)
def test_the_checker_finds_what_is_wrong_with_a_test(body, found) -> None:
    source = Source("tests/unit/test_a.py", f"def test_a():\n    {body}\n{HELPERS}")
    assert sorted(offenders(source, CHECKS | {"shared"})) == found
