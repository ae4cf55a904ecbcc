"""What a controller is configured with: settings, files, what a cluster has in common, its engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from thebes.engine.local import LocalEngine
from thebes.engine.ray.engine import RayEngine
from thebes.engine.slurm.engine import SlurmEngine
from thebes.live.config import Config, NodeConfig, from_cluster, load, make, of_cluster
from thebes.live.engines import Identity, discover, make_engine
from thebes.model.errors import UserError
from thebes.protocol.instance import Instance

NODES = [NodeConfig(name="n0", gpus=8, gpu_type="H200"), NodeConfig(name="n1", gpus=4)]
US = Identity("abcd", bytes(32), epoch=7)


@pytest.mark.parametrize("setting", ["promote_knob", "=8", ""])
def test_a_setting_without_a_key_or_a_value_is_told_with_how_to_write_it(setting: str) -> None:
    with pytest.raises(UserError) as told:
        make(nodes=NODES, policy_settings=["queue_limits=500", setting])
    assert told.value.message == f"policy_settings.1: '{setting}' is not KEY=VALUE, as in promote_knob=8"


def test_a_configuration_that_is_not_text_or_cannot_be_read_is_told_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(UserError, match=f"{path} cannot be understood: it is not text"):
        load(path)
    assert path.read_bytes() == b"\xff\xfe{"
    with pytest.raises(UserError, match=f"{tmp_path} cannot be read: Is a directory"):
        load(tmp_path)


def test_a_controller_takes_over_what_the_cluster_has_in_common_and_keeps_what_is_its_own() -> None:
    first = Config(nodes=NODES, engine="slurm", policy="las", grace_s=5.0, port=7, store="postgresql://a", home_port=9)
    kept = of_cluster(first)
    assert not {"port", "store", "home_port", "tls_key"} & kept.keys()
    new = from_cluster(kept, None, store="postgresql://b")
    assert (new.policy, new.grace_s, new.nodes, new.store, new.port) == ("las", 5.0, NODES, "postgresql://b", 0)
    mine = Config(nodes=NODES[:1], policy="fifo", port=8, home_host="h")
    again = from_cluster(kept, mine)
    assert (again.policy, again.nodes, again.port, again.home_host, again.store) == ("las", NODES, 8, "h", "")


def test_a_configuration_in_the_store_that_cannot_be_understood_is_told() -> None:
    kept = of_cluster(Config(nodes=NODES)) | {"turbo": True}
    with pytest.raises(UserError, match="the configuration in the store cannot be understood: turbo: ") as told:
        from_cluster(kept, None)
    assert told.value.hint == "was it written by a newer Thebes?"


def test_the_engine_is_the_one_that_was_configured_and_knows_the_site(tmp_path: Path) -> None:
    instance = Instance(tmp_path)
    assert isinstance(make_engine(Config(nodes=NODES), instance, US), LocalEngine)
    config = Config(
        nodes=NODES, engine="slurm", partition="gpu", account="lab", time_limit="60", lease_s=30.0, home_host="head"
    )
    slurm = make_engine(config, instance, US, homes=["other:1"])
    assert isinstance(slurm, SlurmEngine)
    site = slurm.site
    assert (site.instance_id, site.key, site.epoch, site.other_homes) == ("abcd", bytes(32), 7, ("other:1",))
    assert (site.gpus, site.gpu_types) == ({"n0": 8, "n1": 4}, {"n0": "H200", "n1": ""})
    assert (site.partition, site.account, site.time_limit, site.lease_s) == ("gpu", "lab", "60", 30.0)
    assert (site.shared_dir, site.home(5)) == (tmp_path, "head:5")
    ray = make_engine(
        Config(nodes=NODES, engine="ray", ray_address="h:1", shared_dir=str(tmp_path / "all")), instance, US
    )
    assert isinstance(ray, RayEngine)
    assert (ray.site.ray_address, ray.site.shared_dir) == ("h:1", tmp_path / "all")


def test_a_site_that_is_not_here_is_told_when_its_nodes_are_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="this is not a machine of a Slurm cluster"):
        discover("slurm", partition="", reservation="", ray_address="")
    # Also where Ray is installed: a module that cannot be found stands before it.
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError(\"No module named 'ray'\", name='ray')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match="the Ray engine needs Ray, which is not installed"):
        discover("ray", partition="", reservation="", ray_address="auto")
