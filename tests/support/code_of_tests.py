"""Finds what the code of tests may not do. ``test_architecture_of_tests.py`` holds the rules."""

from __future__ import annotations

import ast

from tests.support.architecture import Source, dotted

CHECKS = ("pytest.raises", "pytest.warns", "pytest.fail", "torch.testing.assert_close", "np.testing.assert_allclose")
"""Calls that can fail a test."""
SEEDED = ("random.Random", "np.random.default_rng")
"""Generators of their own: the first argument is the seed."""
GLOBAL_STATE = ("random.", "np.random.", "torch.rand", "torch.normal", "torch.bernoulli", "torch.multinomial")
"""Beginnings of functions that draw random numbers."""
STATE = ("get_state", "get_rng_state", "set_state", "set_rng_state", "seed", "manual_seed")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def uses_private_name(node: ast.AST) -> str:
    """Private attributes of other objects, private names that are imported, and names of either in strings."""
    if isinstance(node, ast.Attribute) and is_private(node.attr):
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        inherited = isinstance(node.value, ast.Call) and dotted(node.value.func) == "super"
        return "" if own or inherited or dotted(node) == "os._exit" else ast.unparse(node)
    if isinstance(node, ast.ImportFrom):
        return ", ".join(alias.name for alias in node.names if is_private(alias.name))
    if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ("getattr", "setattr", "delattr"):
        names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        return ", ".join(name for name in names if any(map(is_private, name.split("."))))
    return ""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def unseeded_draws(source: Source) -> list[str]:
    """Random numbers from a generator without a seed, or from the global one in a function that does not seed it."""
    found = []
    for function in [node for node in ast.walk(source.tree) if isinstance(node, Function)]:
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        if not any(dotted(call.func) == "torch.manual_seed" for call in calls):
            found += [call for call in calls if draws_unseeded(call)]
    return [f"{source.path}:{call.lineno}: {dotted(call.func)} without a seed" for call in found]


def draws_unseeded(call: ast.Call) -> bool:
    name = dotted(call.func).replace("numpy.", "np.")
    if name in SEEDED:
        return not call.args
    if not name.startswith(GLOBAL_STATE) or name.split(".")[-1] in STATE:
        return False
    return not any(keyword.arg == "generator" for keyword in call.keywords)


def silent_tests(sources: list[Source]) -> list[str]:
    """Test functions that assert nothing, in their own lines or in functions of their file or of a helper."""
    support = [source for source in sources if "/test_" not in source.path]
    shared = checking_functions([one for source in support for one in functions(source)], frozenset())
    found = []
    for source in [one for one in sources if one not in support]:
        own = functions(source)
        checking = checking_functions(own, shared)
        tests = [one for one in own if one.name.startswith("test_")]
        found += [
            f"{source.path}:{one.lineno}: {one.name} asserts nothing" for one in tests if one.name not in checking
        ]
    return found


def functions(source: Source) -> list[Function]:
    return [node for node in ast.walk(source.tree) if isinstance(node, Function)]


def checking_functions(own: list[Function], known: frozenset[str]) -> frozenset[str]:
    """Return the names of functions that assert something, themselves or in those that they use, with ``known``."""
    checking = known | {one.name for one in own if checks(one)}
    used = [(one.name, names_used(one)) for one in own]
    while more := {name for name, names in used if name not in checking and names & checking}:
        checking |= more
    return checking


def checks(function: Function) -> bool:
    return any(
        isinstance(node, ast.Assert) or (isinstance(node, ast.Call) and dotted(node.func) in CHECKS)
        for node in ast.walk(function)
    )


def names_used(function: Function) -> set[str]:
    """Names that the function calls, and its fixtures."""
    called = {dotted(node.func).split(".")[-1] for node in ast.walk(function) if isinstance(node, ast.Call)}
    return called | {argument.arg for argument in function.args.args}
