"""Many runs on one page: the best of every column, what failed and why, and nothing from outside as markup."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from thebes.report import units
from thebes.report.matrix import VIEWS, Run, Scene, render_matrix

SCENES = [Scene("small", "1x8", "A few jobs."), Scene("large", "4x8", "Many jobs.")]
NETWORKS = ("10gbe", "100gbe", "nvlink+hdr")


def figures(avg_jct: float, max_rho: float = 2.0) -> dict[str, object]:
    keys = ("median_jct", "p95_jct", "p99_jct", "makespan", "avg_queue_delay", "median_slowdown", "gpu_utilization")
    shares = ("mean_rho", "communication_share", "fragmentation", "preemptions")
    account = {f"{part}_gpu_seconds": 10.0 for part in ("useful", "overhead", "lost", "idle_held", "unused")}
    return {
        **dict.fromkeys((*keys, *shares), 0.5),
        **account,
        "avg_jct": avg_jct,
        "max_rho": max_rho,
        "jobs": 3,
        "completed": 3,
    }


def some_runs() -> list[Run]:
    """slow takes twice as long as fast everywhere; broken fails everywhere."""
    return [
        run
        for scene in SCENES
        for network in NETWORKS
        for run in (
            Run(scene.trace, network, "fast", figures(100.0)),
            Run(scene.trace, network, "slow", figures(200.0)),
            Run(scene.trace, network, "broken", error="it <b>broke</b>"),
        )
    ]


@pytest.fixture(scope="module")
def page() -> str:
    return render_matrix(some_runs(), SCENES, title="All", about=["By hand."])


def view(page: str, key: str) -> list[list[str]]:
    """The cells of one overview, as text."""
    table = page.split(f'id="view-{key}"')[1].split("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", table.split("<tbody>")[1])
    return [[re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<t[dh].*?</t[dh]>", row)] for row in rows]


def test_every_column_is_measured_against_its_best(page: str) -> None:
    assert view(page, "avg_jct") == [["fast", *["1.00×"] * 6], ["slow", *["2.00×"] * 6], ["broken", *["failed"] * 6]]
    assert view(page, "max_rho")[0] == ["fast", *["2.00"] * 6]


def test_every_figure_of_the_overview_can_be_chosen_and_one_is_in_sight(page: str) -> None:
    for chosen in VIEWS:
        assert f'data-view="view-{chosen.key}"' in page
    assert page.count('<div id="view-') == page.count(' hidden><p class="about">') + 1


def test_each_trace_has_a_table_per_network_and_its_charts(page: str) -> None:
    drawn = [chart["key"] for chart in json.loads(re.search(r'id="charts">(.*?)</script>', page).group(1))["charts"]]  # type: ignore[union-attr]
    assert drawn == ["jct-0", "trade-0", "account-0", "jct-1", "trade-1", "account-1"]
    assert page.count('<table class="summary sortable">') == len(SCENES) * len(NETWORKS)


def test_failures_are_told_with_their_reason_and_cannot_become_markup(page: str) -> None:
    assert "broken on small, 10gbe: it &lt;b&gt;broke&lt;/b&gt;" in page
    assert "<b>broke" not in page.split("plotly.js v")[0].split('id="metrics"')[0]


def test_the_finding_counts_where_each_policy_is_best(page: str) -> None:
    assert "<strong>fast</strong> (6 of 6)" in page


def test_the_exact_figures_are_inside(page: str) -> None:
    exact = json.loads(re.search(r'id="metrics">(.*?)</script>', page, re.DOTALL).group(1))["runs"]  # type: ignore[union-attr]
    assert [one["policy"] for one in exact[:3]] == ["fast", "slow", "broken"]
    assert exact[2]["error"] == "it <b>broke</b>"


def test_nothing_but_failures_is_still_a_page() -> None:
    text = render_matrix([Run("small", "10gbe", "broken", error="no")], SCENES, title="None")
    assert "No run completed." in text
    assert "nobody" in text


def test_ticks_lie_inside_the_range_and_are_round() -> None:
    assert units.close_ticks(np.array([2.1 * units.DAY_S, 8.5 * units.DAY_S])) == {
        n * units.DAY_S: f"{n} d" for n in (2, 3, 4, 5, 6, 8)
    }
    assert len(units.close_ticks(np.array([1.0, 1e7]))) <= 6
    assert units.close_ticks(np.array([])) == {}


def test_an_axis_of_few_decades_has_ticks_between_them() -> None:
    assert list(units.decades(np.array([0.3, 1.5])).values()) == ["0.1", "0.2", "0.5", "1", "2", "5", "10"]
    assert list(units.decades(np.array([0.3, 2000.0])).values()) == ["0.1", "1", "10", "100", "1,000", "10,000"]
    assert units.decades(np.array([])) == {1.0: "1", 10.0: "10"}
