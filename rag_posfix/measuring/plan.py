"""What a measurement takes and can tell: said before it goes on, so that it can be stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rag_posfix.evaluation.answers.experiment import parse_arrangement
from rag_posfix.evaluation.answers.position_summary import BASELINE
from rag_posfix.evaluation.statistics import mean, wilson_interval
from rag_posfix.measuring.flips import AskedQuestion, least_change, prompt_of
from rag_posfix.pipeline.pipeline import Pipeline


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
