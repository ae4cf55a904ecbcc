"""How accurate predicted iterations are: the goal where it is met, today's figures where not, and shipped data."""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from benchmarks.plan_accuracy import (
    DATA,
    GOAL,
    RESULT,
    SHARED,
    VTRAIN,
    a800_cases,
    by_design,
    figures,
    learn,
    main,
    misfit,
    shipped_constants,
    shipped_rows,
    vtrain_cases,
)

from thebes.perf.plans.timing import ENVIRONMENT, Constants

published = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data do not lie beside the checkout")
SLACK = 0.002  # another SciPy may end a little elsewhere


@cache
def a800(model: str) -> dict[str, Any]:
    return figures(a800_cases()[model], ENVIRONMENT, draws=0)


@cache
def vtrain(cluster: str, shape: str) -> dict[str, Any]:
    return figures(vtrain_cases(cluster)[shape], VTRAIN[cluster], draws=0)


@pytest.mark.parametrize("model", ["roberta-large", "bert-large", "gpt-2", "llama-2-7b", "llama-30b"])
def test_seven_rows_predict_all_others_within_eight_percent_on_average(model: str) -> None:
    found = a800(model)
    assert len(found["fitted_to"]) == 7
    assert found["unseen"]["mean"] <= GOAL
    assert found["unseen"]["mean"] < found["naive"]["mean"] / 3


def test_vit_is_at_the_edge_of_the_goal_and_far_beyond_with_its_suspicious_rows() -> None:
    """Recorded so that it cannot get worse: 7.9 % (9.0 % under the other design), 43 % with the 47 odd rows."""
    found = a800("vit")
    assert found["unseen"]["mean"] <= 0.079 + SLACK
    assert found["unseen_by_d_optimal_design"]["mean"] <= 0.090 + SLACK
    assert found["unseen_with_suspicious"]["mean"] <= 0.44


@pytest.mark.parametrize(
    ("model", "worst"),
    [
        ("vit", 0.33),
        ("roberta-large", 0.14),
        ("bert-large", 0.23),
        ("gpt-2", 0.15),
        ("llama-2-7b", 0.06),
        ("llama-30b", 0.02),
    ],
)
def test_the_worst_unseen_row_is_no_worse_than_recorded(model: str, worst: float) -> None:
    assert a800(model)["unseen"]["worst"] <= worst


@published
@pytest.mark.parametrize(
    ("cluster", "shape", "mean"),
    [
        ("single", "gpt-h1024-l12", GOAL),
        ("single", "gpt-h1024-l16", GOAL),
        ("single", "gpt-h1024-l20", GOAL),
        ("single", "gpt-h1024-l24", GOAL),
        ("single", "gpt-h2048-l12", GOAL),
        ("single", "gpt-h2048-l16", GOAL),
        ("single", "gpt-h2048-l20", GOAL),
        ("single", "gpt-h2048-l24", GOAL),
        ("multi", "gpt-h3072-l30", GOAL),
        ("multi", "gpt-h6144-l40", GOAL),
        ("multi", "gpt-h8192-l48", 0.22),  # goal missed: its tp2 rows contradict the others
    ],
)
def test_megatron_on_a100_is_predicted_as_recorded(cluster: str, shape: str, mean: float) -> None:
    assert vtrain(cluster, shape)["unseen"]["mean"] <= mean


def test_suspicious_rows_are_never_fitted_to() -> None:
    for case in a800_cases().values():
        assert not any(case.suspicious[i] for i in by_design(case, ENVIRONMENT))


def test_the_environment_is_worth_something() -> None:
    """Half the wire, or cards that every GPU reaches, explain the rows worse."""
    cases = [a800_cases()[name] for name in ("gpt-2", "llama-2-7b")]
    today = misfit(cases, ENVIRONMENT)
    assert misfit(cases, ENVIRONMENT._replace(wire=0.4)) > 1.2 * today
    assert misfit(cases, ENVIRONMENT._replace(gpus_per_card=8)) > 1.2 * today


# --- what ships and what is published ---------------------------------------------------------------------------------


def test_the_constants_that_ship_are_those_that_the_script_finds() -> None:
    def table(text: str) -> dict[str, dict[str, str]]:
        return {row["model"]: row for row in csv.DictReader(text.splitlines())}

    shipped, found = table((DATA / "fitted.csv").read_text()), table(shipped_constants())
    assert list(shipped) == list(found)
    for model, row in shipped.items():
        for name in ("forward_s", *Constants._fields, "mean_error"):
            if row[name]:
                assert float(found[model][name]) == pytest.approx(float(row[name]), rel=0.02, abs=1e-4), (model, name)


@published
def test_the_rows_that_ship_are_those_that_the_script_makes() -> None:
    source = (SHARED / "morphling_llm" / "placements.csv").read_text()
    assert shipped_rows(source) == (DATA / "a800.csv").read_text()


@pytest.mark.parametrize("model", ["bert-large", "llama-30b"])
def test_the_published_figures_are_todays(model: str) -> None:
    told = json.loads(RESULT.read_text())["a800"]["models"][model]
    assert told["fitted_to"] == a800(model)["fitted_to"]
    assert told["unseen"]["mean"] == pytest.approx(a800(model)["unseen"]["mean"], abs=SLACK)


def test_an_environment_from_the_other_models_serves_nearly_as_well() -> None:
    """The strictest figures that are published: neither constants nor environment have seen the rows."""
    told = json.loads(RESULT.read_text())["a800"]["environment_without_the_model"]
    assert {name for name, row in told.items() if row["unseen"]["mean"] > GOAL} <= {"vit"}
    assert told["vit"]["unseen"]["mean"] < 0.085


def test_all_rows_are_explained_better_than_few_rows_predict_them() -> None:
    case = a800_cases()["gpt-2"]
    assert learn(case, case.regular, ENVIRONMENT).fit.mean_error <= a800("gpt-2")["unseen"]["mean"]


def test_the_command_prints_a_table_and_writes_the_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--draws", "1", "--vtrain-draws", "0", "--out", str(tmp_path / "study.json")])

    document = json.loads((tmp_path / "study.json").read_text())
    assert document["rows_fitted_to"] == 7
    assert {"cpu", "python"} <= set(document["machine"])
    printed = capsys.readouterr().out
    for model, row in document["a800"]["models"].items():
        assert model in printed
        assert row["random"]["draws"] == 1
