"""An API key as data, the caller that it stands for, and what may be written in its fields."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from rag_posfix.errors import ConfigError
from rag_posfix.parameters import shown

__all__ = [
    "ANONYMOUS",
    "CALLER",
    "OPERATOR",
    "SCOPES",
    "TENANT_PATTERN",
    "ApiKey",
    "Caller",
    "check_name",
    "check_tenant",
    "checked_scopes",
]

SCOPES: Final = ("read", "write", "admin")
"""``read``: ask, rerank and search. ``write``: change collections. ``admin``: create, list and revoke keys."""

TENANT_PATTERN: Final = r"^[a-z0-9][a-z0-9_-]{0,63}$"
_TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_MAX_NAME = 100


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as the key file has it; the key itself is not in it.

    Attributes:
        id: Public name of the key, the middle part of the key itself.
        tenant: Owner of what the key creates.
        name: Free text for people.
        scopes: Of ``SCOPES``.
        requests_per_minute: How many requests the key may make; None for no limit.
        max_concurrent: How many requests of the key may run at the same time; None for no limit.
        created_at: Seconds since 1970.
        revoked_at: Seconds since 1970, or None while the key is valid.
        hash: Salted hash of the secret part of the key, see ``hashing``.
    """

    id: str
    tenant: str
    name: str
    scopes: tuple[str, ...]
    requests_per_minute: int | None
    max_concurrent: int | None
    created_at: int
    revoked_at: int | None = None
    hash: str = field(default="", repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that may be shown: all but the hash."""
        return {
            "id": self.id,
            "tenant": self.tenant,
            "name": self.name,
            "scopes": list(self.scopes),
            "requests_per_minute": self.requests_per_minute,
            "max_concurrent": self.max_concurrent,
            "created_at": self.created_at,
            "revoked_at": self.revoked_at,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ApiKey:
        """Return the key that was written as ``to_dict`` and ``hash``.

        Raises:
            ValueError: a field is missing, is of another type, or is not allowed.
        """
        texts = [data.get(name) for name in ("id", "tenant", "name", "hash")]
        numbers = [data.get(name) for name in ("requests_per_minute", "max_concurrent", "revoked_at")]
        scopes, created = data.get("scopes"), data.get("created_at")
        if not all(isinstance(text, str) for text in texts) or not isinstance(created, int):
            raise ValueError("a key has no id, tenant, name, hash or time of creation")
        if not all(number is None or isinstance(number, int) for number in numbers) or not isinstance(scopes, list):
            raise ValueError("a key has limits or scopes of another type")
        check_tenant(str(data["tenant"]))
        return cls(
            id=str(data["id"]),
            tenant=str(data["tenant"]),
            name=str(data["name"]),
            scopes=checked_scopes(scopes),
            requests_per_minute=data["requests_per_minute"],
            max_concurrent=data["max_concurrent"],
            created_at=created,
            revoked_at=data["revoked_at"],
            hash=str(data["hash"]),
        )


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from.

    Attributes:
        tenant: Name of the tenant; "" for the operator's single key and for a service without keys.
        scopes: What the caller may do.
        salt: Separates the cache entries of the tenant; a random part of it is in the key file only.
        key_id: Id of the key, or None without one.
        requests_per_minute: As in ``ApiKey``.
        max_concurrent: As in ``ApiKey``.
    """

    tenant: str = ""
    scopes: tuple[str, ...] = ()
    salt: str = field(default="", repr=False)
    key_id: str | None = None
    requests_per_minute: int | None = None
    max_concurrent: int | None = None


ANONYMOUS: Final = Caller(scopes=("read", "write"))
"""The caller of a service without any key."""

OPERATOR: Final = Caller(scopes=SCOPES)
"""The caller with the single key of the settings."""

CALLER: ContextVar[Caller] = ContextVar("rag_posfix_caller", default=ANONYMOUS)
"""The caller of the running request."""


def check_tenant(name: str) -> None:
    """Raise if ``name`` cannot name a tenant.

    Raises:
        ConfigError: it is not 1 to 64 of a-z, 0-9, - and _, beginning with a letter or digit.
    """
    if _TENANT.fullmatch(name) is None:
        raise ConfigError(
            f"tenant {shown(name)} must be 1 to 64 characters of a-z, 0-9, '-' and '_', the first a letter or digit"
        )


def check_name(name: str) -> None:
    """Raise if ``name`` is too long or has unprintable characters.

    Raises:
        ConfigError: so it is.
    """
    if len(name) > _MAX_NAME or not name.isprintable():
        raise ConfigError(f"name {shown(name)} must be at most {_MAX_NAME} printable characters")


def checked_scopes(scopes: Iterable[str]) -> tuple[str, ...]:
    """Return the scopes, each once, in the order of ``SCOPES``.

    Raises:
        ConfigError: one is unknown, or there is none.
    """
    given = list(scopes)
    for scope in given:
        if scope not in SCOPES:
            raise ConfigError(f"scope {shown(scope)} is unknown; choose of {', '.join(SCOPES)}")
    if not given:
        raise ConfigError(f"a key without scopes may do nothing; choose of {', '.join(SCOPES)}")
    return tuple(scope for scope in SCOPES if scope in given)
