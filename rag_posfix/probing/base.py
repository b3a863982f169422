"""Base class of probes, and their registry. A new probe is one file and one line in ``__init__.py``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rag_posfix.contracts.method_spec import Parametrised, RenamedAttribute
from rag_posfix.evaluation.figures import with_figure
from rag_posfix.evaluation.record import ExperimentRecord, Progress, environment, silent, write_record
from rag_posfix.probing.subject import Subject
from rag_posfix.registry import Registry

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a probe measured.

    Attributes:
        summary: Of the record's head: JSON values by name.
        rows: Of the record: every observation.
    """

    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True, eq=False)
class ProfileRecord(ExperimentRecord):
    """A record whose head is the profile that a method reads.

    Attributes:
        printed: Entries of the head in ``to_json``, by their names there.
    """

    printed: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the path of the profile, and the printed entries."""
        files = {name: str(path) for name, path in self.files.items()}
        return {**files, **{name: self.head[key] for name, key in self.printed.items()}}

    def write_profile(self, out: Path | None, name: str) -> Self:
        """Return this record with its file, written to a folder; None writes nothing."""
        return self if out is None else replace(self, files={"profile": write_record(out, name, self.head)})


@dataclass(frozen=True)
class Probe(Parametrised, ABC):
    """A measurement of what a model does with positions, with its parameters as dataclass fields.

    Attributes:
        name: Registry name; with underscores, the name of the file.
        paper: Authors, year, title, URL: the section ``Source`` of the docstring.
        reads_text: Whether it needs a tokenizer, so a language model and not a small decoder.
        small: Parameters of ``probe all`` that differ from the defaults: shorter texts, as many of them.
    """

    source = RenamedAttribute("paper")
    reads_text: ClassVar[bool] = False
    small: ClassVar[Mapping[str, int]] = {}

    def check(self) -> None:
        """Check what the parameters name, such as a file, before a model is loaded."""

    @abstractmethod
    def run(self, subject: Subject, *, out: Path | None = None, progress: Progress = silent) -> ExperimentRecord:
        """Measure a model, and write the record and its figure to a folder; None writes nothing.

        The model stays as it is.
        """

    @abstractmethod
    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return the figure of a record."""

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return what is printed of a record as rows of text, the headings first; none by default."""
        return ()

    def lines(self, record: ExperimentRecord) -> Sequence[str]:
        """Return what is printed under the table: by default the summary's numbers and texts."""
        summary = record.head["summary"]
        return [
            f"{key}: {short(value)}" for key, value in summary.items() if not isinstance(value, dict | list | tuple)
        ]


@dataclass(frozen=True)
class MeasuredProbe(Probe):
    """A probe with a record of the result of ``measure``, the facts of the model and the settings."""

    @abstractmethod
    def measure(self, subject: Subject, progress: Progress) -> Found:
        """Measure a model; see ``run``."""

    def run(self, subject: Subject, *, out: Path | None = None, progress: Progress = silent) -> ExperimentRecord:
        """Measure a model, and write the record and its figure; see ``Probe.run``."""
        result = self.measure(subject, progress)
        head = {
            "kind": f"probe-{self.name}",
            **subject.facts(),
            "settings": {
                name: str(value) if isinstance(value, Path) else value for name, value in self.parameters.items()
            },
            "source": self.paper,
            "summary": result.summary,
            "environment": environment(),
        }
        return with_figure(ExperimentRecord(head, result.rows).write(out), self.draw)


PROBES: Registry[type[Probe]] = Registry("probe")


def short(value: Any) -> str:
    """Return a value as text, numbers with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw_map(figure: Figure, axes: Any, values: Sequence[Sequence[float]], **options: Any) -> None:
    """Draw a matrix with its colour bar; rows upwards from the first.

    Args:
        options: Of matplotlib's ``imshow``.
    """
    image = axes.imshow(values, aspect="auto", origin="lower", **options)
    figure.colorbar(image, ax=axes, shrink=0.85)
