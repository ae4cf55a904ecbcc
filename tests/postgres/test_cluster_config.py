"""The configuration that several controllers have in common: taken over, and never contradicted in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thebes import store as db
from thebes.instance.doctor import check_store
from thebes.instance.shared_store import SharedStore, look_at_store, wanted_for
from thebes.instance.shift import CONFIG_KEY
from thebes.instance.wanted import UpOptions
from thebes.live.config import Config, NodeConfig, of_cluster, save
from thebes.model.errors import UserError
from thebes.protocol.instance import Instance
from thebes.store import leader
from thebes.store.leader import KnownController, LeaderLease
from thebes.store.postgres import Postgres

NODES = [NodeConfig(name="n0", gpus=8), NodeConfig(name="n1", gpus=8)]
OTHER = KnownController("b", "machine b", "http://b:1", "b:2")


def running(url: str, **changes: object) -> Config:
    values = {"nodes": NODES, "engine": "slurm", "policy": "las", "shared_dir": "/shared", "store": url, "port": 7}
    return Config.model_validate({**values, **changes})


@pytest.fixture
def shared(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store that a controller is at work with, however long ago it was heard of."""
    monkeypatch.setattr(leader, "LEASE_S", 600.0)
    monkeypatch.setattr(leader, "GONE_S", 600.0)
    with db.Store.open(url) as store:
        text = json.dumps(of_cluster(running(url)))
        store.change_blocking(lambda c: db.set_meta(c, CONFIG_KEY, text))
        assert isinstance(store.database, Postgres)
        lease = LeaderLease(store.database, OTHER)
        lease.take(lease.look())
        lease.register()
        lease.close()
    return url


def instance(tmp_path: Path) -> Instance:
    made = Instance(tmp_path / "i")
    made.create()
    return made


def test_the_second_controller_takes_it_over(shared: str, tmp_path: Path) -> None:
    options = UpOptions(store=shared, host="127.0.0.1", port=9, home="localhost:5")
    cluster = look_at_store(instance(tmp_path), None, options)
    assert cluster is not None
    assert [other.name for other in cluster.others] == ["machine b"]
    wanted = wanted_for(cluster, None, options)
    assert of_cluster(wanted) == of_cluster(running(shared))
    assert (wanted.port, wanted.home_host, wanted.home_port, wanted.store) == (9, "localhost", 5, shared)


def test_the_same_options_are_no_contradiction(shared: str, tmp_path: Path) -> None:
    options = UpOptions(store=shared, policy="las", engine="slurm", shared="/shared")
    cluster = look_at_store(instance(tmp_path), None, options)
    assert wanted_for(cluster, None, options).policy == "las"


def test_other_options_are_one_clear_error(shared: str, tmp_path: Path) -> None:
    options = UpOptions(store=shared, policy="fifo", grace_s=7.0)
    cluster = look_at_store(instance(tmp_path), None, options)
    with pytest.raises(UserError) as error:
        wanted_for(cluster, None, options)
    assert "runs with other options: policy is las, not fifo; grace is 30.0, not 7.0" in error.value.message
    assert "take all its controllers down first (machine b)" in error.value.hint


def test_without_others_options_win_and_are_kept(url: str, tmp_path: Path) -> None:
    wanted = running(url)
    SharedStore(url, None, ()).keep(wanted)
    cluster = look_at_store(instance(tmp_path), wanted, UpOptions())
    assert cluster is not None
    assert cluster.kept == of_cluster(wanted)
    assert cluster.others == ()


def test_the_local_engine_has_nothing_to_take_over(url: str) -> None:
    local = Config(nodes=[NodeConfig(name="n0", gpus=1, virtual=True)], store=url)
    cluster = SharedStore(url, of_cluster(local), (OTHER,))
    with pytest.raises(UserError, match="the engine local runs jobs on its own machine alone"):
        wanted_for(cluster, None, UpOptions(store=url))


def test_checkpoints_must_be_seen_by_all(url: str) -> None:
    cluster = SharedStore(url, of_cluster(running(url, shared_dir="")), (OTHER,))
    with pytest.raises(UserError, match="need a folder for checkpoints that all machines see") as error:
        wanted_for(cluster, None, UpOptions(store=url))
    assert "--shared DIR" in error.value.hint


def test_jobs_in_a_file_are_not_left_behind(url: str, tmp_path: Path) -> None:
    here = instance(tmp_path)
    with db.Store.open(here.store) as store:
        store.change_blocking(
            lambda c: db.create_jobs(
                c, "{}", user="a", tenant="b", name=None, gpus=1, nodes=None, priority=0, submit_s=1.0
            )
        )
    saved = Config(nodes=[NodeConfig(name="n0", gpus=1, virtual=True)])
    with pytest.raises(UserError, match=r"the jobs of this cluster are in .*, and .* is empty") as error:
        look_at_store(here, saved, UpOptions(store=url))
    assert "thebes restore" in error.value.hint


def test_an_address_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="this is not an address of a PostgreSQL database"):
        look_at_store(instance(tmp_path), None, UpOptions(store="mysql://u:secret@h/x"))


def test_doctor_asks_the_database(url: str, tmp_path: Path) -> None:
    here = instance(tmp_path)
    save(here.config, running(url))
    assert [finding.found for finding in check_store(here)] == [f"{url} answers"]
    save(here.config, running("postgresql://ann:secret@127.0.0.1:1/x"))
    with pytest.raises(UserError, match="cannot be reached"):
        list(check_store(here))
