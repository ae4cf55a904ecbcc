"""The controller hears from the engine: reports about jobs, and nodes that change."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from thebes.live import answers, outages, recovery
from thebes.protocol.contract import NodeChange, NodeFacts, Refused, Report

if TYPE_CHECKING:
    from thebes.live.controller import Controller
    from thebes.live.core import Core


class EngineListener:
    """It turns what the engine says into messages for the loop."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.last_facts: dict[str, NodeFacts] = {}

    def hear(self, what: Report | NodeChange) -> None:
        controller = self.controller
        if isinstance(what, Report):
            report = self.in_cluster_time(what)
            controller.tell(lambda now_s: answers.report(controller.core, report, now_s))
            return
        facts, before = what.facts, self.last_facts.get(what.facts.name)
        self.last_facts[facts.name] = facts
        last = controller.inbox[-1] if controller.inbox else None
        if isinstance(last, _NodeNews):
            last.changed.append(facts)
        else:
            controller.tell(_NodeNews(controller.core, facts))
        if facts.alive and (before is None or (before.alive, before.pid) != (True, facts.pid)):
            controller.background(self._node_back(facts.name))  # it may have been away just before we looked

    async def _node_back(self, node: str) -> None:
        """An agent is back: what it does not know any more has ended while it was away."""
        core, dispatch = self.controller.core, self.controller.dispatch
        heard_of, on_the_way = recovery.heard_of(core, node), set(dispatch.on_the_way)
        with suppress(OSError, TimeoutError, Refused):
            told = await self.controller.engine.reports()
            reports = [self.in_cluster_time(report) for report in told if report.node == node]

            def message(now_s: float) -> None:
                for report in reports:
                    answers.report(core, report, now_s)
                recovery.node_back(core, node, reports, heard_of, on_the_way | dispatch.on_the_way, now_s)

            self.controller.tell(message)

    def in_cluster_time(self, report: Report) -> Report:
        """The report with its times in cluster time, because nodes count from their boot."""
        times = ("started_s", "exited_s", "checkpoint_s", "step_s", "first_step_s")
        found = {name: getattr(report, name) for name in times}
        return replace(report, **{k: self.controller.clock.from_boot(v) for k, v in found.items() if v is not None})


class _NodeNews:
    """A message that these nodes have changed, one after the other."""

    def __init__(self, core: Core, facts: NodeFacts) -> None:
        self._core, self.changed = core, [facts]

    def __call__(self, now_s: float) -> None:
        outages.nodes_changed(self._core, self.changed, now_s)
