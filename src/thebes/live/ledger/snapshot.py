"""A whole ledger in plain words: to begin a journal with, to go on from after a restart, to move to another cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from thebes.live.entries import Back
from thebes.live.ledger.drawing import block
from thebes.live.ledger.nodes import listed
from thebes.live.ledger.packed import packed, unpacked
from thebes.live.ledger.rows import ROOM, UNTOLD, longer, mark, pack, records
from thebes.model import rules
from thebes.model.compiled import entry as door
from thebes.model.jobs import HELD, JOB, NEVER, NO_QUOTA, JobTable

if TYPE_CHECKING:
    from thebes.live.ledger.ledger import Ledger

FORMAT = 2  # 1: version 0.1, whose records had no number of their own

_seat = door(rules.seat)


def snapshot_of(ledger: Ledger, now_s: float) -> dict[str, Any]:
    """All of it, to begin a journal with. The table is packed first, so that a restored ledger has the same one."""
    pack(ledger)
    count = len(ledger.ids)
    return {
        "format": FORMAT,
        "t": now_s,
        "nodes": [listed(n) for n in ledger.nodes],
        "policy": ledger.policy.label,
        "placement": ledger.placement.name,
        "ids": list(ledger.ids),
        "next_id": ledger.next_id,
        "models": list(ledger.models),
        "gang_classes": [list(key) for key in ledger.gang_classes.keys],
        "dtype": [[name, str(JOB[name])] for name in JOB.names or ()],
        "jobs": packed(ledger.table.jobs[:count].tobytes()),
        "slots": packed(ledger.table.slots[: ledger.slots_used].tobytes()),
        "tenants": list(ledger.tenants),
        "quotas": [None if limit == NO_QUOTA else int(limit) for limit in ledger.limits],
        "blocked": sorted(ledger.blocked),
        "sick": sorted(ledger.sick),
        "held": sorted(ledger.held_by_user),
        "services": packed(np.array(ledger.services).tobytes()),
        "packing": ledger.packing,
        "rates": dict(ledger.rates),
        "guests": dict(ledger.guests),
        "undone": [[sorted(pair), at_s] for pair, at_s in ledger.undone],
        "memory": ledger.memory,
        "wake_s": None if ledger.wake_s == NEVER else ledger.wake_s,
        "now_s": ledger.now_s,
        "last_finish_s": None if ledger.last_finish_s == -NEVER else ledger.last_finish_s,
    }


def fill(ledger: Ledger, body: Mapping[str, Any]) -> None:
    """Bring a new ledger to the state of a snapshot. Fields that later versions of Thebes added are zero.

    Before format 2 policies remembered rows, by classes that stand elsewhere now: what they remembered is dropped.
    """
    stored = np.frombuffer(unpacked(body["jobs"]), dtype=np.dtype([(n, t) for n, t in body["dtype"]]))
    count = len(stored)
    jobs = records(max(ROOM, 2 * count))
    for name in JOB.names or ():
        if name in (stored.dtype.names or ()):
            jobs[name][:count] = stored[name]
    if "id" not in (stored.dtype.names or ()):  # version 0.1, which did not measure either
        jobs["speed"][:count] = jobs["progress_s"][:count] = np.nan
        jobs["id"][:count] = np.arange(count)
    ledger.next_id = int(body.get("next_id", count))
    slots = np.frombuffer(unpacked(body["slots"]), dtype=np.int64)
    ledger.slots_used = len(slots)
    ledger.tenants = list(body["tenants"])
    quotas = np.full(max(1, len(ledger.tenants)), NO_QUOTA, dtype=np.int64)
    ledger.limits = [int(NO_QUOTA) if quota is None else quota for quota in body["quotas"]]
    ledger.table = JobTable(jobs, np.concatenate((slots, np.zeros(max(4 * ROOM, len(slots)), dtype=np.int64))), quotas)
    ledger.ids = list(body["ids"])
    ledger.marks = longer(np.array([mark(job) for job in ledger.ids], dtype=np.uint64), len(jobs))
    ledger.fates = np.full(len(jobs), UNTOLD, dtype=np.int16)
    ledger.row_of = {job: row for row, job in enumerate(ledger.ids)}
    _know_again(ledger, body, jobs[:count])
    ledger.services = np.frombuffer(unpacked(body["services"])).tolist()
    ledger.memory = body["memory"] if body["format"] >= 2 else None
    ledger.packing = bool(body.get("packing"))
    ledger.rates, ledger.guests = dict(body.get("rates", {})), dict(body.get("guests", {}))
    ledger.undone = [(frozenset(pair), float(at_s)) for pair, at_s in body.get("undone", [])]
    ledger.wake_s = NEVER if body["wake_s"] is None else float(body["wake_s"])
    ledger.now_s = float(body["now_s"])
    last_finish_s = body.get("last_finish_s")
    ledger.last_finish_s = -NEVER if last_finish_s is None else float(last_finish_s)
    ledger.blocked = frozenset(body["blocked"])
    ledger.sick = frozenset(body.get("sick", ()))
    ledger.held_by_user = set(body["held"])
    block(ledger)
    for row in np.flatnonzero(jobs["phase"][:count] == HELD).tolist():
        _seat(ledger.table, ledger.machine, row)


def _know_again(ledger: Ledger, body: Mapping[str, Any], jobs: Any) -> None:
    """What follows from the cluster and the jobs, and the numbers that models and gang classes had."""
    jobs["best_tier"], jobs["min_nodes"] = rules.best_shape(ledger.cluster, jobs["gpus"], jobs["kinds"])
    if body["format"] < 2:  # which model a job trains was not kept, nor was any job measured
        ledger.models = {f"of job {job} (unknown)": at for at, job in enumerate(ledger.ids)}
        jobs["model"], jobs["speed"], jobs["progress_s"], jobs["full_s"] = (
            np.arange(len(jobs)),
            np.nan,
            np.nan,
            np.nan,
        )
    else:
        ledger.models = {name: at for at, name in enumerate(body["models"])}
    for gpus, kinds, nodes, skew in body.get("gang_classes") or ():
        ledger.gang_classes.keys[(gpus, kinds, nodes, skew)] = len(ledger.gang_classes)
    if len(jobs):
        jobs["gang_class"] = ledger.gang_classes.number(jobs)


def moved_elsewhere(moved: Ledger, there: Ledger, gpu_types: Mapping[str, str | None]) -> dict[str, Any]:
    """The snapshot of a ledger with its jobs on the cluster of another one, which is empty. `moved` is changed.

    A job that holds GPUs keeps them if they are still there and could be given to it; else it waits again.
    """
    kept: dict[str, list[int]] = {}
    for job in list(moved.row_of):
        found = [there.gpu_at(*moved.local(gpu)) for gpu in moved.gpus_of(job)]
        gpus = sorted(gpu for gpu in found if gpu is not None)
        kinds = {int(there.cluster.node_kind[there.cluster.gpu_node[gpu]]) for gpu in gpus}
        suits = len(kinds) == 1 and (there.kinds_for(gpu_types.get(job)) >> min(kinds)) & 1
        if gpus and len(gpus) == len(found) and suits:
            kept[job] = gpus
        else:
            moved.apply(Back(moved.now_s, job))
    body = snapshot_of(moved, moved.now_s)
    jobs, slots = moved.table.jobs, moved.table.slots
    for job, row in moved.row_of.items():
        jobs["kinds"][row] = there.kinds_for(gpu_types.get(job))
        first, count = int(jobs["first_slot"][row]), int(jobs["width"][row])
        slots[first : first + count] = kept.get(job, 0)
        if job in kept:
            jobs["node_kind"][row] = there.cluster.node_kind[there.cluster.gpu_node[kept[job][0]]]
    return body | {
        "nodes": [listed(n) for n in there.nodes],
        "jobs": packed(jobs[: len(moved.ids)].tobytes()),
        "slots": packed(slots[: moved.slots_used].tobytes()),
        "blocked": [],
        "sick": [],
        "memory": None,
        "gang_classes": None,
        "wake_s": None,
    }
