"""The verdict of a measurement, in plain sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BASELINE = "none"


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
            f"These {flips['n']} questions do not tell whether the order of the passages matters: {share} change with "
            f"it, and {control}."
        )
    if summary["order_matters"]:
        return f"The order of the passages changes {share}, against {control}."
    return f"The order of the passages changes almost nothing: {share} change with it, and {control}."


def _about_the_choice(summary: Mapping[str, Any]) -> str:
    choice = summary["choice"]
    name, best = choice["name"], choice["best"]
    what = "accuracy at the worst position" if summary["labels"] else "stable answers"
    low, high = choice["interval"]
    difference = f"{choice['difference']:+.2f} in {what} ({low:+.2f} to {high:+.2f}, {choice['n']} unseen questions)"
    hint = "" if summary["labels"] else " Without labels this says which answers are stable, not which are right."
    if name != BASELINE:
        return f"Use {name}: {difference} against the model as it is.{hint}"
    if len(summary["measured"]) == 1:
        return "Keep your model as it is; nothing else was measured."
    free = summary["order_free"]
    beside = f" The cheapest arrangement that no order changes is {free}." if free else ""
    tried = "" if best == BASELINE else f" (the best, {best}: {difference})"
    return f"Nothing beats your model beyond noise{tried}: keep it.{beside}{hint}"
