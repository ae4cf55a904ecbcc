"""The ledger hears of jobs that have left, of more GPUs than it had room for, and of memories that nobody can read."""

from __future__ import annotations

import base64
import zlib
from dataclasses import replace

import numpy as np
import pytest

from thebes.live.entries import Arrive, Entry, Leave, Measured, Ran, Rate, Set
from thebes.live.ledger import Ledger, NodeSpec
from thebes.placement import Consolidate
from thebes.policy import find


def ledger(nodes: int = 1, policy: str = "fifo") -> Ledger:
    return Ledger([NodeSpec(f"n{i}", 8) for i in range(nodes)], find(policy)(), Consolidate())


def arrival(job: str, gpus: int = 1, t: float = 0.0) -> Arrive:
    return Arrive(t, job=job, gpus=gpus, submit_s=t, tenant="default")


def decide(one: Ledger, now_s: float) -> None:
    one.apply(one.decide(now_s)[0].entry())


@pytest.mark.parametrize(
    "news",
    [
        Measured(5.0, "gone", progress_s=3.0, speed=0.5, full_s=0.1),
        Rate(5.0, "gone", 10.0),
        Set(5.0, "gone", priority=9, suspend_s=4.0),
        Ran(5.0, "gone", run_from_s=4.0),
    ],
    ids=lambda news: news.op,
)
def test_news_of_a_job_that_has_left_changes_nothing(news: Entry) -> None:
    known = ledger()
    for job in ("gone", "here"):
        known.apply(arrival(job))
    decide(known, 1.0)
    known.apply(Leave(4.0, "gone"))
    before = known.snapshot(5.0)
    known.apply(news)
    assert known.snapshot(5.0) == before | {"now_s": 5.0}
    known.apply(replace(news, job="here"))
    assert known.snapshot(5.0) != before | {"now_s": 5.0}  # of one that is here it would


def test_jobs_with_more_gpus_than_there_was_room_for_hold_what_they_were_given() -> None:
    wide = ledger(nodes=400)
    jobs = [f"j{i}" for i in range(400)]
    for i, job in enumerate(jobs):
        wide.apply(arrival(job, gpus=8, t=float(i)))
    decide(wide, 400.0)
    held = np.sort(np.concatenate([wide.gpus_of(job) for job in jobs]))
    assert held.tolist() == list(range(3200))
    assert all(len(wide.parts(wide.gpus_of(job))) == 1 for job in jobs)


def test_a_policy_whose_memory_cannot_be_read_any_more_begins_afresh() -> None:
    known = ledger()
    known.apply(arrival("a"))
    of_a_class_that_has_gone = base64.b64encode(zlib.compress(b"cthebes.policy.gone\nMemory\n.")).decode()
    known.apply(replace(known.decide(1.0)[0].entry(), memory=of_a_class_that_has_gone))
    assert known.memory == of_a_class_that_has_gone
    assert known.view(2.0).memory is None
    decide(known, 2.0)
    assert known.holds("a")
