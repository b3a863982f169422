"""Who may import whom, and what code may not do.

`support/architecture_rules.py` has the rules in two tables, `support/architecture.py` applies them.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from tests.support.architecture import (
    CodeRule,
    ImportRule,
    Source,
    cycle,
    file_imports,
    long_files,
    long_functions,
    reached,
    read_sources,
    upward_imports,
)
from tests.support.architecture_rules import IMPORT_RULES, RULES

ROOT = Path(__file__).resolve().parents[1]
PUBLIC_NAMES = ("rag_posfix/__init__.py", "rag_posfix/evaluation/__init__.py")
"""Lists of public names: they name files of rooms further down, and import each when the name is first used."""

# A file of this length is one idea; a function aims at 40 lines.
MOST_LINES_PER_FILE = 450
MOST_LINES_PER_FUNCTION = 60

COMPUTING_ROOMS = (
    "rag_posfix/plan/*",
    "rag_posfix/attention/*",
    "rag_posfix/encodings/*",
    "rag_posfix/mitigations/*",
    "rag_posfix/patching/*",
    "rag_posfix/generation/*",
    "rag_posfix/caching/kv/*",
)
COMPUTING_NEEDS = ("torch", "transformers", "numpy", "safetensors")
NEEDED_ON_DEMAND = {
    "rag_posfix/parameters.py": ("pydantic",),  # where a registry holds pydantic models: those of rerankers
    "rag_posfix/caching/redis_client.py": ("redis",),  # where passages are kept in Redis
    "rag_posfix/caching/redis.py": ("redis",),
    "rag_posfix/generation/remote/connection.py": ("httpx2", "anyio"),  # where the model is on a server
    "rag_posfix/generation/model/json_grammar.py": ("llguidance",),  # where an answer follows a JSON schema
    "rag_posfix/generation/model/checkpoint.py": ("peft",),  # where a model has an adapter
    "rag_posfix/generation/model/checkpoint_formats.py": ("gguf",),  # where a model is a GGUF file
    "rag_posfix/checkpoints.py": ("huggingface_hub",),  # a package that transformers needs itself
}
"""What a file imports inside of a function, for what the rooms that compute do not do themselves."""


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    found = read_sources(ROOT)
    assert any(source.path == "rag_posfix/__init__.py" for source in found)
    return found


def fail_on(offenders: list[str], why: str) -> None:
    if offenders:
        pytest.fail("\n  ".join([f"{why}. Offenders:", *offenders]), pytrace=False)


@pytest.mark.parametrize("rule", RULES, ids=[rule.why for rule in RULES])
def test_sources_keep_the_rule(rule: ImportRule | CodeRule, sources: list[Source]) -> None:
    fail_on(rule.violations(sources), rule.why)


def documented_rooms() -> dict[str, str]:
    """Return the rooms of docs/architecture.md with their descriptions, from the ground up."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    return dict(re.findall(r"^\| `([a-z_/]+)/` \| (.+) \|$", text, re.MULTILINE))


def test_every_room_stands_in_the_table_with_its_own_first_line(sources: list[Source]) -> None:
    first_lines = {
        source.room: (ast.get_docstring(source.tree) or "").partition("\n")[0]
        for source in sources
        if source.path.endswith("/__init__.py")
    }
    assert {source.room for source in sources} == set(first_lines), "a folder with Python files has no __init__.py"
    assert documented_rooms() == first_lines


def test_a_room_imports_only_rooms_above_it_in_the_table(sources: list[Source]) -> None:
    offenders = upward_imports(sources, list(documented_rooms()), but=PUBLIC_NAMES)
    fail_on(offenders, "a room imports only itself and rooms above it in the table of docs/architecture.md")


def test_no_two_files_import_each_other(sources: list[Source]) -> None:
    graph = {path: imported for path, imported in file_imports(sources).items() if path not in PUBLIC_NAMES}
    fail_on(cycle(graph), "files import each other in a circle, each the next one")


def outside(name: str) -> bool:
    """Whether an import is of a package that has to be installed."""
    package = name.split(".")[0]
    return package not in sys.stdlib_module_names and package != "rag_posfix"


def test_the_rooms_that_compute_need_torch_transformers_numpy_and_safetensors_alone(sources: list[Source]) -> None:
    """They and every file that they reach, so that a bare copy of the repository runs wherever torch does."""
    files = reached(sources, COMPUTING_ROOMS, but=PUBLIC_NAMES)
    offenders = [
        f"{source.path}:{found.line}: imports {found.name}"
        for source in sources
        if source.path in files
        for found in source.imports
        if outside(found.name)
        and found.name.split(".")[0] not in (*COMPUTING_NEEDS, *NEEDED_ON_DEMAND.get(source.path, ()))
    ]
    fail_on(offenders, "the rooms that compute import torch, transformers, numpy and safetensors alone")


def test_what_is_needed_on_demand_is_imported_inside_of_functions(sources: list[Source]) -> None:
    found = {
        source.path: {
            alias.name.split(".")[0] if isinstance(node, ast.Import) else (node.module or "").split(".")[0]
            for node in source.tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        for source in sources
        if source.path in NEEDED_ON_DEMAND
    }
    assert set(found) == set(NEEDED_ON_DEMAND)
    assert [path for path, names in found.items() if names & set(NEEDED_ON_DEMAND[path])] == []


def test_files_are_short(sources: list[Source]) -> None:
    fail_on(long_files(sources, MOST_LINES_PER_FILE), f"a file has at most {MOST_LINES_PER_FILE} lines")


def test_functions_are_short(sources: list[Source]) -> None:
    offenders = long_functions(sources, MOST_LINES_PER_FUNCTION)
    fail_on(offenders, f"a function has at most {MOST_LINES_PER_FUNCTION} lines without its docstring")


# The checker itself: each line is a file and what is wrong, or nothing wrong, with it.

TREE = [
    Source("rag_posfix/mitigations/__init__.py", ""),
    Source("rag_posfix/mitigations/base.py", ""),
    Source("rag_posfix/mitigations/other.py", ""),
]

FORBIDDEN = [
    ("rag_posfix/attention/a.py", "import numpy as np"),
    ("rag_posfix/attention/a.py", "def f():\n    import numpy"),
    ("rag_posfix/attention/a.py", "from rag_posfix.text import clean_text"),
    ("rag_posfix/attention/a.py", "if TYPE_CHECKING:\n    from transformers import PreTrainedModel"),
    ("rag_posfix/attention/a.py", "from ..generation import request"),
    ("rag_posfix/attention/a.py", "import torch, torchvision"),
    ("rag_posfix/mitigations/a.py", "from rag_posfix.mitigations.other import Other"),
    ("rag_posfix/mitigations/a.py", "from rag_posfix.mitigations import other"),
    ("rag_posfix/mitigations/a.py", "from . import other"),
    ("rag_posfix/mitigations/a.py", "from .other import Other"),
    ("rag_posfix/mitigations/__init__.py", "from rag_posfix.patching import install"),
    ("rag_posfix/retrieval/a.py", "import transformers"),
    ("rag_posfix/retrieval/a.py", "from rag_posfix.generation.engine import Engine"),
    ("rag_posfix/pipeline/build.py", "import bm25s"),
    ("rag_posfix/retrieval/a.py", "import importlib\nimportlib.import_module('transformers.masking_utils')"),
    ("rag_posfix/generation/engine.py", "from transformers import AutoModelForCausalLM"),
    ("rag_posfix/generation/engine.py", "from transformers.cache_utils import DynamicCache"),
    ("rag_posfix/generation/load.py", "from transformers import masking_utils"),
    ("rag_posfix/generation/load.py", "import transformers.modeling_utils"),
    ("rag_posfix/generation/model/tokenizer.py", "from transformers.utils.quantization_config import GgufConfig"),
    ("rag_posfix/generation/engine.py", "from rag_posfix.mitigations.other import Other"),
    ("rag_posfix/generation/engine.py", "from rag_posfix.mitigations import other"),
    ("rag_posfix/generation/engine.py", "from rag_posfix.retrieval.ingest.ingest import read_documents"),
    ("rag_posfix/generation/engine.py", "import rag_posfix"),
    ("rag_posfix/caching/a.py", "from rag_posfix.generation.model.sequence_batch import LoadedModel"),
    ("rag_posfix/caching/a.py", "from rag_posfix.plan.plan import Plan"),
    ("rag_posfix/pipeline/pipeline.py", "import redis"),
    ("rag_posfix/assembly/a.py", "import torch"),
    ("rag_posfix/assembly/a.py", "from rag_posfix.plan.plan import Plan"),
    ("rag_posfix/pipeline/pipeline.py", "from rag_posfix.retrieval.faiss_store import FaissVectorStore"),
    ("rag_posfix/pipeline/pipeline.py", "from rag_posfix.caching import tiered"),
    ("rag_posfix/reranking/a.py", "from rag_posfix.generation.engine import Engine"),
    ("rag_posfix/reranking/a.py", "import torch"),
    ("rag_posfix/pipeline/pipeline.py", "import torch.nn"),
    ("rag_posfix/pipeline/pipeline.py", "from rag_posfix.integrations.langchain.rag import PosfixRAG"),
    ("rag_posfix/pipeline/build.py", "import haystack"),
    ("rag_posfix/integrations/haystack.py", "from langchain_community.document_transformers import x"),
    ("rag_posfix/cli/serve.py", "from fastapi import FastAPI"),
    ("rag_posfix/pipeline/build.py", "import uvicorn"),
    ("rag_posfix/pipeline/build.py", "import rag_posfix_api.app"),
    ("rag_posfix/pipeline/build.py", "from rag_posfix import cli"),
    ("services/rag_posfix_api/app.py", "from rag_posfix.cli.main import main"),
    ("services/rag_posfix_api/app.py", "from rag_posfix.evaluation.answers.answering import is_sound"),
    ("rag_posfix/cli/bench.py", "from benchmarks import idle"),
    ("rag_posfix/evaluation/ranking/rankings.py", "import ray.data"),
    ("services/rag_posfix_api/ray_serve/routing.py", "from ray import serve"),
    ("services/rag_posfix_api/app.py", "import ray"),
    ("rag_posfix/evaluation/ranking/rankings.py", "import ir_measures"),
    ("rag_posfix/probing/a.py", "from rag_posfix.mitigations.base import Mitigation"),
    ("rag_posfix/probing/a.py", "import transformers"),
    ("rag_posfix/mitigations/a.py", "from rag_posfix.probing import positional_channels"),
    ("services/rag_posfix_api/app.py", "import rag_posfix.probing.positional_channels"),
    ("services/rag_posfix_api/app.py", "import os\nx = os.environ['A']"),
    ("rag_posfix/text.py", "import os\nx = os.getenv('A')"),
    ("rag_posfix/text.py", "from os import environ"),
    ("rag_posfix/text.py", "import pickle"),
    ("rag_posfix/text.py", "from joblib import load"),
    ("rag_posfix/text.py", "np.load(path, allow_pickle=True)"),
    ("rag_posfix/text.py", "torch.load(path)"),
    ("rag_posfix/text.py", "AutoModel.from_pretrained(name, trust_remote_code=settings.trust)"),
    ("rag_posfix/text.py", "kwargs = {'trust_remote_code': True}"),
    ("rag_posfix/text.py", "print('a')"),
    ("services/rag_posfix_api/app.py", "assert 1 < x"),
]

ALLOWED = [
    ("rag_posfix/attention/a.py", "import math, torch\nfrom torch.nn import functional\nfrom .plan import Plan"),
    ("rag_posfix/attention/a.py", "from __future__ import annotations\nfrom rag_posfix.errors import ConfigError"),
    ("rag_posfix/mitigations/a.py", "from rag_posfix.mitigations.base import Mitigation"),
    ("rag_posfix/mitigations/__init__.py", "from rag_posfix.mitigations import base, other"),
    ("rag_posfix/patching/a.py", "from transformers.masking_utils import sdpa_mask"),
    ("rag_posfix/reranking/a.py", "import sentence_transformers"),
    ("rag_posfix/generation/model/sequence_batch.py", "from transformers import DynamicCache"),
    ("rag_posfix/generation/load.py", "from transformers import AutoModelForCausalLM, PreTrainedModel"),
    ("rag_posfix/generation/load.py", "from transformers.utils.quantization_config import GgufConfig"),
    ("rag_posfix/generation/engine.py", "from rag_posfix.mitigations import create, MITIGATIONS"),
    ("rag_posfix/generation/prefill/prefill.py", "from rag_posfix.caching.kv.store import PassageStore"),
    ("rag_posfix/caching/kv/a.py", "from rag_posfix.caching.guard import CircuitBreaker\nimport torch"),
    ("rag_posfix/pipeline/pipeline.py", "from rag_posfix.caching.answers.keys import answer_key"),
    ("rag_posfix/integrations/haystack.py", "from haystack import component"),
    ("rag_posfix/cli/serve.py", "from rag_posfix_api.server import run"),
    ("rag_posfix/cli/probe.py", "from rag_posfix.probing.positional_channels import rank_channels"),
    ("rag_posfix/probing/a.py", "from rag_posfix.generation.model.sequence_batch import LoadedModel"),
    ("rag_posfix/cli/evaluate.py", "from rag_posfix.evaluation import metrics"),
    ("rag_posfix/evaluation/ranking/measures.py", "import ir_measures\nimport pytrec_eval"),
    (
        "rag_posfix/evaluation/ranking/reranking.py",
        "from rag_posfix.evaluation.ranking.ray_backend import ray_rankers",
    ),
    ("services/rag_posfix_api/app.py", "from fastapi import FastAPI\nimport uvicorn"),
    ("rag_posfix/settings.py", "import os\nx = os.environ.get('A')"),
    ("rag_posfix/text.py", "import os\nx = os.path.join('a')"),
    ("rag_posfix/text.py", "torch.load(path, weights_only=True)\nnp.load(path, allow_pickle=False)"),
    ("rag_posfix/text.py", "console.print('a')\ns = 'print(assert)'  # pickle"),
]


def broken(path: str, text: str) -> list[str]:
    tree = [*(source for source in TREE if source.path != path), Source(path, text)]
    return [offender for rule in RULES for offender in rule.violations(tree)]


@pytest.mark.parametrize(("path", "text"), FORBIDDEN, ids=[f"{path}: {text}" for path, text in FORBIDDEN])
def test_the_checker_finds_a_violation(path: str, text: str) -> None:
    offenders = broken(path, text)
    assert offenders
    assert all(offender.startswith(f"{path}:") for offender in offenders)


@pytest.mark.parametrize(("path", "text"), ALLOWED, ids=[f"{path}: {text}" for path, text in ALLOWED])
def test_the_checker_lets_pass_what_is_allowed(path: str, text: str) -> None:
    assert broken(path, text) == []


def test_the_checker_names_the_line_and_the_import() -> None:
    source = Source("rag_posfix/plan/a.py", "import math\n\nimport numpy\n")
    assert IMPORT_RULES[0].violations([source]) == ["rag_posfix/plan/a.py:3: imports numpy"]


def test_the_length_of_a_function_leaves_its_docstring_out() -> None:
    docstring = '    """One.\n\n    Two.\n    """\n'
    source = Source("rag_posfix/a.py", "def f():\n" + docstring + "    x = 1\n" * 4)
    assert long_functions([source], 5) == []
    assert long_functions([source], 4) == ["rag_posfix/a.py:1: f has 5 lines"]


def test_the_length_of_a_file_counts_every_line() -> None:
    source = Source("rag_posfix/a.py", "\n" * 10)
    assert long_files([source], 10) == []
    assert long_files([source], 9) == ["rag_posfix/a.py: 10 lines"]


CIRCLE = [
    Source("rag_posfix/a/__init__.py", ""),
    Source("rag_posfix/a/x.py", "def f():\n    from rag_posfix.b.y import g"),
    Source("rag_posfix/b/__init__.py", ""),
    Source(
        "rag_posfix/b/y.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rag_posfix.b.z import h"
    ),
    Source("rag_posfix/b/z.py", "import rag_posfix.a.x"),
]


def test_a_circle_through_functions_and_type_checking_is_found() -> None:
    paths = cycle(file_imports(CIRCLE))
    assert paths[0] == paths[-1]
    assert sorted(paths[1:]) == ["rag_posfix/a/x.py", "rag_posfix/b/y.py", "rag_posfix/b/z.py"]
    assert cycle(file_imports(CIRCLE[:-1])) == []


def test_an_import_from_a_room_further_down_is_found() -> None:
    assert upward_imports(CIRCLE, ["rag_posfix/a", "rag_posfix/b"]) == [
        "rag_posfix/a/x.py:2: imports rag_posfix/b/y.py, which is in a room further down"
    ]
    assert upward_imports(CIRCLE[:-1], ["rag_posfix/b", "rag_posfix/a"]) == []


def test_files_are_reached_through_others() -> None:
    assert reached(CIRCLE, ("rag_posfix/a/x.py",)) == {"rag_posfix/a/x.py", "rag_posfix/b/y.py", "rag_posfix/b/z.py"}
    assert reached(CIRCLE, ("rag_posfix/a/x.py",), but=("rag_posfix/b/y.py",)) == {"rag_posfix/a/x.py"}


def test_a_package_below_a_source_root_is_imported_by_its_own_name() -> None:
    source = Source("services/rag_posfix_api/http/a.py", "from . import b\nfrom .b import c")
    assert source.module == "rag_posfix_api.http.a"
    assert [found.name for found in source.imports] == ["rag_posfix_api.http.b", "rag_posfix_api.http.b.c"]
