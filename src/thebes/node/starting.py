"""Starting attempts: at most one incarnation of a job, its folder, its supervisor, its port."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from thebes.node.attempts import Attempts, NodeAttempt
from thebes.node.ending import AttemptEnding
from thebes.node.mps_daemon import MpsDaemon
from thebes.node.node_lease import NodeLease
from thebes.node.ports import hold_port
from thebes.node.reporting import Reporter
from thebes.node.supervision import Supervision
from thebes.protocol import wire
from thebes.protocol.attempt import AttemptDir, make_report
from thebes.protocol.clock import boot_s
from thebes.protocol.contract import Launch, Refused
from thebes.protocol.fences import sync
from thebes.protocol.instance import EventLog
from thebes.protocol.launch import part_launch
from thebes.protocol.messages import Start
from thebes.protocol.progress import StepRate
from thebes.protocol.tasks import Tasks

STARTED_WITHIN_S = 10.0


class Starting:
    """It starts what the controller asks for, unless something newer of the same job was seen."""

    def __init__(
        self,
        supervision: Supervision,
        ending: AttemptEnding,
        mps_daemon: MpsDaemon,
        lease: NodeLease | None,
        poke_path: Path,
    ) -> None:
        self.supervision, self.ending, self.mps_daemon = supervision, ending, mps_daemon
        self.lease, self.poke_path = lease, poke_path
        self.attempts: Attempts = supervision.attempts
        self.reporter: Reporter = supervision.reporter
        self.tasks: Tasks = supervision.tasks
        self.log: EventLog = supervision.log
        self.node = self.attempts.node

    def free_port(self) -> int:
        """A port for MASTER_PORT that nobody listens on and no other job of this node was given."""
        port, probe = hold_port(self.attempts.ports.values())
        probe.close()
        return port

    async def start(self, request: Start) -> dict[str, Any]:
        launch = wire.launch_from_dict(request["launch"])
        folder = self.attempts.named(f"{launch.job_id}.{launch.incarnation}")
        if folder is None:
            raise Refused(f"'{launch.job_id}' is not a job id")
        async with self.attempts.lock_of(launch.job_id):
            known = self.attempts.find(folder)
            if known is not None:
                return wire.report_to_dict(self.reporter.report(known))
            if self.lease is not None and self.lease.is_cut_off:
                # We were frozen, and these are words of long ago: it may be somewhere else by now.
                raise Refused(f"node {self.node} has been cut off: nothing starts there until a controller is back")
            newest = self.attempts.fences.newest(launch.job_id)
            if launch.incarnation < newest:
                raise Refused(
                    f"incarnation {launch.incarnation} of job {launch.job_id} is older than {newest}, "
                    f"the newest that node {self.node} has seen"
                )
            if (folder.path / "state.json").exists():  # done and forgotten
                return wire.report_to_dict(make_report(folder, self.node, folder.state(), StepRate()))
            fence = self.attempts.fences.raise_to(launch.job_id, launch.incarnation, durable=False)
            for other in [one for one in self.attempts.alive() if one.dir.job_id == launch.job_id]:
                await self.ending.remove(other)
            # A power cut ends every process, so what matters is that the fence is on disk before we say that it runs.
            durable = asyncio.to_thread(sync, fence)
            attempt, _ = await asyncio.gather(self._start_new(launch, folder, request), durable)
            return wire.report_to_dict(self.reporter.report(attempt))

    async def _start_new(self, launch: Launch, folder: AttemptDir, request: Start) -> NodeAttempt:
        begun_s = boot_s()
        port = request.get("master_port") or self.free_port()
        part = part_launch(
            launch,
            request["part"],
            gpus=self.reporter.facts.gpus,
            base_env=os.environ,
            attempt_dir=str(folder.path),
            poke=str(self.poke_path),
            master_addr=request.get("master_addr") or "127.0.0.1",
            master_port=port,
            more_env=await self.mps_daemon.env_for(launch, self.reporter.facts.gpus),
        )
        if self.lease is not None:
            part = replace(part, lease_file=str(self.lease.file.path))
        await asyncio.to_thread(self.attempts.write, folder, part, launch.checkpoint_dir)
        attempt = self.attempts.add(folder)  # from now on pokes are heard
        self.attempts.ports[attempt.key] = port
        self.attempts.some_alive.set()
        await self.supervision.start(attempt)
        await self.reporter.until(attempt, lambda: bool(attempt.state), STARTED_WITHIN_S)
        self.tasks.spawn(self.reporter.look_for_first_step(attempt))
        self.log.write(
            "started",
            node=self.node,
            attempt=folder.name,
            gpus=launch.parts[request["part"]].gpus,
            state=attempt.state.get("state", "starting"),
            took_s=round(boot_s() - begun_s, 4),
        )
        return attempt
