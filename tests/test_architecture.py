"""Who may import whom, and what code may not do. Two tables hold the rules; `support/architecture.py` applies them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.architecture import (
    CodeRule,
    ImportRule,
    Source,
    asserts,
    long_files,
    long_functions,
    prints,
    read_sources,
    reads_environment,
    trusts_remote_code,
    unpickles,
)

ROOT = Path(__file__).resolve().parents[1]
EVERYWHERE = ("rag_posfix/*", "services/*")

# Targets are 300 and 40 lines; above these, the file or the function is to be split.
MOST_LINES_PER_FILE = 330
MOST_LINES_PER_FUNCTION = 60

IMPORT_RULES = [
    ImportRule(
        why="attention is tensor mathematics: torch and errors only",
        files=("rag_posfix/attention/*",),
        only=("torch", "rag_posfix.attention", "rag_posfix.errors"),
    ),
    ImportRule(
        why="a mitigation knows attention and the registry, never another mitigation, a model or transformers",
        files=("rag_posfix/mitigations/*",),
        but=("rag_posfix/mitigations/__init__.py",),
        only=(
            "torch",
            "rag_posfix.attention",
            "rag_posfix.errors",
            "rag_posfix.mitigations.base",
            "rag_posfix.registry",
        ),
    ),
    ImportRule(
        why="the package of mitigations imports its own files, so that each registers itself",
        files=("rag_posfix/mitigations/__init__.py",),
        only=("rag_posfix.attention", "rag_posfix.errors", "rag_posfix.mitigations", "rag_posfix.registry"),
    ),
    ImportRule(
        why="only patching and generation import transformers",
        files=EVERYWHERE,
        but=("rag_posfix/patching/*", "rag_posfix/generation/*"),
        never=("transformers",),
    ),
    ImportRule(
        why="of transformers, generation imports DynamicCache; loading is for models.py and tokenizer.py",
        files=("rag_posfix/generation/*",),
        but=(
            "rag_posfix/generation/kv_cache.py",
            "rag_posfix/generation/models.py",
            "rag_posfix/generation/tokenizer.py",
        ),
        among=("transformers",),
        only=("transformers.DynamicCache",),
    ),
    ImportRule(
        why="our cache is one of transformers' own kind: it derives from their base classes and nothing else",
        files=("rag_posfix/generation/kv_cache.py",),
        among=("transformers",),
        only=("transformers.cache_utils.Cache", "transformers.cache_utils.CacheLayerMixin"),
    ),
    ImportRule(
        why="loading uses the classes that transformers exports at its top; its modules are for patching",
        files=("rag_posfix/generation/tokenizer.py",),
        among=("transformers",),
        only=("transformers.[A-Z]*", "transformers.__version__"),
    ),
    ImportRule(
        why="loading uses the classes that transformers exports at its top, its quantization settings and its logging",
        files=("rag_posfix/generation/models.py",),
        among=("transformers",),
        only=(
            "transformers.[A-Z]*",
            "transformers.__version__",
            "transformers.utils.logging",
            "transformers.utils.quantization_config",
        ),
    ),
    ImportRule(
        why="generation runs plans: it knows patching, attention and what a mitigation is, and none by name",
        files=("rag_posfix/generation/*",),
        among=("rag_posfix",),
        only=(
            "rag_posfix.assembly",
            "rag_posfix.attention",
            "rag_posfix.errors",
            "rag_posfix.generation",
            "rag_posfix.mitigations.base",
            "=rag_posfix.mitigations",
            "rag_posfix.passages",
            "rag_posfix.patching",
            "rag_posfix.protocols",
            "rag_posfix.registry",
            "rag_posfix.settings",
            "rag_posfix.text",
        ),
    ),
    ImportRule(
        why="passages keeps tensors by key: it knows caches, no model and no plan",
        files=("rag_posfix/passages/*",),
        only=(
            "torch",
            "rag_posfix.caching",
            "rag_posfix.errors",
            "rag_posfix.passages",
            "rag_posfix.settings",
            "rag_posfix.text",
        ),
    ),
    ImportRule(
        why="assembly makes token spans from documents: it knows layouts and roles, no model",
        files=("rag_posfix/assembly/*",),
        among=("rag_posfix",),
        only=(
            "rag_posfix.assembly",
            "rag_posfix.attention.spans",
            "rag_posfix.choices",
            "rag_posfix.errors",
            "rag_posfix.protocols",
            "rag_posfix.registry",
            "rag_posfix.text",
        ),
        never=("torch", "transformers"),
    ),
    ImportRule(
        why="retrieval finds documents: it knows roles and text, no model that writes and no prompt",
        files=("rag_posfix/retrieval/*",),
        among=("rag_posfix",),
        only=("rag_posfix.errors", "rag_posfix.protocols", "rag_posfix.retrieval", "rag_posfix.text"),
        never=("torch", "transformers"),
    ),
    ImportRule(
        why="only retrieval knows how vectors and words are indexed and files are read",
        files=EVERYWHERE,
        but=("rag_posfix/retrieval/*",),
        never=("faiss", "bm25s", "pypdf"),
    ),
    ImportRule(
        why="the pipeline knows roles, plain data and pure functions, never a class that fills a role",
        files=("rag_posfix/pipeline.py",),
        among=("rag_posfix",),
        only=(
            "rag_posfix.answer",
            "rag_posfix.assembly",
            "rag_posfix.attention.spans",
            "rag_posfix.caching.keys",
            "rag_posfix.citations",
            "rag_posfix.errors",
            "rag_posfix.generation.request",
            "rag_posfix.mitigations.base",
            "=rag_posfix.mitigations",
            "rag_posfix.protocols",
            "rag_posfix.registry",
            "rag_posfix.rescoring",
            "rag_posfix.settings",
            "rag_posfix.stored_answer",
            "rag_posfix.text",
        ),
        never=("torch", "transformers", "sentence_transformers", "faiss", "fastapi", "starlette", "redis"),
    ),
    ImportRule(
        why="a reranker knows documents, layouts and the generator's role: no model, no tensor and no mitigation",
        files=("rag_posfix/reranking/*", "rag_posfix/rescoring.py"),
        among=("rag_posfix",),
        only=(
            "rag_posfix.assembly",
            "rag_posfix.attention.dummy",
            "rag_posfix.attention.profile",
            "rag_posfix.caching.deadline",
            "rag_posfix.choices",
            "rag_posfix.errors",
            "rag_posfix.generation.request",
            "rag_posfix.protocols",
            "rag_posfix.registry",
            "rag_posfix.reranking",
            "rag_posfix.tenancy",
            "rag_posfix.text",
        ),
        never=("torch", "transformers"),
    ),
    ImportRule(
        why="adapters are for their users: nothing in the library imports them but the list of public names",
        files=EVERYWHERE,
        but=("rag_posfix/__init__.py", "rag_posfix/integrations/*"),
        never=("rag_posfix.integrations",),
    ),
    ImportRule(
        why="a framework is imported by its own adapter only",
        files=EVERYWHERE,
        but=("rag_posfix/integrations/haystack.py", "rag_posfix/integrations/llama_index.py"),
        never=("haystack", "llama_index"),
    ),
    ImportRule(
        why="langchain is langchain-core: the other packages are retired or pull what we cannot pin",
        files=EVERYWHERE,
        never=("langchain", "langchain_classic", "langchain_community"),
    ),
    ImportRule(
        why="HTTP lives in services",
        files=("rag_posfix/*",),
        never=("fastapi", "starlette"),
    ),
    ImportRule(
        why="only services and `rag-posfix serve` start a server",
        files=("rag_posfix/*",),
        but=("rag_posfix/cli/serve.py",),
        never=("uvicorn",),
    ),
    ImportRule(
        why="nothing imports the command line",
        files=EVERYWHERE,
        but=("rag_posfix/cli/*",),
        never=("rag_posfix.cli",),
    ),
    ImportRule(
        why="only the command line imports services",
        files=("rag_posfix/*",),
        but=("rag_posfix/cli/*",),
        never=("services",),
    ),
    ImportRule(
        why="only the command line imports evaluation",
        files=EVERYWHERE,
        but=("rag_posfix/cli/*", "rag_posfix/evaluation/*"),
        never=("rag_posfix.evaluation",),
    ),
    ImportRule(
        why="probing measures a loaded model: it knows the seam and no method",
        files=("rag_posfix/probing/*",),
        among=("rag_posfix",),
        only=(
            "rag_posfix.attention",
            "rag_posfix.errors",
            "rag_posfix.generation",
            "rag_posfix.patching",
            "rag_posfix.probing",
        ),
    ),
    ImportRule(
        why="only the command line imports probing",
        files=EVERYWHERE,
        but=("rag_posfix/cli/*", "rag_posfix/probing/*"),
        never=("rag_posfix.probing",),
    ),
    ImportRule(
        why="in the library one file talks to Ray, and one computes measures of rankings",
        files=("rag_posfix/*",),
        but=("rag_posfix/evaluation/ray_rerank.py", "rag_posfix/evaluation/measures.py"),
        never=("ray", "ir_measures", "pytrec_eval"),
    ),
    ImportRule(
        why="benchmarks, tests and docs are not installed; nothing imports them",
        files=EVERYWHERE,
        never=("benchmarks", "tests", "docs"),
    ),
]

CODE_RULES = [
    CodeRule("only settings.py reads the environment", reads_environment, but=("rag_posfix/settings.py",)),
    CodeRule("nothing is ever unpickled", unpickles),
    CodeRule("no code of a model repository is run", trusts_remote_code),
    CodeRule("commands write through their console, the library logs", prints),
    CodeRule("errors are raised from rag_posfix.errors: assert is gone under -O and shows no value", asserts),
]

RULES = [*IMPORT_RULES, *CODE_RULES]


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
    ("rag_posfix/build.py", "import bm25s"),
    ("rag_posfix/retrieval/a.py", "import importlib\nimportlib.import_module('transformers.masking_utils')"),
    ("rag_posfix/generation/engine.py", "from transformers import AutoModelForCausalLM"),
    ("rag_posfix/generation/engine.py", "from transformers.cache_utils import DynamicCache"),
    ("rag_posfix/generation/models.py", "from transformers import masking_utils"),
    ("rag_posfix/generation/models.py", "import transformers.modeling_utils"),
    ("rag_posfix/generation/tokenizer.py", "from transformers.utils.quantization_config import GgufConfig"),
    ("rag_posfix/generation/engine.py", "from rag_posfix.mitigations.other import Other"),
    ("rag_posfix/generation/engine.py", "from rag_posfix.mitigations import other"),
    ("rag_posfix/generation/engine.py", "from rag_posfix.retrieval.ingest import read_documents"),
    ("rag_posfix/generation/engine.py", "import rag_posfix"),
    ("rag_posfix/passages/a.py", "from rag_posfix.generation.forward import LoadedModel"),
    ("rag_posfix/passages/a.py", "from rag_posfix.attention.plan import Plan"),
    ("rag_posfix/passages/a.py", "import redis"),
    ("rag_posfix/assembly/a.py", "import torch"),
    ("rag_posfix/assembly/a.py", "from rag_posfix.attention.plan import Plan"),
    ("rag_posfix/pipeline.py", "from rag_posfix.retrieval.faiss_store import FaissVectorStore"),
    ("rag_posfix/pipeline.py", "from rag_posfix.caching import tiered"),
    ("rag_posfix/reranking/a.py", "from rag_posfix.generation.engine import Engine"),
    ("rag_posfix/reranking/a.py", "import torch"),
    ("rag_posfix/pipeline.py", "import torch.nn"),
    ("rag_posfix/pipeline.py", "from rag_posfix.integrations.langchain.rag import PosfixRAG"),
    ("rag_posfix/build.py", "import haystack"),
    ("rag_posfix/integrations/haystack.py", "from langchain_community.document_transformers import x"),
    ("rag_posfix/cli/serve.py", "from fastapi import FastAPI"),
    ("rag_posfix/build.py", "import uvicorn"),
    ("rag_posfix/build.py", "import services.api.app"),
    ("rag_posfix/build.py", "from rag_posfix import cli"),
    ("services/api/app.py", "from rag_posfix.cli.main import main"),
    ("services/api/app.py", "from rag_posfix.evaluation.metrics import ndcg"),
    ("rag_posfix/cli/bench.py", "from benchmarks import idle"),
    ("rag_posfix/evaluation/reranking.py", "import ray.data"),
    ("rag_posfix/evaluation/reranking.py", "import ir_measures"),
    ("rag_posfix/probing/a.py", "from rag_posfix.mitigations.base import Mitigation"),
    ("rag_posfix/probing/a.py", "import transformers"),
    ("rag_posfix/mitigations/a.py", "from rag_posfix.probing import positional_channels"),
    ("services/api/app.py", "import rag_posfix.probing.positional_channels"),
    ("services/api/app.py", "import os\nx = os.environ['A']"),
    ("rag_posfix/text.py", "import os\nx = os.getenv('A')"),
    ("rag_posfix/text.py", "from os import environ"),
    ("rag_posfix/text.py", "import pickle"),
    ("rag_posfix/text.py", "from joblib import load"),
    ("rag_posfix/text.py", "np.load(path, allow_pickle=True)"),
    ("rag_posfix/text.py", "torch.load(path)"),
    ("rag_posfix/text.py", "AutoModel.from_pretrained(name, trust_remote_code=settings.trust)"),
    ("rag_posfix/text.py", "kwargs = {'trust_remote_code': True}"),
    ("rag_posfix/text.py", "print('a')"),
    ("services/api/app.py", "assert 1 < x"),
]

ALLOWED = [
    ("rag_posfix/attention/a.py", "import math, torch\nfrom torch.nn import functional\nfrom .plan import Plan"),
    ("rag_posfix/attention/a.py", "from __future__ import annotations\nfrom rag_posfix.errors import ConfigError"),
    ("rag_posfix/mitigations/a.py", "from rag_posfix.mitigations.base import Mitigation"),
    ("rag_posfix/mitigations/__init__.py", "from rag_posfix.mitigations import base, other"),
    ("rag_posfix/patching/a.py", "from transformers.masking_utils import sdpa_mask"),
    ("rag_posfix/reranking/a.py", "import sentence_transformers"),
    ("rag_posfix/generation/engine.py", "from transformers import DynamicCache"),
    ("rag_posfix/generation/models.py", "from transformers import AutoModelForCausalLM, PreTrainedModel"),
    ("rag_posfix/generation/models.py", "from transformers.utils.quantization_config import GgufConfig"),
    ("rag_posfix/generation/engine.py", "from rag_posfix.mitigations import create, MITIGATIONS"),
    ("rag_posfix/generation/prefill.py", "from rag_posfix.passages.store import PassageStore"),
    ("rag_posfix/passages/a.py", "from rag_posfix.caching.breaker import CircuitBreaker\nimport torch"),
    ("rag_posfix/pipeline.py", "from rag_posfix.caching.keys import answer_key"),
    ("rag_posfix/integrations/haystack.py", "from haystack import component"),
    ("rag_posfix/cli/serve.py", "import uvicorn\nfrom services.api.app import create_app"),
    ("rag_posfix/cli/probe.py", "from rag_posfix.probing.positional_channels import rank_channels"),
    ("rag_posfix/probing/a.py", "from rag_posfix.generation.forward import LoadedModel"),
    ("rag_posfix/cli/evaluate.py", "from rag_posfix.evaluation import metrics"),
    ("rag_posfix/evaluation/measures.py", "import ir_measures\nimport pytrec_eval"),
    ("rag_posfix/evaluation/rerank_run.py", "from rag_posfix.evaluation.ray_rerank import ray_rankers"),
    ("services/api/app.py", "from fastapi import FastAPI\nimport uvicorn"),
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
    source = Source("rag_posfix/attention/a.py", "import math\n\nimport numpy\n")
    assert IMPORT_RULES[0].violations([source]) == ["rag_posfix/attention/a.py:3: imports numpy"]


def test_the_length_of_a_function_leaves_its_docstring_out() -> None:
    docstring = '    """One.\n\n    Two.\n    """\n'
    source = Source("rag_posfix/a.py", "def f():\n" + docstring + "    x = 1\n" * 4)
    assert long_functions([source], 5) == []
    assert long_functions([source], 4) == ["rag_posfix/a.py:1: f has 5 lines"]


def test_the_length_of_a_file_counts_every_line() -> None:
    source = Source("rag_posfix/a.py", "\n" * 10)
    assert long_files([source], 10) == []
    assert long_files([source], 9) == ["rag_posfix/a.py: 10 lines"]
