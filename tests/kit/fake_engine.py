"""An engine without processes, and a clock that the test turns: what the real controller is tested with.

It keeps the contract (all parts or none, fences, repeated calls, reports until forgotten) and watches the promises that
only an engine can see: at most one incarnation of a job lives, and no GPU has two.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from thebes.protocol.contract import Gpu, GpusTaken, Launch, Listener, Mechanism, NodeChange, NodeFacts, Refused, Report


class FakeClock:
    def __init__(self) -> None:
        self.time_s = 1000.0

    def __call__(self) -> float:
        return self.time_s


@dataclass
class Living:
    launch: Launch
    state: str = "running"
    notice_s: float | None = None  # deadline
    started_s: float = 0.0
    reports: dict[str, Report] = field(default_factory=dict)


class FakeEngine:
    """`end`, `lose`, `node_down` and `node_up` are for the test; the rest is the contract."""

    def __init__(
        self, clock: FakeClock, nodes: dict[str, int], *, mechanisms: tuple[Mechanism, ...] = ("checkpoint", "freeze")
    ):
        self.clock = clock
        self.sizes = nodes
        self.mechanisms = mechanisms
        self.up = dict.fromkeys(nodes, True)
        self.living: dict[tuple[str, int], Living] = {}
        self.ended: dict[tuple[str, int], list[Report]] = {}
        self.fence: dict[str, int] = {}
        self.listener: Listener | None = None
        self.calls: list[tuple[str, str, int]] = []
        self.refuse_suspend = False
        self.refuse_resume = False
        self.faults: dict[str, Exception] = {}  # what a call raises, by its name, though it should not
        self.late: dict[str, asyncio.Event] = {}  # a call by this name is done at once, and answered after the event
        self.unreachable = False
        self.sick: set[tuple[str, int]] = set()
        self.taken: dict[tuple[str, int], str] = {}  # by others, and told
        self.about_to_be_taken: set[tuple[str, int]] = set()  # by others, and not told before the next launch
        self.drained: dict[str, str] = {}  # by the site
        self.launches: dict[tuple[str, int], int] = {}
        self.parked_s = 0.0  # as we were told
        self.all_are_back = asyncio.Event()  # after which no node goes on alone any more

    # -- the contract

    async def open(self, listener: Listener, *, parked_s: float = 0.0) -> None:
        self.listener = listener
        self.parked_s = parked_s

    async def unparked(self) -> None:
        await self.all_are_back.wait()

    async def leave(self) -> None:
        return None

    async def close(self) -> None:
        self.listener = None

    async def nodes(self) -> list[NodeFacts]:
        return [self._facts(node) for node in self.sizes]

    async def reports(self) -> list[Report]:
        found = [report for one in self.living.values() for report in one.reports.values()]
        return [r for r in [*found, *(r for rs in self.ended.values() for r in rs)] if self.up[r.node]]

    async def launch(self, launch: Launch) -> None:
        key = launch.job_id, launch.incarnation
        self.calls.append(("launch", *key))
        if "launch" in self.faults:
            raise self.faults["launch"]
        self._reach(launch)
        if launch.incarnation < self.fence.get(launch.job_id, 0):
            raise Refused("an older incarnation")
        self.fence[launch.job_id] = launch.incarnation
        wanted = {(part.node, gpu) for part in launch.parts for gpu in part.gpus}
        if wanted & self.about_to_be_taken:
            self.taken |= dict.fromkeys(self.about_to_be_taken, "Slurm job 7 of alice")
            self.about_to_be_taken = set()
            for node in self.sizes:
                self.tell_of(node)
            raise GpusTaken("alice was faster")
        if key in self.living or key in self.ended:
            return
        self.launches[key] = self.launches.get(key, 0) + 1
        one = self.living[key] = Living(launch, started_s=self.clock())
        self.check()
        for part in launch.parts:
            self._tell(one, Report(*key, part.node, "running", started_s=self.clock()))

    async def notice(self, job_id: str, incarnation: int, grace_s: float) -> None:
        one = self._alive("notice", job_id, incarnation)
        one.state = "running"
        one.notice_s = self.clock() + grace_s if one.notice_s is None else min(one.notice_s, self.clock() + grace_s)

    async def terminate(self, job_id: str, incarnation: int, grace_s: float) -> None:
        self._alive("terminate", job_id, incarnation)
        self.end(job_id, incarnation, -15, cause="killed")

    async def kill(self, job_id: str, incarnation: int) -> None:
        self.calls.append(("kill", job_id, incarnation))
        one = self.living.get((job_id, incarnation))
        if one is not None:
            self._reach(one.launch)
            self.end(job_id, incarnation, -9, cause="killed")
        elif (job_id, incarnation) not in self.ended:  # its launch may still be on the way
            if self.unreachable or not all(self.up.values()):
                raise OSError("the node cannot be reached")
            self.fence[job_id] = max(self.fence.get(job_id, 0), incarnation + 1)

    async def suspend(self, job_id: str, incarnation: int, mechanism: Mechanism) -> None:
        one = self._alive("suspend", job_id, incarnation)
        if self.refuse_suspend:
            raise Refused("not this one")
        one.state = "frozen" if mechanism == "freeze" else "suspended"
        await self._answer("suspend")

    async def resume(self, job_id: str, incarnation: int, mechanism: Mechanism) -> None:
        one = self._alive("resume", job_id, incarnation)
        if self.refuse_resume:
            raise Refused("its GPU has gone")
        one.state = "running"
        self.check()
        await self._answer("resume")

    async def forget(self, job_id: str, incarnation: int) -> None:
        self.calls.append(("forget", job_id, incarnation))
        self.ended.pop((job_id, incarnation), None)

    async def read_log(self, job_id: str, incarnation: int, rank: int, offset: int, limit: int) -> tuple[bytes, int]:
        text = f"rank {rank} of {job_id}.{incarnation}\n".encode()
        start = max(0, len(text) + offset) if offset < 0 else min(offset, len(text))
        return text[start : start + limit], min(len(text), start + limit)

    # -- for the test

    def end(self, job_id: str, incarnation: int, code: int, *, cause: str = "exit") -> None:
        """All ranks of the incarnation end with this code."""
        one = self.living.pop((job_id, incarnation))
        ranks = 0
        reports = []
        for part in one.launch.parts:
            codes = {ranks + i: code for i in range(len(part.gpus))}
            ranks += len(part.gpus)
            before = one.reports.get(part.node) or Report(
                job_id, incarnation, part.node, "running", started_s=one.started_s
            )
            if before.state == "exited":
                reports.append(before)
                continue
            reports.append(
                replace(
                    before,
                    state="exited",
                    cause=cause,  # type: ignore[arg-type]
                    codes=codes,
                    exited_s=self.clock(),
                    run_s=self.clock() - one.started_s,
                )
            )
        self.ended[job_id, incarnation] = reports
        for report in reports:
            if self.listener is not None and self.up[report.node]:
                self.listener(report)

    def end_part(self, job_id: str, incarnation: int, node: str, code: int) -> None:
        """The ranks on one node end with this code; those on other nodes go on."""
        one = self.living[job_id, incarnation]
        first = 0
        for part in one.launch.parts:
            if part.node == node:
                codes = {first + i: code for i in range(len(part.gpus))}
                told = replace(one.reports[node], state="exited", cause="exit", codes=codes, exited_s=self.clock())
                self._tell(one, replace(told, run_s=self.clock() - one.started_s))
            first += len(part.gpus)
        if all(report.state == "exited" for report in one.reports.values()):
            self.ended[job_id, incarnation] = list(self.living.pop((job_id, incarnation)).reports.values())

    def checkpointed(self, job_id: str, incarnation: int, step: int) -> None:
        one = self.living[job_id, incarnation]
        node = one.launch.parts[0].node
        now_s = self.clock()
        told = replace(
            one.reports[node], checkpoint_step=step, checkpoint_path=f"/ckpt/{step}", checkpoint_s=now_s, step=step
        )
        self._tell(one, told)

    def progressed(self, job_id: str, incarnation: int, steps: float) -> None:
        """The job has made so many more steps, and tells."""
        one = self.living[job_id, incarnation]
        node = one.launch.parts[0].node
        before = one.reports[node]
        now_s = self.clock()
        step = round((before.step or 0) + steps)
        self._tell(one, replace(before, step=step, step_s=now_s, first_step_s=before.first_step_s or now_s))

    def tick(self) -> None:
        """Deadlines pass: whoever was told to go and did not is killed."""
        for (job_id, incarnation), one in list(self.living.items()):
            if one.notice_s is not None and one.notice_s <= self.clock():
                self.end(job_id, incarnation, -9, cause="killed")

    def node_down(self, node: str) -> None:
        self.up[node] = False
        if self.listener is not None:
            self.listener(NodeChange(self._facts(node)))

    def node_up(self, node: str) -> None:
        self.up[node] = True
        if self.listener is not None:
            self.listener(NodeChange(self._facts(node)))

    def check(self) -> None:
        """The promises that only we can see."""
        jobs = [job for job, _ in self.living]
        assert len(jobs) == len(set(jobs)), f"two incarnations of one job live: {sorted(self.living)}"
        held = [
            (part.node, gpu)
            for one in self.living.values()
            if one.state == "running" and not one.launch.packs  # those may share
            for part in one.launch.parts
            for gpu in part.gpus
        ]
        assert len(held) == len(set(held)), "a GPU has two jobs"

    # -- inside

    def _facts(self, node: str) -> NodeFacts:
        gpus = tuple(
            Gpu(i, virtual=True, healthy=(node, i) not in self.sick, taken=self.taken.get((node, i), ""))
            for i in range(self.sizes[node])
        )
        drained = self.drained.get(node, "")
        return NodeFacts(node, gpus, alive=self.up[node], mechanisms=self.mechanisms, drained=drained)

    def tell_of(self, node: str) -> None:
        if self.listener is not None:
            self.listener(NodeChange(self._facts(node)))

    def _tell(self, one: Living, report: Report) -> None:
        one.reports[report.node] = report
        if self.listener is not None and self.up[report.node]:
            self.listener(report)

    def sicken(self, node: str, *gpus: int) -> None:
        """These GPUs of the node, and no others, are not healthy."""
        self.sick = {(node, gpu) for gpu in gpus}
        if self.listener is not None:
            self.listener(NodeChange(self._facts(node)))

    async def _answer(self, call: str) -> None:
        if call in self.late:
            await self.late[call].wait()

    def _reach(self, launch: Launch) -> None:
        if self.unreachable or not all(self.up[part.node] for part in launch.parts):
            raise OSError("the node cannot be reached")

    def _alive(self, call: str, job_id: str, incarnation: int) -> Living:
        self.calls.append((call, job_id, incarnation))
        one = self.living.get((job_id, incarnation))
        if one is None:
            raise Refused("no such incarnation lives")
        self._reach(one.launch)
        return one


async def settled(rounds: int = 200) -> None:
    """Let everything that can happen now happen."""
    for _ in range(rounds):
        await asyncio.sleep(0)
