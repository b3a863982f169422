import dataclasses
import hashlib
import sys
from contextlib import closing, suppress

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.caching.answers import tiered
from rag_posfix.caching.answers.tiered import (
    SEAL_BYTES,
    AnswerKey,
    Blob,
    BlobCodec,
    SingleFlight,
    TieredAnswerCache,
    build_answer_cache,
    seal,
    unseal,
)
from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.errors import CacheError, ConfigError
from rag_posfix.settings import CacheSettings
from tests.support.clock import Clock
from tests.support.threads import in_threads
from tests.support.waiting import wait_until


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def memory(clock):
    return MemoryTier(clock=clock)


@pytest.fixture
def disk(tmp_path, clock):
    cache = DiskTier(tmp_path, BlobCodec(), clock=clock, busy_seconds=60)
    yield cache
    cache.close()


@pytest.fixture
def cache(memory, disk, clock):
    return TieredAnswerCache([memory, disk], ttl_seconds=100, clock=clock)


@pytest.mark.parametrize("value", [{}, {"a": [1, 2.5, None, True, {"b": "é\u2028"}]}, {"text": ""}])
def test_an_answer_comes_back(cache, value):
    assert cache.get("key") is None
    cache.put("key", value, ["doc"])
    assert cache.get("key") == value
    stats = cache.stats()
    assert (stats["hits"], stats["misses"]) == (1, 1)
    assert [tier["name"] for tier in stats["tiers"]] == ["memory", "disk"]


def test_the_caller_cannot_change_what_is_stored(cache):
    cache.put("key", {"documents": []})
    cache.get("key")["documents"].append("mine")
    assert cache.get("key") == {"documents": []}


def test_a_hit_is_copied_into_the_faster_tiers_for_the_rest_of_its_life(cache, memory, clock):
    cache.put("key", {"text": "Paris"})
    memory.clear()
    clock.advance(90)
    assert cache.get("key") == {"text": "Paris"}
    assert memory.get_many({"key": None})
    clock.advance(10)
    assert not memory.get_many({"key": None})
    assert cache.get("key") is None


def test_a_copy_can_be_dropped_by_document_as_well(cache, memory):
    cache.put("one", {"text": "1"}, ["a", "b"])
    cache.put("two", {"text": "2"}, ["c"])
    memory.clear()
    cache.get("one")
    assert cache.drop_documents(["b", "unknown"]) == 1
    assert cache.get("one") is None
    assert cache.get("two") == {"text": "2"}
    assert memory.keys() == ["two"], "hits are copied again after a drop"
    assert cache.drop_documents([]) == 0


def test_answers_are_dropped_from_the_slowest_tier_first_and_the_largest_count_is_returned():
    cleared = []

    class Counting(MemoryTier):
        def __init__(self, name, entries):
            super().__init__()
            self.name, self.entries = name, entries

        def clear(self):
            cleared.append(self.name)
            return self.entries

    cache = TieredAnswerCache([Counting("memory", 1), Counting("disk", 5), Counting("redis", 3)])
    assert cache.clear() == 5
    assert cleared == ["redis", "disk", "memory"]


def test_a_large_answer_is_not_kept(memory):
    cache = TieredAnswerCache([memory], max_entry_bytes=100)
    cache.put("key", {"text": "x" * 100})
    assert cache.get("key") is None
    cache.put("key", {"text": "x" * 80})
    assert cache.get("key") is not None
    assert cache.stats()["rejected"] == 1


@pytest.mark.parametrize("value", [{"a": object()}, {1: 2}, {"a": "\ud800"}, {"a": 2**70}])
def test_an_answer_that_is_not_json_is_not_kept(cache, value):
    cache.put("key", value)
    assert cache.get("key") is None
    assert cache.stats()["rejected"] == 1


def envelope(**changes):
    whole = {"version": 1, "key": "key", "expires_at": 1_000_050.0, "tags": [], "value": {"text": "old"}}
    return orjson.dumps({**whole, **changes})


def test_the_envelope_of_these_tests_opens(cache, memory):
    memory.put_many({"key": Blob(envelope())})
    assert cache.get("key") == {"text": "old"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        envelope(value=[1]),
        envelope(key="other"),
        envelope(version=0),
        envelope(tags=[1]),
        envelope(expires_at="soon"),
        envelope()[:-1],
    ],
)
def test_a_damaged_entry_is_a_miss_and_the_next_tier_is_asked(cache, memory, data):
    memory.put_many({"key": Blob(data)})
    assert cache.get("key") is None
    assert cache.stats()["damaged"] == 1
    cache.put("key", {"text": "Paris"})
    memory.put_many({"key": Blob(data)})
    assert cache.get("key") == {"text": "Paris"}


def test_an_entry_that_was_stored_by_a_clock_far_ahead_is_a_miss_and_is_replaced(cache, clock):
    today = clock.now
    clock.now = today + 73 * 365 * 24 * 3600
    cache.put("key", {"text": "old"})
    assert cache.get("key") == {"text": "old"}
    clock.now = today
    assert cache.get("key") is None
    cache.put("key", {"text": "new"})
    clock.now = today - 5  # of another process, a little behind
    assert cache.get("key") == {"text": "new"}


def test_an_entry_past_its_end_is_a_miss(cache, memory):
    memory.put_many({"key": Blob(envelope(expires_at=1.0))})
    assert cache.get("key") is None


def test_a_closed_cache_only_misses(cache):
    cache.put("key", {})
    cache.close()
    assert cache.get("key") is None


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_life_that_is_not_above_zero_is_refused(memory, seconds):
    with pytest.raises(CacheError, match="ttl_seconds"):
        TieredAnswerCache([memory], ttl_seconds=seconds)


def tier_names(cache):
    return [tier["name"] for tier in cache.stats()["tiers"]]


def test_answers_stay_in_memory_by_default(tmp_path):
    with closing(build_answer_cache(CacheSettings(), tmp_path)) as cache:
        cache.put("key", {"text": "Paris"})
        assert tier_names(cache) == ["memory"]
    assert list(tmp_path.iterdir()) == []


def test_a_tier_on_disk_outlives_the_process(tmp_path):
    for stored in (None, {"text": "Paris"}):
        with closing(build_answer_cache(CacheSettings(disk_bytes=10_000_000), tmp_path)) as cache:
            assert tier_names(cache) == ["memory", "disk"]
            assert cache.get("key") == stored
            cache.put("key", {"text": "Paris"})


def test_answers_in_memory_are_served_while_redis_is_away(tmp_path):
    settings = CacheSettings(redis_url="redis://:hush@127.0.0.1:1")
    with closing(build_answer_cache(settings, tmp_path)) as cache:
        assert tier_names(cache) == ["memory", "redis"]
        cache.put("key", {"text": "Paris"})
        assert cache.get("key") == {"text": "Paris"}
        assert "hush" not in repr(cache)


@pytest.mark.parametrize("settings", [{"enabled": False, "redis_url": "hush"}, {"memory_entries": 0, "disk_bytes": 0}])
def test_no_cache_is_built_when_everything_is_off(tmp_path, settings):
    assert build_answer_cache(CacheSettings(**settings), tmp_path) is None


def test_nothing_is_opened_before_the_first_use(tmp_path):
    build_answer_cache(CacheSettings(redis_url="redis://127.0.0.1:1"), tmp_path).close()
    assert not list(tmp_path.iterdir())


def test_an_invalid_url_and_a_missing_package_are_told(tmp_path, monkeypatch):
    with pytest.raises(CacheError, match="redis cache: the URL is not valid"):
        build_answer_cache(CacheSettings(redis_url="hush"), tmp_path)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[redis\]'"):
        build_answer_cache(CacheSettings(redis_url="redis://127.0.0.1"), tmp_path)


def test_the_largest_answer_fits_through_every_tier(tmp_path):
    settings = CacheSettings(memory_entries=0, disk_bytes=10_000_000, max_entry_bytes=50_000)
    with closing(build_answer_cache(settings, tmp_path)) as cache:
        cache.put("key", {"text": "x" * 49_000}, [f"document {number}" for number in range(100)])
        assert cache.get("key") is not None


@given(key=st.text(st.characters(exclude_categories=["Cs"])), value=st.binary())
def test_a_sealed_value_comes_back(key, value):
    sealed = seal(key, value)
    assert len(sealed) == SEAL_BYTES + len(value)
    assert unseal(key, sealed) == value


def test_the_format_is_the_one_of_stored_entries():
    # Magic number, then 16 bytes of BLAKE2b over the length of the key (8 bytes, big-endian), the key and the value.
    digest = hashlib.blake2b(b"\0\0\0\0\0\0\0\x03key" + b"value", digest_size=16).digest()
    assert seal("key", b"value") == b"RPX1" + digest + b"value"


@given(place=st.integers(0), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_wherever_it_is(place, bit):
    data = bytearray(seal("key", b"answer"))
    data[place % len(data)] ^= 1 << bit
    assert unseal("key", bytes(data)) is None


@pytest.mark.parametrize("sealed", [None, 5, "text", b"", b"RPX1", b"nonsense" * 9, seal("key", b"answer")[:-1]])
def test_what_is_not_a_whole_sealed_value_is_none(sealed):
    assert unseal("key", sealed) is None


def test_key_and_value_are_separated_unambiguously():
    assert unseal("ab", seal("a", b"b" + b"c")) is None
    assert unseal("ab", seal("a", b"c")) is None


KEY = AnswerKey(
    model="model",
    template="template",
    assembly="assembly",
    mitigation="mitigation",
    sampling="sampling",
    question="question",
    documents=("one", "two"),
    order_invariant=False,
    history="history",
    tenant="tenant",
)
TEXT_FIELDS = [field.name for field in dataclasses.fields(AnswerKey) if field.type == "str"]
# Texts are cleaned at the door: a lone surrogate and a NUL are the same U+FFFD there.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=8)


def test_the_digest_does_not_depend_on_the_process():
    assert KEY.digest() == "8bcb2afdef5ae7e2f663d473ac4b3ea7"


@pytest.mark.parametrize("field", TEXT_FIELDS)
@given(text=texts)
def test_every_text_changes_the_digest(field, text):
    other = dataclasses.replace(KEY, **{field: text})
    assert (other.digest() == KEY.digest()) == (other == KEY)


@given(documents=st.lists(texts, max_size=4))
def test_the_documents_change_the_digest(documents):
    other = dataclasses.replace(KEY, documents=tuple(documents))
    assert (other.digest() == KEY.digest()) == (other == KEY)


@pytest.mark.parametrize("change", [{"order_invariant": True}, {"attribution": False}])
def test_order_invariance_and_citations_by_attention_change_the_digest(change):
    assert dataclasses.replace(KEY, **change).digest() != KEY.digest()


def test_the_schema_version_changes_the_digest(monkeypatch):
    before = KEY.digest()
    monkeypatch.setattr(tiered, "SCHEMA_VERSION", tiered.SCHEMA_VERSION + 1)
    assert KEY.digest() != before


@given(first=st.lists(texts, min_size=9, max_size=9), second=st.lists(texts, min_size=9, max_size=9))
def test_moving_text_between_fields_changes_the_digest(first, second):
    one, two = (
        AnswerKey(**dict(zip(TEXT_FIELDS, values, strict=True)), documents=(), order_invariant=False)
        for values in (first, second)
    )
    assert (one.digest() == two.digest()) == (one == two)


@pytest.mark.parametrize(
    ("first", "second"),
    [(("ab", "c"), ("a", "bc")), (("ab",), ("a", "b")), ((), ("",)), (("a", ""), ("", "a")), (("a",), ("a", "a"))],
)
def test_the_boundaries_of_documents_count(first, second):
    digests = {dataclasses.replace(KEY, documents=documents).digest() for documents in (first, second)}
    assert len(digests) == 2


def test_a_field_does_not_run_into_the_documents():
    assert (
        dataclasses.replace(KEY, tenant="", documents=("x",)).digest()
        != dataclasses.replace(KEY, tenant="x", documents=()).digest()
    )


@given(data=st.data(), documents=st.lists(texts, min_size=2, max_size=5))
def test_a_shuffled_context_is_the_same_key_only_for_an_order_invariant_mitigation(data, documents):
    shuffled = data.draw(st.permutations(documents))
    for order_invariant in (False, True):
        one, two = (
            dataclasses.replace(KEY, documents=tuple(order), order_invariant=order_invariant).digest()
            for order in (documents, shuffled)
        )
        assert (one == two) == (order_invariant or documents == shuffled)


SECONDS = 60  # enough on a busy machine, and far below the time after which a thread stops waiting


@pytest.fixture
def flight():
    return SingleFlight(max_wait_seconds=600)


def hold(flight, key):
    """Hold ``key`` in another thread and release it; fail if it is not free within ``SECONDS``."""

    def work(_):
        with flight.hold(key):
            return True

    return in_threads(work, [None], SECONDS) == [True]


def test_equal_questions_at_the_same_time_are_computed_once():
    cache = TieredAnswerCache([MemoryTier()], max_wait_seconds=600)
    arrived, inside, most_inside, computed = [], [], [], []

    def ask(number):
        arrived.append(number)
        with cache.single_flight("key"):
            inside.append(number)
            most_inside.append(len(inside))
            wait_until(lambda: len(arrived) == 8)
            answer = cache.get("key")
            if answer is None:
                computed.append(number)
                answer = {"text": "Paris"}
                cache.put("key", answer)
            inside.remove(number)
            return answer

    assert in_threads(ask, range(8), SECONDS) == [{"text": "Paris"}] * 8
    assert len(computed) == max(most_inside) == 1


def test_different_keys_do_not_wait_for_each_other(flight):
    with flight.hold("one"):
        assert hold(flight, "two")


def test_nothing_is_kept_of_finished_keys(flight):
    def work(_):
        for index in range(50):
            with flight.hold(f"key{index % 3}"):
                pass

    in_threads(work, range(8), SECONDS)
    assert len(flight) == 0


def test_an_error_frees_the_key(flight):
    with suppress(ValueError), flight.hold("key"):
        raise ValueError
    assert hold(flight, "key")
    assert len(flight) == 0


def test_the_wait_is_bounded():
    flight = SingleFlight(max_wait_seconds=0.02)
    with flight.hold("key"):
        assert hold(flight, "key")
        assert len(flight) == 1


def test_a_negative_wait_is_refused():
    with pytest.raises(CacheError, match="max_wait_seconds=-1 must be >= 0"):
        SingleFlight(-1)
