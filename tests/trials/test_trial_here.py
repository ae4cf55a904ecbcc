"""The trial itself, small and on this machine: so that what runs on Slurm and Ray is known to work and able to fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from trial import Mischief, Trial


@pytest.mark.slow
def test_a_small_trial_on_this_machine(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    try:
        trial.up(virtual_gpus=4, nodes=2, grace_s=5.0)
        plan = trial.plan(12, {1: 3, 2: 2, 4: 1, 6: 1}, (1, 4))
        trial.run(plan, 3.0, [Mischief(1.5, "the controller is killed", trial.kill_controller)], 300.0)
        assert trial.balance() == {"completed": 12}
        assert trial.figures.to_json()["jobs"] == 12
    finally:
        trial.down()
    assert not trial.left()


def test_a_promise_that_is_broken_is_found(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    try:
        trial.up(virtual_gpus=4, nodes=1)
        trial.run(trial.plan(2, {1: 1}, (1, 2)), 0.5, [], 300.0)
        [known, _] = trial.known.values()
        with (trial.diaries / f"{known.key}.log").open("a") as diary:
            diary.write("DOUBLE 2 1 0\n")
        with pytest.raises(AssertionError, match="two incarnations at once"):
            trial.balance()
    finally:
        trial.down()
