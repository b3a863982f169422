"""What a model forgot in training: the perplexity of texts that have nothing to do with it, before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.record import ExperimentRecord, Progress, environment, model_facts, silent
from rag_posfix.evaluation.statistics import difference_interval, mean
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.one_pass import AnsweredPrompt, forward_with_answers
from rag_posfix.patching.forward_context import Overrides
from rag_posfix.text import content_hash

BASE = "base"
"""Name of the model before training."""


def text_losses(engine: Engine, texts: Sequence[str], tokens: int, progress: Progress = silent) -> list[list[float]]:
    """Return -log p of each token of each text in nats; without that of the first, if no token begins a text.

    The unmodified model reads each text alone, without a chat template, after the token that begins its texts (Gemma).

    Args:
        tokens: Tokens of each that are read; the rest is left out.

    Cost: one forward pass per text.
    """
    losses = []
    begin = engine.encoder.encode_prompt("")
    begin = begin if len(begin) == 1 else []  # not the tokens that others put around a text
    with progress("reading texts") as report, torch.no_grad():
        for number, text in enumerate(texts):
            token_ids = [*begin, *engine.encoder.encode_text(text)[:tokens]]
            if len(token_ids) > 1:
                prompt = AnsweredPrompt(token_ids[:1], torch.zeros((1, 1)), Overrides(), token_ids[1:])
                [logits] = forward_with_answers(engine.loaded, [prompt])
                targets = torch.tensor(token_ids[1:], device=logits.device)
                losses.append(cross_entropy(logits.float(), targets, reduction="none").tolist())
            report(number + 1, len(texts))
    return losses


def compare_perplexity(
    engines: Mapping[str, Engine], texts: Sequence[str], tokens: int, out: Path | None, progress: Progress = silent
) -> ExperimentRecord:
    """Return the perplexity of texts under a model and under the models trained from it.

    Formula: exp(sum of -log p / number of tokens), over all texts. The difference is the mean over texts of the
        log-probability per token less the value of the base; its interval is a 95 % bootstrap interval over texts.

    Args:
        engines: ``base`` and the trained models, by name.
        tokens: As in ``text_losses``.
    """
    losses = {name: text_losses(engine, texts, tokens, progress) for name, engine in engines.items()}
    if not losses[BASE]:
        raise ConfigError("no text has two tokens; give longer --texts")
    rows = [
        {"model": name, "text": number, "tokens": len(token_losses), "log_probability": -mean(token_losses)}
        for name, per_text in losses.items()
        for number, token_losses in enumerate(per_text)
    ]
    head = {
        "kind": "perplexity", **environment(), **model_facts(engines[BASE]),
        "settings": {"tokens": tokens, "texts": len(texts), "digest": content_hash(*texts)},
        "summary": {name: _compare(model_losses, losses[BASE]) for name, model_losses in losses.items()},
    }  # fmt: skip
    return ExperimentRecord(head, rows).write(out)


def _compare(losses: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> dict[str, Any]:
    values = [loss for text in losses for loss in text]
    differences = [mean(before) - mean(after) for after, before in zip(losses, base, strict=True)]
    return {
        # torch's exp of the loss of a model that diverged is infinite; that of math is an error
        "perplexity": float(torch.tensor(mean(values), dtype=torch.float64).exp()),
        "texts": len(losses),
        "tokens": len(values),
        "difference": mean(differences),
        "difference_ci95": list(difference_interval(differences)),
    }
