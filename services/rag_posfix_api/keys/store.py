"""API keys and the key file, which has digests of secrets and the cache salts of tenants.

A key is ``rpk_ID_SECRET``: 16 hexadecimal digits that name it, and 256 random bits. Of the secret part the file has a
digest: BLAKE2b (RFC 7693) with the id as its key. 256 random bits cannot be guessed, so the digest may be fast.

The file is replaced atomically. Readers notice a replaced file by its inode, time and size, at every look, and read a
file again that could not be read. Writers, of several processes too, hold a lock file next to it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rag_posfix.contracts.retrieval import parse_filter
from rag_posfix.errors import ConfigError, UnknownNameError, missing_extra
from rag_posfix.files import replace_durably
from rag_posfix.parameters import shown

_log = logging.getLogger(__name__)

SCOPES: Final = ("read", "write", "admin", "metrics")
"""``read``: ask, rerank and search. ``write``: change collections. ``admin``: create, list and revoke keys."""

TENANT_PATTERN: Final = r"^[a-z0-9][a-z0-9_-]{0,63}$"
_MAX_NAME = 100
_KEY = re.compile(r"rpk_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")

_FORMAT: Final = "rag-posfix-keys"
_VERSION: Final = 1
_WAIT_SECONDS = 10.0
_UNREAD: Final = (-1, -1, -1)
"""The identity of no file: what could not be read is read again at the next look."""


class KeyFileError(ConfigError):
    """The file of keys cannot be read or written."""


def split_key(key: str) -> tuple[str, str] | None:
    """Return id and secret part of a key, or None for any other text."""
    match = _KEY.fullmatch(key)
    return None if match is None else (match[1], match[2])


def digest(identity: str, secret: str) -> str:
    """Return the digest of the secret part of a key."""
    return "blake2b$" + hashlib.blake2b(secret.encode(), key=identity.encode(), digest_size=32).hexdigest()


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
        hash: ``digest`` of the secret part.
        filter: Passages that the key may read, by their metadata (``rag_posfix.contracts.retrieval``); None for all.
            No request widens it.
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
    filter: Mapping[str, Any] | None = field(default=None, hash=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that may be shown: all but the hash."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "hash"}
        return {**fields, "scopes": list(self.scopes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ApiKey:
        """Return the key that was written as ``to_dict`` and ``hash``; raise ``ValueError`` for a wrong field."""
        fields = {name: data.get(name) for name in cls.__slots__}
        if not all(isinstance(fields[name], str) for name in ("id", "tenant", "name", "hash")):
            raise ValueError("a key has no id, tenant, name or hash")
        numbers = [fields[name] for name in ("requests_per_minute", "max_concurrent", "revoked_at")]
        if not isinstance(fields["created_at"], int) or not all(n is None or isinstance(n, int) for n in numbers):
            raise ValueError("a key has times or limits of another type")
        if not isinstance(fields["scopes"], list):
            raise ValueError("a key has scopes of another type")
        _check_tenant(str(fields["tenant"]))
        if fields["filter"] is not None:
            parse_filter(fields["filter"])
        return cls(**{**fields, "scopes": _ordered_scopes(fields["scopes"])})  # type: ignore[arg-type]


def _check_tenant(name: str) -> None:
    if re.fullmatch(TENANT_PATTERN, name) is None:
        raise ConfigError(
            f"tenant {shown(name)} must be 1 to 64 characters of a-z, 0-9, '-' and '_', the first a letter or digit"
        )


def _ordered_scopes(scopes: Iterable[str]) -> tuple[str, ...]:
    """Return the scopes, each once, in the order of ``SCOPES``."""
    names = list(scopes)
    for scope in names:
        if scope not in SCOPES:
            raise ConfigError(f"scope {shown(scope)} is unknown; choose of {', '.join(SCOPES)}")
    if not names:
        raise ConfigError(f"a key without scopes may do nothing; choose of {', '.join(SCOPES)}")
    return tuple(scope for scope in SCOPES if scope in names)


def _check_filter(metadata_filter: Mapping[str, Any], scopes: tuple[str, ...]) -> None:
    parse_filter(metadata_filter)
    if not metadata_filter:
        raise ConfigError("filter={} lets through every passage; leave it out")
    if scopes != ("read",):
        # Writers learn which documents are stored, and change their metadata; administrators create other keys.
        raise ConfigError(
            f"a key with a filter may only read, not {', '.join(scopes)}; give it the scope read, and create another "
            "key for changes"
        )


@dataclass(frozen=True, slots=True)
class KeyTable:
    """The content of the key file.

    Attributes:
        keys: All keys by id, revoked ones included, in the order of creation.
        salts: The cache salt of each tenant.
    """

    keys: Mapping[str, ApiKey] = field(default_factory=dict)
    salts: Mapping[str, str] = field(default_factory=dict)


class KeyStore:
    """The key file ``keys.json`` of a folder. Safe for several threads and processes.

    Args:
        folder: Need not exist; the first key creates it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "keys.json"
        self._lock = threading.Lock()
        self._seen: tuple[int, int, int] | None = None
        self._table = KeyTable()
        self._had_keys = False
        self._failure: str | None = None

    @property
    def folder(self) -> Path:
        """The folder of the key file."""
        return self._file.parent

    @property
    def has_keys(self) -> bool:
        """Whether a key was ever created, as far as this process knows; revoked ones count."""
        self.table()
        return self._had_keys or self._failure is not None

    @property
    def is_stale(self) -> bool:
        """Whether ``table`` would read the file, which takes a while with many keys."""
        return _signature(self._file) != self._seen

    def describe_failing(self) -> str | None:
        """Return that the file cannot be read, without its name, or None if the last look read it."""
        return None if self._failure is None else "the key file cannot be read, so that its keys are rejected"

    def table(self) -> KeyTable:
        """Return the keys. A file that cannot be read holds none and is logged: its keys are rejected meanwhile."""
        signature = _signature(self._file)
        with self._lock:
            if signature != self._seen:
                self._load(signature)
            return self._table

    def read(self) -> KeyTable:
        """Return the keys; KeyFileError if the file cannot be read."""
        return KeyTable() if _signature(self._file) is None else _read(self._file)

    def _load(self, signature: tuple[int, int, int] | None) -> None:
        failure = None
        try:
            self._table = KeyTable() if signature is None else _read(self._file)
        except ConfigError as error:
            self._table, failure = KeyTable(), str(error)
            if isinstance(error.__cause__, OSError):
                signature = _UNREAD
            else:  # damaged: it had keys, and is as damaged at the next look
                self._had_keys = True
            if failure != self._failure:
                _log.error("%s", failure)
        # A tenant has a salt even after its last key was pruned.
        self._had_keys = self._had_keys or bool(self._table.keys or self._table.salts)
        self._seen, self._failure = signature, failure

    def create(
        self,
        tenant: str,
        *,
        name: str = "",
        scopes: Iterable[str] = ("read",),
        requests_per_minute: int | None = None,
        max_concurrent: int | None = None,
        filter: Mapping[str, Any] | None = None,
    ) -> tuple[ApiKey, str]:
        """Create a key; return it, and the key itself as text, which is kept nowhere. The tenant need not exist.

        Raises:
            ConfigError: a value is not allowed.
            KeyFileError: the file cannot be read or written.
        """
        _check_tenant(tenant)
        if len(name) > _MAX_NAME or not name.isprintable():
            raise ConfigError(f"name {shown(name)} must be at most {_MAX_NAME} printable characters")
        for limit, value in (("requests_per_minute", requests_per_minute), ("max_concurrent", max_concurrent)):
            if value is not None and not 1 <= value <= 1_000_000:
                raise ConfigError(f"{limit}={value} must be from 1 to 1000000; leave it out for no limit")
        ordered_scopes = _ordered_scopes(scopes)
        if filter is not None:
            _check_filter(filter, ordered_scopes)
        identity, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        key = ApiKey(
            identity,
            tenant,
            name,
            ordered_scopes,
            requests_per_minute,
            max_concurrent,
            created_at=int(time.time()),
            hash=digest(identity, secret),
            filter=filter,
        )
        with self._writing() as table:
            salts = {tenant: secrets.token_hex(16), **table.salts}
            self._write(KeyTable({**table.keys, identity: key}, salts))
        return key, f"rpk_{identity}_{secret}"

    def revoke(self, identity: str) -> ApiKey:
        """Revoke a key, for ever; return it. A key that was revoked before stays as it was."""
        with self._writing() as table:
            key = table.keys.get(identity)
            if key is None:
                raise UnknownNameError(f"there is no key with the id {shown(identity)}; list the keys to see the ids")
            if key.revoked_at is None:
                key = replace(key, revoked_at=int(time.time()))
                self._write(KeyTable({**table.keys, identity: key}, table.salts))
        return key

    def prune(self) -> int:
        """Remove the revoked keys from the file, and return their number. Salts of tenants stay."""
        with self._writing() as table:
            valid = {identity: key for identity, key in table.keys.items() if key.revoked_at is None}
            if len(valid) < len(table.keys):
                self._write(KeyTable(valid, table.salts))
        return len(table.keys) - len(valid)

    @contextmanager
    def _writing(self) -> Iterator[KeyTable]:
        """Lock the file for writing, and yield its table."""
        try:
            from filelock import FileLock, Timeout
        except ImportError as error:
            raise missing_extra("filelock", "server") from error
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = FileLock(self._file.with_suffix(".lock"), mode=0o600)
            with lock.acquire(timeout=_WAIT_SECONDS):
                yield self.read()
        except Timeout:
            raise KeyFileError(f"another process is changing {str(self._file)!r}; try again") from None
        except OSError as error:
            raise KeyFileError(f"{str(self._file)!r} cannot be written: {error.strerror or error}") from error

    def _write(self, table: KeyTable) -> None:
        data = {
            "format": _FORMAT,
            "version": _VERSION,
            "tenants": {tenant: {"salt": salt} for tenant, salt in table.salts.items()},
            "keys": [key.to_dict() | {"hash": key.hash} for key in table.keys.values()],
        }
        replace_durably(self._file, json.dumps(data, indent=2).encode(), 0o600)


def _signature(file: Path) -> tuple[int, int, int] | None:
    """Return the identity of the file, which a replacement changes; None if there is no file."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    except OSError:
        return (0, 0, 0)  # reading it then raises the error
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read(file: Path) -> KeyTable:
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
        if data["format"] != _FORMAT or data["version"] != _VERSION:
            raise ValueError(f"format {data['format']!r}, version {data['version']!r}")
        keys = [ApiKey.from_dict(entry) for entry in data["keys"]]
        salts = {str(tenant): str(entry["salt"]) for tenant, entry in data["tenants"].items()}
        if not all(salts.get(key.tenant) for key in keys):
            raise ValueError("a tenant has no salt")
    except OSError as error:
        raise KeyFileError(f"the key file {str(file)!r} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise KeyFileError(
            f"the key file {str(file)!r} is damaged or of another release ({type(error).__name__}); restore it from a "
            "copy, or remove it and create new keys"
        ) from error
    return KeyTable({key.id: key for key in keys}, salts)
