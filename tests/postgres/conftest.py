"""What the tests of the PostgreSQL store share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cut_wire import Wire

from kit.postgres_server import PostgresServer, running_server
from thebes import store as db


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.postgres)


@pytest.fixture
def url(postgres: PostgresServer, postgres_template: str) -> str:
    """The address of a new, empty store."""
    return postgres.url(postgres.new_database(postgres_template))


@pytest.fixture
def store(url: str) -> Iterator[db.Store]:
    with db.Store.open(url) as opened:
        yield opened


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A server that the test may kill."""
    with running_server() as server:
        yield server


@pytest.fixture
def wire(postgres: PostgresServer) -> Iterator[Wire]:
    made = Wire(postgres.port)
    yield made
    made.close()
