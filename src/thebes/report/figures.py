"""The charts of the report as figures for a paper: PNG at 200 dpi and PDF, the same bytes each time.

Matplotlib draws the same series as the page, in the page's colours. Lettering is sized for print (7 to 8 points) and
widths are those of one or two columns, so that a figure goes into a paper without scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from thebes.model.errors import UserError
from thebes.report import charts, series, units
from thebes.report.fairness import rho_of
from thebes.report.files import load, make_folder, unwritable
from thebes.report.metrics import Floats, column
from thebes.report.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN_IN, PAGE_IN = 3.3, 7.0  # the widths of one and of both columns of a paper
COLOURS = ("#5b6472", "#0072b2", "#d55e00", "#009e73", "#a6428f", "#c98a00", "#45a7e0")
PARTS = {"useful": "#2f6f8f", "overhead": "#e69f00", "lost": "#c8412b", "idle_held": "#a487c0", "unused": "#dfe3e9"}
WAITING, SUSPENDED = "#c3c9d2", "#e69f00"
INK, MUTED, GRID = "#16181d", "#626976", "#e6e9ee"
LINES = {"solid": "-", "dash": (0, (3, 1.4)), "dot": (0, (1, 1.2))}
HATCHES = {"": "", "/": "/////", "x": "xxxxx"}

STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # it ships with Matplotlib, so letters are the same on every machine
    "font.size": 7.0,
    "axes.labelsize": 7.0,
    "axes.titlesize": 7.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#9aa1ad",
    "axes.linewidth": 0.6,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.2,
    "ytick.major.size": 2.2,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 6.5,
    "legend.handlelength": 2.0,
    "lines.linewidth": 1.2,
    "hatch.linewidth": 0.8,
    "pdf.fonttype": 42,  # real fonts, because conferences refuse type 3
    "svg.hashsalt": "thebes",
}


def write_figures(results: Sequence[Result], directory: Path) -> list[Path]:
    """Write every chart as PNG and PDF into `directory`; returns the paths in order."""
    if not results:
        raise UserError("there is no result to draw.", hint="Run at least one policy.")
    matplotlib = load("matplotlib", needed_for="Writing figures")
    figure_class = load("matplotlib.figure", needed_for="Writing figures").Figure
    make_folder(directory)
    looks = charts.looks(series.labels([result.metrics for result in results]))
    # Matplotlib has no markup, so labels are not escaped.
    names = [_plain(look.label) for look in looks]
    written: list[Path] = []
    with matplotlib.rc_context(STYLE):
        for name, draw in figures_of(results, looks, names).items():
            figure = draw(figure_class)
            written += _save(figure, directory / name)
    return written


Draw = Callable[[type["Figure"]], "Figure"]


def figures_of(results: Sequence[Result], looks: Sequence[charts.Look], names: Sequence[str]) -> dict[str, Draw]:
    """What is drawn, by file name. Each figure is made when it is written, and freed after that."""
    jct = [column(result.jobs, "jct_s") for result in results]
    delay = [column(result.jobs, "queue_delay_s") for result in results]
    rho = [rho_of(result.jobs, result.total_gpus) for result in results]
    drawn: dict[str, Draw] = {
        "jct": lambda new: _distribution(new, results, looks, names, jct, "Job completion time", None),
        "queueing-delay": lambda new: _distribution(new, results, looks, names, delay, "Queueing delay", 1.0),
        "fairness": lambda new: _distribution(
            new, results, looks, names, rho, "Finish-time fairness rho", 0.1, units.decades
        ),
        "jct-by-class": lambda new: _classes(new, results, looks, names),
        "utilisation": lambda new: _over_time(new, results, looks, names, "busy_gpus", "GPUs in use (%)"),
        "queue-length": lambda new: _over_time(new, results, looks, names, "waiting_jobs", "Waiting jobs"),
        "gpu-time": lambda new: _account(new, results, names),
    }
    if not series.why_no_gantt(results):
        drawn["jobs"] = lambda new: _gantt(new, results, looks, names)
    return drawn


def _distribution(
    new: type[Figure],
    results: Sequence[Result],
    looks: Sequence[charts.Look],
    names: Sequence[str],
    values: Sequence[Floats],
    title: str,
    floor: float | None,
    ticks_of: Callable[[Floats], dict[float, str]] = units.log_ticks,
) -> Figure:
    across = len(names) if sum(map(len, names)) + 4 * len(names) <= 52 else 3  # a column holds about as many letters
    legend_rows = -(-len(names) // across) if len(names) > 1 else 0
    figure = new(figsize=(COLUMN_IN, 2.1 + 0.14 * legend_rows), layout="constrained")
    axes = figure.subplots()
    known = np.concatenate([v[np.isfinite(v) & (v > 0)] for v in values])
    low = floor if floor is not None else float(known.min()) if len(known) else 1.0
    end = max(float(known.max()) if len(known) else 10.0, low * 10)
    for one, look, name, result in zip(values, looks, names, results, strict=True):
        x, y = series.cumulative(one, of=result.jobs.height, floor=low)
        x, y = np.append(x, end), np.append(y, y[-1:] if len(y) else [0.0])
        axes.step(x, 100 * y, where="post", color=COLOURS[look.hue], linestyle=LINES[look.dash], label=name)
    ticks = ticks_of(np.append(np.maximum(known, low), low))
    axes.set_xscale("log")
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xticks([], minor=True)
    axes.set_xlim(low, end * 1.05)
    axes.set_ylim(0, 101)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.set_xlabel(title)
    axes.set_ylabel("Jobs (%)")
    axes.grid(True)
    if legend_rows:
        figure.legend(loc="outside upper center", ncols=across, columnspacing=1.2)
    return figure


def _classes(
    new: type[Figure], results: Sequence[Result], looks: Sequence[charts.Look], names: Sequence[str]
) -> Figure:
    figure = new(figsize=(PAGE_IN, 0.75 + 2 * 0.155 * len(names) + 0.5), layout="constrained")
    panels = figure.subplots(2, 2)
    for axes, figures in zip(panels.flat, series.by_class(results), strict=True):
        largest = max((v for v in (*figures.mean_s, *figures.median_s) if v is not None), default=1.0) or 1.0
        for row, (mean, median, look) in enumerate(zip(figures.mean_s, figures.median_s, looks, strict=True)):
            bar = axes.barh(row, mean or 0.0, height=0.68, color=COLOURS[look.hue], edgecolor="white", linewidth=0)
            bar[0].set_hatch(HATCHES[look.hatch])
            if median is not None:
                axes.plot([median, median], [row - 0.42, row + 0.42], color=INK, linewidth=1.1)
            axes.text(1.0, row, units.duration(mean), transform=axes.get_yaxis_transform(), ha="right", va="center")
        axes.set_xlim(0, largest * 1.3)
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.set_title(f"{figures.job_class.label} ({figures.jobs:,} jobs)")
    figure.supxlabel("Job completion time: mean (bar) and median (tick); each class has its own scale", fontsize=6.5)
    return figure


def _over_time(
    new: type[Figure],
    results: Sequence[Result],
    looks: Sequence[charts.Look],
    names: Sequence[str],
    what: str,
    title: str,
) -> Figure:
    begin, end = series.first_submit(results), series.last_instant(results)
    unit = units.axis_unit(end - begin)
    width_s = (end - begin) / series.MAX_POINTS or None
    curves = [series.steps_of(result.timeline, what) for result in results]
    if what == "busy_gpus":
        curves = [series.Steps(c.edges, 100 * c.values / r.total_gpus) for c, r in zip(curves, results, strict=True)]
    top = max((float(c.values.max()) for c in curves if len(c.values)), default=1.0) or 1.0
    top = 100.0 if what == "busy_gpus" else top
    row_in = 0.62 if len(names) > 1 else 1.5
    figure = new(figsize=(COLUMN_IN, 0.5 + row_in * len(names)), layout="constrained")
    panels: list[Axes] = list(np.atleast_1d(figure.subplots(len(names), 1, sharex=True, sharey=True)))
    for axes, curve, look, name in zip(panels, curves, looks, names, strict=True):
        small = series.thin(curve, width_s=width_s)
        if len(small.values):
            axes.stairs(
                small.values, (small.edges - begin) / unit.seconds, fill=True, color=COLOURS[look.hue], alpha=0.22
            )
            axes.stairs(
                small.values,
                (small.edges - begin) / unit.seconds,
                color=COLOURS[look.hue],
                linewidth=0.8,
                baseline=None,
            )
        axes.grid(True, axis="y")
        if len(names) > 1:
            axes.set_title(name, color=COLOURS[look.hue], pad=2)
        if curve.mean is not None:
            axes.set_title(f"mean {curve.mean:,.1f}", loc="right", fontsize=6.5, pad=2, weight="normal")
    panels[0].set_ylim(0, top * 1.02)
    panels[0].set_xlim(0, (end - begin) / unit.seconds or 1)
    panels[-1].set_xlabel(f"Time since the first submission ({unit.name})")
    figure.supylabel(title, fontsize=7)
    return figure


def _account(new: type[Figure], results: Sequence[Result], names: Sequence[str]) -> Figure:
    accounts = [series.account(result.metrics) for result in results]
    largest = max(sum(max(v, 0.0) for v in one.values()) for one in accounts)
    unit, word = (units.HOUR_S, "GPU-hours") if largest >= 10 * units.HOUR_S else (1.0, "GPU-seconds")
    figure = new(figsize=(COLUMN_IN, 0.85 + 0.17 * len(names)), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(names))
    for part, words in series.ACCOUNT_PARTS.items():
        width = np.array([max(one[part], 0.0) / unit for one in accounts])
        axes.barh(range(len(names)), width, left=left, height=0.68, color=PARTS[part], label=words)
        left += width
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(word)
    axes.grid(True, axis="x")
    figure.legend(loc="outside upper center", ncols=5, columnspacing=0.9, handlelength=0.9, handletextpad=0.4)
    return figure


def _gantt(new: type[Figure], results: Sequence[Result], looks: Sequence[charts.Look], names: Sequence[str]) -> Figure:
    begin, end = series.first_submit(results), series.last_instant(results)
    unit = units.axis_unit(end - begin)
    across = 1 if len(names) == 1 else 2
    down = -(-len(names) // across)
    jobs = max(result.jobs.height for result in results)
    figure = new(figsize=(PAGE_IN, 0.6 + down * (0.35 + max(0.028 * jobs, 0.6))), layout="constrained")
    panels = list(np.atleast_1d(figure.subplots(down, across, sharex=True, sharey=True)).flat)
    for axes, result, look, name in zip(panels, results, looks, names, strict=False):
        strokes = {
            series.WAITING: (WAITING, 0.25, "waiting"),
            series.SUSPENDED: (SUSPENDED, 0.4, "suspended"),
            series.RUNNING: (COLOURS[look.hue], 0.8, "running"),
        }
        lives = series.spans(result.events)
        for state, (colour, height, _) in strokes.items():
            own = [span for span in lives if span.state == state]
            axes.barh(
                [span.job for span in own],
                [(span.end_s - span.begin_s) / unit.seconds for span in own],
                left=[(span.begin_s - begin) / unit.seconds for span in own],
                height=height,
                color=colour,
            )
        axes.set_title(name)
        axes.grid(True, axis="x")
        axes.tick_params(axis="y", length=0, labelleft=False)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    panels[0].set_ylim(jobs - 0.5, -0.5)
    panels[0].set_xlim(0, (end - begin) / unit.seconds or 1)
    figure.supylabel("Jobs in order of submission", fontsize=7)
    figure.supxlabel(
        f"Time since the first submission ({unit.name}); running in colour, waiting grey, suspended orange", fontsize=7
    )
    return figure


def _save(figure: Figure, stem: Path) -> list[Path]:
    # The files have no dates and no versions, so that equal results make equal bytes.
    kinds = {".png": {"Software": None}, ".pdf": {"CreationDate": None, "Producer": None, "Creator": "Thebes"}}
    paths = []
    for suffix, metadata in kinds.items():
        path = stem.with_suffix(suffix)
        try:
            figure.savefig(path, dpi=200, metadata=metadata)
        except OSError as error:
            raise unwritable(path, error) from error
        paths.append(path)
        figure.set_layout_engine("none")  # it is laid out once, so that the second format keeps the places of the first
    return paths


def _plain(label: str) -> str:
    """A label for Matplotlib: without entities, and without a dollar sign, which would start a formula."""
    return unescape(label).replace("$", r"\$")
