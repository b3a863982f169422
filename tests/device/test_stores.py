"""The passage KV store with a model on the device: what each tier returns is what was computed, bit for bit."""

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.kv.store import KVCodec, PassageStore
from rag_posfix.caching.redis import RedisTier
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.generation.engine import Engine
from tests.support.redis_server import RedisServer
from tests.support.tiny import toy_layout
from tests.support.twin_engines import TOLERANCE, tiny_engine_on

LAYOUT = toy_layout()
MEBIBYTE = 1024**2


@contextmanager
def store_with(tier: str, device: str, redis_url: str) -> Iterator[PassageStore]:
    """Open a store of one tier: entries wait on the device, in host memory, on disk or in Redis."""
    with tempfile.TemporaryDirectory() as folder:
        if tier == "disk":
            tiers = [DiskTier(Path(folder), KVCodec(), max_bytes=64 * MEBIBYTE)]
        elif tier == "redis":
            tiers = [RedisTier(redis_url, KVCodec(), timeout_seconds=5)]
        else:
            tiers = [MemoryTier(64 * MEBIBYTE)]
        with closing(PassageStore(tiers, device="cpu" if tier == "memory" else device)) as store:
            store.clear()
            yield store


def cold_and_warm(device: str, tier: str, method: str, redis_url: str) -> list[object]:
    """Return log-probabilities with nothing stored and with all passages stored, and the stored tokens of both."""
    loaded = tiny_engine_on(device).loaded
    readings: list[object] = []
    with store_with(tier, device, redis_url) as store:
        engine = Engine(loaded, tiny_engine_on(device).encoder, "tiny", f"print on {device}", passages=store)
        for _ in range(2):
            session = engine.open(LAYOUT, MitigationChoice(method), 4)
            readings += [session.cached_tokens, session.next_log_probs()]
            session.advance(7)
            readings.append(session.next_log_probs())
            store.flush()
    assert torch.equal(readings[1], readings[4]), "the first token differs between cold and warm"
    assert torch.equal(readings[2], readings[5]), "the second token differs between cold and warm"
    return readings


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


@pytest.mark.parametrize("method", ["none", "context_experts", "blended", "sorted_inter_document"])
@pytest.mark.parametrize("tier", ["device", "memory", "disk", "redis"])
def test_stored_passages_are_those_that_were_computed(on_both, redis_url, tier, method):
    readings = on_both(cold_and_warm, tier, method, redis_url)
    assert readings.difference <= TOLERANCE
    cold, warm = readings.twin[0], readings.twin[3]
    assert cold == 0
    assert warm > 0
