"""How long an engine waits before it takes somebody of whom nothing is heard for dead; on a clock that we set."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thebes.engine.link import NodeLink
from thebes.engine.silence import LOOK_EVERY_S, Granted, Silence
from thebes.protocol.lease import over_s


class Clock(asyncio.SelectorEventLoop):
    """An event loop that is as late as we say."""

    late_s = 0.0

    def time(self) -> float:
        return super().time() + self.late_s


def on_a_clock(story: Callable[[Clock], Any]) -> None:
    loop = Clock()
    try:
        loop.run_until_complete(story(loop))
    finally:
        loop.close()


def link(*, greeted: bool) -> NodeLink:
    found = NodeLink("n0", lambda _: None)
    found.greeted = greeted
    return found


def pass_by(clock: Clock, silence: Silence, seconds: float) -> None:
    """Time goes by, and we are awake."""
    while seconds > 0:
        clock.late_s += min(seconds, LOOK_EVERY_S)
        seconds -= LOOK_EVERY_S
        silence.look()


def test_one_who_has_not_heard_us_yet_may_have_a_longer_lease() -> None:
    async def story(clock: Clock) -> None:
        silence = Silence(4.0)
        silence.begin(0.0)
        since_s = clock.time()
        pass_by(clock, silence, over_s(4.0) + 1)
        assert silence.over(link(greeted=True), since_s, 60.0)
        assert silence.over(link(greeted=False), since_s, 4.0)
        assert not silence.over(link(greeted=False), since_s, 60.0)
        pass_by(clock, silence, over_s(60.0))
        assert silence.over(link(greeted=False), since_s, 60.0)

    on_a_clock(story)


def test_one_who_was_left_alone_and_has_not_heard_us_yet_goes_on_for_long() -> None:
    async def story(clock: Clock) -> None:
        silence = Silence(4.0)
        silence.begin(100.0)
        since_s = clock.time()
        back, away = link(greeted=True), link(greeted=False)
        pass_by(clock, silence, over_s(4.0) + 1)
        assert silence.over(back, since_s, 4.0)
        assert not silence.over(away, since_s, 4.0)
        waiting = asyncio.ensure_future(silence.unparked([back, away]))
        await asyncio.sleep(0)
        assert not waiting.done()
        pass_by(clock, silence, 100.0)
        assert silence.over(away, since_s, 4.0)
        await waiting

    on_a_clock(story)


def test_what_was_not_heard_while_we_were_frozen_says_nothing() -> None:
    async def story(clock: Clock) -> None:
        silence = Silence(4.0)
        silence.begin(0.0)
        since_s = clock.time()
        clock.late_s += 1000.0
        assert not silence.over(link(greeted=True), since_s, 4.0)
        pass_by(clock, silence, over_s(4.0))
        assert silence.over(link(greeted=True), since_s, 4.0)

    on_a_clock(story)


def test_the_lease_of_each_node_is_remembered_until_it_has_heard_of_a_shorter_one(tmp_path: Path) -> None:
    async def story() -> None:
        path = tmp_path / "leases.json"
        first = Granted(path, 60.0)
        first.begin(["n0", "n1"])
        second = Granted(path, 6.0)
        second.begin(["n0", "n1"])
        assert (second.of("n0"), second.of("n1")) == (60.0, 60.0)
        second.met("n0")
        await second.save()
        third = Granted(path, 20.0)
        third.begin(["n0", "n1", "n2"])
        assert [third.of(name) for name in ("n0", "n1", "n2")] == [20.0, 60.0, 20.0]
        assert json.loads(path.read_bytes()) == {"n0": 20.0, "n1": 60.0, "n2": 20.0}  # before anybody is told
        path.write_text("spoilt")
        fourth = Granted(path, 6.0)
        fourth.begin(["n0"])
        assert fourth.of("n0") == 6.0

    asyncio.run(story())
