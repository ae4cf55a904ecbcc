"""Real jobs under a real supervisor: how they start, are told to go, are stopped and end."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest

from kit.node_cluster import alive, connected, kill_hard, launch, python, run, shell
from kit.scripts import SAVES
from kit.waiting import PATIENCE_S, until_async
from thebes.node import processes
from thebes.protocol.clock import boot_s
from thebes.protocol.contract import Part, Refused

NEVER_ENDS = "while true; do sleep 0.05; done"
IGNORES_EVERYTHING = "trap '' TERM USR1 INT HUP; echo ready; while true; do sleep 0.05; done"


def test_a_job_runs_and_its_result_is_reported(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(shell("1", "echo hello; exit 3"))
            found = await cluster.ended("1")
            assert (found.cause, found.codes) == ("exit", {0: 3})
            assert found.started_s <= found.exited_s
            assert 0 < found.run_s <= found.exited_s - found.started_s + 0.001
            assert await cluster.log("1") == "hello\n"

    run(test())


def test_every_rank_knows_its_place(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(
                shell("2", "env", gpus=3, env={"MY_OWN": "x y"}, array_index=7, resumes=True, resume_from="/ckpt/5")
            )
            await cluster.ended("2")
            for rank in range(3):
                env = dict(line.split("=", 1) for line in (await cluster.log("2", rank=rank)).splitlines())
                assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(rank), str(rank), "3")
                assert env["CUDA_VISIBLE_DEVICES"] == "0,1,2"
                assert env["MY_OWN"] == "x y"
                assert env["MASTER_ADDR"] == "127.0.0.1"
                assert 20_000 <= int(env["MASTER_PORT"]) < 32_000
                assert env["THEBES_JOB_ID"] == "2"
                assert env["THEBES_ARRAY_INDEX"] == "7"
                assert (env["THEBES_RESUME"], env["THEBES_RESUME_FROM"]) == ("1", "/ckpt/5")
                assert env["THEBES_ATTEMPT_DIR"] == str(cluster.attempt("2"))

    run(test())


def test_when_one_rank_fails_the_others_are_stopped(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            script = f"if [ $RANK = 1 ]; then exit 7; fi; {NEVER_ENDS}"
            await cluster.engine.launch(shell("3", script, gpus=3))
            found = await cluster.ended("3")
            assert (found.cause, found.codes) == ("exit", {0: -15, 1: 7, 2: -15})

    run(test())


@pytest.mark.parametrize(
    ("job", "command", "workdir", "says"),
    [
        ("10", "/no/such/program", "/", "'/no/such/program' does not exist on node n0"),
        ("11", "no-such-program", "/", "'no-such-program' was not found in PATH on node n0"),
        ("12", "/bin/true", "/no/such/folder", "create it, or submit with another --workdir"),
        ("13", "/bin/true", "/etc/passwd", "name a directory with --workdir"),
        ("14", "/etc/passwd", "/", "chmod +x"),
    ],
)
def test_what_cannot_be_started_says_what_to_do(
    shared_agent: Path, job: str, command: str, workdir: str, says: str
) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(launch(job, command, workdir=workdir, gpus=2))
            found = await cluster.ended(job)
            assert found.cause == "launch-failed"
            assert says in found.detail

    run(test())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter every folder")
def test_a_work_directory_that_may_not_be_entered(shared_agent: Path, tmp_path: Path) -> None:
    async def test() -> None:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0)
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(launch("15", "/bin/true", workdir=str(closed)))
            found = await cluster.ended("15")
            assert found.cause == "launch-failed"
            assert "needs the right to enter it" in found.detail

    run(test())


@pytest.mark.parametrize(
    ("job", "text", "says"),
    [("16", "echo no interpreter named\n", "begin it with a line like #!/bin/bash"),
     ("17", "#!/no/such/shell\n", "names an interpreter in its first line that node n0 does not have")],
)  # fmt: skip
def test_a_script_that_the_kernel_cannot_run(
    shared_agent: Path, tmp_path: Path, job: str, text: str, says: str
) -> None:
    async def test() -> None:
        script = tmp_path / "train.sh"
        script.write_text(text)
        script.chmod(0o755)
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(launch(job, "./train.sh", workdir=str(tmp_path)))
            found = await cluster.ended(job)
            assert found.cause == "launch-failed"
            assert says in found.detail

    run(test())


def test_a_job_that_catches_usr1_saves_and_leaves_with_85(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(python("20", SAVES))
            await cluster.printed("20", "ready")
            await cluster.engine.notice("20", 1, 30.0)
            found = await cluster.ended("20")
            assert (found.cause, found.codes) == ("exit", {0: 85})
            notice = json.loads((cluster.attempt("20") / "notice").read_text())
            assert notice["grace_s"] == 30.0
            assert notice["deadline_s"] == pytest.approx(found.exited_s + 30, abs=20)

    run(test())


def test_a_handler_that_is_installed_after_the_notice_is_told_too(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            late = "import os, time\n"
            late += "while not os.path.exists(os.environ['THEBES_ATTEMPT_DIR'] + '/notice'): time.sleep(0.01)\n"
            late += "time.sleep(0.2)\n"
            await cluster.engine.launch(python("21", late + SAVES))
            await cluster.engine.notice("21", 1, 30.0)
            assert (await cluster.ended("21")).codes == {0: 85}

    run(test())


def test_a_job_that_does_not_catch_usr1_survives_the_notice_and_sees_the_file(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            script = "while [ ! -e $THEBES_ATTEMPT_DIR/notice ]; do sleep 0.02; done; sleep 1.2; echo saved; exit 85"
            await cluster.engine.launch(shell("22", script))
            await cluster.engine.notice("22", 1, 30.0)
            assert (await cluster.ended("22")).codes == {0: 85}
            assert await cluster.log("22") == "saved\n"

    run(test())


def test_a_job_that_ignores_all_signals_is_killed_at_the_deadline(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(shell("23", IGNORES_EVERYTHING, gpus=2, grace_s=600.0))
            for rank in (0, 1):
                await cluster.printed("23", "ready", rank=rank)
            begun_s = time.monotonic()
            await cluster.engine.notice("23", 1, 0.6)
            found = await cluster.ended("23")
            assert time.monotonic() - begun_s > 0.5
            assert (found.cause, found.codes) == ("killed", {0: -9, 1: -9})

    run(test())


def test_sigterm_comes_before_the_deadline(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(launch("24", "sleep", "1000"))
            await cluster.engine.notice("24", 1, 2.0)
            found = await cluster.ended("24")
            assert (found.cause, found.codes) == ("killed", {0: -15})
            assert found.run_s > 1.4

    run(test())


def test_a_job_may_save_when_it_is_terminated(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(shell("39", f"trap 'echo term; exit 85' TERM; echo ready; {NEVER_ENDS}"))
            await cluster.printed("39", "ready")
            await cluster.engine.terminate("39", 1, 60.0)
            found = await cluster.ended("39")
            assert (found.cause, found.codes) == ("exit", {0: 85})
            assert "term" in await cluster.log("39")

    run(test())


def test_daemons_of_a_job_go_with_it(shared_agent: Path) -> None:
    """One in a session of its own, with another parent and without our variables in its environment."""

    async def test() -> None:
        async with connected(shared_agent) as cluster:
            script = "(env -i setsid sleep 1000 & echo $!) ; (setsid sleep 1000 & echo $!); sleep 0.1"
            await cluster.engine.launch(shell("25", script))
            found = await cluster.ended("25")
            assert (found.cause, found.codes) == ("exit", {0: 0})
            pids = [int(word) for word in (await cluster.log("25")).split()]
            assert len(pids) == 2
            assert not any(alive(pid) for pid in pids)

    run(test())


def test_kill_takes_the_whole_tree_at_once(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            script = "trap '' TERM; (setsid bash -c 'trap \"\" TERM; sleep 1000 & echo $!; wait' &) ; sleep 1000"
            await cluster.engine.launch(shell("26", script))
            pid = int((await cluster.printed("26", "\n")).split()[0])
            await cluster.engine.kill("26", 1)
            await cluster.engine.kill("26", 1)
            found = await cluster.ended("26")
            assert (found.cause, found.codes) == ("killed", {0: -9})
            assert not alive(pid)
            await cluster.engine.kill("26", 1)  # as often as one likes

    run(test())


def test_a_time_limit_ends_a_job_as_a_timeout(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(shell("27", NEVER_ENDS, limit_s=0.4, grace_s=0.4))
            found = await cluster.ended("27")
            assert found.cause == "timeout"
            assert found.run_s > 0.6

    run(test())


def stopped(pid: int) -> bool:
    stat = processes.read_stat(pid)
    return stat is not None and stat.state == "T"


def test_a_frozen_job_does_nothing_and_its_clock_stands(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            script = "n=0; while true; do n=$((n+1)); echo $n; sleep 0.01; done"
            await cluster.engine.launch(shell("28", f"({script}) & {script}", gpus=2))
            await cluster.printed("28", "5\n")
            await cluster.engine.suspend("28", 1, "freeze")
            await cluster.engine.suspend("28", 1, "freeze")
            assert cluster.latest("28").state == "frozen"
            assert cluster.latest("28").suspend_took_s > 0
            # Whoever was just writing when the signal came still does so.
            supervisor = cluster.state("28")["supervisor"]
            await cluster.until(lambda: all(map(stopped, processes.descendants(supervisor))))
            before = await cluster.log("28")
            run_s = cluster.latest("28").run_s
            await asyncio.sleep(0.5)
            assert await cluster.log("28") == before
            assert [one.run_s for one in await cluster.engine.reports() if one.job_id == "28"] == [run_s]
            await cluster.engine.resume("28", 1, "freeze")
            again = await cluster.report("28", "running")
            assert again.run_s - run_s <= boot_s() - cluster.state("28")["since_s"]
            assert cluster.state("28")["run_s"] == run_s  # up to then

            async def goes_on() -> bool:
                return await cluster.log("28") != before

            await until_async(goes_on, "it writes again")
            await cluster.engine.suspend("28", 1, "freeze")
            await cluster.engine.kill("28", 1)
            assert (await cluster.ended("28")).cause == "killed"

    run(test())


def test_what_a_node_does_not_offer_is_refused(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(shell("29", NEVER_ENDS))
            with pytest.raises(Refused, match="does not offer 'cuda'"):
                await cluster.engine.suspend("29", 1, "cuda")
            with pytest.raises(Refused, match="send a notice"):
                await cluster.engine.suspend("29", 1, "checkpoint")
            await cluster.engine.kill("29", 1)
            await cluster.ended("29")
            with pytest.raises(Refused, match="has ended"):
                await cluster.engine.suspend("29", 1, "freeze")

    run(test())


def test_a_flood_of_output_is_cut_to_the_limit(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            script = "echo first; head -c 20000000 /dev/zero | tr '\\0' 'x' | fold -w 99; echo; echo last"
            await cluster.engine.launch(shell("30", script, log_limit_bytes=1 << 20))
            found = await cluster.ended("30")
            assert found.codes == {0: 0}
            path = cluster.attempt("30") / "rank-0.log"
            assert path.stat().st_size <= 1 << 20
            lines = path.read_text().splitlines()
            assert (lines[0], lines[-1]) == ("first", "last")
            dropped = next(line for line in lines if "bytes dropped here" in line)
            assert int(dropped.split()[1]) > 18_000_000

    run(test())


def test_progress_and_checkpoints_are_reported(shared_agent: Path) -> None:
    async def test() -> None:
        script = """
import json, os, time
folder = os.environ["THEBES_ATTEMPT_DIR"]
now = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
def put(name, value):
    with open(folder + "/.draft", "w") as file:
        file.write(json.dumps(value))
    os.rename(folder + "/.draft", folder + "/" + name)
first = now()
for step in range(10**9):
    put("progress", {"step": step, "at_s": now(), "first_step": 0, "first_at_s": first})
    if step == 20:
        put("checkpoint.json", {"step": 20, "path": "/ckpt/20", "at_s": now()})
        open(folder + "/ack", "w").close()
    time.sleep(0.02)
"""
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(python("31", script))

            def far() -> bool:
                latest = cluster.latest("31")
                return latest is not None and (latest.step or 0) >= 60

            await cluster.until(far)
            found = cluster.latest("31")
            assert (found.checkpoint_step, found.checkpoint_path, found.acknowledged) == (20, "/ckpt/20", True)
            assert found.first_step_s < found.checkpoint_s < found.step_s
            assert 0 < found.steps_per_s <= 50
            pushed = sum(getattr(one, "job_id", "") == "31" for one in cluster.heard)
            assert pushed <= 3 + (found.step_s - found.started_s) / 0.9
            await cluster.engine.kill("31", 1)
            await cluster.ended("31")

    run(test())


def test_steps_are_read_from_log_lines_by_a_pattern(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            script = 'for i in $(seq 1 100000); do echo "epoch 1 step $i loss 0.5"; sleep 0.02; done'
            await cluster.engine.launch(shell("32", script, progress_pattern=r"step (\d+)"))
            await cluster.until(lambda: cluster.latest("32") and (cluster.latest("32").step or 0) >= 60)
            found = cluster.latest("32")
            assert 0 < found.steps_per_s < 500  # when the agent looked, not when they were printed
            assert found.first_step_s is not None
            await cluster.engine.kill("32", 1)
            await cluster.ended("32")

    run(test())


def test_a_pattern_without_end_does_not_stop_the_agent(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            script = f"echo {'a' * 60}b; {NEVER_ENDS}"
            await cluster.engine.launch(shell("33", script, progress_pattern=r"((?:a+)+)$"))
            log = shared_agent / "log" / "agent-n0.jsonl"
            await cluster.until(lambda: "progress pattern given up" in log.read_text())
            await cluster.engine.kill("33", 1)
            await cluster.ended("33")

    run(test())


def test_a_full_disk_delays_the_result_and_does_not_lose_it(shared_agent: Path) -> None:
    """A limit of zero on the size of files is what a full disk is to the supervisor."""

    async def test() -> None:
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(shell("34", NEVER_ENDS))
            state = cluster.state("34")
            supervisor, rank = state["supervisor"], state["pids"]["0"]
            before = resource.prlimit(supervisor, resource.RLIMIT_FSIZE)
            resource.prlimit(supervisor, resource.RLIMIT_FSIZE, (0, before[1]))
            kill_hard(rank)
            await cluster.until(lambda: not alive(rank))
            await asyncio.sleep(0.7)
            assert cluster.state("34")["state"] == "running"
            assert alive(supervisor)
            resource.prlimit(supervisor, resource.RLIMIT_FSIZE, before)
            assert (await cluster.ended("34")).codes == {0: -9}

    run(test())


def test_a_supervisor_is_small_and_sleeps(shared_agent: Path) -> None:
    """Below 12 MB with all that it shares; typically 8 MB, of which 1 MB is its own."""

    async def test() -> None:
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(launch("35", "sleep", "1000", gpus=2))
            pid = cluster.state("35")["supervisor"]

            def fields() -> dict[str, str]:
                return dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())

            deadline = time.monotonic() + PATIENCE_S
            woken = ""
            while woken != (now := fields()["voluntary_ctxt_switches"]):  # it may still be about to lie down
                assert time.monotonic() < deadline, "it does not sleep"
                woken = now
                await asyncio.sleep(1.5)
            assert int(fields()["VmRSS"].split()[0]) < 12 * 1024
            assert fields()["Name"].strip() == "thebes 35.1"
            await cluster.engine.kill("35", 1)
            await cluster.ended("35")

    run(test())


def test_the_supervisor_runs_alone_with_nothing_but_the_standard_library(tmp_path: Path) -> None:
    import subprocess

    from thebes.node import supervisor

    os.mkfifo(tmp_path / "ctl")
    found = {
        "job_id": "1", "incarnation": 1, "node": "n0", "command": ["/bin/sh", "-c", "exit 4"], "workdir": "/",
        "env": {}, "ranks": [{"rank": 0, "env": {}}], "grace_s": 1.0, "limit_s": None, "log_limit_bytes": 1 << 20,
        "poke": str(tmp_path / "nobody"),
    }  # fmt: skip
    (tmp_path / "launch.json").write_text(json.dumps(found))
    subprocess.run([sys.executable, "-I", "-S", supervisor.__file__, str(tmp_path)], check=True, timeout=PATIENCE_S)
    state = json.loads((tmp_path / "state.json").read_text())
    assert (state["state"], state["cause"], state["codes"]) == ("exited", "exit", {"0": 4})


def test_sigterm_to_a_supervisor_ends_its_job_in_order(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(shell("36", NEVER_ENDS, gpus=2))
            os.kill(cluster.state("36")["supervisor"], signal.SIGTERM)
            found = await cluster.ended("36")
            assert (found.cause, found.codes) == ("killed", {0: -15, 1: -15})

    run(test())


def test_secrets_are_not_logged_and_files_are_the_owners(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(shell("37", "true", env={"TOKEN": "s3cr3t-value"}))
            await cluster.ended("37")
            with pytest.raises(Refused, match="has no GPU 99"):
                await cluster.engine.launch(
                    shell("38", "true", env={"TOKEN": "s3cr3t-value"}, parts=(Part("n0", (99,)),))
                )
            for path in (shared_agent / "log").iterdir():
                assert "s3cr3t-value" not in path.read_text()
            assert (cluster.attempt("37") / "launch.json").stat().st_mode & 0o077 == 0
            assert cluster.attempt("37").stat().st_mode & 0o077 == 0
            assert "s3cr3t-value" not in repr(shell("37", "true", env={"TOKEN": "s3cr3t-value"}))

    run(test())


def test_no_interpreter_is_started_for_a_job(shared_agent: Path) -> None:
    """That is what takes time. How much it takes is measured in benchmarks/live.py."""

    async def test() -> None:
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(shell("40", NEVER_ENDS))
            supervisor = cluster.state("40")["supervisor"]
            assert Path(f"/proc/{supervisor}/cmdline").read_bytes().split(b"\0")[-2] == b"--nursery"
            await cluster.engine.kill("40", 1)
            await cluster.ended("40")

    run(test())


def test_logs_are_read_by_offset(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(shell("50", "printf 0123456789"))
            await cluster.ended("50")
            read = cluster.engine.read_log
            assert await read("50", 1, 0, 0, 4) == (b"0123", 4)
            assert await read("50", 1, 0, 4, 100) == (b"456789", 10)
            assert await read("50", 1, 0, 10, 100) == (b"", 10)
            assert await read("50", 1, 0, -3, 100) == (b"789", 10)
            assert await read("50", 1, 0, -300, 2) == (b"01", 2)
            assert await read("50", 1, 0, 9999, 100) == (b"", 10)
            with pytest.raises(FileNotFoundError, match="no log of rank 1"):
                await read("50", 1, 1, 0, 4)
            for bad in ("../../../x", "50/../50", ""):
                with pytest.raises(FileNotFoundError):
                    await read(bad, 1, 0, 0, 4)

    run(test())


def test_a_forgotten_attempt_is_not_reported_again_but_its_log_stays(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(shell("51", f"echo here; {NEVER_ENDS}"))
            with pytest.raises(Refused, match="is alive"):
                await cluster.engine.forget("51", 1)
            await cluster.printed("51", "here")
            await cluster.engine.kill("51", 1)
            await cluster.ended("51")
            await cluster.engine.forget("51", 1)
            await cluster.engine.forget("51", 1)
            assert "51" not in [one.job_id for one in await cluster.engine.reports()]
            assert await cluster.log("51") == "here\n"
            await cluster.engine.launch(shell("51", "echo again"))  # a late repeat of the start changes nothing
            assert await cluster.log("51") == "here\n"

    run(test())
