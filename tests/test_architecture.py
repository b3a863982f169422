"""Who may import whom, and what code may not do.

pyproject.toml has the rules of imports, which import-linter checks, and those of ruff. The rules below are the rest.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.import_contracts import circle
from tests.support.source_files import ROOT, Source, dotted, imported_names, read_sources

# A file of this length is one idea; a function aims at 40 lines.
MAX_LINES_PER_FILE = 900
MAX_LINES_PER_FUNCTION = 60

TRANSFORMERS_NAMES = {
    "rag_posfix/generation/load.py": (
        r"[A-Z]\w*|__version__|modeling_gguf_pytorch_utils|utils\.(logging|quantization_config)(\.\w+)*"
    ),
    "rag_posfix/generation/model/sequence_batch.py": "DynamicCache|cache_utils.(Cache|CacheLayerMixin)",
}
"""What generation imports of transformers: classes exported at its top, the bases of caches, what shows a bar."""


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Check the packages below ``root`` against the contracts of its pyproject.toml."""
    path = os.pathsep.join(map(str, (root, root / "services", ROOT)))
    program = "from importlinter.cli import lint_imports_command as main; main(['--no-cache', '--no-logo'])"
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_imports_keep_every_contract() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def in_function(line: str) -> str:
    return f"def planted():\n    {line}"


def for_types(line: str) -> str:
    return f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {line}"


# File, what is added to it, and the import that is reported. Every contract is broken by one of them.
PLANTED = [
    ("rag_posfix/plan/plan.py", in_function("import numpy"), "numpy"),
    ("rag_posfix/contracts/answer.py", for_types("from torch.nn import Module"), "torch"),
    ("rag_posfix/attention/masks.py", "from rag_posfix.text import clean_text", "rag_posfix.text"),
    ("rag_posfix/attention/masks.py", "from ..generation import engine", "rag_posfix.generation.engine"),
    ("rag_posfix/mitigations/stack.py", "from . import none", "rag_posfix.mitigations.none"),
    ("rag_posfix/mitigations/__init__.py", "from rag_posfix.patching import install", "rag_posfix.patching.install"),
    ("rag_posfix/lab/encodings/cope.py", "from rag_posfix.plan.plan import Plan", "rag_posfix.plan.plan"),
    ("rag_posfix/generation/engine.py", "from rag_posfix.mitigations import none", "rag_posfix.mitigations.none"),
    ("rag_posfix/generation/engine.py", "import rag_posfix", "rag_posfix"),
    ("rag_posfix/generation/engine.py", "import httpx2", "httpx2"),
    ("rag_posfix/generation/engine.py", "from transformers import AutoModelForCausalLM", "transformers"),
    ("rag_posfix/caching/tier.py", "from rag_posfix.plan.plan import Plan", "rag_posfix.plan.plan"),
    ("rag_posfix/caching/tier.py", "import torch", "torch"),
    ("rag_posfix/assembly/tokenization.py", "from rag_posfix.plan.plan import Plan", "rag_posfix.plan.plan"),
    (
        "rag_posfix/retrieval/base.py",
        "from rag_posfix.assembly.tokenization import x",
        "rag_posfix.assembly.tokenization",
    ),
    ("rag_posfix/reranking/build.py", "from rag_posfix.retrieval.base import x", "rag_posfix.retrieval.base"),
    ("rag_posfix/pipeline/pipeline.py", "from rag_posfix.retrieval.base import x", "rag_posfix.retrieval.base"),
    ("rag_posfix/pipeline/build.py", "import redis, sentence_transformers", "redis"),
    ("rag_posfix/pipeline/build.py", "import bm25s", "bm25s"),
    ("rag_posfix/pipeline/build.py", "import haystack", "haystack"),
    ("rag_posfix/pipeline/build.py", "import uvicorn", "uvicorn"),
    ("rag_posfix/pipeline/build.py", "from mcp_types import Tool", "mcp_types"),
    ("rag_posfix/mcp/forms.py", "from rag_posfix.assembly.tokenization import x", "rag_posfix.assembly.tokenization"),
    ("rag_posfix/pipeline/build.py", "import opentelemetry.trace", "opentelemetry"),
    ("rag_posfix/pipeline/build.py", "from rag_posfix import cli", "rag_posfix.cli"),
    ("rag_posfix/pipeline/build.py", "from rag_posfix.lab import encodings", "rag_posfix.lab.encodings"),
    ("rag_posfix/telemetry/spans.py", "from rag_posfix.pipeline.pipeline import x", "rag_posfix.pipeline.pipeline"),
    ("rag_posfix/lab/probing/base.py", "from rag_posfix.mitigations.base import x", "rag_posfix.mitigations.base"),
    ("rag_posfix/lab/experiment.py", "import numpy", "numpy"),
    ("rag_posfix/lab/claims/base.py", "from rag_posfix.pipeline.build import x", "rag_posfix.pipeline.build"),
    ("rag_posfix/lab/training/loop.py", "import ray.data, peft", "ray"),
    ("rag_posfix/evaluation/statistics.py", "import pytrec_eval, pickle", "pytrec_eval"),
    ("rag_posfix/evaluation/statistics.py", "from peft import LoraConfig", "peft"),
    ("rag_posfix/evaluation/statistics.py", "from langchain_community.tools import x", "langchain_community"),
    ("rag_posfix/evaluation/statistics.py", "from tests.support import clock", "tests"),
    ("services/rag_posfix_api/http/auth.py", "from .. import dialects", "rag_posfix_api.dialects"),
    ("services/rag_posfix_api/server.py", "from rag_posfix import evaluation", "rag_posfix.evaluation"),
]


def test_an_import_against_any_contract_is_reported(tmp_path: Path) -> None:
    for name in ("rag_posfix", "services"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=lambda _, names: [n for n in names if n == "__pycache__"])
    for name in ("pyproject.toml", "docs/architecture.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name, code, _ in PLANTED:
        with (tmp_path / name).open("a", encoding="utf-8") as file:
            file.write(f"\n{code}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    assert re.search(r"Contracts: 0 kept, \d+ broken", done.stdout), done.stdout + done.stderr
    for name, _, imported in PLANTED:
        importer = name.removeprefix("services/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        assert re.search(rf"- +{importer} -> {imported} \(", done.stdout)


def test_a_circle_of_files_is_found() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert sorted(circle(imports)) == [("a", "b"), ("b", "c"), ("c", "a")]
    assert circle({**imports, "c": set()}) == []


def test_every_room_stands_in_the_table_with_its_own_first_line() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    table = dict(re.findall(r"^\| `([a-z_/]+)/` \| (.+) \|$", text, re.MULTILINE))
    folders = {file.parent for name in ("rag_posfix", "services") for file in (ROOT / name).rglob("*.py")}
    first_lines = {
        folder.relative_to(ROOT).as_posix(): (folder / "__init__.py").read_text("utf-8").partition("\n")[0]
        for folder in folders
    }
    assert {room: line.strip('"') for room, line in first_lines.items()} == table


def test_what_the_computing_rooms_need_on_demand_is_imported_inside_of_functions() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    (computing,) = [contract for contract in contracts if contract.get("id") == "computing"]
    pairs = [line.split(" -> ") for line in computing["ignore_imports"] if not line.endswith("*")]
    assert ["rag_posfix.checkpoints", "huggingface_hub"] in pairs
    for module, package in pairs:
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8"))
        imported = [name for node in tree.body for name in imported_names(node)]
        assert [name for name in imported if name.split(".")[0] == package] == []


# Rules of code: each returns what it finds wrong with a node of the syntax tree, or "".


def unpickles(node: ast.AST) -> str:
    """The switches by which libraries unpickle. An import contract forbids pickle itself."""
    if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "allow_dangerous_deserialization"):
        return "" if is_constant(node.value, False) else f"{node.arg} other than False"
    if isinstance(node, ast.Call) and dotted(node.func) == "torch.load":
        safe = any(k.arg == "weights_only" and is_constant(k.value, True) for k in node.keywords)
        return "" if safe else "torch.load without weights_only=True"
    return ""


def trusts_remote_code(node: ast.AST) -> str:
    if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
        return "" if is_constant(node.value, False) else "trust_remote_code other than False"
    if isinstance(node, ast.Dict) and any(is_constant(key, "trust_remote_code") for key in node.keys):
        return "a dictionary with trust_remote_code"
    return ""


def hides_an_import(node: ast.AST) -> str:
    """A literal name that is imported at run time, which import-linter does not see."""
    if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ("import_module", "__import__"):
        literal = node.args and isinstance(node.args[0], ast.Constant)
        return "a literal name is imported at run time; write an import statement" if literal else ""
    return ""


def is_long(node: ast.AST) -> str:
    """Functions with too many lines, their docstring and decorators left out."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    first = node.body[0].end_lineno if ast.get_docstring(node, clean=False) is not None else None
    docstring = first - node.body[0].lineno + 1 if first else 0
    lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring
    return f"{node.name} has {lines} lines" if lines > MAX_LINES_PER_FUNCTION else ""


def is_constant(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value == value and type(node.value) is type(value)


JUDGED = (ast.Call, ast.keyword, ast.Dict, ast.FunctionDef, ast.AsyncFunctionDef)
CODE_RULES = (unpickles, trusts_remote_code, hides_an_import, is_long)


def broken_rules(sources: list[Source]) -> list[str]:
    """Return the places where code breaks a rule."""
    return [
        f"{source.path}:{getattr(node, 'lineno', 1)}: {found}"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, JUDGED)
        for rule in CODE_RULES
        if (found := rule(node))
    ] + internals_of_transformers(sources)


def internals_of_transformers(sources: list[Source]) -> list[str]:
    return [
        f"{source.path}: imports {name}"
        for source in sources
        if source.path.startswith("rag_posfix/generation/")
        for node in ast.walk(source.tree)
        for name in imported_names(node)
        if name.split(".")[0] == "transformers"
        if not re.fullmatch(rf"transformers\.({TRANSFORMERS_NAMES.get(source.path, '')})", name)
    ]


@pytest.mark.parametrize("part", range(4))
def test_code_keeps_the_rules_and_files_are_short(part: int) -> None:
    sources = read_sources("rag_posfix", "services", part=part, parts=4)
    assert broken_rules(sources) == []
    counts = {source.path: source.text.count("\n") for source in sources}
    assert {path: lines for path, lines in counts.items() if lines > MAX_LINES_PER_FILE} == {}


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("rag_posfix/text.py", "np.load(path, allow_pickle=True)"),
        ("rag_posfix/text.py", "torch.load(path)"),
        ("rag_posfix/text.py", "AutoModel.from_pretrained(name, trust_remote_code=settings.trust)"),
        ("rag_posfix/text.py", "kwargs = {'trust_remote_code': True}"),
        ("rag_posfix/text.py", "importlib.import_module('transformers.masking_utils')"),
        ("rag_posfix/text.py", "def f():\n" + "    x = 1\n" * MAX_LINES_PER_FUNCTION),
        ("rag_posfix/generation/load.py", "from transformers import masking_utils"),
        ("rag_posfix/generation/load.py", "import transformers.modeling_utils"),
        ("rag_posfix/generation/engine.py", "from transformers import AutoModelForCausalLM"),
        ("rag_posfix/generation/model/sequence_batch.py", "from transformers.cache_utils import DynamicCache"),
    ],
)
def test_code_against_a_rule_is_found(path: str, code: str) -> None:
    assert len(broken_rules([Source(path, code)])) == 1


@pytest.mark.parametrize(
    "code",
    [
        "torch.load(path, weights_only=True)\nnp.load(path, allow_pickle=False, trust_remote_code=False)",
        "importlib.import_module(name)",
        "def f():\n" + '    """One.\n\n    Two.\n    """\n' + "    x = 1\n" * (MAX_LINES_PER_FUNCTION - 1),
        "from transformers import AutoConfig, __version__\nfrom transformers.utils.quantization_config import A",
    ],
)
def test_code_within_the_rules_passes(code: str) -> None:
    assert broken_rules([Source("rag_posfix/generation/load.py", code)]) == []


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("rag_posfix/text.py", ["S101", "T201", "TID251", "TID251"]),
        ("services/rag_posfix_api/app.py", ["S101", "T201", "TID251", "TID251"]),
        ("tests/unit/test_text.py", ["SLF001", "T201"]),
    ],
)
def test_ruff_finds_prints_asserts_the_environment_and_private_names_in_tests(path: str, found: list[str]) -> None:
    code = 'import os\n\nprint(os.environ["A"], os.getenv("B"))\nassert 1\nos.x._y\n'
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "concise", "--stdin-filename", path, "-"]
    done = subprocess.run(command, cwd=ROOT, input=code, capture_output=True, text=True, timeout=60)
    assert sorted(code for code in re.findall(r": ([A-Z]+\d+) ", done.stdout) if code != "B018") == found
