"""Gangs placed by hand on a copy of the machine, which the baselines beside Rubick share.

There is one kind of node, as performance model `plans` demands. A gang gets the fewest nodes that can hold it now, and
a gang that stays keeps its very GPUs. Python code here never looks at single GPUs: compiled code and NumPy do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from thebes.model.arrays import Ints
from thebes.model.compiled import entry
from thebes.model.decision import HOLDS, Decision
from thebes.model.jobs import NEVER
from thebes.model.machine import FREE, Machine, occupy, release, take
from thebes.model.profiles import TIER_CLUSTER
from thebes.model.view import View
from thebes.placement.by_tier import place_within

NO_SEAT: Ints = np.zeros(0, dtype=np.int64)
ONLY_KIND = 0

_place, _take, _release, _occupy = entry(place_within), entry(take), entry(release), entry(occupy)


def held_gpus(view: View) -> list[Ints]:
    """Per job of the View, the GPUs that it holds, ascending; none for a job that waits."""
    owner: Ints = view.machine.gpus["owner"]
    by_owner = np.argsort(owner, kind="stable")
    owners = owner[by_owner]
    first = np.searchsorted(owners, view.jobs.rows, side="left").tolist()
    last = np.searchsorted(owners, view.jobs.rows, side="right").tolist()
    return [by_owner[begin:end] for begin, end in zip(first, last, strict=True)]


def usable_gpus(machine: Machine) -> int:
    """GPUs that a job has or could have: not those of nodes that are down or drained."""
    return int(np.count_nonzero(machine.gpus["owner"] >= FREE))


def free_gpus(machine: Machine) -> int:
    return int(machine.kinds["free"][ONLY_KIND])


def node_counts(machine: Machine, seats: Sequence[Ints]) -> Ints:
    """GPUs by [gang, node]."""
    nodes = len(machine.nodes)
    gang = np.repeat(np.arange(len(seats)), [len(seat) for seat in seats])
    where = machine.gpus["node"][np.concatenate([NO_SEAT, *seats])]
    return np.bincount(gang * nodes + where, minlength=len(seats) * nodes).reshape(len(seats), nodes)


def seat_anywhere(machine: Machine, row: int, gpus: int) -> Ints:
    """GPUs for a gang on the fewest nodes that can hold it now; none if there are not so many."""
    out = np.empty(gpus, dtype=np.int64)
    return out if _place(machine, row, ONLY_KIND, gpus, TIER_CLUSTER, out) else NO_SEAT


def seat_on(machine: Machine, row: int, nodes: Sequence[int], gpus: int) -> Ints:
    """GPUs for a gang on these nodes, as many on each as it has free, until there are enough."""
    out = np.empty(gpus, dtype=np.int64)
    at = 0
    for node in nodes:
        at = int(_take(machine, row, node, min(gpus - at, int(machine.nodes["free"][node])), out, at))
    assert at == gpus, "the nodes do not have that many free GPUs"
    out.sort()
    return out


def give_up(machine: Machine, seat: Ints) -> None:
    _release(machine, seat)


def return_to(machine: Machine, row: int, seat: Ints) -> bool:
    """Take back the very GPUs that were given up, if no job has taken one of them."""
    if (machine.gpus["owner"][seat] != FREE).any():
        return False
    _occupy(machine, row, seat)
    return True


def decision_of(view: View, seats: Sequence[Ints], fate: Ints, *, wake_s: float = NEVER, **more: Any) -> Decision:
    """The Decision that gives each job its seat; `plans` and `cpus` come per job of the View, like `fate`."""
    counts = np.array([len(seat) for seat in seats], dtype=np.int64)
    held = counts > 0
    for column in ("plans", "cpus"):
        if more.get(column) is not None:
            more[column] = more[column][held]
    return Decision(
        rows=view.jobs.rows[held],
        gpus=np.concatenate([NO_SEAT, *seats]),
        fate=np.where(held, HOLDS, fate),
        wake_s=wake_s,
        counts=counts[held],
        **more,
    )


def next_round_s(now_s: float, round_s: float) -> float:
    """The first multiple of the round's length after now."""
    return (np.floor(now_s / round_s) + 1.0) * round_s
