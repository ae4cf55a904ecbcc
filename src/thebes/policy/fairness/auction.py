"""The partial-allocation auction of Themis (Mahajan et al., NSDI'20), as pure functions on numbers.

Bidders name bundles, each of some GPUs with the value V = 1/rho that it would bring; the GPUs go where the product of
all values is largest (proportional fairness). A *hidden payment* makes honest bids the best ones: a winner keeps only
the share c of its bundle that its presence leaves to the others (Cole, Gkatzelis and Goel, EC'13). A bidder can be
a job, whose only bundle is its whole gang, or an organisation, with one bundle for each number of GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import compiled, entry, maker
from thebes.model.errors import UserError

NOTHING = -1
EXACT_UP_TO = 2_000_000  # bundles x GPUs on offer


@dataclass(frozen=True, eq=False)
class Bids:
    """All tables, one after the other: bundle b belongs to `bidder[b]` (ascending) and has `gpus[b]` GPUs."""

    bidder: NDArray[np.int64]
    gpus: NDArray[np.int64]
    value: NDArray[np.float64]
    nothing: NDArray[np.float64]  # per bidder: the value of getting nothing

    def __post_init__(self) -> None:
        values = np.concatenate((self.value, self.nothing))
        if not (np.isfinite(values).all() and (values > 0.0).all()):
            raise UserError("an auction has a bid that is not above 0 and finite", hint="a value is 1/rho")
        if (np.diff(self.bidder) < 0).any() or (self.gpus < 1).any():
            raise UserError(
                "an auction's bundles are not in order of bidders, or empty",
                hint="sort them by bidder; what going away empty-handed is worth stands in `nothing`",
            )

    @property
    def gain(self) -> NDArray[np.float64]:
        """What each bundle adds to the logarithm of the product of all values."""
        return np.log(self.value) - np.log(self.nothing[self.bidder])

    @property
    def first(self) -> NDArray[np.int64]:
        """Bidder i has the bundles first[i] to first[i + 1]."""
        return np.searchsorted(self.bidder, np.arange(len(self.nothing) + 1)).astype(np.int64)


@dataclass(frozen=True, eq=False)
class AuctionResult:
    """What each bidder won, and how good the outcome is."""

    bundle: NDArray[np.int64]  # per bidder: a position in the bids, or NOTHING
    kept: NDArray[np.float64]  # per bidder: c, the share of its bundle that the hidden payment leaves it
    log_value: float  # logarithm of the product of all values, without payments
    bound: float  # no assignment has a larger one
    exact: bool  # whether it is proven to be the best

    @property
    def gap(self) -> float:
        """How far the product can be from the best one, in logarithms; 0 if it is the best."""
        return 0.0 if self.exact else max(0.0, self.bound - self.log_value)


def auction(bids: Bids, capacity: int, *, payments: bool = True, exact_up_to: int = EXACT_UP_TO) -> AuctionResult:
    """Assign `capacity` GPUs. It is exact if bundles x GPUs are at most `exact_up_to`, or else a local search."""
    first, gpus, gain = bids.first, bids.gpus, bids.gain
    exact = len(gpus) * capacity <= exact_up_to
    bundle = _best_bundles(first, gpus, gain, capacity) if exact else good_bundles(first, gpus, gain, capacity)
    won = _gain_of(gain, bundle)
    total, base = float(won.sum()), float(np.log(bids.nothing).sum())
    kept = np.ones(len(bids.nothing))
    if payments:
        others = best_without(first, gpus, gain, capacity) if exact else None
        for i in np.flatnonzero(bundle != NOTHING):
            without = others[i] if others is not None else _good_without(bids, gain, capacity, int(i))
            kept[i] = min(1.0, float(np.exp(total - won[i] - without)))
    bound = total if exact else _bound(first, gpus, gain, capacity)
    proven = exact or total >= bound - 1e-12 * max(1.0, abs(bound))
    return AuctionResult(bundle, kept, base + total, base + bound, proven)


def upper_bound(bids: Bids, capacity: int) -> float:
    """A bound that the logarithm of the product of all values never exceeds."""
    return float(np.log(bids.nothing).sum()) + _bound(bids.first, bids.gpus, bids.gain, capacity)


def _bound(first: NDArray[np.int64], gpus: NDArray[np.int64], gain: NDArray[np.float64], capacity: int) -> float:
    """Let a GPU have a price: what all would win at that price, plus the price of all GPUs, bounds every assignment.

    This is Lagrangian duality: any price gives a bound, and a bisection finds the price of the tightest.
    """
    if not len(gain) or capacity <= 0:
        return 0.0
    low, high = 0.0, max(0.0, float((gain / gpus).max()))
    best = lagrangian(first, gpus, gain, capacity, low)[0]
    for _ in range(60):
        price = (low + high) / 2.0
        value, wanted = lagrangian(first, gpus, gain, capacity, price)
        best = min(best, value)
        low, high = (price, high) if wanted > capacity else (low, price)
    return min(best, lagrangian(first, gpus, gain, capacity, high)[0])


@compiled
def lagrangian(
    first: NDArray[np.int64], gpus: NDArray[np.int64], gain: NDArray[np.float64], capacity: int, price: float
) -> tuple[float, int]:
    """The bound at this price of a GPU, and the number of GPUs wanted at it."""
    total, wanted = price * capacity, 0
    for i in range(first.size - 1):
        best, count = 0.0, 0
        for b in range(first[i], first[i + 1]):
            if gpus[b] <= capacity and gain[b] - price * gpus[b] > best:
                best, count = gain[b] - price * gpus[b], gpus[b]
        total += best
        wanted += count
    return total, wanted


def _gain_of(gain: NDArray[np.float64], bundle: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.where(bundle >= 0, gain[bundle] if len(gain) else 0.0, 0.0)


@maker
def best_bundles(
    first: NDArray[np.int64], gpus: NDArray[np.int64], gain: NDArray[np.float64], capacity: int
) -> NDArray[np.int64]:
    """The exact proportional-fair assignment: a knapsack with one choice per bidder, by dynamic programming."""
    bidders = first.size - 1
    best = np.zeros(capacity + 1)  # over the bidders so far, by GPUs that they may use
    choice = np.full((bidders, capacity + 1), -1, dtype=np.int32)
    for i in range(bidders):
        for room in range(capacity, 0, -1):  # downwards, so that below `room` stands the value without bidder i
            top = best[room]
            for b in range(first[i], first[i + 1]):
                if gpus[b] <= room and gain[b] > 0.0 and best[room - gpus[b]] + gain[b] > top:
                    top = best[room - gpus[b]] + gain[b]
                    choice[i, room] = b
            best[room] = top
    bundle = np.full(bidders, -1, dtype=np.int64)
    room = capacity
    for i in range(bidders - 1, -1, -1):
        bundle[i] = choice[i, room]
        if bundle[i] >= 0:
            room -= gpus[bundle[i]]
    return bundle


@maker
def best_without(
    first: NDArray[np.int64], gpus: NDArray[np.int64], gain: NDArray[np.float64], capacity: int
) -> NDArray[np.float64]:
    """For each bidder, the best total gain of all others without it: those before it meet those after it."""
    bidders = first.size - 1
    before, after = np.zeros((bidders + 1, capacity + 1)), np.zeros((bidders + 1, capacity + 1))
    for turn in range(bidders):
        for forward in (True, False):
            i = turn if forward else bidders - 1 - turn
            for room in range(capacity + 1):
                source = before[i] if forward else after[i + 1]
                top = source[room]
                for b in range(first[i], first[i + 1]):
                    if gpus[b] <= room and gain[b] > 0.0:
                        top = max(top, source[room - gpus[b]] + gain[b])
                if forward:
                    before[i + 1, room] = top
                else:
                    after[i, room] = top
    without = np.zeros(bidders)
    for i in range(bidders):
        for room in range(capacity + 1):
            without[i] = max(without[i], before[i, room] + after[i + 1, capacity - room])
    return without


_best_bundles = entry(best_bundles)


def _good_without(bids: Bids, gain: NDArray[np.float64], capacity: int, absent: int) -> float:
    silenced = np.where(bids.bidder == absent, 0.0, gain)
    return float(_gain_of(silenced, good_bundles(bids.first, bids.gpus, silenced, capacity)).sum())


def good_bundles(
    first: NDArray[np.int64], gpus: NDArray[np.int64], gain: NDArray[np.float64], capacity: int
) -> NDArray[np.int64]:
    """A proportional-fair assignment for many bidders: most gain per GPU first, then local search."""
    return search(first, gpus, gain, capacity, np.argsort(-gain / gpus, kind="stable"))


@maker
def search(
    first: NDArray[np.int64],
    gpus: NDArray[np.int64],
    gain: NDArray[np.float64],
    capacity: int,
    order: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Greedy in this order of bundles; then each bidder in turn changes its bundle, at one other's cost, if it pays."""
    bidders = first.size - 1
    owner = np.empty(gpus.size, dtype=np.int64)
    for i in range(bidders):
        owner[first[i] : first[i + 1]] = i
    bundle = np.full(bidders, -1, dtype=np.int64)
    room = capacity
    for b in order:
        had = bundle[owner[b]]
        had_gpus, had_gain = (gpus[had], gain[had]) if had >= 0 else (0, 0.0)
        if gain[b] > had_gain and gpus[b] - had_gpus <= room:
            bundle[owner[b]] = b
            room -= gpus[b] - had_gpus
    for _ in range(4):
        changed = False
        for b in order:
            had = bundle[owner[b]]
            had_gpus, had_gain = (gpus[had], gain[had]) if had >= 0 else (0, 0.0)
            more, missing = gain[b] - had_gain, gpus[b] - had_gpus - room
            if more <= 1e-12 or had == b:
                continue
            cheapest, loss = -1, more
            if missing > 0:
                for j in range(bidders):
                    won = bundle[j]
                    if j != owner[b] and won >= 0 and gpus[won] >= missing and gain[won] < loss - 1e-12:
                        cheapest, loss = j, gain[won]
                if cheapest < 0:
                    continue
                room += gpus[bundle[cheapest]]
                bundle[cheapest] = -1
            bundle[owner[b]] = b
            room -= gpus[b] - had_gpus
            changed = True
        if not changed:
            break
    return bundle


def whole_gpus(bids: Bids, outcome: AuctionResult) -> NDArray[np.int64]:
    """What each bidder keeps after its hidden payment, in whole GPUs, for bidders that can give up a part."""
    won = outcome.bundle != NOTHING
    gpus: NDArray[Any] = np.where(won, bids.gpus[outcome.bundle] if len(bids.gpus) else 0, 0)
    return np.floor(gpus * outcome.kept + 1e-9).astype(np.int64)


def leftovers(left: int, wants: NDArray[np.int64]) -> NDArray[np.int64]:
    """Hand out what is left one GPU at a time, in turn, to bidders that can still use one."""
    given = np.zeros(len(wants), dtype=np.int64)
    while left > 0 and (given < wants).any():
        takers = np.flatnonzero(given < wants)[:left]
        rounds = max(1, min(left // len(takers), int((wants[takers] - given[takers]).min())))
        given[takers] += rounds
        left -= rounds * len(takers)
    return given
