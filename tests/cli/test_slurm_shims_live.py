"""Slurm's commands against a running cluster: two nodes of four virtual GPUs, one instance for the whole file."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kit.waiting import until
from thebes.cli.slurm import commands

THEBES = (sys.executable, "-c", "import thebes.cli; thebes.cli.main()")
HEAD = "             JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)"


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("shims") / "t"
    # The first `up` of a version compiles the policies, which takes minutes on a busy machine.
    up = [*THEBES, "up", "--virtual-gpus", "4", "--nodes", "2", "--policy", "fifo", "--dir", str(folder)]
    subprocess.run(up, check=True, timeout=600)
    yield folder
    subprocess.run([*THEBES, "down", "--now", "--dir", str(folder)], check=True, timeout=300)


@pytest.fixture
def slurm(instance: Path, thebes: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs one of the commands in this process; whatever is left afterwards is cancelled."""
    for name in [*(n for n in os.environ if n.startswith("SBATCH_")), "THEBES_URL", "THEBES_TOKEN"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("THEBES_DIR", str(instance))
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Any:
        return thebes("slurm-shim", *words)

    yield run
    run("scancel", "--me")
    until(lambda: run("squeue", "-h").out == "", "all jobs are gone")


def submitted(ran: Any) -> str:
    assert ran.code == 0, ran.err
    assert ran.out.startswith("Submitted batch job ")
    return ran.out.split()[-1]


def until_reason(slurm: Any, job: str, reason: str) -> None:
    """A job that was submitted is stored; why it waits is known a moment later."""
    until(lambda: set(slurm("squeue", "-h", "-j", job, "-o", "%r").out.split()) == {reason}, f"{job}: {reason}")


def states(slurm: Any) -> dict[str, str]:
    return dict(line.split() for line in slurm("squeue", "-h", "-r", "-o", "%i %t").out.splitlines())


def test_a_script_with_its_options_arguments_and_output(slurm, tmp_path):
    (tmp_path / "train.sh").write_text(
        "#!/bin/bash\n#SBATCH -J my-run -t 5 --gres=gpu:2 -p gpu --mail-type=END\n"
        'echo "$SLURM_JOB_ID $1 $THEBES_GPUS"\n'
    )
    ran = slurm("sbatch", "--wait", "train.sh", "--lr=3")
    job = submitted(ran)
    assert (tmp_path / f"slurm-{job}.out").read_text() == f"{job} --lr=3 2\n"
    assert ran.err == "sbatch: warning: --partition, --mail-type are not used by Thebes.\n"
    shown = slurm("scontrol", "show", "job", job).out
    assert f"JobId={job} JobName=my-run\n" in shown
    assert "JobState=COMPLETED Reason=None" in shown
    assert "TimeLimit=00:05:00" in shown
    assert f"Command={tmp_path}/train.sh\n" in shown
    assert "ExitCode=0:0" in shown
    assert slurm("squeue", "-j", job).out == HEAD + "\n", "it has ended"
    assert slurm("squeue", "-j", job, "-t", "CD", "-h", "-o", "%i %t %l %o").out == (
        f"{job} CD 5:00 {tmp_path}/train.sh\n"
    )


def test_parsable_wrap_stdin_and_exit_codes(slurm, tmp_path, monkeypatch):
    ran = slurm("sbatch", "--parsable", "--gres=gpu:1", "--wrap", "true")
    assert ran.out.strip().isdigit()
    ran = slurm("sbatch", "-W", "-Q", "--gpus=1", "--wrap", "exit 3")
    assert (ran.code, ran.out) == (3, "")
    monkeypatch.setattr("sys.stdin", io.StringIO("#!/bin/sh\n#SBATCH --gpus=1 -o from-%x.txt\necho piped\n"))
    submitted(slurm("sbatch", "-W"))
    assert (tmp_path / "from-sbatch.txt").read_text() == "piped\n"


def test_the_queue_as_slurm_shows_it(slurm):
    first = submitted(slurm("sbatch", "-N", "2", "--gpus-per-node=4", "-J", "whole_cluster", "--wrap", "sleep 3600"))
    until(lambda: states(slurm).get(first) == "R", "the first runs")
    array = submitted(slurm("sbatch", "--array=1-4", "--gres=gpu:2", "-J", "arr", "--wrap", "sleep 3600"))
    after = submitted(slurm("sbatch", "-d", f"afterok:{first}", "--gpus=1", "--wrap", "true"))
    held = submitted(slurm("sbatch", "--gpus=1", "--wrap", "true"))
    assert slurm("scontrol", "hold", held).code == 0
    until_reason(slurm, array, "Resources")
    lines = slurm("squeue").out.splitlines()
    assert lines[0] == HEAD
    user = slurm("squeue", "-h", "-o", "%u").out.split()[0]
    who = f"{user[:8]:>8}"
    seen = {line.split()[0]: line for line in lines[1:]}
    assert seen[f"{array}_[1-4]"].endswith(f"    thebes      arr {who} PD       0:00      1 (Resources)"[1:])
    assert seen[after].endswith(f" wrap {who} PD       0:00      1 (Dependency)")
    assert seen[held].endswith(f" wrap {who} PD       0:00      1 (JobHeldUser)")
    assert f" whole_cl {who}  R " in seen[first]
    assert seen[first].endswith("      2 n[0-1]")
    assert list(seen)[-1] == first, "those that wait come first"
    assert len(slurm("squeue", "-r", "-h", "-j", array).out.splitlines()) == 4
    assert slurm("squeue", "-h", "-t", "R", "-o", "%i").out.split() == [first]
    assert slurm("squeue", "-h", "-n", "arr", "-o", "%i").out.split() == [f"{array}_[1-4]"]
    assert slurm("squeue", "-h", "--me", "-w", "n1", "-o", "%i").out.split() == [first]
    assert slurm("squeue", "-h", "-u", "somebody").out == ""
    assert slurm("squeue", "-h", "-p", "gpu").out == ""
    assert slurm("squeue", "-h", "-A", "nobodys").out == ""
    assert slurm("squeue", "-h", "-n", "no such name").out == ""
    assert slurm("squeue", "-h", "-o", "%i", "-S", "-i").out.split()[0] == held
    assert (
        slurm("squeue", "--start")
        .out.splitlines()[0]
        .endswith("START_TIME  NODES SCHEDNODES           NODELIST(REASON)")
    )
    assert first not in slurm("squeue", "--start", "-h", "-o", "%i").out.split()
    found = {one["job_id"]: one for one in json.loads(slurm("squeue", "--json").out)["jobs"]}
    assert found[first]["job_state"] == "RUNNING"
    assert found[first]["nodes"] == "n[0-1]"
    assert slurm("sinfo", "-h", "-o", "%t %D %N").out == "alloc 2 n[0-1]\n"

    assert slurm("scontrol", "release", held).code == 0
    assert slurm("scancel", f"{array}_[3-4]").code == 0
    assert slurm("squeue", "-h", "-n", "arr", "-o", "%i").out.split() == [f"{array}_[1-2]"]
    assert slurm("scancel", "-n", "arr", "-t", "PD").code == 0
    assert slurm("scancel", "-t", "R", "-v", first).err == f"scancel: Terminating job {first}\n"
    until(lambda: not states(slurm), "nothing is left")
    ran = slurm("squeue", "-h", "-t", "CA", "-j", f"{first},{after}", "-o", "%i %T")
    assert sorted(ran.out.splitlines()) == [f"{first} CANCELLED", f"{after} CANCELLED"]


def test_a_job_submitted_held_waits_until_it_is_released(slurm, tmp_path):
    (tmp_path / "held.sh").write_text("#!/bin/bash\n#SBATCH --gpus=1 --hold\ntrue\n")
    by_option = submitted(slurm("sbatch", "-H", "--gpus=1", "--wrap", "true"))
    by_script = submitted(slurm("sbatch", "held.sh"))
    submitted(slurm("sbatch", "-W", "--gpus=1", "--wrap", "true"))  # meanwhile others run
    for job in (by_option, by_script):
        assert slurm("squeue", "-h", "-j", job, "-o", "%t %R").out == "PD (JobHeldUser)\n"
        assert "JobState=PENDING Reason=JobHeldUser" in slurm("scontrol", "show", "job", job).out
    assert slurm("scontrol", "release", f"{by_option},{by_script}").code == 0
    until(lambda: not states(slurm), "both have run")
    ran = slurm("squeue", "-h", "-t", "CD", "-j", f"{by_option},{by_script}", "-o", "%i")
    assert sorted(ran.out.split()) == sorted([by_option, by_script])
    ran = slurm("sbatch", "--test-only", "-H", "--gpus=1", "--wrap", "true")
    assert ran.err == "sbatch: Job to wait: it is held until `thebes release` (no estimate)\n"


def test_after_any_end_of_another(slurm):
    fails = submitted(slurm("sbatch", "-H", "--gpus=1", "--wrap", "exit 3"))
    good = submitted(slurm("sbatch", "-H", "--gpus=1", "--wrap", "true"))
    behind = submitted(slurm("sbatch", "-d", f"afterok:{good},afterany:{fails}", "--gpus=1", "--wrap", "true"))
    strict = submitted(slurm("sbatch", "-d", f"afterok:{fails}", "--gpus=1", "--wrap", "true"))
    until_reason(slurm, behind, "Dependency")
    told = f"afterok:{good}(unfulfilled),afterany:{fails}(unfulfilled)"
    assert f"Reason=Dependency Dependency={told}\n" in slurm("scontrol", "show", "job", behind).out
    assert slurm("squeue", "-h", "-j", behind, "-o", "%r %E").out == f"Dependency afterok:{good},afterany:{fails}\n"
    slurm("scontrol", "release", fails)
    until(lambda: fails not in states(slurm), "it has failed")
    until(lambda: strict not in states(slurm), "it is cancelled")
    assert states(slurm)[behind] == "PD"
    slurm("scontrol", "release", good)
    until(lambda: not states(slurm), "all have ended")
    ran = slurm("squeue", "-h", "-t", "all", "-j", f"{fails},{good},{behind},{strict}", "-o", "%i %t")
    assert dict(line.split() for line in ran.out.splitlines()) == {fails: "F", good: "CD", behind: "CD", strict: "CA"}
    ran = slurm("sbatch", "-d", "afterany:999999", "--gpus=1", "--wrap", "true")
    assert ran.code == 1
    assert "--after-any 999999: there is no such job" in ran.err


def test_an_array_with_a_limit(slurm, tmp_path):
    script = "date +%s.%N >begin.$SLURM_ARRAY_TASK_ID; while [ ! -e go ]; do sleep 0.05; done; sleep 0.2\n"
    script += "date +%s.%N >end.$SLURM_ARRAY_TASK_ID"
    array = submitted(slurm("sbatch", "--array=0-5%2", "--gpus=1", "--wrap", script))
    until(lambda: list(states(slurm).values()).count("R") == 2, "two of them run")
    until_reason(slurm, f"{array}_5", "JobArrayTaskLimit")
    lines = dict(line.split() for line in slurm("squeue", "-h", "-t", "PD", "-o", "%i %R").out.splitlines())
    ((waiting, reason),) = lines.items()
    assert waiting == f"{array}_[2-5%2]"
    assert reason == "(JobArrayTaskLimit)"
    shown = slurm("scontrol", "show", "job", f"{array}_5").out
    assert f"ArrayJobId={array} ArrayTaskId=5 ArrayTaskThrottle=2 " in shown
    assert "Comment=its array runs at most 2 of its jobs at a time" in shown
    (tmp_path / "go").touch()
    until(lambda: not states(slurm), "all have ended")

    def told(name: str) -> float:
        return float((tmp_path / name).read_text())

    times = [(told(f"begin.{index}"), told(f"end.{index}")) for index in range(6)]
    for begin, _ in times:
        assert sum(other <= begin < end for other, end in times) <= 2, times
    assert min(range(2, 6), key=lambda index: times[index][0]) in (2, 3), "in the order of the indices"


def test_a_part_of_the_cluster_is_in_use(slurm, thebes):
    job = submitted(slurm("sbatch", "--gpus=2", "--wrap", "sleep 3600"))
    until(lambda: states(slurm).get(job) == "R", "it runs")
    node = slurm("squeue", "-h", "-o", "%N").out.strip()
    other = {"n0": "n1", "n1": "n0"}[node]
    assert slurm("sinfo").out.splitlines()[1:] == [
        f"thebes*      up   infinite      1    mix {node}",
        f"thebes*      up   infinite      1   idle {other}",
    ]
    assert thebes("drain", node, "--reason", "fan is loud").code == 0
    assert thebes("drain", other).code == 0
    assert slurm("sinfo", "-h", "-N", "-o", "%N %T %G").out.splitlines() == sorted(
        [f"{node} draining gpu:4", f"{other} drained gpu:4"]
    )
    assert "fan is loud" in slurm("sinfo", "-R").out
    shown = slurm("scontrol", "show", "node", node).out
    assert "State=MIXED+DRAIN" in shown
    assert "AllocTRES=gres/gpu=2" in shown
    assert "Reason=fan is loud" in shown
    assert slurm("sinfo", "-h", "-t", "idle").out.split() == ["thebes*", "up", "infinite", "0", "n/a"]
    assert slurm("sinfo", "-h", "-p", "gpu").out == ""
    for one in (node, other):
        assert thebes("undrain", one).code == 0


def test_requeue_starts_again_and_counts_time_anew(slurm):
    job = submitted(slurm("sbatch", "--gpus=1", "--signal=USR1@1", "--wrap", "sleep 3600"))
    until(lambda: states(slurm).get(job) == "R", "it runs")
    assert slurm("scontrol", "requeue", job).code == 0
    until(lambda: "Restarts=1" in slurm("scontrol", "show", "job", job).out and states(slurm).get(job) == "R", "again")
    assert slurm("squeue", "-h", "-j", job, "-o", "%M").out.startswith("0:0")


def test_test_only_asks_and_submits_nothing(slurm):
    ran = slurm("sbatch", "--test-only", "--gpus=4", "--wrap", "true")
    assert ran.code == 0
    assert ran.err.startswith("sbatch: Job to start at 20")
    assert ran.err.rstrip().endswith(" using 4 GPUs on nodes n0 in partition thebes")
    ran = slurm("sbatch", "--test-only", "-N", "9", "--gpus-per-node=4", "--wrap", "true")
    assert ran.code == 1
    assert "allocation failure: " in ran.err
    # With a limit, so that the answer does not hang on how many jobs have ended here before.
    job = submitted(slurm("sbatch", "-t", "30", "-N", "2", "--gpus-per-node=4", "--wrap", "sleep 3600"))
    until(lambda: states(slurm).get(job) == "R", "it runs")
    before = datetime.now()
    ran = slurm("sbatch", "--test-only", "--gpus=4", "--wrap", "true")
    assert ran.code == 0
    start = datetime.fromisoformat(ran.err.removeprefix("sbatch: Job to start at ").split()[0])
    assert timedelta(minutes=29) < start - before < timedelta(minutes=31)
    ran = slurm("sbatch", "--test-only", f"--dependency=afterok:{job}", "--gpus=4", "--wrap", "true")
    assert (ran.code, ran.err) == (0, f"sbatch: Job to wait: it waits for job {job} (no estimate)\n")
    assert list(states(slurm)) == [job]


def test_ids_that_nobody_has(slurm):
    assert slurm("squeue", "-j", "999999").code == 1
    assert slurm("squeue", "-j", "999999").err == "slurm_load_jobs error: Invalid job id specified\n"
    assert slurm("squeue", "-j", "999999,999998").out == HEAD + "\n"
    assert slurm("squeue", "-j", "abc").err == "squeue: error: Invalid job id: abc\n"
    ran = slurm("scancel", "999999")
    assert (ran.code, ran.err) == (0, "scancel: error: Kill job error on job id 999999: Invalid job id specified\n")
    assert slurm("scancel", "-Q", "999999").err == ""
    ran = slurm("scontrol", "show", "job", "999999")
    assert (ran.code, ran.err) == (1, "slurm_load_jobs error: Invalid job id specified\n")
    ran = slurm("scontrol", "hold", "999999")
    assert (ran.code, ran.err) == (1, "Invalid job id specified for job 999999\n")
    ran = slurm("scontrol", "show", "node", "zz")
    assert (ran.code, ran.err) == (1, "Node zz not found\n")


def test_members_of_an_array_that_ended_are_found_by_id(slurm):
    array = submitted(slurm("sbatch", "-W", "--array=1-3", "--gpus=1", "--wrap", "true"))
    assert slurm("squeue", "-h", "-j", array).out == ""
    ran = slurm("squeue", "-h", "-t", "all", "-j", f"{array}_[2-3],999999", "-o", "%i %t %N")
    assert [line.split()[:2] for line in ran.out.splitlines()] == [[f"{array}_2", "CD"], [f"{array}_3", "CD"]]
    assert f"{array}_1 CD" in slurm("squeue", "-h", "-t", "all", "-o", "%i %t").out


def test_what_the_cluster_refuses_is_told(slurm):
    ran = slurm("sbatch", "--gpus=99", "--wrap", "true")
    assert ran.code == 1
    assert ran.err.startswith("sbatch: error: ")
    assert "99 GPUs" in ran.err
    ran = slurm("sbatch", "-N", "2", "--gpus=3", "--wrap", "true")
    assert ran.code == 1
    assert "3 GPUs do not spread evenly over 2 nodes" in ran.err


def test_the_installed_commands_work_from_a_shell(instance, tmp_path, thebes):
    thebes("shims", "install", tmp_path / "bin")
    env = {**os.environ, "THEBES_DIR": str(instance), "PYTHONPATH": os.pathsep.join(sys.path)}
    env["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{env['PATH']}"
    script = "set -e; id=$(sbatch --parsable -W --gpus=1 -o out.txt --wrap 'echo done'); squeue -h -j $id\n"
    script += "cat out.txt; sinfo -h"
    ran = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "done\nthebes*      up   infinite      2   idle n[0-1]\n"
    assert set(commands.NAMES) == {path.name for path in (tmp_path / "bin").iterdir()}


def test_a_command_answers_quickly(slurm):
    """CPU time, and the least of some: other things, such as the collection of garbage, come in between."""

    def spent_s() -> float:
        began = time.process_time()
        slurm("squeue")
        return time.process_time() - began

    assert min(spent_s() for _ in range(5)) < 0.3
