"""Tells the caller from the key that a request presents, with the slow hash once in a while and not every time."""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import anyio
import anyio.to_thread
from pydantic import SecretStr

from rag_posfix.errors import OverloadedError
from rag_posfix_api.keys.hashing import matches, split_key
from rag_posfix_api.keys.records import OPERATOR, ApiKey, Caller
from rag_posfix_api.keys.store import KeyStore

__all__ = ["KeyChecker"]

_VALID_SECONDS = 300.0
_WRONG_SECONDS = 10.0
_MOST_REMEMBERED = 4096
_AT_ONCE = 2
_MOST_WAITING = 64


class KeyChecker:
    """Checks presented keys against the single key of the settings and the key file.

    Whether a key matches its hash is remembered for minutes under an HMAC of the key with a secret of this process.
    Whether the key is revoked is looked up each time: a revocation counts for the next request, in every process that
    reads the file. A key with an unknown id is refused without hashing; ids are random and not guessable.

    Args:
        store: The key file.
        single: The single key of the settings, or None.
        clock: Monotonic seconds.
    """

    def __init__(
        self, store: KeyStore, single: SecretStr | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._clock = clock
        self._process_secret = secrets.token_bytes(32)
        self._single = None if single is None else self._digest(single.get_secret_value().encode())
        # The hash of the stored secret, whether the presented key matches it, and until when that is remembered.
        self._remembered: OrderedDict[bytes, tuple[str, bool, float]] = OrderedDict()
        self._lock = threading.Lock()
        self._limiter = anyio.CapacityLimiter(_AT_ONCE)  # a hash takes 16 MiB and a core
        self._waiting = 0

    @property
    def required(self) -> bool:
        """Whether requests need a key: one is in the settings, or was ever created."""
        return self._single is not None or self._store.has_keys

    async def caller(self, presented: bytes) -> Caller | None:
        """Return who presents a key, or None for a wrong or revoked one.

        Args:
            presented: The key as the request has it.

        Raises:
            OverloadedError: too many keys are being checked.
        """
        digest = self._digest(presented)
        if self._single is not None and hmac.compare_digest(digest, self._single):
            return OPERATOR
        parts = split_key(presented.decode("latin-1"))
        key = None if parts is None else self._valid(parts[0])
        if parts is None or key is None:
            return None
        matched = self._recall(digest, key)
        if matched is None:
            matched = await self._match(digest, parts[1], key)
            key = self._valid(parts[0])  # it may have been revoked meanwhile
        return self._caller(key) if matched and key is not None else None

    async def _match(self, digest: bytes, secret: str, key: ApiKey) -> bool:
        def work() -> bool:
            known = self._recall(digest, key)  # of an equal request that was first
            if known is None:
                known = matches(secret, key.hash)
                self._remember(digest, key, known)
            return known

        if self._waiting >= _MOST_WAITING:
            raise OverloadedError(f"{self._waiting} keys are being checked; try again later")
        self._waiting += 1
        try:
            return await anyio.to_thread.run_sync(work, limiter=self._limiter)
        finally:
            self._waiting -= 1

    def _valid(self, identity: str) -> ApiKey | None:
        key = self._store.table().keys.get(identity)
        return key if key is not None and key.revoked_at is None else None

    def _caller(self, key: ApiKey) -> Caller:
        salt = self._store.table().salts.get(key.tenant, "")
        return Caller(
            key.tenant, key.scopes, f"{key.tenant}:{salt}", key.id, key.requests_per_minute, key.max_concurrent
        )

    def _recall(self, digest: bytes, key: ApiKey) -> bool | None:
        with self._lock:
            stored, matched, until = self._remembered.get(digest, ("", False, 0.0))
        return matched if stored == key.hash and self._clock() < until else None

    def _remember(self, digest: bytes, key: ApiKey, matched: bool) -> None:
        until = self._clock() + (_VALID_SECONDS if matched else _WRONG_SECONDS)
        with self._lock:
            self._remembered[digest] = (key.hash, matched, until)
            self._remembered.move_to_end(digest)
            while len(self._remembered) > _MOST_REMEMBERED:
                self._remembered.popitem(last=False)

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._process_secret, key, "sha256")
