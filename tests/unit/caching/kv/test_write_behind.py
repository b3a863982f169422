import threading

from rag_posfix.caching.kv.store import WriteBehind
from tests.support.passages import SHAPE, entry
from tests.support.waiting import wait_until

SECONDS = 60  # enough on a busy machine; nothing waits that long if all is well


class Slow:
    """A writer that waits at a gate and remembers what it wrote."""

    def __init__(self):
        self.gate = threading.Event()
        self.began = threading.Event()
        self.written = []

    def __call__(self, entries, n_tiers):
        self.began.set()
        assert self.gate.wait(SECONDS)
        self.written.extend((key, n_tiers) for key in entries)


def writers():
    """Return the threads that write behind."""
    return {thread for thread in threading.enumerate() if thread.name == "rag-posfix-passages"}


def test_adding_does_not_wait_and_flush_does():
    slow = Slow()
    behind = WriteBehind(slow, max_bytes=10_000)
    assert behind.add({"one": entry(), "two": entry()}, 2) == 0
    assert behind.add({"three": entry()}, 1) == 0
    assert not behind.flush(0.05)
    assert not slow.written
    assert behind.pending == 3
    slow.gate.set()
    assert behind.flush(SECONDS)
    assert slow.written == [("one", 2), ("two", 2), ("three", 1)]
    assert behind.pending == 0


def test_no_thread_runs_before_the_first_entry():
    before = writers()
    behind = WriteBehind(lambda *_: None, max_bytes=1)
    behind.add({}, 1)
    assert writers() == before
    assert behind.flush(0)
    behind.close(0)


def test_what_the_queue_has_no_room_for_is_refused():
    slow = Slow()
    behind = WriteBehind(slow, max_bytes=3 * SHAPE.n_bytes)
    behind.add({"first": entry()}, 1)
    assert slow.began.wait(SECONDS)
    assert behind.add({f"key{number}": entry() for number in range(5)}, 1) == 2
    slow.gate.set()
    assert behind.flush(SECONDS)
    assert [key for key, _ in slow.written] == ["first", "key0", "key1", "key2"]
    assert behind.add({"later": entry()}, 1) == 0
    assert behind.flush(SECONDS)


def test_an_entry_larger_than_the_queue_is_written_when_nothing_waits():
    slow = Slow()
    behind = WriteBehind(slow, max_bytes=1)
    slow.gate.set()
    assert behind.add({"key": entry()}, 1) == 0
    assert behind.flush(SECONDS)
    assert slow.written == [("key", 1)]


def test_what_is_cancelled_is_not_written():
    slow = Slow()
    behind = WriteBehind(slow, max_bytes=10_000)
    behind.add({"first": entry()}, 1)
    assert slow.began.wait(SECONDS)
    behind.add({"a": entry(tags=("x",)), "b": entry(tags=("y",)), "c": entry(tags=("x", "y"))}, 1)
    threading.Timer(0.05, slow.gate.set).start()
    behind.cancel(["x"])
    assert ("first", 1) in slow.written, "cancel must wait for the write under way"
    assert behind.flush(SECONDS)
    assert slow.written == [("first", 1), ("b", 1)]


def test_everything_can_be_cancelled():
    slow = Slow()
    behind = WriteBehind(slow, max_bytes=10_000)
    behind.add({"first": entry()}, 1)
    assert slow.began.wait(SECONDS)
    behind.add({"a": entry(), "b": entry()}, 1)
    threading.Timer(0.05, slow.gate.set).start()
    behind.cancel()
    assert slow.written == [("first", 1)]
    assert behind.pending == 0


def test_close_writes_what_waits_and_refuses_the_rest():
    slow = Slow()
    slow.gate.set()
    behind = WriteBehind(slow, max_bytes=10_000)
    before = writers()
    behind.add({"key": entry()}, 1)
    behind.close(SECONDS)
    assert slow.written == [("key", 1)]
    assert writers() <= before, "the thread must have ended"
    assert behind.add({"other": entry()}, 1) == 1


def test_close_does_not_wait_longer_than_it_may():
    slow = Slow()
    behind = WriteBehind(slow, max_bytes=10_000)
    behind.add({"key": entry()}, 1)
    behind.close(0.1)
    assert slow.written == [], "the writer still waits"
    slow.gate.set()


def test_tensors_are_let_go_once_written():
    import weakref

    behind = WriteBehind(lambda *_: None, max_bytes=10_000)
    kept = entry()
    kv = weakref.ref(kept.kv)
    behind.add({"key": kept}, 1)
    del kept
    assert behind.flush(SECONDS)
    wait_until(lambda: kv() is None)
