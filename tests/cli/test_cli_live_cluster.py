"""The live commands against a running cluster: two nodes of four virtual GPUs, one instance for the whole file."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kit.waiting import PATIENCE_S, until
from thebes.cli.live import ACTIVE, WAITING
from thebes.client import Client, ServerError

THEBES = (sys.executable, "-c", "import thebes.cli; thebes.cli.main()")
UNTIL_GO = "while [ ! -e go ]; do sleep 0.05; done"  # a job that ends when told


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("live") / "t"
    # The first `up` of a version compiles the policies, which takes minutes on a busy machine.
    subprocess.run(
        [*THEBES, "up", "--virtual-gpus", "4", "--nodes", "2", "--dir", str(folder)], check=True, timeout=600
    )
    yield folder
    subprocess.run([*THEBES, "down", "--now", "--dir", str(folder)], check=True, timeout=300)


@pytest.fixture
def live(
    instance: Path, thebes: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Runs a command in this process, in an empty work directory; quicker than a new process each time.

    What is left afterwards is cancelled: each test finds an idle cluster, whatever was before it.
    """
    for name in ("THEBES_URL", "THEBES_TOKEN", "THEBES_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("THEBES_DIR", str(instance))
    monkeypatch.chdir(tmp_path)
    yield thebes
    with Client(dir=instance) as client:
        left = [job["id"] for job in client.jobs(state=[*ACTIVE, *WAITING])]
        for job in left:
            with suppress(ServerError):  # it has just ended
                client.cancel(job)
        assert all(client.wait(job, PATIENCE_S)["done"] for job in left)


@pytest.fixture
def submit(live) -> Callable[..., str]:
    def run(*words: object) -> str:
        ran = live("submit", *words)
        assert ran.code == 0, ran.err
        assert ran.out.strip().isdigit()
        return ran.out.strip()

    return run


@pytest.fixture
def finished(live, submit) -> Callable[..., str]:
    """Submits, waits for completion, and returns the id."""

    def run(*words: object) -> str:
        job = submit(*words)
        ran = live("wait", job, "--timeout", PATIENCE_S)
        assert ran.code == 0, ran.err
        return job

    return run


def show(live, job: str) -> dict[str, Any]:
    return json.loads(live("show", job, "-o", "json").out)


def state_of(live, job: str) -> str:
    return show(live, job)["state"]


def until_told(live, job: str, reason: str) -> None:
    """A job that was submitted is stored; why it waits is known a moment later."""
    until(lambda: show(live, job)["reason"] == reason, reason)


# submit


def test_submit_prints_the_id_alone_and_the_job_runs(live) -> None:
    ran = live("submit", "--name", "hello", "--gpus", "2", "--time", "5", "--", "sh", "-c", "echo rank $RANK in $PWD")
    job = ran.out.strip()
    assert ran.out == f"{job}\n"
    assert f"job {job}: 2 GPUs, at most 5m 00s" in ran.err
    assert live("wait", job).code == 0
    assert live("logs", job).out == f"rank 0 in {Path.cwd()}\n"
    assert live("logs", job, "--rank", "1").out == f"rank 1 in {Path.cwd()}\n"
    found = show(live, job)
    assert (found["state"], found["exit_code"], found["name"], found["gpus"]) == ("completed", 0, "hello", 2)
    assert found["spec"]["time_s"] == 300
    assert len(found["attempts"]) == 1


def test_environment_goes_along(live, finished, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_SHELL", "shell")
    job = finished("--env", "GIVEN=a=b", "--", "sh", "-c", 'echo "$FROM_SHELL $GIVEN"')
    assert live("logs", job).out == "shell a=b\n"
    job = finished("--export", "PATH", "--", "sh", "-c", 'echo "[$FROM_SHELL]"')
    assert live("logs", job).out == "[]\n"


def test_a_job_file_and_options_over_it(live, finished) -> None:
    Path("data").mkdir()
    Path("job.yaml").write_text(
        "name: from-file\ngpus: 4\nworkdir: data\nenv: {LR: 0.10}\nrun: |\n  echo $THEBES_GPUS $LR\n  pwd\n"
    )
    job = finished("-f", "job.yaml", "--gpus", "1")
    assert live("logs", job).out == f"1 0.10\n{Path.cwd() / 'data'}\n"
    assert show(live, job)["name"] == "from-file"
    assert finished("job.yaml")


def test_a_script_with_slurm_lines(live) -> None:
    Path("train.sh").write_text(
        "#!/bin/bash\n#SBATCH -J slurm --gres=gpu:2 --mem=4G\n#SBATCH -t 10\n"
        "echo $0 $* $SLURM_JOB_ID $RANK/$WORLD_SIZE\n"
    )
    ran = live("submit", "--wait", "train.sh", "--lr", "3")
    assert ran.code == 0
    assert "1 #SBATCH option is not used here: --mem" in ran.err
    job = ran.out.strip()
    assert live("logs", job).out == f"train.sh --lr 3 {job} 0/1\n"  # once, though it has two GPUs
    assert (show(live, job)["gpus"], show(live, job)["spec"]["time_s"]) == (2, 600)


def test_a_script_after_dashes_is_a_command(live, finished) -> None:
    Path("run.sh").write_text("#!/bin/sh\n#SBATCH -J ignored\necho $RANK\n")
    Path("run.sh").chmod(0o755)
    job = finished("--gpus", "2", "--", "./run.sh")
    assert show(live, job)["name"] != "ignored"
    assert live("logs", job, "--rank", "1").out == "1\n"


def test_follow_and_the_exit_code_of_a_failure(live) -> None:
    ran = live("submit", "--follow", "--", "sh", "-c", "echo before; exit 3")
    job, _, output = ran.out.partition("\n")
    assert (ran.code, output) == (1, "before\n")
    assert f"{job}: failed, exit code 3" in ran.err


def test_a_time_limit_ends_a_job(live, submit) -> None:
    job = submit("--time", "1s", "--grace", "0", "--", "sleep", "3600")
    assert live("wait", job, "--timeout", PATIENCE_S).code == 1
    assert state_of(live, job) == "timeout"


def test_the_same_key_is_the_same_job(submit) -> None:
    assert submit("--key", "once", "--", "true") == submit("--key", "once", "--", "true")


def test_a_snapshot_is_what_runs(live, submit) -> None:
    Path("code.sh").write_text("echo first\n")
    gate = submit("--gpus", "1", "--", "sh", "-c", UNTIL_GO)
    job = submit("--snapshot", "--after", gate, "--", "sh", "code.sh")
    Path("code.sh").write_text("echo second\n")
    Path("go").touch()
    assert live("wait", job, "--timeout", PATIENCE_S).code == 0
    assert live("logs", job).out == "first\n"
    assert "(a snapshot of it)" in live("show", job).out


def test_submit_as_json(live) -> None:
    told = json.loads(live("submit", "-o", "json", "--array", "1-2", "--", "true").out)
    assert told["ids"] == [f"{told['id']}_1", f"{told['id']}_2"]


def test_a_missing_work_directory_is_pointed_out(live) -> None:
    ran = live("submit", "--workdir", "nowhere", "--", "true")
    assert "does not exist on this machine" in ran.err
    assert live("wait", ran.out.strip(), "--timeout", PATIENCE_S).code == 1


# plans and refusals


def test_dry_run(live) -> None:
    ran = live("submit", "--dry-run", "--gpus", "4", "--", "true")
    assert ran.code == 0
    assert "would start now" in ran.out
    plan = json.loads(live("submit", "--dry-run", "-o", "json", "--gpus", "4", "--", "true").out)
    assert plan["starts"] == "now"
    never = live("submit", "--dry-run", "--gpus", "9", "--", "true")
    assert never.code == 1
    assert "would never start" in never.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "9", "--", "true"), "9 GPUs"),
        (("--gpus", "0", "--", "true"), "--gpus: must be at least 1, not 0"),
        (("--nodes", "3", "--gpus", "3", "--", "true"), "nodes"),
        (("--after", "999999", "--", "true"), "--after 999999: there is no such job"),
        (("--after-any", "999999", "--", "true"), "--after-any 999999: there is no such job"),
    ],
)
def test_jobs_that_cannot_be(live, words: tuple[str, ...], message: str) -> None:
    ran = live("submit", *words)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert "→" in ran.err


def test_what_the_server_refuses_is_told_with_its_line(live) -> None:
    Path("job.yaml").write_text("run: 'true'\nlauncher: torchrum\n")
    ran = live("submit", "-f", "job.yaml")
    assert ran.code == 2
    assert "job.yaml, line 2: launcher: 'torchrum' is not known" in ran.err
    assert "did you mean 'torchrun'?" in ran.err


@pytest.mark.parametrize(
    "words",
    [("show",), ("logs",), ("attach",), ("wait",), ("events",), ("cancel",), ("hold",), ("release",), ("requeue",)],
)
def test_an_unknown_job(live, words: tuple[str, ...]) -> None:
    ran = live(*words, "999999")
    assert ran.code in (1, 2)
    assert "no job 999999" in ran.err
    assert "Traceback" not in ran.err


# arrays, dependencies, verbs


def test_an_array(live, submit) -> None:
    job = submit("--array", "1-5:2", "--name", "sweep", "--", "sh", "-c", "echo index $THEBES_ARRAY_INDEX")
    assert live("wait", job, "--timeout", PATIENCE_S).code == 0
    assert live("logs", f"{job}_3").out == "index 3\n"
    told = live("show", job).out
    assert "3 completed" in told
    assert f"{job}_5" in told
    ran = live("logs", job)
    assert ran.code == 2
    assert f"Name one of them: {job}_1" in ran.err


def test_verbs_on_several_jobs(live, submit) -> None:
    first, second = submit("--", "sleep", "3600"), submit("--", "sleep", "3600")
    ran = live("cancel", first, "999999", second)
    assert ran.code == 1
    assert f"{first}: cancelled" in ran.err
    assert f"{second}: cancelled" in ran.err
    assert "there is no job 999999" in ran.err
    assert live("wait", first, second).code == 1
    again = live("cancel", first)
    assert again.code == 1
    assert f"job {first} has ended already" in again.err


def test_hold_and_release(live, submit) -> None:
    gate = submit("--gpus", "8", "--", "sleep", "3600")
    job = submit("--gpus", "8", "--", "true")
    assert live("hold", job).code == 0
    assert state_of(live, job) == "held"
    live("cancel", gate)
    assert live("wait", gate).code == 1
    assert state_of(live, job) == "held"
    assert live("release", job).code == 0
    assert live("wait", job, "--timeout", PATIENCE_S).code == 0


def test_submitted_held(live, submit) -> None:
    Path("job.yaml").write_text("run: 'true'\nhold: true\n")
    ran = live("submit", "-f", "job.yaml")
    job = ran.out.strip()
    assert f"note: it is held; `thebes release {job}` lets it start." in ran.err
    until_told(live, job, "held by its user")
    assert "held by its user" in live("ps").out
    assert live("wait", submit("--", "true"), "--timeout", PATIENCE_S).code == 0
    assert state_of(live, job) == "held"
    assert live("release", job).code == 0
    assert live("wait", job, "--timeout", PATIENCE_S).code == 0
    assert live("wait", submit("--no-hold", "-f", "job.yaml"), "--timeout", PATIENCE_S).code == 0, (
        "options override the file"
    )
    told = live("submit", "--dry-run", "--hold", "--", "true").out
    assert told.splitlines() == ["would wait", "  because    it is held until `thebes release`"]


def test_after_any(live, submit) -> None:
    first = submit("--hold", "--", "false")
    job = submit("--after-any", first, "--", "true")
    until_told(live, job, f"waits for job {first}")
    told = live("show", job).out
    assert f"waits for job {first}" in told
    assert f"of {first}, in whatever way" in told
    assert (show(live, job)["after"], show(live, job)["after_any"]) == ([], [first])
    live("release", first)
    assert live("wait", first, "--timeout", PATIENCE_S).code == 1
    assert live("wait", job, "--timeout", PATIENCE_S).code == 0


def test_an_array_with_a_limit(live, submit) -> None:
    ran = live("submit", "--array", "0-3%1", "--", "sh", "-c", UNTIL_GO)
    job = ran.out.strip()
    assert f"array {job}: 1 GPU, 4 jobs, 1 at a time." in ran.err
    until_told(live, f"{job}_3", "its array runs at most 1 of its jobs at a time")
    assert show(live, f"{job}_3")["array_limit"] == 1
    assert "its array runs at most 1 of its jobs at a time" in live("show", f"{job}_3").out
    assert "at a time       at most 1" in live("show", job).out
    listed = json.loads(live("ps", "-o", "json").out)["jobs"]
    assert [one["reason"] for one in listed if one["id"] == f"{job}_3"] == [show(live, f"{job}_3")["reason"]]
    Path("go").touch()
    assert live("wait", job, "--timeout", PATIENCE_S).code == 0
    starts = [show(live, f"{job}_{index}")["first_start_s"] for index in range(4)]
    ends = [show(live, f"{job}_{index}")["end_s"] for index in range(4)]
    assert starts == sorted(starts)
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    told = live("submit", "--dry-run", "--array", "0-3%1", "--", "true").out
    assert "  note       of its 4 jobs at most 1 runs at a time; the others follow in turn" in told


def test_cancelling_an_array_ends_all_of_it(live, submit) -> None:
    job = submit("--array", "1-3", "--", "sleep", "3600")
    assert f"{job}: cancelled (3 jobs)" in live("cancel", job).err
    assert live("wait", job, "--timeout", PATIENCE_S).code == 1
    assert show(live, job)["states"] == {"cancelled": 3}


def test_preempt_resumes_and_logs_tell_both_starts(live, submit) -> None:
    script = (
        'trap "exit 85" USR1; echo start $THEBES_INCARNATION; '
        "[ $THEBES_RESUME = 1 ] && exit 0; while :; do sleep 0.05; done"
    )
    job = submit("--", "bash", "-c", script)
    until(lambda: "start 1" in live("logs", job).out, "the first start")
    until(lambda: state_of(live, job) == "running", "the controller knows of it")
    assert live("preempt", job, "--grace", PATIENCE_S).code == 0
    assert live("wait", job, "--timeout", PATIENCE_S).code == 0
    ran = live("logs", job)
    assert ran.out == "start 1\nstart 2\n"
    assert f"start 1 of job {job} ended" in ran.err
    assert live("logs", job, "--incarnation", "1").out == "start 1\n"
    told = live("show", job).out
    assert "2, preempted 1×" in told
    assert "lost work" in told


def test_requeue_runs_it_again(live, finished) -> None:
    job = finished("--", "sh", "-c", "echo again")
    assert live("requeue", job).code == 0
    assert live("wait", job, "--timeout", PATIENCE_S).code == 0
    assert live("logs", job).out == "again\nagain\n"


def test_wait_times_out(live, submit) -> None:
    job = submit("--", "sleep", "3600")
    ran = live("wait", job, "--timeout", "0.1")
    assert ran.code == 124
    assert f"{job}: not ended yet" in ran.err
    told = json.loads(live("wait", job, "--timeout", "0", "-o", "json").out)
    assert told["jobs"][0]["done"] is False
    live("cancel", job)


# lists


def test_ps(live, finished, submit) -> None:
    done, running = (
        finished("--name", "ended", "--", "true"),
        submit("--name", "alive", "--gpus", "3", "--", "sleep", "3600"),
    )
    until(lambda: state_of(live, running) == "running", "it runs")
    lines = live("ps").out.splitlines()
    assert lines[0].split()[:4] == ["ID", "NAME", "STATE", "GPUS"]
    ids = [line.split()[0] for line in lines[1:]]
    assert ids.index(running) < ids.index(done)
    told = json.loads(live("ps", "-o", "json", "--name", "alive", "--state", "running").out)
    assert [job["id"] for job in told["jobs"]] == [running]
    assert told["next"] is None
    assert {"id", "name", "user", "state", "reason", "gpus", "submit_s", "run_s", "exit_code"} <= told["jobs"][0].keys()
    assert "PREEMPTED" in live("ps", "-o", "wide").out
    assert "no jobs" in live("ps", "-u", "nobody-at-all").out
    live("cancel", running)


@pytest.mark.parametrize("more", [(), ("-a",), ("--state", "completed,failed,cancelled")])
def test_lists_page(live, finished, more: tuple[str, ...]) -> None:
    finished("--array", "1-4", "--", "true")
    whole = [job["id"] for job in json.loads(live("ps", "-A", "-o", "json", "--limit", "1000", *more).out)["jobs"]]
    seen, cursor = [], None
    while True:
        words = ("--cursor", cursor) if cursor else ()
        page = json.loads(live("ps", "-A", "-o", "json", "--limit", "3", *more, *words).out)
        seen += [job["id"] for job in page["jobs"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert seen == whole
    assert len(whole) >= 4


def test_events(live, finished) -> None:
    job = finished("--", "true")
    told = live("events", job).out
    assert "submitted" in told
    assert "completed" in told
    lately = json.loads(live("events", job, "-o", "json", "--limit", "1").out)
    assert lately["events"][0]["kind"] in ("completed", "state")
    assert lately["next"] is None
    page = json.loads(live("events", job, "-o", "json", "--after", "0", "--limit", "2").out)
    assert len(page["events"]) == 2
    assert page["next"] == page["events"][-1]["seq"]
    rest = json.loads(live("events", job, "-o", "json", "--after", page["next"]).out)
    assert rest["events"][-1]["kind"] in ("completed", "state")
    assert rest["next"] is None
    assert job in live("events").out


def test_nodes_drain_and_undrain(live) -> None:
    assert [node["name"] for node in json.loads(live("nodes", "-o", "json").out)["nodes"]] == ["n0", "n1"]
    assert live("drain", "n1", "--reason", "new fan").code == 0
    line = next(line for line in live("nodes").out.splitlines() if line.startswith("n1"))
    assert "drained" in line
    assert "new fan" in line
    assert "would start now" not in live("submit", "--dry-run", "--gpus", "8", "--", "true").out
    assert live("undrain", "n1").code == 0
    assert "drained" not in live("nodes").out
    ran = live("drain", "n7")
    assert ran.code == 2
    assert "n7" in ran.err


def test_top_prints_one_frame(live, submit) -> None:
    job = submit("--name", "seen", "--gpus", "2", "--", "sleep", "3600")
    until(lambda: state_of(live, job) == "running", "it runs")
    told = live("top", "--once").out
    assert "of 8 GPUs held" in told
    assert "seen" in told
    assert next(line for line in told.splitlines() if line.startswith("n0")).count(job) >= 1
    live("cancel", job)


def test_replay_makes_the_same_decisions(live, finished) -> None:
    finished("--", "true")
    ran = live("replay")
    assert ran.code == 0, ran.out
    assert "all the same" in ran.out
    told = json.loads(live("replay", "-o", "json").out)
    assert told["different"] == 0
    one = live("replay", "--decision", told["decisions"][-1]["seq"])
    assert "the same again" in one.out
    assert live("replay", "--decision", "99999999").code == 2


def test_ones_own_jobs_and_those_of_others(live, submit, instance: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(dir=instance) as client:
        token = client.create_token("bob")["token"]
    mine = submit("--name", "mine", "--", "sleep", "3600")
    monkeypatch.setenv("THEBES_TOKEN", token)
    his = submit("--name", "his", "--", "sleep", "3600")
    assert [job["id"] for job in json.loads(live("ps", "-o", "json").out)["jobs"]] == [his]
    assert "mine" not in live("ps", "-A").out
    assert live("cancel", mine).code == 1
    assert live("drain", "n0").code == 2
    monkeypatch.delenv("THEBES_TOKEN")
    assert " his " not in live("ps").out
    assert " his " in live("ps", "-A").out
    assert " his " in live("ps", "-u", "bob").out
    live("cancel", mine, his)


def test_commands_need_little_time_of_their_own(live, instance: Path) -> None:
    """CPU time, which does not depend on what else the machine does, beside that of a program that loads the same
    packages and does nothing: so a slow machine does not matter. The server's share is not in it."""
    packages = min(cpu_time_s([sys.executable, "-c", "import httpx, typer"]) for _ in range(3))
    for words in (("ps",), ("nodes",), ("submit", "--dry-run", "--", "true")):
        spent_s = min(cpu_time_s([*THEBES, *words]) for _ in range(2))
        assert spent_s < 2 * packages, (words, packages)


def cpu_time_s(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# output


def test_the_last_lines_of_a_log(live, finished) -> None:
    job = finished("--", "sh", "-c", "seq 1 30000")
    assert live("logs", job, "-n", "2").out == "29999\n30000\n"
    assert live("logs", job, "-n", "0").out == ""
    assert live("logs", job, "-n", "20000").out.startswith("10001\n")
    assert live("logs", job).out.splitlines() == [str(number) for number in range(1, 30001)]


def test_a_rank_that_is_not_there(live, finished) -> None:
    ran = live("logs", finished("--", "true"), "--rank", "7")
    assert "7" in ran.err or ran.out == ""
    assert "Traceback" not in ran.err


def test_logs_of_a_job_that_waits(live, submit) -> None:
    submit("--gpus", "8", "--", "sleep", "3600")
    job = submit("--gpus", "8", "--", "true")
    assert f"job {job} has not started yet (queued" in live("logs", job).err


def start(instance: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*THEBES, *words],
        env={**os.environ, "THEBES_DIR": str(instance), "PYTHONUNBUFFERED": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_attach_detaches_and_the_job_goes_on(live, submit, instance: Path) -> None:
    job = submit("--", "sh", "-c", "echo first; exec sleep 3600")
    watcher = start(instance, "attach", job)
    assert watcher.stdout is not None
    assert watcher.stdout.readline() == "first\n"
    watcher.send_signal(signal.SIGINT)
    _, told = watcher.communicate(timeout=PATIENCE_S)
    assert watcher.returncode == 0
    assert f"detached; job {job} goes on" in told
    until(lambda: state_of(live, job) == "running", "it runs")
    live("cancel", job)


def test_logs_are_followed_to_the_end(live, submit, instance: Path) -> None:
    job = submit("--", "sh", "-c", f"echo one; {UNTIL_GO}; echo two")
    reader = start(instance, "logs", "-f", job)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "one\n"
    Path("go").touch()
    rest, _ = reader.communicate(timeout=PATIENCE_S)
    assert (rest, reader.returncode) == ("two\n", 0)


def test_events_are_watched(live, submit, instance: Path) -> None:
    watcher = start(instance, "events", "-w", "-o", "json")
    assert watcher.stdout is not None
    watcher.stdout.readline()  # it has begun
    job = submit("--", "true")
    for line in watcher.stdout:
        event = json.loads(line)
        if (event["job_id"], event["kind"]) == (job, "completed"):
            break
    watcher.send_signal(signal.SIGINT)
    watcher.communicate(timeout=PATIENCE_S)
    assert watcher.returncode == 0


def test_a_shell_with_the_jobs_environment(finished, instance: Path) -> None:
    job = finished("--env", "MINE=yes", "--", "true")
    shell = start(instance, "attach", "--shell", job, SHELL="/usr/bin/env")
    told, _ = shell.communicate(timeout=PATIENCE_S)
    assert "MINE=yes" in told
    assert f"THEBES_JOB_ID={job}" in told
