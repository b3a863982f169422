"""The experiments are found in the package, which loads nothing to name them."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import pytest

from rag_posfix import evaluation
from tests.support.exports import seen_by_type_checkers


@pytest.mark.parametrize(("name", "module"), seen_by_type_checkers(evaluation).items())
def test_every_exported_name_is_that_of_its_module(name, module):
    assert getattr(evaluation, name) is getattr(import_module(module), name)
    assert name in import_module(module).__all__


def test_the_names_are_listed_once_for_users_and_for_type_checkers():
    assert sorted(evaluation.__all__) == sorted(seen_by_type_checkers(evaluation))
    assert set(evaluation.__all__) <= set(dir(evaluation))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'rag_posfix\.evaluation' has no attribute 'evaluate'"):
        evaluation.evaluate  # noqa: B018


@pytest.mark.slow
def test_importing_the_package_loads_no_model_library():
    code = (
        "import json, sys, rag_posfix.evaluation; rag_posfix.evaluation.read_record; "
        "rag_posfix.evaluation.evaluate_reranking; "
        "heavy = ('torch', 'transformers', 'faiss', 'sentence_transformers'); "
        "print(json.dumps([name for name in heavy if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == []
