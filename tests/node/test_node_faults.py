"""Agents and supervisors that are killed: what lives goes on, what is left over is ended, no result is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from kit.node_cluster import (
    agents,
    alive,
    connected,
    kill_hard,
    launch,
    make_folder,
    python,
    run,
    shell,
    start_agent,
)
from kit.waiting import PATIENCE_S, until
from thebes.node import processes
from thebes.protocol.clock import boot_id
from thebes.protocol.contract import NodeChange, Refused

NEVER_ENDS = "while true; do sleep 0.05; done"


DAEMONS = f"(setsid bash -c 'echo $$; {NEVER_ENDS}' &); (env -i setsid bash -c 'echo $$; {NEVER_ENDS}' &); {NEVER_ENDS}"


def test_when_a_supervisor_is_killed_ranks_and_daemons_go_and_it_is_lost(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(shell("60", DAEMONS, gpus=2))
            await cluster.until(lambda: _lines(cluster.attempt("60") / "rank-0.log") == 2)
            await cluster.until(lambda: _lines(cluster.attempt("60") / "rank-1.log") == 2)
            state = cluster.state("60")
            pids = [*state["pids"].values()]
            for rank in (0, 1):
                pids += [int(word) for word in (await cluster.log("60", rank=rank)).split()]
            assert len(pids) == 6
            assert all(alive(pid) for pid in pids)
            kill_hard(state["supervisor"])
            found = await cluster.ended("60")
            assert (found.cause, found.codes) == ("lost", {})
            assert "supervisor was killed" in found.detail
            assert not any(alive(pid) for pid in pids)
            assert found.run_s > 0
            assert cluster.state("60")["cause"] == "lost"

    run(test())


def test_a_job_goes_on_without_an_agent_and_the_next_one_adopts_it(own_folder: Path) -> None:
    async def test() -> None:
        with agents(own_folder) as running:
            async with connected(own_folder) as cluster:
                await cluster.engine.launch(shell("1", f"echo up; {NEVER_ENDS}"))
                await cluster.engine.launch(shell("2", "read line < <(sleep 0.5); exit 4"))
                await cluster.printed("1", "up")
                rank = cluster.state("1")["pids"]["0"]
                running["n0"].kill()
                running["n0"].wait()
                until(lambda: cluster.state("2")["state"] == "exited")
                assert alive(rank)
                assert cluster.state("1")["state"] == "running"
                cluster.heard.clear()
                running["n0"] = start_agent(own_folder)
                assert (await cluster.ended("2")).codes == {0: 4}
                assert (await cluster.report("1", "running")).started_s is not None
                assert alive(rank)
                await cluster.engine.notice("1", 1, 0.4)
                assert (await cluster.ended("1")).cause == "killed"
                assert not alive(rank)

    run(test())


def test_sigterm_to_the_agent_leaves_the_jobs_alone(own_folder: Path) -> None:
    async def test() -> None:
        with agents(own_folder) as running:
            async with connected(own_folder) as cluster:
                await cluster.engine.launch(shell("1", NEVER_ENDS))
                running["n0"].terminate()
                assert running["n0"].wait(PATIENCE_S) == 0
                assert alive(cluster.state("1")["pids"]["0"])
                cluster.heard.clear()
                running["n0"] = start_agent(own_folder)
                assert (await cluster.report("1", "running")).state == "running"

    run(test())


def test_supervisor_and_agent_killed_together_leave_nothing_behind(own_folder: Path) -> None:
    async def test() -> None:
        with agents(own_folder) as running:
            async with connected(own_folder) as cluster:
                daemon = f"(setsid bash -c 'echo $$; {NEVER_ENDS}' &); {NEVER_ENDS}"
                await cluster.engine.launch(shell("1", daemon))
                pid = int((await cluster.printed("1", "\n")).split()[0])
                running["n0"].kill()
                kill_hard(cluster.state("1")["supervisor"])
                running["n0"].wait()
                assert alive(pid)
                running["n0"] = start_agent(own_folder)
                assert (await cluster.ended("1")).cause == "lost"
                assert not alive(pid)

    run(test())


def test_an_adopted_supervisor_that_is_killed_is_noticed(own_folder: Path) -> None:
    async def test() -> None:
        with agents(own_folder) as running:
            async with connected(own_folder) as cluster:
                await cluster.engine.launch(shell("1", NEVER_ENDS))
                running["n0"].kill()
                running["n0"].wait()
                running["n0"] = start_agent(own_folder)
                cluster.heard.clear()
                state = cluster.state("1")
                kill_hard(state["supervisor"])
                assert (await cluster.ended("1")).cause == "lost"
                assert not alive(state["pids"]["0"])

    run(test())


def test_an_agent_killed_while_it_starts_a_job_starts_it_once_or_not_at_all(own_folder: Path) -> None:
    async def test() -> None:
        with agents(own_folder) as running:
            for number in range(6):
                await killed_while_starting(running, str(number + 1), after_s=0.004 * number)

    async def killed_while_starting(running: dict[str, Any], job: str, after_s: float) -> None:
        async with connected(own_folder) as cluster:
            start = asyncio.ensure_future(cluster.engine.launch(launch(job, "sleep", "1000")))
            await asyncio.sleep(after_s)
            running["n0"].kill()
            running["n0"].wait()
            running["n0"] = start_agent(own_folder)
            await asyncio.gather(start, return_exceptions=True)
            await cluster.met(running["n0"].pid)
            await cluster.engine.launch(launch(job, "sleep", "1000"))
            await cluster.until(lambda: cluster.latest(job) and cluster.latest(job).state != "starting")
            found = cluster.latest(job)
            assert found.state == "running" or found.cause == "lost"
            mark = f"THEBES_ATTEMPT_DIR={cluster.attempt(job)}".encode()
            ranks = [pid for pid in processes.all_pids() if mark in processes.environment(pid).split(b"\0")]
            assert len(ranks) == (1 if found.state == "running" else 0)

    run(test())


def test_an_older_incarnation_is_refused_and_a_newer_one_ends_the_older_first(own_folder: Path) -> None:
    async def test() -> None:
        with agents(own_folder) as running:
            async with connected(own_folder) as cluster:
                stubborn = f"trap '' TERM; echo up; {NEVER_ENDS}"
                await cluster.engine.launch(shell("1", stubborn, incarnation=2))
                first = cluster.state("1", 2)["pids"]["0"]
                with pytest.raises(Refused, match="older than 2"):
                    await cluster.engine.launch(shell("1", NEVER_ENDS, incarnation=1))
                await cluster.engine.launch(shell("1", NEVER_ENDS, incarnation=2))  # known: nothing happens
                assert cluster.state("1", 2)["pids"]["0"] == first
                await cluster.engine.launch(shell("1", NEVER_ENDS, incarnation=5))
                assert not alive(first)
                older, newer = cluster.state("1", 2), cluster.state("1", 5)
                assert older["exited_s"] < newer["started_s"]
                running["n0"].kill()
                running["n0"].wait()
                running["n0"] = start_agent(own_folder)
                await cluster.met(running["n0"].pid)
                with pytest.raises(Refused, match="older than 5"):
                    await cluster.engine.launch(shell("1", NEVER_ENDS, incarnation=4))
                assert (own_folder / "nodes" / "n0" / "fence" / "1").read_text() == "5\n"

    run(test())


def test_a_kill_that_overtakes_its_start_wins(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            await cluster.engine.kill("61", 3)
            with pytest.raises(Refused, match="older"):
                await cluster.engine.launch(shell("61", NEVER_ENDS, incarnation=3))
            await cluster.engine.launch(shell("61", "true", incarnation=4))
            assert (await cluster.ended("61", 4)).codes == {0: 0}

    run(test())


def test_a_supervisor_that_does_not_answer_is_killed_by_a_kill(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(shell("62", NEVER_ENDS))
            state = cluster.state("62")
            os.kill(state["supervisor"], signal.SIGSTOP)
            await cluster.engine.launch(shell("62", "true", incarnation=2))
            assert (await cluster.ended("62", 2)).codes == {0: 0}
            assert cluster.latest("62", 1).cause == "lost"
            assert not alive(state["pids"]["0"])

    run(test())


def test_a_nursery_that_is_killed_or_hangs_is_replaced(own_folder: Path) -> None:
    async def test() -> None:
        with agents(own_folder) as running:
            async with connected(own_folder) as cluster:
                await cluster.engine.launch(shell("1", NEVER_ENDS))
                for number, blow in enumerate((signal.SIGKILL, signal.SIGSTOP)):
                    agent = running["n0"].pid
                    (nursery,) = [pid for pid in processes.children(agent) if os.getsid(pid) == os.getsid(agent)]
                    os.kill(nursery, blow)
                    await cluster.engine.launch(shell(str(number + 2), "exit 6"))
                    assert (await cluster.ended(str(number + 2))).codes == {0: 6}
                await cluster.engine.launch(shell("4", NEVER_ENDS))
                kill_hard(cluster.state("4")["supervisor"])
                assert (await cluster.ended("4")).cause == "lost"
                assert alive(cluster.state("1")["pids"]["0"])  # its parent is the agent now: it is no stray

    run(test())


def test_an_agent_that_is_away_is_told_and_its_return_too(own_folder: Path) -> None:
    async def test() -> None:
        with agents(own_folder) as running:
            async with connected(own_folder) as cluster:
                await cluster.engine.launch(shell("1", NEVER_ENDS))
                cluster.heard.clear()
                running["n0"].kill()
                running["n0"].wait()
                begun_s = time.monotonic()
                down = await cluster.until(lambda: cluster.heard and cluster.heard[0])
                assert isinstance(down, NodeChange)
                assert not down.facts.alive
                assert "agent" in down.facts.detail
                assert len(down.facts.gpus) == 8  # what it had
                assert time.monotonic() - begun_s > 0.8  # it may be back in a moment
                with pytest.raises(OSError, match="cannot be reached"):
                    await cluster.engine.kill("1", 1)
                running["n0"] = start_agent(own_folder)
                await cluster.report("1", "running")
                up = cluster.heard[1]
                assert isinstance(up, NodeChange)
                assert up.facts.alive
                assert up.facts.pid == running["n0"].pid
                assert [one.alive for one in await cluster.engine.nodes()] == [True]

    run(test())


def test_an_agent_that_is_back_within_a_second_is_told_with_its_reports_and_was_never_down(own_folder: Path) -> None:
    async def test() -> None:
        with agents(own_folder) as running:
            async with connected(own_folder) as cluster:
                await cluster.engine.launch(shell("1", NEVER_ENDS))
                cluster.heard.clear()
                begun_s = time.monotonic()
                running["n0"].kill()
                running["n0"].wait()
                running["n0"] = start_agent(own_folder)
                await cluster.report("1", "running")
                if time.monotonic() - begun_s < 1.0:
                    told = [one.facts for one in cluster.heard if isinstance(one, NodeChange)]
                    assert [(facts.alive, facts.pid) for facts in told] == [(True, running["n0"].pid)]

    run(test())


def test_an_agent_that_never_answers_does_not_stop_the_engine(own_folder: Path) -> None:
    async def test() -> None:
        async with connected(own_folder, "n0", "n1") as cluster:
            assert [one.alive for one in await cluster.engine.nodes()] == [False, False]
            with pytest.raises(OSError, match="cannot be reached"):
                await cluster.engine.launch(shell("1", "true"))

    run(test())


def test_after_a_restart_of_the_machine_running_jobs_are_lost_and_nobody_is_hit(own_folder: Path) -> None:
    """Files of another boot, naming processes of this one."""

    async def test() -> None:
        attempt, began_s = own_folder / "nodes" / "n0" / "attempts" / "7.3", time.time()
        attempt.mkdir(parents=True)
        (own_folder / "nodes" / "n0" / "open").mkdir()
        (own_folder / "nodes" / "n0" / "open" / "7.3").write_text("")
        (attempt / "lock").write_text(f"{os.getpid()}\n")
        state = {
            "state": "running", "started_s": 9e8, "since_s": 9e8, "run_s": 5.0, "boot": "another", "at_s": 9e8 + 1,
            "wall_s": began_s - 60, "supervisor": os.getsid(0), "group": os.getpgid(0), "pids": {"0": os.getpid()},
        }  # fmt: skip
        (attempt / "state.json").write_text(json.dumps(state))
        assert state["boot"] != boot_id()
        with agents(own_folder):
            async with connected(own_folder) as cluster:
                found = await cluster.ended("7", 3)
                assert (found.cause, found.run_s) == ("lost", 5.0)
                assert "restarted" in found.detail
                assert 60.5 < found.exited_s - found.started_s < 61.5 + time.time() - began_s

    run(test())


def test_two_instances_with_the_same_job_numbers_do_not_touch_each_other(own_folder: Path, shared_agent: Path) -> None:
    async def test() -> None:
        with agents(own_folder):
            async with connected(own_folder) as one, connected(shared_agent) as other:
                for cluster in (one, other):
                    await cluster.engine.launch(shell("63", NEVER_ENDS))
                kill_hard(one.state("63")["supervisor"])
                assert (await one.ended("63")).cause == "lost"
                assert alive(other.state("63")["pids"]["0"])
                await other.engine.kill("63", 1)
                await other.ended("63")

    run(test())


def test_a_second_agent_of_a_node_is_turned_away(shared_agent: Path) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "thebes.node.agent", str(shared_agent), "n0"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert second.returncode == 4
    assert "agent-n0 runs already" in second.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "cannot be used"), ('{"nodes": []}', "names no node 'n0'"), ('{"nodes": 3}', "cannot be used")],
)
def test_a_configuration_that_cannot_be_used_says_so(tmp_path: Path, text: str, says: str) -> None:
    import subprocess
    import sys

    (tmp_path / "config.json").write_text(text)
    command = [sys.executable, "-m", "thebes.node.agent", str(tmp_path), "n0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert found.returncode == 2
    assert says in found.stderr
    assert "Traceback" not in found.stderr


def test_a_folder_with_a_long_path_works(tmp_path: Path) -> None:
    async def test() -> None:
        folder = make_folder(tmp_path / ("x" * 100) / ("y" * 100), {"n0": 2})
        with agents(folder):
            async with connected(folder) as cluster:
                await cluster.engine.launch(shell("1", "exit 2"))
                assert (await cluster.ended("1")).codes == {0: 2}

    run(test())


def test_spoilt_files_of_a_job_are_taken_as_missing(shared_agent: Path) -> None:
    async def test() -> None:
        script = """
import os
folder = os.environ["THEBES_ATTEMPT_DIR"]
for name, text in (("progress", "{" * 100000), ("checkpoint.json", '{"step": "many", "path": 3, "at_s": 1e999}')):
    with open(folder + "/" + name, "w") as file:
        file.write(text)
"""
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(python("64", script))
            found = await cluster.ended("64")
            assert found.codes == {0: 0}
            assert (found.step, found.checkpoint_step, found.checkpoint_path, found.checkpoint_s) == (None,) * 4

    run(test())


def _lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0
