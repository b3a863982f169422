"""LongBench with a scaled hidden channel: the claim of text 1 that needs a file of this benchmark."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from langchain_core.documents import Document

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.answers.causes import EqualRelevance
from rag_posfix.evaluation.answers.positions import answer_at_positions
from rag_posfix.evaluation.data.questions import PositionExample
from rag_posfix.evaluation.figures import draw_numbers
from rag_posfix.evaluation.record import Progress
from rag_posfix.evaluation.statistics import normalize
from rag_posfix.lab.claims.base import Claim, Condition, Evidence
from rag_posfix.lab.probing.base import estimate
from rag_posfix.lab.probing.positional_dimensions import find_channels, mean_hidden_states
from rag_posfix.lab.probing.subject import Subject, language_model

DATASETS = ("2wikimqa", "hotpotqa", "multifieldqa_en", "musique", "narrativeqa", "qasper", "triviaqa")
"""The data sets of LongBench whose score is the F1 of words."""
GAIN = "F1, scaled less unchanged"


def word_f1(answer: str, accepted: tuple[str, ...]) -> float:
    """Return LongBench's score of an answer to a question: the largest F1 of words over the accepted answers.

    Source: Bai et al. (2024), LongBench, table 1, https://arxiv.org/abs/2308.14508
    Formula: 2 P R / (P + R), P and R the shares of common words in the answer and in the accepted answer.
    """

    def score(right: str) -> float:
        found, wanted = Counter(normalize(answer).split()), Counter(normalize(right).split())
        common = (found & wanted).total()
        return 2 * common / (found.total() + wanted.total()) if common else 0.0

    return max(map(score, accepted))


def read_longbench(file: Path, limit: int) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return question, text and accepted answers of the first rows of a file of LongBench.

    Raises:
        EvaluationError: the file cannot be read, or a row is not one of ``DATASETS``.
    """
    try:
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()][:limit]
        read = [(row["dataset"], row["input"], row["context"], tuple(map(str, row["answers"]))) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvaluationError(
            f"--longbench {str(file)!r} cannot be read ({type(error).__name__}: {error}); give JSON lines with "
            "dataset, input, context and answers, as LongBench has them"
        ) from error
    other = sorted({dataset for dataset, *_ in read} - set(DATASETS))
    if other or not read:
        raise EvaluationError(
            f"--longbench {str(file)!r} has rows of {other}, must have rows of: {', '.join(DATASETS)}; give one of "
            "these files"
        )
    return [(question, text, answers) for _, question, text, answers in read]


def without_middle(text: str, share: float) -> str:
    """Return the first and the last characters of a text, so many of all; LongBench leaves out the middle too."""
    half = int(len(text) * share / 2)
    return text if share >= 1 else f"{text[:half]}{text[len(text) - half :]}"


def gain(
    subject: Subject, progress: Progress, *, file: Path, limit: int, tokens: int, new_tokens: int, factor: float,
    strings: int, length: int,
) -> Evidence:  # fmt: skip
    """Answer LongBench's questions with the channel that follows the position scaled, and unchanged."""
    model = language_model(subject, "longbench")
    with progress("random text, choosing the channel") as report:
        channel = find_channels(subject, mean_hidden_states(subject, strings, length, 0, report)[0], 1)[0].channel
    most = min(tokens, model.longest - new_tokens - 200)
    examples = []
    for number, (question, text, answers) in enumerate(read_longbench(file, limit)):
        kept = without_middle(text, most / len(model.engine.encoder.encode_text(text)))
        examples.append(PositionExample(str(number), question, answers, (Document(kept, id="text"),), ()))
    scaled = MethodSpec("hidden_scaling", {"channel": channel, "factor": factor})
    with progress("answering") as report:
        rows = answer_at_positions(
            model.engine, examples, [MethodSpec("none", {}), scaled], gold_positions=[0], n_documents=1,
            max_new_tokens=new_tokens, reranker=EqualRelevance(), progress=report,
        )  # fmt: skip
    accepted = {example.id: example.answers for example in examples}
    scores = {
        name: torch.tensor([word_f1(row.answer, accepted[row.question]) for row in rows if row.condition == label])
        for name, label in (("unchanged", "none"), ("scaled", scaled.label))
    }
    numbers = {f"F1, {name}": estimate(values) for name, values in scores.items()}
    numbers[GAIN] = estimate(scores["scaled"] - scores["unchanged"])
    return Evidence(numbers, partial(draw_numbers, numbers, f"{len(examples)} questions, channel {channel}", "F1"))


LONGBENCH = Claim(
    1, "longbench", "Scaling one dimension improves LongBench.", None,
    (Condition(GAIN, above=0),),
    {"limit": 40, "tokens": 1500, "new_tokens": 32, "factor": 0.5, "strings": 8, "length": 128},
    {"limit": 200, "tokens": 7500, "strings": 64, "length": 1000},
    see="The F1 of answers with the channel scaled and unchanged, and the paired difference.",
    beware="The paper reads with 7B models and searches the factor; expect no gain of a small model.",
    missing="its data is not here; give a file of it with --longbench",
)  # fmt: skip


def with_longbench(claims: list[Claim], file: Path) -> list[Claim]:
    """Return the claims with that of LongBench measured on a file."""
    return [
        replace(claim, measure=partial(gain, file=file), options=f" --longbench {file}")
        if claim is LONGBENCH
        else claim
        for claim in claims
    ]
