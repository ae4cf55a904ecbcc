"""The controller on a cluster that is not ours alone: GPUs that others take, nodes that the site drains, racks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kit.cluster_in_a_test import live_cluster
from thebes import store as db
from thebes.instance.wanted import UpOptions, wanted_config
from thebes.live.config import Config, NodeConfig, make
from thebes.live.engines import as_configured, identify
from thebes.live.ledger import Ledger, NodeSpec, cluster_of
from thebes.model.errors import UserError
from thebes.placement import Consolidate
from thebes.policy import find
from thebes.protocol.contract import PARKED_LEASE_S, Gpu, NodeFacts
from thebes.store import Store


def test_gpus_that_others_have_are_nobodys_until_they_are_free_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with live_cluster(tmp_path, {"n0": 4}) as c:
            c.engine.taken = {("n0", 0): "Slurm job 7 of alice", ("n0", 1): "Slurm job 7 of alice"}
            c.engine.tell_of("n0")
            await c.quiet()
            first, second = await c.submit(2), await c.submit(1)
            assert [c.state(first), c.state(second)] == ["running", "queued"]
            assert c.engine.living[first, 1].launch.parts[0].gpus == (2, 3)
            shown = c.controller.nodes()[0]
            assert [gpu["taken"] for gpu in shown["gpus"]] == ["Slurm job 7 of alice"] * 2 + ["", ""]
            assert "gpu-sick" not in [event.kind for event in c.events()]  # it is not
            c.engine.taken = {}
            c.engine.tell_of("n0")
            await c.quiet()
            assert c.state(second) == "running"

    asyncio.run(story())


def test_somebody_outside_was_faster_and_the_job_goes_elsewhere_without_a_loss(tmp_path: Path) -> None:
    async def story() -> None:
        async with live_cluster(tmp_path, {"n0": 2, "n1": 2}) as c:
            for _ in range(12):  # more often than losses in a row are forgiven
                c.engine.about_to_be_taken = {("n0", 0), ("n0", 1)}
                job = await c.submit(2)
                assert c.state(job) == "running"
                [(node, incarnation)] = [
                    (one.launch.parts[0].node, number) for (_, number), one in c.engine.living.items()
                ]
                assert (node, incarnation) == ("n1", 2)
                row = c.row(job)
                assert (row.losses, row.failures, row.preemptions) == (0, 0, 0)
                kinds = [event.kind for event in c.events() if event.job_id == job]
                assert "gpus-taken" in kinds
                assert "lost" not in kinds
                assert "stopped-unsaved" not in kinds
                c.engine.end(job, 2, 0)
                c.engine.taken = {}
                c.engine.tell_of("n0")
                await c.quiet()
                assert c.state(job) == "completed"
            c.engine.about_to_be_taken = {("n0", 0), ("n1", 1)}  # nothing is left for it: it waits
            job = await c.submit(4)
            assert c.state(job) == "queued"
            c.engine.taken = {}
            c.engine.tell_of("n0")
            c.engine.tell_of("n1")
            await c.quiet()
            assert c.state(job) == "running"
            await c.crash()
            await c.open()
            assert c.state(job) == "running"

    asyncio.run(story())


def test_a_node_that_the_site_drains_is_emptied_and_used_again_afterwards(tmp_path: Path) -> None:
    async def story() -> None:
        async with live_cluster(tmp_path, {"n0": 2, "n1": 2}) as c:
            job = await c.submit(2)
            node = c.engine.living[job, 1].launch.parts[0].node
            other = {"n0": "n1", "n1": "n0"}[node]
            c.engine.drained = {node: "new fan"}
            c.engine.tell_of(node)
            await c.quiet()
            assert ("notice", job, 1) in c.engine.calls
            c.engine.end(job, 1, 85)
            await c.quiet()
            assert [part.node for part in c.engine.living[job, 2].launch.parts] == [other]
            shown = {one["name"]: (one["drained"], one["reason"]) for one in c.controller.nodes()}
            assert shown[node] == (True, "new fan")
            waiting = await c.submit(1)
            assert c.state(waiting) == "queued"
            await c.crash()
            await c.open()
            assert c.state(waiting) == "queued"
            c.engine.drained = {}
            c.engine.tell_of(node)
            await c.quiet()
            assert c.state(waiting) == "running"
            assert {"site-drain", "site-undrain"} <= {event.kind for event in c.events()}

    asyncio.run(story())


def test_that_nodes_were_left_alone_is_known_until_all_of_them_are_back(tmp_path: Path) -> None:
    async def story() -> None:
        async with live_cluster(tmp_path, {"n0": 2}) as c:
            assert c.engine.parked_s == 0.0
            await c.controller.shutdown("keep")
            await c.crash()
            await c.open()
            assert PARKED_LEASE_S - 60 < c.engine.parked_s <= PARKED_LEASE_S
            await c.quiet()
            await c.crash()  # one of the nodes has not called yet
            await c.open()
            assert c.engine.parked_s > PARKED_LEASE_S - 60
            c.engine.all_are_back.set()
            await asyncio.sleep(0)
            await c.quiet()
            await c.crash()
            await c.open()
            assert c.engine.parked_s == 0.0

    asyncio.run(story())


def test_a_site_that_is_back_is_one_entry_in_the_journal(tmp_path: Path) -> None:
    """Each of a thousand nodes with a list of the others would be a million."""

    async def story() -> None:
        async with live_cluster(tmp_path, {f"n{i}": 8 for i in range(50)}) as c:

            def entries() -> int:
                with c.store.read() as connection:
                    found = db.journal_since_snapshot(connection)
                    return sum(entry.body.get("op") == "nodes" for entry in found)

            before = entries()
            c.engine.taken = {(f"n{i}", 0): "Slurm job 7 of alice" for i in range(50)}
            for node in c.engine.sizes:
                c.engine.tell_of(node)
            await c.quiet()
            assert entries() == before + 1
            assert all(one["gpus"][0]["taken"] for one in c.controller.nodes())

    asyncio.run(story())


def test_ranks_follow_the_network() -> None:
    specs = [NodeSpec(f"n{i}", 2, rack=f"r{i // 2}") for i in range(4)]
    cluster = cluster_of(specs)
    assert cluster.node_rack.tolist() == [0, 0, 1, 1]
    ledger = Ledger(specs, find("fifo")(), Consolidate())
    assert ledger.parts((6, 1, 2, 0)) == [("n0", (0, 1)), ("n1", (0,)), ("n3", (0,))]
    again = Ledger.restore(ledger.snapshot(0.0), find("fifo")(), Consolidate())
    assert again.nodes == tuple(specs)
    assert again.cluster.node_rack.tolist() == [0, 0, 1, 1]


def test_nodes_of_a_site_are_configured_rack_by_rack() -> None:
    def facts(name: str, rack: str, gpus: int = 2, kind: str = "a100") -> NodeFacts:
        return NodeFacts(name, tuple(Gpu(i, name=kind) for i in range(gpus)), rack=rack)

    found = as_configured([facts("a", "s1"), facts("b", "s2"), facts("c", "s1"), facts("login", "s1", gpus=0)])
    assert [(node.name, node.rack, node.gpus, node.gpu_type) for node in found] == [
        ("a", "s1", 2, "a100"),
        ("c", "s1", 2, "a100"),
        ("b", "s2", 2, "a100"),
    ]
    with pytest.raises(UserError, match="none of the nodes has a GPU"):
        as_configured([facts("login", "", gpus=0)])
    torn = [NodeConfig(name=name, gpus=1, rack=rack) for name, rack in (("a", "1"), ("b", "2"), ("c", "1"))]
    with pytest.raises(UserError, match="nodes of one rack must stand together"):
        make(nodes=torn)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (UpOptions(partition="gpu"), "--partition is for --engine slurm, and this is --engine local"),
        (UpOptions(engine="ray", reservation="r"), "--reservation is for --engine slurm, and this is --engine ray"),
        (UpOptions(engine="ray", account="a"), "--account is for --engine slurm, and this is --engine ray"),
        (UpOptions(qos="q"), "--qos is for --engine slurm, and this is --engine local"),
        (UpOptions(time_limit="60"), "--time is for --engine slurm, and this is --engine local"),
        (UpOptions(engine="slurm", time_limit="a day"), "--time a day: not a time as Slurm writes it"),
        (UpOptions(engine="slurm", address="h:1"), "--address is for --engine ray, and this is --engine slurm"),
        (UpOptions(engine="slurm", virtual_gpus=8), "--virtual-gpus and --nodes are for --engine local: Slurm tells"),
        (UpOptions(shared="/tmp/x"), "--home and --shared are for --engine slurm or ray"),
        (UpOptions(engine="slurm", home=":1"), "--home :1: not HOST or HOST:PORT"),
        (UpOptions(engine="slurm", home="no such host"), "--home no such host: no such host is known"),
        (
            UpOptions(engine="slurm", packing=True),
            "--packing is not for --engine slurm: Slurm gives each GPU to one job",
        ),
        (UpOptions(engine="pbs"), "--engine pbs: there is no such engine"),
    ],
)
def test_options_that_mean_nothing_together_are_refused(options: UpOptions, message: str) -> None:
    saved = Config(nodes=[NodeConfig(name="n0", gpus=1, virtual=True)])
    with pytest.raises(UserError) as told:
        wanted_config(saved, options)
    assert message in str(told.value)


def test_all_controllers_of_a_store_are_the_same_and_each_leads_anew(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.db") as store:
        first, second, told = identify(store), identify(store), identify(store, epoch=40)
    assert first.instance_id == second.instance_id == told.instance_id
    assert first.key == second.key
    assert len(first.key) == 32
    assert first.key.hex() not in repr(first)
    assert (first.epoch, second.epoch, told.epoch) == (1, 2, 40)
