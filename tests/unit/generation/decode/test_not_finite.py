"""Where an activation overflows, every score is an error that says what to do."""

from dataclasses import replace

import pytest
import torch

from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import GenerationError
from rag_posfix.generation.engine import Engine
from rag_posfix.plan.layout import Layout
from tests.support.tiny import loaded_model, toy_layout
from tests.support.toy_encoder import ToyEncoder

LAYOUT = toy_layout()
LAST = LAYOUT.token_ids[-1]


@pytest.fixture(scope="module")
def engine():
    """A model whose embedding of the question's last token overflows."""
    loaded = loaded_model()
    with torch.no_grad():
        loaded.model.model.embed_tokens.weight[LAST] = float("nan")
    return Engine(loaded, ToyEncoder(), "tiny", "print")


def with_projector(engine):
    return Engine(replace(engine.loaded, projector=(torch.eye(64),)), engine.encoder, "tiny", "print")


CALLS = {
    "score": lambda engine: engine.score(LAYOUT, [5, 6]),
    "score of one token": lambda engine: engine.score(LAYOUT, [5]),
    "score of a method": lambda engine: engine.score(LAYOUT, [5, 6], MitigationChoice("default")),
    "question_likelihood": lambda engine: engine.question_likelihood(LAYOUT),
    "yes_no": lambda engine: engine.first_token_log_probs(LAYOUT, [5, 6]),
    "last_but_not_late": lambda engine: with_projector(engine).projected_states(LAYOUT.token_ids, [-1]),
    "in_context": lambda engine: engine.question_attention([LAYOUT]),
    "attention_sorting": lambda engine: engine.passage_attention([LAYOUT]),
    "scored prompt": lambda engine: engine.generate(
        GenerationRequest(
            Layout.plain(LAYOUT.token_ids), MitigationChoice("none"), Sampling(max_tokens=1), prompt_scored=True
        )
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_scores_that_are_not_finite_are_an_error_that_names_the_dtype(engine, name):
    with pytest.raises(GenerationError, match=r"not finite .*RAG_POSFIX_DTYPE"):
        CALLS[name](engine)
