"""Entries of the journal: typed in memory, and stored as version 0.1 stored them."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from thebes.live import entries
from thebes.live.entries import KINDS, Entry, entry_of
from thebes.live.ledger import Ledger, NodeSpec
from thebes.placement import Consolidate
from thebes.policy import find

# One of each as version 0.1 wrote it: with all that it ever wrote, and with the least.
STORED = [
    {
        "op": "arrive",
        "t": 1.5,
        "job": "7",
        "gpus": 4,
        "nodes": 2,
        "gpu_type": "A100",
        "model": "VGG19",
        "priority": 3,
        "tenant": "vision",
        "submit_s": 1.25,
        "suspend_s": 0.5,
        "resume_s": 2.0,
    },
    {"op": "leave", "t": 2.0, "job": "7", "completed": True},
    {"op": "ran", "t": 3.0, "job": "7"},
    {"op": "rate", "t": 3.0, "job": "7", "steps_per_s": 12.5},
    {"op": "part", "t": 3.0, "job": "7", "undone": True},
    {"op": "back", "t": 3.0, "job": "7"},
    {"op": "hold", "t": 3.0, "job": "7"},
    {"op": "release", "t": 3.0, "job": "7"},
    {"op": "set", "t": 3.0, "job": "7", "suspend_s": 1.0, "resume_s": 2.0},
    {"op": "set", "t": 3.0, "job": "7", "priority": 2},
    {"op": "quota", "t": 3.0, "tenant": "vision", "gpus": None},
    {"op": "nodes", "t": 3.0, "blocked": ["n1"], "sick": [3]},
    {
        "op": "decide",
        "t": 3.0,
        "digest": "ab",
        "suspend": ["1"],
        "start": [["2", [0, 1]]],
        "migrate": [["3", [2]]],
        "promote": ["4"],
        "queues": "eAE=",
        "fates": "eAE=",
        "wake_s": None,
        "memory": None,
        "guests": [["5", "6"]],
    },
]


@pytest.mark.parametrize("body", STORED, ids=lambda body: body["op"])
def test_what_version_0_1_stored_is_read_and_stored_again_alike(body):
    entry = entry_of(json.loads(json.dumps(body)))
    stored = json.loads(json.dumps(entry.to_json()))
    assert stored | body == stored  # with what later versions add
    assert entry_of(stored) == entry


def test_there_is_a_class_for_every_entry_of_version_0_1_and_the_ledger_takes_each():
    assert {body["op"] for body in STORED} <= KINDS.keys()
    assert set(KINDS.values()) == set(get_args(Entry))


def test_what_older_journals_do_not_say_is_the_default_and_what_newer_ones_add_is_passed_over():
    assert entry_of({"op": "leave", "t": 1, "job": "1"}) == entries.Leave(1.0, "1", completed=False)
    assert entry_of({"op": "nodes", "t": 1, "blocked": []}) == entries.Nodes(1.0, ())
    assert entry_of({"op": "ran", "t": 1, "job": "1", "mood": "good"}) == entries.Ran(1.0, "1")
    least = {"op": "arrive", "t": 1, "job": "1", "gpus": 2, "tenant": "t", "submit_s": 1}
    assert entry_of(least) == entries.Arrive(1.0, job="1", gpus=2, tenant="t", submit_s=1)


@pytest.mark.parametrize("body", [{"op": "dance", "t": 1}, {"op": "ran", "t": 1}, {"op": "ran", "job": "1"}, {}])
def test_what_is_no_entry_is_refused(body):
    with pytest.raises((LookupError, TypeError)):
        entry_of(body)


def test_a_fact_that_is_not_said_changes_nothing():
    ledger = Ledger([NodeSpec("n0", 4)], find("fifo")(), Consolidate())
    ledger.apply(entries.Arrive(0.0, job="1", gpus=1, tenant="t", submit_s=0.0, priority=4, suspend_s=3.0))
    ledger.apply(entries.Set(1.0, "1", resume_s=2.0))
    assert ledger.costs_of("1") == (3.0, 2.0)
    assert ledger.table.jobs["priority"][0] == 4
