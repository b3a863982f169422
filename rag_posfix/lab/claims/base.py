"""A claim, what was measured of it, its verdict, and the page of a text.

A claim is data: a sentence, a function that measures, and conditions on the intervals of the numbers, which are
written down before anybody looks. A new claim is one entry in the file of its text.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rag_posfix.errors import ConfigError, EvaluationError, UnsupportedModelError
from rag_posfix.evaluation.figures import draw_by_model, draw_curves, png_of
from rag_posfix.evaluation.pages import html_figure, html_page, html_table
from rag_posfix.evaluation.record import ExperimentRecord, Progress, environment, silent, write_record, write_whole
from rag_posfix.lab.encodings import Decoder, load_decoder
from rag_posfix.lab.experiment import RunConfig, RunFiles, train
from rag_posfix.lab.probing.base import Probe, shown
from rag_posfix.lab.probing.subject import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXTS = {
    1: "Positional bias in auto-regressive transformers",
    2: "Why decoder-only models need position encodings",
    3: "Contextual position encoding",
}
SEEN, NOT_SEEN, NOT_TESTABLE, FAILED = "seen", "not seen", "not testable here", "failed"
NO_MODEL = "small decoders"

Numbers = Mapping[str, Mapping[str, Any]]
"""Estimates by name: ``value``, ``ci95`` and ``n``; ``n`` is 1 for what is exact."""

Panels = Mapping[str, tuple[Mapping[str, Sequence[float]], str, str]]
"""Curves by title: each by its label, over 0, 1 and so on, and the labels of x and y."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Condition:
    """What the whole 95 % interval of a number must be for its claim to be seen."""

    number: str
    above: float | None = None
    below: float | None = None

    def holds(self, numbers: Numbers) -> bool:
        """Return whether the number was measured and its interval is on the right side of each bound."""
        if self.number not in numbers:
            return False
        low, high = numbers[self.number]["ci95"]
        return (self.above is None or low > self.above) and (self.below is None or high < self.below)

    def __str__(self) -> str:
        bounds = {"above": self.above, "below": self.below}
        sides = " and ".join(f"{side} {bound:g}" for side, bound in bounds.items() if bound is not None)
        return f"{self.number}: {sides}"


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """What a claim's measurement found: its numbers, and how its figure is drawn.

    Attributes:
        panels: Curves, one a title and the same titles for each model, that are drawn with those of other models.
    """

    numbers: Numbers
    draw: Callable[[], Figure]
    panels: Panels = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """One sentence of a text, and how it is tested.

    Attributes:
        text: Number of the text, a key of ``TEXTS``.
        name: Its name in commands.
        says: The claim in one sentence.
        measure: Called with the model (None if ``reads_model`` is False), the progress and the sizes; None: not
            testable here.
        conditions: All must hold for the verdict "seen".
        small, full: Sizes of a short run, and those that differ with ``--full``.
        reads_model: Whether each model is measured; False for small decoders that the claim makes itself.
        see: What one sees in the figure.
        beware: What one must not conclude.
        missing: Why it is not testable here.
        options: Further options of its command, each after a space.
    """

    text: int
    name: str
    says: str
    measure: Callable[..., Evidence] | None = None
    conditions: Sequence[Condition] = ()
    small: Mapping[str, Any] = field(default_factory=dict)
    full: Mapping[str, Any] = field(default_factory=dict)
    reads_model: bool = True
    see: str = ""
    beware: str = ""
    missing: str = ""
    options: str = ""

    def command(self, full: bool, model: str | None = None) -> str:
        """Return the command that measures this claim alone."""
        options = (f" --model {model}" if model and self.reads_model else "") + self.options + " --full" * full
        return f"rag-posfix lab reproduce {self.text} --claim {self.name}{options} --out reproduced"


def with_sizes(claims: Sequence[Claim], sizes: Mapping[str, Any]) -> list[Claim]:
    """Return the claims with these sizes in place of their own, small and full.

    Raises:
        ConfigError: no claim has such a size.
    """
    known = {name for claim in claims for name in claim.small}
    if unknown := sorted(sizes.keys() - known):
        raise ConfigError(
            f"--size {unknown[0]!r} is not a size of these claims; choose from: {', '.join(sorted(known))}"
        )

    def changed(claim: Claim) -> Claim:
        own = {name: value for name, value in sizes.items() if name in claim.small}
        if not own:
            return claim
        text = ":".join(f"{name}={value}" for name, value in own.items())
        full = {name: value for name, value in claim.full.items() if name not in own}
        return replace(claim, small={**claim.small, **own}, full=full, options=f"{claim.options} --size {text}")

    return [changed(claim) for claim in claims]


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The verdict on a claim for one model.

    Attributes:
        model: Its name, or ``NO_MODEL``.
        reason: Why there are no numbers, or the conditions that do not hold.
        figure: PNG, None without one.
        panels: See ``Evidence``.
    """

    claim: Claim
    model: str
    verdict: str
    reason: str = ""
    numbers: Numbers = field(default_factory=dict)
    figure: bytes | None = None
    panels: Panels = field(default_factory=dict)


def by_probe(
    probe: type[Probe], numbers: Callable[[ExperimentRecord], Numbers]
) -> Callable[[Subject, Progress], Evidence]:
    """Return a measurement by a probe, whose parameters are the sizes."""

    def measure(subject: Subject, progress: Progress, **sizes: Any) -> Evidence:
        chosen = probe(**sizes)
        record = chosen.run(subject, progress=progress)
        return Evidence(numbers(record), partial(chosen.draw, record.head))

    return measure


def trained_decoder(config: RunConfig, progress: Progress) -> Decoder:
    """Return a decoder that was trained on the CPU."""
    with tempfile.TemporaryDirectory() as folder, progress(f"training {config.encoding.label}") as report:
        train(config, torch.device("cpu"), RunFiles(Path(folder)), report)
        return load_decoder(Path(folder)).eval()


def exact(value: float) -> dict[str, Any]:
    """Return the estimate of a number that is not sampled."""
    return {"value": value, "ci95": [value, value], "n": 1}


def number_text(measured: Mapping[str, Any]) -> str:
    """Return an estimate as text: three digits, and n."""
    return f"{measured['value']:.3g}" if measured["n"] == 1 else f"{shown(measured, '.3g')}, n = {measured['n']}"


def judge(claim: Claim, subject: Subject | None, model: str, full: bool, progress: Progress = silent) -> Outcome:
    """Return the verdict on a claim; one that cannot be measured says why and raises nothing."""
    if claim.measure is None:
        return Outcome(claim, NO_MODEL, NOT_TESTABLE, claim.missing)
    sizes = {**claim.small, **(claim.full if full else {})}
    try:
        evidence = claim.measure(subject, progress, **sizes)
    except (UnsupportedModelError, ConfigError, EvaluationError) as error:
        return Outcome(claim, model, NOT_TESTABLE, str(error))
    except Exception as error:  # the other claims are measured all the same
        _log.exception("the claim %s of text %d failed", claim.name, claim.text)
        return Outcome(claim, model, FAILED, f"{type(error).__name__}: {error}")
    broken = [str(condition) for condition in claim.conditions if not condition.holds(evidence.numbers)]
    try:
        figure = png_of(evidence.draw())
    except ConfigError as error:  # the extra with matplotlib is not installed
        _log.warning("no figure was drawn: %s", error)
        figure = None
    verdict, reason = (NOT_SEEN, f"does not hold: {'; '.join(broken)}") if broken else (SEEN, "")
    return Outcome(claim, model, verdict, reason, evidence.numbers, figure, evidence.panels)


def reproduce(
    claims: Sequence[Claim],
    models: Sequence[str],
    open_model: Callable[[str], Subject],
    *,
    full: bool = False,
    out: Path,
    progress: Progress = silent,
) -> dict[int, ExperimentRecord]:
    """Measure claims, and write a page and a record per text to a folder.

    Each model is loaded once. A claim or a model that fails is a row of the page that says the error.

    Args:
        open_model: Returns a model by its name.
        full: Use the published sizes.

    Returns:
        The record of each text, with its page as the file ``page``.
    """

    def judged(claim: Claim, subject: Subject | None, model: str) -> Outcome:
        with progress(f"text {claim.text}: {claim.name}, {model}"):
            pass
        return judge(claim, subject, model, full, progress)

    of_models = [claim for claim in claims if claim.reads_model and claim.measure is not None]
    outcomes = [judged(claim, None, NO_MODEL) for claim in claims if claim not in of_models]
    for model in models if of_models else ():
        try:
            subject = open_model(model)
        except (UnsupportedModelError, ConfigError) as error:
            outcomes += [Outcome(claim, model, NOT_TESTABLE, str(error)) for claim in of_models]
            continue
        outcomes += [judged(claim, subject, model) for claim in of_models]
        del subject
    records = {}
    for text in sorted({claim.text for claim in claims}):
        ordered = [outcome for claim in claims if claim.text == text for outcome in outcomes if outcome.claim is claim]
        head = {
            "kind": f"lab-reproduce-{text}",
            "text": TEXTS[text],
            "settings": {"models": list(models), "full": full},
            "summary": {"claims": [_to_json(outcome, full) for outcome in ordered]},
            "environment": environment(),
        }
        page = out / f"text-{text}.html"
        write_whole(page, [_page(text, ordered, full).encode()])
        written = write_record(out, f"lab-reproduce-{text}", head)
        records[text] = ExperimentRecord(head, files={"page": page, "record": written})
    return records


def _to_json(outcome: Outcome, full: bool) -> dict[str, Any]:
    claim = outcome.claim
    return {
        "claim": claim.name,
        "says": claim.says,
        "model": outcome.model,
        "verdict": outcome.verdict,
        "reason": outcome.reason,
        "rule": [str(condition) for condition in claim.conditions],
        "numbers": outcome.numbers,
        "sizes": {**claim.small, **(claim.full if full else {})},
        "command": None if claim.measure is None else claim.command(full, outcome.model),
    }


def _page(text: int, outcomes: Sequence[Outcome], full: bool) -> str:
    """Return the page of a text: the verdicts, then a section per claim."""
    title = f"Text {text}: {TEXTS[text]}"
    rows = [("claim", "model", "verdict"), *((o.claim.says, o.model, o.verdict) for o in outcomes)]
    html = [f"<h1>{escape(title)}</h1>", html_table(rows)]
    for claim in dict.fromkeys(outcome.claim for outcome in outcomes):
        html += _section(claim, [outcome for outcome in outcomes if outcome.claim is claim], full)
    return html_page(title, html)


def _section(claim: Claim, outcomes: Sequence[Outcome], full: bool) -> list[str]:
    html = [f"<h2>{escape(claim.name)}</h2>", f"<p>{escape(claim.says)}</p>"]
    for outcome in outcomes:
        html += [html_figure(outcome.figure, f"{claim.name}, {outcome.model}")] if outcome.figure else []
        rows = [("number", f"value (95 % interval), {outcome.model}")]
        rows += [(name, number_text(measured)) for name, measured in outcome.numbers.items()]
        html += [html_table(rows)] if outcome.numbers else []
        reason = f": {outcome.reason}" if outcome.reason else ""
        html.append(f"<p><b>{escape(outcome.model)}: {escape(outcome.verdict)}</b>{escape(reason)}</p>")
    drawn = [outcome for outcome in outcomes if outcome.figure]
    if len(drawn) > 1:
        html += [html_figure(png_of(figure), f"{claim.name}, models side by side") for figure in _side_by_side(drawn)]
    if claim.measure is not None:
        sizes = ", ".join(f"{name}={value}" for name, value in {**claim.small, **(claim.full if full else {})}.items())
        rule = "; ".join(map(str, claim.conditions))
        lines = {"Seen if the whole interval is": rule, "What one sees": claim.see, "Do not conclude": claim.beware}
        html += [f"<p>{key}: {escape(line)}</p>" for key, line in lines.items()]
        html.append(f'<p class="source">Sizes: {escape(sizes)}</p><pre>{escape(claim.command(full))}</pre>')
    return html


def _side_by_side(outcomes: Sequence[Outcome]) -> Iterator[Figure]:
    """Yield the figure of the measured numbers that all models have, and that of their panels."""
    names = [
        name
        for name, entry in outcomes[0].numbers.items()
        if entry["n"] > 1 and all(name in outcome.numbers for outcome in outcomes)
    ]
    if names:
        by_model = {outcome.model: {name: outcome.numbers[name] for name in names} for outcome in outcomes}
        values = [abs(entry["value"]) for numbers in by_model.values() for entry in numbers.values()]
        yield draw_by_model(by_model, "models side by side", "value", "symlog" if max(values) > 100 else "linear")
    if panels := outcomes[0].panels:
        yield draw_curves(
            {
                title: ({outcome.model: outcome.panels[title][0][label] for outcome in outcomes}, x, y)
                for title, (curves, x, y) in panels.items()
                for label in curves
            }
        )
