"""Results in the terminal: one run as a list of figures, several side by side with the best of each column in bold.

A table fits 80 columns and says more where there is room. In a pipe or a log it is plain text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from thebes.report import units
from thebes.report.series import ACCOUNT_PARTS, account, labels

Figures = Mapping[str, object]


@dataclass(frozen=True)
class Column:
    """A figure of the comparison: its place in the metrics, how it is written, and how early it is left out."""

    heading: str
    key: str
    say: Callable[[float | None], str]
    rank: int = 0  # columns of the highest rank are left out first if the screen is narrow
    best: Callable[[Sequence[float]], float] | None = min


COLUMNS = (
    Column("median", "median_jct", units.duration, rank=2),
    Column("p95", "p95_jct", units.duration, rank=1),
    Column("p99", "p99_jct", units.duration, rank=5),
    Column("queued", "avg_queue_delay", units.duration, rank=3),
    Column("makespan", "makespan", units.duration, rank=6),
    Column("util.", "gpu_utilization", units.share, rank=0, best=max),
    Column("preempt", "preemptions", units.count, rank=4, best=None),
    Column("slowdown", "median_slowdown", units.times, rank=10),
    Column("max rho", "max_rho", units.figure, rank=7),
    Column("mean rho", "mean_rho", units.figure, rank=9),
    Column("comm.", "communication_share", units.share, rank=8),
    Column("fragm.", "fragmentation", units.share, rank=11),
    Column("promote", "promotions", units.count, rank=13, best=None),
    Column("migrate", "migrations", units.count, rank=12, best=None),
)


def comparison_table(metrics: Sequence[Figures], *, width: int = 80) -> Table:
    """Several runs side by side, as many figures as `width` holds. Ratios are of the average JCT."""
    shown = list(COLUMNS)
    ruler = Console(width=1000)
    while shown and ruler.measure(_comparison(metrics, shown)).maximum > width:
        shown.remove(max(shown, key=lambda column: column.rank))
    return _comparison(metrics, shown)


def _comparison(metrics: Sequence[Figures], shown: Sequence[Column]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold", expand=False)
    table.add_column("policy", overflow="ellipsis", no_wrap=True, min_width=8)
    unfinished = any(_number(one, "completed") != _number(one, "jobs") for one in metrics)
    for heading in ("avg JCT", "× best", "× first", *(["done"] if unfinished else []), *(c.heading for c in shown)):
        table.add_column(heading, justify="right", no_wrap=True)
    averages = [_number(one, "avg_jct") for one in metrics]
    best_average = min((a for a in averages if a is not None), default=None)
    best = {column.key: _best(column, metrics) for column in shown}
    for label, one, average in zip(labels(metrics), metrics, averages, strict=True):
        leads = average is not None and average == best_average
        cells = [Text(label, style="bold" if leads else ""), _cell(units.duration(average), leads)]
        cells += [_cell(units.ratio(average, best_average), leads), _cell(units.ratio(average, averages[0]))]
        if unfinished:
            cells.append(_cell(f"{units.count(_number(one, 'completed'))}/{units.count(_number(one, 'jobs'))}"))
        for column in shown:
            value = _number(one, column.key)
            cells.append(_cell(column.say(value), value is not None and value == best[column.key]))
        table.add_row(*cells)
    return table


def result_table(metrics: Figures) -> Table:
    """One run: what ran, how long jobs took, and what became of the GPU-seconds."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False, expand=False)
    table.add_column("figure", style="dim", no_wrap=True)
    table.add_column("value", overflow="fold")
    say = {key: _number(metrics, key) for key in metrics if isinstance(metrics[key], int | float)}.get
    rows: list[tuple[str, str]] = [
        ("policy", f"{metrics['policy']}, placement {metrics['placement']}"),
        ("workload", f"{metrics['trace']} on {metrics['cluster']} ({units.count(say('total_gpus'))} GPUs)"),
        ("jobs completed", f"{units.count(say('completed'))} of {units.count(say('jobs'))}"),
        ("average JCT", units.duration(say("avg_jct"))),
        (
            "median, p95, p99, max",
            ", ".join(units.duration(say(key)) for key in ("median_jct", "p95_jct", "p99_jct", "max_jct")),
        ),
        ("queueing delay", f"{units.duration(say('avg_queue_delay'))} on average"),
        ("makespan", units.duration(say("makespan"))),
        ("GPU utilisation", units.share(say("gpu_utilization"))),
        ("fairness (rho)", _fairness_line(metrics)),
        (
            "communication",
            f"{units.share(say('communication_share'))} of running time, "
            f"{units.share(say('spread_share'))} of useful work on more nodes than needed",
        ),
        ("fragmentation", f"{units.share(say('fragmentation'))} of all GPU time idle, though jobs waited for it"),
        (
            "moves",
            f"{units.count(say('preemptions'))} preemptions, {units.count(say('promotions'))} promotions, "
            f"{units.count(say('migrations'))} migrations, {units.count(say('resizes'))} resizes, "
            f"{units.count(say('reconfigurations'))} reconfigurations",
        ),
        ("GPU time", _account_line(metrics)),
        ("simulated in", f"{units.duration(say('wall_seconds'))}, {units.count(say('events'))} events"),
    ]
    for name, value in rows:
        # These are Text, not markup, because a trace may be called "[red]".
        table.add_row(Text(name), Text(value, style="bold" if name == "average JCT" else ""))
    return table


def print_result(metrics: Figures, console: Console | None = None) -> None:
    """One run on the console; Rich leaves the styles out when it is not a terminal."""
    out = console or Console()
    out.print(result_table(metrics))


def print_comparison(metrics: Sequence[Figures], console: Console | None = None) -> None:
    """Several runs on the console; Rich leaves the styles out when it is not a terminal."""
    out = console or Console()
    out.print(comparison_table(metrics, width=out.width))


def _fairness_line(metrics: Figures) -> str:
    worst, mean, tenant = (units.figure(_number(metrics, key)) for key in ("max_rho", "mean_rho", "max_rho_tenant"))
    several = (_number(metrics, "tenants") or 1) > 1
    return f"{worst} at worst, {mean} on average" + (f"; {tenant} for the worst-off tenant" if several else "")


def _account_line(metrics: Figures) -> str:
    parts = account(metrics)
    whole = sum(parts.values())
    said = [f"{units.gpu_time(parts['useful'])} useful"]
    if whole > 0:
        said += [f"{units.share(v / whole)} {ACCOUNT_PARTS[k].lower()}" for k, v in parts.items() if k != "useful"]
    return ", ".join(said)


def _best(column: Column, metrics: Sequence[Figures]) -> float | None:
    known = [value for one in metrics if (value := _number(one, column.key)) is not None]
    # If all are equal, none is the best.
    return column.best(known) if column.best and len(set(known)) > 1 else None


def _number(metrics: Figures, key: str) -> float | None:
    value = metrics.get(key)
    return None if value is None else float(cast(float, value))


def _cell(text: str, best: bool = False) -> Text:
    return Text(text, style="bold" if best else "")
