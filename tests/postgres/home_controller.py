"""The real controller with its standby, on an engine whose agents call home as Ray's do, without Ray around it.

`python home_controller.py DIR` stands for what the keeper of an instance starts.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from thebes.engine.agents import AgentEngine
from thebes.engine.door import HomeDoor
from thebes.engine.link import NodeLink
from thebes.instance import shift, standby
from thebes.live.config import Config
from thebes.live.engines import Identity
from thebes.protocol.contract import Listener
from thebes.protocol.sealed import SealedReader, SealedWriter

FIRST_CALL_S = 5.0


class HomeEngine(AgentEngine):
    """Agents on other machines, which somebody else has started."""

    def __init__(self, config: Config, identity: Identity, homes: Sequence[str]) -> None:
        super().__init__()
        self.config = config
        self.homes = [f"{config.home_host}:{config.home_port}", *homes]
        self.home = HomeDoor(identity.key, identity.epoch, self._called)

    async def open(self, listener: Listener, *, parked_s: float = 0.0) -> None:
        self._listener = listener
        for node in self.config.node_names:
            link = self._links[node] = NodeLink(node, self._heard, down_after_s=FIRST_CALL_S)
            link.greeting = {"homes": self.homes, "lease_s": self.config.lease_s}
            link.expect()
        await self.home.open(self.config.home_host, self.config.home_port)
        await asyncio.gather(*(link.looked.wait() for link in self._links.values()))

    async def close(self) -> None:
        await self.home.close()
        await super().close()

    async def _called(self, who: str, reader: SealedReader, writer: SealedWriter) -> None:
        await self._links[who.removeprefix("node:")].attach(reader, writer)


def make_engine(config: Config, _instance: Any, identity: Identity, *, homes: Sequence[str] = ()) -> HomeEngine:
    return HomeEngine(config, identity, homes)


if __name__ == "__main__":
    shift.make_engine = make_engine  # type: ignore[assignment]
    sys.exit(standby.main(sys.argv[1:]))
