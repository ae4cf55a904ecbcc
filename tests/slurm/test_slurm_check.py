"""`thebes engine check slurm`: each finding on recorded output, and the whole of it on a real cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.components import require
from kit.slurm_cluster import SlurmCluster, slurm_cluster
from thebes.cli.engine import lines
from thebes.engine.finding import SiteFinding, worst
from thebes.engine.slurm.check import limit_findings, probe_findings, site_findings, trial_failure
from thebes.engine.slurm.commands import SlurmError, failure
from thebes.engine.slurm.records import parse_config, parse_node, parse_partition

RECORDED = Path(__file__).parent / "recorded"
CONFIG = parse_config((RECORDED / "config.txt").read_text())
NODES = [node for line in (RECORDED / "node.txt").read_text().splitlines() if (node := parse_node(line)).gpus]
PLAIN = [parse_node("NodeName=h1 State=IDLE Gres=gpu:a100:8")]
MAIN = parse_partition((RECORDED / "partition.txt").read_text().splitlines()[0])
RACKS = {"n1": "rack1", "n2": "rack2"}


def by_what(found: list[SiteFinding]) -> dict[str, SiteFinding]:
    return {finding.what: finding for finding in found}


def test_a_site_with_everything() -> None:
    found = by_what(site_findings(CONFIG, NODES[:2], MAIN, RACKS))
    assert {finding.level for finding in found.values()} == {"ok"}
    assert found["Slurm"].detail == "version 22.05.8, cluster thebes"
    assert found["partition"].detail == "main: 2 nodes with 16 GPUs"
    assert found["GPU ids"].detail.startswith("each GPU has a gres type of its own")
    assert found["topology"].detail == "2 leaf switches: they are the racks"
    limits = by_what(limit_findings(CONFIG, MAIN))
    assert {finding.level for finding in limits.values()} == {"ok"}


def test_a_site_with_less() -> None:
    found = by_what(site_findings({**CONFIG, "SLURM_VERSION": "20.02.1"}, [*PLAIN, NODES[-1]], MAIN, {}))
    assert "older than any we have tried" in found["Slurm"].detail
    assert "n7 (Slurm says DOWN: fan)" in found["nodes"].detail
    assert found["GPU ids"].detail.startswith("only counts can be asked for")
    assert "gres.conf" in found["GPU ids"].hint
    assert found["GPU types"].detail == "a100"
    assert "all nodes count as one rack" in found["topology"].detail
    whole = parse_partition("PartitionName=x Nodes=h1 State=UP OverSubscribe=EXCLUSIVE")
    assert "whole nodes only" in by_what(site_findings(CONFIG, PLAIN, whole, {}))["GPU ids"].detail


def test_why_no_step_could_be_run() -> None:
    account = "srun: error: Unable to allocate resources: Invalid account or account/partition combination specified"
    found = trial_failure(failure("srun", 1, account))
    assert (found.level, found.what) == ("problem", "account")
    assert "--account" in found.hint
    kept = trial_failure(SlurmError("srun: not given within 30 s: AccountNotAllowed", "busy"))
    assert (kept.level, kept.what) == ("problem", "account")
    python = trial_failure(failure("srun", 2, "slurmstepd: error: execve(): python: No such file or directory"))
    assert (python.level, python.what) == ("problem", "Python")
    busy = trial_failure(failure("srun", 1, "srun: error: Unable to allocate resources: Requested nodes are busy"))
    assert (busy.level, busy.what) == ("warning", "trial step")
    assert "Requested nodes are busy" in busy.detail


def test_what_the_site_does_to_jobs_by_itself() -> None:
    short = parse_partition("PartitionName=x Nodes=n1 State=UP MaxTime=1-00:00:00 PreemptMode=REQUEUE")
    config = {"KillWait": "30 sec", "PreemptType": "preempt/partition_prio", "AccountingStorageType": "slurmdbd"}
    found = by_what(limit_findings(config, short))
    assert found["time limit"].detail.startswith("Slurm ends a job after 1-00:00:00: it is asked to save within 24 s")
    assert "may preempt our jobs (REQUEUE)" in found["preemption"].detail
    assert "one Slurm job per start" in found["accounting"].detail
    assert "every 30 s" in found["uneven gangs"].detail


def test_what_a_node_has_seen() -> None:
    good = {"node": "n1", "shared": True, "home": True, "time": 100.0}
    assert worst(probe_findings(good, Path("/s"), "me", 99.0, 101.0)) == "ok"
    bad = {"node": "n1", "shared": False, "why": "no such file", "home": False, "home_why": "refused", "time": 90.0}
    found = by_what(probe_findings(bad, Path("/s"), "me", 99.0, 101.0))
    assert found["shared folder"].detail == "n1 does not see /s (no such file)"
    assert found["calling home"].detail == "n1 cannot reach me (refused)"
    assert found["clocks"].detail == "n1 is 9 s off"
    assert worst(list(found.values())) == "problem"


def test_how_it_is_printed() -> None:
    found = [SiteFinding("ok", "a", "good", "not shown"), SiteFinding("warning", "bcd", "lost", "do this")]
    assert lines(found) == ["ok       a    good", "warning  bcd  lost", "              → do this"]


def thebes(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-c", "from thebes.cli import main; main()", "engine", "check", *args]
    return subprocess.run(run, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=120)


def test_wrong_use_is_told() -> None:
    done = thebes("kubernetes")
    assert (done.returncode, done.stderr) == (2, "error: there is no engine 'kubernetes' to check\n  → slurm or ray\n")
    done = thebes("slurm", "--address", "x")
    assert "--address is for `thebes engine check ray`" in done.stderr
    done = thebes("slurm", env={"PATH": "/nonexistent"})
    assert done.returncode == 1
    assert "there is no `scontrol` in PATH" in done.stdout


@pytest.fixture(scope="module")
def cluster() -> object:
    require("slurm")
    with slurm_cluster(nodes=2, switches=2) as found:
        yield found


@pytest.mark.slurm
def test_a_real_cluster(cluster: SlurmCluster) -> None:
    shared = cluster.dir / "seen"
    shared.mkdir()
    more = ("--shared", str(shared), "--home", cluster.address)
    done = thebes("slurm", *more, "--output", "json", env=cluster.env)
    found = by_what([SiteFinding(**one) for one in json.loads(done.stdout)])
    assert done.returncode == 0, done
    assert {finding.level for finding in found.values()} == {"ok"}, found
    assert "sees" in found["shared folder"].detail
    assert not list(shared.iterdir())
    done = thebes("slurm", "--partition", "x", env=cluster.env)
    assert (done.returncode, done.stdout.splitlines()) == (
        1,
        ["problem  partition  Slurm has no partition 'x'", "                    → it has: main, cpu"],
    )
    done = thebes("slurm", "--partition", "cpu", env=cluster.env)
    assert "partition 'cpu' has no GPUs" in done.stdout
