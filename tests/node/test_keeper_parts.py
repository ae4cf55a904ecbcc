"""The keeper with real processes for parts: it starts them, starts them again, adopts them and stops them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kit.waiting import PATIENCE_S, until
from thebes.node.keeper import FIRST_DELAY_S, LONGEST_DELAY_AFTER_KILL_S, call_keeper, stop_instance
from thebes.protocol.instance import Instance

T = TypeVar("T")


# A keeper whose parts are small scripts: PART.py in the folder, which hold the lock of their name as real ones do.
KEEPER = """
import json, sys
from pathlib import Path
from thebes.node import keeper
from thebes.protocol.instance import Instance, EventLog
from thebes.node.keeper import Keeper, KeptProcess
instance = Instance.at(sys.argv[1])
vars(keeper).update(json.loads(sys.argv[2]))
parts = [KeptProcess(n, (sys.executable, str(instance.dir / f"{n}.py"), str(instance.dir), n)) for n in sys.argv[3:]]
with instance.hold_lock("keeper") as lock:
    Keeper(instance, lock, parts, EventLog(instance.log / "keeper.jsonl")).run()
"""

PART = """
import signal, sys, time
from thebes.protocol.instance import Instance
lock = Instance.at(sys.argv[1]).hold_lock(sys.argv[2])
signal.pause()
"""

STUBBORN = PART.replace("lock =", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nlock =")
# The first one takes the lock when there is a second one, who tries it after that.
RACING = PART.replace(
    "lock =",
    """
from pathlib import Path
first, second = (Path(sys.argv[1]) / name for name in ("first", "second"))
try:
    first.touch(exist_ok=False)
    while not second.exists(): time.sleep(0.01)
except FileExistsError:
    second.touch()
    while Instance.at(sys.argv[1]).holder_pid(sys.argv[2]) is None: time.sleep(0.01)
lock =""",
)
FAILING = "import sys\nprint('error: the moon is full\\n  → wait', file=sys.stderr)\nsys.exit(2)\n"


class Kept:
    """An instance folder with a keeper and its parts."""

    def __init__(self, folder: Path) -> None:
        self.instance = Instance.at(folder)
        self.instance.create()
        self.names: list[str] = []
        self.keepers: list[subprocess.Popen[bytes]] = []

    def part(self, name: str, source: str = PART) -> None:
        (self.instance.dir / f"{name}.py").write_text(source)
        self.names.append(name)

    def start(self, **other: float) -> subprocess.Popen[bytes]:
        """A keeper, with constants of its own where they are given."""
        command = [sys.executable, "-c", KEEPER, str(self.instance.dir), json.dumps(other), *self.names]
        self.keepers.append(subprocess.Popen(command, start_new_session=True))
        until(lambda: self.instance.holder_pid("keeper") == self.keepers[-1].pid)
        return self.keepers[-1]

    def pid(self, name: str) -> int:
        return until(lambda: self.instance.holder_pid(name) or 0)

    def log(self, event: str) -> list[dict[str, Any]]:
        path = self.instance.log / "keeper.jsonl"
        *lines, _ = path.read_text().split("\n") if path.exists() else [""]  # the last one may be half written
        return [entry for entry in map(json.loads, lines) if entry["event"] == event]

    def clean_up(self) -> None:
        for keeper in self.keepers:
            keeper.kill()
            keeper.wait()
        for name in self.names:
            pid = self.instance.holder_pid(name)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(tmp_path / "instance")
    yield made
    made.clean_up()


def test_parts_are_started_in_sessions_of_their_own(kept: Kept) -> None:
    kept.part("controller")
    kept.part("agent-n0")
    keeper = kept.start()
    for name in kept.names:
        assert os.getsid(kept.pid(name)) == kept.pid(name)
        assert Path(f"/proc/{kept.pid(name)}/fd/0").readlink() == Path("/dev/null")
    assert os.getsid(keeper.pid) == keeper.pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_part_that_dies_is_started_again(kept: Kept, number: signal.Signals) -> None:
    kept.part("controller")
    kept.start()
    first = kept.pid("controller")
    os.kill(first, number)
    until(lambda: kept.instance.holder_pid("controller") not in (None, first))
    (death,) = kept.log("died")
    assert (death["part"], death["pid"], death["code"]) == ("controller", first, -number)
    assert death["again_in_s"] <= FIRST_DELAY_S


def test_a_part_that_keeps_failing_is_tried_more_and_more_slowly_and_quoted(kept: Kept) -> None:
    kept.part("controller", FAILING)
    kept.part("agent-n0")
    kept.start()
    deaths = until(lambda: kept.log("died") if len(kept.log("died")) >= 3 else [])
    assert [death["again_in_s"] for death in deaths[:3]] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert {death["code"] for death in deaths} == {2}
    assert deaths[0]["said"] == "error: the moon is full\n  → wait"
    assert kept.pid("agent-n0")  # the others are not touched by it


def test_a_keeper_that_is_called_tries_at_once(kept: Kept) -> None:
    kept.part("controller", FAILING)
    later_s = 2 * PATIENCE_S
    kept.start(FIRST_DELAY_S=later_s, LONGEST_DELAY_AFTER_MISTAKE_S=later_s)
    (death,) = until(lambda: kept.log("died"))
    assert death["again_in_s"] == later_s
    kept.part("controller", PART)  # somebody has put it right
    call_keeper(kept.instance)
    assert kept.pid("controller")


def test_a_part_that_is_killed_again_and_again_is_not_kept_waiting(kept: Kept) -> None:
    kept.part("agent-n0")
    kept.start()
    killed: list[int] = []
    for _ in range(5):
        killed.append(
            until(lambda: (kept.instance.holder_pid("agent-n0") or 0) not in (0, *killed) and kept.pid("agent-n0"))
        )
        os.kill(killed[-1], signal.SIGKILL)
    deaths = until(lambda: kept.log("died") if len(kept.log("died")) == 5 else [])
    assert max(death["again_in_s"] for death in deaths) <= LONGEST_DELAY_AFTER_KILL_S


def test_a_new_keeper_adopts_what_lives_and_waits_on_it(kept: Kept) -> None:
    kept.part("controller")
    kept.part("agent-n0")
    old = kept.start()
    pids = {name: kept.pid(name) for name in kept.names}
    old.kill()
    old.wait()
    kept.start()
    until(lambda: len(kept.log("adopted")) == 2)
    assert {name: kept.pid(name) for name in kept.names} == pids
    os.kill(pids["controller"], signal.SIGKILL)
    until(lambda: kept.instance.holder_pid("controller") not in (None, pids["controller"]))
    assert kept.pid("agent-n0") == pids["agent-n0"]


def test_a_part_that_lost_the_race_for_its_lock_gives_way_to_the_winner(kept: Kept) -> None:
    kept.part("controller", RACING)
    first = kept.start()
    until(lambda: kept.log("started") and (kept.instance.dir / "first").exists())
    first.kill()  # its part has not taken the lock yet, so that the next keeper starts a second one
    first.wait()
    kept.start()
    until(lambda: kept.log("adopted"))
    winner, loser = (entry["pid"] for entry in kept.log("started"))
    assert kept.pid("controller") == winner
    assert [death["pid"] for death in kept.log("died")] == [loser]


def test_sigterm_stops_the_controller_first_then_the_agents(kept: Kept) -> None:
    kept.part("agent-n0")
    kept.part("agent-n1")
    kept.part("controller")
    keeper = kept.start()
    for name in kept.names:
        kept.pid(name)
    keeper.terminate()
    assert keeper.wait(PATIENCE_S) == 0
    assert [kept.instance.holder_pid(name) for name in kept.names] == [None] * 3
    assert not kept.log("died")
    assert not kept.log("killed")
    assert kept.log("stopped")


def test_sigterm_stops_a_controller_that_has_lost_its_standby(kept: Kept) -> None:
    kept.part("agent-n0")
    keeper = kept.start()
    kept.pid("agent-n0")
    orphan = subprocess.Popen([sys.executable, "-c", PART, str(kept.instance.dir), "controller"])
    kept.pid("controller")
    keeper.terminate()
    assert orphan.wait(PATIENCE_S) == -signal.SIGTERM
    assert keeper.wait(PATIENCE_S) == 0


def test_a_part_that_does_not_stop_is_killed(kept: Kept) -> None:
    kept.part("agent-n0", STUBBORN)
    keeper = kept.start(AGENT_PATIENCE_S=0.5)
    kept.pid("agent-n0")
    keeper.terminate()
    assert keeper.wait(PATIENCE_S) == 0
    assert kept.instance.holder_pid("agent-n0") is None
    assert [entry["part"] for entry in kept.log("killed")] == ["agent-n0"]


def test_stopping_an_instance_whose_keeper_is_dead(kept: Kept) -> None:
    kept.part("controller")
    kept.part("agent-n0")
    keeper = kept.start()
    for name in kept.names:
        kept.pid(name)
    keeper.kill()
    keeper.wait()
    assert stop_instance(kept.instance, ["n0"]) == []
    assert [kept.instance.holder_pid(name) for name in kept.names] == [None, None]


def test_an_instance_whose_folder_was_removed_stops(kept: Kept) -> None:
    kept.part("agent-n0")
    keeper = kept.start(LOOK_S=0.2)
    part = os.pidfd_open(kept.pid("agent-n0"))
    until(lambda: kept.log("started"))  # nobody writes anything there any more
    shutil.rmtree(kept.instance.dir)
    assert keeper.wait(PATIENCE_S) == 0
    with pytest.raises(ProcessLookupError):
        signal.pidfd_send_signal(part, 0)
    os.close(part)


def test_a_second_keeper_leaves_the_first_alone(kept: Kept) -> None:
    kept.part("agent-n0")
    first = kept.start()
    command = [sys.executable, "-m", "thebes.node.keeper", str(kept.instance.dir)]
    assert subprocess.run(command, timeout=PATIENCE_S, check=False).returncode == 0
    assert kept.instance.holder_pid("keeper") == first.pid


def test_a_keeper_without_a_configuration_says_so(kept: Kept) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "thebes.node.keeper", str(kept.instance.dir)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 2
    assert "config.json cannot be read" in ran.stderr


def test_the_keeper_is_small() -> None:
    code = "import sys, thebes.node.keeper; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "pydantic", "asyncio", "sqlalchemy", "typer"} & set(loaded)
