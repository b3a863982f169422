"""Measures the slot profile and the retrieval heads of the packaged models, and writes them into the package.

python -m benchmarks.packaged_profiles XQUAD_FILE [MODEL...]

The questions are the last of the file (from number 500): no table of the documentation uses them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rag_posfix.lab.probing.retrieval_heads import probe_retrieval_heads
from rag_posfix.lab.probing.slot_attention import probe_slot_attention
from rag_posfix.pipeline.build import build_engine
from rag_posfix.plan import bias_profile
from rag_posfix.settings import Settings

OUT = Path(bias_profile.__file__).parent / "profiles"
SKIP, DOCUMENTS = 500, 10
HEAD_QUESTIONS, SLOT_QUESTIONS = 40, 10


def measure(data: Path, model: str) -> None:
    """Write the profile of one model."""
    engine = build_engine(Settings(model=model))
    slots = probe_slot_attention(engine, data, documents=DOCUMENTS, limit=SLOT_QUESTIONS, skip=SKIP)
    heads = probe_retrieval_heads(engine, data, documents=DOCUMENTS, limit=HEAD_QUESTIONS, skip=SKIP)
    record = {
        "model": engine.model_id,
        "model_fingerprint": engine.fingerprint,
        "profile": slots.head["profile"],
        "heads": heads.head["heads"],
        "gains": heads.head["gains"],
        "held_out": heads.head["held_out"],
        "data": heads.head["data"],
        "settings": {
            "documents": DOCUMENTS, "skip": SKIP, "slot_questions": SLOT_QUESTIONS, "head_questions": HEAD_QUESTIONS,
        },
    }  # fmt: skip
    OUT.mkdir(exist_ok=True)
    (OUT / f"{model}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[2:] or ("smollm2", "gemma3-270m"):
        measure(Path(sys.argv[1]), name)
