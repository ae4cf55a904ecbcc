"""Finish-time fairness: how much longer a job took than it would have on its own equal share of the cluster.

The definition is that of Themis (Mahajan et al., NSDI'20) in the form of Gavel: rho = JCT / T_id. T_id is the time that
the job would need on 1/N of the R GPUs, N being the average number of jobs alive during its life:
T_id = duration * max(1, N * gpus / R). A rho of 1 or less is fair; the worst rho of a run is what Themis minimises.
"""

from __future__ import annotations

import math

import numpy as np
import polars as pl

from thebes.model.arrays import Floats


def rho_of(jobs: pl.DataFrame, total_gpus: int) -> Floats:
    """The rho of each row of `Result.jobs`; NaN where a job did not finish or has no length."""
    submit_s, finish_s, duration_s, gpus = (_floats(jobs, c) for c in ("submit_s", "finish_s", "duration_s", "gpus"))
    if not len(submit_s):
        return submit_s
    jct_s = finish_s - submit_s
    counts = np.isfinite(jct_s) & (jct_s > 0) & (duration_s > 0)
    alone_s = duration_s * np.maximum(1.0, alive_on_average(submit_s, finish_s) * gpus / total_gpus)
    return np.divide(jct_s, alone_s, out=np.full(len(jct_s), np.nan), where=counts)


def alive_on_average(submit_s: Floats, finish_s: Floats) -> Floats:
    """For each job, the time-weighted mean of the number of jobs alive between its submission and its finish, with
    itself. A job that never finished is alive to the end. It takes O(n log n): one integral of the number alive."""
    known = np.isfinite(finish_s)
    end_s = max(float(submit_s.max()), float(finish_s[known].max()) if known.any() else -math.inf)
    gone_s = np.where(known, finish_s, end_s)
    times_s = np.concatenate((submit_s, gone_s))
    order = np.argsort(times_s, kind="stable")
    at_s = times_s[order]
    alive = np.cumsum(np.where(order < len(submit_s), 1, -1))
    # Times count from the first submission, because small numbers keep more digits.
    job_seconds = np.concatenate(([0.0], np.cumsum(alive[:-1] * np.diff(at_s - at_s[0]))))
    lived = job_seconds[np.searchsorted(at_s, gone_s)] - job_seconds[np.searchsorted(at_s, submit_s)]
    length_s = gone_s - submit_s
    return np.divide(lived, length_s, out=np.ones(len(lived)), where=length_s > 0)


def rho_by_tenant(jobs: pl.DataFrame, rho: Floats) -> dict[str, float]:
    """The rho of each tenant: the mean over its jobs, each weighted by its work (GPUs times duration).

    The weight is work because a tenant is owed GPU time: a hundred jobs of a minute each that waited an hour do
    not outweigh the month of training beside them. (The plain mean over jobs is the metric `mean_rho`.)
    """
    known = np.isfinite(rho)
    weight = _floats(jobs, "gpus") * _floats(jobs, "duration_s")
    table = pl.DataFrame(
        {"tenant": jobs["tenant"].fill_null(""), "weight": weight, "weighted": weight * np.where(known, rho, 0.0)}
    ).filter(pl.Series(known))
    parts = table.partition_by("tenant", as_dict=True)
    sums = {
        str(tenant): (math.fsum(part["weighted"].to_list()), math.fsum(part["weight"].to_list()))
        for (tenant,), part in parts.items()
    }
    return {tenant: sums[tenant][0] / sums[tenant][1] for tenant in sorted(sums)}


def _floats(frame: pl.DataFrame, name: str) -> Floats:
    return frame.get_column(name).cast(pl.Float64).fill_null(float("nan")).to_numpy()
