"""What runs where nothing is installed but torch, transformers, numpy and safetensors."""

import textwrap
from pathlib import Path

import pytest

from tests.support.subprocesses import run_python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

BLOCK = """
import sys

# A module at None raises ImportError where it is imported, as if it were not installed.
for name in "fastapi faiss langchain_core orjson pydantic pydantic_settings redis rich typer".split():
    sys.modules[name] = None
"""


def test_every_method_answers_without_langchain_and_pydantic():
    script = """
    from rag_posfix.caching.kv.store import KVCodec
    from rag_posfix.caching.disk import DiskTier
    from rag_posfix.caching.tier import MemoryTier
    from rag_posfix.caching.kv.store import PassageStore
    from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
    from rag_posfix.generation.batching.scheduler import BatchingGenerator
    from rag_posfix.generation.engine import Engine
    import rag_posfix.generation.load
    import rag_posfix.generation.tensor_parallel.launch
    from rag_posfix.mitigations import MITIGATIONS
    from tests.support.tiny import loaded_model, toy_layout
    from tests.support.toy_encoder import ToyEncoder
    from pathlib import Path
    from tempfile import TemporaryDirectory

    loaded = loaded_model(vocab_size=ToyEncoder.vocab_size)
    with TemporaryDirectory() as folder:
        store = PassageStore([MemoryTier(), DiskTier(Path(folder), KVCodec(), max_bytes=2**24)])
        engine = BatchingGenerator(Engine(loaded, ToyEncoder(), "tiny", "print", store))
        layout = toy_layout(relevance=(0.9, 0.2, 0.4, 0.3))
        for name, cls in MITIGATIONS.items():
            choice = MitigationChoice(name, cls.example)
            request = GenerationRequest(layout, choice, sampling=Sampling(max_tokens=3))
            assert engine.generate(request).usage.completion_tokens, name
        engine.close()
        store.close()
    print("answered")
    """
    assert run_python(BLOCK + textwrap.dedent(script), cwd=ROOT) == "answered"
