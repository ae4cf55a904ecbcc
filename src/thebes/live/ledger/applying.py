"""How a ledger changes: one function for each kind of entry, by the rules of every world (`thebes.model.rules`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, assert_never

import numpy as np

from thebes.live.entries import (
    Arrive,
    Back,
    Decide,
    Entry,
    Hold,
    Leave,
    LeaveHost,
    Measured,
    Nodes,
    Quota,
    Ran,
    Rate,
    Release,
    Set,
)
from thebes.live.ledger.drawing import block, share_quotas
from thebes.live.ledger.packed import unpacked_small
from thebes.live.ledger.rows import UNTOLD, make_room, mark, tenant_number
from thebes.model import rules
from thebes.model.arrays import Ints
from thebes.model.compiled import entry as door
from thebes.model.jobs import HELD, JOB, NEVER, NO_QUOTA
from thebes.model.machine import FREE
from thebes.perf.models import catalogue, facts_of

if TYPE_CHECKING:
    from thebes.live.ledger.ledger import Ledger

SERVICES_KEPT = 50_000

# The rules, as they are called for one job at a time.
_submit, _start, _run, _measure = door(rules.submit), door(rules.start), door(rules.run), door(rules.measure)
_stop, _suspend, _count_move = door(rules.stop), door(rules.suspend), door(rules.count_move)
_finish, _service_of = door(rules.finish), door(rules.service_of)
_promote, _set_queues = door(rules.promote), door(rules.set_queues)
_change_share = door(rules.change_share)


def apply(ledger: Ledger, entry: Entry) -> None:
    """The one way in."""
    ledger.now_s = max(ledger.now_s, entry.time_s)
    match entry:
        case Arrive():
            _arrive(ledger, entry)
        case Leave():
            _leave(ledger, entry)
        case Ran():
            _ran(ledger, entry)
        case Measured():
            _measured(ledger, entry)
        case Rate():
            _rate(ledger, entry)
        case LeaveHost():
            _leave_host(ledger, entry)
        case Back():
            _back(ledger, entry)
        case Hold():
            _hold(ledger, entry)
        case Release():
            _release(ledger, entry)
        case Set():
            _set(ledger, entry)
        case Quota():
            _quota(ledger, entry)
        case Nodes():
            _nodes(ledger, entry)
        case Decide():
            _decide(ledger, entry)
        case _:
            assert_never(entry)


def _arrive(ledger: Ledger, e: Arrive) -> None:
    least, most = e.min_gpus or e.gpus, min(e.max_gpus or e.gpus, max(e.gpus, ledger.cluster.total_gpus))
    make_room(ledger, most)
    row, jobs = len(ledger.ids), ledger.table.jobs
    ledger.ids.append(e.job)
    ledger.row_of[e.job] = row
    record = np.zeros(1, dtype=JOB)[0]
    record["id"] = ledger.next_id
    ledger.next_id += 1
    record["gpus"], record["submit_s"], record["work_s"], record["left_s"] = e.gpus, e.submit_s, NEVER, NEVER
    record["kinds"], record["want_nodes"] = ledger.kinds_for(e.gpu_type), e.nodes or 0
    record["model"] = ledger.models.setdefault(e.model or "", len(ledger.models))
    facts = facts_of(catalogue().get(e.model or ""))
    record["skew"], record["state_gib"], record["memory_gib"], record["utilisation"] = facts
    record["priority"], record["tenant"] = e.priority, tenant_number(ledger, e.tenant)
    record["suspend_s"], record["resume_s"] = e.suspend_s, e.resume_s
    record["min_gpus"], record["max_gpus"], record["width"] = least, most, e.gpus
    record["first_slot"], record["share"] = ledger.slots_used, 1.0
    record["speed"] = record["progress_s"] = record["full_s"] = np.nan  # until the job has been measured
    record["first_start_s"] = record["run_from_s"] = record["paced_s"] = record["finish_s"] = NEVER
    record["saved_s"] = -NEVER
    jobs[row] = record
    _submit(jobs[row], e.time_s)
    ledger.marks[row], ledger.fates[row] = mark(e.job), UNTOLD
    arrived = jobs[row : row + 1]
    arrived["best_tier"], arrived["min_nodes"] = rules.best_shape(ledger.cluster, arrived["gpus"], arrived["kinds"])
    arrived["gang_class"] = ledger.gang_classes.number(arrived)
    ledger.slots_used += most


def _leave(ledger: Ledger, e: Leave) -> None:
    row = ledger.row_of[e.job]
    if ledger.table.jobs["phase"][row] == HELD:
        _let_go(ledger, row, e.time_s)
    if e.completed:
        ledger.services.append(float(_service_of(ledger.table.jobs[row])))
        del ledger.services[:-SERVICES_KEPT]
    _finish(ledger.table.jobs[row], e.time_s)
    ledger.last_finish_s = e.time_s
    ledger.rates.pop(e.job, None)
    ledger.guests.pop(e.job, None)
    del ledger.row_of[e.job]
    ledger.ids[row] = ""
    ledger.held_by_user.discard(e.job)
    if e.job in ledger.parked:
        ledger.parked.discard(e.job)
        block(ledger)


def _ran(ledger: Ledger, e: Ran) -> None:
    row = ledger.row_of.get(e.job)
    if row is not None and ledger.table.jobs["phase"][row] == HELD:
        since_s = float(ledger.table.jobs["since_s"][row])
        run_from_s = max(e.time_s if e.run_from_s is None else e.run_from_s, since_s)
        _run(ledger.table.jobs[row], since_s if e.ready_s is None else max(e.ready_s, since_s), run_from_s)


def _measured(ledger: Ledger, e: Measured) -> None:
    row = ledger.row_of.get(e.job)
    if row is not None:
        at_s = e.time_s if e.at_s is None else e.at_s
        _measure(ledger.table.jobs[row], float(at_s), float(e.progress_s), float(e.speed), float(e.full_s))


def _rate(ledger: Ledger, e: Rate) -> None:
    if e.job in ledger.row_of:
        ledger.rates[e.job] = float(e.steps_per_s)


def _leave_host(ledger: Ledger, e: LeaveHost) -> None:
    host = ledger.guests.pop(e.job, None)
    if host is not None and e.undone:
        ledger.undone = [*ledger.undone[-99:], (frozenset((e.job, host)), e.time_s)]


def _back(ledger: Ledger, e: Back | Hold) -> None:
    row = ledger.row_of[e.job]
    if ledger.table.jobs["phase"][row] == HELD:
        _let_go(ledger, row, e.time_s)
        if e.job in ledger.parked:
            block(ledger)


def _hold(ledger: Ledger, e: Hold) -> None:
    _back(ledger, e)
    ledger.held_by_user.add(e.job)
    ledger.parked.add(e.job)


def _release(ledger: Ledger, e: Release) -> None:
    row = ledger.row_of[e.job]
    ledger.held_by_user.discard(e.job)
    ledger.parked.discard(e.job)
    ledger.table.jobs["since_s"][row] = e.time_s  # the wait that the user chose earns nothing


def _set(ledger: Ledger, e: Set) -> None:
    row = ledger.row_of.get(e.job)
    if row is None:
        return
    for name, value in (("priority", e.priority), ("suspend_s", e.suspend_s), ("resume_s", e.resume_s)):
        if value is not None:
            ledger.table.jobs[name][row] = value


def _quota(ledger: Ledger, e: Quota) -> None:
    at = tenant_number(ledger, e.tenant)
    ledger.limits[at] = int(NO_QUOTA) if e.gpus is None else e.gpus
    share_quotas(ledger)


def _nodes(ledger: Ledger, e: Nodes) -> None:
    ledger.blocked = frozenset(e.blocked)
    ledger.sick = frozenset(e.sick)
    block(ledger)


def _decide(ledger: Ledger, e: Decide) -> None:
    now_s, jobs = e.time_s, ledger.table.jobs
    rows = ledger.scheduled()
    for job in e.promote:
        _promote(jobs[ledger.row_of[job]], now_s)
    for job in e.suspend:
        row = ledger.row_of[job]
        _let_go(ledger, row, now_s)
        _suspend(jobs[row])
    for job, gpus in e.migrate:
        row = ledger.row_of[job]
        resized = bool(jobs["width"][row] != len(gpus))
        _let_go(ledger, row, now_s)
        _count_move(jobs[row], resized, False)
    for job, share in e.shares:
        _change_share(ledger.table, ledger.machine, ledger.row_of[job], float(share), now_s, 0.0)
    for job, gpus in (*e.migrate, *e.start):
        ledger.guests.pop(job, None)
        _take(ledger, ledger.row_of[job], gpus, now_s)
    for guest, host in e.guests:
        ledger.guests[guest] = host
    if e.queues is not None:
        _set_queues(jobs, rows, unpacked_small(e.queues).astype(np.int64), now_s)
    ledger.fates[rows] = unpacked_small(e.fates)
    ledger.wake_s = NEVER if e.wake_s is None else float(e.wake_s)
    ledger.memory = e.memory if e.format >= 2 else None


def _take(ledger: Ledger, row: int, gpus: Sequence[int], now_s: float) -> None:
    ledger.table.jobs["width"][row] = len(gpus)
    first = int(ledger.table.jobs["first_slot"][row])
    ledger.table.slots[first : first + len(gpus)] = gpus
    _start(ledger.table, ledger.machine, row, now_s)


def _heirs(ledger: Ledger, row: int) -> Ints:
    """For each GPU of the job, the earliest of the other jobs that sit there, or FREE; none if it is parked."""
    if ledger.ids[row] in ledger.parked:
        return np.zeros(0, dtype=np.int64)
    mine = {gpu: int(FREE) for gpu in ledger.gpus_of(ledger.ids[row])}
    if ledger.table.jobs["share"][row] < 1.0:
        for job in ledger.holders():
            for gpu in ledger.gpus_of(job) if ledger.row_of[job] != row else ():
                if mine.get(gpu) == FREE:
                    mine[gpu] = ledger.row_of[job]
    return np.fromiter(mine.values(), np.int64, len(mine))


def _let_go(ledger: Ledger, row: int, now_s: float) -> None:
    for guest in [guest for guest, host in ledger.guests.items() if host == ledger.ids[row]]:
        del ledger.guests[guest]
    _stop(ledger.table, ledger.machine, row, now_s, ledger.quantum_s, _heirs(ledger, row))
    ledger.table.jobs["width"][row] = ledger.table.jobs["gpus"][row]  # it asks for its own number of them again
