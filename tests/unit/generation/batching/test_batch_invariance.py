"""Answers decoded together are those decoded alone, to the last bit: in passes of any size, joining and leaving."""

import itertools
from dataclasses import replace

import pytest
import torch

from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.generation.batching.scheduler import advance_batch
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.batch_invariance import BLOCKS, ROW_COUNTS, PassRows, block_rows, least_rows, rows_for
from rag_posfix.generation.prefill.per_passage import Segment, encode_segments
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.patching.attention_hook import Overrides
from tests.support.number_encoder import NumberEncoder
from tests.support.tiny import VOCABULARY, loaded_model, toy_layout
from tests.support.tiny_evaluation import CountedForwards

SIZES = {"hidden_size": 64, "intermediate_size": 320, "num_hidden_layers": 2}
CHOICES = [MitigationChoice(name, dict(MITIGATIONS.get(name).example)) for name in MITIGATIONS.names()]


def loaded_in(dtype, family="llama"):
    loaded = loaded_model(family, **SIZES)
    return replace(loaded, model=loaded.model.to(dtype))


@pytest.fixture(params=[(torch.bfloat16, "on"), (torch.float32, "on"), (torch.float32, "blocks")], ids=str)
def invariant(request):
    """A model whose passes are padded or in blocks, whatever the dtype: which rows differ depends on the processor."""
    dtype, setting = request.param
    loaded = loaded_in(dtype)
    return replace(loaded, pass_rows=rows_for(setting, loaded.model))


class OtherKernelForFewRows(torch.nn.Linear):
    """A layer whose sums of fewer than ``few`` rows are computed in another order, as kernels for few rows do."""

    few = 3

    def forward(self, rows):
        if rows[..., 0].numel() >= self.few:
            return super().forward(rows)
        half = self.in_features // 2
        halves = rows.split([half, self.in_features - half], -1), self.weight.split([half, self.in_features - half], 1)
        return sum(part @ weight.T for part, weight in zip(*halves, strict=True))


def with_other_kernel(loaded):
    for module in list(loaded.model.modules()):
        for child in module.children():
            if isinstance(child, torch.nn.Linear):
                child.__class__ = OtherKernelForFewRows
    return loaded


def scores_of(engine, choices, together):
    """Return the log-probabilities of six tokens of every answer; together, an answer joins at every step."""
    layouts = [toy_layout((7, 4, 9, 6)[: 1 + i % 4], seed=i) for i in range(len(choices))]
    scores = [[] for _ in choices]
    if together:
        going, waiting = {}, list(range(len(choices)))
        while going or waiting:
            if waiting:
                i = waiting.pop(0)
                going[i] = engine.open(layouts[i], choices[i], 16)
            for i, session in list(going.items()):
                scores[i].append(session.next_log_probs())
                if len(scores[i]) == 6:
                    del going[i]
            advance_batch(list(going.values()), [5 + len(scores[i]) for i in going])
        return scores
    for i, (layout, choice) in enumerate(zip(layouts, choices, strict=True)):
        session = engine.open(layout, choice, 16)
        for step in range(6):
            scores[i].append(session.next_log_probs())
            session.advance(6 + step)
    return scores


def different(left, right):
    pairs = zip(itertools.chain(*left), itertools.chain(*right), strict=True)
    return sum(not torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.slow
def test_every_method_alone_and_among_all_others_has_the_same_bits(invariant):
    engine = Engine(invariant, NumberEncoder(), "tiny", "print")
    assert different(scores_of(engine, CHOICES, together=True), scores_of(engine, CHOICES, together=False)) == 0


@pytest.mark.parametrize("family", ["qwen2", "phi3", "granite"])
def test_other_families_have_the_same_bits(family):
    loaded = loaded_in(torch.bfloat16, family)
    engine = Engine(replace(loaded, pass_rows=rows_for("on", loaded.model)), NumberEncoder(), "tiny", "print")
    choices = [MitigationChoice(name) for name in ("none", "inter_document", "none", "context_experts", "none")]
    assert different(scores_of(engine, choices, together=True), scores_of(engine, choices, together=False)) == 0


def test_padding_is_what_makes_them_the_same():
    loaded = with_other_kernel(loaded_in(torch.bfloat16))
    choices = [MitigationChoice("none")] * 6
    rows = least_rows(loaded.model)
    assert rows >= OtherKernelForFewRows.few
    for least, expected in ((1, False), (rows, True)):
        engine = Engine(replace(loaded, pass_rows=PassRows(least)), NumberEncoder(), "tiny", "print")
        together, alone = (scores_of(engine, choices, together=where) for where in (True, False))
        assert (different(together, alone) == 0) is expected


def test_a_padded_pass_appends_nothing_but_its_own_tokens():
    loaded = loaded_in(torch.float32)
    layout, choice = toy_layout(), MitigationChoice("context_experts")
    engines = [
        Engine(replace(loaded, pass_rows=PassRows(least)), NumberEncoder(), "tiny", "print") for least in (1, 11)
    ]
    plain, padded = (engine.open(layout, choice, 9) for engine in engines)
    with CountedForwards(engines[0]) as forwards:
        for session in (plain, padded):
            session.advance(7)
    assert forwards.shapes == [(5, 1), (11, 1)]  # four experts and the row without passages
    assert [batch.length for batch in padded.batches] == [batch.length for batch in plain.batches]
    assert padded.score([3, 4, 5]) == pytest.approx(plain.score([3, 4, 5]), abs=1e-5)


# Fewer than the tokens of a padded segment, one more, and so many that no padding helps: 3 segments of 16 tokens.
@pytest.mark.parametrize("few", [3, 17, ROW_COUNTS[-1]])
def test_the_keys_of_a_passage_have_the_same_bits_whichever_others_are_encoded_with_it(monkeypatch, few):
    monkeypatch.setattr(OtherKernelForFewRows, "few", few)
    loaded = with_other_kernel(loaded_in(torch.bfloat16))
    loaded = replace(loaded, pass_rows=rows_for("on", loaded.model))
    segments = [Segment(tuple(range(3, 3 + n)), torch.arange(n, dtype=torch.float32)) for n in (5, 9, 16, 31)]
    together = encode_segments(loaded, segments, None, Overrides())
    for segment, expected in zip(segments, together, strict=True):
        assert torch.equal(encode_segments(loaded, [segment], None, Overrides())[0], expected)


@pytest.mark.parametrize("few", [3, 17, ROW_COUNTS[-1]])
def test_a_plain_prompt_has_the_same_bits_after_a_judge_has_read_its_first_passage_among_others(monkeypatch, few):
    monkeypatch.setattr(OtherKernelForFewRows, "few", few)
    loaded = with_other_kernel(loaded_in(torch.bfloat16))
    loaded, layout = replace(loaded, pass_rows=rows_for("on", loaded.model)), toy_layout()
    judged, fresh = (
        Engine(loaded, NumberEncoder(), "tiny", "print", passages=PassageStore([MemoryTier()])) for _ in range(2)
    )
    judged.first_token_log_probs(layout, (3, 17))
    for order in ((2, 0, 1), (3,)):
        prompt = layout.select(order)
        session = judged.open(prompt)
        assert session.cached_tokens == prompt.passages[0].stop
        assert torch.equal(session.next_log_probs(), fresh.open(prompt).next_log_probs())


def test_least_rows_of_a_layer_that_has_no_such_number_is_none(monkeypatch):
    loaded = loaded_in(torch.bfloat16)
    monkeypatch.setattr(OtherKernelForFewRows, "few", ROW_COUNTS[-1])
    assert least_rows(with_other_kernel(loaded).model) is None
    assert rows_for("on", loaded.model) == PassRows(block=BLOCKS[0])


def test_blocks_are_what_makes_them_the_same_where_no_padding_does(monkeypatch):
    monkeypatch.setattr("rag_posfix.generation.model.batch_invariance.ROW_COUNTS", (1, 2, 4, 8))
    monkeypatch.setattr(OtherKernelForFewRows, "few", 8)  # as many as the largest number that is tried
    loaded = with_other_kernel(loaded_in(torch.bfloat16))
    choices = [MitigationChoice("context_experts")] * 8  # 5 rows each
    for setting, expected in (("off", False), ("on", True)):
        engine = Engine(replace(loaded, pass_rows=rows_for(setting, loaded.model)), NumberEncoder(), "tiny", "print")
        together, alone = (scores_of(engine, choices, together=where) for where in (True, False))
        assert (different(together, alone) == 0) is expected


class OtherKernelForTheLastRow(torch.nn.Linear):
    """A layer that sums the last row of ``of`` rows in another order, as kernels that read two rows at a time do."""

    of = frozenset({8})

    def forward(self, rows):
        outputs = super().forward(rows)
        flat = rows.reshape(-1, self.in_features)
        if len(flat) not in self.of:
            return outputs
        half = self.in_features // 2
        outputs.view(-1, self.out_features)[-1] = sum(
            flat[-1, part] @ self.weight[:, part].T for part in (slice(half), slice(half, None))
        )
        return outputs


def test_a_block_gives_a_row_the_same_result_at_every_place(monkeypatch):
    loaded = loaded_in(torch.float32)
    assert block_rows(loaded.model) == BLOCKS[0]
    for layer in loaded.model.model.layers:
        layer.mlp.down_proj.__class__ = OtherKernelForTheLastRow
    assert block_rows(loaded.model) == BLOCKS[1]
    monkeypatch.setattr(OtherKernelForTheLastRow, "of", frozenset(BLOCKS))
    assert block_rows(loaded.model) is None
    assert rows_for("blocks", loaded.model) == PassRows()


def test_a_model_in_blocks_reads_a_prompt_as_it_did():
    loaded = loaded_in(torch.float32)
    before = loaded.model(torch.arange(3, 20)[None]).logits
    rows = rows_for("blocks", loaded.model)
    assert torch.equal(loaded.model(torch.arange(3, 20)[None]).logits, before)
    lines = []
    handle = loaded.model.lm_head.register_forward_hook(lambda layer, inputs, output: lines.append(output.shape))
    engine = Engine(replace(loaded, pass_rows=rows), NumberEncoder(), "tiny", "print")
    engine.open(toy_layout(), MitigationChoice("context_experts"), 9).advance(7)
    handle.remove()
    assert lines[-1] == (5, 1, VOCABULARY), "five rows of a block of eight"


def test_auto_pads_half_precision_on_cpus_and_off_pads_nothing():
    half, single = loaded_in(torch.bfloat16), loaded_in(torch.float32)
    for loaded in map(with_other_kernel, (half, single)):
        assert rows_for("on", loaded.model).least >= OtherKernelForFewRows.few
        assert rows_for("off", loaded.model) == PassRows()
    assert rows_for("auto", half.model).least >= OtherKernelForFewRows.few
    assert rows_for("auto", single.model) == PassRows()


def test_a_large_vocabulary_is_measured_by_a_part_of_it(monkeypatch):
    monkeypatch.setattr("rag_posfix.generation.model.batch_invariance.MAX_OUTPUTS", VOCABULARY - 1)
    loaded = loaded_in(torch.bfloat16)
    assert least_rows(loaded.model) == max(1, least_rows(loaded.model.model))
