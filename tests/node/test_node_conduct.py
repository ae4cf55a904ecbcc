"""The supervisor's conduct as a machine without processes: events in, instructions out."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.effort import effort
from thebes.node.conduct import Conduct
from thebes.node.log_limit import LogWatch
from thebes.node.log_steps import PATIENCE_S, LogSteps, TooSlow
from thebes.node.process_tree import catches
from thebes.protocol.plain_json import dump, parse, read_object
from thebes.protocol.progress import StepRate, written_by_job


def running(ranks: int = 1, grace_s: float = 10.0, limit_s: float | None = None) -> Conduct:
    conduct = Conduct(range(ranks), grace_s, limit_s)
    assert conduct.started(100.0) == [("state",)]
    return conduct


def names(instructions: list[tuple[Any, ...]]) -> list[str]:
    return [one[0] for one in instructions]


def test_a_rank_that_ends_by_itself_ends_the_attempt_when_nobody_is_left() -> None:
    conduct = running()
    assert names(conduct.rank_ended(110.0, 0, 0)) == ["kill"]  # daemons
    assert conduct.record()["state"] == "running"
    assert names(conduct.empty(111.0)) == ["state"]
    found = conduct.record()
    assert (found["state"], found["cause"], found["codes"], found["run_s"]) == ("exited", "exit", {0: 0}, 10.0)


def test_a_notice_is_a_flag_and_usr1_then_term_then_kill_at_the_deadline() -> None:
    conduct = running()
    assert conduct.command(100.0, ["notice", "20"]) == [("notice", 120.0, 20.0), ("usr1",)]
    assert conduct.tick(101.0) == [("usr1",)]  # those whose handler came later
    assert "term" not in names(conduct.tick(114.9))
    assert "term" in names(conduct.tick(115.0))
    assert "kill" not in names(conduct.tick(119.9))
    assert "kill" in names(conduct.tick(120.0))
    conduct.rank_ended(120.1, 0, -9)
    conduct.empty(120.1)
    assert conduct.cause() == "killed"


def test_sigterm_comes_a_quarter_of_a_short_grace_before_the_deadline() -> None:
    conduct = running()
    conduct.command(100.0, ["notice", "2"])
    assert (conduct.term_at, conduct.kill_at) == (101.5, 102.0)


def test_a_repeated_notice_gives_no_more_time_but_may_give_less() -> None:
    conduct = running()
    conduct.command(100.0, ["notice", "20"])
    assert conduct.command(105.0, ["notice", "20"]) == []
    assert conduct.kill_at == 120.0
    conduct.command(106.0, ["notice", "5"])
    assert conduct.kill_at == 111.0


@pytest.mark.parametrize(
    ("code", "at", "cause"), [(85, 105.0, "exit"), (0, 119.0, "exit"), (1, 105.0, "exit"), (1, 116.0, "killed")]
)
def test_how_a_job_goes_after_a_notice_is_its_own_doing_until_we_send_a_signal(
    code: int, at: float, cause: str
) -> None:
    conduct = running()
    conduct.command(100.0, ["notice", "20"])
    conduct.tick(at)
    conduct.rank_ended(at, 0, code)
    conduct.empty(at)
    assert conduct.cause() == cause


def test_when_one_rank_fails_the_others_get_term_and_five_seconds() -> None:
    conduct = running(ranks=3)
    assert conduct.rank_ended(110.0, 1, 3) == []
    assert conduct.tick(110.0) == [("term",)]
    assert conduct.tick(114.9) == []
    assert conduct.tick(115.0) == [("kill",)]
    conduct.rank_ended(115.1, 0, -9)
    conduct.rank_ended(115.1, 2, -9)
    conduct.empty(115.2)
    assert conduct.cause() == "exit"
    assert conduct.codes == {0: -9, 1: 3, 2: -9}


def test_a_rank_that_ends_well_leaves_the_others_alone() -> None:
    conduct = running(ranks=2)
    assert conduct.rank_ended(110.0, 0, 0) == []
    assert conduct.next_s() is None


def test_during_a_notice_the_deadline_rules_when_a_rank_goes() -> None:
    conduct = running(ranks=2)
    conduct.command(100.0, ["notice", "20"])
    conduct.rank_ended(101.0, 0, 85)
    assert conduct.kill_at == 120.0
    assert conduct.term_at == 115.0


def test_frozen_time_counts_neither_as_run_time_nor_towards_the_limit() -> None:
    conduct = running(limit_s=30.0)
    assert conduct.next_s() == 130.0
    assert conduct.command(110.0, ["freeze"]) == [("stop",), ("state",)]
    assert conduct.next_s() is None
    assert conduct.record()["state"] == "frozen"
    assert conduct.command(600.0, ["freeze"]) == []
    assert conduct.command(1000.0, ["thaw"]) == [("cont",), ("state",)]
    assert conduct.run_s(1005.0) == 15.0
    assert conduct.next_s() == 1020.0


def test_suspended_by_the_driver_stops_the_clock_and_no_process() -> None:
    conduct = running()
    assert conduct.command(110.0, ["park"]) == [("state",)]
    assert conduct.record()["state"] == "suspended"
    assert conduct.command(130.0, ["unpark"]) == [("state",)]
    assert conduct.run_s(131.0) == 11.0


def test_a_frozen_job_is_thawed_before_it_is_told_anything() -> None:
    conduct = running()
    conduct.command(110.0, ["freeze"])
    assert names(conduct.command(120.0, ["notice", "8"])) == ["cont", "state", "notice", "usr1"]


def test_the_time_limit_is_a_notice_with_the_grace_and_then_a_timeout() -> None:
    conduct = running(grace_s=4.0, limit_s=50.0)
    assert names(conduct.tick(150.0)) == ["notice", "usr1"]
    assert conduct.kill_at == 154.0
    conduct.tick(154.0)
    conduct.rank_ended(154.0, 0, -9)
    conduct.empty(154.0)
    assert conduct.cause() == "timeout"


def test_a_job_that_completes_in_the_grace_of_its_limit_has_completed() -> None:
    conduct = running(grace_s=4.0, limit_s=50.0)
    conduct.tick(150.0)
    conduct.rank_ended(151.0, 0, 0)
    conduct.empty(151.0)
    assert conduct.cause() == "exit"


def test_kill_is_repeated_at_growing_distances_until_nobody_is_left() -> None:
    conduct = running()
    assert conduct.command(100.0, ["kill"]) == [("kill",)]
    distances = []
    now = 100.0
    for _ in range(10):
        distances.append(conduct.next_s() - now)
        now = conduct.next_s()
        assert conduct.tick(now) == [("kill",)]
    assert distances == sorted(distances)
    assert distances[-1] <= 1.0


def test_an_abort_is_a_launch_failure_with_its_reason() -> None:
    conduct = running()
    assert conduct.command(100.0, ["abort", "node", "n1:", "no", "room"]) == [("kill",)]
    conduct.rank_ended(100.1, 0, -9)
    conduct.empty(100.1)
    found = conduct.record()
    assert (found["cause"], found["detail"]) == ("launch-failed", "node n1: no room")


@pytest.mark.parametrize("words", [[], ["nonsense"], ["notice", "soon"], ["thaw"], ["unpark"]])
def test_what_cannot_be_understood_or_does_not_fit_is_left_alone(words: list[str]) -> None:
    assert running().command(100.0, words) == []


COMMANDS = st.sampled_from(
    [["notice", "3"], ["notice", "0"], ["kill"], ["term"], ["freeze"], ["thaw"], ["park"], ["unpark"], ["abort", "x"]]
)


@given(st.lists(st.tuples(st.floats(0, 20), COMMANDS), max_size=8), st.none() | st.floats(0.1, 30))
def test_whatever_is_asked_in_whatever_order_the_clock_is_right_and_ends_come(
    steps: list[tuple[float, list[str]]], limit_s: float | None
) -> None:
    """Run time is the time not frozen; once asked to end, a kill comes, and nothing comes after the end."""
    conduct = running(limit_s=limit_s)
    now, ran_s = 100.0, 0.0
    for wait_s, words in steps:
        ran_s += wait_s if conduct.state == "running" else 0.0
        now += wait_s
        conduct.tick(now)
        conduct.command(now, words)
        assert conduct.run_s(now) == pytest.approx(ran_s)
        if conduct.ending and conduct.state != "suspended":
            assert conduct.state == "running"  # nobody ends frozen
        assert not conduct.ending or conduct.next_s() is not None
    for _ in range(200):
        if conduct.kills or conduct.next_s() is None:
            break
        now = max(now, conduct.next_s())
        conduct.tick(now)
    assert bool(conduct.kills) == bool(conduct.ending)
    conduct.rank_ended(now, 0, -9)
    conduct.empty(now)
    assert conduct.command(now, ["notice", "1"]) == []
    assert conduct.next_s() is None


# The log limit -------------------------------------------------------------------------------------------------------


def test_a_log_keeps_head_and_tail_and_says_what_was_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    lines = [f"line {number:08d}\n" for number in range(20_000)]  # 280 kB
    path.write_text("".join(lines))
    watch = LogWatch(str(path), 64 << 10)
    watch.look(0.0)
    text = path.read_text()
    kept = text.splitlines()
    assert len(text) < 64 << 10
    assert kept[0] == "line 00000000"
    assert kept[-1] == "line 00019999"
    marks = [line for line in kept if "dropped" in line]
    assert marks == [f"[thebes: {watch.dropped} bytes dropped here: the log limit is 65536 bytes]"]
    rest = [line for line in kept if line.startswith("line")]
    assert len(rest) * 14 + watch.dropped == 20_000 * 14
    assert all(len(line) == 13 for line in rest)  # none is cut


def test_a_log_that_is_cut_again_and_again_counts_all_that_was_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    watch = LogWatch(str(path), 64 << 10)
    written = 0
    for part in range(30):
        with path.open("a") as file:
            for number in range(3000):
                written += file.write(f"{part:04d} {number:08d}\n")
        watch.look(float(part))
    kept = [line for line in path.read_text().splitlines() if line and "thebes" not in line]
    assert len(kept) * 14 + watch.dropped == written
    assert path.read_text().count("dropped") == 1
    assert kept[-1] == "0029 00002999"


def test_a_quiet_log_is_not_looked_at_and_a_busy_one_often(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_text("a\n")
    watch = LogWatch(str(path), 1 << 20)
    assert watch.look(0.0) == pytest.approx(1.57, abs=0.01)
    assert watch.look(2.0) is None
    with path.open("ab") as file:
        file.write(b"x" * 900_000)
    assert watch.look(2.1) == pytest.approx(0.02)


# JSON ----------------------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@effort(30)
@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=4))
def test_what_the_supervisor_writes_is_json_and_it_reads_what_json_writes(value: dict[str, Any]) -> None:
    assert json.loads(dump(value)) == value
    assert parse(json.dumps(value)) == value
    assert parse(json.dumps(value, indent=2, ensure_ascii=False)) == value


@pytest.mark.parametrize("text", ["", "{", '{"a": 1} x', "nothing", '{"a": \x01}', "[1, 2]", "{}{}"])
def test_a_file_that_a_job_has_spoilt_is_taken_as_missing(tmp_path: Path, text: str) -> None:
    (tmp_path / "progress").write_text(text)
    assert read_object(tmp_path / "progress") == read_object(tmp_path / "none") == {}


def test_numbers_that_mean_nothing_are_no_progress(tmp_path: Path) -> None:
    (tmp_path / "progress").write_text(' {"step": NaN, "at_s": -Infinity, "first_step": 1e300, "first_at_s": "x"}\n')
    found = written_by_job(str(tmp_path), StepRate())
    assert {name: value for name, value in found.items() if value is not None} == {"acknowledged": False}


def test_only_a_signal_that_is_caught_is_sent() -> None:
    import signal

    signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert catches(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert not catches(os.getpid(), signal.SIGUSR1)


def test_a_pattern_is_given_up_for_its_own_slowness_not_for_that_of_the_machine(tmp_path: Path) -> None:
    class Stalled:
        def search(self, line: str) -> re.Match[str] | None:
            time.sleep(2 * PATIENCE_S)
            return re.search(r"step (\d+)", line)

    log = tmp_path / "rank-0.log"
    log.write_text(f"step 7\n{'a' * 60}b\n")
    steps = LogSteps(log, "")
    steps.pattern = Stalled()  # type: ignore[assignment]
    assert steps.newest() == 7
    with pytest.raises(TooSlow):
        LogSteps(log, r"((?:a+)+)$").newest()
