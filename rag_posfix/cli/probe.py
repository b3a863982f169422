"""``rag-posfix probe``: measurements of how a model uses positions. A command per probe, made from the registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from rag_posfix.cli.dataclass_options import with_options_of
from rag_posfix.cli.options import AdapterFolder, AsJson, DeviceName, ModelName, checked_output, settings_from
from rag_posfix.cli.output import emit_json, experiment_step, out, table

if TYPE_CHECKING:
    from rag_posfix.evaluation.record import ExperimentRecord
    from rag_posfix.probing.base import Probe
    from rag_posfix.settings import Settings

Out = Annotated[Path, typer.Option("--out", callback=checked_output, help="Folder for the record and the picture.")]


class ProbeGroup(TyperGroup):
    """The commands of the group: those of this file, and one per probe, made when they are first asked for.

    Probes import torch, which other commands should not have to wait for.
    """

    @property
    def commands(self) -> MutableMapping[str, Any]:
        """All commands by name."""
        return {**_probe_commands(), **self._own}

    @commands.setter
    def commands(self, own: MutableMapping[str, Any]) -> None:
        self._own = own


app = typer.Typer(help="Measure how a model uses positions.", no_args_is_help=True, cls=ProbeGroup)


@app.callback()
def group() -> None:
    """Measure how a model uses positions."""


@app.command("list")
def list_probes(as_json: AsJson = False) -> None:
    """List the probes with their sources and parameters."""
    from rag_posfix.probing import PROBES

    found: list[dict[str, Any]] = [
        {
            "name": name,
            "summary": _summary(cls),
            "source": cls.source,
            "deviations": list(cls.deviations),
            "reads_text": cls.reads_text,
            "parameters": {
                key: {"type": one.type, "default": _default(one.default), "allowed": one.allowed}
                for key, one in PROBES.parameters(name).items()
            },
        }
        for name, cls in PROBES.items()
    ]
    if as_json:
        emit_json({"probes": found})
        return
    shown = table("probe", "what it measures", "models", "parameters")
    for one in found:
        parameters = ", ".join(f"{key}={value['default']}" for key, value in one["parameters"].items())
        shown.add_row(one["name"], one["summary"], "language models" if one["reads_text"] else "all", parameters)
    out().print(shown)


@app.command("all")
def probe_all(
    output: Out,
    probes: Annotated[
        str | None, typer.Option("--probes", help="Probes, comma-separated.", show_default="all that need no --data")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", help="Questions for the probes that need them, as those take them.", show_default="none"
        ),
    ] = None,
    model: ModelName = None,
    adapter: AdapterFolder = None,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Run all probes with their default parameters, and write one HTML page about the model."""
    from rag_posfix.probing import open_subject
    from rag_posfix.probing.all_probes import run_probes

    chosen = _chosen(probes, data)
    for one in chosen:
        one.check()
    with experiment_step("loading the model"):
        subject = open_subject(settings_from(model=model, adapter=adapter, device=device))
    found, page = run_probes(subject, chosen, output, experiment_step)
    if as_json:
        records = {name: record.to_json() for name, record in found.records.items()}
        emit_json({"model": found.facts["model"], "page": str(page), "probes": records, "refused": found.refused})
        return
    console = out()
    for name, reason in found.refused.items():
        console.print(f"{name}: not measured: {reason}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"page: {page}", highlight=False, markup=False, soft_wrap=True)


def _chosen(names: str | None, data: Path | None) -> list[Probe]:
    """Return the probes of a list, or all that can run.

    Raises:
        UnknownNameError: no such probe.
        ConfigError: a probe of the list needs a file.
    """
    from rag_posfix.contracts.method_spec import MethodSpec
    from rag_posfix.errors import ConfigError
    from rag_posfix.probing import PROBES

    made = []
    for name in PROBES.names() if names is None else [PROBES.resolve(one.strip()) for one in names.split(",")]:
        needs_data = "data" in PROBES.parameters(name)
        if needs_data and data is None:
            if names is None:
                continue
            raise ConfigError(f"the probe {name} needs questions; give a file with --data")
        made.append(PROBES.create(MethodSpec(name, {"data": data} if needs_data else {})))
    return made


def _probe_commands() -> dict[str, Any]:
    """Return the command of each probe."""
    from rag_posfix.probing import PROBES

    commands = typer.Typer()
    for name, cls in PROBES.items():
        commands.command(name, help=_summary(cls))(_function(cls))
    group = typer.main.get_command(commands)
    return dict(getattr(group, "commands", {}))


def _function(cls: type[Probe]) -> Callable[..., None]:
    """Return the command of a probe."""

    @with_options_of(cls, "probe")
    def command(
        output: Out,
        probe: Any,
        model: ModelName = None,
        adapter: AdapterFolder = None,
        device: DeviceName = None,
        as_json: AsJson = False,
    ) -> None:
        _run(probe, output, settings_from(model=model, adapter=adapter, device=device), as_json)

    return command


def _run(probe: Probe, output: Path, settings: Settings, as_json: bool) -> None:
    from rag_posfix.probing import open_subject

    probe.check()
    with experiment_step("loading the model"):
        subject = open_subject(settings)
    record = probe.run(subject, out=output, progress=experiment_step)
    if as_json:
        emit_json(record.to_json())
    else:
        _show(probe, record)


def _show(probe: Probe, record: ExperimentRecord) -> None:
    rows = probe.table(record.head)
    console = out()
    if rows:
        shown = table(*rows[0])
        for row in rows[1:]:
            shown.add_row(*row)
        console.print(shown)
    for line in probe.lines(record):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for name in ("record", "svg"):
        if name in record.files:
            console.print(f"{name}: {record.files[name]}", highlight=False, markup=False, soft_wrap=True)


def _summary(cls: type[Probe]) -> str:
    return (inspect.getdoc(cls) or "").split("\n", 1)[0]


def _default(value: Any) -> Any:
    return "required" if value is inspect.Parameter.empty else value
