"""A store that several controllers share: which others use it, and what they have in common."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thebes.instance.wanted import UpOptions, differences, shown_store, wanted_config
from thebes.live.config import (
    Config,
    from_cluster,
    of_cluster,
)
from thebes.model.errors import UserError
from thebes.protocol.instance import Instance

if TYPE_CHECKING:
    from thebes.store.leader import KnownController


@dataclass(frozen=True)
class SharedStore:
    """What the store of several controllers says about them."""

    store: str
    kept: dict[str, Any] | None  # the configuration that they have in common
    others: tuple[KnownController, ...]  # controllers at work with it, except the one of this folder

    def keep(self, config: Config) -> None:
        if of_cluster(config) == self.kept:
            return
        from thebes import store as db
        from thebes.instance.shift import CONFIG_KEY

        with db.Store.open(self.store) as store:
            text = json.dumps(of_cluster(config))
            store.change_blocking(lambda c: db.set_meta(c, CONFIG_KEY, text))


def look_at_store(instance: Instance, saved: Config | None, options: UpOptions) -> SharedStore | None:
    """Which controllers use the store, and how; None for a store in a file. A UserError tells why it cannot be used."""
    url = options.store if options.store is not None else saved.store if saved else ""
    if not url:
        return None
    from thebes import store as db
    from thebes.instance.shift import CONFIG_KEY
    from thebes.store.database import POSTGRES_SCHEMES
    from thebes.store.leader import KnownController, LeaderLease, identity_of
    from thebes.store.postgres import Postgres

    if not url.startswith(POSTGRES_SCHEMES):
        raise UserError(
            "--store: this is not an address of a PostgreSQL database",
            hint="as in postgresql://USER@HOST:5432/DATABASE",
        )
    with db.Store.open(url) as store:
        assert isinstance(store.database, Postgres)
        with store.read() as c:
            kept, empty = db.get_meta(c, CONFIG_KEY), not db.jobs_ever(c)
        lease = LeaderLease(store.database, KnownController(identity_of(instance.dir), "", ""))
        try:
            others = tuple(one for one in lease.members() if one.alive and one.id != lease.me.id)
        finally:
            lease.close()
    if empty and saved is not None and not saved.store and instance.store.exists():
        with db.Store.open(instance.store) as file, file.read() as c:
            if db.jobs_ever(c):
                raise UserError(
                    f"the jobs of this cluster are in {instance.store}, and {shown_store(url)} is empty",
                    hint="move them: `thebes backup FILE`, then `thebes restore FILE --store URL`; or choose another "
                    "folder with --dir",
                )
    return SharedStore(url, None if kept is None else json.loads(kept), others)


def wanted_for(cluster: SharedStore | None, saved: Config | None, options: UpOptions) -> Config:
    """The same as `wanted_config`, where other controllers may be at work: what they have in common stays."""
    if cluster is None:
        return wanted_config(saved, options)
    own = None if saved is None else saved.model_copy(update={"store": cluster.store})
    base = saved if cluster.kept is None else from_cluster(cluster.kept, own, cluster.store)
    wanted = wanted_config(base, options, ask_site=not cluster.others)
    if cluster.others:
        from thebes.instance.shift import refuse_local

        if wanted.engine == "local":
            refuse_local(cluster.others)
        if base is not None and of_cluster(wanted) != cluster.kept:
            told = differences(from_cluster(of_cluster(base), wanted), wanted)
            raise UserError(
                f"the cluster in {shown_store(cluster.store)} runs with other options: {'; '.join(told)}",
                hint="leave them out: they are taken over; or take all its controllers down first "
                f"({', '.join(other.name for other in cluster.others)})",
            )
    if wanted.engine != "local" and not wanted.shared_dir:
        raise UserError(
            "several controllers need a folder for checkpoints that all machines see",
            hint="name it with --shared DIR, the same for all controllers",
        )
    return wanted
