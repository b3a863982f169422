"""The rules of the repository: who may import whom, and what code may not do. `test_architecture.py` applies them."""

from __future__ import annotations

import re

from tests.support.architecture import (
    CodeRule,
    ImportRule,
    asserts,
    prints,
    reads_environment,
    trusts_remote_code,
    unpickles,
)

EVERYWHERE = ("rag_posfix/*", "services/*")


def within_rag_posfix(names: str) -> tuple[str, ...]:
    """Return the full names of modules of rag_posfix; "=" before a name stays in front."""
    return tuple(re.sub(r"^(=?)", r"\1rag_posfix.", name) for name in names.split())


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
            *within_rag_posfix("checked contracts errors parameters plan.layout text"),
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
            *within_rag_posfix("attention errors mitigations.base contracts.method_spec parameters plan registry"),
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
            *within_rag_posfix("attention contracts.method_spec encodings errors parameters registry"),
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
        only=within_rag_posfix(
            "attention caching.kv checked checkpoints contracts devices errors files generation "
            "mitigations.base =mitigations patching plan process weight_packages registry text"
        ),
    ),
    ImportRule(
        why="caches keep bytes and tensors by key: they know no model, no plan and no prompt",
        files=("rag_posfix/caching/*",),
        among=("rag_posfix",),
        only=within_rag_posfix("caching cancellation errors files registry settings text"),
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
        only=within_rag_posfix(
            "assembly cancellation contracts errors parameters plan.bias_profile plan.layout registry text"
        ),
        never=("torch", "transformers"),
    ),
    ImportRule(
        why="retrieval finds documents: it knows contracts and text, no model that writes and no prompt",
        files=("rag_posfix/retrieval/*",),
        among=("rag_posfix",),
        only=within_rag_posfix("checked checkpoints contracts errors files parameters retrieval text weight_packages"),
        never=("torch", "transformers"),
    ),
    ImportRule(
        why="only retrieval knows how vectors and words are indexed and files are read",
        files=EVERYWHERE,
        but=("rag_posfix/retrieval/*",),
        never=("faiss", "bm25s", "docx", "pypdf", "trafilatura", "markitdown", "markdown_it", "charset_normalizer"),
    ),
    ImportRule(
        why="concrete parts are chosen in pipeline/build.py alone; the rest of the pipeline knows contracts and data",
        files=("rag_posfix/pipeline/*",),
        but=(
            "rag_posfix/pipeline/build.py",
            "rag_posfix/pipeline/method_checks.py",
            "rag_posfix/pipeline/retrievers_and_servers.py",
        ),
        among=("rag_posfix",),
        only=within_rag_posfix(
            "assembly caching.answers.keys cancellation checked contracts errors parameters pipeline plan.layout "
            "registry text"
        ),
        never=("torch", "transformers", "sentence_transformers", "faiss", "fastapi", "starlette", "redis"),
    ),
    ImportRule(
        why="a reranker knows documents, layouts and the generator's protocol: no model, no tensor and no mitigation",
        files=("rag_posfix/reranking/*",),
        among=("rag_posfix",),
        only=within_rag_posfix(
            "assembly caching.deadline cancellation checked checkpoints contracts errors parameters plan.bias_profile "
            "registry reranking text"
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
        but=("rag_posfix/telemetry/*", "services/rag_posfix_api/http/middleware.py"),
        never=("opentelemetry",),
    ),
    ImportRule(
        why="telemetry knows what a pipeline reports, and no part of one",
        files=("rag_posfix/telemetry/*",),
        among=("rag_posfix",),
        only=within_rag_posfix("__version__ contracts errors pipeline.tracing settings telemetry"),
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
            "rag_posfix/measuring/*",
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
        never=within_rag_posfix("cli evaluation integrations laboratory probing"),
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
        only=within_rag_posfix(
            "assembly attention contracts errors encodings evaluation.data evaluation.figures "
            "evaluation.record generation mitigations.hidden_scaling =mitigations parameters "
            "patching pipeline.build plan probing registry reranking.in_context settings"
        ),
    ),
    ImportRule(
        why="the laboratory trains small decoders on torch alone: it knows encodings and records, no loaded model",
        files=("rag_posfix/laboratory/*",),
        # The type of a figure alone; it is drawn in evaluation/figures.py.
        only=(
            "torch",
            "safetensors",
            "matplotlib",
            *within_rag_posfix(
                "contracts.method_spec encodings errors evaluation.figures evaluation.record "
                "laboratory parameters registry training_tensors"
            ),
        ),
    ),
    ImportRule(
        why="in the library one file talks to Ray, and one computes measures of rankings",
        files=("rag_posfix/*",),
        but=("rag_posfix/evaluation/ray_workers.py", "rag_posfix/evaluation/ranking/measures.py"),
        never=("ray", "ir_measures", "pytrec_eval"),
    ),
    ImportRule(
        why="of the service, two files of ray_serve talk to Ray; what they decide is decided without it",
        files=("services/*",),
        but=(
            "services/rag_posfix_api/ray_serve/application.py",
            "services/rag_posfix_api/ray_serve/cluster.py",
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
    CodeRule(
        "only settings.py and process.py read the environment",
        reads_environment,
        but=("rag_posfix/settings.py", "rag_posfix/process.py"),
    ),
    CodeRule("nothing is ever unpickled", unpickles),
    CodeRule("no code of a model repository is run", trusts_remote_code),
    CodeRule("commands write through their console, the library logs", prints),
    CodeRule("errors are raised from rag_posfix.errors: assert is gone under -O and shows no value", asserts),
]

RULES = [*IMPORT_RULES, *CODE_RULES]
