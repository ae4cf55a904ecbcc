"""Launching a gang: an allocation, a step on every node, then the ranks. All parts start, or none."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from thebes.engine.slurm import asking
from thebes.engine.slurm.calls import START_S, Calls
from thebes.engine.slurm.commands import SlurmError, srun_args
from thebes.engine.slurm.facts import SlurmFacts
from thebes.engine.slurm.gang import SlurmGang
from thebes.engine.slurm.looking import Looking
from thebes.engine.slurm.records import seconds_of
from thebes.engine.slurm.srun import first_words, has_failed, last_line, start_apart
from thebes.protocol.contract import GANG_NOT_STARTED, GpusTaken, Launch, Refused
from thebes.protocol.launch import PartLaunch, part_launch
from thebes.protocol.messages import StartStep

GIVEN_BACK_S = 2.0
CALLED_WITHIN_S = 30.0  # all steps, after srun
START_WITHIN_S = 90.0  # a step waits for the word to start
WITHHELD_S = 15.0  # so long we do not ask again for what Slurm did not give
UNHEARD_S = 60.0  # so long nothing is started on a node whose step did not call
UNKNOWN_PORT = 987_654_321  # stands for MASTER_PORT until a step has found a free one
UNKNOWN_ADDRESS = "thebes-master-address"


class Launching:
    """Carries one launch through; what has gone wrong before the ranks start is undone."""

    def __init__(self, calls: Calls, facts: SlurmFacts, looking: Looking) -> None:
        self.calls, self.facts, self.looking = calls, facts, looking
        self.site, self.shared, self.gangs = calls.site, calls.shared, calls.gangs
        self.releases, self.tasks, self.slurm = calls.releases, calls.tasks, facts.slurm
        self.script = Path()  # what runs on the nodes

    async def launch(self, launch: Launch, remove_others: Callable[[str], Awaitable[None]]) -> None:
        """The caller holds the job's lock. `remove_others` ends what lives of the same job, after the fence is up."""
        if await self._has_ended(SlurmGang(launch.job_id, launch.incarnation, launch.parts)):
            return
        await asyncio.to_thread(self.shared.raise_fence, launch.job_id, launch.incarnation)
        await remove_others(launch.job_id)
        gang = SlurmGang(launch.job_id, launch.incarnation, launch.parts, grace_s=launch.grace_s)
        gang.lease_s, gang.token = self.site.lease_s, secrets.token_hex(4)
        self.gangs.add(gang)
        try:
            await self._allocate(gang, launch)
            await self._start_steps(gang)
            await self._start_ranks(gang)
        except BaseException:
            if gang.phase == "launching":
                await asyncio.shield(self._abandon(gang))
            raise

    async def _has_ended(self, gang: SlurmGang) -> bool:
        """Whether a launch of an earlier controller, of which we have no record, has come to something and ended."""
        reports = [await asyncio.to_thread(self.shared.report, gang, node) for node in gang.nodes]
        if all(report.state != "exited" for report in reports):
            return False
        if all(report.started_s is None and not report.codes for report in reports):
            # Its steps were never told to start, and gave up: they leave nothing behind but these files.
            await asyncio.to_thread(self.shared.remove_attempts, gang)
            return False
        for report in reports:
            lost = replace(report, state="exited", cause="lost", detail="it ended while there was no controller")
            self.gangs.tell(report if report.state == "exited" else lost)
        return True

    # The allocation --------------------------------------------------------------------------------------------------

    async def _allocate(self, gang: SlurmGang, launch: Launch) -> None:
        for part in gang.parts:
            facts, record = self.facts.by_node.get(part.node), self.facts.records.get(part.node)
            if facts is None:
                raise Refused(f"there is no node '{part.node}'")
            if record is None:
                raise SlurmError(f"node {part.node}: {facts.detail}", "silent")
            missing = [number for number in part.gpus if number >= len(facts.gpus)]
            if missing:
                raise Refused(f"node {part.node} has no GPU {missing[0]}: it has {len(facts.gpus)}")
        steps = [self._part(gang, launch, index) for index in range(len(gang.parts))]  # may refuse
        overlapping = self.releases.touching(gang.nodes)
        await asyncio.to_thread(self._write_attempts, gang, launch, steps)
        if overlapping:  # what we have given back ourselves
            await asyncio.wait(overlapping, timeout=GIVEN_BACK_S)
        try:
            gang.slurm_job = await self.slurm.allocate(asking.request_for(gang, self.site, self.facts.rules))
        except SlurmError as error:
            if error.trouble in ("silent", "missing"):
                raise
            await self._not_given(gang, error)
        if self.facts.mode == "counts":
            for record in await self.slurm.jobs(gang.slurm_job):
                gang.ids.update(record.gpus)

    async def _not_given(self, gang: SlurmGang, error: SlurmError) -> None:
        """Their holder is told of before the launch is refused; or it would be decided the same way again."""
        self.gangs.drop(gang)
        self.facts.forget_holders()
        await self.looking.look_now()
        wanted = [(part.node, number) for part in gang.parts for number in part.gpus]
        known = self.facts.by_node
        named = [
            f"{node} GPU {gpu.index} has {gpu.taken}"
            for node in gang.nodes
            for gpu in known[node].gpus
            if gpu.taken and (node, gpu.index) in wanted
        ]
        down = [f"node {node}: {known[node].detail}" for node in gang.nodes if not known[node].alive]
        if not named and not down:
            self.facts.withhold(wanted, WITHHELD_S, f"Slurm does not give it ({error})")
            self.facts.refresh()
        raise GpusTaken("; ".join([*down, *named][:3]) or str(error)) from None

    def _part(self, gang: SlurmGang, launch: Launch, index: int) -> PartLaunch:
        part = gang.parts[index]
        gpus = [replace(gpu, uuid="" if gpu.virtual else str(gpu.index)) for gpu in self.facts.by_node[part.node].gpus]
        return part_launch(
            launch,
            index,
            gpus=gpus,
            base_env={},
            attempt_dir=str(self.shared.attempt(part.node, gang).path),
            poke="",
            master_addr=UNKNOWN_ADDRESS,
            master_port=UNKNOWN_PORT,
        )

    def _write_attempts(self, gang: SlurmGang, launch: Launch, parts: Iterable[PartLaunch]) -> None:
        """In a thread."""
        if launch.checkpoint_dir:
            Path(launch.checkpoint_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in parts:
            attempt = self.shared.attempt(part.node, gang)
            self.shared.write_attempt(attempt, part.as_dict(), self._step_settings(launch.grace_s))

    def _step_settings(self, grace_s: float) -> dict[str, Any]:
        """step.json of an attempt."""
        kill_wait_s = seconds_of(self.facts.config.get("KillWait", "30 sec")) or 30.0
        return {
            "key": self.site.key.hex(),
            "homes": self.calls.homes,
            "homes_file": str(self.shared.homes),
            "lease_s": self.site.lease_s,
            "start_within_s": START_WITHIN_S,
            "term_grace_s": min(grace_s, max(1.0, 0.8 * kill_wait_s)),
            "unknown_port": UNKNOWN_PORT,
            "unknown_address": UNKNOWN_ADDRESS,
            "visible": "ours" if self.facts.mode == "whole" else "slurm",
        }

    # The steps -------------------------------------------------------------------------------------------------------

    async def _start_steps(self, gang: SlurmGang) -> None:
        """One srun for all nodes; returns when every step has called."""
        log = self.shared.logs / f"{gang.name}.log"
        command = [self.site.python, "-I", "-S", str(self.script), str(self.shared.nodes), gang.name, gang.token]
        groups, whole = asking.groups_of(gang, self.facts.rules), self.facts.mode == "whole"
        args = srun_args(gang.slurm_job, groups, command, output=str(log), whole=whole)
        self.calls.expect(gang, gang.nodes)
        gang.srun = await asyncio.to_thread(start_apart, gang.slurm_job, args, self.slurm.env, log)
        self.tasks.spawn(self._await_srun(gang, gang.srun))
        called = asyncio.gather(*(link.ready.wait() for link in gang.links.values()))
        ended = asyncio.ensure_future(gang.srun_ended.wait())
        try:
            deadline = asyncio.get_running_loop().time() + CALLED_WITHIN_S
            failed = False
            while not called.done() and not ended.done() and not failed:
                left_s = deadline - asyncio.get_running_loop().time()
                if left_s <= 0:
                    break
                await asyncio.wait([called, ended], timeout=min(1.0, left_s), return_when=asyncio.FIRST_COMPLETED)
                failed = await asyncio.to_thread(has_failed, log)
            if called.done():
                return
            raise await self._unheard(gang, log, failed=failed or ended.done())
        finally:
            called.cancel()
            ended.cancel()
            await asyncio.gather(called, ended, return_exceptions=True)

    async def _await_srun(self, gang: SlurmGang, process: subprocess.Popen[bytes]) -> None:
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        pidfd = os.pidfd_open(process.pid)
        loop.add_reader(pidfd, gone.set)
        try:
            await gone.wait()
            process.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        gang.srun_ended.set()

    async def _unheard(self, gang: SlurmGang, log: Path, *, failed: bool) -> Refused:
        """Steps have not called: which, why, and what to do about it."""
        silent = [node for node, link in gang.links.items() if not link.ready.is_set()]
        own_words = [self.shared.attempt(node, gang).path / "supervisor.log" for node in silent]
        said = await asyncio.to_thread(first_words, own_words)
        said_srun = await asyncio.to_thread(last_line, log)
        where = f"node{'s' if len(silent) > 1 else ''} {', '.join(silent[:5])}{', …' if len(silent) > 5 else ''}"
        if silent and not gang.srun_ended.is_set():
            # Steps there cannot run or call us. Without a pause all jobs would try it in turn.
            why = f"a step on its node did not call us at {self.calls.homes[0]}"
            self.facts.withhold(self.facts.free_of_ours(silent, gang), UNHEARD_S, why)
            self.calls.look.set()
        if failed and not said:
            return Refused(
                f"the step did not come up on {where} ({said_srun or 'without a word'}): nodes must see "
                f"{self.site.shared_dir} and {self.site.python}; `thebes up --shared` names another folder"
            )
        return Refused(
            f"no call from {where} within {CALLED_WITHIN_S:g} s ({said or said_srun or 'without a word'}): nodes must "
            f"reach {self.calls.homes[0]}; if not, name an address of this machine that they do with `thebes up --home`"
        )

    # The ranks -------------------------------------------------------------------------------------------------------

    async def _start_ranks(self, gang: SlurmGang) -> None:
        first = gang.links[gang.nodes[0]]
        port = int(await first.call("port", {}))
        address = self.facts.by_node[gang.nodes[0]].address or "127.0.0.1"
        gang.master = (address, port)
        gang.phase = "started"
        try:
            await self.shared.save_durably(gang)
        except BaseException:
            gang.phase = "launching"
            raise
        order = StartStep(master_addr=address, master_port=port)
        links = [gang.links[node] for node in gang.nodes]
        answers = await asyncio.gather(*(link.call("start", order, START_S) for link in links), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        for link, answer in zip(links, answers, strict=True):
            if not isinstance(answer, BaseException):
                self.calls.note(gang, link.report_from(answer))
        failed = [report for report in gang.reports.values() if report.cause == "launch-failed"]
        if len(links) > 1 and (errors or failed):
            why = str(errors[0]) if errors else f"{failed[0].node}: {failed[0].detail}"
            because = {"because": f"{GANG_NOT_STARTED}: {why}"}
            alive = [gang.links[node] for node in gang.alive]
            await asyncio.gather(*(link.call("kill", because) for link in alive), return_exceptions=True)
        if errors:
            gang.kill_asked = True
            self.releases.release(gang, at_once=True)

    async def _abandon(self, gang: SlurmGang) -> None:
        """Nothing of it has started, and nothing stays."""
        links = [link for link in gang.links.values() if link.ready.is_set()]
        await asyncio.gather(*(link.call("kill", {}, 2.0) for link in links), return_exceptions=True)
        gang.phase = "over"
        if gang.slurm_job:
            task = self.releases.release(gang, at_once=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(10.0):
                    await asyncio.shield(task)
        for link in gang.links.values():
            await link.end()
        self.gangs.drop(gang)
        await asyncio.to_thread(self.shared.remove_attempts, gang)
