"""Checks that each decimal of a hand-written page is a value of a record.

A section with decimals has a mark that names its records, and says of each decimal which value it is::

    <!-- read from: RECORD...
    .38 .30 .46 = heads > by_pair > 0 > pair
    +.05 = mean(RECORD: models > * > accuracy) - RECORD: models > none > accuracy
    3.1 = "where it is from, if no record has it"
    -->

An address is the keys of the record's summary with `` > `` between them; the first may be ``head``. A value with an
interval gives three numbers. ``*`` stands for any part of a key; ``mean(...)``, ``sum``, ``min`` and ``max`` make one
number of several. Operators (``+ - * /``) apply from left to right. With several records an address has a name first.
A decimal without a sign is compared with the absolute value. Generated parts and code are not checked.
``python -m docs.prose PAGE...`` prints what is wrong, and addresses for decimals that have none.
"""

from __future__ import annotations

import operator
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.keep_record import RESULTS
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.record import read_head

NO_RECORD = "no record"
MARK = re.compile(r"<!-- read from: ([^\n]+?)(?: -->|\n(.*?)-->)", re.DOTALL)
HEADING = re.compile(r"^(?=#{1,4} )", re.MULTILINE)
UNREAD = re.compile(
    r"(?P<mark><!-- read from: .*?-->)|<!-- [^>]*? -->\n.*?<!-- end of [^>]* -->|```.*?```|`[^`\n]*`|\]\([^)]*\)"
    r"|\b(?:Python|torch|transformers|Apache|buildah|Llama|arXiv|[Uu]ntil)[\s-]\d+\.\d+",
    re.DOTALL,
)
NUMBER = re.compile(r"(?<![\w./:=])[-+]?\d*\.\d+(?![\w/]|\.\d)")
OPERATORS: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
FUNCTIONS: dict[str, Callable[[list[float]], float]] = {"mean": fmean, "sum": sum, "min": min, "max": max}


@cache
def head(name: str, results: Path) -> dict[str, Any]:
    """Return the head of a record."""
    return read_head(results / f"{name}.json")


def numbers_at(node: Any, keys: Sequence[str]) -> list[float]:
    """Return the numbers below keys; a value with an interval gives three."""
    if keys:
        items = dict(enumerate(node)) if isinstance(node, list) else node
        pattern = re.compile(re.escape(keys[0]).replace(r"\*", ".*"))
        matching = [items[key] for key in items if pattern.fullmatch(str(key))]
        if not matching:
            raise KeyError(keys[0])
        return [number for item in matching for number in numbers_at(item, keys[1:])]
    if isinstance(node, dict):
        return [node["value"], *node["ci95"]]
    return [float(number) for number in (node if isinstance(node, list) else [node])]


def evaluate(expression: str, names: Sequence[str], results: Path = RESULTS) -> list[float]:
    """Return the numbers of an expression of addresses in the named records.

    Raises:
        EvaluationError: a record or a key is missing.
    """
    left, *others = re.split(r"(?<!>) ([-+*/]) (?!>)", expression)
    values = _operand(left, names, results)
    for sign, right in zip(others[::2], others[1::2], strict=True):
        values = [OPERATORS[sign](a, b) for a in values for b in _operand(right, names, results)]
    return values


def _operand(text: str, names: Sequence[str], results: Path) -> list[float]:
    if re.fullmatch(r"[\d.]+", text):
        return [float(text)]
    if call := re.fullmatch(r"(mean|sum|min|max)\((.*)\)", text):
        return [FUNCTIONS[call[1]](_operand(call[2], names, results))]
    name, _, address = text.partition(": ")
    if name not in names:
        name, address = names[0], text
    record, keys = head(name, results), address.split(" > ")
    try:
        return numbers_at({"head": record} if keys[0] == "head" else record.get("summary", record), keys)
    except (KeyError, TypeError, ValueError) as error:
        raise EvaluationError(f"{name} has no number at {address!r}; correct the address") from error


def is_rounded(written: str, value: float) -> bool:
    """Whether a decimal is a value, rounded as it is written."""
    digits = len(written.partition(".")[2])
    compared = value if written[0] in "+-" else abs(value)
    return abs(float(written) - compared) <= 0.5 * 10**-digits + 1e-9


def without_code(page: str) -> str:
    """Return a page with spaces in place of code, links, versions and generated parts."""
    return UNREAD.sub(lambda part: part["mark"] or re.sub(r"[^\n]", " ", part[0]), page)


def problems(page: str, results: Path = RESULTS) -> Iterator[str]:
    """Yield what is wrong with the decimals of a page."""
    for text in HEADING.split(without_code(page)):
        heading = " ".join(text.partition("\n")[0].lstrip("# ").split())
        listed: Counter[str] = Counter()
        names: list[str] = []
        for records, lines in MARK.findall(text):
            names += [] if records == NO_RECORD else records.split()
            for line in lines.splitlines():
                decimals, _, expression = line.partition(" = ")
                listed.update(written := decimals.split())
                if expression.startswith('"'):
                    continue
                values = evaluate(expression, records.split(), results)
                if len(values) != len(written) or not all(map(is_rounded, written, values)):
                    shown = " ".join(f"{value:.6g}" for value in values[:3])
                    yield f"{heading!r}: {decimals} is {shown} at {expression}"
        present = Counter(NUMBER.findall(MARK.sub("", text)))
        for decimal in listed - present:
            yield f"{heading!r}: the mark lists {decimal}, which the section does not have"
        for decimal in present - listed:
            yield f"{heading!r}: the mark does not say which value {decimal} is"
            yield from (f"    {decimal} = {name}: {address}" for name, address in _addresses(decimal, names, results))


def _addresses(decimal: str, names: Sequence[str], results: Path) -> Iterator[tuple[str, str]]:
    """Yield (record, address) of the values that a decimal may be."""

    def leaves(node: Any, keys: tuple[str, ...]) -> Iterator[tuple[str, float]]:
        if isinstance(node, dict | list):
            for key, item in node.items() if isinstance(node, dict) else enumerate(node):
                yield from leaves(item, (*keys, str(key)))
        elif isinstance(node, int | float):
            yield " > ".join(keys), node

    for name in names:
        record = head(name, results)
        for address, value in leaves(record.get("summary", record), ()):
            if is_rounded(decimal, value):
                yield name, address


def main(paths: Sequence[str]) -> int:
    """Print what is wrong with the decimals of pages; return the exit status."""
    if not paths:
        sys.stderr.write("usage: python -m docs.prose PAGE...\n")
        return 2
    lines = [line for path in paths for line in problems(Path(path).read_text(encoding="utf-8"))]
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
