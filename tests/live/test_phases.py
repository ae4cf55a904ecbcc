"""The phases of an attempt: one table of moves, one function that makes them."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from typing import get_args

import pytest

from kit.cluster_in_a_test import live_cluster
from thebes.live import core as core_module
from thebes.live.phases import ACTIVE, CORRECTIONS, MOVES, STORED, IllegalMove, Phase, legal, taken_up

PHASES: tuple[Phase, ...] = get_args(Phase)


def test_the_table_knows_every_phase_and_each_is_reached_and_can_be_left():
    assert set(MOVES) == set(PHASES) == set(STORED)
    assert set().union(*MOVES.values()) == set(PHASES) - {"launching"}
    assert all("stopping" in after for after in MOVES.values())  # whatever an attempt does, it can be asked to leave
    assert set(ACTIVE) <= set(PHASES)
    assert "stopping" not in CORRECTIONS  # an attempt that we asked to stop is never taken for one that goes on


def test_what_is_stored_is_taken_up_as_a_phase_that_the_nodes_can_correct():
    for phase in PHASES:
        again = taken_up(STORED[phase])
        assert again == phase or phase in (*CORRECTIONS[again], *MOVES[again]), phase


def test_only_core_move_sets_the_phase_of_an_attempt():
    """The ledger's table has a column of that name, which is written by a subscript and is no attribute."""
    folder = Path(core_module.__file__).parent
    writers = {
        (path.name, function.name)
        for path in folder.glob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr == "phase" and isinstance(node.ctx, ast.Store)
    }
    assert writers == {("core.py", "move")}


def test_an_illegal_move_raises_here_and_is_told_as_an_event_on_a_cluster_in_use(tmp_path):
    assert not legal("stopping", "running")

    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(2)
            core = c.controller.core
            live = core.jobs[job]
            attempt = live.active
            assert attempt is not None
            with pytest.raises(IllegalMove, match=rf"job {job}, incarnation 1: from running to resuming"):
                core.move(live, attempt, "resuming", 1.0)
            assert attempt.phase == "running"
            core.settings = core_module.Settings(strict=False)
            core.move(live, attempt, "resuming", 1.0)
            assert attempt.phase == "resuming"
            assert core.events[-1]["kind"] == "illegal-move"
            assert core.events[-1]["detail"] == {"incarnation": 1, "before": "running", "after": "resuming"}

    asyncio.run(story())


def test_a_controller_in_use_reports_and_those_of_the_tests_raise(tmp_path):
    import inspect

    from thebes.live.controller import Controller

    assert inspect.signature(Controller.__init__).parameters["strict"].default is False

    async def story():
        async with live_cluster(tmp_path) as c:
            assert c.controller.core.settings.strict

    asyncio.run(story())
