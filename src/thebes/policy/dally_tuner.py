"""Dally's auto-tuner (arXiv 2401.16492): how long a job shall insist on GPUs that lie close together.

Whenever an offer on one machine or in one rack is accepted, the wait that led to it is remembered, by GPU demand. The
timers of later jobs of that demand are the mean of those waits plus two standard deviations, between a floor and a cap.
All waits and timers are in leases. A `Tuner` is a value: `recorded` changes the arrays of one that was made for it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import compiled, inner

# The offers whose waits are remembered.
ON_MACHINE, IN_RACK = 0, 1
# Bounds of the two timers: no wait below the floor, none above this part of the window.
MACHINE_FLOOR, RACK_FLOOR = 6.0, 12.0
MACHINE_CAP, RACK_CAP = 0.8, 1.0
NO_HISTORY = 1.0
_ROUNDING = 1e-9  # a wait of seven leases must not become eight because of its last bit


class Tuner(NamedTuple):
    """Timers per key (a GPU demand, or a demand of one model), and the waits that they follow from, oldest first."""

    keys: NDArray[np.int64]  # ascending
    machine_wait: NDArray[np.float64]  # D1: how long to insist on one machine
    rack_wait: NDArray[np.float64]  # D2: how long to insist on one rack; both run from the same instant
    key: NDArray[np.int64]
    offer: NDArray[np.int64]  # ON_MACHINE or IN_RACK
    at_s: NDArray[np.float64]
    wait: NDArray[np.float64]


def fixed(machine_wait: float, rack_wait: float) -> Tuner:
    """Timers that are the same for everybody and never change."""
    none, never = np.zeros(0, dtype=np.int64), np.zeros(0)
    return Tuner(np.zeros(1, dtype=np.int64), np.array([machine_wait]), np.array([rack_wait]), none, none, never, never)


def untaught(keys: NDArray[np.int64], history: float) -> Tuner:
    """The timers of these demands before anything was recorded."""
    known = np.unique(keys)
    machine_wait, rack_wait = timers(NO_HISTORY, NO_HISTORY, history)
    start = fixed(machine_wait, rack_wait)
    return start._replace(
        keys=known,
        machine_wait=np.full(len(known), machine_wait),
        rack_wait=np.full(len(known), rack_wait),
    )


def with_keys(tuner: Tuner, keys: NDArray[np.int64], history: float) -> Tuner:
    """The same tuner, which also has timers for demands that it had not met."""
    at = np.minimum(np.searchsorted(tuner.keys, keys), len(tuner.keys) - 1)
    if len(tuner.keys) and (tuner.keys[at] == keys).all():
        return tuner
    wider = untaught(np.concatenate((tuner.keys, keys)), history)
    known = np.searchsorted(wider.keys, tuner.keys)
    wider.machine_wait[known], wider.rack_wait[known] = tuner.machine_wait, tuner.rack_wait
    return tuner._replace(keys=wider.keys, machine_wait=wider.machine_wait, rack_wait=wider.rack_wait)


def with_room(tuner: Tuner, more: int) -> Tuner:
    """A copy that compiled code may write so many further waits to."""
    room, seconds = np.zeros(more, dtype=np.int64), np.zeros(more)
    return Tuner(
        tuner.keys,
        tuner.machine_wait.copy(),
        tuner.rack_wait.copy(),
        np.concatenate((tuner.key, room)),
        np.concatenate((tuner.offer, room)),
        np.concatenate((tuner.at_s, seconds)),
        np.concatenate((tuner.wait, seconds)),
    )


def cut_to(tuner: Tuner, count: int) -> Tuner:
    """Without the room that was not used."""
    return tuner._replace(
        key=tuner.key[:count], offer=tuner.offer[:count], at_s=tuner.at_s[:count], wait=tuner.wait[:count]
    )


@compiled
def timers(on_machine: float, in_rack: float, history: float) -> tuple[float, float]:
    """(D1, D2) from what the waits for the two kinds of offers are estimated to be."""
    return (
        min(math.ceil(MACHINE_CAP * history - _ROUNDING), max(MACHINE_FLOOR, math.ceil(on_machine - _ROUNDING))),
        min(math.ceil(RACK_CAP * history - _ROUNDING), max(RACK_FLOOR, math.ceil(in_rack - _ROUNDING))),
    )


@compiled
def estimate(tuner: Tuner, count: int, key: int, offer: int) -> float:
    """Mean plus two (population) standard deviations of the waits remembered; 1 where there are none."""
    n, total = 0, 0.0
    for i in range(count):
        if tuner.key[i] == key and tuner.offer[i] == offer:
            n += 1
            total += tuner.wait[i]
    if n == 0:
        return NO_HISTORY
    mean, squares = total / n, 0.0
    for i in range(count):
        if tuner.key[i] == key and tuner.offer[i] == offer:
            squares += (tuner.wait[i] - mean) ** 2
    return mean + 2.0 * math.sqrt(squares / n)


@inner
def _without_old(tuner: Tuner, count: int, key: int, offer: int, oldest_s: float) -> int:
    """Forget the waits of this key and offer from before `oldest_s`; returns how many waits are left in all."""
    kept = 0
    for i in range(count):
        if tuner.key[i] == key and tuner.offer[i] == offer and tuner.at_s[i] < oldest_s:
            continue
        tuner.key[kept], tuner.offer[kept] = tuner.key[i], tuner.offer[i]
        tuner.at_s[kept], tuner.wait[kept] = tuner.at_s[i], tuner.wait[i]
        kept += 1
    return kept


@compiled
def recorded(
    tuner: Tuner, count: int, at: int, offer: int, now_s: float, wait: float, history: float, lease_s: float
) -> int:
    """Remember a wait (not those below one lease) of the key at this position; returns how many there are now."""
    if wait < 1.0:
        return count
    key = tuner.keys[at]
    count = _without_old(tuner, count, key, offer, now_s - history * lease_s)
    tuner.key[count], tuner.offer[count] = key, offer
    tuner.at_s[count], tuner.wait[count] = now_s, wait
    count += 1
    tuner.machine_wait[at], tuner.rack_wait[at] = timers(
        estimate(tuner, count, key, ON_MACHINE), estimate(tuner, count, key, IN_RACK), history
    )
    return count
