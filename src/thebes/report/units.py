"""Figures as people say them: `1.42 h`, `3.25 d`, `86.1%`, `2.31×`. Exact figures are for JSON."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MISSING = "–"
MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0

# Ticks on a logarithmic axis of durations: lengths that people know, about evenly apart.
DURATION_TICKS_S = {
    0.001: "1 ms",
    0.01: "10 ms",
    0.1: "0.1 s",
    1.0: "1 s",
    10.0: "10 s",
    MINUTE_S: "1 min",
    10 * MINUTE_S: "10 min",
    HOUR_S: "1 h",
    6 * HOUR_S: "6 h",
    DAY_S: "1 d",
    10 * DAY_S: "10 d",
    100 * DAY_S: "100 d",
    1000 * DAY_S: "1,000 d",
}

ROUND_DURATIONS_S = (
    *(n * 1.0 for n in (1, 2, 5, 10, 20, 30)),
    *(n * MINUTE_S for n in (1, 2, 5, 10, 20, 30)),
    *(n * HOUR_S for n in (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 36)),
    *(n * DAY_S for n in (2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100, 200, 500)),
)


@dataclass(frozen=True)
class TimeUnit:
    """The unit of one time axis."""

    name: str
    short: str
    seconds: float


TIME_UNITS = (
    TimeUnit("days", "d", DAY_S),
    TimeUnit("hours", "h", HOUR_S),
    TimeUnit("minutes", "min", MINUTE_S),
    TimeUnit("seconds", "s", 1),
)


def axis_unit(span_s: float) -> TimeUnit:
    """The largest unit of which `span_s` holds at least three, so that an axis has whole numbers to show."""
    return next((unit for unit in TIME_UNITS if span_s >= 3 * unit.seconds), TIME_UNITS[-1])


def duration(seconds: float | None) -> str:
    """`42.0 s`, `12.5 min`, `1.42 h`, `3.25 d`: one unit, three digits."""
    if seconds is None:
        return MISSING
    size = abs(seconds)
    if size < MINUTE_S:
        return f"{_three_digits(seconds)} s"
    if size < HOUR_S:
        return f"{_three_digits(seconds / MINUTE_S)} min"
    if size < 2 * DAY_S:
        return f"{_three_digits(seconds / HOUR_S)} h"
    return f"{_three_digits(seconds / DAY_S)} d"


def gpu_time(gpu_seconds: float | None) -> str:
    """GPU-hours, the unit in which clusters are paid for; GPU-seconds where there is less than one."""
    if gpu_seconds is None:
        return MISSING
    if 0 < abs(gpu_seconds) < HOUR_S:
        return f"{_three_digits(gpu_seconds)} GPU-s"
    return f"{_three_digits(gpu_seconds / HOUR_S)} GPU-h"


def share(fraction: float | None) -> str:
    """A percentage with one decimal; a share that is not zero never reads as zero."""
    if fraction is None:
        return MISSING
    return "<0.1%" if 0 < fraction < 0.0005 else f"{100 * fraction:.1f}%"


def ratio(value: float | None, reference: float | None) -> str:
    """How many times `reference` the value is."""
    if value is None or not reference:
        return MISSING
    return times(value / reference)


def times(factor: float | None) -> str:
    """A factor: `1.08×`, `412×`."""
    if factor is None:
        return MISSING
    return f"{factor:.2f}×" if factor < 100 else f"{factor:,.0f}×"


def figure(value: float | None) -> str:
    """A number without a unit, three digits: `1.08`, `41.2`, `5,210`."""
    if value is None:
        return MISSING
    return f"{value:.2f}" if abs(value) < 9.995 else _three_digits(value)


def count(value: float | None) -> str:
    """A whole number with its thousands set apart; what is not whole keeps three digits."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if float(value).is_integer() else _three_digits(value)


def log_ticks(values: npt.NDArray[np.float64]) -> dict[float, str]:
    """The duration ticks that cover `values`, one beyond at either end."""
    known = values[values > 0]
    if not len(known):
        return {1.0: "1 s", 10.0: "10 s"}
    ticks = np.array(list(DURATION_TICKS_S))
    first = max(int(np.searchsorted(ticks, known.min(), side="right")) - 1, 0)
    last = min(int(np.searchsorted(ticks, known.max(), side="left")), len(ticks) - 1)
    return {tick: DURATION_TICKS_S[tick] for tick in ticks[first : last + 1].tolist()}


def close_ticks(values: npt.NDArray[np.float64], most: int = 6) -> dict[float, str]:
    """Round durations inside the range of `values`, for a logarithmic axis that spans little."""
    if not len(values):
        return {}
    inside = [tick for tick in ROUND_DURATIONS_S if values.min() * 0.95 <= tick <= values.max() * 1.05]
    step = -(-len(inside) // most) or 1
    return {tick: _round_duration(tick) for tick in inside[::step]}


def _round_duration(seconds: float) -> str:
    unit = next(unit for unit in TIME_UNITS if seconds >= unit.seconds * (2 if unit.name == "days" else 1))
    return f"{seconds / unit.seconds:g} {unit.short}"


def decades(values: npt.NDArray[np.float64]) -> dict[float, str]:
    """Ticks at 0.1, 1, 10, … that cover `values`, on a logarithmic axis of plain numbers; also at 2 and 5 if few."""
    known = values[values > 0]
    if not len(known):
        return {1.0: "1", 10.0: "10"}
    first, last = int(np.floor(np.log10(known.min()))), int(np.ceil(np.log10(known.max())))
    steps = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    return {tick: f"{tick:,g}" for tick in ticks if tick <= 10.0**last}


def _three_digits(value: float) -> str:
    size = abs(value)
    if size >= 99.95 or value == 0:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 else f"{value:.2g}"
