"""Dally's auto-tuner (arXiv 2401.16492): how long a job insists on GPUs that lie close together.

Whenever an offer on one machine or in one rack is accepted, the wait that led to it is remembered, by GPU demand. The
timers of later jobs of that demand are the mean of those waits plus two standard deviations, between a floor and a cap.
All waits and timers are in leases. The released code skips every second entry when it forgets old ones; ours does not.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import compiled, inlined, inner_maker

# The offers whose waits are remembered.
ON_MACHINE, IN_RACK = 0, 1
# Bounds of the two timers: the floors, and the largest part of the window.
MACHINE_FLOOR, RACK_FLOOR = 6.0, 12.0
MACHINE_CAP = 0.8
NO_HISTORY = 1.0
_ROUNDING = 1e-9  # a wait of seven leases must not become eight because of its last bit


class Waits(NamedTuple):
    """What the tuner remembers, oldest first; the arrays for compiled code have room for more."""

    key: NDArray[np.int64]  # a GPU demand, or a demand of one model
    offer: NDArray[np.int64]  # ON_MACHINE or IN_RACK
    at_s: NDArray[np.float64]  # when the offer was accepted
    leases: NDArray[np.float64]  # for how long the job had waited


NO_WAITS = Waits(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0))


@inner_maker
def with_room(waits: Waits, more: int) -> Waits:
    """A copy that can take so many further waits."""
    count = waits.key.size
    copy = Waits(
        np.zeros(count + more, dtype=np.int64),
        np.zeros(count + more, dtype=np.int64),
        np.zeros(count + more),
        np.zeros(count + more),
    )
    for i in range(count):
        copy.key[i], copy.offer[i] = waits.key[i], waits.offer[i]
        copy.at_s[i], copy.leases[i] = waits.at_s[i], waits.leases[i]
    return copy


@inlined
def first(waits: Waits, count: int) -> Waits:
    return Waits(waits.key[:count], waits.offer[:count], waits.at_s[:count], waits.leases[:count])


@compiled
def estimate(waits: Waits, count: int, key: int, offer: int) -> float:
    """Mean plus two (population) standard deviations of the first `count` waits that match; 1 if there are none."""
    n, total = 0, 0.0
    for i in range(count):
        if waits.key[i] == key and waits.offer[i] == offer:
            n += 1
            total += waits.leases[i]
    if n == 0:
        return NO_HISTORY
    mean, squares = total / n, 0.0
    for i in range(count):
        if waits.key[i] == key and waits.offer[i] == offer:
            squares += (waits.leases[i] - mean) ** 2
    return mean + 2.0 * math.sqrt(squares / n)


@compiled
def tune(waits: Waits, count: int, key: int, history: float) -> tuple[float, float]:
    """(D1, D2): for how many leases to insist on one machine, and on one rack; both run from the same instant."""
    on_machine, in_rack = estimate(waits, count, key, ON_MACHINE), estimate(waits, count, key, IN_RACK)
    return (
        min(np.ceil(MACHINE_CAP * history - _ROUNDING), max(MACHINE_FLOOR, np.ceil(on_machine - _ROUNDING))),
        min(history, max(RACK_FLOOR, np.ceil(in_rack - _ROUNDING))),
    )


@compiled
def record(waits: Waits, count: int, key: int, offer: int, now_s: float, leases: float, since_s: float) -> int:
    """Remember a wait of at least one lease, and forget waits of the same list from before `since_s`.

    It changes the arrays in place, and returns how many waits there are now.
    """
    if leases < 1.0:
        return count
    kept = 0
    for i in range(count):
        if waits.key[i] == key and waits.offer[i] == offer and waits.at_s[i] < since_s:
            continue
        waits.key[kept], waits.offer[kept] = waits.key[i], waits.offer[i]
        waits.at_s[kept], waits.leases[kept] = waits.at_s[i], waits.leases[i]
        kept += 1
    waits.key[kept], waits.offer[kept] = key, offer
    waits.at_s[kept], waits.leases[kept] = now_s, leases
    return kept + 1
