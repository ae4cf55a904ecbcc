"""Many policies on several traces and networks, as one page: which policy is best where, and what that costs.

The page is made of the same parts as the report of one comparison (see thebes.report.html). It needs only figures, not
whole results, so that hundreds of runs fit. A run that failed stands in its place with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from thebes.report import charts, units
from thebes.report.charts import Chart, Look, PlotlyPart
from thebes.report.files import write_text
from thebes.report.html import heading_of, number, page, pair, summary_table
from thebes.report.metrics import to_json
from thebes.report.tables import Figures


@dataclass(frozen=True)
class Scene:
    """A trace and the cluster that it is replayed on."""

    trace: str
    cluster: str
    about: str


@dataclass(frozen=True)
class Run:
    """One policy in one scene on one network: its figures, or why there are none."""

    trace: str
    network: str
    policy: str
    figures: Figures | None = None
    error: str = ""


@dataclass(frozen=True)
class OverviewFigure:
    """A figure that the overview shows for all runs at once."""

    key: str
    title: str
    say: Callable[[float | None], str]
    about: str
    relative: bool = True  # relative to the best of its column, or else as it is


VIEWS = (
    OverviewFigure("avg_jct", "Average JCT", units.times, "Times the lowest average JCT of the column."),
    OverviewFigure("p99_jct", "99th percentile JCT", units.times, "Times the lowest 99th percentile of the column."),
    OverviewFigure("makespan", "Makespan", units.times, "Times the shortest makespan of the column."),
    OverviewFigure(
        "max_rho", "Worst rho", units.figure, "Finish-time fairness of the worst-off job; 1 is fair.", relative=False
    ),
    OverviewFigure(
        "mean_rho", "Mean rho", units.figure, "Finish-time fairness, mean over jobs; 1 is fair.", relative=False
    ),
    OverviewFigure(
        "communication_share",
        "Communication",
        units.share,
        "Share of running GPU time in communication that compute does not hide.",
        relative=False,
    ),
    OverviewFigure(
        "fragmentation",
        "Fragmentation",
        units.share,
        "Share of all GPU time that idled although waiting jobs asked for it.",
        relative=False,
    ),
    OverviewFigure("gpu_utilization", "GPU utilisation", units.share, "Useful share of all GPU time.", relative=False),
)
HIGHER_IS_BETTER = ("gpu_utilization",)
DARKEST = 62  # per cent of the warning colour behind the worst figure
LEAST_SPAN = math.log(1.5)  # the worst gets the full colour if it is at least this many times the best
SYMBOLS = ("circle", "diamond", "square", "cross", "triangle-up")


def write_matrix(runs: Sequence[Run], scenes: Sequence[Scene], path: Path, *, title: str, about: Sequence[str]) -> None:
    """Write the page of these runs as one HTML file."""
    write_text(path, render_matrix(runs, scenes, title=title, about=about))


def render_matrix(runs: Sequence[Run], scenes: Sequence[Scene], *, title: str, about: Sequence[str] = ()) -> str:
    """The page as text. `about` are sentences on how it was made."""
    networks = list(dict.fromkeys(run.network for run in runs))
    policies = list(dict.fromkeys(run.policy for run in runs))
    styles = dict(zip(policies, charts.looks(policies), strict=True))
    at = {(run.trace, run.network, run.policy): run for run in runs}
    shown = [scene for scene in scenes if any(run.trace == scene.trace for run in runs)]
    parts = [
        f'<header><p class="kicker">Thebes comparison of policies</p><h1>{escape(title)}</h1>'
        f'<p class="lead">{_finding(runs)}</p></header>',
        _scenes(shown, networks, about),
        heading_of(
            "Who is best where", "Each column is a trace on a network. The warmer a cell, the further from the best."
        ),
        _overview(at, shown, networks, policies),
    ]
    drawn: list[Chart] = []
    for number_, scene in enumerate(shown):
        own = _scene_charts(at, scene, number_, networks, policies, styles)
        drawn += own
        parts += [
            heading_of(scene.trace, f"{scene.about} Cluster {scene.cluster}."),
            pair(own[:2]),
            _tables(at, scene, number_, networks, policies, styles),
            pair(own[2:], one=True),
        ]
    parts.append(_failures(runs))
    exact = to_json({"runs": [_named(run) for run in runs]})
    return page(title, parts, drawn, exact)


def _finding(runs: Sequence[Run]) -> str:
    """How often each policy is the best, in a sentence."""
    won: dict[str, int] = {}
    cells = {(run.trace, run.network) for run in runs}
    for cell in cells:
        own = {r.policy: v for r in runs if (r.trace, r.network) == cell and (v := _value(r, "avg_jct")) is not None}
        for policy in (p for p, v in own.items() if v == min(own.values())):
            won[policy] = won.get(policy, 0) + 1
    leaders = sorted(won, key=lambda policy: (-won[policy], policy))[:3]
    told = ", ".join(f"<strong>{escape(policy)}</strong> ({won[policy]} of {len(cells)})" for policy in leaders)
    return f"{len(runs):,} runs. The lowest average JCT most often: {told or 'nobody'}."


def _scenes(scenes: Sequence[Scene], networks: Sequence[str], about: Sequence[str]) -> str:
    rows = [(scene.trace, scene.cluster, scene.about) for scene in scenes]
    rows.append(("Networks", ", ".join(networks), " ".join(about)))
    cells = "".join(
        f"<div><dt>{escape(term)}</dt><dd>{escape(words)}<small>{escape(more)}</small></dd></div>"
        for term, words, more in rows
    )
    return f'<dl class="run">{cells}</dl>'


def _overview(
    at: Mapping[tuple[str, str, str], Run], scenes: Sequence[Scene], networks: Sequence[str], policies: Sequence[str]
) -> str:
    panes = [
        _Pane(
            f"view-{view.key}",
            view.title,
            f'<p class="about">{escape(view.about)}</p>{_heat(at, scenes, networks, policies, view)}',
        )
        for view in VIEWS
    ]
    return _one_in_sight("Which figure", panes, 0)


class _Pane(NamedTuple):
    key: str
    title: str
    body: str


def _one_in_sight(question: str, panes: Sequence[_Pane], shown: int) -> str:
    """Panes of which one is visible, with a button for each."""
    buttons = "".join(
        f'<button type="button" data-view="{pane.key}" aria-pressed="{str(i == shown).lower()}">{pane.title}</button>'
        for i, pane in enumerate(panes)
    )
    bodies = "".join(
        f'<div id="{pane.key}"{"" if i == shown else " hidden"}>{pane.body}</div>' for i, pane in enumerate(panes)
    )
    return f'<nav class="pick" aria-label="{question}">{buttons}</nav>{bodies}'


def _heat(
    at: Mapping[tuple[str, str, str], Run],
    scenes: Sequence[Scene],
    networks: Sequence[str],
    policies: Sequence[str],
    view: OverviewFigure,
) -> str:
    columns = [(scene.trace, network) for scene in scenes for network in networks]
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for column in columns:
        values = [v for p in policies if (v := _value(at.get((*column, p)), view.key)) is not None]
        if values:
            low, high = min(values), max(values)
            best[column] = (high, low) if view.key in HIGHER_IS_BETTER else (low, high)
    rows = []
    for policy in policies:
        cells = "".join(_heat_cell(at.get((*column, policy)), view, best.get(column)) for column in columns)
        rows.append(f"<tr><th>{escape(policy)}</th>{cells}</tr>")
    traces = "".join(f"<th colspan={len(networks)}>{escape(scene.trace)}</th>" for scene in scenes)
    below = "".join(f"<th>{escape(network)}</th>" for _, network in columns)
    return (
        f'<div class="scroll"><table class="matrix sortable"><thead><tr><th></th>{traces}</tr>'
        f"<tr><th>Policy</th>{below}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _heat_cell(run: Run | None, view: OverviewFigure, best_and_worst: tuple[float, float] | None) -> str:
    if run is not None and run.error:
        return f'<td class="text failed" title="{escape(run.error)}">failed</td>'
    value = _value(run, view.key)
    if value is None or best_and_worst is None:
        return f'<td class="text">{units.MISSING}</td>'
    best, worst = best_and_worst
    said = view.say(value / best if view.relative and best else value)
    lead = " class=best" if value == best else ""
    return f'<td{lead} data-v="{value:.6g}" style="background:{_warmth(value, best, worst)}">{said}</td>'


def _warmth(value: float, best: float, worst: float) -> str:
    """A colour behind a figure: none for the best, the warning colour for the worst, by logarithms where possible."""
    if value == best or worst == best:
        return "var(--soft)"
    if min(value, best, worst) > 0:  # if all are nearly equal, none gets a colour
        part = abs(math.log(value / best)) / max(abs(math.log(worst / best)), LEAST_SPAN)
    else:
        part = (value - best) / (worst - best)
    return f"color-mix(in srgb, var(--c2) {DARKEST * part:.0f}%, var(--soft))"


def _scene_charts(
    at: Mapping[tuple[str, str, str], Run],
    scene: Scene,
    index: int,
    networks: Sequence[str],
    policies: Sequence[str],
    styles: Mapping[str, Look],
) -> list[Chart]:
    middle = networks[len(networks) // 2]
    done = [p for p in policies if _value(at.get((scene.trace, middle, p)), "avg_jct") is not None]
    if not done:
        return []
    figures = [at[scene.trace, middle, policy].figures or {} for policy in done]
    return [
        _jct_chart(at, scene, index, networks, done),
        _trade_chart(figures, done, styles, index, middle),
        charts.account_chart(figures, [styles[policy] for policy in done], key=f"account-{index}"),
    ]


def _jct_chart(
    at: Mapping[tuple[str, str, str], Run], scene: Scene, index: int, networks: Sequence[str], policies: Sequence[str]
) -> Chart:
    """The average JCT of each policy, a dot per network, the best policy on top."""

    def jct(policy: str, network: str) -> float | None:
        return _value(at.get((scene.trace, network, policy)), "avg_jct")

    means = {p: np.mean([v for n in networks if (v := jct(p, n)) is not None]) for p in policies}
    order = sorted(policies, key=lambda policy: means[policy])
    data: list[PlotlyPart] = []
    for place, network in enumerate(networks):
        known = [(row, value) for row, policy in enumerate(order) if (value := jct(policy, network)) is not None]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": charts.short(network),
                "x": [float(f"{value:.6g}") for _, value in known],
                "y": [row for row, _ in known],
                "customdata": [f"{charts.short(order[row])}: {units.duration(value)}" for row, value in known],
                "marker": {"color": f"@c{1 + place % 6}", "size": 8, "symbol": SYMBOLS[place % len(SYMBOLS)]},
                "hovertemplate": f"%{{customdata}} on {charts.short(network)}<extra></extra>",
            }
        )
    values = np.array([value for trace in data for value in trace["x"]])  # type: ignore[union-attr]
    ticks = units.close_ticks(values)
    layout: PlotlyPart = {
        "xaxis": {
            "type": "log",
            "title": {"text": "Average JCT (log scale)"},
            "tickvals": list(ticks),
            "ticktext": list(ticks.values()),
            "range": [float(np.log10(values.min() * 0.93)), float(np.log10(values.max() * 1.07))],
        },
        "yaxis": {
            "tickvals": list(range(len(order))),
            "ticktext": [f"{charts.short(policy)} " for policy in order],
            "range": [len(order) - 0.5, -0.5],
            "automargin": True,
            "fixedrange": True,
            "ticks": "",
            "tickfont": {"color": "@ink", "size": 11},
        },
        "margin": {"l": 12, "r": 12, "t": 26, "b": 46},
        "hovermode": "closest",
        "showlegend": True,
        "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
    }
    caption = "A mark per network; the policy with the lowest mean of them on top."
    return Chart(f"jct-{index}", "Average JCT by network", caption, max(320, 80 + 19 * len(order)), data, layout)


def _trade_chart(
    figures: Sequence[Figures], policies: Sequence[str], styles: Mapping[str, Look], index: int, network: str
) -> Chart:
    """Speed against fairness: the average JCT and the worst rho of each policy."""
    data: list[PlotlyPart] = []
    points = [
        (policy, jct, rho)
        for policy, one in zip(policies, figures, strict=True)
        if (jct := number(one, "avg_jct")) and (rho := number(one, "max_rho"))
    ]
    for policy, jct, rho in points:
        look = styles[policy]
        data.append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "name": look.label,
                "x": [float(f"{jct:.6g}")],
                "y": [float(f"{rho:.6g}")],
                "text": [look.label],
                "textposition": "top center",
                "textfont": {"size": 10, "color": "@muted"},
                "marker": {"color": look.colour, "size": 9, "symbol": SYMBOLS[look.round % len(SYMBOLS)]},
                "hovertemplate": f"{look.label}: {units.duration(jct)}, worst rho {units.figure(rho)}<extra></extra>",
            }
        )
    x_ticks = units.close_ticks(np.array([jct for _, jct, _ in points]))
    y_ticks = units.decades(np.array([rho for _, _, rho in points]))
    layout: PlotlyPart = {
        "xaxis": {
            "type": "log",
            "title": {"text": "Average JCT (log scale)"},
            "tickvals": list(x_ticks),
            "ticktext": list(x_ticks.values()),
        },
        "yaxis": {
            "type": "log",
            "title": {"text": "Worst rho (log scale)"},
            "tickvals": list(y_ticks),
            "ticktext": list(y_ticks.values()),
        },
        "margin": {"l": 60, "r": 24, "t": 8, "b": 46},
        "hovermode": "closest",
        "showlegend": False,
    }
    caption = f"Each policy on {charts.short(network)}. Further down and left is better."
    return Chart(f"trade-{index}", "Speed against fairness", caption, max(320, 80 + 19 * len(policies)), data, layout)


def _tables(
    at: Mapping[tuple[str, str, str], Run],
    scene: Scene,
    index: int,
    networks: Sequence[str],
    policies: Sequence[str],
    styles: Mapping[str, Look],
) -> str:
    """All figures, with a table per network of which one is visible."""
    panes = [
        _Pane(f"table-{index}-{i}", escape(network), _table(at, scene, network, policies, styles))
        for i, network in enumerate(networks)
    ]
    return _one_in_sight("Which network", panes, len(networks) // 2)


def _table(
    at: Mapping[tuple[str, str, str], Run],
    scene: Scene,
    network: str,
    policies: Sequence[str],
    styles: Mapping[str, Look],
) -> str:
    done = [p for p in policies if (run := at.get((scene.trace, network, p))) is not None and run.figures is not None]
    if not done:
        return "<p class=absent>No run completed.</p>"
    figures = [at[scene.trace, network, policy].figures or {} for policy in done]
    return summary_table(figures, done, [styles[policy] for policy in done])


def _failures(runs: Sequence[Run]) -> str:
    failed = [run for run in runs if run.error]
    if not failed:
        return ""
    items = "".join(
        f"<li>{escape(f'{run.policy} on {run.trace}, {run.network}')}: {escape(run.error)}</li>" for run in failed
    )
    return f'{heading_of("Runs that failed")}<div class="notes"><ul>{items}</ul></div>'


def _named(run: Run) -> dict[str, Any]:
    return {"trace": run.trace, "network": run.network, "policy": run.policy, **(run.figures or {"error": run.error})}


def _value(run: Run | None, key: str) -> float | None:
    return None if run is None or run.figures is None else number(run.figures, key)
