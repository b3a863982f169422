"""One sentence per method: what an answer experiment found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["permutation_verdicts", "position_verdicts"]

BASELINE = "none"


def position_verdicts(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a sentence per method of ``eval positions``; about each alone if ``none`` is not among them.

    Args:
        methods: Their summaries by label.
    """
    return [f"{name}: {_changes(found, methods)}{_against(found)}." for name, found in methods.items()]


def permutation_verdicts(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a sentence per method of ``eval permutations``.

    Args:
        methods: Their summaries by label.
    """
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
    return (
        f"{share:.0%} of the answers{of} change with the position of the gold passage, by "
        f"{found['spread_log_probability']:.2f} in mean log-probability between the best and the worst position"
    )


def _against(found: Mapping[str, Any]) -> str:
    if "versus_none" not in found:
        return ""
    versus = found["versus_none"]
    low, high = versus["ci95"]
    how = "higher than" if low > 0 else "lower than" if high < 0 else "not distinguishable from"
    return (
        f"; its log-probability at its worst position is {how} that of none at its best "
        f"({versus['worst_minus_best_log_probability']:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}), its accuracy "
        f"{versus['worst_minus_best_accuracy']:+.2f} (p = {versus['mcnemar_p']:.2f})"
    )
