"""Values are checked where they are given, and a wrong one raises ``ConfigError``."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

from rag_posfix.errors import ConfigError
from rag_posfix.parameters import convert_pydantic_errors, shown
from rag_posfix.registry import check_names

MinRelevance: TypeAlias = Literal["auto", "off"] | float
"""Which retrieved passages are read. ``auto``: by the similarities of the index, then the judge. A number: by this
similarity, then the judge."""


def checked_min_relevance(value: object) -> MinRelevance:
    """Return a minimum relevance from ``auto``, ``off`` or a number from 0 to 1, which may be a text.

    Raises:
        ConfigError: it is none of these.
    """
    if value == "auto":
        return "auto"
    if value == "off":
        return "off"
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            similarity = float(value)
        except ValueError:
            similarity = -1.0
        if 0 <= similarity <= 1:
            return similarity
    raise ConfigError(f"min_relevance={shown(value)} must be auto, off, or a similarity from 0 to 1")


def checked_retriever(retriever: str) -> str:
    """Return the name of a retriever or vector store; raise ``ConfigError`` if it has the form of neither."""
    if re.match(r"(auto|dense|bm25|hybrid)$|[a-z0-9_-]+:", retriever) is None:
        kind = re.split("[:=,]", retriever, maxsplit=1)[0]  # the rest may have a password
        raise ConfigError(
            f"retriever={shown(kind)}{'...' if kind != retriever else ''} must be auto, dense, bm25, hybrid, or "
            "KIND:key=value,... where KIND has only a-z, 0-9, _ and -"
        )
    return retriever


def check_type(name: str, value: Any, kind: Any, allowed: str) -> None:
    """Raise ``ConfigError`` unless a value is of a type, or of one of a union; a truth value is no number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, bool | None)):
        raise ConfigError(f"{name}={shown(value)} must be {allowed}")


def checked_list(name: str, values: Any, kind: Any, allowed: str) -> list[Any]:
    """Return ``values`` as a list; raise ``ConfigError`` unless each is of a type, or for a text or a mapping."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ConfigError(f"{name} is {type(values).__name__}, must be a list of {allowed}")
    entries = list(values)
    for index, entry in enumerate(entries):
        if not isinstance(entry, kind):
            raise ConfigError(f"{name}[{index}] is {type(entry).__name__}, must be one of {allowed}")
    return entries


def may_hold_secret(model: Any, path: tuple[int | str, ...]) -> bool:
    """Return whether a field of a pydantic model, or of a model in it, is or contains a secret; unknown ones may be.

    Args:
        model: The class. Its secret fields are ``SecretStr``, or are left out of its ``repr``.
        path: The names of the field, outermost first.
    """
    field = model.model_fields.get(path[0]) if path else None
    if field is None or not field.repr or "SecretStr" in str(field.annotation):
        return True
    return hasattr(field.annotation, "model_fields") and may_hold_secret(field.annotation, path[1:])


class Checked:
    """Base of pydantic models that raise ``ConfigError`` for wrong arguments, in place of pydantic's error."""

    if not TYPE_CHECKING:  # type checkers see the fields

        def __init__(self, *arguments: Any, **values: Any) -> None:
            cls: Any = type(self)
            registered = getattr(cls, "name", None)
            label = registered if isinstance(registered, str) else cls.__name__
            if cls.model_config.get("extra") == "forbid":
                aliases = {field.alias for field in cls.model_fields.values() if field.alias}
                names = [name for name in values if not name.startswith("_")]
                check_names(label, dict.fromkeys(names), {**dict.fromkeys(cls.model_fields), **dict.fromkeys(aliases)})
            with convert_pydantic_errors(label, cls.describe_value(values)):
                super().__init__(*arguments, **values)

        __init__.__pydantic_base_init__ = True  # models inside of models are validated as before

    @classmethod
    def describe_value(cls, values: dict[str, Any]) -> Any:
        """Return how errors name a field and its value (``convert_pydantic_errors``)."""
        return None


class Portable:
    """Base of pydantic models with an engine: copies share the engine, and pickles hold the configuration alone.

    Private attributes are made again where a pickle is read. Attributes named in ``engine_fields`` are not pickled.
    """

    engine_fields: ClassVar[tuple[str, ...]] = ()

    if not TYPE_CHECKING:  # type checkers see the methods of pydantic

        def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
            copied = self.model_copy()
            for name, value in self.__dict__.items():
                copied.__dict__[name] = value if name in self.engine_fields else copy.deepcopy(value, memo)
            return copied

        def __getstate__(self) -> dict[str, Any]:
            fields = {name: None if name in self.engine_fields else value for name, value in self.__dict__.items()}
            return {**super().__getstate__(), "__dict__": fields, "__pydantic_private__": None}

        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state)
            self.model_post_init(None)
