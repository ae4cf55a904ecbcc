"""What the policy sees of a ledger, and a fingerprint of it."""

from __future__ import annotations

import hashlib
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

from thebes.live.ledger.packed import unpacked
from thebes.model.facts import DISTRIBUTION
from thebes.model.jobs import JobTable
from thebes.model.machine import Machine, copy_of
from thebes.model.view import Board, JobsView, View

if TYPE_CHECKING:
    from thebes.live.ledger.ledger import Ledger


def view_of(ledger: Ledger, now_s: float) -> View:
    """What the policy sees: copies of all that it could write to, so that the ledger stays as it is."""
    now_s = float(now_s)  # compiled code that first sees a whole number would take only whole numbers from then on
    needs = ledger.policy.needs
    services = np.array(ledger.services if DISTRIBUTION in needs else [])
    table, machine = _copies(ledger)
    return View(
        now_s=now_s,
        cluster=ledger.shown_cluster,
        jobs=JobsView(table, ledger.scheduled(), now_s, needs, knowledge=ledger.knowledge),
        machine=machine,
        board=Board(table, ledger.sketch, ledger.strategy, max(1, len(ledger.gang_classes))),
        finished_gpu_s=services,
        memory=_remembered(ledger.memory),
        last_finish_s=ledger.last_finish_s,
        tenants=tuple(ledger.tenants) or ("",),
    )


def _copies(ledger: Ledger) -> tuple[JobTable, Machine]:
    """Table and machine as they are now, in arrays that are kept from one view to the next."""
    sources, last = (*ledger.table, *ledger.machine), ledger.shown
    copies = sources if last is None else (*last[0], *last[1])
    if last is None or [a.shape for a in sources] != [a.shape for a in copies]:
        ledger.shown = JobTable(*(array.copy() for array in ledger.table)), copy_of(ledger.machine)
        return ledger.shown
    rows = len(ledger.ids)
    np.copyto(copies[0][:rows], sources[0][:rows])
    for source, kept in zip(sources[1:], copies[1:], strict=True):
        np.copyto(kept, source)
    return last


def _remembered(text: str | None) -> object:
    """What a policy remembers is of its own class. If that cannot be read any more, the policy begins afresh.

    The journal is ours alone: nobody else writes to the store.
    """
    try:
        return None if text is None else pickle.loads(unpacked(text))
    except Exception:
        return None


def digest_of(ledger: Ledger, now_s: float) -> str:
    """A fingerprint of all that the policy sees. Every decision has one: of 20,000 jobs it takes 6 ms."""
    what, rows = hashlib.sha256(), len(ledger.ids)
    what.update(repr((now_s, sorted(ledger.blocked), ledger.tenants, ledger.memory)).encode())
    what.update(ledger.table.jobs[:rows].view(np.uint8))  # without a copy, so with those that have left
    arrays: tuple[Any, ...] = (
        ledger.marks[:rows],
        ledger.scheduled(),
        np.ascontiguousarray(ledger.machine.gpus["owner"]),
        ledger.table.quotas,
        np.array(ledger.services if DISTRIBUTION in ledger.policy.needs else []),
    )
    for array in arrays:
        what.update(array)
    if ledger.packing:
        what.update(repr((ledger.rates, ledger.guests, [(sorted(p), t) for p, t in ledger.undone])).encode())
    return what.hexdigest()[:32]
