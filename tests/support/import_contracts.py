"""Kinds of import rules that import-linter lacks: the table of rooms, and lists of what may be imported.

pyproject.toml has the rules. import-linter's own layers say nothing of a folder's files beside its subfolders, and its
other contracts name what is forbidden, which a new package is not yet.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output
from importlinter.application.contract_utils import AlertLevel, remove_ignored_imports
from importlinter.domain.helpers import module_expressions_to_modules

ROOM = re.compile(r"^\| `(?:services/)?([a-z_/]+)/` \|", re.MULTILINE)


class DirectImports(Contract):
    """A rule that finds imports of one module by another."""

    ignore_imports = fields.SetField(subfield=fields.ImportExpressionField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        remove_ignored_imports(graph, self.ignore_imports, AlertLevel.ERROR)
        offenders = self.offenders(graph)
        lines = [
            f"{importer} -> {imported} (l. {', '.join(str(one['line_number']) for one in details)})"
            for importer, imported in offenders
            if (details := graph.get_import_details(importer=importer, imported=imported)) is not None
        ]
        return ContractCheck(kept=not lines, metadata={"lines": sorted(lines)})

    def offenders(self, graph: ImportGraph) -> Iterable[tuple[str, str]]:
        raise NotImplementedError

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["lines"]:
            output.print_error(f"- {line}", bold=False)
        output.new_line()

    def is_internal(self, module: str) -> bool:
        return module.partition(".")[0] in self.session_options["root_packages"]


class Rooms(DirectImports):
    """A room imports itself and the rooms above it in ``table``, and no files import each other in a circle."""

    table = fields.StringField()

    def offenders(self, graph: ImportGraph) -> Iterable[tuple[str, str]]:
        rooms = [path.replace("/", ".") for path in ROOM.findall(Path(self.table).read_text("utf-8"))]
        place = {room: number for number, room in enumerate(rooms)}

        def height(module: str) -> int:
            return place[module] if module in place else place[module.rpartition(".")[0]]

        imported = {
            module: set(filter(self.is_internal, graph.find_modules_directly_imported_by(module)))
            for module in filter(self.is_internal, graph.modules)
        }
        imports = [(module, other) for module, others in imported.items() for other in others]
        downward = [(module, other) for module, other in imports if height(module) < height(other)]
        return [*downward, *circle(imported)]


def circle(imported: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Return imports of which each starts where the one before ends, and the first where the last does."""
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        found = error.args[1]
        return list(zip(found[1:], found, strict=False))
    return []


class Allowed(DirectImports):
    """``importers`` import themselves and ``allowed`` modules alone.

    Attributes:
        judged: ``internal`` imports of the root packages, ``external`` ones of installed packages, or ``all`` of both.
        as_packages: Whether an importer is its whole package, or its one file.
        reached: Whether the rule holds for every file that an importer reaches, through others too.
    """

    importers = fields.SetField(subfield=fields.ModuleExpressionField())
    allowed = fields.SetField(subfield=fields.ModuleExpressionField())
    judged = fields.StringField(default="internal")
    as_packages = fields.BooleanField(default=True)
    reached = fields.BooleanField(default=False)

    def offenders(self, graph: ImportGraph) -> Iterable[tuple[str, str]]:
        allowed = {module.name for module in module_expressions_to_modules(graph, self.allowed)}
        judges: dict[str, Callable[[str], bool]] = {
            "internal": self.is_internal,
            "external": lambda module: not self.is_internal(module),
            "all": bool,
        }
        judged = judges[self.judged]
        for importer in module_expressions_to_modules(graph, self.importers):
            own = {importer.name, *(graph.find_descendants(importer.name) if self.as_packages else ())}
            upstream = graph.find_upstream_modules(importer.name, as_package=True) if self.reached else set()
            for file in own | set(filter(self.is_internal, upstream)):
                for module in graph.find_modules_directly_imported_by(file) - own - allowed:
                    if judged(module) and module not in sys.stdlib_module_names:
                        yield file, module
