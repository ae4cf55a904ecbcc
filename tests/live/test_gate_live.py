"""No policy, however wrong, stops a controller: its decision is dropped, the cluster goes on, and everybody is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kit.cluster_in_a_test import live_cluster
from thebes import fill
from thebes.live.entries import Arrive, Decide
from thebes.live.ledger import Ledger, NodeSpec
from thebes.model.decision import Decision
from thebes.model.errors import UserError
from thebes.model.view import View
from thebes.placement import Consolidate, Yarn
from thebes.policy import Policy, find


class Unwritable:
    def __reduce__(self) -> Any:
        raise RuntimeError("I cannot be written down")

    def __repr__(self) -> str:
        raise ValueError("nor shown")


class Speechless(Exception):  # noqa: N818 - what it is
    def __str__(self) -> str:
        raise ValueError("not even this")


def raising(error: BaseException) -> Callable[[View], Decision]:
    def script(view: View) -> Decision:
        raise error

    return script


def of_the_form(**fields: Any) -> Callable[[View], Decision]:
    """The right answer but for these fields, put in behind the back of the class."""

    def script(view: View) -> Decision:
        decision = fill(view, np.arange(len(view.jobs)))
        for name, value in fields.items():
            object.__setattr__(decision, name, value)
        return decision

    return script


def whole(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


# Two jobs are alive: the first, in row 0, holds 4 GPUs; the second asks for 4.
WRONG: list[tuple[str, Callable[[View], Any], str]] = [
    ("queues too short", of_the_form(queues=whole(0)), "names the queues of 1 jobs, but 2 are alive"),
    ("queue too large", of_the_form(queues=whole(0, 40_000)), "names a queue outside 0 … 32767"),
    ("queues of objects", of_the_form(queues=np.array([None, 1])), "not object"),
    ("no fate", of_the_form(fate=whole()), "tells the fate of 0 jobs, but 2 are alive"),
    ("strange fate", of_the_form(fate=whole(0, 99)), "tells a fate that does not exist"),
    ("promotes who runs", of_the_form(promote=whole(0)), "promotes a job that is not waiting (job "),
    ("shares", of_the_form(rows=whole(0), gpus=whole(0, 1, 2, 3), shares=np.array([0.5]), counts=whole(4)),
     "shares GPUs, but the policy does not say that it does"),
    ("plans", of_the_form(plans=whole(1, 1)), "names execution plans or CPUs, which a live cluster does not carry out"),
    ("resizes", of_the_form(rows=whole(0), gpus=whole(0, 1), counts=whole(2)), "another number of GPUs"),
    ("wakes never", of_the_form(wake_s=float("nan")), "asks to be woken at nan s"),
    ("wakes in words", of_the_form(wake_s="soon"), "its decision cannot be read: ValueError"),
    ("memory", of_the_form(memory=Unwritable()), "what it wants to remember cannot be written down: RuntimeError"),
    ("closure", of_the_form(memory=lambda: None), "what it wants to remember cannot be written down"),
    ("recursion", raising(RecursionError("deep")), "decide failed: RecursionError: deep"),
    ("exit", raising(SystemExit(1)), "decide failed: SystemExit: 1"),
    ("interrupt", raising(KeyboardInterrupt()), "KeyboardInterrupt"),
    ("speechless", raising(Speechless()), "decide failed: Speechless"),
    ("garbage", lambda view: 17, "decide returned int, not a Decision"),
]  # fmt: skip


def test_no_policy_can_stop_a_controller(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            running, ledger = await c.submit(4), c.controller.core.ledger
            right = ledger.policy.decide
            object.__setattr__(ledger.policy, "decide", lambda view: fill(view, np.arange(1)))
            waiting = await c.submit(4)
            for name, wrong, told in WRONG:
                object.__setattr__(ledger.policy, "decide", wrong)
                await c.pass_time(61)
                trouble = c.controller.status()["trouble"]
                assert trouble is not None, name
                assert trouble.startswith("policy tiresias-l: "), name
                assert told in trouble, name
                assert (c.state(running), c.state(waiting)) == ("running", "queued"), name
            failed = [event for event in c.events() if event.kind == "policy-failed"]
            assert len(failed) == len(WRONG)
            object.__setattr__(ledger.policy, "decide", right)
            await c.pass_time(61)
            assert c.controller.status()["trouble"] is None
            assert c.state(waiting) == "running"
            assert [event.kind for event in c.events() if event.kind.startswith("policy")][-1] == "policy-works"

    asyncio.run(story())


def test_a_policy_that_fails_is_asked_at_growing_intervals(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            await c.submit(4)
            asked: list[float] = []

            def wrong(view: View) -> Decision:
                asked.append(view.now_s)
                raise ZeroDivisionError

            object.__setattr__(c.controller.core.ledger.policy, "decide", wrong)
            await c.submit(1)
            for _ in range(40):
                await c.pass_time(1)
            pauses = np.diff(asked)
            assert len(pauses) >= 4
            assert (np.diff(pauses) > 0).all()

    asyncio.run(story())


NODES = [NodeSpec("n0", 4), NodeSpec("n1", 4)]


def arrival(job: str, gpus: int, t: float = 0.0) -> Arrive:
    return Arrive(t, job, gpus, "default", t)


def test_what_a_policy_writes_into_its_view_reaches_nobody():
    class Vandal(Policy):
        name = "vandal"

        def decide(self, view: View) -> Decision:
            decision = fill(view, np.arange(len(view.jobs)))
            view.machine.gpus["owner"][:] = 7
            view.board.table.jobs["gpus"][:] = 99
            view.quotas[:] = 0
            view.jobs.rows[:] = 0
            view.cluster.node_gpus[:] = 0
            return decision

    ledger = Ledger(NODES, Vandal(), Consolidate())
    for job in "ab":
        ledger.apply(arrival(job, 2))
    planned, _ = ledger.decide(1.0)
    ledger.apply(planned.entry())
    assert (ledger.gpus_of("a"), ledger.gpus_of("b")) == ((0, 1), (2, 3))
    assert ledger.decide(2.0)[0].fates.tolist() == [0, 0]


def test_memory_of_version_0_1_is_dropped_and_nothing_else():
    """Its entries say no format, and what they remember is of classes that stand elsewhere now."""
    ledger = Ledger(NODES, find("fifo")(), Consolidate())
    ledger.apply(arrival("a", 1))
    planned, _ = ledger.decide(1.0)
    told = planned.entry().to_json() | {"memory": "eJwrzs8pTVUoLE0tqkxJTVJIzUnNTc0rKQYAZQsItg=="}
    del told["format"]
    known = {key: value for key, value in told.items() if key not in ("op", "t")}
    entry = Decide(1.0, **{key: tuple(map(tuple, v)) if key in ("start", "migrate") else v for key, v in known.items()})
    ledger.apply(entry)
    assert ledger.memory is None
    assert ledger.holds("a")


def test_what_a_placement_never_seats_is_refused_in_both_worlds():
    import thebes
    from thebes.model.trace import Trace

    nodes = [NodeSpec(f"n{i}", 2, "", None, f"rack{i}") for i in range(2)]
    ledger = Ledger(nodes, find("fifo")(), Yarn())
    assert "the placement never gives more than 2 to one job" in ledger.never_fits(4, None, None)
    assert ledger.never_fits(4, 2, None) == ""  # an even part on each node is the user's own wish
    trace = Trace.of("t", {"job_id": ["0"], "submit_time": [0.0], "duration": [1.0], "num_gpus": [4.0]})
    with pytest.raises(UserError, match="can never run on this cluster"):
        thebes.simulate(trace, ledger.cluster, "fifo", placement="yarn")


def test_a_gpu_type_is_meant_by_its_words_in_both_worlds():
    import thebes
    from thebes.model.trace import Trace

    ledger = Ledger([NodeSpec("n0", 2, "NVIDIA A100-SXM4-80GB")], find("fifo")(), Consolidate())
    assert [ledger.kinds_for(kind) for kind in ("A100", "a100-80gb", "A10", "H100|A100", None)] == [1, 1, 0, 1, 1]
    columns = {"job_id": ["0"], "submit_time": [0.0], "duration": [1.0], "num_gpus": [1.0], "gpu_type": ["A100"]}
    assert thebes.simulate(Trace.of("t", columns), ledger.cluster, "fifo").jobs["finish_s"].null_count() == 0


def test_the_clock_of_a_policy_inside_a_policy_is_read_live():
    """Given two-level around tiresias-g, whose quantum the ledger did not heed."""
    ledger = Ledger(NODES, find("two-level")(), Consolidate())
    assert ledger.quantum_s == ledger.policy.reads_every_s
    assert Ledger(NODES, find("las")(), Consolidate()).quantum_s > 0
