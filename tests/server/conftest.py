"""What the tests of API and client share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from api_world import World, running_world

from thebes.server import store as db

# What is about behaviour is tested on both databases; `make test` leaves the second out, `make test-postgres` runs it.
DATABASES = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]
NewPlace = Callable[[], Path | str]


@pytest.fixture(params=DATABASES, scope="session")
def new_place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewPlace]:
    """Gives the place of a new, empty store at each call: a path, or an address."""
    if request.param == "sqlite":
        yield lambda: tmp_path_factory.mktemp("store") / "store.db"
        return
    server, template = request.getfixturevalue("postgres"), request.getfixturevalue("postgres_template")
    with pytest.MonkeyPatch.context() as patch:
        # No transaction is broken off because this machine stood still in the middle of it.
        patch.setattr("thebes.server.postgres.IDLE_IN_TRANSACTION_S", 600)
        yield lambda: server.url(server.new_database(template))


@pytest.fixture
def place(new_place: NewPlace) -> Path | str:
    return new_place()


@pytest.fixture
def store(place: Path | str) -> Iterator[db.Store]:
    """An empty store in either database."""
    with db.Store.open(place) as opened:
        yield opened


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One running server for all tests of a file."""
    with running_world(tmp_path_factory.mktemp("world") / "instance") as started:
        yield started


@pytest.fixture
def sqlite_store(tmp_path: Path) -> Iterator[db.Store]:
    """For what is particular to SQLite."""
    with db.Store.open(tmp_path / "store.db") as opened:
        yield opened
