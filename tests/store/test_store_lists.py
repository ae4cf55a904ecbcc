"""Lists: pages put together are the whole list, under any filters, and one costs the same with any number of jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_samples import submit

from kit.effort import effort
from thebes import store as db
from thebes.model.errors import UserError
from thebes.store import sqlite

USERS, TENANTS, NAMES = ("ann", "bob", "cy"), ("lab", "ml", "bio"), ("train", "eval", None)

viewers = st.builds(
    db.Viewer,
    user=st.sampled_from((*USERS, "nobody")),
    role=st.sampled_from(("user", "user", "admin")),
    tenant=st.sampled_from(TENANTS),
    open_tenants=st.frozensets(st.sampled_from(TENANTS)),
)
jobs = st.lists(
    st.tuples(
        st.sampled_from(USERS),
        st.sampled_from(TENANTS),
        st.sampled_from(NAMES),
        st.sampled_from(db.STATES),
        st.sampled_from((1, 1, 3)),
    ),
    max_size=25,
)
filters = st.fixed_dictionaries(
    {},
    optional={
        "states": st.lists(st.sampled_from((*db.STATES, "no-such-state")), max_size=4),
        "user": st.sampled_from(USERS),
        "tenant": st.sampled_from(TENANTS),
        "name": st.sampled_from(("train", "eval", "unheard-of")),
        "oldest_first": st.booleans(),
    },
)


class Undo(Exception):  # noqa: N818
    """Ends a change without effect, so that one store serves all examples."""


@pytest.fixture(scope="module")
def store(new_place: Callable[[], Path | str]) -> Iterator[db.Store]:
    with db.Store.open(new_place()) as opened:
        yield opened


def inside(store: db.Store, check: Callable[[db.Connection], None]) -> None:
    def change(c: db.Connection) -> None:
        check(c)
        raise Undo

    with pytest.raises(Undo):
        store.change_blocking(change)


def pages(c: db.Connection, **options: Any) -> Iterator[list[db.JobRow]]:
    cursor = None
    while True:
        page, cursor = db.list_jobs(c, cursor=cursor, **options)
        yield page
        if cursor is None:
            return


def fill(c: db.Connection, wanted: list[tuple[str, str, str | None, str, int]]) -> list[db.JobRow]:
    made = []
    for user, tenant, name, state, number in wanted:
        for row in submit(
            c, user=user, tenant=tenant, name=name, members=[None] if number == 1 else list(range(number))
        ):
            db.update_job(c, row.id, state=state)
            made.append(db.get_job(c, row.id))
    return made


@given(jobs, viewers, filters, st.integers(1, 7))
def test_pages_put_together_are_the_whole_list(
    store: db.Store, wanted: list[Any], viewer: db.Viewer, options: dict[str, Any], limit: int
) -> None:
    def check(c: db.Connection) -> None:
        everything = fill(c, wanted)
        expected = [
            row
            for row in everything
            if viewer.sees(row)
            and ("states" not in options or row.state in options["states"])
            and all(options.get(key, getattr(row, key)) == getattr(row, key) for key in ("user", "tenant", "name"))
        ]
        if not options.get("oldest_first"):
            expected.reverse()
        got = list(pages(c, viewer=viewer, limit=limit, **options))
        assert [row for page in got for row in page] == expected
        assert all(len(page) == limit for page in got[:-1])
        assert got[-1] or len(got) == 1  # no cursor to an empty page

    inside(store, check)


@effort(40)
@given(jobs, viewers)
def test_counts_by_state(store: db.Store, wanted: list[Any], viewer: db.Viewer) -> None:
    def check(c: db.Connection) -> None:
        seen = [row.state for row in fill(c, wanted) if viewer.sees(row)]
        assert db.count_by_state(c, viewer) == {state: seen.count(state) for state in db.STATES}

    inside(store, check)


@effort(40)
@given(jobs, viewers, st.lists(st.integers(0, 2), min_size=75, max_size=75))
def test_events_are_seen_by_those_who_see_the_job(
    store: db.Store, wanted: list[Any], viewer: db.Viewer, numbers: list[int]
) -> None:
    def check(c: db.Connection) -> None:
        rows = fill(c, wanted)
        before = db.add_event(c, 0.0, "mark")
        expected = []
        for row, number in zip(rows, numbers, strict=False):
            for _ in range(number):
                seq = db.add_event(c, 1.0, "started", job_id=row.id, node="n0", detail={"gpus": 1})
                expected += [(seq, row)] if viewer.sees(row) else []
        node_event = db.add_event(c, 2.0, "node-down", node="n0")
        db.add_event(c, 2.0, "started", job_id="no-such-job", node="n0")
        db.add_event(c, 2.0, "token-created", actor="root")
        seqs = [seq for seq, _ in expected] + [node_event]
        if viewer.is_admin:
            seqs += [node_event + 1, node_event + 2]
        got = [event.seq for event in db.events_after(c, seq=before, viewer=viewer)]
        assert got == seqs
        stepwise, last = [], before
        while page := db.events_after(c, seq=last, viewer=viewer, limit=2):
            stepwise += [event.seq for event in page]
            last = page[-1].seq
        assert stepwise == seqs
        for row in rows:
            of_job = [event.seq for event in db.events_after(c, job_id=row.id, viewer=viewer)]
            assert of_job == [seq for seq, of in expected if of.id == row.id]
            if row.array_id:
                of_array = [event.seq for event in db.events_after(c, job_id=row.array_id, viewer=viewer)]
                assert of_array == [seq for seq, of in expected if of.array_id == row.array_id]

    inside(store, check)


@pytest.mark.parametrize("cursor", ["x", "", "-1", "1e3", "٣", "9" * 30, "1 OR 1"])
def test_a_cursor_is_taken_from_a_page(store: db.Store, cursor: str) -> None:
    with store.read() as c, pytest.raises(UserError, match="is not a cursor"):
        db.list_jobs(c, viewer=db.EVERYTHING, cursor=cursor)


def test_pages_have_a_sensible_length(store: db.Store) -> None:
    def check(c: db.Connection) -> None:
        submit(c, members=list(range(1001)))
        assert len(db.list_jobs(c, viewer=db.EVERYTHING, limit=0)[0]) == 1
        assert len(db.list_jobs(c, viewer=db.EVERYTHING, limit=10**9)[0]) == 1000
        assert len(db.list_jobs(c, viewer=db.EVERYTHING)[0]) == 50

    inside(store, check)


# ---- how much work a page is

ANN, OPEN = db.Viewer("ann", "user", "lab"), db.Viewer("ann", "user", "lab", frozenset({"lab"}))
QUESTIONS: dict[str, Callable[[db.Connection], Any]] = {
    f"{who}: {options}": lambda c, viewer=viewer, options=options: db.list_jobs(c, viewer=viewer, **options)
    for who, viewer in {"admin": db.EVERYTHING, "ann": ANN, "ann of an open tenant": OPEN}.items()
    for options in (
        {},
        {"states": ["completed"]},
        {"states": ["queued", "running"]},
        {"states": list(db.TERMINAL_STATES)},
        {"states": ["timeout"]},
        {"cursor": "2000"},
        {"oldest_first": True, "cursor": "2000"},
        {"name": "train"},
        {"user": "ann"},
        {"user": "ann", "states": ["completed"]},
        {"tenant": "lab"},
        {"tenant": "lab", "states": ["queued"]},
    )
} | {
    "counts": lambda c: db.count_by_state(c, OPEN),
    "counts of an admin": lambda c: db.count_by_state(c, db.EVERYTHING),
    "events": lambda c: db.events_after(c, viewer=db.EVERYTHING),
    "own events": lambda c: db.events_after(c, viewer=ANN),
    "tenant's events": lambda c: db.events_after(c, viewer=OPEN, seq=1000),
    "events of a job": lambda c: db.events_after(c, viewer=ANN, job_id="1_77"),
    "open attempts": db.open_attempts,
    "one job": lambda c: db.get_job(c, "1_77"),
    "decisions": lambda c: db.list_decisions(c, 10),
}


def many_jobs(c: db.Connection, number: int) -> None:
    """Mostly ended ones, of few users, as in a cluster that has been running for a year."""
    for user, tenant, name in (
        ("ann", "lab", "train"),
        ("bob", "lab", "train"),
        ("cy", "ml", None),
        ("ann", "ml", "x"),
    ):
        submit(c, user=user, tenant=tenant, name=name, members=list(range(number // 4)))
    c.exec_driver_sql("UPDATE jobs SET state = CASE WHEN seq % 50 = 0 THEN 'failed' ELSE 'completed' END")
    c.exec_driver_sql("UPDATE jobs SET state = 'queued' WHERE seq % 20 = 1")
    c.exec_driver_sql(
        'INSERT INTO events (time_s, job_id, kind, actor, detail, "user", tenant) '
        "SELECT 1.0, id, 'ended', '', '{}', \"user\", tenant FROM jobs"
    )


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[db.Store]:
    with db.Store.open(tmp_path_factory.mktemp("full") / "store.db") as opened:
        opened.change_blocking(lambda c: many_jobs(c, 8_000))
        yield opened


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_page_costs_the_same_however_many_jobs_there_are(full: db.Store, question: str) -> None:
    assert _steps(full, QUESTIONS[question]) < 25_000


@pytest.mark.slow
def test_no_question_reads_all_of_100_000_jobs(tmp_path: Path) -> None:
    with db.Store.open(tmp_path / "store.db") as store:
        store.change_blocking(lambda c: many_jobs(c, 100_000))
        for name, question in QUESTIONS.items():
            assert _steps(store, question) < 200_000, name  # a scan takes four for each job


def _steps(store: db.Store, question: Callable[[db.Connection], Any]) -> int:
    """Counted in steps of SQLite's machine, which do not depend on how busy this computer is."""
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 100

    with store.read() as c:
        raw = sqlite.driver(c)
        raw.set_progress_handler(count, 100)
        try:
            question(c)
        finally:
            raw.set_progress_handler(None, 0)
    return steps
