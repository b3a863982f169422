from contextlib import nullcontext

import pytest

from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import ConfigError, EvaluationError, UnknownNameError
from rag_posfix.evaluation.answers.experiment import Arrangement, check_arrangements, load_models
from rag_posfix.evaluation.answers.permutations import evaluate_permutations
from rag_posfix.evaluation.answers.positions import evaluate_positions
from rag_posfix.settings import Settings
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.tiny_evaluation import EXAMPLES, Alphabetical, tiny_engine

NONE = MitigationChoice("none")


@pytest.fixture
def loads(monkeypatch):
    """What was loaded, in order: nothing real."""
    made = []
    monkeypatch.setattr(
        "rag_posfix.pipeline.build.load_engine", lambda model, **_: made.append(model) or tiny_engine()
    )
    monkeypatch.setattr(
        "rag_posfix.pipeline.build.SentenceEmbeddings", lambda model, **_: made.append(model) or LetterEmbeddings()
    )
    return made


def test_a_method_is_checked_by_name_parameters_and_number():
    check_arrangements(
        [NONE, MitigationChoice("context_experts"), MitigationChoice("context_experts", {"experts": 1})]
    )
    with pytest.raises(UnknownNameError, match="unknown mitigation 'nonee'"):
        check_arrangements([MitigationChoice("nonee")])
    with pytest.raises(ConfigError, match="'context_experts:experts=1' occurs twice"):
        check_arrangements([MitigationChoice("context_experts", {"experts": 1})] * 2)


def test_what_is_given_is_not_loaded_and_the_rest_is_as_settings_say(loads):
    engine, reranker, steps = tiny_engine(), Alphabetical(), []
    settings = Settings(model="m", embedding_model="e")

    def progress(step):
        steps.append(step)
        return nullcontext(lambda done, total: None)

    found = load_models([Arrangement(NONE)], engine, reranker, None, progress)
    assert (found, loads, steps) == ((engine, reranker, "Alphabetical"), [], [])
    assert load_models([Arrangement(NONE)], engine, None, settings, progress)[::2] == (engine, "e")
    assert loads == ["e"]
    assert load_models([Arrangement(NONE)], None, reranker, settings, progress)[1:] == (reranker, "Alphabetical")
    assert loads == ["e", "m"]
    assert steps == ["loading the model and the embeddings"] * 2


@pytest.mark.parametrize(
    ("experiment", "options", "message"),
    [
        (evaluate_positions, {"gold_positions": [0, 9], "documents": 3}, "gold position 9 must be between 0 and 2"),
        (evaluate_positions, {"documents": 9}, "documents=9 must be between 1 and 4"),
        (evaluate_positions, {"skip": 3}, "3 questions leave none with limit=None and skip=3"),
        (evaluate_permutations, {"documents": 9}, "documents=9 must be between 1 and 4"),
        (evaluate_permutations, {"documents": 3, "orders": 7}, "orders=7 must be between 2 and 6"),
    ],
)
def test_what_cannot_be_done_is_told_before_a_model_is_loaded(loads, experiment, options, message):
    with pytest.raises(EvaluationError, match=message):
        experiment(EXAMPLES, [NONE], settings=Settings(), **options)
    with pytest.raises(UnknownNameError, match="unknown mitigation 'pine-apple'"):
        experiment(EXAMPLES, [MitigationChoice("pine-apple")], settings=Settings())
    assert loads == []
