"""Which process answers which call, with a cluster of plain objects; tests/integration/test_ray.py has a real one."""

import itertools
from types import SimpleNamespace

import pytest

from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation.ray_map import ray_map


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


class Died(Exception):
    """What Ray raises of a process that ended."""


class Cluster:
    """Has room for some processes, the others never start; answers the latest call first."""

    exceptions = SimpleNamespace(RayActorError=Died)

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
                self.calls.append((handle.number, *arguments[1:]))
                try:
                    self.results[reference] = getattr(handle.held, name)(*arguments)
                except (ConfigError, Died) as error:
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


class Doubling:
    def __init__(self, factor):
        self.factor = factor

    def double(self, number):
        if number < 0:
            raise ConfigError(f"{number} is negative")
        return 2 * self.factor * number


@pytest.mark.parametrize(("room", "count"), [(1, 1), (2, 2), (2, 5)])
def test_every_call_is_answered_once_by_the_processes_that_started(room, count):
    cluster = Cluster(room)
    with ray_map(cluster, count, Doubling, 3) as calls:
        assert sorted(calls("double", [(number,) for number in range(7)])) == [(n, 6 * n) for n in range(7)]
        assert sorted(number for _, number in cluster.calls) == list(range(7))
        assert list(calls("double", [(8,)])) == [(0, 48)]
        assert list(calls("double", [])) == []
    assert cluster.killed == list(range(count))
    assert cluster.chosen == {"num_cpus": 1}


def test_a_call_that_fails_is_told_in_its_own_words_and_the_processes_end():
    cluster = Cluster(2)
    with pytest.raises(EvaluationError, match=r"^-1 is negative$"), ray_map(cluster, 2, Doubling, 1) as calls:
        list(calls("double", [(1,), (-1,)]))
    assert cluster.killed == [0, 1]


class Dying(Doubling):
    """Ends its process at one number, as often as it is told to."""

    deaths = 0

    def double(self, number):
        if number == 4 and Dying.deaths < self.factor:
            Dying.deaths += 1
            raise Died("the process ended")
        return 2 * number


@pytest.mark.parametrize("deaths", [1, 3])
def test_a_call_whose_process_died_is_made_again_by_another(monkeypatch, deaths):
    monkeypatch.setattr(Dying, "deaths", 0)
    cluster = Cluster(9)
    with ray_map(cluster, 2, Dying, deaths) as calls:
        assert sorted(calls("double", [(number,) for number in range(7)])) == [(n, 2 * n) for n in range(7)]
    assert Dying.deaths == deaths
    assert len(cluster.handles) == 2 + deaths
    assert len(cluster.killed) == 2


def test_a_call_that_ends_four_processes_is_an_error(monkeypatch):
    monkeypatch.setattr(Dying, "deaths", 0)
    message = "a Ray worker died 4 times: the process ended"
    with pytest.raises(EvaluationError, match=message), ray_map(Cluster(9), 2, Dying, 9) as calls:
        list(calls("double", [(4,)]))
