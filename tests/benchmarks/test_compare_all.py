"""`make compare-all` on a few jobs: every run is there, a failure is told and not fatal, the files agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.compare_all import (
    NETWORKS,
    WORKLOADS,
    Task,
    Workload,
    available,
    compare_all,
    main,
    markdown,
    perform,
    policies,
    runs_of,
    write_all,
)
from rich.console import Console

from thebes.model.facts import PLANS
from thebes.policy import registry


@pytest.fixture(scope="module")
def document() -> dict[str, object]:
    few = [work for work in WORKLOADS if work.name in ("philly-sample", "helios-sample")]
    return compare_all(few, NETWORKS, ["fifo", "no-such-policy"], Console(quiet=True), workers=1, limit=30)


def test_every_policy_that_is_installed_takes_part() -> None:
    with_plans = {name for name, policy in registry().items() if PLANS in policy.needs}  # other traces: rubick.json
    assert set(policies()) == set(registry()) - {"tiresias-compat"} - with_plans


def test_four_real_traces_ship_and_fill_their_clusters(document: dict[str, object]) -> None:
    assert sum("/" not in work.place for work in available()) >= 4
    for work in document["workloads"]:  # type: ignore[attr-defined]
        assert 0.7 <= work["load"] <= 1.3


def test_every_run_is_there_in_order(document: dict[str, object]) -> None:
    runs = runs_of(document)
    assert [(run.trace, run.network, run.policy) for run in runs] == [
        (trace, network, policy)
        for trace in ("philly-sample", "helios-sample")
        for network in NETWORKS
        for policy in ("fifo", "no-such-policy")
    ]


def test_a_failure_is_told_in_its_place_and_the_others_go_on(document: dict[str, object]) -> None:
    for run in runs_of(document):
        if run.policy == "fifo":
            assert run.figures is not None
            assert run.figures["completed"] == 30
        else:
            assert "unknown policy" in run.error
    text = markdown(document)
    assert "| no-such-policy | unknown policy" in text
    assert "| no-such-policy | failed |" in text


def test_a_run_that_takes_too_long_is_given_up() -> None:
    run, _notes = perform(Task(WORKLOADS[0], "10gbe", "multi-dlas", None, 0.05))
    assert run.error == "given up after 0.05 s"


def test_jobs_that_cannot_fit_are_left_out_with_a_note() -> None:
    tiny = Workload("tiny", "philly-sample", "1x1x8", "Too small for many.")
    run, notes = perform(Task(tiny, "10gbe", "fifo", 200, 60.0))
    assert run.figures is not None
    assert run.figures["jobs"] < 200  # type: ignore[operator]
    assert any("left out" in note for note in notes)


def test_the_files_hold_the_same_figures_and_no_paths(document: dict[str, object], tmp_path: Path) -> None:
    write_all(
        document,
        results=tmp_path / "results" / "all.json",
        page=tmp_path / "docs" / "all.md",
        report=tmp_path / "all.html",
    )
    text = (tmp_path / "results" / "all.json").read_text()
    assert json.loads(text) == document
    assert str(Path.home()) not in text
    assert "/work" not in text
    assert (tmp_path / "all.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "docs" / "all.md").read_text() == markdown(document)


def test_an_unknown_trace_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--traces", "nowhere"])
    assert "no trace 'nowhere'" in capsys.readouterr().err
