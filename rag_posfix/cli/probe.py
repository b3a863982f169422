"""``rag-posfix probe``: measurements of how a model uses positions. A command per probe, made from the registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_posfix.cli.help import ReadableCommand, ReadableGroup
from rag_posfix.cli.options import (
    AsJson,
    emit,
    experiment_step,
    out,
    out_option,
    say,
    say_files,
    table,
    with_options_of,
    with_settings,
)
from rag_posfix.settings import Settings

if TYPE_CHECKING:
    from rag_posfix.lab.probing.base import Probe

Out = Annotated[Path, out_option("Write the record and the figure here.")]


class ProbeGroup(ReadableGroup):
    """The commands of this file, and one per probe, made when needed: probes import torch, which is slow."""

    @property
    def commands(self) -> MutableMapping[str, Any]:
        """All commands by name."""
        return {**_probe_commands(), **self._static}

    @commands.setter
    def commands(self, commands: MutableMapping[str, Any]) -> None:
        self._static = commands


app = typer.Typer(help="Measure how a model uses positions.", no_args_is_help=True, cls=ProbeGroup)


@app.command("list")
def list_probes(as_json: AsJson = False) -> None:
    """List the probes with their sources and parameters."""
    from rag_posfix.lab.probing import PROBES

    probes = [
        {
            "name": name,
            "summary": _summary(cls),
            "source": cls.paper,
            "deviations": list(cls.deviations),
            "reads_text": cls.reads_text,
            "parameters": {
                key: {"type": parameter.type, "default": _default(parameter.default), "allowed": parameter.allowed}
                for key, parameter in PROBES.parameters(name).items()
            },
        }
        for name, cls in PROBES.items()
    ]
    emit({"probes": probes}, as_json, _show_list)


def _show_list(data: dict[str, Any]) -> None:
    rows = table("probe", "what it measures", "models", "parameters")
    for probe in data["probes"]:
        parameters = ", ".join(f"{key}={value['default']}" for key, value in probe["parameters"].items())
        rows.add_row(probe["name"], probe["summary"], "language models" if probe["reads_text"] else "all", parameters)
    out().print(rows)


@app.command("all")
@with_settings("model", "adapter", "device")
def probe_all(
    output: Out,
    settings: Settings,
    probes: Annotated[
        str | None,
        typer.Option("--probes", help="Run these probes, comma-separated.", show_default="all that need no --data"),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Read questions for probes that need them.", show_default="none"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run all probes, and write one HTML page about the model.

    The probes read as many texts as alone, but shorter ones.
    """
    from rag_posfix.lab.probing import open_subject
    from rag_posfix.lab.probing.base import run_probes

    chosen = _select_probes(probes, data)
    for probe in chosen:
        probe.check()
    with experiment_step("loading the model"):
        subject = open_subject(settings)
    result, page = run_probes(subject, chosen, output, experiment_step)
    records = {name: record.to_json() for name, record in result.records.items()}
    summary = {"model": result.facts["model"], "page": str(page), "probes": records, "refused": result.refused}
    lines = (f"{name}: not measured: {reason}" for name, reason in result.refused.items())
    emit(summary, as_json, lambda _: say(*lines, f"page: {page}"))


def _select_probes(names: str | None, data: Path | None) -> list[Probe]:
    """Return the probes of a list, or all that can run."""
    from rag_posfix.contracts.method_spec import MethodSpec
    from rag_posfix.errors import ConfigError
    from rag_posfix.lab.probing import PROBES

    probes = []
    for name in PROBES.names() if names is None else [PROBES.resolve(name.strip()) for name in names.split(",")]:
        needs_data = "data" in PROBES.parameters(name)
        if needs_data and data is None:
            if names is None:
                continue
            raise ConfigError(f"the probe {name} needs questions; give a file with --data")
        parameters = {**PROBES.get(name).small, **({"data": data} if needs_data else {})}
        probes.append(PROBES.create(MethodSpec(name, parameters)))
    return probes


def _probe_commands() -> dict[str, Any]:
    from rag_posfix.lab.probing import PROBES

    commands = typer.Typer()
    for name, cls in PROBES.items():
        commands.command(name, help=_summary(cls), cls=ReadableCommand)(_probe_command(cls))
    group = typer.main.get_command(commands)
    return dict(getattr(group, "commands", {}))


def _probe_command(cls: type[Probe]) -> Callable[..., None]:
    @with_options_of(cls, "probe")
    @with_settings("model", "adapter", "device")
    def command(output: Out, probe: Any, settings: Settings, as_json: AsJson = False) -> None:
        from rag_posfix.lab.probing import open_subject

        probe.check()
        with experiment_step("loading the model"):
            subject = open_subject(settings)
        record = probe.run(subject, out=output, progress=experiment_step)

        def show(_: dict[str, Any]) -> None:
            measured = probe.table(record.head)
            if measured:
                rows = table(*measured[0])
                for row in measured[1:]:
                    rows.add_row(*row)
                out().print(rows)
            say(*probe.lines(record), f"figure: {probe.caption}")
            say_files(record.files, "record", "svg")

        emit(record.to_json(), as_json, show)

    return command


def _summary(cls: type[Probe]) -> str:
    return (inspect.getdoc(cls) or "").split("\n", 1)[0]


def _default(value: Any) -> Any:
    return "required" if value is inspect.Parameter.empty else value
