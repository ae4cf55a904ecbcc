"""Tables in the terminal: they fit, they point at the best, and they are plain text in a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from thebes.report.result import Result
from thebes.report.tables import print_comparison, print_result


def printed(show, figures: object, width: int, *, terminal: bool = False) -> str:
    out = io.StringIO()
    show(
        figures, Console(file=out, width=width, force_terminal=terminal, color_system="standard" if terminal else None)
    )
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_twelve_policies_fit_and_nothing_is_cut(twelve: list[Result], width: int) -> None:
    text = printed(print_comparison, [r.metrics for r in twelve], width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert all(result.policy in text for result in twelve)
    assert len(text.splitlines()) == 13


def test_a_wider_terminal_says_more(four: list[Result]) -> None:
    heads = [printed(print_comparison, [r.metrics for r in four], width).splitlines()[0] for width in (80, 200)]
    assert "util." in heads[0]
    assert "rho" not in heads[0]
    for words in ("max rho", "mean rho", "comm.", "fragm.", "migrate"):
        assert words in heads[1]


def test_ratios_are_against_the_best_and_the_first(four: list[Result]) -> None:
    figures = [{**r.metrics, "avg_jct": jct} for r, jct in zip(four, (200.0, 100.0, 150.0, 400.0), strict=True)]
    rows = [line.split() for line in printed(print_comparison, figures, 80).splitlines()[1:]]
    assert [row[3:5] for row in rows] == [
        ["2.00×", "1.00×"],
        ["1.00×", "0.50×"],
        ["1.50×", "0.75×"],
        ["4.00×", "2.00×"],
    ]


def test_the_best_is_bold_on_a_terminal_and_only_there(four: list[Result]) -> None:
    figures = [r.metrics for r in four]
    best = min(four, key=lambda r: r.metrics["avg_jct"]).policy  # type: ignore[arg-type, return-value]
    assert f"\x1b[1m{best}" in printed(print_comparison, figures, 80, terminal=True)
    assert "\x1b" not in printed(print_comparison, figures, 80)


def test_unfinished_runs_show_how_many_jobs_completed(four: list[Result]) -> None:
    figures = [{**r.metrics, "completed": 7} for r in four]
    assert "7/80" in printed(print_comparison, figures, 80)


def test_a_run_in_which_nothing_completed_is_still_a_table(four: list[Result]) -> None:
    nothing = {k: None if "jct" in k or k in ("makespan", "gpu_utilization") else v for k, v in four[0].metrics.items()}
    nothing |= {"completed": 0, "unused_gpu_seconds": None}
    assert "–" in printed(print_comparison, [nothing, nothing], 80)
    assert "0 of 80" in printed(print_result, nothing, 80)


def test_one_result_names_what_ran_and_does_not_read_markup(four: list[Result]) -> None:
    text = printed(print_result, {**four[2].metrics, "trace": "[red]odd[/red].csv"}, 80)
    assert max(map(len, text.splitlines())) <= 80
    for words in (
        "tiresias-l",
        "[red]odd[/red].csv",
        "80 of 80",
        "preemptions",
        "GPU-h useful",
        "32 GPUs",
        "at worst",
        "10.0% of running time",
    ):
        assert words in text
