"""What encodings, tasks and probes promise: shapes, causality, equal batches of equal generators, a record."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from rag_posfix.conformance.models import plugins

of_each_encoding = pytest.mark.parametrize(("name", "cls"), plugins("encoding"))
of_each_task = pytest.mark.parametrize(("name", "cls"), plugins("task"))
of_each_probe = pytest.mark.parametrize(("name", "cls"), plugins("probe"))


def decoder(cls: Any) -> Any:
    from rag_posfix.lab.encodings import Decoder, DecoderShape

    torch.manual_seed(0)
    return Decoder(cls(), DecoderShape(32, layers=2)).eval()


def check_caption(cls: Any) -> None:
    says = "a caption is one sentence that says what one sees; do not conclude what"
    assert re.fullmatch(r"[A-Z][^.!?]*; do not conclude [^.!?]*\.", cls.caption), says


@of_each_encoding
def test_attention_has_the_shape_of_the_queries_and_finite_gradients(name: str, cls: Any) -> None:
    from rag_posfix.lab.encodings import DecoderShape

    torch.manual_seed(0)
    positions = cls().build(DecoderShape(32))
    query, key, value = (torch.randn(2, 4, 6, 16, requires_grad=True) for _ in range(3))
    attended = positions.attend(0, query, key, value)
    assert attended.shape == query.shape
    attended.square().sum().backward()
    assert all(torch.isfinite(states.grad).all() for states in (query, key, value) if states.grad is not None)


@of_each_encoding
def test_later_tokens_change_no_earlier_one(name: str, cls: Any) -> None:
    if not cls.causal:
        pytest.skip("causal is False")
    model = decoder(cls)
    ids = torch.randint(0, 32, (1, 12), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, 8:] = (other[0, 8:] + 1) % 32
    with torch.no_grad():
        difference = (model(ids)[0][:, :8] - model(other)[0][:, :8]).abs().max()
    assert float(difference) < 1e-5, f"tokens see later ones: logits differ by {float(difference):g}"


@of_each_task
def test_batches_have_tokens_of_the_vocabulary_and_depend_on_the_generator_alone(name: str, cls: Any) -> None:
    from rag_posfix.lab.tasks import IGNORED, TRAINED

    task = cls()
    check_caption(cls)
    assert next(iter(task.splits)) == TRAINED
    for split in task.splits:
        first, second = (task.batch(split, 3, torch.Generator().manual_seed(1)) for _ in range(2))
        assert torch.equal(first.ids, second.ids)
        assert torch.equal(first.targets, second.targets)
        assert first.ids.shape == first.targets.shape == first.scored.shape
        assert len(first.ids) == 3
        for tokens in (first.ids, first.targets[first.targets != IGNORED]):
            assert ((tokens >= 0) & (tokens < task.vocabulary)).all()
        assert first.scored.any(), "the measure counts no token"


@of_each_probe
def test_a_probe_writes_a_record_and_a_figure_of_a_small_decoder(name: str, cls: Any, tmp_path: Any) -> None:
    from rag_posfix.lab.encodings import create_encoding
    from rag_posfix.lab.probing.subject import SmallDecoder

    if cls.reads_text:
        pytest.skip("reads_text is True: it needs a language model")
    check_caption(cls)
    rope = create_encoding("rope")
    record = cls(**cls.small).run(SmallDecoder(decoder(lambda: rope), "rope"), out=tmp_path)
    assert record.head["kind"] == f"probe-{name}"
    json.dumps(record.head["summary"])
    assert any(path.suffix == ".svg" for path in tmp_path.iterdir())
