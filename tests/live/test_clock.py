"""Cluster time goes forward only, whatever the wall clock does, through restarts and reboots."""

from __future__ import annotations

import pytest

from thebes.live.clock import ClusterClock, resume_clock


class Machine:
    """A machine whose clocks the test turns."""

    def __init__(self) -> None:
        self.boot, self.boot_s, self.wall_s = "first boot", 50.0, 1_000_000.0

    def passes(self, seconds: float) -> None:
        self.boot_s += seconds
        self.wall_s += seconds

    def reboots(self, off_s: float) -> None:
        self.boot, self.boot_s = "second boot", 3.0
        self.wall_s += off_s

    def start(self, kept: str | None = None, last_s: float = 0.0) -> ClusterClock:
        return resume_clock(
            kept, last_s, boot=self.boot, boot_clock=lambda: self.boot_s, wall_clock=lambda: self.wall_s
        )


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_a_new_instance_begins_with_the_wall_clock(machine):
    clock = machine.start()
    assert clock.now_s() == 1_000_000.0
    machine.passes(10)
    assert clock.now_s() == 1_000_010.0


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0, -3600.0, 3600.0])
def test_jumps_of_the_wall_clock_change_nothing_also_through_a_restart(machine, jump_s):
    clock = machine.start()
    machine.passes(10)
    machine.wall_s += jump_s
    assert clock.now_s() == 1_000_010.0
    again = machine.start(clock.kept(), last_s=1_000_010.0)
    assert again.now_s() == 1_000_010.0


def test_time_goes_on_while_the_controller_is_down(machine):
    clock = machine.start()
    machine.passes(100)
    assert machine.start(clock.kept(), last_s=1_000_000.0).now_s() == 1_000_100.0


def test_after_a_reboot_the_wall_clock_is_asked(machine):
    clock = machine.start()
    machine.passes(10)
    machine.reboots(off_s=60)
    assert machine.start(clock.kept(), last_s=1_000_010.0).now_s() == 1_000_070.0


def test_after_a_reboot_with_the_wall_clock_set_back_time_does_not_go_back(machine):
    clock = machine.start()
    machine.passes(10)
    machine.reboots(off_s=-500_000)
    again = machine.start(clock.kept(), last_s=1_000_010.0)
    assert again.now_s() == 1_000_010.0
    machine.passes(1)
    assert again.now_s() == 1_000_011.0


def test_what_was_written_down_is_never_in_the_future(machine):
    """A store that was copied from elsewhere, say: the offset kept does not reach its last instant."""
    clock = machine.start()
    assert machine.start(clock.kept(), last_s=2_000_000.0).now_s() == 2_000_000.0


def test_instants_that_nodes_tell_are_translated(machine):
    clock = machine.start()
    assert clock.from_boot(50.0) == 1_000_000.0
    assert clock.from_boot(49.5) == 999_999.5


def test_the_real_clock_is_near_the_wall_clock():
    import time

    before = time.time()
    now_s = resume_clock(None, 0.0).now_s()
    assert before - 1.0 < now_s < time.time() + 1.0
