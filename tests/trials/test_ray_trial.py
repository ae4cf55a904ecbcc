"""The same on Ray, smaller: 1 + 4 nodes, while a raylet is killed, one is frozen, and the head is restarted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from trial import Mischief, Trial

from kit.components import require

pytestmark = pytest.mark.ray

JOBS = 60


@pytest.mark.parametrize("policy", ["tiresias-l", "dally"])
def test_sixty_jobs(policy: str, tmp_path: Path) -> None:
    require("ray")
    from kit.ray_cluster import RayCluster

    with RayCluster() as ray:
        trial = Trial(tmp_path)

        def freeze() -> None:
            ray.freeze_raylet("n3")
            time.sleep(12.0)
            ray.thaw_raylet("n3")

        def revive() -> None:
            for node in ("n2", "n3"):
                if not ray.nodes().get(node):
                    ray.start_raylet(node)

        mischief = [
            Mischief(4.0, "the head is restarted", ray.restart_gcs),
            Mischief(9.0, "a raylet is killed", lambda: ray.kill_raylet("n2")),
            Mischief(12.0, "the controller is killed", trial.kill_controller),
            Mischief(16.0, "a raylet is frozen and thawed", freeze),
            Mischief(36.0, "raylets that have gone are started again", revive),
        ]
        try:
            settings = {"tiresias-l": ["queue_limits=8,60"], "dally": ["lease_s=6"]}[policy]
            where = {"engine": "ray", "address": ray.address, "home": "127.0.0.1", "lease_s": 4.0}
            trial.up(policy=policy, settings=settings, grace_s=5.0, **where)
            plan = trial.plan(JOBS, {1: 2, 2: 2, 4: 3, 8: 3, 12: 1, 16: 1}, (3, 24))
            trial.run(plan, 25.0, mischief, patience_s=900.0)
            assert trial.balance() == {"completed": JOBS}
        except BaseException:
            print(trial.told())
            raise
        finally:
            trial.down()
        assert not trial.left()
        assert trial.figures.preemptions > 0
        trial.keep(f"ray-{policy}", policy=policy, nodes=4, gpus=32)
