import pytest
import torch

from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import ConfigError
from rag_posfix.generation.batching.scheduler import (
    MAX_ROWS,
    advance_batch,
    in_batches,
    score_batch,
)
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.generation.engine import Engine
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.plan.plan import Plan, RowPlan
from tests.support.number_encoder import NumberEncoder
from tests.support.tiny import loaded_model, toy_layout
from tests.support.tiny_evaluation import CountedForwards
from tests.unit.generation.together import generate_together

LENGTHS = [(7, 4, 9, 6), (3,), (), (12, 2, 5), (7, 4, 9, 6, 11, 8)]
MIX = ["none", "parallel_windows", "context_experts", "none", "none"]
TURNING = ["inter_document", "hidden_scaling", "head_scaling", "multi_base", "none"]
"""Methods whose queries and keys are rotated by the hook, or by other angles than the model's."""


def engine_of(loaded, **options):
    return Engine(loaded, NumberEncoder(**options), "tiny", "print")


def layouts():
    return [toy_layout(lengths, seed=seed) for seed, lengths in enumerate(LENGTHS)]


def requests(mitigations=MIX, **sampling):
    settings = [Sampling(**{"max_tokens": 8, **sampling})] * len(LENGTHS)
    return [
        GenerationRequest(layout, MitigationChoice(name, dict(MITIGATIONS.get(name).example)), one)
        for layout, name, one in zip(layouts(), mitigations, settings, strict=True)
    ]


def open_all(engine, asked):
    return [engine.open(one.layout, one.mitigation, 16) for one in asked]


def advance(sessions, tokens):
    """Append tokens to those sessions that have one."""
    going = [(session, token) for session, token in zip(sessions, tokens, strict=True) if token is not None]
    advance_batch([session for session, _ in going], [token for _, token in going])


def per_head():
    """Return a plan whose heads see positions of their own."""
    return Plan(rows=(RowPlan(head_scale=lambda layer, query, key: torch.tensor([1.0, 2.0])),))


@pytest.mark.parametrize("mitigations", [MIX, ["none"] * 5, *([name] * 5 for name in MITIGATIONS.names())])
@pytest.mark.slow
def test_answers_together_are_those_one_by_one(loaded, mitigations):
    engine = engine_of(loaded)
    asked = requests(mitigations)
    together = generate_together(engine, asked)
    for request, generation in zip(asked, together, strict=True):
        alone = engine.generate(request)
        assert generation.token_ids == alone.token_ids
        assert (generation.text, generation.usage, generation.finish_reason) == (
            alone.text, alone.usage, alone.finish_reason
        )  # fmt: skip
        assert generation.attention == pytest.approx(alone.attention, abs=1e-6)
        assert set(generation.timings) == {"prefill", "decode"}


@pytest.mark.parametrize("mitigations", [MIX, TURNING])
@pytest.mark.parametrize("family", ["llama", "llama_yarn", "qwen2", "phi3", "gemma", "granite", "olmo2", "smollm3"])
def test_log_probabilities_at_every_step_are_those_one_by_one(family, mitigations):
    if family == "olmo2":  # it normalises queries and keys: hidden_scaling refuses it
        mitigations = ["layer_scaling" if name == "hidden_scaling" else name for name in mitigations]
    engine = engine_of(loaded_model(family))
    together, alone = (open_all(engine, requests(mitigations)) for _ in range(2))
    for step in range(6):
        for ours, theirs in zip(together, alone, strict=True):
            assert (ours.next_log_probs() - theirs.next_log_probs()).abs().max() < 1e-5
        tokens = [5 + step + i for i in range(len(together))]
        advance(together, tokens)
        for session, token in zip(alone, tokens, strict=True):
            session.advance(token)


def test_a_step_is_one_forward_pass_for_all(loaded):
    engine = engine_of(loaded)
    sessions = open_all(engine, requests())
    with CountedForwards(engine) as forwards:
        advance(sessions, [3, 4, 5, 6, 7])
        advance(sessions, [3, None, 5, None, None])
        advance(sessions, [None, None, 5, None, None])
    # SequenceBatch: none 1, parallel_windows 1, context_experts without passages 1, none 1, none 1.
    assert forwards.shapes == [(5, 1), (2, 1), (1, 1)]


@pytest.mark.slow
def test_every_method_shares_a_step_with_every_other(loaded):
    engine, layout = engine_of(loaded), toy_layout((7, 4, 9))
    choices = [MitigationChoice(name, dict(MITIGATIONS.get(name).example)) for name in MITIGATIONS.names()]
    together, alone = ([engine.open(layout, choice, 16) for choice in choices] for _ in range(2))
    rows = sum(group.n_rows for session in together for group in session.batches)
    with CountedForwards(engine) as forwards:
        advance(together, [5] * len(together))
        scores = score_batch(together, [[6, 7, 8]] * len(together))
    assert forwards.shapes == [(rows, 1), (rows, 2)]
    for ours, theirs, score in zip(together, alone, scores, strict=True):
        theirs.advance(5)
        assert (ours.next_log_probs() - theirs.next_log_probs()).abs().max() < 1e-5
        assert score == pytest.approx(theirs.score([6, 7, 8]), abs=1e-5)


def test_rows_whose_heads_see_positions_of_their_own_share_steps(loaded):
    def sessions():
        others = open_all(engine_of(loaded), requests()[:3])
        return [others[0], Session(loaded, toy_layout(), per_head()), *others[1:]]

    together, alone = sessions(), sessions()
    assert score_batch(together, [[5, 6], [7], [8, 9, 10], [4, 4]]) == [
        pytest.approx(session.score(answer), abs=1e-5)
        for session, answer in zip(alone, [[5, 6], [7], [8, 9, 10], [4, 4]], strict=True)
    ]
    for tokens in ([3, 4, 5, 6], [3, 4, None, 6], [None, 4, None, None]):
        advance(together, tokens)
        for ours, theirs, token in zip(together, alone, tokens, strict=True):
            if token is not None:
                theirs.advance(token)
                assert (ours.next_log_probs() - theirs.next_log_probs()).abs().max() < 1e-5


def test_models_with_sliding_windows_decode_on_their_own():
    engine = engine_of(loaded_model("mistral", sliding_window=16))
    asked = requests(["none", "context_experts", "context_experts", "none", "none"])
    for request, generation in zip(asked, generate_together(engine, asked), strict=True):
        assert generation.token_ids == engine.generate(request).token_ids


class TestScore:
    ANSWERS = ([5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [15, 16], [3])

    def test_scores_together_are_those_one_by_one_and_sessions_stay_where_they_are(self, loaded):
        together, alone = (open_all(engine_of(loaded), requests()) for _ in range(2))
        for ours, session, answer in zip(score_batch(together, self.ANSWERS), alone, self.ANSWERS, strict=True):
            assert ours == pytest.approx(session.score(answer), abs=1e-5)
        for ours, theirs in zip(together, alone, strict=True):
            assert (ours.next_log_probs() - theirs.next_log_probs()).abs().max() < 1e-5

    def test_answers_of_one_token_need_no_forward_pass(self, loaded):
        sessions = open_all(engine_of(loaded), requests())
        handle = loaded.model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
        scores = score_batch(sessions, [[5]] * 5)
        handle.remove()
        assert scores == [pytest.approx((float(s.next_log_probs()[5]),), abs=1e-6) for s in sessions]

    def test_an_empty_answer_is_refused(self, loaded):
        sessions = open_all(engine_of(loaded), requests())
        with pytest.raises(ConfigError, match="empty continuation"):
            score_batch(sessions, [[5], [], [5], [5], [5]])


class TestWriting:
    def test_each_answer_ends_for_its_own_reason(self, loaded):
        plain = [one.token_ids for one in generate_together(engine_of(loaded), requests())]
        end = plain[0][2]
        engine = engine_of(loaded, eos_ids={end})
        found = generate_together(engine, requests())
        assert found[0].finish_reason == "stop"
        assert found[0].token_ids == plain[0][: plain[0].index(end) + 1]
        for one, tokens in zip(found, plain, strict=True):
            cut = tokens[: tokens.index(end) + 1] if end in tokens else tokens
            assert one.token_ids == cut

    def test_requests_keep_their_own_sampling(self, loaded):
        engine = engine_of(loaded)
        settings = [
            Sampling(max_tokens=2),
            Sampling(max_tokens=7, temperature=1.0, seed=3), Sampling(max_tokens=4, stop=(",",)),
            Sampling(max_tokens=1), Sampling(max_tokens=5, temperature=2.0, top_k=5, seed=4),
        ]  # fmt: skip
        asked = [GenerationRequest(layout, sampling=one) for layout, one in zip(layouts(), settings, strict=True)]
        found = generate_together(engine, asked)
        assert [one.token_ids for one in found] == [engine.generate(request).token_ids for request in asked]

    def test_nothing_asked_is_nothing_answered(self, loaded):
        assert generate_together(engine_of(loaded), []) == []


class Sized:
    """Stands for a session: as many rows of as many tokens as it says."""

    def __init__(self, n_rows, length):
        self.n_rows, self.length, self.batches = n_rows, length, [self]


class TestBatches:
    @pytest.mark.parametrize(
        ("sizes", "expected"),
        [
            ([(1, 10)] * 20, [16, 4]),
            ([(11, 300)] * 3, [1, 1, 1]),
            ([(40, 10), (1, 10), (15, 10), (1, 10)], [1, 2, 1]),
            ([(1, 3072)] * 9, [8, 1]),  # 24,576 tokens in all
            ([(1, 4000)] * 7, [6, 1]),
            ([(1, 100), (1, 30000), (1, 100)], [1, 1, 1]),
            ([], []),
        ],
    )
    def test_a_batch_is_bounded_by_rows_and_by_tokens(self, sizes, expected):
        items = [Sized(*size) for size in sizes]
        batches = list(in_batches(items, lambda item: item))
        assert [len(batch) for batch in batches] == expected
        assert [item for batch in batches for item in batch] == items

    def test_sessions_are_opened_as_they_are_needed(self):
        opened = []

        def opening():
            for number in range(100):
                opened.append(number)
                yield Sized(1, 10)

        next(in_batches(opening(), lambda item: item))
        assert len(opened) == MAX_ROWS + 1
