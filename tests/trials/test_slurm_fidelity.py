"""200 jobs on a Slurm with 512 GPUs take as long as the simulator predicts, and end with the same weights."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from trial import Trial

from kit.components import require
from thebes.instance import rehearsal
from thebes.live.config import load

pytestmark = [pytest.mark.slurm, pytest.mark.alone]

JOBS, SECONDS, GPUS, MOST_ERROR, TRIES = 200, 220.0, 512, 0.05, 3
LOAD = 0.5  # 0.75 while jobs arrive; near saturation the simulator itself says 26 % more for starts of one second more


def test_slurm_does_what_the_simulator_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("slurm")
    from kit.slurm_cluster import slurm_cluster

    acts = rehearsal.make_workload(JOBS, SECONDS, GPUS, load=LOAD)
    limits = ",".join(f"{limit:g}" for limit in rehearsal.queue_limits(acts))
    with slurm_cluster(nodes=64, gpus=8) as slurm:
        for name, value in slurm.env.items():
            monkeypatch.setenv(name, value)
        for number in range(TRIES):  # one that others on this machine have spoilt is forgiven
            trial = Trial(tmp_path / str(number))
            try:
                trial.up(engine="slurm", partition="main", home=slurm.address, settings=[f"queue_limits={limits}"])
                ids, took_s = rehearsal.play(trial.client, acts, gpus_per_node=8)
                done = rehearsal.compare(trial.client, acts, ids, took_s, load(trial.instance.config))
            except BaseException:
                print(trial.told())
                raise
            finally:
                trial.down()
            figures = json.dumps({"gpus": GPUS, **done.to_json()})
            print("\nslurm-fidelity:", figures)
            assert len(done.played) == JOBS
            assert sum(one.lost_gpu_s for one in done.played) == 0.0, figures
            assert all(one.same_weights for one in done.played), figures
            if abs(done.error_of_mean) <= MOST_ERROR:
                break
        assert abs(done.error_of_mean) <= MOST_ERROR, figures
        if folder := os.environ.get("THEBES_TRIAL_DIR"):
            Path(folder, "slurm-fidelity.json").write_text(json.dumps(json.loads(figures), indent=2) + "\n")
