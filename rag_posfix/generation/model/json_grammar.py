"""Typed answers: which tokens may continue a JSON text, so that the whole follows a JSON schema.

llguidance (https://github.com/guidance-ai/llguidance) compiles the schema and follows the text; it is imported with
the first schema. White space is one space after commas and colons: a small model cannot fill its answer with blanks.

Limits of JSON schemas: what compiles within a fraction of a second.

llguidance takes time quadratic in the properties of an object, and multiplies the alternatives of an ``allOf`` out.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rag_posfix.errors import ConfigError, UnsupportedModelError, missing_extra

MAX_CHARACTERS: Final = 65_536
MAX_PROPERTIES: Final = 1000
"""Properties of all objects together."""
MAX_ENUM_VALUES: Final = 5000
"""Values of all enumerations together."""
MAX_COMBINATIONS: Final = 256
"""Combinations of the alternatives that have to hold together."""

_MANY = 1_000_000
_UNIONS = ("anyOf", "oneOf")


def check_size(schema: Any, characters: int) -> None:
    """Raise ``ConfigError`` if a schema, parsed from a text of ``characters``, exceeds a limit. Cost: linear."""
    _check("characters", characters, MAX_CHARACTERS)
    objects = [node for node in _nodes(schema) if isinstance(node, dict)]
    names = ("properties", "patternProperties", "$defs", "definitions")
    _check("properties", sum(_size(node, name, dict) for node in objects for name in names), MAX_PROPERTIES)
    _check("values of enumerations", sum(_size(node, "enum", list) for node in objects), MAX_ENUM_VALUES)
    known: dict[int, int] = {}
    most = max((_combinations(node, schema, known) for node in objects), default=1)
    _check("combinations of alternatives", most, MAX_COMBINATIONS)


def _check(of: str, count: int, most: int) -> None:
    if count > most:
        number = str(count) if count < _MANY else "over a million"
        raise ConfigError(f"the JSON schema has {number} {of}, at most {most} are allowed; ask for less in one answer")


def _nodes(schema: Any) -> Iterator[Any]:
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        yield node
        nodes += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()


def _size(node: dict[str, Any], name: str, kind: type[dict[str, Any] | list[Any]]) -> int:
    value = node.get(name)
    return len(value) if isinstance(value, kind) else 0


def _combinations(node: Any, root: Any, known: dict[int, int]) -> int:
    """Return how many schemas without alternatives a schema becomes: products of what has to hold together.

    Beyond ``_MANY`` nothing is counted.
    """
    if not isinstance(node, dict):
        return 1
    if id(node) not in known:
        known[id(node)] = 1  # of a schema that refers to itself
        joined = node["allOf"] if _size(node, "allOf", list) else []
        factors = [_combinations(member, root, known) for member in joined]
        unions = [node[name] for name in _UNIONS if _size(node, name, list)]
        factors += [sum(_combinations(member, root, known) for member in union) for union in unions]
        if isinstance(node.get("$ref"), str):
            factors.append(_combinations(_resolved(node["$ref"], root), root, known))
        for factor in factors:
            known[id(node)] = min(known[id(node)] * factor, _MANY)
    return known[id(node)]


def _resolved(reference: str, root: Any) -> Any:
    """Return what a reference within the schema means; None for any other."""
    node = root
    for step in reference.removeprefix("#").split("/")[1:]:
        node = node.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
    return node if reference.startswith("#") else None


_LONGEST_TOKEN = 64
_MAX_CHECKED = 64
_SIGNS = '{}[]":,-0123456789'
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""The formats that llguidance enforces."""
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"enum", "const", "default", "examples"})
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def compile_schema(schema: str) -> str:
    """Return the grammar of a JSON schema.

    Raises:
        ConfigError: llguidance is not installed, or the schema is wrong, too large or has a part that cannot be
            enforced.
    """
    matcher = _llguidance().LLMatcher
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the JSON schema cannot be enforced: {str(error) or 'it is nested too deep'}") from error
    check_size(parsed, len(schema))
    try:
        grammar: str = matcher.grammar_from_json_schema(
            json.dumps(close_objects(drop_unknown_formats(parsed))), overrides=_LAYOUT
        )
        _, problems = matcher.validate_grammar_with_warnings(grammar)
    except (ValueError, RecursionError) as error:
        problems = [str(error)]
    if problems:
        raise ConfigError(f"the JSON schema cannot be enforced: {'; '.join(problems)}; leave that part out of it")
    return grammar


def drop_unknown_formats(schema: Any) -> Any:
    """Return the schema without each ``format`` that is not enforced: JSON Schema takes it for an annotation."""
    if isinstance(schema, list):
        return [drop_unknown_formats(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for name, value in schema.items():
        if name in _BY_NAME and isinstance(value, dict):
            kept[name] = {key: drop_unknown_formats(part) for key, part in value.items()}
        elif name in _VALUES:
            kept[name] = value
        elif name != "format" or not isinstance(value, str) or value in _FORMATS:
            kept[name] = drop_unknown_formats(value)
    return kept


def close_objects(schema: Any) -> Any:
    """Return the schema with no properties but those it names, where it does not say whether there may be others.

    Without it a small model adds properties until its answer is cut. Parts of an ``allOf`` stay open.
    """
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for name in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(name), dict):
            closed[name] = {key: close_objects(value) for key, value in schema[name].items()}
    for name in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(schema.get(name), list):
            closed[name] = [close_objects(value) for value in schema[name]]
    if "items" in schema:
        closed["items"] = close_objects(schema["items"])
    if "properties" in schema and schema.keys().isdisjoint(("allOf", "anyOf", "oneOf", "$ref", "patternProperties")):
        closed.setdefault("additionalProperties", False)
    return closed


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise missing_extra("llguidance", "structured") from error
    return llguidance


class JsonText:
    """One JSON text while it is written, token by token. Not for several threads at once."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> bytes:
        """Return a byte for each token of the vocabulary: not 0, if it may be next."""
        mask: bytes = self._matcher.compute_logit_bias()
        return mask

    def append(self, token_id: int) -> None:
        """Add a token.

        Raises:
            ConfigError: it was not allowed, or the schema is too large to be followed.
        """
        if not self._matcher.consume_token(token_id):
            raise ConfigError(f"the JSON schema cannot be followed further: {self._matcher.get_error()}; simplify it")


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """A tokenizer as llguidance reads it."""

    tokens: Sequence[bytes]
    eos_token_id: int
    special_token_ids: Sequence[int]
    encode: Callable[[str], list[int]]
    numbers: Mapping[bytes, int]
    bos_token_id: int | None = None

    def __call__(self, data: bytes) -> list[int]:
        """Return the tokens of a text: its own, or where these put a space before it, the longest that fit."""
        ids = self.encode(data.decode("utf-8", "replace"))
        if b"".join(self.tokens[number] for number in ids) == data:
            return ids
        ids, start = [], 0
        while start < len(data):
            stop = min(len(data), start + _LONGEST_TOKEN)
            while data[start:stop] not in self.numbers and stop > start + 1:
                stop -= 1
            if data[start:stop] in self.numbers:
                ids.append(self.numbers[data[start:stop]])
            start = stop
        return ids


class JsonGrammars:
    """The JSON texts that a tokenizer can write. Safe to share between threads.

    Args:
        bytes_of: Returns the bytes of every token; called with the first schema, which takes seconds.
        encode: Returns the tokens of a text.
        control_ids: Tokens that no text has.
        eos_ids: Tokens that end an answer.
    """

    def __init__(
        self,
        bytes_of: Callable[[], Sequence[bytes]],
        encode: Callable[[str], list[int]],
        control_ids: Collection[int],
        eos_ids: Collection[int],
    ) -> None:
        self._bytes_of, self._encode = bytes_of, encode
        self._control_ids, self._eos_ids = sorted({*control_ids, *eos_ids}), sorted(eos_ids)
        self._lock = threading.Lock()
        self._tokens: Any = None
        self._checked: OrderedDict[bytes, Any] = OrderedDict()  # matchers by the hash of their schema

    def check(self, schema: str) -> None:
        """Raise what ``begin`` raises, without the tokenizer where the schema is wrong."""
        self._matcher(schema)

    def begin(self, schema: str) -> JsonText:
        """Return an empty text that follows a JSON schema; the grammar of the last schemas is compiled once.

        Raises:
            ConfigError: as ``compile_schema``.
            UnsupportedModelError: the tokenizer has no token that ends an answer, or lacks a sign of JSON.
        """
        return JsonText(self._matcher(schema).deep_copy())

    def _matcher(self, schema: str) -> Any:
        """Return the matcher of a schema at its beginning."""
        name = hashlib.blake2b(schema.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        with self._lock:
            if name in self._checked:
                self._checked.move_to_end(name)
                return self._checked[name]
        grammar = compile_schema(schema)
        matcher = _llguidance().LLMatcher(self._read_tokens(), grammar)
        if matcher.is_error():
            raise ConfigError(f"the JSON schema cannot be enforced: {matcher.get_error()}")
        with self._lock:
            self._checked[name] = matcher
            if len(self._checked) > _MAX_CHECKED:
                self._checked.popitem(last=False)
        return matcher

    def _read_tokens(self) -> Any:
        with self._lock:
            if self._tokens is None:
                if not self._eos_ids:
                    raise UnsupportedModelError("the model has no token that ends an answer, so it writes no JSON")
                data = self._bytes_of()
                control_ids = set(self._control_ids)
                numbers = {text: number for number, text in enumerate(data) if number not in control_ids}
                missing = [sign for sign in _SIGNS if sign.encode() not in numbers]
                if missing:
                    raise UnsupportedModelError(
                        f"the vocabulary of the model has no token for {', '.join(missing)}, so it writes no JSON"
                    )
                tokens = _Vocabulary(data, self._eos_ids[0], self._control_ids, self._encode, numbers)
                wrapped = _llguidance().TokenizerWrapper(tokens)
                self._tokens = _llguidance().LLTokenizer(wrapped, eos_token=self._eos_ids)
            return self._tokens
