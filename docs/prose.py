"""Checks that each decimal in the prose of a page is a value of a record.

A section with decimals has a mark that names its records, and says of each decimal which value it is::

    <!-- read from: RECORD...
    .38 .30 .46 = heads > by_pair > 0 > pair
    +.05 = mean OTHER RECORD: models > * > accuracy - models > none > accuracy
    3.1 = "what it is, if no record has it"
    -->

An address is the keys of the record's summary with `` > `` between them; the first may be ``head``. A value with an
interval gives three numbers. ``*`` stands for any part of a key; ``mean``, ``sum``, ``min`` and ``max`` make one number of
all that match.
Operators (``+ - * /``) apply from left to right. With several records the address begins with the name of one. A number
without a sign is compared with the absolute value. Generated parts, tables and code are not prose.
``python -m docs.prose PAGE...`` tells what is wrong, and the addresses of values that a decimal without one may be.
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
    r"(?P<mark><!-- read from: .*?-->)|<!-- [^>]*? -->\n.*?<!-- end of [^>]* -->|```.*?```|`[^`\n]*`|^\|.*?$|\]\([^)]*\)|arXiv [\d.]+"
    r"|\b(?:Python|torch|transformers|Apache|buildah|Llama|[Uu]ntil)[\s-]\d+\.\d+",
    re.DOTALL | re.MULTILINE,
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
def record(path: Path) -> dict[str, Any]:
    """Return the head of a record."""
    return read_head(path)


def numbers_at(node: Any, keys: Sequence[str]) -> list[float]:
    """Return the numbers below keys; a value with an interval gives three."""
    if keys:
        items = dict(enumerate(node)) if isinstance(node, list) else node
        pattern = re.compile(re.escape(keys[0]).replace(r"\*", ".*"))
        below = [items[key] for key in items if pattern.fullmatch(str(key))]
        if not below:
            raise KeyError(keys[0])
        return [number for item in below for number in numbers_at(item, keys[1:])]
    if isinstance(node, dict):
        return [node["value"], *node["ci95"]]
    return [float(number) for number in (node if isinstance(node, list) else [node])]


def evaluate(expression: str, names: Sequence[str], results: Path = RESULTS) -> list[float]:
    """Return the numbers of an expression of addresses.

    Raises:
        EvaluationError: a record or a key is missing.
    """

    def operand(text: str) -> list[float]:
        if re.fullmatch(r"[\d.]+", text):
            return [float(text)]
        function, _, argument = text.partition(" ")
        if function in FUNCTIONS:
            return [FUNCTIONS[function](operand(argument))]
        name, _, address = text.partition(": ")
        if name not in names:
            name, address = names[0], text
        head, keys = record(results / f"{name}.json"), address.split(" > ")
        try:
            return numbers_at(head, keys[1:]) if keys[0] == "head" else numbers_at(head.get("summary", head), keys)
        except (KeyError, TypeError, ValueError) as error:
            raise EvaluationError(f"{name} has no numbers at {address!r}; correct the address") from error

    first, *others = re.split(r"(?<!>) ([-+*/]) (?!>)", expression)
    values = operand(first)
    for sign, text in zip(others[::2], others[1::2], strict=True):
        values = [OPERATORS[sign](left, right) for left in values for right in operand(text)]
    return values


def is_rounded(written: str, value: float) -> bool:
    """Whether a decimal is a value, rounded as it is written."""
    digits = len(written.partition(".")[2])
    compared = value if written[0] in "+-" else abs(value)
    return abs(float(written) - compared) <= 0.5 * 10**-digits + 1e-9


def problems(page: str, results: Path = RESULTS) -> list[str]:
    """Return what is wrong with the decimals in the prose of a page."""
    found = []
    for text in HEADING.split(UNREAD.sub(r"\g<mark>", page)):
        heading = text.partition("\n")[0].lstrip("# ")
        listed: Counter[str] = Counter()
        for names, lines in MARK.findall(text):
            for line in lines.splitlines():
                written, _, expression = line.partition(" = ")
                listed.update(written.split())
                if expression[:1] != '"':
                    found += [f"{heading!r}: {wrong}" for wrong in _compare(written.split(), expression, names, results)]
        prose = Counter(NUMBER.findall(MARK.sub("", text)))
        found += [f"{heading!r} has {number}, and its mark does not say of what value" for number in prose - listed]
        found += [f"{heading!r} does not have the {number} of its mark" for number in listed - prose]
    return found


def _compare(written: Sequence[str], expression: str, names: str, results: Path) -> Iterator[str]:
    values = evaluate(expression, names.split(), results)
    if len(values) != len(written) or not all(map(is_rounded, written, values)):
        is_now = " ".join(f"{value:.6g}" for value in values[:3])
        yield f"{' '.join(written)} is {is_now} in the record, at {expression}"


def suggestions(page: str, results: Path = RESULTS) -> Iterator[str]:
    """Yield addresses of values that a decimal may be which no mark lists, by section."""
    for text in HEADING.split(UNREAD.sub(r"\g<mark>", page)):
        names = " ".join(names for names, _ in MARK.findall(text) if names != NO_RECORD).split()
        listed = Counter(number for _, lines in MARK.findall(text) for number in NUMBER.findall(lines))
        for written in Counter(NUMBER.findall(MARK.sub("", text))) - listed:
            for name in names:
                head = record(results / f"{name}.json")
                for address, value in _leaves(head.get("summary", head)):
                    if is_rounded(written, value):
                        yield f"{written} = {name}: {address}"


def _leaves(node: Any, address: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(node, dict | list):
        for key, item in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(item, f"{address} > {key}" if address else str(key))
    elif isinstance(node, int | float):
        yield address, node


def main(paths: Sequence[str]) -> int:
    """Print what is wrong with pages, and addresses for decimals without one; return the exit status."""
    if not paths:
        sys.stderr.write("usage: python -m docs.prose PAGE...\n")
        return 2
    pages = [Path(path).read_text(encoding="utf-8") for path in paths]
    told = [line for page in pages for line in (*problems(page), *suggestions(page))]
    sys.stdout.writelines(f"{line}\n" for line in told)
    return int(bool(told))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
