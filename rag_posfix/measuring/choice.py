"""Which arrangement to use: chosen on one half of the questions, confirmed on the other half, and told in sentences.

What a measurement takes and can tell is said before it goes on, so that it can be stopped.

Each half chooses once and confirms once: all questions confirm, each an arrangement that was chosen without it. The
half that chooses also says which position is the worst of each arrangement. The lowest of several noisy means is too
low, and an order-free arrangement, with one mean, would beat an unbiased model by that alone.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rag_posfix.errors import ConfigError, PromptTooLongError, RerankingError, UnsupportedModelError
from rag_posfix.evaluation.answers.answering import is_sound
from rag_posfix.evaluation.answers.experiment import Arrangement, parse_arrangement
from rag_posfix.evaluation.answers.position_summary import BASELINE, PositionRow
from rag_posfix.evaluation.grading import normalize
from rag_posfix.evaluation.statistics import difference_interval, mean, randomisation_p, wilson_interval
from rag_posfix.generation.batching.scheduler import unbatched
from rag_posfix.measuring.flips import ALMOST_NONE, LEAST_CHANGED, AskedQuestion, least_change, prompt_of
from rag_posfix.pipeline.pipeline import Pipeline

CANDIDATES = (
    "none",
    "/relevance/none",
    "/reverse/none",
    "embedding:top_n=3/reverse/none",
    "embedding:top_n=1/reverse/none",
    "/relevance/repeated_passages:repeat=best",
    "/relevance/repeated_passages:repeat=all",
    "yes_no:top_n=3/reverse/none",
    "default",
    "sorted_inter_document",
)
"""Arrangements that are tried after the default, the cheapest first; the first is the model as it is."""

REFUSALS = (ConfigError, PromptTooLongError, RerankingError, UnsupportedModelError)
"""What an arrangement raises that the model, the prompt or the reranker cannot serve; the others are still tried."""

RESAMPLES = 2000

STABLE_MARGIN = 0.1
"""How far the default's share of stable answers may be below the best: batching changes some in bfloat16."""

FORM_MARGIN = 0.02
"""How far the share of well-formed answers may be below that of ``none``."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What was measured of one arrangement, for the same questions in the same order as of all others.

    Attributes:
        values: For each question, its score at each position; without labels one value, 1 if no answer changed.
        second: For each question, the mean over positions; without labels the agreement with the unmodified model.
        cost: Seconds to the first token, relative to ``none``.
        well_formed: For each question, the share of well-formed answers.
    """

    values: Sequence[Sequence[float]]
    second: Sequence[float]
    cost: float
    well_formed: Sequence[float]

    def worst(self, questions: Sequence[int]) -> int:
        """Return the position with the lowest mean over some questions."""
        columns = range(len(self.values[0]))
        return min(columns, key=lambda column: mean([self.values[question][column] for question in questions]))

    def at(self, column: int, questions: Sequence[int]) -> list[float]:
        """Return the scores of some questions at a position."""
        return [self.values[question][column] for question in questions]


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen arrangement: one that is better than ``none`` beyond noise, else the default or ``none``.

    Attributes:
        name: Label of the arrangement to use.
        best: Label of the best arrangement on all questions.
        is_better: Whether it is better than ``none`` beyond noise.
        difference: Score of the arrangement that the other half of the questions chose, at its worst position, minus
            that of ``none``, mean over all questions. Of the default where that is used without being better.
        interval: 95 % interval of the difference, questions resampled.
        p: Of the paired randomisation test.
        n: Number of questions.
    """

    name: str
    best: str
    is_better: bool
    difference: float
    interval: tuple[float, float]
    p: float
    n: int


def default_arrangement(pipeline: Pipeline) -> Arrangement:
    """Return what a pipeline uses for ``auto`` while nothing was measured: on large models the judge's best three."""
    measured = pipeline.defaults.measured
    if measured is None:
        return parse_arrangement("default")
    return Arrangement(measured.mitigation, measured.order, measured.reranker)


def supported_candidates(pipeline: Pipeline) -> list[Arrangement]:
    """Return what is tried: ``none``, the default, then the other ``CANDIDATES``.

    Without those that the generator does not support: a remote one supports plain prompts.
    """
    generator, supported = unbatched(pipeline.generator), []
    baseline, *others = map(parse_arrangement, CANDIDATES)
    arrangements = {
        arrangement.label: arrangement for arrangement in (baseline, default_arrangement(pipeline), *others)
    }
    for arrangement in arrangements.values():
        try:
            generator.describe(arrangement.mitigation)
        except UnsupportedModelError:
            continue
        supported.append(arrangement)
    return supported


def usual_answers(answers: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the most frequent answer to each question, normalised; of equally frequent answers the first."""
    return {name: Counter(map(normalize, texts)).most_common(1)[0][0] for name, texts in answers.items()}


def scores_with_labels(rows: Mapping[str, Sequence[PositionRow]], cost: float) -> Scores:
    """Return the scores of an arrangement with labels, from the answers to each question: accuracy by position."""
    values = [[row.accuracy for row in group] for group in rows.values()]
    return Scores(
        values=values,
        second=[mean(columns) for columns in values],
        cost=cost,
        well_formed=[mean([float(is_sound(row.answer)) for row in group]) for group in rows.values()],
    )


def scores_without_labels(
    answers: Mapping[str, Sequence[str]], usual: Mapping[str, str], *, cost: float, well_formed: Sequence[float]
) -> Scores:
    """Return the scores of an arrangement without labels: stable answers, and agreement with the usual answers.

    Args:
        answers: For each question, the answers in different orders of its passages.
        usual: For each question, what the unmodified model usually answers (``usual_answers``).
    """
    normalized = {name: [normalize(text) for text in texts] for name, texts in answers.items()}
    return Scores(
        values=[[float(len(set(texts)) == 1)] for texts in normalized.values()],
        second=[mean([float(text == usual[name]) for text in texts]) for name, texts in normalized.items()],
        cost=cost,
        well_formed=well_formed,
    )


def choose(table: Mapping[str, Scores], *, default: str, labels: bool, order_matters: bool | None) -> Choice:
    """Return which arrangement to use: one that is better than ``none`` beyond noise, else the default or ``none``.

    The best arrangement has the best worst position, then ``second``, then cost; its answers must be as well formed as
    those of ``none``. The best one of the questions with even numbers is compared with ``none`` on the others, and the
    other way round, each at its worst position. Over all questions the difference must be above 0: 95 % interval and
    p < .05. The arrangement to use is then the best one of all questions; with labels it must not be below ``none`` in
    ``second`` beyond noise.

    Args:
        default: Label of the default. Where nothing is better and the order matters, it is used if its score is not
            below that of ``none``, and its ``second`` with labels not beyond noise. Without labels it also comes first
            of those that are about equally stable, because nothing that is measured says which of them is right
            (``docs/measure.md``); where it is not among them, the cheapest one does.
        labels: Whether the scores are accuracies.
        order_matters: Whether the order changes answers of ``none``; None if the questions do not tell.
    """
    questions = range(len(table[BASELINE].values))
    preferred = None if labels else default
    best, halves = _best(table, questions, preferred), (questions[::2], questions[1::2])
    splits = [(_best(table, half, preferred), half, other) for half, other in (halves, halves[::-1])]
    choice, not_below = _against_none(table, splits, labels)
    if best != BASELINE and choice.interval[0] > 0 and choice.p < 0.05 and not_below:
        return replace(choice, name=best, best=best, is_better=True)
    if order_matters and default in _worst_scores(table, questions):
        of_default, not_below = _against_none(table, [(default, questions, questions)], labels)
        if of_default.difference >= 0 and not_below:
            return replace(of_default, name=default, best=best)
    return replace(choice, best=best)


def _against_none(
    table: Mapping[str, Scores], splits: Sequence[tuple[str, Sequence[int], Sequence[int]]], labels: bool
) -> tuple[Choice, bool]:
    """Compare arrangements with ``none``; return the difference, and whether ``second`` is not below beyond noise.

    Args:
        splits: An arrangement, the questions that choose its worst position and that of ``none``, and the questions
            that are compared.
    """
    baseline = table[BASELINE]
    differences, seconds = [0.0] * len(baseline.values), [0.0] * len(baseline.values)
    for name, choosing, confirming in splits:
        scores = table[name]
        column, baseline_column = scores.worst(choosing), baseline.worst(choosing)
        for question in confirming:
            differences[question] = scores.values[question][column] - baseline.values[question][baseline_column]
            seconds[question] = scores.second[question] - baseline.second[question]
    interval = difference_interval(differences, resamples=RESAMPLES)
    p = randomisation_p(differences, resamples=RESAMPLES)
    not_below = not labels or difference_interval(seconds, resamples=RESAMPLES)[1] >= 0
    return Choice(BASELINE, BASELINE, False, mean(differences), interval, p, len(differences)), not_below


def _worst_scores(table: Mapping[str, Scores], questions: Sequence[int]) -> dict[str, float]:
    """Return the score at the worst position of each arrangement with well-formed answers, and of ``none``."""
    sound = mean([table[BASELINE].well_formed[question] for question in questions]) - FORM_MARGIN
    return {
        name: round(mean(scores.at(scores.worst(questions), questions)), 9)
        for name, scores in table.items()
        if mean([scores.well_formed[question] for question in questions]) >= sound
    }


def _best(table: Mapping[str, Scores], questions: Sequence[int], preferred: str | None) -> str:
    """Return the best arrangement on some questions, among those with well-formed answers."""
    worst = _worst_scores(table, questions)
    if preferred in worst and worst[preferred] >= max(worst.values()) - STABLE_MARGIN:
        return preferred

    def rank(name: str) -> tuple[float, float, float]:
        scores = table[name]
        second = 0.0 if preferred else mean([scores.second[question] for question in questions])
        return -worst[name], -round(second, 9), round(scores.cost, 1)  # smaller differences of time are noise

    return min(worst, key=rank)


def measured(table: Mapping[str, Scores]) -> dict[str, dict[str, Any]]:
    """Return ``measured`` of ``measure --json``: worst, mean and best over positions, on all questions."""
    result = {}
    for name, scores in table.items():
        questions = range(len(scores.values))
        columns = [mean(scores.at(column, questions)) for column in range(len(scores.values[0]))]
        result[name] = {
            "worst": min(columns),
            "mean": mean(columns),
            "best": max(columns),
            "second": mean(scores.second),
            "well_formed": mean(scores.well_formed),
            "ttft_ratio": scores.cost,
            "interval": list(difference_interval(scores.at(scores.worst(questions), questions), resamples=RESAMPLES)),
        }
    return result


def verdict_of(summary: Mapping[str, Any]) -> str:
    """Return two sentences: whether the order of the passages changes answers, and what to use."""
    return f"{_about_the_order(summary)} {_about_the_choice(summary)}"


def _about_the_order(summary: Mapping[str, Any]) -> str:
    flips = summary["flips"]
    low, high = flips["interval"]
    share = f"{flips['rate']:.0%} of the answers ({low:.0%} to {high:.0%}, n {flips['n']})"
    control = f"{flips['control']:.0%} when the same order is asked again"
    if summary["order_matters"] is None:
        return (
            f"Not enough questions ({flips['n']}) to decide whether the order of the passages matters; "
            f"{_enough(flips['n'], flips['difference'])} would do: {share} change with it, and {control}."
        )
    if summary["order_matters"]:
        return f"The order of the passages changes {share}, against {control}."
    return f"The order of the passages changes almost nothing: {share} change with it, and {control}."


def _enough(n: int, difference: float) -> str:
    """Return how many questions may decide, if as many change beyond the control: six that do, else none that does."""
    if difference > 0:
        needed = math.ceil(round(LEAST_CHANGED / difference, 6))
        return f"about {needed if needed > n else 2 * n} questions"
    enough = next(count for count in range(n + 1, n + 1000) if wilson_interval(0, count)[1] <= ALMOST_NONE)
    return f"about {enough} questions of which none changes"


def _about_the_choice(summary: Mapping[str, Any]) -> str:
    choice = summary["choice"]
    name, best = choice["name"], choice["best"]
    what = "accuracy at the worst position" if summary["labels"] else "stable answers"
    low, high = choice["interval"]
    seen = "unseen " if choice["is_better"] or name == BASELINE else ""
    sure = f"{low:+.2f} to {high:+.2f}, p = {choice['p']:.3f}, {choice['n']} {seen}questions"
    difference = f"{choice['difference']:+.2f} in {what} ({sure})"
    hint = "" if summary["labels"] else " Without labels this says which answers are stable, not which are right."
    nothing = "Nothing beats your model beyond noise"
    if name != BASELINE:
        reason = "" if choice["is_better"] else f"{nothing}, and its answers change with the order. "
        return f"{reason}Use {name}: {difference} against the model as it is.{hint}"
    if len(summary["measured"]) == 1:
        if "out of time" in summary["not_measured"].values():
            return "No time was left for other arrangements: give more --minutes, and the same command goes on."
        return "Keep your model as it is; nothing else was measured."
    free = summary["order_free"]
    beside = f" The cheapest arrangement that no order changes is {free}." if free else ""
    tried = "" if best == BASELINE else f" (the best, {best}: {difference})"
    return f"{nothing}{tried}: keep it.{beside}{hint}"


class Budget:
    """The time of a measurement; ``clock`` returns seconds."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock, self._started = 60 * minutes, clock, clock()

    @property
    def used(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._started

    def left(self, share: float = 1.0) -> float:
        """Return the seconds until a share of the time is used."""
        return share * self.seconds - self.used

    def fitting(self, done: int, since: float, share: float = 1.0) -> float:
        """Return how many questions fit into a share of the time, at the pace of ``done`` since ``since`` seconds."""
        return self.left(share) * done / max(self.used - since, 1e-9)

    @property
    def minutes_left(self) -> float:
        """Minutes until the whole time is used, for people."""
        return max(self.left(), 0.0) / 60


def plan_text(reachable: int, total: int, minutes: float) -> str:
    """Return what so many questions can tell, and what not."""
    low, high = wilson_interval(reachable // 2, reachable)
    return (
        f"about {reachable} of {total} questions fit into {minutes:g} minutes: shares will be known to within "
        f"{(high - low) / 2:.0%}, and a change of fewer than {least_change(reachable):.0%} of the questions cannot be "
        "told from none"
    )


def tokens_text(
    pipeline: Pipeline, questions: Sequence[AskedQuestion], per_question: int, prices: tuple[float, float] | None
) -> str:
    """Return how many tokens are sent and written at most, and with ``prices`` what they cost.

    Args:
        questions: All questions; the prompts of the first three are counted, as the generator's encoder counts.
        per_question: Maximum number of prompts per question.
        prices: Of a million tokens of prompts, and of answers.
    """
    baseline = parse_arrangement(BASELINE)
    previews = [pipeline.preview(prompt_of(each, range(len(each.passages)), baseline)) for each in questions[:3]]
    prompts = per_question * len(questions)
    sent = prompts * mean([preview.tokens for preview in previews])
    written = prompts * pipeline.defaults.sampling.max_tokens
    cost = "" if prices is None else f", {(sent * prices[0] + written * prices[1]) / 1e6:.2f} by --prices"
    return f"at most {prompts:,} prompts: about {sent:,.0f} tokens of prompts, {written:,} of answers{cost}"
