"""The journal, from its last snapshot on, is the ledger. Controllers get the ledger back here, and keep snapshots."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection

from thebes import __version__
from thebes import store as db
from thebes.jobspec.spec import JobSpec
from thebes.live.entries import entry_of
from thebes.live.ledger import Ledger, NodeSpec

if TYPE_CHECKING:
    from thebes.live.config import Config
    from thebes.live.core import Core
    from thebes.placement import Placement
    from thebes.policy.base import Policy


def restored(
    entries: Collection[db.JournalEntry],
    rows: Collection[db.JobRow],
    config: Config,
    policy: Policy,
    placement: Placement,
) -> Ledger:
    """The ledger as the journal tells it, on the nodes and under the policy that are configured now."""
    ledger = _moved(entries, rows, config, policy, placement)
    ledger.packing = config.packing
    if not ledger.packing:
        ledger.guests = {}  # jobs that share a GPU and may no longer do so are stopped
    return ledger


def _moved(
    entries: Collection[db.JournalEntry],
    rows: Collection[db.JobRow],
    config: Config,
    policy: Policy,
    placement: Placement,
) -> Ledger:
    nodes = [NodeSpec(n.name, n.gpus, n.gpu_type, rack=n.rack) for n in config.nodes]
    ledger: Ledger | None = None
    before: object = None
    version = ""
    for entry in entries:
        if entry.kind == "snapshot":
            ledger = Ledger.restore(entry.body, policy, placement)
            before, version = entry.body.get("config"), entry.body.get("version", "")
        elif ledger is not None:
            ledger.apply(entry_of(entry.body))
    if ledger is None:
        return Ledger(nodes, policy, placement)
    if ledger.nodes != tuple(nodes) or before != chosen(config):
        gpu_types = {row.id: JobSpec.model_validate_json(row.spec).gpu_type for row in rows}
        return ledger.moved_to(nodes, policy, placement, gpu_types)
    if version != __version__:
        # What a policy remembers is for itself alone, and its next version may read it as something else.
        ledger.memory = None
    return ledger


def chosen(config: Config) -> dict[str, Any]:
    """What a journal must be replayed with."""
    return {
        "policy": config.policy,
        "policy_settings": list(config.policy_settings),
        "placement": config.placement,
    }


def keep_snapshot(core: Core, config: Config, now_s: float) -> None:
    """Begin the journal again with the ledger as it is; older entries are pruned by and by."""
    core.journalled = 0
    body = core.ledger.snapshot(now_s) | {"config": chosen(config), "version": __version__}
    core.writes.append(lambda c: _write_snapshot(c, body))


def _write_snapshot(c: Connection, body: dict[str, Any]) -> None:
    db.append_journal(c, body["t"], "snapshot", body)
    db.prune_journal(c)
    db.prune_events(c, now_s=body["t"])
