"""The Slurm engine where the conformance suite cannot look: others' jobs, drains, daemons that die, cut-off nodes.

Four nodes of 8 GPUs; n4 is in a network namespace of its own.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit.components import require
from kit.engine_worlds import Called, Told, opened, order_of_ends, processes_of, python
from kit.slurm_cluster import SlurmCluster, slurm_cluster
from thebes.engine.slurm.commands import AllocationRequest, NodeGroup
from thebes.engine.slurm.engine import SlurmEngine
from thebes.protocol.contract import GpusTaken, Launch, NodeFacts, Part, Refused
from thebes.protocol.lease import over_s

require("slurm")
pytestmark = pytest.mark.slurm

LEASE_S = 30.0  # longer than any machine stalls
SHORT_LEASE_S = 6.0  # for those who wait for its end
NEVER_ENDS = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.05)"
SAVES = """
import os, signal, time
def save(*_):
    os.write(1, b"saved\\n"); os._exit(85)
signal.signal(signal.SIGUSR1, save); signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True: time.sleep(0.05)
"""


class World(Called):
    """A world of the conformance suite, with its cluster at hand."""

    def __init__(self, slurm: SlurmCluster, shared: Path, **site: Any) -> None:
        nodes = list(slurm.names)
        self.lease_s = LEASE_S

        def make(found: Any) -> SlurmEngine:
            return SlurmEngine(replace(found, lease_s=self.lease_s))

        super().__init__("slurm", nodes, shared, make, home_host=slurm.address, **site)
        self.slurm = slurm


@contextmanager
def world_with(folder: Path, **options: Any) -> Iterator[World]:
    with slurm_cluster(**options) as slurm, pytest.MonkeyPatch.context() as patch:
        for name, value in slurm.env.items():
            patch.setenv(name, value)
        yield World(slurm, folder)
        slurm.until(lambda: not slurm.queue(), "no Slurm job left behind")
        slurm.until(lambda: not slurm.leftovers(), "no process left behind", told=slurm.leftovers)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    options: dict[str, Any] = {"nodes": 4, "namespaced": ("n4",), "switches": 2, "slurmd_timeout_s": 10}
    with world_with(tmp_path_factory.mktemp("slurm"), **options) as found:
        yield found


def at(launch: Launch, *parts: tuple[str, tuple[int, ...]]) -> Launch:
    return replace(launch, parts=tuple(Part(node, gpus) for node, gpus in parts))


def facts_of(told: Told, node: str) -> NodeFacts:
    return told.engine.facts.by_node[node]  # type: ignore[attr-defined]


def await_no_job(world: World) -> None:
    """Before a slurmd is killed: Slurm would ask it about a job that it winds up again only much later."""
    world.slurm.until(lambda: not world.slurm.queue(), "Slurm to have no job")


async def kill_and_wait(told: Told, launch: Launch) -> None:
    await told.engine.kill(launch.job_id, launch.incarnation)
    for part in launch.parts:
        await told.ended(launch, part.node)


def test_racks_and_addresses_are_told(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            nodes = await told.engine.nodes()
            assert [(node.name, node.rack) for node in nodes] == [
                ("n1", "rack1"),
                ("n2", "rack1"),
                ("n3", "rack2"),
                ("n4", "rack2"),
            ]
            assert [node.address for node in nodes] == [world.slurm.addresses[node.name] for node in nodes]

    asyncio.run(story())


def test_gpus_of_other_peoples_jobs_are_respected(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with opened(world) as told:
            world.slurm.command("salloc", "-Q", "--no-shell", "-N1", "-wn2", "--gres=gpu:g3:1", user="nobody")
            launch = at(python(world, "pass"), ("n2", (3,)))
            with monkeypatch.context() as patch:
                patch.setattr("thebes.engine.slurm.asking.GIVEN_WITHIN_S", 2)  # it is not given, however long we wait
                with pytest.raises(GpusTaken, match=r"n2 GPU 3 has Slurm job \d+ of nobody"):
                    await told.engine.launch(launch)
            taken = {gpu.index: gpu.taken for gpu in facts_of(told, "n2").gpus if gpu.taken}
            assert list(taken) == [3]
            assert taken[3].endswith("of nobody")
            beside = at(python(world, "pass"), ("n2", (2, 4)))
            await told.engine.launch(beside)
            assert (await told.ended(beside, "n2")).codes == {0: 0, 1: 0}
            world.slurm.command("scancel", "-u", "nobody")
            await told.until(lambda: not facts_of(told, "n2").gpus[3].taken, "the GPU to be free again")
            await told.engine.launch(launch)  # nothing was left of the first try
            await told.ended(launch, "n2")

    asyncio.run(story())


class Unreachable(World):
    """Nodes are told to call an address that is their own."""

    def engine(self) -> SlurmEngine:
        found = super().engine()
        assert isinstance(found, SlurmEngine)
        return SlurmEngine(replace(found.site, home_host="127.0.0.1"), found.slurm)


def test_a_node_that_cannot_call_us_is_named_and_left_alone_for_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thebes.engine.slurm.launching.CALLED_WITHIN_S", 12.0)  # enough for n3, which does call
    lost = Unreachable(world.slurm, world.shared)

    async def story() -> None:
        async with opened(lost) as told:
            home = told.engine.homes[0]  # type: ignore[attr-defined]
            launch = at(python(world, "pass"), ("n4", (0,)), ("n3", (0,)))
            with pytest.raises(Refused) as refused:
                await told.engine.launch(launch)
            assert str(refused.value) == (
                f"no call from node n4 within 12 s ({home}: [Errno 111] Connection refused): nodes must reach {home}; "
                "if not, name an address of this machine that they do with `thebes up --home`"
            )
            await told.until(lambda: all(gpu.taken for gpu in facts_of(told, "n4").gpus), "n4 to be left alone")
            assert facts_of(told, "n4").gpus[7].taken == f"a step on its node did not call us at {home}"
            assert not any("did not call" in gpu.taken for gpu in facts_of(told, "n3").gpus)
            beside = at(python(world, "pass"), ("n3", (0, 1)))
            await told.engine.launch(beside)
            await told.ended(beside, "n3")

    asyncio.run(story())


def test_a_node_that_does_not_see_the_shared_folder_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thebes.engine.slurm.launching.CALLED_WITHIN_S", 120.0)
    await_no_job(world)
    world.slurm.kill_slurmd("n3")
    hide = f"mount -t tmpfs none {world.shared}; exec slurmd -D -N n3 -f {world.slurm.conf}"
    world.slurm._host.ask(start="slurmd-n3", argv=["unshare", "-m", "bash", "-c", hide])
    blind = ("srun", "-Q", "-w", "n3", "--immediate=10", "test", "!", "-e", str(world.shared / "slurm"))
    world.slurm.until(lambda: world.slurm._try(*blind), "n3 to be back, and not to see it")

    async def story() -> None:
        async with opened(world) as told:
            launch = at(python(world, "pass"), ("n3", (0,)), ("n1", (0,)))
            began = time.monotonic()
            with pytest.raises(Refused) as refused:
                await told.engine.launch(launch)
            assert time.monotonic() - began < 60  # srun has said so: nobody waits for a call
            assert str(refused.value).startswith("the step did not come up on node n3 (")
            assert "No such file or directory): nodes must see " in str(refused.value)
            assert str(world.shared) in str(refused.value)
            assert "thebes up --shared" in str(refused.value)

    try:
        asyncio.run(story())
    finally:
        await_no_job(world)
        world.slurm.kill_slurmd("n3")
        world.slurm.start_slurmd("n3")
        world.slurm.until(world.slurm.all_idle, "n3 as before")


def test_drains_are_followed(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            world.slurm.drain("n3", "new disk")
            await told.until(lambda: facts_of(told, "n3").drained == "new disk", "the drain")
            assert facts_of(told, "n3").alive
            world.slurm.resume("n3")
            await told.until(lambda: not facts_of(told, "n3").drained, "the end of the drain")

    asyncio.run(story())


def test_slurmctld_may_die_and_come_back(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            stays, goes = at(python(world, SAVES), ("n1", (0,))), at(python(world, SAVES), ("n1", (1,)), ("n2", (1,)))
            for launch in (stays, goes):
                await told.engine.launch(launch)
                await told.printed(launch, "ready")
            world.slurm.kill_slurmctld()
            await told.engine.notice(goes.job_id, 1, 20.0)
            for part in goes.parts:
                assert 85 in (await told.ended(goes, part.node)).codes.values()
            new = at(python(world, "pass"), ("n1", (2,)))
            with pytest.raises(OSError, match="slurmctld does not answer"):
                await told.engine.launch(new)
            world.slurm.start_slurmctld()
            await told.until(lambda: facts_of(told, "n1").alive, "the node to be there")
            deadline = time.monotonic() + 120
            while True:  # as the controller does
                try:
                    await told.engine.launch(new)
                    break
                except (OSError, GpusTaken):
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.5)
            assert (await told.ended(new, "n1")).codes == {0: 0}
            assert (await told.report(stays, "running")).state == "running"
            await kill_and_wait(told, stays)

    asyncio.run(story())


def test_a_slurmd_that_is_back_soon_costs_nothing(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            launch = at(python(world, NEVER_ENDS), ("n1", (0,)))
            await told.engine.launch(launch)
            await told.printed(launch, "ready")
            world.slurm.kill_slurmd("n1")
            world.slurm.start_slurmd("n1")
            await asyncio.sleep(3)
            assert (await told.report(launch, "running")).state == "running"
            assert processes_of(launch)
            await kill_and_wait(told, launch)

    asyncio.run(story())


def test_a_node_whose_slurmd_is_gone_is_down_and_its_job_saves_and_goes(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            launch = at(python(world, SAVES), ("n2", (0,)))
            await told.engine.launch(launch)
            await told.printed(launch, "ready")
            world.slurm.kill_slurmd("n2")
            try:
                await told.until(lambda: not facts_of(told, "n2").alive, "the node to be down", 120.0)
                end = await told.ended(launch, "n2")
                assert 85 in end.codes.values()
                assert not processes_of(launch)
            finally:
                world.slurm.start_slurmd("n2")
            await told.until(lambda: facts_of(told, "n2").alive, "the node to be up", 120.0)

    asyncio.run(story())


def test_a_node_that_is_cut_off_stops_its_job_before_anybody_takes_it_for_lost(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "lease_s", SHORT_LEASE_S)
    monkeypatch.setattr("thebes.engine.silence.PAUSE_S", 1.5)  # a pause of this machine is one of its nodes, too

    async def story() -> None:
        async with opened(world) as told:
            launch = at(python(world, NEVER_ENDS), ("n4", (0, 1)))
            await told.engine.launch(launch)
            await told.printed(launch, "ready")
            world.slurm.cut_off("n4")
            try:
                seen_s, told_s = await order_of_ends(told, launch, "n4")
                print(f"the last process was seen {told_s - seen_s:.2f} s before it was told as lost")
                assert seen_s < told_s
                assert (await told.ended(launch, "n4")).cause == "lost"
                again = at(replace(launch, incarnation=2), ("n1", (0, 1)))
                await told.engine.launch(again)
                await told.printed(again, "ready")
                assert not processes_of(launch)
                await kill_and_wait(told, again)
            finally:
                world.slurm.heal("n4")
            await told.until(lambda: facts_of(told, "n4").alive, "the node to be up", 120.0)

    asyncio.run(story())


def test_a_controller_that_is_away_costs_no_job_while_slurmctld_is_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "lease_s", SHORT_LEASE_S)

    async def story() -> None:
        async with opened(world) as told:
            launch = at(python(world, NEVER_ENDS), ("n1", (0,)), ("n4", (5,)))
            await told.engine.launch(launch)
            await told.printed(launch, "ready", 1)
        await asyncio.sleep(over_s(SHORT_LEASE_S))
        assert len(processes_of(launch)) == 2
        async with opened(world) as told:
            mine = [report for report in await told.engine.reports() if report.job_id == launch.job_id]
            states = {report.node: report.state for report in mine}
            assert states == {"n1": "running", "n4": "running"}
            await kill_and_wait(told, launch)

    asyncio.run(story())


def test_an_allocation_of_a_controller_that_died_is_given_back(world: World) -> None:
    async def story() -> None:
        engine = world.engine()
        request = AllocationRequest("thebes-conform1-x.1", "", (NodeGroup(("n1",), "gpu:g0:1", 1),), 5)
        await engine.slurm.allocate(request)  # type: ignore[attr-defined]
        assert world.slurm.queue()
        async with opened(world) as told:
            await told.until(lambda: not world.slurm.queue(), "the allocation to go back")

    asyncio.run(story())


def test_allocations_go_back_without_a_controller(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            launch = at(python(world, "import time; time.sleep(2)"), ("n1", (0,)), ("n2", (0,)))
            await told.engine.launch(launch)
        world.slurm.until(lambda: not world.slurm.queue(), "the allocation to go back")
        async with opened(world) as told:
            ends = [report for report in await told.engine.reports() if report.job_id == launch.job_id]
            assert [(end.cause, end.codes) for end in ends] == [("exit", {0: 0}), ("exit", {1: 0})]
            await told.engine.forget(launch.job_id, 1)

    asyncio.run(story())


@pytest.mark.parametrize(("script", "codes"), [(SAVES, {0: 85}), (NEVER_ENDS, {0: -15})], ids=["saves", "does not"])
def test_what_slurm_ends_is_asked_to_save_and_is_not_the_jobs_fault(
    world: World, script: str, codes: dict[int, int]
) -> None:
    async def story() -> None:
        async with opened(world) as told:
            launch = at(python(world, script), ("n3", (7,)))
            await told.engine.launch(launch)
            await told.printed(launch, "ready")
            job = next(job for job, _, name, _ in world.slurm.queue() if name.endswith(f"-{launch.job_id}.1"))
            world.slurm.command("scancel", job)
            end = await told.ended(launch, "n3")
            assert end.codes == codes
            assert end.cause == ("exit" if script == SAVES else "lost")

    asyncio.run(story())


def test_a_step_that_is_killed_is_lost_and_its_ranks_go_with_it(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            launch = at(python(world, NEVER_ENDS), ("n1", (0,)), ("n2", (0,)))
            await told.engine.launch(launch)
            await told.printed(launch, "ready", 1)
            for pid, line in world.slurm.leftovers():
                if "step.pyc" in line and "srun" not in line:
                    os.kill(pid, 9)
            for node in ("n1", "n2"):
                assert (await told.ended(launch, node)).cause == "lost"
            assert not processes_of(launch)

    asyncio.run(story())


# Sites that are set up in other ways ---------------------------------------------------------------------------------


VISIBLE = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(600)"


def test_without_exact_ids_slurm_chooses_and_its_choice_is_used(tmp_path: Path) -> None:
    async def story() -> None:
        async with opened(world) as told:
            first = at(python(world, VISIBLE, ranks_per_node=1), ("n1", (6, 7)))
            second = at(python(world, VISIBLE, ranks_per_node=1), ("n1", (0, 1, 2)), ("n2", (5,)))
            await told.engine.launch(first)
            assert (await told.printed(first, "\n")).strip() == "0,1"
            await told.engine.launch(second)
            assert (await told.printed(second, "\n")).strip() == "2,3,4"
            assert (await told.printed(second, "\n", 1)).strip() == "0"
            world.slurm.command("salloc", "-Q", "--no-shell", "-N1", "-wn1", "--gres=gpu:1", user="nobody")
            await told.until(lambda: any(gpu.taken for gpu in facts_of(told, "n1").gpus), "the other job to be seen")
            taken = [gpu.index for gpu in facts_of(told, "n1").gpus if gpu.taken]
            assert len(taken) == 1
            assert not set(taken) & {6, 7, 0, 1, 2}
            for launch in (first, second):
                await kill_and_wait(told, launch)
            world.slurm.command("scancel", "-u", "nobody")

    with world_with(tmp_path, nodes=2, exact_ids=False) as world:
        asyncio.run(story())


def test_where_slurm_gives_whole_nodes_the_rest_of_them_is_taken(tmp_path: Path) -> None:
    async def story() -> None:
        async with opened(world) as told:
            launch = at(python(world, VISIBLE, ranks_per_node=1), ("n1", (2, 5)))
            await told.engine.launch(launch)
            assert (await told.printed(launch, "\n")).strip() == "2,5"
            await told.until(lambda: facts_of(told, "n1").gpus[0].taken, "the rest to be taken")
            taken = {gpu.index: gpu.taken for gpu in facts_of(told, "n1").gpus if gpu.taken}
            assert taken == dict.fromkeys((0, 1, 3, 4, 6, 7), "Slurm gives whole nodes here")
            await kill_and_wait(told, launch)
            await told.until(lambda: not facts_of(told, "n1").gpus[0].taken, "the node to be free")

    with world_with(tmp_path, nodes=2, whole_nodes=True) as world:
        asyncio.run(story())


AS_NOBODY = """
import asyncio, sys
from pathlib import Path
from thebes.protocol.contract import Launch, Part
from thebes.engine.site import EngineSite
from thebes.engine.slurm.engine import SlurmEngine

async def main():
    site = EngineSite("nob", bytes(32), 1, {"n1": 8, "n2": 8}, {}, Path(sys.argv[1]), 20.0, home_host="127.0.0.1",
                python="/usr/bin/python3")
    engine, ended = SlurmEngine(site), asyncio.Event()
    await engine.open(lambda news: ended.set() if getattr(news, "state", "") == "exited" else None)
    await engine.launch(Launch("1", 1, (Part("n1", (3,)), Part("n2", (4,))), ("id", "-un"), "/"))
    await ended.wait()
    while len([one for one in await engine.reports() if one.state == "exited"]) < 2:
        await asyncio.sleep(0.05)
    print((await engine.read_log("1", 1, 1, 0, 100))[0].decode().strip())
    await engine.close()

asyncio.run(main())
"""


def test_it_needs_neither_root_nor_any_right_in_slurm(tmp_path: Path) -> None:
    interpreter = Path("/usr/bin/python3")
    source = Path(__file__).parents[2] / "src"
    can = ["runuser", "-u", "nobody", "--", str(interpreter), "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    if not interpreter.exists() or subprocess.run(can).returncode:
        pytest.skip("there is no Python 3.11 in /usr/bin that another user can run")
    with slurm_cluster(nodes=2) as slurm:
        package, shared = slurm.dir / "package", slurm.dir / "shared"
        package.mkdir()
        subprocess.run(["cp", "-r", str(source / "thebes"), str(package)], check=True)
        subprocess.run(["chmod", "-R", "a+rX", str(package)], check=True)
        shared.mkdir()
        os.chown(shared, 65534, 65534)
        script = slurm.dir / "story.py"
        script.write_text(AS_NOBODY)
        done = subprocess.run(
            ["runuser", "-u", "nobody", "--", str(interpreter), str(script), str(shared)],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1", **slurm.env},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.stdout.split() == ["nobody"], done.stderr
        slurm.until(lambda: not slurm.queue(), "no Slurm job left behind")
