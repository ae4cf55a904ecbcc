"""Two controllers of one cluster, on Slurm and on Ray, the store in PostgreSQL: the first one's machine is lost."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from trial import patiently

from kit.components import require
from kit.diaries import Known, check_job
from kit.fault_cluster import JOB
from kit.waiting import until
from thebes.client import Client
from thebes.instance.down import take_down
from thebes.instance.standby import rehearse
from thebes.instance.up import bring_up
from thebes.instance.wanted import UpOptions
from thebes.node import processes
from thebes.protocol.instance import Instance

if TYPE_CHECKING:
    from kit.postgres_server import PostgresServer

TAKEOVER_S = 60.0  # half of what a test is patient; the goal of 10 s is for a machine that does nothing else


@contextmanager
def cluster_of(where: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[dict[str, Any], str]]:
    """Options of `up`, and the address at which nodes reach this machine."""
    require(where)
    if where == "slurm":
        from kit.slurm_cluster import slurm_cluster

        with slurm_cluster(nodes=4, gpus=8) as slurm:
            for name, value in slurm.env.items():
                monkeypatch.setenv(name, value)
            yield {"engine": "slurm", "partition": "main"}, slurm.address
    else:
        from kit.ray_cluster import RayCluster

        with RayCluster() as ray:
            yield {"engine": "ray", "address": ray.address}, "127.0.0.1"


def kill_all_of(instance: Instance) -> None:
    """As when the machine is lost: keeper, standby, controller and its sruns at once.

    They are stopped before they are killed. An srun has a child that ends the step when srun is killed, and a lost
    machine gives it no moment for that.
    """
    pids = [pid for part in ("keeper", "standby", "controller") if (pid := instance.holder_pid(part))]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        below = [child for pid in pids for child in processes.descendants(pid)]
        for pid in (*pids, *below):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def ranks_of(key: str) -> set[int]:
    found: set[int] = set()
    for pid in processes.all_pids():
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if key.encode() in words and b"THEBES_ATTEMPT=" in processes.environment(pid):
                found.add(pid)
    return found


@pytest.mark.parametrize("where", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("slurm", "ray")])
def test_a_standby_takes_over_and_jobs_do_not_notice(
    where: str, tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, shared, diaries = postgres.url(postgres.new_database()), tmp_path / "shared", tmp_path / "diaries"
    diaries.mkdir()
    go_on = diaries / "go-on"
    go_on.touch()  # jobs run until they are told
    first, second = Instance(tmp_path / "first"), Instance(tmp_path / "second")
    known = {gpus: Known(f"job{gpus}", "plain", gpus, 8) for gpus in (1, 4)}
    with cluster_of(where, monkeypatch) as (options, address):
        try:
            common = {**options, "store": store, "shared": str(shared), "home": address, "grace_s": 10.0}
            bring_up(first, UpOptions(**common), rehearse)
            bring_up(second, UpOptions(store=store, home=address), rehearse)
            client = Client(dir=first.dir)
            for gpus, one in known.items():
                command = [sys.executable, str(JOB), str(diaries), one.key, one.kind, str(one.steps), "0.25"]
                client.submit(command, gpus=gpus, nodes=2 if gpus > 1 else 1, ranks_per_node=1, workdir="/")
            until(
                lambda: all(len(ranks_of(one.key)) == (2 if one.gpus > 1 else 1) for one in known.values()),
                "they run",
                120.0,
            )
            until(lambda: all((client.job(number)["step"] or 0) > 4 for number in ("1", "2")), "they make steps")
            before = {one.key: ranks_of(one.key) for one in known.values()}
            endpoint = second.read_endpoint()
            assert endpoint is not None
            later = Client(endpoint["url"], token=second.read_token())
            kill_all_of(first)
            began = time.monotonic()
            patiently(lambda: later.status())
            took_s = time.monotonic() - began
            print(f"\n{where}: the standby led after {took_s:.2f} s")
            assert took_s < TAKEOVER_S
            until(lambda: all(later.job(one)["state"] == "running" for one in ("1", "2")), "they run still")
            assert {one.key: ranks_of(one.key) for one in known.values()} == before
            later.preempt("2")
            until(lambda: later.job("2")["incarnation"] == 2, "the new leader's word is obeyed")
            go_on.unlink()
            for number, one in zip(("1", "2"), known.values(), strict=True):
                row = until(lambda n=number: (r := later.job(n))["state"] == "completed" and r, "its end")
                check_job(one, row, diaries / f"{one.key}.log")
            assert later.job("1")["incarnation"] == 1
        finally:
            for instance in (first, second):
                if instance.run.is_dir():
                    with suppress(Exception):
                        take_down(instance, "kill", lambda text: None)
