"""How much the position of the right passage matters for your questions, your passages and your model.

data/passages.jsonl has one passage per line (id, text); data/questions.jsonl one question per line with its accepted
answers and the id of the passage that holds them, the gold passage. Replace both files by your own. The model is that
of RAG_POSFIX_MODEL. Answers are kept in the folder own_data_results: the same program continues after an interruption,
and asks only what is new.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix import MitigationChoice
from rag_posfix.evaluation import PositionExample, evaluate_positions

DATA = Path(__file__).parent / "data"
PASSAGES_PER_PROMPT = 3
METHODS = ["none", "default"]


def read(name: str) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines() if line.strip()]


def examples() -> list[PositionExample]:
    """Return the questions, each with its gold passage and the others as distractors."""
    passages = {row["id"]: Document(page_content=row["text"], id=row["id"]) for row in read("passages.jsonl")}
    return [
        PositionExample(
            id=str(number),
            question=row["question"],
            answers=tuple(row["answers"]),
            gold=(passages[row["passage"]],),
            distractors=tuple(passage for name, passage in passages.items() if name != row["passage"]),
        )
        for number, row in enumerate(read("questions.jsonl"))
    ]


@contextmanager
def progress(step: str) -> Iterator[Callable[[int, int], None]]:
    """Show how many answers of a step there are."""
    yield lambda done, total: print(f"{step}: {done} of {total}", file=sys.stderr)


def main() -> None:
    """Print the accuracy by the position of the gold passage, for the unmodified model and the default method."""
    record = evaluate_positions(
        examples(),
        [MitigationChoice(method) for method in METHODS],
        gold_positions=range(PASSAGES_PER_PROMPT),
        documents=PASSAGES_PER_PROMPT,
        max_tokens=16,
        out=Path("own_data_results"),
        progress=progress,
    )
    for method, results in zip(METHODS, record.summary["mitigations"].values(), strict=True):
        by_position = [f"{scores['accuracy']:.0%}" for scores in results["positions"].values()]
        print(f"{method:8} gold passage first to last: {', '.join(by_position)}")


if __name__ == "__main__":
    main()
