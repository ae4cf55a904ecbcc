"""1,000 jobs on a Slurm of 64 nodes with 8 GPUs each, while daemons are killed, nodes are cut off and drained."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from trial import Mischief, Trial

from kit.components import require
from thebes.node import processes

pytestmark = pytest.mark.slurm

JOBS = int(os.environ.get("THEBES_TRIAL_JOBS", "1000"))
OVER_S = 0.11 * JOBS  # about as fast as two cores start them
SIZES = {1: 16.0, 2: 16.0, 4: 22.0, 8: 36.0, 12: 2.0, 16: 4.0, 32: 2.0, 64: 2.0}
LEASE_S = 15.0
SETTINGS = {"tiresias-l": ["queue_limits=60,400"], "dally": ["lease_s=20"]}


@pytest.mark.parametrize("policy", ["tiresias-l", "dally"])
def test_a_thousand_jobs(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("slurm")
    from kit.slurm_cluster import slurm_cluster

    with slurm_cluster(nodes=64, gpus=8, namespaced=("n5",), slurmd_timeout_s=10) as slurm:
        for name, value in slurm.env.items():
            monkeypatch.setenv(name, value)
        trial = Trial(tmp_path)

        def bounce_slurmctld() -> None:
            slurm.kill_slurmctld()
            time.sleep(3.0)
            slurm.start_slurmctld()

        def bounce_slurmd() -> None:
            for node in ("n2", "n17", "n40"):
                slurm.kill_slurmd(node)
            time.sleep(2.0)
            for node in ("n2", "n17", "n40"):
                slurm.start_slurmd(node)

        def kill_sruns() -> None:
            """What an administrator who tidies up on the login node does."""
            mark = f"SLURM_CONF={slurm.conf}".encode()
            ours = [pid for pid in processes.all_pids() if mark in processes.environment(pid).split(b"\0")]
            sruns = [pid for pid in ours if (stat := processes.read_stat(pid)) and stat.name == "srun"]
            processes.kill_all(sruns[:5])

        mischief = [
            Mischief(12.0, "slurmctld is killed and started again", bounce_slurmctld),
            Mischief(22.0, "three slurmd are killed and started again", bounce_slurmd),
            Mischief(28.0, "the controller is killed", trial.kill_controller),
            Mischief(34.0, "n5 is cut off", lambda: slurm.cut_off("n5")),
            Mischief(36.0, "n9's slurmd is killed", lambda: slurm.kill_slurmd("n9")),
            Mischief(42.0, "n12 is drained", lambda: slurm.drain("n12", "new disk")),
            Mischief(46.0, "five srun are killed", kill_sruns),
            Mischief(75.0, "n5 is back", lambda: slurm.heal("n5")),
            Mischief(78.0, "n9's slurmd is back", lambda: slurm.start_slurmd("n9")),
            Mischief(80.0, "n12 is in use again", lambda: slurm.resume("n12")),
            Mischief(84.0, "the controller is killed again", trial.kill_controller),
        ]
        try:
            trial.up(
                engine="slurm",
                partition="main",
                home=slurm.address,
                lease_s=LEASE_S,
                policy=policy,
                settings=SETTINGS[policy],
                grace_s=10.0,
            )
            plan = trial.plan(JOBS, SIZES, (3, 24))
            trial.run(plan, OVER_S, mischief, patience_s=1800.0)
            assert trial.balance() == {"completed": JOBS}
        except BaseException:
            print(trial.told())
            raise
        finally:
            trial.down()

        def processes_left() -> list[tuple[int, str]]:
            """Of ours: slurmctld's own helper outlives a slurmctld that was killed."""
            return [(pid, line) for pid, line in slurm.leftovers() if "slurmscriptd" not in line]

        for left in (slurm.queue, processes_left):
            slurm.until(lambda look=left: not look(), "nothing left behind", told=left)
        assert trial.figures.preemptions + trial.figures.losses > 0
        trial.keep(f"slurm-{policy}", policy=policy, nodes=64, gpus=512)
