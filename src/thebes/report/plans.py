"""A survey of execution plans as a drawing: how fast each family is, what the best plan needs, where its time goes.

The page is made of the same parts as the report of a run (see thebes.report.html); PNG and PDF are the first two charts
for a paper. Each family has a colour, so that one sees where the best plan changes its family.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thebes.model.plan import FAMILIES
from thebes.perf.plans.survey import Survey, SurveyRow
from thebes.report import figures, units
from thebes.report.charts import Chart, PlotlyPart
from thebes.report.files import load, unwritable, write_text
from thebes.report.html import heading_of, page, pair
from thebes.report.metrics import to_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HUES: dict[str, int] = dict(zip(FAMILIES, (1, 3, 2, 4), strict=True))
NAMES = {
    "dp": "data parallel",
    "zero-dp": "ZeRO data parallel",
    "zero-offload": "ZeRO-Offload",
    "3d": "3D (tensor, pipeline, data)",
}
PARTS = {
    "forward": ("forward", "@c1"),
    "backward": ("backward", "@c6"),
    "bubble": ("pipeline bubble", "@unused"),
    "tp": ("tensor-parallel traffic", "@c2"),
    "pp": ("pipeline traffic", "@c5"),
    "sync": ("gradients", "@c4"),
    "optimiser": ("optimiser", "@c3"),
    "offload": ("to the host and back", "@overhead"),
    "const": ("fixed", "@c0"),
}
WORDS = {
    "Plan": "How a model and its batch are divided: dp data-parallel copies, tp tensor-parallel, pp pipeline stages, "
    "ga micro-batches per iteration, gc gradient checkpointing. dp x tp x pp is the number of GPUs.",
    "ZeRO data parallel": "Data parallel, with gradients and the optimiser's state divided over the copies (stage 2).",
    "ZeRO-Offload": "The same, with gradients and the optimiser on the host.",
    "Pipeline bubble": "Stages that wait for the first micro-batch to come or the last to leave.",
    "1 % rule": "A number of GPUs that a smaller one comes within 1 % of is not worth giving.",
    "Memory": "The largest need of any GPU with a margin of 10 %.",
}


def write_plot(found: Survey, path: Path) -> None:
    """Write the drawing in the format that the name ends in."""
    if path.suffix.lower() == ".html":
        write_text(path, render(found))
    else:
        _write_figure(found, path)


def render(found: Survey) -> str:
    """The page as text."""
    model, site = found.model, found.site
    title = f"Execution plans of {model.name}"
    about = (
        f"{model.parameters / 1e9:.3g} billion parameters, global batch {model.global_batch}, "
        f"nodes of {site.node_gpus} x {site.gpu_type}"
    )
    drawn = [throughput_chart(found), memory_chart(found), parts_chart(found)]
    body = [
        f'<header><p class="kicker">Thebes execution plans</p><h1>{escape(title)}</h1>'
        f'<p class="lead">{escape(_finding(found))}</p></header>',
        f'<dl class="run"><div><dt>Model and cluster</dt><dd>{escape(about)}</dd></div></dl>',
        heading_of("How fast", "The best plan of each family, and the best of all in rings."),
        _key([(NAMES[family], f"@c{HUES[family]}") for family in _families(found)]),
        pair(drawn[:2]),
        heading_of("Where the time goes", "One iteration of the best plan, part by part, as far as it shows."),
        _key([(words, colour) for name, (words, colour) in PARTS.items() if _any(found, name)]),
        pair(drawn[2:], one=True),
        heading_of("The best plan on each number of GPUs"),
        _table(found),
    ]
    exact: list[Any] = [
        row.best._asdict() | {"plan": str(row.best.plan), "gpus": row.gpus, "nodes": row.nodes} for row in found.rows
    ]
    return page(title, body, drawn, to_json(exact), WORDS)


def _finding(found: Survey) -> str:
    first, last = found.rows[0], max(found.rows, key=lambda row: row.best.samples_s)
    if len(found.rows) == 1:
        return f"{first.gpus} GPUs train {first.best.samples_s:.3g} samples per second under {first.best.plan}."
    kinds = [row.best.plan.family for row in found.rows if row.instead == row.gpus]
    steps = [kinds[0], *(after for before, after in pairwise(kinds) if before != after)]
    change = f" The best family goes {' → '.join(steps)}." if 1 < len(steps) <= len(FAMILIES) else ""
    gain = last.best.samples_s / first.best.samples_s
    return (
        f"From {first.gpus} to {last.gpus} GPUs throughput grows {gain:.3g} times, to {last.best.samples_s:.3g} "
        f"samples per second.{change}"
    )


def _families(found: Survey) -> list[str]:
    return [family for family in FAMILIES if any(family in row.by_family for row in found.rows)]


def _any(found: Survey, part: str) -> bool:
    return any(getattr(row.parts, part) > 0 for row in found.rows)


def _gpu_axis(found: Survey) -> PlotlyPart:
    gpus = [row.gpus for row in found.rows]
    ticks = [count for count in gpus if count & (count - 1) == 0] or gpus
    return {
        "type": "log",
        "title": {"text": "GPUs"},
        "tickvals": ticks,
        "ticktext": [str(tick) for tick in ticks],
        "range": [float(np.log10(gpus[0] / 1.15)), float(np.log10(gpus[-1] * 1.15))],
    }


def _categories(found: Survey) -> PlotlyPart:
    """An axis on which numbers of GPUs stand side by side, in order."""
    names = [str(row.gpus) for row in found.rows]
    return {"type": "category", "title": {"text": "GPUs"}, "categoryorder": "array", "categoryarray": names}


def log_ticks(values: Sequence[float]) -> list[float]:
    """Ticks at 1, 2 and 5 of each decade that the values span, or at decades alone if there would be many."""
    low, high = min(values), max(values)
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    steps = (1, 2, 5) if len(decades) <= 4 else (1,)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    return [tick for tick in ticks if low / 2 <= tick <= high * 2]


_LAYOUT: PlotlyPart = {"margin": {"l": 58, "r": 12, "t": 8, "b": 46}, "hovermode": "closest", "showlegend": False}


def throughput_chart(found: Survey) -> Chart:
    """Samples per second by GPUs, a line per family."""
    data: list[PlotlyPart] = []
    for family in _families(found):
        rows = [row for row in found.rows if family in row.by_family]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": NAMES[family],
                "x": [row.gpus for row in rows],
                "y": [row.by_family[family].samples_s for row in rows],
                "text": [_said(row, family) for row in rows],
                "line": {"color": f"@c{HUES[family]}", "width": 1.6},
                "marker": {"color": f"@c{HUES[family]}", "size": 6},
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "best",
            "x": [row.gpus for row in found.rows],
            "y": [row.best.samples_s for row in found.rows],
            "marker": {"symbol": "circle-open", "size": 12, "color": "@ink", "line": {"width": 1.5}},
            "hoverinfo": "skip",
        }
    )
    first = found.rows[0]
    ideal = [first.best.samples_s * row.gpus / first.gpus for row in found.rows]
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "as many times the GPUs",
            "x": [row.gpus for row in found.rows],
            "y": ideal,
            "line": {"color": "@muted", "width": 1, "dash": "dot"},
            "hoverinfo": "skip",
        }
    )
    ticks = log_ticks([outlook.samples_s for row in found.rows for outlook in row.by_family.values()])
    return Chart(
        "throughput",
        "Throughput",
        "Dotted: the first best plan's throughput, as many times as there are GPUs.",
        380,
        data,
        {
            **_LAYOUT,
            "xaxis": _gpu_axis(found),
            "yaxis": {
                "type": "log",
                "title": {"text": "Samples per second"},
                "tickvals": ticks,
                "ticktext": [f"{tick:g}" for tick in ticks],
            },
        },
    )


def _said(row: SurveyRow, family: str) -> str:
    one = row.by_family[family]
    host = f", {one.host_gib:.1f} GiB on the host" if one.host_gib else ""
    return (
        f"{row.gpus} GPUs, {one.plan}: {one.samples_s:.3g} samples/s, {one.iteration_s:.3g} s per iteration,"
        f"<br>{one.gpu_gib:.1f} GiB on each GPU{host}"
    )


def memory_chart(found: Survey) -> Chart:
    """What the best plan needs on each GPU and on its host."""
    data: list[PlotlyPart] = []
    for family in _families(found):
        own = [row for row in found.rows if row.best.plan.family == family]
        data.append(
            {
                "type": "bar",
                "name": NAMES[family],
                "x": [str(row.gpus) for row in own],
                "y": [row.best.gpu_gib for row in own],
                "marker": {"color": f"@c{HUES[family]}"},
                "text": [f"{row.gpus} GPUs, {row.best.plan}: {row.best.gpu_gib:.1f} GiB" for row in own],
                "textposition": "none",
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    hosted = [row for row in found.rows if row.best.host_gib]
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "on the host, per GPU",
            "x": [str(row.gpus) for row in hosted],
            "y": [row.best.host_gib for row in hosted],
            "marker": {"symbol": "diamond-open", "size": 10, "color": "@ink"},
            "hovertemplate": "%{y:.1f} GiB of host memory per GPU<extra></extra>",
        }
    )
    top = 1.08 * max(found.site.gpu_gib, *(row.best.host_gib for row in found.rows))
    limit: PlotlyPart = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": found.site.gpu_gib,
        "y1": found.site.gpu_gib,
        "line": {"color": "@lost", "width": 1, "dash": "dash"},
    }
    return Chart(
        "memory",
        "Memory of the best plan",
        "GiB on each GPU, in the colour of the plan's family; dashed: what a GPU has. Diamonds: on the host, per GPU.",
        380,
        data,
        {
            **_LAYOUT,
            "barmode": "stack",
            "xaxis": _categories(found),
            "yaxis": {"title": {"text": "GiB"}, "range": [0, top]},
            "shapes": [limit],
        },
    )


def parts_chart(found: Survey) -> Chart:
    """One iteration of the best plan, part by part, as shares."""
    gpus = [str(row.gpus) for row in found.rows]
    data: list[PlotlyPart] = []
    for name, (words, colour) in PARTS.items():
        if not _any(found, name):
            continue
        seconds = [float(getattr(row.parts, name)) for row in found.rows]
        shares = [100 * part / row.parts.total for part, row in zip(seconds, found.rows, strict=True)]
        data.append(
            {
                "type": "bar",
                "name": words,
                "x": gpus,
                "y": shares,
                "text": [f"{words}: {_ms(part)}, {share:.1f}%" for part, share in zip(seconds, shares, strict=True)],
                "textposition": "none",
                "marker": {"color": colour},
                "hovertemplate": "%{x} GPUs, %{text}<extra></extra>",
            }
        )
    return Chart(
        "parts",
        "Shares of one iteration",
        "What overlaps counts only as far as it is not hidden.",
        340,
        data,
        {
            **_LAYOUT,
            "barmode": "stack",
            "xaxis": _categories(found),
            "yaxis": {"title": {"text": "Share of the iteration"}, "range": [0, 100], "ticksuffix": "%"},
        },
        wide=True,
    )


def _ms(seconds: float) -> str:
    return units.duration(seconds) if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _key(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(
        f'<li><span class="swatch" style="background:var(--{colour[1:]})"></span>{escape(words)}</li>'
        for words, colour in entries
    )
    return f'<ul class="key">{items}</ul>'


def _table(found: Survey) -> str:
    heads = ("GPUs", "nodes", "best plan", "s/iteration", "samples/s", "GPU GiB", "host GiB", "CPUs", "1 % rule")
    rows: list[str] = []
    for row in found.rows:
        best = row.best
        cells = (
            str(row.nodes),
            str(best.plan),
            f"{best.iteration_s:#.3g}",
            units.figure(best.samples_s),
            f"{best.gpu_gib:.1f}",
            f"{best.host_gib:.1f}" if best.host_gib else units.MISSING,
            str(row.useful_cpus),
            f"≈ {row.instead} GPUs" if row.instead != row.gpus else "",
        )
        said = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr><th>{row.gpus}</th>{said}</tr>")
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return (
        f'<div class="scroll"><table class="summary"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


# Figures for a paper.


def _write_figure(found: Survey, path: Path) -> None:
    matplotlib = load("matplotlib", needed_for="Drawing plans")
    new = load("matplotlib.figure", needed_for="Drawing plans").Figure
    with matplotlib.rc_context(figures.STYLE):
        figure = new(figsize=(figures.PAGE_IN, 2.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_throughput(found, left)
        _draw_memory(found, right)
        figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=6, columnspacing=1.2)
        kinds = {".png": {"Software": None}, ".pdf": {"CreationDate": None, "Producer": None, "Creator": "Thebes"}}
        try:
            figure.savefig(path, dpi=200, metadata=kinds[path.suffix.lower()])
        except OSError as error:
            raise unwritable(path, error) from error


def _draw_throughput(found: Survey, axes: Axes) -> None:
    for family in _families(found):
        rows = [row for row in found.rows if family in row.by_family]
        speeds = [row.by_family[family].samples_s for row in rows]
        colour = figures.COLOURS[HUES[family]]
        axes.plot([row.gpus for row in rows], speeds, color=colour, marker="o", markersize=3, label=NAMES[family])
    gpus = [row.gpus for row in found.rows]
    axes.plot(
        gpus,
        [row.best.samples_s for row in found.rows],
        linestyle="",
        marker="o",
        markersize=6,
        markerfacecolor="none",
        markeredgecolor=figures.INK,
        label="best",
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ticks = log_ticks([outlook.samples_s for row in found.rows for outlook in row.by_family.values()])
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("Samples per second")
    axes.grid(True)


def _draw_memory(found: Survey, axes: Axes) -> None:
    where = range(len(found.rows))
    colours = [figures.COLOURS[HUES[row.best.plan.family]] for row in found.rows]
    axes.bar(where, [row.best.gpu_gib for row in found.rows], color=colours, width=0.7)
    axes.axhline(found.site.gpu_gib, color=figures.PARTS["lost"], linestyle="--", linewidth=0.8)
    every = -(-len(found.rows) // 12)  # there is room for only so many labels
    axes.set_xticks([at for at in where if at % every == 0], [str(row.gpus) for row in found.rows[::every]])
    axes.set_xlabel("GPUs")
    axes.set_ylabel("GiB on each GPU, best plan")
    axes.grid(True, axis="y")
