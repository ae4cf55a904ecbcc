"""The benchmark of first uses: what it measures, and what it calls missed. Times are not tested: machines differ."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.compile import OWN_POLICY, ROOT, command_of, families, least, missed_goals, timed

from thebes.policy import find, registry


def test_every_policy_that_is_compiled_belongs_to_one_family() -> None:
    found = families(list(registry()))
    listed = [name for members in found.values() for name in members]
    assert sorted(listed) == sorted(set(registry()) - {"tiresias-compat"})
    assert found["order"][0] == "fifo"


def test_a_policy_that_decides_on_plans_gets_jobs_with_plans() -> None:
    assert "plans" in command_of("rubick")
    assert "plans" not in command_of("dally")
    assert command_of(OWN_POLICY)[-1] == OWN_POLICY
    assert find(str(ROOT / OWN_POLICY))


def test_cpu_time_and_what_was_told_are_those_of_the_command(tmp_path: Path) -> None:
    burn = "import time; print('Compiling …')\nwhile time.process_time() < 0.3: pass"
    figures = timed([sys.executable, "-c", burn], tmp_path)
    assert 0.3 <= figures["cpu_seconds"] < 30
    assert figures["announced"] == ["Compiling …"]
    assert figures["kernels"] == 0


def test_a_command_that_fails_stops_the_benchmark_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="exit status 3"):
        timed([sys.executable, "-c", "raise SystemExit(3)"], tmp_path)


def test_the_least_of_the_repeats_counts_and_a_goal_is_missed_above_it() -> None:
    runs = [{"cpu_seconds": seconds} for seconds in (21.0, 18.0)]
    assert least(runs) == {"cpu_seconds": 18.0, "all_cpu_seconds": [21.0, 18.0]}
    case: dict[str, Any] = {"family": "order", "from_empty": {"cpu_seconds": 20.5}, "from_setup": {"cpu_seconds": 15.0}}
    results = {"goals": {"from_empty": 20.0, "from_setup": 15.0}, "families": [case]}
    assert missed_goals(results) == ["order from_empty: 20.5 s of at most 20 s"]
