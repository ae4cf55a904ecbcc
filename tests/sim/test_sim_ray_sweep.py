"""Sweeps on a Ray cluster, without one: a stand-in for Ray runs each task in this process when it is waited for.

`tests/ray/test_ray_words.py` runs the same code on a real cluster; here are the answers that a real one seldom gives.
"""

from __future__ import annotations

import pickle
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kit.workloads import trace_of
from thebes import UserError, simulate
from thebes.model.cluster import Cluster
from thebes.policy import find
from thebes.sim.choices import Choice
from thebes.sim.ray_sweep import run_on_ray
from thebes.sim.simulate import SimulationOptions
from thebes.trace.cluster_file import read_cluster

SETTINGS_FRAME = b"\0\0\0\4\0\0\0\0\0"  # what a head answers to the greeting
EXAMPLES = Path(__file__).parents[2] / "examples"
TRACE = trace_of((0, 1, 100), (10, 2, 50), (20, 2, 30))


class RayError(Exception):
    """As Ray raises it when a worker died too often."""


@dataclass(eq=False)
class Task:
    call: Callable[[], Any]
    answer: Any = None


@dataclass
class StandInForRay:
    """The part of Ray that a sweep uses. `answers` replaces what a task would find, by its number."""

    cpus: float = 4.0
    answers: dict[int, Any] = field(default_factory=dict)
    started: list[Task] = field(default_factory=list)
    cancelled: list[Task] = field(default_factory=list)
    most_at_a_time: int = 0
    by_value: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    left: bool = False

    exceptions = SimpleNamespace(RayError=RayError)

    @property
    def cloudpickle(self) -> Any:
        return SimpleNamespace(
            register_pickle_by_value=lambda module: self.by_value.append(module.__name__),
            unregister_pickle_by_value=lambda module: self.by_value.append(f"no more {module.__name__}"),
            dumps=pickle.dumps,
        )

    def init(self, **_settings: Any) -> None:
        self.left = False

    def shutdown(self) -> None:
        self.left = True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.cpus}

    def put(self, thing: Any) -> Any:
        return thing

    def remote(self, function: Callable[..., Any]) -> Any:
        def start(*args: Any) -> Task:
            self.started.append(Task(lambda: function(*args)))
            return self.started[-1]

        return SimpleNamespace(options=lambda **_options: SimpleNamespace(remote=start))

    def wait(self, tasks: list[Task], timeout: float) -> tuple[list[Task], list[Task]]:
        assert timeout > 0
        self.most_at_a_time = max(self.most_at_a_time, len(tasks))
        latest = tasks[-1]  # results come in another order than tasks were started
        number = self.started.index(latest)
        latest.answer = self.answers[number] if number in self.answers else latest.call()
        return [latest], tasks[:-1]

    def get(self, task: Task) -> Any:
        if isinstance(task.answer, Exception):
            raise task.answer
        return task.answer

    def cancel(self, task: Task, force: bool) -> None:
        assert force
        self.cancelled.append(task)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> StandInForRay:
    stand_in = StandInForRay()
    kept = ModuleType("ray.experimental.internal_kv")
    vars(kept).update(
        _internal_kv_put=lambda key, value, overwrite, namespace: stand_in.kept.update({key: value}),
        _internal_kv_get=lambda key, namespace: stand_in.kept.get(key),
        _internal_kv_del=lambda key, namespace: stand_in.kept.pop(key, None),
    )
    for name, module in {
        "ray": stand_in,
        "ray.experimental": ModuleType("ray.experimental"),
        kept.__name__: kept,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    return stand_in


@pytest.fixture
def head() -> Iterator[str]:
    """The address of a process that greets as the head of a Ray cluster does."""
    with socket.create_server(("127.0.0.1", 0)) as door:

        def greet() -> None:
            line, _ = door.accept()
            with line:
                line.recv(4096)
                line.sendall(SETTINGS_FRAME)

        threading.Thread(target=greet, daemon=True).start()
        yield f"127.0.0.1:{door.getsockname()[1]}"


def choices(*names: str) -> list[Choice]:
    return [Choice(find(name)(), SimulationOptions(), name) for name in names]


def cluster() -> Cluster:
    return read_cluster("1x4")


def test_results_come_in_the_order_of_the_choices_and_are_those_of_a_run_here(ray: StandInForRay, head: str) -> None:
    names = ("fifo", "srtf", "tiresias-l")
    told: list[tuple[int, float]] = []
    results = run_on_ray(TRACE, cluster(), choices(*names), head, advance=lambda at, part: told.append((at, part)))
    here = [simulate(TRACE, "1x4", name) for name in names]
    assert [result.policy for result in results] == list(names)
    assert all(there.jobs.equals(mine.jobs) for there, mine in zip(results, here, strict=True))
    assert next(at for at, part in told if part == 1.0) == 2, "the one that ended first is told first"
    assert {at for at, _ in told} == {0, 1, 2}
    assert ray.left, "the cluster is left at the end"
    assert not ray.kept, "nothing stays behind there"


def test_no_more_runs_at_a_time_than_allowed(ray: StandInForRay, head: str) -> None:
    results = run_on_ray(TRACE, cluster(), choices("fifo", "srtf", "las"), head, workers=1)
    assert (ray.most_at_a_time, len(results)) == (1, 3)


def test_a_policy_from_a_file_of_the_users_own_travels_along(ray: StandInForRay, head: str) -> None:
    own = find(f"{EXAMPLES}/own_policy.py:HeadStart")()
    run_on_ray(TRACE, cluster(), [Choice(own, SimulationOptions(), "own"), *choices("fifo")], head)
    module = type(own).__module__
    assert ray.by_value[-2:] == [module, f"no more {module}"], "the policy of the package is there already"


@pytest.mark.parametrize(
    ("answer", "message", "hint"),
    [
        (
            RayError("\nThe worker died.\nAt length."),
            "the run of srtf was lost 6 times on the Ray cluster: The worker died.",
            "its machines may be short of memory; without --ray it runs here",
        ),
        (RayError(""), "the run of srtf was lost 6 times on the Ray cluster: RayError", "short of memory"),
        (
            ("missing", "No module named 'numba'"),
            "a machine of the Ray cluster cannot run simulations: No module named 'numba'",
            "install there: pip install numpy numba polars scipy",
        ),
    ],
)
def test_what_goes_wrong_there_is_told_and_the_others_are_given_up(
    ray: StandInForRay, head: str, answer: Any, message: str, hint: str
) -> None:
    ray.answers[1] = answer
    with pytest.raises(UserError) as raised:
        run_on_ray(TRACE, cluster(), choices("fifo", "srtf"), head)
    assert str(raised.value).startswith(message)
    assert hint in (raised.value.hint or "")
    assert ray.cancelled == ray.started[:1]
    assert ray.left


def test_an_error_of_a_run_there_is_the_same_here(ray: StandInForRay, head: str) -> None:
    with pytest.raises(UserError, match="3 of 3 jobs can never run on this cluster"):
        run_on_ray(trace_of(*[(0, 64, 10)] * 3), cluster(), choices("fifo"), head)


def test_a_cluster_without_cpus_is_refused(ray: StandInForRay, head: str) -> None:
    ray.cpus = 0.0
    with pytest.raises(UserError, match="the Ray cluster has no CPUs to run on"):
        run_on_ray(TRACE, cluster(), choices("fifo"), head)
