"""A fit as a drawing: predicted against measured seconds per iteration, and the errors of each kind of plan.

The page is made of the same parts as the report of a run (see thebes.report.html); PNG and PDF are the first chart.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from thebes.model.plan import FAMILIES
from thebes.perf.plans.fit import Fit, kind_of
from thebes.perf.plans.site import Site
from thebes.report import figures
from thebes.report.charts import Chart, PlotlyPart
from thebes.report.files import load, unwritable, write_text
from thebes.report.html import heading_of, page, pair
from thebes.report.metrics import to_json
from thebes.report.plans import HUES, NAMES, log_ticks

WORDS = {
    "Error": "Predicted seconds per iteration over measured ones, less 1: above 0 where the prediction is too slow.",
    "Constant": "One of the seven numbers of a model that measured iterations determine.",
}
_LAYOUT: PlotlyPart = {"margin": {"l": 58, "r": 12, "t": 8, "b": 46}, "hovermode": "closest", "showlegend": False}


def write_plot(found: Fit, site: Site, path: Path) -> None:
    """Write the drawing in the format that the name ends in."""
    if path.suffix.lower() == ".html":
        write_text(path, render(found, site))
    else:
        _write_figure(found, path)


def render(found: Fit, site: Site) -> str:
    """The page as text."""
    title = f"Fit of {found.model}"
    lead = (
        f"{len(found.samples)} samples on {site.gpu_type} are explained with a mean error of {found.mean_error:.1%}; "
        f"the worst is {found.worst_error:.1%}."
    )
    drawn = [against_chart(found), error_chart(found)]
    key = "".join(
        f'<li><span class="swatch" style="background:var(--c{HUES[family]})"></span>{escape(NAMES[family])}</li>'
        for family in _families(found)
    )
    body = [
        f'<header><p class="kicker">Thebes execution plans</p><h1>{escape(title)}</h1>'
        f'<p class="lead">{escape(lead)}</p></header>',
        heading_of("Predicted against measured", "Every sample that the constants were fitted to."),
        f'<ul class="key">{key}</ul>',
        pair(drawn),
        heading_of("Constants"),
        _table(found),
        *(f"<p>{escape(warning)}.</p>" for warning in found.warnings),
    ]
    exact: list[Any] = [
        {"plan": str(s.plan), "nodes": s.nodes, "measured_s": s.iteration_s, "predicted_s": p}
        for s, p in zip(found.samples, found.predicted_s, strict=True)
    ]
    return page(title, body, drawn, to_json(exact), WORDS)


def _families(found: Fit) -> list[str]:
    return [family for family in FAMILIES if any(s.plan.family == family for s in found.samples)]


def _of_family(found: Fit, family: str) -> list[int]:
    return [i for i, sample in enumerate(found.samples) if sample.plan.family == family]


def _said(found: Fit, i: int) -> str:
    sample = found.samples[i]
    return (
        f"{sample.plan} on {sample.nodes} node{'s' * (sample.nodes != 1)}: measured {sample.iteration_s:.4g} s, "
        f"predicted {found.predicted_s[i]:.4g} s ({found.errors[i]:+.1%})"
    )


def against_chart(found: Fit) -> Chart:
    """A dot per sample; where the prediction is right, the dot is on the line."""
    ends = [min(s.iteration_s for s in found.samples) / 1.3, max(s.iteration_s for s in found.samples) * 1.3]
    ticks = log_ticks(ends)
    data: list[PlotlyPart] = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": ends,
            "y": ends,
            "line": {"color": "@muted", "width": 1, "dash": "dot"},
            "hoverinfo": "skip",
        }
    ]
    for family in _families(found):
        own = _of_family(found, family)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": NAMES[family],
                "x": [found.samples[i].iteration_s for i in own],
                "y": [found.predicted_s[i] for i in own],
                "text": [_said(found, i) for i in own],
                "marker": {"color": f"@c{HUES[family]}", "size": 7},
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    return Chart(
        "against",
        "Seconds per iteration",
        "Dotted: predicted as measured.",
        380,
        data,
        {
            **_LAYOUT,
            "xaxis": {"type": "log", "title": {"text": "Measured (s)"}, "tickvals": ticks},
            "yaxis": {"type": "log", "title": {"text": "Predicted (s)"}, "tickvals": ticks},
        },
    )


def error_chart(found: Fit) -> Chart:
    """Errors side by side, a column per kind of plan."""
    data: list[PlotlyPart] = []
    for family in _families(found):
        own = _of_family(found, family)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": NAMES[family],
                "x": [kind_of(found.samples[i].plan) for i in own],
                "y": [100 * found.errors[i] for i in own],
                "text": [_said(found, i) for i in own],
                "marker": {"color": f"@c{HUES[family]}", "size": 7, "opacity": 0.7},
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    return Chart(
        "errors",
        "Errors",
        "Above 0: predicted slower than measured.",
        380,
        data,
        {
            **_LAYOUT,
            "xaxis": {"type": "category"},
            "yaxis": {"title": {"text": "Error"}, "ticksuffix": "%", "zeroline": True},
        },
    )


def _table(found: Fit) -> str:
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{value:.4g}</td>"
        f"<td>{'at its bound' if name in found.at_bounds else ''}</td></tr>"
        for name, value in found.constants._asdict().items()
    )
    how = "fitted too" if found.forward_fitted else "as profiled"
    rows += f"<tr><th>forward, s per sample</th><td>{found.forward_s:.4g}</td><td>{how}</td></tr>"
    return f'<div class="scroll"><table class="summary"><tbody>{rows}</tbody></table></div>'


# Figures for a paper.


def _write_figure(found: Fit, path: Path) -> None:
    matplotlib = load("matplotlib", needed_for="Drawing a fit")
    new = load("matplotlib.figure", needed_for="Drawing a fit").Figure
    with matplotlib.rc_context(figures.STYLE):
        figure = new(figsize=(figures.PAGE_IN / 2, 2.7), layout="constrained")
        axes = figure.subplots()
        ends = [min(s.iteration_s for s in found.samples) / 1.3, max(s.iteration_s for s in found.samples) * 1.3]
        axes.plot(ends, ends, color=figures.INK, linestyle=":", linewidth=0.8)
        for family in _families(found):
            own = _of_family(found, family)
            axes.plot(
                [found.samples[i].iteration_s for i in own],
                [found.predicted_s[i] for i in own],
                linestyle="",
                marker="o",
                markersize=3,
                color=figures.COLOURS[HUES[family]],
                label=NAMES[family],
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("Measured (s)")
        axes.set_ylabel("Predicted (s)")
        axes.grid(True)
        axes.legend()
        kinds = {".png": {"Software": None}, ".pdf": {"CreationDate": None, "Producer": None, "Creator": "Thebes"}}
        try:
            figure.savefig(path, dpi=200, metadata=kinds[path.suffix.lower()])
        except OSError as error:
            raise unwritable(path, error) from error
