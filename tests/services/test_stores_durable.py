"""What an index and a collection guarantee on disk: the same for both, whatever the format of their files."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import time
from pathlib import Path

import pytest

from rag_posfix.errors import RagPosfixError
from tests.support.durable_stores import (
    CollectionStore,
    IndexStore,
    Store,
    batch_of,
    damage_file,
    full_disk,
    write_until_killed,
)

STORES = pytest.mark.parametrize("make", [IndexStore, CollectionStore])
DAMAGES = 200
KILLS = 20


@STORES
def test_damaged_files_end_in_an_error_or_in_a_state_that_was_saved(make: Store, tmp_path: Path) -> None:
    saved, choose = tmp_path / "saved", random.Random(0)
    store = make(saved)
    states: list[dict[str, str]] = [{}]
    for number in range(6):
        documents = {f"{number}-{name}": f"text {name} of {number} " * 20 for name in range(5)}
        store.put(documents)
        states.append(states[-1] | documents)
    damaged, errors = tmp_path / "damaged", list[str]()
    for _ in range(DAMAGES):
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(saved, damaged)
        damage_file(damaged, choose)
        try:
            assert make(damaged).read() in states
        except RagPosfixError as error:
            errors.append(str(error))
    assert len(errors) > DAMAGES / 4
    assert not any("\n" in message for message in errors)


@STORES
@pytest.mark.slow
def test_writers_that_are_killed_lose_nothing_that_they_acknowledged(make: Store, tmp_path: Path) -> None:
    context, choose = multiprocessing.get_context("forkserver"), random.Random(1)
    context.set_forkserver_preload(["tests.support.durable_stores"])
    acknowledged: dict[str, str] = {}
    for round_number in range(KILLS):
        receiver, sender = context.Pipe(duplex=False)
        writer = context.Process(target=write_until_killed, args=(make, tmp_path, round_number, sender))
        writer.start()
        sender.close()
        batches = [receiver.recv() for _ in range(choose.randint(1, 3))]
        time.sleep(choose.random() / 50)
        writer.kill()
        writer.join()
        while receiver.poll():
            try:
                batches.append(receiver.recv())
            except EOFError:
                break
        for batch in batches:
            acknowledged |= batch_of(round_number, batch)
        in_flight = acknowledged | batch_of(round_number, len(batches))
        stored = make(tmp_path).read()
        assert stored in (acknowledged, in_flight)  # the batch in flight: all of it or nothing
        acknowledged = stored


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
