"""Gangs over several agents through the engine: all parts or none, and every wish reaches every part."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from kit.node_cluster import agents, alive, connected, kill_hard, make_folder, run, shell, start_agent
from kit.waiting import until_async
from thebes.engine import link, local
from thebes.protocol import wire
from thebes.protocol.contract import Engine, Gpu, Launch, NodeChange, NodeFacts, Part, Refused, Report

NEVER_ENDS = "while true; do sleep 0.05; done"
BOTH = (Part("n0", (0, 1)), Part("n1", (2,)))


def test_the_local_engine_fulfils_the_contract() -> None:
    engine: Engine = local.LocalEngine("/tmp", ["n0"])
    assert engine is not None


def test_what_travels_arrives_as_it_was() -> None:
    launch = shell("1", "true", parts=BOTH, env={"A": "b"}, limit_s=5.0, array_index=3, progress_pattern=r"(\d)")
    report = Report("1", 2, "n0", "exited", "killed", codes={0: -9, 1: 85}, started_s=1.5, step=7)
    facts = NodeFacts("n0", (Gpu(0, "GPU-1", "H200", 139.8),), pid=5, mechanisms=("checkpoint", "cuda"))
    for value, to, back in (
        (launch, wire.launch_to_dict, wire.launch_from_dict),
        (report, wire.report_to_dict, wire.report_from_dict),
        (facts, wire.facts_to_dict, wire.facts_from_dict),
    ):
        assert back(json.loads(wire.encode(to(value)))) == value


def test_the_ranks_of_all_nodes_find_each_other(two_nodes: Path) -> None:
    """Rank 0 listens at MASTER_ADDR:MASTER_PORT and every other rank says its number there."""

    async def test() -> None:
        script = """
import os, socket, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
print(os.environ["NODE_RANK"], os.environ["LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
if rank == 0:
    server = socket.create_server(where)
    print(sorted(int(server.accept()[0].recv(10)) for _ in range(world - 1)), flush=True)
else:
    while True:
        try:
            socket.create_connection(where).sendall(str(rank).encode())
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
"""
        async with connected(two_nodes, "n0", "n1") as cluster:
            command = (sys.executable, "-c", script)
            await cluster.engine.launch(Launch("1", 1, BOTH, command, "/"))
            one, other = await cluster.ended("1", node="n0"), await cluster.ended("1", node="n1")
            assert (one.codes, other.codes) == ({0: 0, 1: 0}, {2: 0})
            assert await cluster.log("1", rank=0) == "0 0 0,1\n[1, 2]\n"
            assert await cluster.log("1", rank=2) == "1 0 2\n"

    run(test())


def test_one_part_that_cannot_start_fails_the_whole_gang(two_nodes: Path) -> None:
    async def test() -> None:
        async with connected(two_nodes, "n0", "n1") as cluster:
            # n1 refuses: it has seen a newer incarnation of this job.
            await cluster.engine.launch(shell("2", "true", incarnation=9, parts=(Part("n1", (0,)),)))
            await cluster.ended("2", 9, node="n1")
            with pytest.raises(Refused, match="older than 9"):
                await cluster.engine.launch(shell("2", NEVER_ENDS, incarnation=5, parts=BOTH))
            found = await cluster.ended("2", 5, node="n0")
            assert found.cause == "launch-failed"
            assert "another part of the gang could not start" in found.detail
            assert "older than 9" in found.detail

    run(test())


def test_a_gang_whose_program_is_missing_is_launch_failed_on_all_nodes(two_nodes: Path) -> None:
    async def test() -> None:
        async with connected(two_nodes, "n0", "n1") as cluster:
            await cluster.engine.launch(Launch("3", 1, BOTH, ("no-such-program",), "/"))
            for node in ("n0", "n1"):
                found = await cluster.ended("3", node=node)
                assert found.cause == "launch-failed"
                assert "was not found in PATH" in found.detail

    run(test())


def test_a_gang_with_an_unreachable_node_does_not_half_start(tmp_path: Path) -> None:
    async def test() -> None:
        folder = make_folder(tmp_path / "c", {"n0": 4, "n1": 4})
        with agents(folder, "n0"):
            async with connected(folder, "n0", "n1") as cluster:
                with pytest.raises(OSError, match="n1 cannot be reached"):
                    await cluster.engine.launch(shell("1", NEVER_ENDS, parts=BOTH))
                assert (await cluster.ended("1")).cause == "launch-failed"
                with pytest.raises(Refused, match="no node 'n7'"):
                    await cluster.engine.launch(shell("2", NEVER_ENDS, parts=(Part("n7", (0,)),)))

    run(test())


def test_notice_freeze_resume_and_kill_reach_every_part(two_nodes: Path) -> None:
    async def test() -> None:
        async with connected(two_nodes, "n0", "n1") as cluster:
            await cluster.engine.launch(shell("4", NEVER_ENDS, parts=BOTH))
            for node in ("n0", "n1"):
                await cluster.report("4", "running", node=node)
            with pytest.raises(Refused, match="several nodes"):
                await cluster.engine.suspend("4", 1, "cuda")
            await cluster.engine.suspend("4", 1, "freeze")
            assert {cluster.latest("4", node=node).state for node in ("n0", "n1")} == {"frozen"}
            await cluster.engine.resume("4", 1, "freeze")
            assert {cluster.latest("4", node=node).state for node in ("n0", "n1")} == {"running"}
            await cluster.engine.notice("4", 1, 0.4)
            for node in ("n0", "n1"):
                assert (await cluster.ended("4", node=node)).cause == "killed"
            assert {one.node for one in await cluster.engine.reports() if one.job_id == "4"} == {"n0", "n1"}
            await cluster.engine.forget("4", 1)
            assert not [one for one in await cluster.engine.reports() if one.job_id == "4"]

    run(test())


def test_one_part_that_is_lost_leaves_the_other_to_the_controller(two_nodes: Path) -> None:
    async def test() -> None:
        async with connected(two_nodes, "n0", "n1") as cluster:
            await cluster.engine.launch(shell("5", NEVER_ENDS, parts=BOTH))
            kill_hard(cluster.state("5", node="n0")["supervisor"])
            assert (await cluster.ended("5", node="n0")).cause == "lost"
            pid = cluster.state("5", node="n1")["pids"]["2"]
            assert alive(pid)
            await cluster.engine.kill("5", 1)
            assert (await cluster.ended("5", node="n1")).cause == "killed"
            assert not alive(pid)

    run(test())


def test_an_agent_that_hangs_is_down_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(link, "PING_EVERY_S", 0.2)
        monkeypatch.setattr(link, "PING_S", 0.5)
        folder = make_folder(tmp_path / "c", {"n0": 4})
        with agents(folder) as running:
            async with connected(folder) as cluster:
                cluster.heard.clear()
                os.kill(running["n0"].pid, signal.SIGSTOP)
                down = await cluster.until(lambda: [one for one in cluster.heard if _is(one, alive=False)])
                assert "agent" in down[0].facts.detail
                os.kill(running["n0"].pid, signal.SIGCONT)
                await cluster.until(lambda: _is(cluster.heard[-1], alive=True))

    run(test())


def test_two_controllers_may_listen_and_one_that_leaves_does_no_harm(two_nodes: Path) -> None:
    async def test() -> None:
        async with connected(two_nodes, "n0", "n1") as one:
            async with connected(two_nodes, "n0", "n1") as other:
                await one.engine.launch(shell("6", NEVER_ENDS))
                await other.report("6", "running")
            await one.engine.kill("6", 1)
            assert (await one.ended("6")).cause == "killed"

    run(test())


def test_an_engine_opened_before_the_agents_finds_them(tmp_path: Path) -> None:
    async def test() -> None:
        folder = make_folder(tmp_path / "c", {"n0": 4})
        async with connected(folder) as cluster:
            assert [one.facts.alive for one in cluster.heard] == [False]
            agent = start_agent(folder)
            try:
                await cluster.until(lambda: _is(cluster.heard[-1], alive=True))
            finally:
                agent.kill()
                agent.wait()

    run(test())


def test_a_listener_that_fails_does_not_cost_the_connection(two_nodes: Path) -> None:
    async def test() -> None:
        heard: list[object] = []

        def clumsy(news: object) -> None:
            heard.append(news)
            if isinstance(news, NodeChange) or news.state == "running":
                raise KeyError("clumsy")

        engine = local.LocalEngine(two_nodes, ["n0"])
        await engine.open(clumsy)

        async def is_up() -> bool:
            return (await engine.nodes())[0].alive

        def has_ended() -> bool:
            return any(isinstance(one, Report) and one.job_id == "7" and one.state == "exited" for one in heard)

        await until_async(is_up, "the agent answers")
        await engine.launch(shell("7", "sleep 0.2"))
        await until_async(has_ended, "the job is told as ended")
        await engine.close()

    run(test())


def _is(news: object, alive: bool) -> bool:
    return isinstance(news, NodeChange) and news.facts.alive is alive
