"""The engine of one machine: its agents listen on Unix sockets in the instance's folder."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable
from pathlib import Path

from thebes.engine.agents import AgentEngine
from thebes.engine.link import NodeLink
from thebes.protocol import wire
from thebes.protocol.contract import Listener


class LocalEngine(AgentEngine):
    """`Engine` over the agents of one instance folder."""

    def __init__(self, instance_dir: Path | str, node_names: Iterable[str]) -> None:
        super().__init__()
        self._run = Path(instance_dir) / "run"
        self._names = list(node_names)

    async def open(self, listener: Listener, *, parked_s: float = 0.0) -> None:
        """Returns when every agent was reached or is known to be down. A machine is never cut off from itself."""
        self._listener = listener
        for name in self._names:
            link = NodeLink(name, self._heard)
            dial = functools.partial(wire.connect, self._run / f"agent-{name}.sock")
            link.task = asyncio.get_running_loop().create_task(link.keep_up(dial))
            self._links[name] = link
        await asyncio.gather(*(link.looked.wait() for link in self._links.values()))
