"""Who may import whom, and what code may not do. Two tables hold the rules; `support/architecture.py` applies them."""

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
    asserts,
    cycles,
    file_imports,
    long_files,
    long_functions,
    prints,
    reached,
    read_sources,
    reads_environment,
    trusts_remote_code,
    unpickles,
    upward_imports,
)

ROOT = Path(__file__).resolve().parents[1]
PUBLIC_NAMES = ("rag_posfix/__init__.py", "rag_posfix/evaluation/__init__.py")
"""Lists of public names: they name files of rooms further down, and import each when the name is first used."""
EVERYWHERE = ("rag_posfix/*", "services/*")

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
    "rag_posfix/caching/redis_link.py": ("redis",),
    "rag_posfix/generation/remote/connection.py": ("httpx2", "anyio"),  # where the model is on a server
    "rag_posfix/generation/model/adapters.py": ("peft",),  # where a model has an adapter
    "rag_posfix/generation/model/fingerprint.py": ("huggingface_hub",),  # a package that transformers needs itself
}
"""What a file imports inside of a function, for what the rooms that compute do not do themselves."""

IMPORT_RULES = [
    ImportRule(
        why="a plan is data: torch for its types, and nothing that computes or reads files but its own room",
        files=("rag_posfix/plan/*",),
        only=("torch", "rag_posfix.errors", "rag_posfix.parameters", "rag_posfix.plan"),
    ),
    ImportRule(
        why="contracts are plain data and protocols: no torch and no class that implements a protocol",
        files=("rag_posfix/contracts/*",),
        only=(
            "langchain_core",
            "rag_posfix.contracts",
            "rag_posfix.errors",
            "rag_posfix.parameters",
            "rag_posfix.plan.layout",
        ),
    ),
    ImportRule(
        why="attention is tensor mathematics: torch, plans and errors only",
        files=("rag_posfix/attention/*",),
        only=("torch", "rag_posfix.attention", "rag_posfix.errors", "rag_posfix.plan"),
    ),
    ImportRule(
        why="a mitigation knows plans, attention and the registry, never another mitigation, a model or transformers",
        files=("rag_posfix/mitigations/*",),
        but=("rag_posfix/mitigations/__init__.py",),
        only=(
            "torch",
            "rag_posfix.attention",
            "rag_posfix.errors",
            "rag_posfix.mitigations.base",
            "rag_posfix.contracts.method_spec",
            "rag_posfix.parameters",
            "rag_posfix.plan",
            "rag_posfix.registry",
        ),
    ),
    ImportRule(
        why="the package of mitigations imports its own files, so that each registers itself",
        files=("rag_posfix/mitigations/__init__.py",),
        only=("rag_posfix.errors", "rag_posfix.mitigations", "rag_posfix.registry"),
    ),
    ImportRule(
        why="encodings are torch modules for small decoders: they know attention kernels, no model, plan or method",
        files=("rag_posfix/encodings/*",),
        only=(
            "torch",
            "safetensors",
            "rag_posfix.attention",
            "rag_posfix.contracts.method_spec",
            "rag_posfix.contracts.parametrised",
            "rag_posfix.encodings",
            "rag_posfix.errors",
            "rag_posfix.parameters",
            "rag_posfix.registry",
        ),
    ),
    ImportRule(
        why="only patching and generation import transformers",
        files=EVERYWHERE,
        but=("rag_posfix/patching/*", "rag_posfix/generation/*"),
        never=("transformers",),
    ),
    ImportRule(
        why="of transformers, generation imports nothing; loading is for load.py, tokenizer.py and kv_cache.py",
        files=("rag_posfix/generation/*",),
        but=(
            "rag_posfix/generation/load.py",
            "rag_posfix/generation/model/kv_cache.py",
            "rag_posfix/generation/model/sequence_batch.py",
            "rag_posfix/generation/model/tokenizer.py",
        ),
        never=("transformers",),
    ),
    ImportRule(
        why="where layers keep windows of keys, the cache is transformers' own",
        files=("rag_posfix/generation/model/sequence_batch.py",),
        among=("transformers",),
        only=("transformers.DynamicCache",),
    ),
    ImportRule(
        why="our cache is one of transformers' own kind: it derives from their base classes and nothing else",
        files=("rag_posfix/generation/model/kv_cache.py",),
        among=("transformers",),
        only=("transformers.cache_utils.Cache", "transformers.cache_utils.CacheLayerMixin"),
    ),
    ImportRule(
        why="loading uses the classes that transformers exports at its top; its modules are for patching",
        files=("rag_posfix/generation/model/tokenizer.py",),
        among=("transformers",),
        only=("transformers.[A-Z]*", "transformers.__version__"),
    ),
    ImportRule(
        why="loading uses the classes that transformers exports at its top, its quantization settings and its logging",
        files=("rag_posfix/generation/load.py",),
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
            "rag_posfix.attention",
            "rag_posfix.caching.kv",
            "rag_posfix.contracts",
            "rag_posfix.errors",
            "rag_posfix.folders",
            "rag_posfix.generation",
            "rag_posfix.mitigations.base",
            "=rag_posfix.mitigations",
            "rag_posfix.patching",
            "rag_posfix.plan",
            "rag_posfix.weight_packages",
            "rag_posfix.registry",
            "rag_posfix.text",
        ),
    ),
    ImportRule(
        why="caches keep bytes and tensors by key: they know no model, no plan and no prompt",
        files=("rag_posfix/caching/*",),
        among=("rag_posfix",),
        only=(
            "rag_posfix.caching",
            "rag_posfix.cancellation",
            "rag_posfix.errors",
            "rag_posfix.folders",
            "rag_posfix.registry",
            "rag_posfix.settings",
            "rag_posfix.text",
        ),
        never=("transformers",),
    ),
    ImportRule(
        why="what caches share and the answer cache work without torch",
        files=("rag_posfix/caching/*",),
        but=("rag_posfix/caching/kv/*",),
        never=("torch",),
    ),
    ImportRule(
        why="assembly makes token spans from documents: it knows layouts and contracts, no model",
        files=("rag_posfix/assembly/*",),
        among=("rag_posfix",),
        only=(
            "rag_posfix.assembly",
            "rag_posfix.cancellation",
            "rag_posfix.contracts",
            "rag_posfix.errors",
            "rag_posfix.parameters",
            "rag_posfix.plan.bias_profile",
            "rag_posfix.plan.layout",
            "rag_posfix.registry",
            "rag_posfix.text",
        ),
        never=("torch", "transformers"),
    ),
    ImportRule(
        why="retrieval finds documents: it knows contracts and text, no model that writes and no prompt",
        files=("rag_posfix/retrieval/*",),
        among=("rag_posfix",),
        only=(
            "rag_posfix.contracts",
            "rag_posfix.durable_files",
            "rag_posfix.errors",
            "rag_posfix.folders",
            "rag_posfix.retrieval",
            "rag_posfix.text",
            "rag_posfix.weight_packages",
        ),
        never=("torch", "transformers"),
    ),
    ImportRule(
        why="only retrieval knows how vectors and words are indexed and files are read",
        files=EVERYWHERE,
        but=("rag_posfix/retrieval/*",),
        never=("faiss", "bm25s", "docx", "pypdf"),
    ),
    ImportRule(
        why="concrete parts are chosen in pipeline/build.py alone; the rest of the pipeline knows contracts and data",
        files=("rag_posfix/pipeline/*",),
        but=("rag_posfix/pipeline/build.py",),
        among=("rag_posfix",),
        only=(
            "rag_posfix.assembly",
            "rag_posfix.caching.answers.keys",
            "rag_posfix.contracts",
            "rag_posfix.errors",
            "rag_posfix.parameters",
            "rag_posfix.pipeline",
            "rag_posfix.plan.layout",
            "rag_posfix.registry",
            "rag_posfix.text",
        ),
        never=("torch", "transformers", "sentence_transformers", "faiss", "fastapi", "starlette", "redis"),
    ),
    ImportRule(
        why="a reranker knows documents, layouts and the generator's protocol: no model, no tensor and no mitigation",
        files=("rag_posfix/reranking/*",),
        among=("rag_posfix",),
        only=(
            "rag_posfix.assembly",
            "rag_posfix.caching.deadline",
            "rag_posfix.contracts",
            "rag_posfix.errors",
            "rag_posfix.parameters",
            "rag_posfix.plan.bias_profile",
            "rag_posfix.plan.dummy",
            "rag_posfix.registry",
            "rag_posfix.reranking",
            "rag_posfix.text",
        ),
        never=("torch", "transformers"),
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
        why="telemetry writes spans of pipelines: the others call protocols",
        files=EVERYWHERE,
        but=("rag_posfix/telemetry/*", "services/rag_posfix_api/http/tracing.py"),
        never=("opentelemetry",),
    ),
    ImportRule(
        why="telemetry knows what a pipeline reports, and no part of one",
        files=("rag_posfix/telemetry/*",),
        among=("rag_posfix",),
        only=(
            "rag_posfix.__version__",
            "rag_posfix.contracts",
            "rag_posfix.errors",
            "rag_posfix.pipeline.protocols",
            "rag_posfix.pipeline.watching",
            "rag_posfix.settings",
            "rag_posfix.telemetry",
        ),
    ),
    ImportRule(
        why="HTTP lives in services",
        files=("rag_posfix/*",),
        never=("fastapi", "starlette"),
    ),
    ImportRule(
        why="only services start a server",
        files=("rag_posfix/*",),
        never=("uvicorn",),
    ),
    ImportRule(
        why="nothing imports the command line, evaluation, adapters or services; what measures uses evaluation",
        files=EVERYWHERE,
        but=(
            "rag_posfix/__init__.py",
            "rag_posfix/cli/*",
            "rag_posfix/evaluation/*",
            "rag_posfix/integrations/*",
            "rag_posfix/laboratory/*",
            "rag_posfix/probing/*",
            "rag_posfix/training/*",
            "services/rag_posfix_api/*",
        ),
        never=("rag_posfix.cli", "rag_posfix.evaluation", "rag_posfix.integrations", "rag_posfix_api"),
    ),
    ImportRule(
        why="a service serves pipelines: it measures nothing and is no command",
        files=("services/*",),
        never=(
            "rag_posfix.cli",
            "rag_posfix.evaluation",
            "rag_posfix.integrations",
            "rag_posfix.laboratory",
            "rag_posfix.probing",
        ),
    ),
    ImportRule(
        why="HTTP parts that every route shares know no wire format",
        files=("services/rag_posfix_api/http/*", "services/rag_posfix_api/runtime/*"),
        never=("rag_posfix_api.dialects",),
    ),
    ImportRule(
        why="probing measures models: it knows plans, the hook, encodings, records, and the method it writes for",
        files=("rag_posfix/probing/*",),
        among=("rag_posfix",),
        only=(
            "rag_posfix.assembly",
            "rag_posfix.attention",
            "rag_posfix.contracts",
            "rag_posfix.errors",
            "rag_posfix.encodings",
            "rag_posfix.evaluation.data",
            "rag_posfix.evaluation.figures",
            "rag_posfix.evaluation.progress",
            "rag_posfix.evaluation.record",
            "rag_posfix.evaluation.whole_file",
            "rag_posfix.generation",
            "rag_posfix.mitigations.hidden_scaling",
            "=rag_posfix.mitigations",
            "rag_posfix.parameters",
            "rag_posfix.patching",
            "rag_posfix.pipeline.build",
            "rag_posfix.plan",
            "rag_posfix.probing",
            "rag_posfix.registry",
            "rag_posfix.reranking.in_context",
            "rag_posfix.settings",
        ),
    ),
    ImportRule(
        why="the laboratory trains small decoders on torch alone: it knows encodings and records, no loaded model",
        files=("rag_posfix/laboratory/*",),
        only=(
            "torch",
            "safetensors",
            "rag_posfix.contracts.method_spec",
            "rag_posfix.contracts.parametrised",
            "rag_posfix.encodings",
            "rag_posfix.errors",
            "rag_posfix.evaluation.figures",
            "rag_posfix.evaluation.progress",
            "rag_posfix.evaluation.record",
            "rag_posfix.evaluation.whole_file",
            "rag_posfix.laboratory",
            "rag_posfix.parameters",
            "rag_posfix.registry",
            "rag_posfix.training_tensors",
            # The type of a figure alone; it is drawn in evaluation/figures.py.
            "matplotlib",
        ),
    ),
    ImportRule(
        why="in the library one file talks to Ray, and one computes measures of rankings",
        files=("rag_posfix/*",),
        but=("rag_posfix/evaluation/ray_cluster.py", "rag_posfix/evaluation/ranking/measures.py"),
        never=("ray", "ir_measures", "pytrec_eval"),
    ),
    ImportRule(
        why="of the service, three files of ray_serve talk to Ray; what they decide is decided without it",
        files=("services/*",),
        but=(
            "services/rag_posfix_api/ray_serve/application.py",
            "services/rag_posfix_api/ray_serve/overlap_router.py",
            "services/rag_posfix_api/ray_serve/serve_handle.py",
        ),
        never=("ray",),
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
    fail_on([" <-> ".join(group) for group in cycles(graph)], "files import each other in a circle")


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
    ("services/rag_posfix_api/app.py", "from rag_posfix.evaluation.answers.answering import first_line"),
    ("rag_posfix/cli/bench.py", "from benchmarks import idle"),
    ("rag_posfix/evaluation/ranking/rerankers.py", "import ray.data"),
    ("services/rag_posfix_api/ray_serve/scoring.py", "from ray import serve"),
    ("services/rag_posfix_api/app.py", "import ray"),
    ("rag_posfix/evaluation/ranking/rerankers.py", "import ir_measures"),
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
    ("rag_posfix/caching/kv/a.py", "from rag_posfix.caching.breaker import CircuitBreaker\nimport torch"),
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
    assert cycles(file_imports(CIRCLE)) == [["rag_posfix/a/x.py", "rag_posfix/b/y.py", "rag_posfix/b/z.py"]]
    assert cycles(file_imports(CIRCLE[:-1])) == []


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
