"""Pairs from templates: key-value records, functions and rows of a table, all generated."""

from __future__ import annotations

from random import Random

from rag_posfix.errors import ConfigError
from rag_posfix.training.data.pairs import Pair, PairSource, Segment

_NAMES = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "garnet", "harbour", "indigo", "juniper", "kestrel",
    "laurel", "meadow", "nickel", "orchid", "pepper", "quartz", "raven", "saffron", "timber", "umber", "violet",
    "willow", "zinc",
)  # fmt: skip
_TOWN_ENDINGS = ("ford", "ton", "by", "ham")
_KINDS = ("pump", "valve", "lamp", "motor", "sensor", "filter", "relay", "cable", "panel", "bracket")
_COLOURS = ("red", "green", "blue", "white", "black", "yellow", "grey", "brown")
_OPERATIONS = ("adds", "multiplies by", "subtracts", "divides by")
_SIGNS = {"adds": "+", "multiplies by": "*", "subtracts": "-", "divides by": "/"}


class KeyValue:
    """Records of a key and a value of hexadecimal digits; the value of a key is asked for.

    Source: Liu et al. (2023), Lost in the Middle, section 3, https://arxiv.org/abs/2307.03172
    """

    name = "key_value"

    def pair(self, index: int, random: Random, segments: int) -> Pair:
        """Return a question for the value of each of ``segments`` keys."""
        keys, values = ([_hexadecimal(random) for _ in range(segments)] for _ in range(2))
        key_list = " and of the key ".join(keys)
        question = f"What is the value of the key {key_list}?"
        records = tuple(self._record(key, value) for key, value in zip(keys, values, strict=True))
        return Pair(question, (" and ".join(values),), records)

    def filler(self, random: Random) -> Segment:
        """Return another record."""
        return self._record(_hexadecimal(random), _hexadecimal(random))

    @staticmethod
    def _record(key: str, value: str) -> Segment:
        return Segment("", f"The value of the key {key} is {value}.")


class CodeFunction:
    """Short Python functions; the name of the function that does something is asked for.

    Source: An et al. (2024), IN2/FILM, section 3.1 (code), https://arxiv.org/abs/2404.16811
    """

    name = "function"

    def pair(self, index: int, random: Random, segments: int) -> Pair:
        """Return a question for the names of ``segments`` functions, by what they compute."""
        functions, conditions, names = [], [], []
        for _ in range(segments):
            name, operation, number = self._draw(random)
            functions.append(self._function(name, operation, number))
            conditions.append(f"{operation} {number}")
            names.append(name)
        question = f"Which function {' and which function '.join(conditions)}?"
        return Pair(question, (" and ".join(names),), tuple(functions))

    def filler(self, random: Random) -> Segment:
        """Return another function."""
        return self._function(*self._draw(random))

    @staticmethod
    def _draw(random: Random) -> tuple[str, str, int]:
        name = f"{random.choice(_NAMES)}_{random.choice(_KINDS)}_{random.randrange(1000)}"
        return name, random.choice(_OPERATIONS), random.randrange(10_000, 10_000_000)

    @staticmethod
    def _function(name: str, operation: str, number: int) -> Segment:
        sign = _SIGNS[operation]
        return Segment("", f"def {name}(x):\n    # {operation} {number}\n    return x {sign} {number}")


class DatabaseRow:
    """Rows of a stock list; a field of a row is asked for by its number.

    Source: An et al. (2024), IN2/FILM, section 3.1 (structured data), https://arxiv.org/abs/2404.16811
    """

    name = "database"

    def pair(self, index: int, random: Random, segments: int) -> Pair:
        """Return a question for one field of each of ``segments`` rows."""
        rows = [self._row(random) for _ in range(segments)]
        field = random.choice(("supplier", "city", "price"))
        item_list = " and of item ".join(row["item"] for row in rows)
        question = f"What is the {field} of item {item_list}?"
        return Pair(question, (" and ".join(row[field] for row in rows),), tuple(map(self._text, rows)))

    def filler(self, random: Random) -> Segment:
        """Return another row."""
        return self._text(self._row(random))

    @staticmethod
    def _row(random: Random) -> dict[str, str]:
        return {
            "item": str(random.randrange(10**6, 10**7)),
            "name": f"{random.choice(_COLOURS)} {random.choice(_KINDS)}",
            "supplier": f"{random.choice(_NAMES).title()} {random.randrange(1000)}",
            "city": f"{random.choice(_NAMES).title()}{random.choice(_TOWN_ENDINGS)} {random.randrange(100)}",
            "price": f"{random.randrange(1, 1000)}.{random.randrange(100):02d}",
        }

    @staticmethod
    def _text(row: dict[str, str]) -> Segment:
        return Segment("", " | ".join(f"{name}: {value}" for name, value in row.items()))


def _hexadecimal(random: Random) -> str:
    return f"{random.getrandbits(32):08x}"


TEMPLATES: dict[str, type[PairSource]] = {"key_value": KeyValue, "function": CodeFunction, "database": DatabaseRow}
"""The templates by name."""


def template_sources(text: str) -> list[PairSource]:
    """Return the templates that a list separated by commas names."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in TEMPLATES:
            raise ConfigError(f"unknown template {name!r}; available: {', '.join(TEMPLATES)}")
    if len(set(names)) < len(names):
        raise ConfigError(f"--templates {text!r} names a template twice; name each once")
    return [TEMPLATES[name]() for name in names]
