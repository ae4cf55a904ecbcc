"""The HTML report: complete in itself, the same each time, safe with any name, and small."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from toy import toy_result, toy_results, workload

from thebes.model.errors import UserError
from thebes.report import charts, series, units
from thebes.report.html import render, write_report
from thebes.report.metrics import column, summarise
from thebes.report.result import Result


class Page(HTMLParser):
    """The tags of a page with their attributes, and the text of its script and style elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, str] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = dict(attrs).get("id") or tag

    def handle_data(self, data: str) -> None:
        self.inside[self._open] = self.inside.get(self._open, "") + data


@pytest.fixture(scope="module")
def page(four: list[Result]) -> str:
    return render(four)


def without_plotly(text: str) -> str:
    return re.sub(r"<script>(?!\n).*?</script>", "", text, count=1, flags=re.DOTALL)


def test_the_page_loads_nothing_from_outside(page: str) -> None:
    tags = Page(page).tags
    for tag, attributes in tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert "src" not in attributes, tag
        assert not str(attributes.get("href", "#")).startswith(("http:", "https:", "//")), tag
    policies = [a["content"] for t, a in tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies
    assert str(policies[0]).startswith("default-src 'none'")
    own = without_plotly(page)
    assert len(own) < 400_000
    assert not re.search(r"https?://|@import|url\(", own)


def test_plotly_is_embedded_once(page: str) -> None:
    assert len(re.findall(r"plotly\.js v\d", page)) == 1


def test_equal_results_make_equal_bytes() -> None:
    first, second = (render(toy_results(3)) for _ in range(2))
    assert first == second
    slower = [replace(r, metrics={**r.metrics, "wall_seconds": 99.0}) for r in toy_results(3)]
    assert render(slower) == first


def test_the_exact_figures_are_inside(page: str, four: list[Result]) -> None:
    figures = json.loads(Page(page).inside["metrics"])
    assert [one["avg_jct"] for one in figures] == [r.metrics["avg_jct"] for r in four]


@pytest.mark.parametrize("count", [1, 4])
def test_every_chart_has_its_place(count: int) -> None:
    read = Page(render(toy_results(count)))
    drawn = [chart["key"] for chart in json.loads(read.inside["charts"])["charts"]]
    places = [a["id"] for _, a in read.tags if a.get("class") == "chart"]
    assert places == [f"chart-{key}" for key in drawn]
    for key in ("jct", "delay", "class-small_short", "class-large_long", "utilisation", "queue", "account", "gantt-0"):
        assert key in drawn


def test_fairness_communication_and_fragmentation_are_columns_of_the_summary(page: str, four: list[Result]) -> None:
    head, body = re.search(r'<table class="summary sortable"><thead>(.*?)</thead><tbody>(.*?)</tbody>', page).groups()  # type: ignore[union-attr]
    headings = [re.sub("<[^>]*>", "", cell).replace("-", "") for cell in re.findall(r"<th>(.*?)</th>", head)]
    for words in ("Maxrho", "Meanrho", "Communication", "Fragmentation"):
        assert words in headings
    worst = four[0].metrics["max_rho"]
    assert isinstance(worst, float)
    first = re.findall(r"<td[^>]*>(.*?)</td>", body.split("</tr>")[0])
    assert first[headings.index("Maxrho") - 1] == units.figure(worst)
    assert first[headings.index("Communication") - 1] == "10.0%"


def test_fairness_is_drawn_over_jobs_and_over_organisations(page: str, four: list[Result]) -> None:
    drawn = {chart["key"]: chart for chart in json.loads(Page(page).inside["charts"])["charts"]}
    ends = [curve["y"][-1] for curve in drawn["rho"]["data"]]
    assert ends == pytest.approx([100.0] * len(four))
    assert [sorted(dots["text"]) for dots in drawn["tenants"]["data"]] == [["org-0", "org-1", "org-2"]] * len(four)


def test_one_organisation_alone_is_not_drawn() -> None:
    one = toy_result(workload(5))
    alone = replace(one, metrics={**one.metrics, "rho_by_tenant": {"": 1.0}})
    assert "chart-tenants" not in render([alone])


EVIL = '<script>alert("x")</script>&%{y}'


def test_names_from_outside_cannot_become_markup() -> None:
    trace = workload(12).with_columns(
        pl.format("{}{}", pl.lit("</script><img src=x>"), pl.col("job_id")).alias("job_id")
    )
    evil = [
        toy_result(trace, policy=EVIL, name=EVIL, placement=EVIL, notes=(EVIL,), parameters={EVIL: EVIL}),
        toy_result(trace, policy="@ink", notes=("only here",)),
    ]
    text = render(evil, title=EVIL)
    read = Page(without_plotly(text))
    assert sum(tag == "script" for tag, _ in read.tags) == 3
    assert not any(tag == "img" for tag, _ in read.tags)
    assert "alert(" not in re.sub(
        r"&lt;script&gt;alert\(|\\u003cscript>alert\(|&amp;lt;script", "", text.split("plotly.js v")[0]
    )
    drawn = json.loads(read.inside["charts"])
    assert "<script>" not in json.dumps(drawn)
    assert "%{y}" not in drawn["charts"][0]["data"][0]["name"]
    assert "@ink: only here" in text


def test_a_long_run_makes_a_small_file_and_curves_stay_thin() -> None:
    result = long_run(100_000)
    text = render([result, result])
    assert len(text) < 6_000_000
    for chart in json.loads(Page(text).inside["charts"])["charts"]:
        assert all(len(trace["x"]) <= 2000 for trace in chart["data"])
    assert "up to 100 jobs; this one has 100,000. Use --limit 100" in text
    assert "Time-weighted means in bins of" in text


def long_run(jobs: int) -> Result:
    """As large as the largest trace we ship, with frames drawn at random: only their size matters here."""
    random = np.random.default_rng(5)
    submit = np.sort(random.uniform(0, 5e6, jobs))
    jct = random.lognormal(8, 2, jobs)
    zeros = np.zeros(jobs)
    frame = pl.DataFrame(
        {
            "job_id": [str(i) for i in range(jobs)],
            "gpus": random.choice([1.0, 8.0], jobs),
            "submit_s": submit,
            "duration_s": jct / 2,
            "finish_s": submit + jct,
            "jct_s": jct,
            "queue_delay_s": jct / 2,
            "first_wait_s": jct / 2,
            **{f"{part}_gpu_s": zeros for part in ("useful", "overhead", "lost", "idle_held", "spread")},
            **{
                kind: zeros.astype(int)
                for kind in ("preemptions", "promotions", "demotions", "migrations", "resizes", "reconfigurations")
            },
            **{name: pl.Series([None] * jobs, dtype=pl.String) for name in ("tenant", "model")},
            **dict.fromkeys(("ran_s", "comm_s"), zeros),
        }
    )
    timeline = pl.DataFrame(
        {
            "time_s": np.sort(np.concatenate([submit, submit + jct])),
            "busy_gpus": random.integers(0, 64, 2 * jobs),
            "waiting_jobs": random.integers(0, 900, 2 * jobs),
            "waiting_gpus": random.integers(0, 3000, 2 * jobs),
        }
    )
    small = toy_result(workload(5))
    metrics = summarise(
        policy="fifo",
        placement="count",
        trace="large",
        cluster="8x8",
        total_gpus=64,
        jobs=frame,
        events=3 * jobs,
        wall_seconds=1.0,
        timeline=timeline,
    )
    return replace(small, total_gpus=64, jobs=frame, timeline=timeline, metrics=metrics)  # type: ignore[arg-type]


def test_a_run_in_which_nothing_happened_still_makes_a_page() -> None:
    one = toy_result(workload(5))
    nothing = one.jobs.with_columns(pl.lit(None, pl.Float64).alias(c) for c in ("jct_s", "finish_s", "queue_delay_s"))
    metrics = summarise(
        policy="fifo",
        placement="count",
        trace="t",
        cluster="1x1",
        total_gpus=1,
        jobs=nothing.clear(),
        events=0,
        wall_seconds=0.0,
    )
    for jobs in (nothing, nothing.clear()):
        bare = replace(one, jobs=jobs, events=one.events.clear(), timeline=one.timeline.clear(), metrics=metrics)  # type: ignore[arg-type]
        assert "No job completed." in render([bare])
        assert "No job completed." in render([bare, bare])


def test_the_finding_compares_with_the_first_run_or_the_runner_up(four: list[Result]) -> None:
    def lead(*averages: float) -> str:
        runs = [replace(r, metrics={**r.metrics, "avg_jct": a}) for r, a in zip(four, averages, strict=False)]
        return re.sub("<[^>]*>", "", re.search('<p class="lead">(.*?)</p>', render(runs)).group(1))  # type: ignore[union-attr]

    assert lead(200, 50, 90) == "srtf completes jobs soonest: 50.0 s on average, against 3.33 min under fifo (4.00×)."
    assert (
        lead(50, 200, 100)
        == "fifo completes jobs soonest: 50.0 s on average, against 1.67 min under tiresias-l (2.00×)."
    )
    assert lead(50, 50, 100).startswith("fifo and srtf complete jobs soonest")
    assert lead(50, 50) == "All policies complete jobs in 50.0 s on average."


def test_runs_keep_colours_apart_and_the_thirteenth_differs_too() -> None:
    looks = charts.looks([f"p{i}" for i in range(19)])
    assert len({(look.hue, look.dash, look.hatch) for look in looks}) == 19


def test_the_class_bars_are_the_means_of_the_metrics(four: list[Result]) -> None:
    for figures in series.by_class(four):
        told = [r.metrics[f"avg_jct_{figures.job_class.key}"] for r in four]
        assert figures.mean_s == told


def test_delays_in_the_chart_are_those_of_the_frame(four: list[Result]) -> None:
    trace = charts.delay_chart(four, charts.looks([r.policy for r in four])).data[0]
    at_once = float((column(four[0].jobs, "queue_delay_s") <= 1).mean())
    assert trace["y"][0] == pytest.approx(100 * at_once)  # type: ignore[index]


def test_folders_are_made_on_the_way(four: list[Result], tmp_path: Path) -> None:
    write_report(four, tmp_path / "a" / "b" / "report.html", title="T")
    assert (tmp_path / "a" / "b" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_folder_in_place_of_the_file_is_refused(four: list[Result], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"it is a folder\.\nGive a file name, for example .*report\.html"):
        write_report(four, tmp_path)


def test_a_file_in_place_of_a_folder_is_refused(four: list[Result], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot make the folder .*: a file has that name"):
        write_report(four, tmp_path / "file" / "report.html")
    with pytest.raises(UserError, match=r"cannot make the folder .*: a part of the path is a file"):
        write_report(four, tmp_path / "file" / "deeper" / "report.html")


def test_what_the_system_says_about_an_unwritable_file_is_passed_on(four: list[Result], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*: file name too long\.\nChoose a place"):
        write_report(four, tmp_path / ("x" * 300))


def test_no_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no result to report on"):
        write_report([], tmp_path / "report.html")


def test_without_plotly_the_user_is_told_what_to_install(
    four: list[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UserError, match=r"The HTML report needs Plotly.*\n.*pip install 'thebes\[report\]'"):
        write_report(four, tmp_path / "report.html")


def test_importing_the_report_loads_no_plotting_library() -> None:
    rooms = "thebes.report.html, thebes.report.figures, thebes.report.tables"
    code = f"import sys, {rooms}; print([m for m in ('plotly', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
