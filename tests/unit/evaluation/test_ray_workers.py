"""Which process answers which call, with a cluster of plain objects; tests/integration/test_ray.py has a real one."""

import itertools
from contextlib import nullcontext

import pytest

from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation.ray_workers import RayWorkers, ray_workers


class Remote:
    def __init__(self, cluster, actor, name):
        self.cluster, self.actor, self.name = cluster, actor, name

    def remote(self, *arguments):
        return self.cluster.asked(self.actor, self.name, arguments)


class Handle:
    def __init__(self, cluster, number, held):
        self.cluster, self.number, self.held = cluster, number, held

    def __getattr__(self, name):
        return Remote(self.cluster, self, name)


class Cluster:
    """Has room for some processes, the others never start; answers the latest call first."""

    def __init__(self, room):
        self.room, self.handles, self.results, self.calls, self.killed = room, [], {}, [], []
        self.names = itertools.count()

    def remote(self, made):
        self.made = made
        return self

    def options(self, **options):
        self.chosen = options

        class Making:
            @staticmethod
            def remote(*arguments):
                handle = Handle(self, len(self.handles), self.made(*arguments))
                self.handles.append(handle)
                return handle

        return Making

    def asked(self, handle, name, arguments):
        reference = next(self.names)
        if handle.number < self.room:
            if name == "__ray_ready__":
                self.results[reference] = True
            else:
                self.calls.append((handle.number, *arguments))
                try:
                    self.results[reference] = getattr(handle.held, name)(*arguments)
                except ConfigError as error:
                    self.results[reference] = error
        return reference

    def wait(self, references, num_returns):
        done = [reference for reference in references if reference in self.results]
        return done[-1:], []

    def get(self, reference):
        found = self.results[reference]
        if isinstance(found, Exception):
            raise found
        return found

    def kill(self, handle):
        self.killed.append(handle.number)


def connect(monkeypatch, room):
    cluster = Cluster(room)
    monkeypatch.setattr("rag_posfix.evaluation.ray_workers.connect_ray", lambda: nullcontext(cluster))
    return cluster


class Doubling:
    def double(self, number):
        if number < 0:
            raise ConfigError(f"{number} is negative")
        return 2 * number

    def double_all(self, numbers, factor):
        return [2 * factor * number for number in numbers]


@pytest.mark.parametrize(("room", "count"), [(1, 1), (2, 2), (2, 5)])
def test_every_call_is_answered_once_by_the_processes_that_started(monkeypatch, room, count):
    cluster = connect(monkeypatch, room)
    with ray_workers(Doubling, (), count) as workers:
        found = list(workers.each("double", [(number,) for number in range(7)]))
        assert sorted(found) == [(number, 2 * number) for number in range(7)]
        assert sorted(number for _, number in cluster.calls) == list(range(7))
        assert workers.call("double", 8) == 16
        halves = sorted(workers.batches("double_all", list(range(5)), 2, 3))
        assert halves == [(number, 6 * number) for number in range(5)]
        assert list(workers.each("double", [])) == []
    assert cluster.killed == list(range(count))
    assert cluster.chosen == {"num_cpus": 1, "max_restarts": 3, "max_task_retries": 3}


def test_a_call_that_fails_is_told_in_its_own_words_and_the_processes_end(monkeypatch):
    cluster = connect(monkeypatch, 2)
    with pytest.raises(EvaluationError, match=r"^-1 is negative$"), ray_workers(Doubling, (), 2) as workers:
        list(workers.each("double", [(1,), (-1,)]))
    assert cluster.killed == [0, 1]


def test_what_is_kept_stays_there_until_it_is_used():
    cluster = Cluster(1)
    workers = RayWorkers(cluster, [Handle(cluster, 0, Doubling())])
    assert cluster.get(workers.call_for_reference("double", 4)) == 8
    failed = workers.call_for_reference("double", -4)
    with pytest.raises(ConfigError, match="-4 is negative"):
        cluster.get(failed)
