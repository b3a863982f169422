"""One sentence per method: what an answer experiment found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BASELINE = "none"
NOT_SCORED = "a remote generator answers with text and does not score given answers; accuracy and changes are measured"


def not_measured(log_probabilities: Sequence[float | None]) -> dict[str, dict[str, str]]:
    """Return ``not_measured`` of a summary: which numbers are None, and why; nothing if all were measured.

    Args:
        log_probabilities: Those of all rows.
    """
    return {"not_measured": {"log_probability": NOT_SCORED}} if None in log_probabilities else {}


def position_verdicts(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a sentence per method of ``eval positions``; about each alone if ``none`` is not among them."""
    return [f"{name}: {_changes(found, methods)}{_against(found)}." for name, found in methods.items()]


def permutation_verdicts(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a sentence per method of ``eval permutations``."""
    sentences = []
    for name, found in methods.items():
        low, high = found["flip_rate_ci95"]
        sentences.append(
            f"{name}: {found['flip_rate']:.0%} of the answers change with the order of the passages (95 % interval "
            f"{low:.0%} to {high:.0%}); accuracy {found['accuracy']:.2f}."
        )
    return sentences


def _changes(found: Mapping[str, Any], methods: Mapping[str, Mapping[str, Any]]) -> str:
    share = found["answers_that_change"]
    if share == 0:
        return "no answer changes with the position of the gold passage"
    of = " of the unmodified model" if found is methods.get(BASELINE) else ""
    changes = f"{share:.0%} of the answers{of} change with the position of the gold passage"
    if found["spread_log_probability"] is None:
        return f"{changes}, by {found['spread']:.2f} in accuracy between the best and the worst position"
    spread = found["spread_log_probability"]
    return f"{changes}, by {spread:.2f} in mean log-probability between the best and the worst position"


def _against(found: Mapping[str, Any]) -> str:
    if "versus_none" not in found:
        return ""
    versus = found["versus_none"]
    accuracy = f"accuracy {versus['worst_minus_best_accuracy']:+.2f} (p = {versus['mcnemar_p']:.2f})"
    if versus["ci95"] is None:
        return f"; at its worst position against none at its best: {accuracy}"
    low, high = versus["ci95"]
    how = "higher than" if low > 0 else "lower than" if high < 0 else "not distinguishable from"
    return (
        f"; its log-probability at its worst position is {how} that of none at its best "
        f"({versus['worst_minus_best_log_probability']:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}), its {accuracy}"
    )
