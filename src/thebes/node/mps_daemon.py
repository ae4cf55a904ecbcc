"""The MPS control process of a node: started for the first job that may share its GPU, stopped when no job needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from thebes.node import mps
from thebes.node.attempts import Attempts
from thebes.node.reporting import Reporter
from thebes.protocol.contract import Gpu, Launch
from thebes.protocol.instance import EventLog

ANSWERS_WITHIN_S = 2.0  # when we go; the keeper does not wait for us for long


class MpsDaemon:
    """The control process of one node. On virtual GPUs there is none."""

    def __init__(self, node: str, directory: Path, log: EventLog, *, virtual: bool) -> None:
        self.node, self.log, self.virtual = node, log, virtual
        self.mps = mps.Mps(directory)
        self.starting = asyncio.Lock()

    async def env_for(self, launch: Launch, gpus: Sequence[Gpu]) -> dict[str, str]:
        """A job that may share its GPU runs under the node's MPS; without MPS the driver slices its time."""
        if self.virtual or not launch.packs:
            return {}
        uuids = [gpu.uuid for gpu in gpus if gpu.healthy]  # an unknown name would hide those after it
        try:
            async with self.starting:
                daemon = await asyncio.to_thread(mps.start, self.mps.directory, gpu_uuids=uuids)
        except mps.MpsUnavailable as error:
            self.log.write("no MPS", node=self.node, job=launch.job_id, error=error.message)
            return {}
        return mps.client_env(daemon)

    async def stop(self, attempts: Attempts, reporter: Reporter) -> None:
        """Stop it when we are told to go and no job needs it; otherwise the next agent finds it."""
        if self.virtual:
            return
        async with self.starting:
            for attempt in attempts.alive():
                reporter.refresh(attempt)
            if attempts.alive() or attempts.starting():
                return
            try:
                await asyncio.to_thread(mps.stop, self.mps, clients_end_within_s=1, answer_s=ANSWERS_WITHIN_S)
            except (mps.MpsUnavailable, OSError) as error:
                self.log.write("MPS not stopped", node=self.node, error=str(error))
