"""What an agent tells: the facts of its node, and a report of each attempt whenever there is anything new to it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from thebes.node.attempts import Attempts, NodeAttempt
from thebes.node.log_steps import LogSteps, TooSlow
from thebes.protocol import wire
from thebes.protocol.attempt import make_report
from thebes.protocol.clock import boot_s
from thebes.protocol.contract import NodeFacts, Report
from thebes.protocol.instance import EventLog
from thebes.protocol.progress import LOOK_AT_NEW_S, LOOK_EVERY_S, LOOK_LESS_BY, progress_record

BACKLOG_BYTES = 32 << 20  # a listener that does not read is let go


class Reporter:
    """It reads what supervisors and jobs have written, and tells all listeners."""

    def __init__(self, attempts: Attempts, facts: NodeFacts, log: EventLog) -> None:
        self.attempts, self.facts, self.log = attempts, facts, log
        self.listeners: set[asyncio.StreamWriter] = set()

    # Telling ---------------------------------------------------------------------------------------------------------

    def report(self, attempt: NodeAttempt) -> Report:
        """What its files say now."""
        return make_report(attempt.dir, self.facts.name, attempt.state, attempt.rate, **attempt.took)

    def all_reports(self) -> list[dict[str, Any]]:
        return [wire.report_to_dict(self.report(attempt)) for attempt in self.attempts.by_key.values()]

    def tell(self, attempt: NodeAttempt) -> None:
        attempt.report = self.report(attempt)
        self._push({"push": "report", "report": wire.report_to_dict(attempt.report)})

    def tell_facts(self, facts: NodeFacts) -> None:
        self.facts = facts
        self._push({"push": "facts", "facts": wire.facts_to_dict(facts)})

    def _push(self, message: dict[str, Any]) -> None:
        line = wire.encode(message)
        for listener in list(self.listeners):
            if listener.transport.get_write_buffer_size() > BACKLOG_BYTES:
                listener.transport.abort()
            else:
                listener.write(line)

    # States ----------------------------------------------------------------------------------------------------------

    def refresh(self, attempt: NodeAttempt) -> None:
        """Read the state again; tell everybody if it is another one."""
        before = attempt.state.get("state"), attempt.state.get("since_s")
        state = attempt.dir.state()
        if not state or (state.get("state"), state.get("since_s")) == before:
            return
        attempt.state = state
        attempt.rate.clear()
        if state["state"] == "exited":
            self._read_steps(attempt)
            self.attempts.ports.pop(attempt.key, None)
            attempt.steps = None
            self.log.write(
                "exited", node=self.facts.name, attempt=attempt.dir.name, cause=state["cause"], codes=state["codes"]
            )
        self.tell(attempt)
        attempt.changed.set()
        attempt.changed = asyncio.Event()

    async def until(self, attempt: NodeAttempt, true: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a state; a poke that got lost is made up for by looking."""
        deadline = time.monotonic() + timeout_s
        while not true():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, 0.25)):
                    await attempt.changed.wait()
                continue
            self.refresh(attempt)
        return True

    # Progress --------------------------------------------------------------------------------------------------------

    async def watch_progress(self) -> None:
        """Once a second, and only while something runs: has a job written anything for us?"""
        while True:
            await self.attempts.some_alive.wait()
            await asyncio.sleep(LOOK_EVERY_S)
            alive = self.attempts.alive()
            if not alive:
                self.attempts.some_alive.clear()
            for attempt in alive:
                self._read_steps(attempt)
                with suppress(OSError):
                    self._look(attempt)

    async def look_for_first_step(self, attempt: NodeAttempt) -> None:
        """When it came counts for the policy, since loading is no service: so look more often at first."""
        pause_s = LOOK_AT_NEW_S
        while pause_s < LOOK_EVERY_S and attempt.alive and (attempt.report is None or not attempt.report.first_step_s):
            await asyncio.sleep(pause_s)
            pause_s *= LOOK_LESS_BY
            with suppress(OSError):
                self._look(attempt)

    def _look(self, attempt: NodeAttempt) -> None:
        if not attempt.folder_watch.changed(attempt.dir.path.stat().st_mtime_ns, time.time_ns()):
            return
        before, now = attempt.report, self.report(attempt)
        attempt.report = now
        if before is None or replace(before, run_s=0.0) != replace(now, run_s=0.0):
            self._push({"push": "report", "report": wire.report_to_dict(now)})

    def follow_log(self, attempt: NodeAttempt, *, adopted: bool = False) -> None:
        launch = attempt.dir.launch()
        if adopted:
            with suppress(KeyError, ValueError):
                self.attempts.ports[attempt.key] = int(launch["env"]["MASTER_PORT"])
        if launch.get("progress_pattern") and launch.get("ranks"):
            path = attempt.dir.log(launch["ranks"][0]["rank"])
            attempt.steps = LogSteps(path, launch["progress_pattern"], from_end=adopted)
            attempt.first_step = attempt.dir.first_step()

    def _read_steps(self, attempt: NodeAttempt) -> None:
        """Steps from log lines go where those of the library go."""
        if attempt.steps is None:
            return
        try:
            step = attempt.steps.newest()
        except TooSlow:
            attempt.steps = None
            self.log.write("progress pattern given up", node=self.facts.name, attempt=attempt.dir.name, why="too slow")
            return
        if step is None:
            return
        now = boot_s()
        attempt.first_step = attempt.first_step or (step, now)
        draft = attempt.dir.path / ".progress.agent"
        with suppress(OSError):
            draft.write_text(json.dumps(progress_record(step, now, attempt.first_step)))
            draft.replace(attempt.dir.path / "progress")
