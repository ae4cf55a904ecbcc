"""Organisations as the apps of Themis (Mahajan et al., NSDI'20): idle GPUs go to those that are treated worst.

rho of an organisation compares the time in which its present jobs will be done in the shared cluster with the time that
they would take on its quota alone. Of the GPUs that may be lent, the fraction 1-f of organisations with the largest rho
bids for bundles of whole gangs (`thebes.policy.fairness.auction`); what none of them wins goes to the others, worst
first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.view import View
from thebes.policy.fairness.auction import NOTHING, Bids, auction
from thebes.policy.fairness.leases import Allotment, Shares

MOST_BUNDLES = 32  # one organisation bids for at most so many


class Standing(NamedTuple):
    """The situation of each organisation now."""

    elapsed_s: NDArray[np.float64]  # since its oldest living job was submitted
    left_gpu_s: NDArray[np.float64]  # of its living jobs
    ideal_s: NDArray[np.float64]  # T_id: all of their work, on the quota alone


def standing(view: View, shares: Shares) -> Standing:
    jobs, organisations = view.jobs, len(shares.weight)
    elapsed_s = np.zeros(organisations)
    np.maximum.at(elapsed_s, jobs.tenant, view.now_s - jobs.submit_s)
    work = np.bincount(jobs.tenant, weights=jobs.duration_s * jobs.gpus, minlength=organisations)
    left = np.bincount(jobs.tenant, weights=jobs.remaining_s * jobs.gpus, minlength=organisations)
    demand = np.bincount(jobs.tenant, weights=jobs.gpus, minlength=organisations)
    longest_s = np.zeros(organisations)
    np.maximum.at(longest_s, jobs.tenant, jobs.duration_s)
    private = np.minimum(np.maximum(shares.quota.sum(axis=1), 1e-9), np.maximum(demand, 1.0))
    return Standing(elapsed_s, np.maximum(left, 1e-9), np.maximum(np.maximum(work / private, longest_s), 1e-9))


def rho(stands: Standing, organisation: int, gpus: NDArray[np.float64], wait_s: float) -> NDArray[np.float64]:
    """T_sh / T_id with so many GPUs from now on; without any, it waits for a lease and then expects one GPU."""
    work_s = stands.left_gpu_s[organisation] / np.maximum(gpus, 1.0) + np.where(gpus > 0, 0.0, wait_s)
    return (stands.elapsed_s[organisation] + work_s) / stands.ideal_s[organisation]


def worst_off(rhos: NDArray[np.float64], f: float) -> NDArray[np.int64]:
    """The organisations that see the offer: the fraction 1-f with the largest rho, at least one."""
    count = max(1, int(np.ceil((1.0 - f) * len(rhos) - 1e-9)))
    return np.argsort(-rhos, kind="stable")[:count]


def auction_urgency(
    view: View, shares: Shares, promised: Allotment, capacity: NDArray[np.int64], *, f: float, lease_s: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Urgency and charge per GPU that make lending follow the auction, after each has what `promised` says.

    An organisation goes first until it has what it won; then come those that won nothing, the worst off first.
    """
    jobs, organisations = view.jobs, len(shares.weight)
    size = np.where(jobs.running, jobs.width, jobs.gpus)
    counted = promised.granted >= 0
    given = np.bincount(jobs.tenant[counted], weights=size[counted], minlength=organisations).astype(np.float64)
    left = int(capacity.sum() - given.sum())
    wants = np.flatnonzero(~counted & (size <= left))
    charge = np.ones(organisations)
    won = np.zeros(organisations)
    stands = standing(view, shares)
    rhos = np.array([float(rho(stands, i, given[i : i + 1], lease_s)[0]) for i in range(organisations)])
    # Beyond what was won, places are less than one GPU apart, so that the order holds for the first GPU of each.
    place = np.empty(organisations)
    place[np.argsort(-rhos, kind="stable")] = np.arange(organisations) / organisations
    bidders = np.unique(jobs.tenant[wants])
    if len(bidders) > 1 and left > 0:
        bidders = np.sort(bidders[worst_off(rhos[bidders], f)])
        tables = [_bundles(size[wants[jobs.tenant[wants] == i]], left) for i in bidders]
        values = [
            1.0 / rho(stands, int(i), given[i] + table.astype(np.float64), lease_s)
            for i, table in zip(bidders, tables, strict=True)
        ]
        bids = Bids(
            np.repeat(np.arange(len(bidders)), [len(table) for table in tables]),
            np.concatenate(tables),
            np.concatenate(values),
            1.0 / rhos[bidders],
        )
        outcome = auction(bids, left, payments=False)
        bundle = outcome.bundle
        won[bidders[bundle != NOTHING]] = bids.gpus[bundle[bundle != NOTHING]]
    return place - given - won, charge


def _bundles(gangs: NDArray[np.int64], left: int) -> NDArray[np.int64]:
    """One gang, two gangs, … in the order of submission, as far as they fit."""
    sums = np.cumsum(gangs[:MOST_BUNDLES])
    return sums[: max(1, int(np.searchsorted(sums, left, side="right")))]
