"""The report is one HTML file that holds everything it shows (plotly.js included) and fetches nothing from the network.

The page is built from the results alone, without a clock and random ids, so that equal results make equal bytes.
`page.css` and `page.js` beside this file are its looks and its behaviour; `charts` makes what it draws. All text from
outside (names of traces, policies and jobs, notes, parameters) is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import cast

from thebes.model.errors import UserError
from thebes.report import charts, series, units
from thebes.report.charts import Chart, Look
from thebes.report.files import load, write_text
from thebes.report.metrics import to_json
from thebes.report.result import Result

# Nothing may be fetched from anywhere, and the browser enforces it: the file stands alone.
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"

TERMS = {
    "Job completion time (JCT)": "From a job's submission to its finish, waits included.",
    "Queueing delay": "The time a job spends without GPUs, all its waits added up.",
    "Makespan": "From the first submission to the last finish.",
    "GPU utilisation": "Useful GPU-seconds over all that the cluster had during the makespan.",
    "Slowdown": "A job's JCT over its run time alone on the GPUs it asked for.",
    "Finish-time fairness (rho)": "A job's JCT over the time it would have taken on its equal share of the cluster: "
    "one of as many parts as there were jobs alive during its life. 1 or less is fair. A tenant's rho is the mean over "
    "its jobs, weighted by their work.",
    "Communication": "The share of running GPU time spent exchanging gradients that compute does not hide.",
    "Spread": "The share of useful GPU time of jobs on more nodes than they need.",
    "Fragmentation": "The share of the cluster's GPU time that no job held although waiting jobs asked for it.",
    "Useful": "GPU time that moved a job forward.",
    "Overhead": "GPU time spent on starting, suspending, resuming and moving jobs.",
    "Lost": "GPU time spent on work that had to be done again.",
    "Idle-held": "GPU time held by a job that made no progress.",
    "Unused": "GPU time that no job held.",
}


def write_report(results: Sequence[Result], path: Path, *, title: str | None = None) -> None:
    """Write the report of one run, or of several side by side, as one HTML file."""
    write_text(path, render(results, title=title))


def render(results: Sequence[Result], *, title: str | None = None) -> str:
    """The report as text."""
    if not results:
        raise UserError("there is no result to report on.", hint="Run at least one policy.")
    metrics = [result.metrics for result in results]
    names = series.labels(metrics)
    styles = charts.looks(names)
    heading = title or _default_title(results)
    sections, drawn = _sections(results, names, styles)
    exact = to_json([{key: value for key, value in one.items() if key != "wall_seconds"} for one in metrics])
    return page(heading, [_header(results, names, styles, heading), *sections], drawn, exact)


def page(
    heading: str, parts: Sequence[str], drawn: Sequence[Chart], exact: str, words: Mapping[str, str] = TERMS
) -> str:
    """A whole page: these parts with these charts, the meaning of the words, and the exact figures (JSON) inside."""
    plotly = load("plotly.offline", needed_for="The HTML report")
    data = {"charts": [_chart_json(chart) for chart in drawn], "theme": charts.theme(), "title": _slug(heading)}
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="generator" content="Thebes {escape(_version("thebes"))}">',
            f"<title>{escape(heading)}</title>",
            f"<style>\n{_asset('page.css')}</style>",
            "</head>",
            "<body>",
            "<main>",
            *parts,
            _terms(words),
            f"<footer>Made by Thebes {escape(_version('thebes'))}. This file is complete in itself and opens offline; "
            "the exact figures are inside it, as JSON, in the element <code>metrics</code>.</footer>",
            "</main>",
            f'<script type="application/json" id="metrics">{_inline(exact)}</script>',
            f'<script type="application/json" id="charts">{_inline(_compact(data))}</script>',
            f"<script>{plotly.get_plotlyjs()}</script>",
            f"<script>\n{_asset('page.js')}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _sections(results: Sequence[Result], names: Sequence[str], styles: Sequence[Look]) -> tuple[list[str], list[Chart]]:
    """The body of the page and the charts that it draws."""
    jct, delay = charts.jct_chart(results, styles), charts.delay_chart(results, styles)
    classes = charts.class_charts(results, styles)
    used, queue = charts.utilisation_chart(results, styles), charts.queue_chart(results, styles)
    account, rho = (
        charts.account_chart([result.metrics for result in results], styles),
        charts.rho_chart(results, styles),
    )
    tenants = charts.tenant_chart(results, styles)
    gantts = charts.gantt_charts(results, styles)
    several = len(results) > 1
    parts = [
        _summary(results, names, styles) if several else _headline(results[0]),
        _run_buttons(names, styles) if several else "",
        heading_of("How long jobs take"),
        pair([jct, delay]),
        heading_of(
            "By class of job",
            "A policy that is good on average can be bad to some. Bars are means, ticks are medians; "
            "each class has its own scale.",
        ),
        pair(classes),
        heading_of("How fairly they are treated"),
        pair([rho, tenants]) if tenants else pair([rho], one=True),
        heading_of("Over time"),
        pair([used, queue]),
        heading_of("Where the GPU time goes"),
        _account_key(results),
        pair([account], one=True),
        _account_table(results, names, styles),
        heading_of("The life of each job"),
        *_gantt_part(results, gantts),
    ]
    return parts, [jct, delay, *classes, rho, *([tenants] if tenants else []), used, queue, account, *gantts]


def _header(results: Sequence[Result], names: Sequence[str], styles: Sequence[Look], heading: str) -> str:
    return (
        '<header><p class="kicker">Thebes simulation report</p>'
        f'<h1>{escape(heading)}</h1><p class="lead">{_finding(results, names)}</p></header>'
        f"{_what_ran(results, names)}{_notes(results, names)}"
    )


def _default_title(results: Sequence[Result]) -> str:
    traces = list(dict.fromkeys(Path(result.trace.name).name or result.trace.name for result in results))
    what = results[0].policy if len(results) == 1 else f"{len(results)} policies"
    return f"{what} on {', '.join(traces)}"


def _finding(results: Sequence[Result], names: Sequence[str]) -> str:
    """What the figures say, in one or two sentences."""
    averages = [number(result.metrics, "avg_jct") for result in results]
    known = {i: average for i, average in enumerate(averages) if average is not None}
    if not known:
        return "No job completed."
    if len(results) == 1:
        only = results[0].metrics
        return (
            f"Jobs complete in <strong>{units.duration(averages[0])}</strong> on average, "
            f"{units.duration(number(only, 'avg_queue_delay'))} of it queueing; the GPUs do useful work "
            f"<strong>{units.share(number(only, 'gpu_utilization'))}</strong> of the time."
        )
    lowest = min(known.values())
    leaders = [i for i in known if known[i] == lowest]
    others = [i for i in known if known[i] > lowest]
    average = units.duration(lowest)
    if not others:
        return f"All policies complete jobs in <strong>{average}</strong> on average."
    who = " and ".join(filter(None, (", ".join(_strong(names[i]) for i in leaders[:-1]), _strong(names[leaders[-1]]))))
    other = 0 if 0 in others else min(others, key=lambda i: known[i])
    return (
        f"{who} {'completes' if len(leaders) == 1 else 'complete'} jobs soonest: {average} on average, against "
        f"{units.duration(known[other])} under {escape(names[other])} "
        f"(<strong>{units.ratio(known[other], lowest)}</strong>)."
    )


def _strong(name: str) -> str:
    return f"<strong>{escape(name)}</strong>"


def _what_ran(results: Sequence[Result], names: Sequence[str]) -> str:
    small, short_s = series.class_limits(results[0].metrics)
    perf = _distinct(str(r.metrics["perf"]) for r in results if r.metrics.get("perf"))
    rows = [
        ("Trace", _distinct(r.trace.name for r in results), _distinct(_jobs_words(r) for r in results)),
        ("Cluster", _distinct(r.cluster for r in results), _distinct(f"{r.total_gpus:,} GPUs" for r in results)),
        ("Placement", _distinct(r.placement for r in results), ""),
        ("Speed of placed jobs", perf, ""),
        ("Versions", f"Thebes {_version('thebes')}", f"Polars {_version('polars')}, NumPy {_version('numpy')}"),
        ("Job classes", f"small: at most {units.count(small)} GPUs", f"short: under {units.count(short_s)} s"),
    ]
    cells = "".join(
        f"<div><dt>{escape(term)}</dt><dd>{escape(words)}{f'<small>{escape(more)}</small>' if more else ''}</dd></div>"
        for term, words, more in rows
        if words
    )
    return f'<dl class="run">{cells}</dl>{_parameters(results, names)}'


def _jobs_words(result: Result) -> str:
    done, jobs = number(result.metrics, "completed"), result.jobs.height
    known = f"{jobs:,} jobs, {result.trace.format}"
    return known if done is None or done == jobs else f"{known}, {units.count(done)} completed"


def _parameters(results: Sequence[Result], names: Sequence[str]) -> str:
    given = [cast(Mapping[str, object], r.metrics.get("parameters") or {}) for r in results]
    if not any(given):
        return ""
    rows = "".join(
        f'<tr><th>{escape(name)}</th><td class="text">{escape(_settings(one)) or "none"}</td></tr>'
        for name, one in zip(names, given, strict=True)
    )
    open_now = " open" if len(results) == 1 else ""
    return f"<details{open_now}><summary>Parameters</summary><table><tbody>{rows}</tbody></table></details>"


def _settings(parameters: Mapping[str, object]) -> str:
    exact = json.loads(to_json({"parameters": parameters}))["parameters"]
    return ", ".join(
        f"{key} = {value if isinstance(value, str) else json.dumps(value)}" for key, value in exact.items()
    )


def _notes(results: Sequence[Result], names: Sequence[str]) -> str:
    said: dict[str, list[str]] = {}
    for name, result in zip(names, results, strict=True):
        for note in dict.fromkeys((*result.trace.notes, *result.notes)):
            said.setdefault(note, []).append(name)
    if not said:
        return ""
    # A note that holds for all runs is told once; any other names its runs.
    lines = [note if len(who) == len(results) else f"{', '.join(who)}: {note}" for note, who in said.items()]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<div class="notes"><strong>Notes</strong><ul>{items}</ul></div>'


def _headline(result: Result) -> str:
    say = result.metrics
    cells = [
        ("Average JCT", units.duration(number(say, "avg_jct"))),
        ("Median JCT", units.duration(number(say, "median_jct"))),
        ("95th percentile JCT", units.duration(number(say, "p95_jct"))),
        ("99th percentile JCT", units.duration(number(say, "p99_jct"))),
        ("Average queueing delay", units.duration(number(say, "avg_queue_delay"))),
        ("Makespan", units.duration(number(say, "makespan"))),
        ("GPU utilisation", units.share(number(say, "gpu_utilization"))),
        ("Median slowdown", units.times(number(say, "median_slowdown"))),
        ("Spread over nodes", units.share(number(say, "spread_share"))),
        ("Worst rho", units.figure(number(say, "max_rho"))),
        ("Average rho", units.figure(number(say, "mean_rho"))),
        ("Communication", units.share(number(say, "communication_share"))),
        ("Fragmentation", units.share(number(say, "fragmentation"))),
        ("Preemptions", units.count(number(say, "preemptions"))),
        ("Jobs completed", f"{units.count(number(say, 'completed'))} of {units.count(number(say, 'jobs'))}"),
    ]
    return f'<section class="headline">{"".join(f"<div><b>{v}</b><span>{k}</span></div>" for k, v in cells)}</section>'


SUMMARY: tuple[tuple[str, str, Callable[[float | None], str], Callable[[Sequence[float]], float] | None], ...] = (
    ("Median", "median_jct", units.duration, min),
    ("p95", "p95_jct", units.duration, min),
    ("p99", "p99_jct", units.duration, min),
    ("Queueing<br>delay", "avg_queue_delay", units.duration, min),
    ("Median<br>slowdown", "median_slowdown", units.times, min),
    ("Makespan", "makespan", units.duration, min),
    ("GPU<br>utilisation", "gpu_utilization", units.share, max),
    ("Max<br>rho", "max_rho", units.figure, min),
    ("Mean<br>rho", "mean_rho", units.figure, min),
    ("Communi-<br>cation", "communication_share", units.share, min),
    ("Fragmen-<br>tation", "fragmentation", units.share, min),
    ("Preemp-<br>tions", "preemptions", units.count, None),
)


def _summary(results: Sequence[Result], names: Sequence[str], styles: Sequence[Look]) -> str:
    return heading_of("Summary") + summary_table([result.metrics for result in results], names, styles)


def summary_table(metrics: Sequence[Mapping[str, object]], names: Sequence[str], styles: Sequence[Look]) -> str:
    """A row per run; a click on a heading sorts. Ratios are of the average JCT, to the best run and to the first."""
    averages = [number(one, "avg_jct") for one in metrics]
    known = [average for average in averages if average is not None]
    lowest, highest = min(known, default=None), max(known, default=None)
    best = {key: _best([number(one, key) for one in metrics], pick) for _, key, _, pick in SUMMARY}
    unfinished = any(one["completed"] != one["jobs"] for one in metrics)
    head = "".join(f"<th>{words}</th>" for words, *_ in SUMMARY)
    done_head = "<th>Jobs<br>completed</th>" if unfinished else ""
    rows = []
    for name, look, one, average in zip(names, styles, metrics, averages, strict=True):
        width = 100 * average / highest if average is not None and highest else 0
        lead = " class=best" if average is not None and average == lowest else ""
        bar = f'<span class="bar" style="width:{width:.1f}%;background:var(--c{look.hue})"></span>' if width else ""
        cells = f"<td{lead}{_sort_key(average)}>{units.duration(average)}{bar}</td>"
        for reference, mark in ((lowest, lead), (averages[0], "")):
            cells += f"<td{mark}{_sort_key(average)}>{units.ratio(average, reference)}</td>"
        for _, key, say, _ in SUMMARY:
            value = number(one, key)
            mark = " class=best" if value is not None and value == best[key] else ""
            cells += f"<td{mark}{_sort_key(value)}>{escape(say(value))}</td>"
        if unfinished:
            cells += f"<td>{units.count(number(one, 'completed'))} of {units.count(number(one, 'jobs'))}</td>"
        rows.append(f"<tr><th{lead}>{_swatch(look)}{escape(name)}</th>{cells}</tr>")
    first = escape(_clip(names[0])) if names else ""
    return (
        '<div class="scroll"><table class="summary sortable"><thead><tr><th>Policy</th><th>Average JCT</th>'
        f"<th>against<br>the best</th><th>against<br>{first}</th>{head}{done_head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _sort_key(value: float | None) -> str:
    return "" if value is None else f' data-v="{value:.6g}"'


def _run_buttons(names: Sequence[str], styles: Sequence[Look]) -> str:
    buttons = "".join(
        f'<button type="button" data-run="{i}" aria-pressed="false">{_swatch(look, line=True)}{escape(name)}</button>'
        for i, (name, look) in enumerate(zip(names, styles, strict=True))
    )
    return f'<nav class="runs" aria-label="Single out a policy in all charts">{buttons}</nav>'


def heading_of(words: str, about: str = "") -> str:
    """A heading with a sentence about what follows."""
    return f"<h2>{escape(words)}</h2>" + (f'<p class="about">{escape(about)}</p>' if about else "")


def pair(drawn: Sequence[Chart], *, one: bool = False) -> str:
    """Charts in two columns, or in one."""
    return f'<div class="pair{" one" if one else ""}">{"".join(_figure(chart) for chart in drawn)}</div>'


def _figure(chart: Chart) -> str:
    # Titles and captions of charts are escaped where they are made, because plotly.js reads them too.
    save = "".join(
        f'<button type="button" data-chart="{chart.key}" data-format="{kind}" '
        f'title="Save this chart as {kind.upper()}">{kind.upper()}</button>'
        for kind in ("svg", "png")
    )
    return (
        f'<figure><figcaption><h3>{chart.title}</h3><span class="save">{save}</span><p>{chart.caption}</p></figcaption>'
        f'<div class="chart" id="chart-{chart.key}" style="height:{chart.height}px"></div></figure>'
    )


def _account_key(results: Sequence[Result]) -> str:
    items = "".join(
        f'<li><span class="swatch" style="background:var(--{charts.PART_COLOURS[part][1:]})"></span>{words}</li>'
        for part, words in series.ACCOUNT_PARTS.items()
    )
    return f'<ul class="key">{items}</ul>'


def _account_table(results: Sequence[Result], names: Sequence[str], styles: Sequence[Look]) -> str:
    rows = []
    for name, look, result in zip(names, styles, results, strict=True):
        parts = series.account(result.metrics)
        whole = sum(parts.values())
        shares = [units.share(part / whole) if whole else units.MISSING for part in parts.values()]
        cells = "".join(
            f"<td>{escape(units.gpu_time(part))}</td><td>{escape(said)}</td>"
            for part, said in zip(parts.values(), shares, strict=True)
        )
        rows.append(f"<tr><th>{_swatch(look)}{escape(name)}</th>{cells}</tr>")
    head = "".join(f"<th colspan=2>{words}</th>" for words in series.ACCOUNT_PARTS.values())
    return (
        '<details><summary>The same as a table</summary><div class="scroll"><table><thead><tr><th>Policy</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _gantt_part(results: Sequence[Result], gantts: Sequence[Chart]) -> list[str]:
    if not gantts:
        return [f'<p class="absent">{escape(series.why_no_gantt(results))}</p>']
    running = "var(--c1)" if len(results) == 1 else "var(--ink)"
    key = (
        f'<ul class="key"><li><span class="swatch" style="background:{running}"></span>running'
        f"{' (in the colour of the policy)' if len(results) > 1 else ''}</li>"
        '<li><span class="swatch" style="background:var(--waiting)"></span>waiting for its first start</li>'
        '<li><span class="swatch" style="background:var(--suspended)"></span>suspended</li></ul>'
    )
    return [key, pair(gantts, one=len(gantts) == 1)]


def _terms(meanings: Mapping[str, str]) -> str:
    entries = "".join(f"<div><dt>{escape(term)}</dt><dd>{escape(words)}</dd></div>" for term, words in meanings.items())
    return f'{heading_of("What the words mean")}<dl class="terms">{entries}</dl>'


def _swatch(look: Look, *, line: bool = False) -> str:
    colour = f"var(--c{look.hue})"
    if line:
        return f'<span class="swatch line" style="border-top-color:{colour};border-top-style:{_border(look)}"></span>'
    ground = colour if not look.round else f"repeating-linear-gradient(45deg,{colour} 0 2px,transparent 2px 4px)"
    return f'<span class="swatch" style="background:{ground}"></span>'


def _border(look: Look) -> str:
    return {"solid": "solid", "dash": "dashed", "dot": "dotted"}[look.dash]


def _chart_json(chart: Chart) -> dict[str, object]:
    return {"key": chart.key, "height": chart.height, "data": chart.data, "layout": chart.layout}


def _compact(data: object) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _inline(text: str) -> str:
    """JSON that cannot end the script element in which it stands."""
    return text.strip().replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _slug(heading: str) -> str:
    """A file name for saved charts."""
    return "-".join("".join(c if c.isalnum() else " " for c in heading.lower()).split())[:60] or "thebes"


def _clip(name: str) -> str:
    return name if len(name) <= charts.LONGEST_LABEL else name[: charts.LONGEST_LABEL - 1] + "…"


def _best(values: Sequence[float | None], pick: Callable[[Sequence[float]], float] | None) -> float | None:
    known = [value for value in values if value is not None]
    return pick(known) if pick and len(set(known)) > 1 else None


def _distinct(words: object) -> str:
    return ", ".join(dict.fromkeys(cast("Sequence[str]", words)))


def number(metrics: Mapping[str, object], key: str) -> float | None:
    """A figure of a run; None if the run has none."""
    value = metrics.get(key)
    return None if value is None else float(cast(float, value))


def _asset(name: str) -> str:
    return files("thebes.report").joinpath(name).read_text(encoding="utf-8")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # it runs from a source tree that was not installed
        return "unknown"
