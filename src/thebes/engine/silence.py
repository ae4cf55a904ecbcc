"""How long a node of which nothing is heard may still be alive: what an engine counts before it says `lost`.

A node goes by the lease that it was last told, and by what it was told when a controller left on purpose: until it has
talked with us, that may be more than we would tell it now. And what was not heard while we were frozen ourselves may
well have been said.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path

from thebes.engine.link import NodeLink
from thebes.protocol.instance import write_json
from thebes.protocol.lease import over_s

PAUSE_S = 3.0  # an event loop that was away for longer than this was frozen
LOOK_EVERY_S = 0.5


class Silence:
    """One of an engine; times are those of the event loop."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._awake_s = 0.0  # since when without a pause
        self._looked_s: float | None = None
        self._parked_until_s = 0.0

    def begin(self, parked_s: float) -> None:
        """Nodes may have been told to go on alone for so long from now."""
        now_s = asyncio.get_running_loop().time()
        self._awake_s = self._looked_s = now_s
        self._parked_until_s = now_s + parked_s

    async def stay_awake(self) -> None:
        """For ever: so that a pause is noticed."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    def look(self) -> float:
        """Have we been away? The time now."""
        now_s = asyncio.get_running_loop().time()
        if self._looked_s is not None and now_s - self._looked_s > PAUSE_S:
            self._awake_s = now_s
        self._looked_s = now_s
        return now_s

    def over(self, link: NodeLink, since_s: float, granted_s: float) -> bool:
        """Whether nothing is alive any more at a peer that was silent since then and had this lease before we came."""
        now_s = self.look()
        since_s = max(since_s, self._awake_s, 0.0 if link.greeted else self._parked_until_s)
        return now_s - since_s >= over_s(self.lease_s if link.greeted else max(self.lease_s, granted_s))

    async def unparked(self, links: Iterable[NodeLink]) -> None:
        """Returns when no peer can be left that still goes by what was said when the last controller left."""
        waiting = list(links)
        while waiting and self.look() < self._parked_until_s:
            await asyncio.sleep(LOOK_EVERY_S)
            waiting = [link for link in waiting if not link.greeted]


class Granted:
    """The lease that each node may have been told, in a file: it must survive us. What is longer is written before it
    is told, what is shorter after it was.
    """

    def __init__(self, path: Path, lease_s: float) -> None:
        self.path, self.lease_s = path, lease_s
        self._granted_s: dict[str, float] = {}
        self._changed = False

    def begin(self, names: Iterable[str]) -> None:
        """Blocking. OSError or UserError: then nobody may be told anything."""
        try:
            before = {str(name): float(lease_s) for name, lease_s in json.loads(self.path.read_bytes()).items()}
        except (FileNotFoundError, ValueError, AttributeError, TypeError):
            before = {}
        self._granted_s = before | {name: max(self.lease_s, before.get(name, 0.0)) for name in names}
        if self._granted_s != before:
            write_json(self.path, self._granted_s)

    def of(self, name: str) -> float:
        return self._granted_s.get(name, self.lease_s)

    def met(self, name: str) -> None:
        """It goes by our lease now."""
        if self._granted_s.get(name) != self.lease_s:
            self._granted_s[name], self._changed = self.lease_s, True

    async def save(self) -> None:
        """If there is anything new."""
        if self._changed:
            self._changed = False
            await asyncio.to_thread(write_json, self.path, dict(self._granted_s))
