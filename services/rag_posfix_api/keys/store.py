"""The key file: keys with hashed secrets and the cache salts of tenants, replaced atomically, for several processes.

Readers notice a replaced file by its inode, time and size, at every look. Writers hold a lock beside it.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rag_posfix.durable_files import replace_durably
from rag_posfix.errors import ConfigError, UnknownNameError, missing_extra
from rag_posfix.parameters import shown
from rag_posfix_api.keys.hashing import hash_secret, new_key
from rag_posfix_api.keys.records import ApiKey, check_name, check_tenant, checked_scopes

__all__ = ["KeyStore", "KeyTable"]

_log = logging.getLogger(__name__)

_FORMAT: Final = "rag-posfix-keys"
_VERSION: Final = 1
_WAIT_SECONDS = 10.0


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

    @property
    def folder(self) -> Path:
        """The folder of the key file."""
        return self._file.parent

    @property
    def has_keys(self) -> bool:
        """Whether a key was ever created, as far as this process knows; revoked ones count."""
        self.table()
        return self._had_keys

    def table(self) -> KeyTable:
        """Return the keys. A file that cannot be read holds none and is logged: its keys are then refused."""
        seen = _signature(self._file)
        with self._lock:
            if seen != self._seen:
                try:
                    self._table = KeyTable() if seen is None else _read(self._file)
                except ConfigError as error:
                    _log.error("%s", error)
                    self._table, self._had_keys = KeyTable(), True
                self._had_keys = self._had_keys or bool(self._table.keys)
                self._seen = seen
            return self._table

    def create(
        self,
        tenant: str,
        *,
        name: str = "",
        scopes: Iterable[str] = ("read",),
        requests_per_minute: int | None = None,
        max_concurrent: int | None = None,
    ) -> tuple[ApiKey, str]:
        """Create a key; return it, and the key itself as text, which is kept nowhere.

        Args:
            tenant: Its tenant, which need not exist.
            name: Free text for people.
            scopes: Of ``SCOPES``.
            requests_per_minute: As in ``ApiKey``.
            max_concurrent: As in ``ApiKey``.

        Raises:
            ConfigError: a value is not allowed, or the file cannot be read or written.
        """
        check_tenant(tenant)
        check_name(name)
        for limit, value in (("requests_per_minute", requests_per_minute), ("max_concurrent", max_concurrent)):
            if value is not None and not 1 <= value <= 1_000_000:
                raise ConfigError(f"{limit}={value} must be from 1 to 1000000; leave it out for no limit")
        identity, secret, whole = new_key()
        made = ApiKey(
            identity,
            tenant,
            name,
            checked_scopes(scopes),
            requests_per_minute,
            max_concurrent,
            created_at=int(time.time()),
            hash=hash_secret(secret),
        )
        with self._writing() as table:
            salts = {**table.salts}
            salts.setdefault(tenant, secrets.token_hex(16))
            self._write(KeyTable({**table.keys, identity: made}, salts))
        return made, whole

    def revoke(self, identity: str) -> ApiKey:
        """Revoke a key, for ever; return it. A key that was revoked before stays as it was.

        Args:
            identity: Id of the key.

        Raises:
            UnknownNameError: there is no key with this id.
            ConfigError: the file cannot be read or written.
        """
        with self._writing() as table:
            key = table.keys.get(identity)
            if key is None:
                raise UnknownNameError(f"there is no key with the id {shown(identity)}; list the keys to see the ids")
            if key.revoked_at is None:
                key = replace(key, revoked_at=int(time.time()))
                self._write(KeyTable({**table.keys, identity: key}, table.salts))
        return key

    @contextmanager
    def _writing(self) -> Iterator[KeyTable]:
        """Be the only writer of the file; yields what it holds."""
        try:
            from filelock import FileLock, Timeout
        except ImportError as error:
            raise missing_extra("filelock", "server") from error
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = FileLock(self._file.with_suffix(".lock"))
            with lock.acquire(timeout=_WAIT_SECONDS):
                yield KeyTable() if _signature(self._file) is None else _read(self._file)
        except Timeout:
            raise ConfigError(f"another process is changing {str(self._file)!r}; try again") from None
        except OSError as error:
            raise ConfigError(f"{str(self._file)!r} cannot be written: {error.strerror or error}") from error

    def _write(self, table: KeyTable) -> None:
        data = {
            "format": _FORMAT,
            "version": _VERSION,
            "tenants": {tenant: {"salt": salt} for tenant, salt in table.salts.items()},
            "keys": [key.to_dict() | {"hash": key.hash} for key in table.keys.values()],
        }
        replace_durably(self._file, json.dumps(data, indent=2).encode(), 0o600)


def _signature(file: Path) -> tuple[int, int, int] | None:
    """Return what changes when the file is replaced; None if it is not there or cannot be asked for."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    except OSError:
        return (0, 0, 0)  # reading it then says what is wrong
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(file: Path) -> KeyTable:
    """Return the content of the file.

    Raises:
        ConfigError: it cannot be read, or is no key file.
    """
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
        if data["format"] != _FORMAT or data["version"] != _VERSION:
            raise ValueError(f"format {data['format']!r}, version {data['version']!r}")
        keys = [ApiKey.from_dict(one) for one in data["keys"]]
        salts = {str(tenant): str(entry["salt"]) for tenant, entry in data["tenants"].items()}
        if not all(salts.get(key.tenant) for key in keys):
            raise ValueError("a tenant has no salt")
    except OSError as error:
        raise ConfigError(f"the key file {str(file)!r} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"the key file {str(file)!r} is damaged or of another release ({type(error).__name__}); restore it from a "
            "copy, or remove it and create new keys"
        ) from error
    return KeyTable({key.id: key for key in keys}, salts)
