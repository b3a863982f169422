import inspect
import pickle
import re

import pytest

from rag_posfix import errors

CLASSES = {name: thing for name, thing in vars(errors).items() if inspect.isclass(thing)}


def tree_in_docstring() -> dict[str, str | None]:
    """Read {class: its parent} from the drawing; depth is where the name starts."""
    parents: dict[str, str | None] = {}
    path: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        found = re.match(r"[ │├└─]{4,}(\w+)", line)
        if not found:
            continue
        depth, name = found.start(1), found[1]
        while path and path[-1][0] >= depth:
            path.pop()
        parents[name] = path[-1][1] if path else None
        path.append((depth, name))
    return parents


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes():
    bases = {
        name: next((base.__name__ for base in cls.__bases__ if base.__name__ in CLASSES), None)
        for name, cls in CLASSES.items()
    }
    assert tree_in_docstring() == bases
    assert len(bases) > 10


def test_every_error_is_public():
    assert {*CLASSES, "missing_extra"} == set(errors.__all__)


@pytest.mark.parametrize("cls", CLASSES.values())
def test_every_error_is_a_ragposfix_error_with_a_docstring_of_its_own(cls):
    assert issubclass(cls, errors.RagPosfixError)
    assert cls.__doc__
    assert str(cls("what is wrong")) == "what is wrong"


@pytest.mark.parametrize("cls", CLASSES.values())
def test_errors_cross_process_boundaries(cls):
    copy = pickle.loads(pickle.dumps(cls("what is wrong")))
    assert type(copy) is cls
    assert copy.args == ("what is wrong",)


def test_a_wrong_setting_is_a_value_error_for_callers_who_know_only_those():
    assert issubclass(errors.ConfigError, ValueError)
    assert not issubclass(errors.GenerationError, ValueError)


def test_a_missing_extra_says_how_to_install_it():
    error = errors.missing_extra("faiss", "local")
    assert isinstance(error, errors.ConfigError)
    assert str(error) == "faiss is not installed; in a copy of the repository run: pip install '.[local]'"
