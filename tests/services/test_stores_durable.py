"""What an index and a collection guarantee on disk: the same for both, whatever the format of their files.

A collection guarantees more: it is changed by several writers at once, and no damage gives an earlier state.
"""

from __future__ import annotations

import multiprocessing
import random
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest

from rag_posfix.errors import RagPosfixError
from tests.services.durable_stores import (
    CollectionStore,
    IndexStore,
    Store,
    batch_of,
    damage_file,
    full_disk,
    write_until_killed,
)

pytestmark = pytest.mark.slow

STORES = pytest.mark.parametrize("make", [IndexStore, CollectionStore])
DAMAGES = 200
KILLS = 20


@STORES
def test_damaged_files_end_in_an_error_or_in_a_state_that_was_saved(make: Store, tmp_path: Path) -> None:
    saved, choose = tmp_path / "saved", random.Random(0)
    store = make(saved)
    states: list[dict[str, str]] = [{}]
    for number in range(6):
        documents = {f"{number}-{name}": (f"text {name} of {number} " * 100).strip() for name in range(5)}
        store.put(documents)
        states.append(states[-1] | documents)
    damaged, errors = tmp_path / "damaged", list[str]()
    for _ in range(DAMAGES):
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(saved, damaged)
        damage_file(damaged, choose)
        allowed = states[-1:] if make is CollectionStore else states
        try:
            assert make(damaged).read() in allowed
        except RagPosfixError as error:
            errors.append(str(error))
    assert len(errors) > DAMAGES / 4
    assert not any("\n" in message for message in errors)


@pytest.mark.parametrize(("make", "n_writers"), [(IndexStore, 1), (CollectionStore, 3)])
def test_writers_that_are_killed_lose_nothing_that_they_acknowledged(
    make: Store, n_writers: int, tmp_path: Path
) -> None:
    context, choose = multiprocessing.get_context("forkserver"), random.Random(1)
    context.set_forkserver_preload(["tests.services.durable_stores", "faiss"])
    make(tmp_path)
    acknowledged: dict[str, str] = {}
    for moment in range(KILLS):
        writers = []
        for number in range(moment * n_writers, (moment + 1) * n_writers):
            receiver, sender = context.Pipe(duplex=False)
            writer = context.Process(target=write_until_killed, args=(make, tmp_path, number, sender))
            writer.start()
            sender.close()
            writers.append((number, writer, receiver))
        batches = {number: receiver.recv() + 1 for number, _, receiver in writers}
        time.sleep(choose.random() / 20)
        for _, writer, _ in writers:
            writer.kill()
        in_flight = []
        for number, writer, receiver in writers:
            writer.join()
            with suppress(EOFError):
                while receiver.poll():
                    batches[number] = receiver.recv() + 1
            for batch in range(batches[number]):
                acknowledged |= batch_of(number, batch)
            in_flight.append(batch_of(number, batches[number]))
        stored = make(tmp_path).read()
        for batch in in_flight:  # all of it or nothing
            if batch.keys() & stored.keys():
                acknowledged |= batch
        assert stored == acknowledged


@STORES
def test_a_full_disk_is_an_error_and_leaves_everything_as_it_was(make: Store, tmp_path: Path) -> None:
    store = make(tmp_path)
    store.put({"a": "one"})
    for max_bytes in (0, 100, 5000, 70_000):
        with full_disk(max_bytes), pytest.raises(RagPosfixError, match="cannot write"):
            store.put({"b": "b" * 100_000, "c": "c" * 100_000})
        assert store.read() == {"a": "one"}
    store.put({"b": "two"})
    assert store.read() == {"a": "one", "b": "two"}
