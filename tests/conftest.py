"""What holds for the whole suite: every simulation is checked; real data is used where it lies beside the checkout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from thebes.sim import fast, loop
from workloads import EFFORT, shared_data

if TYPE_CHECKING:
    from postgres_server import PostgresServer

# Compiled code is loaded inside the first example of a test; a deadline would measure that.
# Nor is it a fault of ours how long a busy machine takes to draw one.
# Examples are the same in every run, unless THEBES_TEST_EFFORT asks for more of them.
settings.register_profile(
    "thebes",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize=EFFORT == 1,
)
settings.load_profile("thebes")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "unchecked: this test compares with a run that leaves the checker out")


@pytest.fixture(autouse=True)
def every_simulation_is_checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Design rule 3: `checks=False` reaches the simulator only in tests that are marked `unchecked`."""
    if request.node.get_closest_marker("unchecked"):
        return

    def guarded(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            assert options["checks"], "a test simulates without the checker: mark it `unchecked` or leave checks on"
            return function(*args, **options)

        return call

    monkeypatch.setattr(fast, "memory_for", guarded(fast.memory_for))
    monkeypatch.setattr(loop.Loop, "__init__", guarded(loop.Loop.__init__))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real traces beside the checkout."""
    if not shared_data().is_dir():
        pytest.skip("the real traces (../shared/data) are not beside this checkout")
    return shared_data()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real PostgreSQL server for all tests of this process. Tests that use it carry the mark `postgres`."""
    from postgres_server import running_server

    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_template(postgres: PostgresServer) -> str:
    """A database with the tables of an empty store, to be copied: quicker than to make them for each test."""
    from thebes.server import store as db

    name = postgres.new_database()
    db.Store.open(postgres.url(name)).close()
    return name
