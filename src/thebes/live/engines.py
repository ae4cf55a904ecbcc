"""The engine that carries decisions out: the one of the configuration, with what it needs to know of us."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from thebes.live.config import Config, NodeConfig
from thebes.model.errors import UserError
from thebes.protocol.contract import Engine, NodeFacts

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from thebes.protocol.instance import Instance
    from thebes.store import Store


@dataclass(frozen=True)
class Identity:
    """Our identity on a cluster that others use, too. All controllers of one store have the same."""

    instance_id: str
    key: bytes = field(repr=False)  # agents and steps must know it to be let in
    epoch: int = 1  # it grows with every controller that leads


def identify(store: Store, epoch: int | None = None) -> Identity:
    """The identity in the store, made at the first time. Without an `epoch` (no other controller), the next one."""
    from sqlalchemy import select

    from thebes import store as db
    from thebes.store.schema import leader

    def look(c: Connection) -> Identity:
        instance_id, key = db.get_meta(c, "instance_id"), db.get_meta(c, "home_key")
        if instance_id is None or key is None:
            instance_id, key = secrets.token_hex(4), secrets.token_hex(32)
            db.set_meta(c, "instance_id", instance_id)
            db.set_meta(c, "home_key", key)
        led = epoch
        if led is None:
            c.execute(leader.update().values(epoch=leader.c.epoch + 1))
            led = int(c.execute(select(leader.c.epoch)).scalar_one())
        return Identity(instance_id, bytes.fromhex(key), led)

    return store.change_blocking(look)


def make_engine(config: Config, instance: Instance, identity: Identity, *, homes: Sequence[str] = ()) -> Engine:
    """The engine of this configuration. `homes`: the addresses of other controllers of this cluster."""
    if config.engine == "local":
        from thebes.engine.local import LocalEngine

        return LocalEngine(instance.dir, config.node_names)
    from thebes.engine.site import EngineSite

    site = EngineSite(
        instance_id=identity.instance_id,
        key=identity.key,
        epoch=identity.epoch,
        gpus={node.name: node.gpus for node in config.nodes},
        gpu_types={node.name: node.gpu_type for node in config.nodes},
        shared_dir=Path(config.shared_dir or instance.dir),
        lease_s=config.lease_s,
        home_host=config.home_host,
        home_port=config.home_port,
        other_homes=tuple(homes),
        partition=config.partition,
        reservation=config.reservation,
        account=config.account,
        qos=config.qos,
        time_limit=config.time_limit,
        ray_address=config.ray_address,
    )
    if config.engine == "slurm":
        from thebes.engine.slurm.engine import SlurmEngine

        return SlurmEngine(site)
    from thebes.engine.ray.engine import RayEngine

    return RayEngine(site)


def discover(engine: str, *, partition: str, reservation: str, ray_address: str) -> list[NodeConfig]:
    """The nodes that the site has for us, rack by rack. A UserError says what is wrong with the site."""
    if engine == "slurm":
        from thebes.engine.slurm.nodes import discover as ask_slurm

        found = ask_slurm(partition, reservation)
    else:
        from thebes.engine.ray.nodes import discover as ask_ray

        found = ask_ray(ray_address)
    return as_configured(found)


def as_configured(found: Sequence[NodeFacts]) -> list[NodeConfig]:
    """Nodes with GPUs, in the order of the site, with those of a rack together."""
    racks = {rack: at for at, rack in enumerate(dict.fromkeys(facts.rack for facts in found))}
    nodes = [
        NodeConfig(
            name=facts.name,
            gpus=len(facts.gpus),
            virtual=all(gpu.virtual for gpu in facts.gpus),
            gpu_type=facts.gpus[0].name if len({gpu.name for gpu in facts.gpus}) == 1 else "",
            rack=facts.rack,
        )
        for facts in sorted(found, key=lambda facts: racks[facts.rack])
        if facts.gpus
    ]
    if not nodes:
        raise UserError("none of the nodes has a GPU", hint="`thebes engine check` tells what the site offers")
    return nodes
