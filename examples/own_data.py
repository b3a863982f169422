"""How much the position of the right passage matters for your questions, your passages and your model.

data/passages.jsonl has one passage per line (id, text); data/questions.jsonl one question per line with its accepted
answers and the id of the passage that holds them, the gold passage. Replace both files by your own. The model is that
of RAG_POSFIX_MODEL.
"""

import json
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix import MitigationChoice
from rag_posfix.evaluation import PositionExample, evaluate_positions

DATA = Path(__file__).parent / "data"
PASSAGES_PER_PROMPT = 3


def read(name: str) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines() if line.strip()]


def examples() -> list[PositionExample]:
    """Return the questions, each with its gold passage and the others as distractors."""
    passages = {one["id"]: Document(page_content=one["text"], id=one["id"]) for one in read("passages.jsonl")}
    return [
        PositionExample(
            id=str(number),
            question=one["question"],
            answers=tuple(one["answers"]),
            gold=(passages[one["passage"]],),
            distractors=tuple(passage for name, passage in passages.items() if name != one["passage"]),
        )
        for number, one in enumerate(read("questions.jsonl"))
    ]


def main() -> None:
    """Print the accuracy by the position of the gold passage, for the unmodified model and a corrected one."""
    record = evaluate_positions(
        examples(),
        [MitigationChoice("none"), MitigationChoice("context_experts")],
        gold_positions=range(PASSAGES_PER_PROMPT),
        documents=PASSAGES_PER_PROMPT,
        max_tokens=16,
    )
    for method, found in record.summary["mitigations"].items():
        by_position = [f"{scores['accuracy']:.0%}" for scores in found["positions"].values()]
        print(f"{method:16} gold passage first to last: {', '.join(by_position)}")


if __name__ == "__main__":
    main()
