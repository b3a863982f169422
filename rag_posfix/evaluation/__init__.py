"""Offline evaluation: records, journals, grading and statistics that every experiment shares.

Every experiment is a function that returns its record; the commands ``rag-posfix eval`` and ``rag-posfix bench`` call
these. Each name is imported from its module when it is first used, so that importing this package loads no model
library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rag_posfix.evaluation.answers.experiment import Arrangement, parse_arrangement
    from rag_posfix.evaluation.answers.positions import evaluate_permutations, evaluate_positions
    from rag_posfix.evaluation.data.collection import beir_files
    from rag_posfix.evaluation.data.questions import PositionExample, load_examples
    from rag_posfix.evaluation.ranking.rankings import RerankerChoice
    from rag_posfix.evaluation.ranking.reranking import evaluate_reranking, evaluate_reranking_positions
    from rag_posfix.evaluation.record import ExperimentRecord, read_record
    from rag_posfix.evaluation.speed.bench import measure_speed

__all__ = [
    "Arrangement",
    "ExperimentRecord",
    "PositionExample",
    "RerankerChoice",
    "beir_files",
    "evaluate_permutations",
    "evaluate_positions",
    "evaluate_reranking",
    "evaluate_reranking_positions",
    "load_examples",
    "measure_speed",
    "parse_arrangement",
    "read_record",
]

_EXPORTS = {
    "Arrangement": "rag_posfix.evaluation.answers.experiment",
    "ExperimentRecord": "rag_posfix.evaluation.record",
    "PositionExample": "rag_posfix.evaluation.data.questions",
    "RerankerChoice": "rag_posfix.evaluation.ranking.rankings",
    "beir_files": "rag_posfix.evaluation.data.collection",
    "evaluate_permutations": "rag_posfix.evaluation.answers.positions",
    "evaluate_positions": "rag_posfix.evaluation.answers.positions",
    "evaluate_reranking": "rag_posfix.evaluation.ranking.reranking",
    "evaluate_reranking_positions": "rag_posfix.evaluation.ranking.reranking",
    "load_examples": "rag_posfix.evaluation.data.questions",
    "measure_speed": "rag_posfix.evaluation.speed.bench",
    "parse_arrangement": "rag_posfix.evaluation.answers.experiment",
    "read_record": "rag_posfix.evaluation.record",
}


def __getattr__(name: str) -> object:
    """Import a name when it is first used."""
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    """Return the names, those not used yet included."""
    return sorted({*globals(), *__all__})
