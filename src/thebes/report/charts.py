"""The charts of the page, as the plain dictionaries that plotly.js draws.

Colours are names of the page's own colours (`@ink`, `@c0`, …), which the page resolves when it draws, so that one file
serves a light screen, a dark one and paper. A run keeps its colour through all charts. The colours follow Okabe and
Ito's set for colour-blind readers; where there are more runs than colours, dashes and hatches tell the second round
apart.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from thebes.report import series, units
from thebes.report.fairness import rho_of
from thebes.report.metrics import Floats, column
from thebes.report.result import Result

PlotlyPart = dict[str, object]

HUES = 7  # @c0 … @c6; the first is neutral, for the run with which others are compared
DASHES = ("solid", "dash", "dot")
HATCHES = ("", "/", "x")
PART_COLOURS = {
    "useful": "@useful",
    "overhead": "@overhead",
    "lost": "@lost",
    "idle_held": "@idle",
    "unused": "@unused",
}
LONGEST_LABEL = 26
TENANTS_DRAWN = 12
SYMBOLS = ("circle", "diamond", "cross")


@dataclass(frozen=True)
class Look:
    """How one run is drawn, everywhere."""

    label: str  # escaped, because plotly.js reads a few tags in text
    hue: int
    round: int

    @property
    def colour(self) -> str:
        return f"@c{self.hue}"

    @property
    def dash(self) -> str:
        return DASHES[self.round % len(DASHES)]

    @property
    def hatch(self) -> str:
        return HATCHES[self.round % len(HATCHES)]


@dataclass(frozen=True)
class Chart:
    """A drawing and the words around it. A trace's `meta` is its run, so that the reader can single one out."""

    key: str
    title: str
    caption: str
    height: int
    data: list[PlotlyPart]
    layout: PlotlyPart = field(default_factory=dict)
    wide: bool = False


def looks(labels: Sequence[str]) -> list[Look]:
    """Colours in the order of the runs. A single run does not get the neutral one."""
    if len(labels) == 1:
        return [Look(short(labels[0]), 1, 0)]
    return [Look(short(label), *_hue_and_round(i)) for i, label in enumerate(labels)]


def _hue_and_round(index: int) -> tuple[int, int]:
    if index < HUES:
        return index, 0
    # The neutral colour is not used again, because dashed grey would look like a grid line.
    later, hue = divmod(index - HUES, HUES - 1)
    return 1 + hue, 1 + later


def short(label: str) -> str:
    """A label that fits a chart, safe to be read by plotly.js as markup and as a hover template."""
    clipped = label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "…"
    return html.escape(clipped).replace("%{", "% {")


def jct_chart(results: Sequence[Result], styles: Sequence[Look]) -> Chart:
    """The distribution of job completion times."""
    values = [column(result.jobs, "jct_s") for result in results]
    return Chart(
        "jct",
        "Job completion time",
        "Share of jobs that completed within a given time of being submitted. Further up and left is better.",
        340,
        *_distribution(values, styles, [r.jobs.height for r in results], "Job completion time"),
    )


def delay_chart(results: Sequence[Result], styles: Sequence[Look]) -> Chart:
    """The distribution of queueing delay."""
    values = [column(result.jobs, "queue_delay_s") for result in results]
    data, layout = _distribution(values, styles, [r.jobs.height for r in results], "Queueing delay", floor=1.0)
    return Chart(
        "delay",
        "Queueing delay",
        "Share of jobs that spent no longer than this without GPUs, all waits of a job added up. "
        "Delays under one second are drawn at one second.",
        340,
        data,
        layout,
    )


def rho_chart(results: Sequence[Result], styles: Sequence[Look]) -> Chart:
    """The distribution of finish-time fairness."""
    values = [rho_of(result.jobs, result.total_gpus) for result in results]
    data, layout = _distribution(
        values,
        styles,
        [r.jobs.height for r in results],
        "rho",
        floor=0.1,
        scale=Scale(units.figure, units.decades, "a rho of "),
    )
    fair: PlotlyPart = {
        "type": "line",
        "x0": 1,
        "x1": 1,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": {"color": "@muted", "width": 1, "dash": "dot"},
    }
    return Chart(
        "rho",
        "Finish-time fairness",
        "Share of jobs whose rho is no more than this. Left of the dotted line a job did as well as on its equal share "
        "of the cluster, or better.",
        340,
        data,
        layout | {"shapes": [fair]},
    )


def tenant_chart(results: Sequence[Result], styles: Sequence[Look]) -> Chart | None:
    """The rho of each organisation, a dot per run; None where there is only one organisation."""
    told = [cast("Mapping[str, float]", result.metrics.get("rho_by_tenant") or {}) for result in results]
    worst = {name: max(one.get(name, 0.0) for one in told) for one in told for name in one}
    names = sorted(worst, key=lambda name: (-worst[name], name))[:TENANTS_DRAWN]
    if len(names) < 2:
        return None
    data: list[PlotlyPart] = []
    for i, (one, look) in enumerate(zip(told, styles, strict=True)):
        rows = [row for row, name in enumerate(names) if name in one]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": look.label,
                "meta": i,
                "x": _numbers(np.array([one[names[row]] for row in rows])),
                "y": rows,
                "text": [short(names[row] or "nobody's") for row in rows],
                "marker": {"color": look.colour, "size": 9, "symbol": SYMBOLS[look.round % len(SYMBOLS)]},
                "hovertemplate": f"%{{text}} under {look.label}: rho %{{x:.3g}}<extra></extra>",
            }
        )
    shown = np.array([value for one in told for name, value in one.items() if name in names])
    ticks = units.decades(shown)
    layout: PlotlyPart = {
        "xaxis": {
            "type": "log",
            "title": {"text": "rho (log scale)"},
            "tickvals": list(ticks),
            "ticktext": list(ticks.values()),
        },
        "yaxis": {
            "tickvals": list(range(len(names))),
            "ticktext": [f"{short(name or 'nobody')} " for name in names],
            "range": [len(names) - 0.5, -0.5],
            "automargin": True,
            "fixedrange": True,
            "ticks": "",
        },
        "margin": {"l": 12, "r": 12, "t": 8, "b": 46},
        "hovermode": "closest",
        "showlegend": False,
    }
    more = f" The {TENANTS_DRAWN} worst off." if len(names) == TENANTS_DRAWN else ""
    return Chart(
        "tenants",
        "Fairness between organisations",
        f"The rho of each, mean over its jobs by work. Further left is better, dots close together are fairer.{more}",
        max(340, 60 + 22 * len(names)),
        data,
        layout,
    )


@dataclass(frozen=True)
class Scale:
    """How the values of a distribution are written: alone, on the axis, and in a sentence."""

    say: Callable[[float], str] = units.duration
    ticks: Callable[[Floats], dict[float, str]] = units.log_ticks
    within: str = ""


DURATIONS = Scale()


def _distribution(
    values: Sequence[Floats],
    styles: Sequence[Look],
    jobs: Sequence[int],
    title: str,
    *,
    floor: float | None = None,
    scale: Scale = DURATIONS,
) -> tuple[list[PlotlyPart], PlotlyPart]:
    known = np.concatenate([v[np.isfinite(v) & (v > 0)] for v in values]) if values else np.empty(0)
    low = floor if floor is not None else float(known.min()) if len(known) else 1.0
    ticks = scale.ticks(np.append(np.maximum(known, low), low))
    end = max(float(known.max()) if len(known) else 10.0, low * 10)
    data: list[PlotlyPart] = []
    for i, (one, look, n) in enumerate(zip(values, styles, jobs, strict=True)):
        x, y = series.cumulative(one, of=n, floor=low)
        # The curve starts at the axis (where a floor gathers the smallest values, at their share) and is level at the
        # end.
        start = [] if floor is not None else [0.0]
        x, y = np.concatenate([[low] * len(start), x, [end]]), np.concatenate([start, y, y[-1:] if len(y) else [0.0]])
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": look.label,
                "meta": i,
                "x": _numbers(x),
                "y": _numbers(y * 100),
                "customdata": [scale.say(value) for value in x.tolist()],
                "line": {"color": look.colour, "dash": look.dash, "width": 2, "shape": "hv"},
                "hovertemplate": f"{look.label}: %{{y:.1f}}% within {scale.within}%{{customdata}}<extra></extra>",
            }
        )
    layout: PlotlyPart = {
        "xaxis": {
            "type": "log",
            "title": {"text": f"{title} (log scale)"},
            "tickvals": list(ticks),
            "ticktext": list(ticks.values()),
            "range": [float(np.log10(low)), float(np.log10(end * 1.05))],
        },
        "yaxis": {"title": {"text": "Jobs"}, "range": [0, 101], "ticksuffix": "%", "dtick": 25},
        "margin": {"l": 54, "r": 12, "t": 8, "b": 46},
        "hovermode": "closest",
        "showlegend": False,
    }
    return data, layout


def class_charts(results: Sequence[Result], styles: Sequence[Look]) -> list[Chart]:
    """The JCT of each class of jobs: a panel per class, a bar per run."""
    if not results:
        return []
    small, short_s = series.class_limits(results[0].metrics)
    sizes = {True: f"at most {units.count(small)} GPUs", False: f"more than {units.count(small)} GPUs"}
    lengths = {True: f"under {units.count(short_s)} s", False: f"{units.count(short_s)} s or longer"}
    charts = []
    for figures in series.by_class(results):
        job_class = figures.job_class
        jobs = "1 job" if figures.jobs == 1 else f"{units.count(figures.jobs)} jobs"
        charts.append(
            Chart(
                f"class-{job_class.key}",
                job_class.label,
                f"{sizes[job_class.small]}, {lengths[job_class.short]}: {jobs}",
                34 + _row_height(len(styles)) * len(styles),
                *_bars(figures.mean_s, figures.median_s, styles),
            )
        )
    return charts


def _bars(
    means: Sequence[float | None], medians: Sequence[float | None], styles: Sequence[Look]
) -> tuple[list[PlotlyPart], PlotlyPart]:
    largest = max((value for value in (*means, *medians) if value is not None), default=1.0) or 1.0
    data: list[PlotlyPart] = []
    rows = list(range(len(styles)))
    for i, (mean, median, look) in enumerate(zip(means, medians, styles, strict=True)):
        said = units.duration(mean)
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": look.label,
                "meta": i,
                "x": [mean or 0.0],
                "y": [i],
                "width": 0.66,
                "marker": {"color": look.colour, "pattern": _pattern(look)},
                "hovertemplate": f"{look.label}: mean {said}, median {units.duration(median)}<extra></extra>",
            }
        )
        if median is not None:
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "meta": i,
                    "x": [median],
                    "y": [i],
                    "marker": {
                        "symbol": "line-ns",
                        "size": round(_row_height(len(styles)) * 0.4),
                        "line": {"width": 2, "color": "@median"},
                    },
                    "hoverinfo": "skip",
                }
            )
    # The words stand in a column of their own at the right, so that bars stay comparable and nothing overlaps.
    notes = [
        {
            "x": 1,
            "xref": "paper",
            "xanchor": "right",
            "y": row,
            "yref": "y",
            "text": units.duration(means[row]),
            "showarrow": False,
            "font": {"color": "@ink", "size": 12},
        }
        for row in rows
    ]
    layout: PlotlyPart = {
        "xaxis": {
            "visible": False,
            "range": [0, largest * 1.3],
            "fixedrange": True,
        },
        "yaxis": _run_axis(styles),
        "margin": {"l": 12, "r": 4, "t": 4, "b": 8},
        "annotations": notes,
        "showlegend": False,
        "barmode": "overlay",
    }
    return data, layout


def _run_axis(styles: Sequence[Look]) -> PlotlyPart:
    return {
        "tickvals": list(range(len(styles))),
        "ticktext": [f"{look.label} " for look in styles],
        "range": [len(styles) - 0.5, -0.5],
        "automargin": True,
        "showgrid": False,
        "zeroline": False,
        "fixedrange": True,
        "ticks": "",
        "tickfont": {"color": "@ink"},
    }


def _row_height(runs: int) -> int:
    return 34 if runs <= 4 else 26


def _pattern(look: Look) -> PlotlyPart:
    if not look.hatch:
        return {"shape": ""}
    return {"shape": look.hatch, "fillmode": "overlay", "fgcolor": "@paper", "fgopacity": 1, "size": 6, "solidity": 0.3}


def utilisation_chart(results: Sequence[Result], styles: Sequence[Look]) -> Chart:
    """GPUs held over time, a row per run."""
    held = [series.steps_of(result.timeline, "busy_gpus") for result in results]
    curves = [series.Steps(s.edges, 100 * s.values / r.total_gpus) for s, r in zip(held, results, strict=True)]
    data, layout, bins = _rows_over_time(results, curves, styles, top=100.0, suffix="%", say=_mean_share)
    return Chart(
        "utilisation",
        "GPUs in use",
        f"Share of the cluster's GPUs held by jobs.{bins}",
        _rows_height(len(styles)),
        data,
        layout,
    )


def queue_chart(results: Sequence[Result], styles: Sequence[Look]) -> Chart:
    """Waiting jobs over time, a row per run, all on one scale."""
    curves = [series.steps_of(result.timeline, "waiting_jobs") for result in results]
    top = _round_up(max((float(curve.values.max()) for curve in curves if len(curve.values)), default=1.0))
    data, layout, bins = _rows_over_time(results, curves, styles, top=top, suffix="", say=_mean_and_peak)
    return Chart(
        "queue",
        "Queue length",
        f"Jobs without GPUs, all rows on one scale.{bins}" if len(styles) > 1 else f"Jobs without GPUs.{bins}",
        _rows_height(len(styles)),
        data,
        layout,
    )


def _round_up(value: float) -> float:
    """A round number that is not smaller, for the top of an axis."""
    power = 10.0 ** np.floor(np.log10(max(value, 1.0)))
    return float(next(step * power for step in (1, 2, 3, 4, 5, 6, 8, 10) if step * power >= value))


def _mean_share(curve: series.Steps) -> str:
    return "" if curve.mean is None else f"mean {curve.mean:.1f}%"


def _mean_and_peak(curve: series.Steps) -> str:
    if curve.mean is None:
        return ""
    return f"mean {units.count(curve.mean)}, peak {units.count(float(curve.values.max()))}"


def _rows_height(runs: int) -> int:
    if runs == 1:
        return 260
    return 44 + (112 if runs <= 4 else 74) * runs


def _rows_over_time(
    results: Sequence[Result],
    curves: Sequence[series.Steps],
    styles: Sequence[Look],
    *,
    top: float,
    suffix: str,
    say: Callable[[series.Steps], str],
) -> tuple[list[PlotlyPart], PlotlyPart, str]:
    begin, end = series.first_submit(results), series.last_instant(results)
    unit = units.axis_unit(end - begin)
    width_s = (end - begin) / series.MAX_POINTS or None
    thinned = [series.thin(curve, width_s=width_s) for curve in curves]
    binned = any(small is not curve for small, curve in zip(thinned, curves, strict=True))
    data: list[PlotlyPart] = []
    layout: PlotlyPart = {
        "margin": {"l": 50, "r": 12, "t": 20, "b": 42},
        "showlegend": False,
        "hovermode": "closest",
        "xaxis": {
            "title": {"text": f"Time since the first submission ({unit.name})"},
            "range": [0, (end - begin) / unit.seconds or 1],
            "anchor": "y" if len(styles) == 1 else f"y{len(styles)}",
            "showgrid": False,
        },
    }
    notes: list[PlotlyPart] = []
    ticks = [0.0, top / 2, top] if (top / 2).is_integer() else [0.0, top]
    gap = 24 / (_rows_height(len(styles)) - 62)  # room for the names between rows, as a share of the plot
    row = (1 - gap * (len(styles) - 1)) / len(styles)
    for i, (curve, small, look) in enumerate(zip(curves, thinned, styles, strict=True)):
        axis = "" if i == 0 else str(i + 1)
        ceiling = 1 - i * (row + gap)
        layout[f"yaxis{axis}"] = {
            "domain": [max(ceiling - row, 0.0), ceiling],
            "range": [0, top * 1.02],
            "tickvals": ticks,
            "ticktext": [f"{units.count(tick)}{suffix}" for tick in ticks],
            "fixedrange": True,
            "zeroline": False,
        }
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": look.label,
                "x": _numbers((small.edges - begin) / unit.seconds),
                "y": _numbers(np.append(small.values, small.values[-1:])),
                "yaxis": f"y{axis}",
                "line": {"color": look.colour, "width": 1.2, "shape": "hv"},
                "fill": "tozeroy",
                "fillcolor": f"{look.colour}/0.22",
                "hovertemplate": f"{look.label}: %{{y:.4~g}}{suffix} at %{{x:.4~g}} {unit.name}<extra></extra>",
            }
        )
        shared: PlotlyPart = {
            "xref": "paper",
            "yref": "paper",
            "y": ceiling,
            "yanchor": "bottom",
            "yshift": 1,
            "showarrow": False,
        }
        if len(styles) > 1:
            text = f"<b>{look.label}</b>"
            font: PlotlyPart = {"color": look.colour, "size": 12}
            notes.append({**shared, "x": 0, "xanchor": "left", "text": text, "font": font})
        notes.append(
            {**shared, "x": 1, "xanchor": "right", "text": say(curve), "font": {"size": 11, "color": "@muted"}}
        )
    layout["annotations"] = notes
    told = f" Time-weighted means in bins of {units.duration(width_s)}." if binned and width_s else ""
    return data, layout, told


def account_chart(metrics: Sequence[Mapping[str, object]], styles: Sequence[Look], *, key: str = "account") -> Chart:
    """What became of every GPU-second between the first submission and the last finish."""
    accounts = [series.account(one) for one in metrics]
    largest = max((sum(max(v, 0.0) for v in one.values()) for one in accounts), default=0.0)
    unit, name = (units.HOUR_S, "GPU-hours") if largest >= 10 * units.HOUR_S else (1.0, "GPU-seconds")
    data: list[PlotlyPart] = []
    for part, words in series.ACCOUNT_PARTS.items():
        values = [max(one[part], 0.0) for one in accounts]
        if not any(values):
            continue
        wholes = [sum(one.values()) or 1.0 for one in accounts]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": words,
                "x": _numbers(np.array(values) / unit),
                "y": list(range(len(styles))),
                "width": 0.66,
                "marker": {"color": PART_COLOURS[part], "line": {"width": 0}},
                # A share is written into its bar if there is room for it; the table below has the others.
                "text": [units.share(v / w) if v > 0.09 * largest else "" for v, w in zip(values, wholes, strict=True)],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "insidetextfont": {"color": "@muted" if part == "unused" else "@paper", "size": 11.5},
                "customdata": [
                    f"{look.label}: {words.lower()} {units.gpu_time(value)}, {units.share(value / whole)}"
                    for look, value, whole in zip(styles, values, wholes, strict=True)
                ],
                "hovertemplate": "%{customdata}<extra></extra>",
            }
        )
    layout: PlotlyPart = {
        "barmode": "stack",
        "uniformtext": {"mode": "hide", "minsize": 10},
        "showlegend": False,
        "xaxis": {"title": {"text": name}, "rangemode": "tozero", "fixedrange": True},
        "yaxis": _run_axis(styles),
        "margin": {"l": 12, "r": 16, "t": 4, "b": 44},
    }
    return Chart(
        key,
        f"{name} by use",
        "All that the cluster could have given between the first submission and the last finish.",
        60 + _row_height(len(styles)) * len(styles),
        data,
        layout,
        wide=True,
    )


def gantt_charts(results: Sequence[Result], styles: Sequence[Look]) -> list[Chart]:
    """The life of each job, a chart per run; none if there are too many jobs (series.why_no_gantt says so)."""
    if series.why_no_gantt(results):
        return []
    begin, end = series.first_submit(results), series.last_instant(results)
    unit = units.axis_unit(end - begin)
    return [
        _gantt(i, result, look, begin, end, unit) for i, (result, look) in enumerate(zip(results, styles, strict=True))
    ]


def _gantt(index: int, result: Result, look: Look, begin: float, end: float, unit: units.TimeUnit) -> Chart:
    jobs = result.jobs.height
    row_px = 16 if jobs <= 30 else 9 if jobs <= 50 else 6
    names = [short(name) for name in result.jobs["job_id"].to_list()]
    gpus = result.jobs["gpus"].to_list()
    strokes = {
        series.WAITING: ("@waiting", max(row_px * 0.22, 1.2)),
        series.SUSPENDED: ("@suspended", max(row_px * 0.36, 1.6)),
        series.RUNNING: (look.colour, row_px * 0.74),
    }
    lives = series.spans(result.events)
    data: list[PlotlyPart] = []
    for state, (colour, width) in strokes.items():
        own = [span for span in lives if span.state == state]
        x: list[float | None] = []
        y: list[int | None] = []
        told: list[str] = []
        for span in own:
            length = units.duration(span.end_s - span.begin_s)
            words = f"{names[span.job]}, {units.count(gpus[span.job])} GPUs: {state} {length}"
            x += [*_numbers(np.array([span.begin_s - begin, span.end_s - begin]) / unit.seconds), None]
            y += [span.job, span.job, None]
            told += [words, words, ""]
        if own:
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": x,
                    "y": y,
                    "text": told,
                    "line": {"color": colour, "width": round(width, 1)},
                    "hovertemplate": "%{text}<extra></extra>",
                    "connectgaps": False,
                }
            )
    axis: PlotlyPart = {
        "range": [jobs - 0.5, -0.5],
        "showgrid": False,
        "zeroline": False,
        "fixedrange": True,
        "ticks": "",
    }
    if jobs <= 30:
        axis |= {"tickvals": list(range(jobs)), "ticktext": [f"{name} " for name in names], "automargin": True}
    else:
        axis |= {"title": {"text": "Jobs in order of submission"}, "showticklabels": False}
    layout: PlotlyPart = {
        "showlegend": False,
        "hovermode": "closest",
        "xaxis": {
            "title": {"text": f"Time since the first submission ({unit.name})"},
            "range": [0, (end - begin) / unit.seconds or 1],
        },
        "yaxis": axis,
        "margin": {"l": 12 if jobs <= 30 else 28, "r": 12, "t": 4, "b": 42},
    }
    average = units.duration(result.metrics.get("avg_jct"))  # type: ignore[arg-type]
    height = 52 + max(row_px * jobs, 60)
    return Chart(f"gantt-{index}", look.label, f"average JCT {average}", height, data, layout)


def _numbers(values: Floats) -> list[float]:
    """Values with six digits, which is more than a screen shows and makes the file half as large."""
    return [float(f"{value:.6g}") for value in values.tolist()]


def theme() -> Mapping[str, object]:
    """The settings that all charts share."""
    axis = {
        "gridcolor": "@grid",
        "linecolor": "@rule",
        "zerolinecolor": "@rule",
        "tickfont": {"color": "@muted", "size": 11.5},
        "title": {"font": {"color": "@muted", "size": 12}, "standoff": 8},
        "zeroline": False,
    }
    return {
        "axis": axis,
        "layout": {
            "font": {"family": "@font", "size": 12, "color": "@ink"},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "hoverlabel": {"bgcolor": "@ink", "bordercolor": "@ink", "font": {"color": "@paper", "size": 12}},
            "dragmode": False,
        },
    }
