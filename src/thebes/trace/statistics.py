"""The figures of a trace: those that trace papers print, so that traces can be compared.

Load figures use the span of submissions (last minus first): mean GPU demand = GPU-seconds / span. Percentiles
interpolate linearly, as NumPy does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from thebes.model.trace import Trace

PERCENTILES = (5, 25, 50, 75, 90, 95, 99)
# Upper bounds of the classes of GPU demand: powers of two, as in most papers.
CLASSES: tuple[tuple[str, float], ...] = (
    ("<1", 1.0 - 1e-9),
    ("1", 1.0),
    ("2", 2.0),
    ("3-4", 4.0),
    ("5-8", 8.0),
    ("9-16", 16.0),
    ("17-32", 32.0),
    ("33-64", 64.0),
    (">64", float("inf")),
)


def describe(trace: Trace) -> dict[str, Any]:
    """The figures as plain numbers and strings, ready for JSON."""
    submit, duration, gpus = (trace.jobs[name].to_numpy() for name in ("submit_time", "duration", "num_gpus"))
    work = duration * gpus
    span = float(submit.max() - submit.min()) if len(submit) else 0.0
    return {
        "trace": trace.name,
        "format": trace.format,
        "jobs": len(trace),
        "first_submit_s": float(submit.min()) if len(submit) else None,
        "span_s": span,
        "arrivals_per_hour": len(submit) * 3600.0 / span if span else None,
        "busiest_hour_jobs": _busiest_hour(submit),
        "gpu_hours": float(work.sum() / 3600.0),
        "mean_gpu_demand": float(work.sum() / span) if span else None,
        "max_gpus": float(gpus.max()) if len(gpus) else None,
        "fractional_gpu_jobs": int((gpus != np.ceil(gpus)).sum()),
        "duration_s": _spread(duration),
        "gpu_demand": _by_class(gpus, work),
        "users": _distinct(trace, "user"),
        "vcs": _distinct(trace, "vc"),
        "models": _distinct(trace, "model"),
        "gpu_types": _distinct(trace, "gpu_type"),
        "status": _counts(trace.jobs["status"]),
        "extra_columns": trace.jobs.columns[10:],
        "notes": list(trace.notes),
    }


def _busiest_hour(submit: np.ndarray) -> int:
    if not len(submit):
        return 0
    hours = np.floor((submit - submit.min()) / 3600.0)
    return int(np.unique(hours, return_counts=True)[1].max())


def _spread(duration: np.ndarray) -> dict[str, float]:
    if not len(duration):
        return {}
    points = np.percentile(duration, PERCENTILES)
    named = {f"p{share}": float(point) for share, point in zip(PERCENTILES, points, strict=True)}
    return {"mean": float(duration.mean()), "min": float(duration.min()), **named, "max": float(duration.max())}


def _by_class(gpus: np.ndarray, work: np.ndarray) -> list[dict[str, Any]]:
    place = np.searchsorted([bound for _, bound in CLASSES], gpus)
    rows = []
    for index, (name, _) in enumerate(CLASSES):
        mine = place == index
        if mine.any():
            rows.append(
                {
                    "gpus": name,
                    "jobs": int(mine.sum()),
                    "share_of_jobs": float(mine.mean()),
                    "gpu_hours": float(work[mine].sum() / 3600.0),
                    "share_of_gpu_hours": float(work[mine].sum() / work.sum()) if work.sum() else 0.0,
                }
            )
    return rows


def _distinct(trace: Trace, column: str) -> int:
    return int(trace.jobs[column].drop_nulls().n_unique())


def _counts(cells: pl.Series) -> dict[str, int]:
    """Counts, most frequent first, ties by name; unknown values are counted as such."""
    named = cells.fill_null("unknown")
    table = pl.DataFrame({"name": named}).group_by("name").len().sort(["len", "name"], descending=[True, False])
    return {str(name): int(number) for name, number in table.rows()}
