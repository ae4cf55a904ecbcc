"""What holds for the whole suite: every simulation is checked; real data is used where it lies beside the checkout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kit.effort import register_profiles
from kit.kernels import compile_ahead
from kit.workloads import shared_data
from thebes.sim import fast, loop

if TYPE_CHECKING:
    from kit.api_world import World
    from kit.command_line import Ran
    from kit.postgres_server import PostgresServer
    from thebes.store import Store

sys.path.append(str(Path(__file__).parents[1]))  # benchmarks/ is not part of the installed package

# What is about behaviour is tested on both databases; `make test` leaves the second out, `make test-postgres` runs it.
DATABASES = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]
NewPlace = Callable[[], Path | str]

register_profiles()


# Where tests start processes or talk over sockets, in real time: they mostly wait, so `make test` runs more at once.
LIVE = (
    *("api", "client", "conformance", "docs", "e2e", "engine", "faults", "instance", "job", "node", "postgres", "ray"),
    *("slurm", "trials", "upgrade"),
    *("cli/test_cli_live_cluster.py", "cli/test_slurm_shims_live.py", "store/test_store_crashes.py"),
)
# Those of them that take longest are begun first.
LONGEST = (
    "trials/test_slurm_trial.py",
    "trials/test_ray_trial.py",
    "engine/test_calling_home.py",
    "instance/test_instance_life.py",
    "docs/test_docs.py",
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "unchecked: this test compares with a run that leaves the checker out")
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        compile_ahead()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    rank = {here / name: number for number, name in enumerate(LONGEST)}
    live = [here / name for name in LIVE]
    for item in items:
        if any(place in (item.path, *item.path.parents) for place in live):
            item.add_marker("live")
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


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
    monkeypatch.setattr(loop.GeneralLoop, "__init__", guarded(loop.GeneralLoop.__init__))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real traces beside the checkout."""
    if not shared_data().is_dir():
        pytest.skip("the real traces (../shared/data) are not beside this checkout")
    return shared_data()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real PostgreSQL server for all tests of this process. Tests that use it carry the mark `postgres`."""
    from kit.postgres_server import running_server

    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_template(postgres: PostgresServer) -> str:
    """A database with the tables of an empty store, to be copied: quicker than to make them for each test."""
    from thebes import store as db

    name = postgres.new_database()
    db.Store.open(postgres.url(name)).close()
    return name


@pytest.fixture(params=DATABASES, scope="session")
def new_place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewPlace]:
    """Gives the place of a new, empty store at each call: a path, or an address."""
    if request.param == "sqlite":
        yield lambda: tmp_path_factory.mktemp("store") / "store.db"
        return
    server, template = request.getfixturevalue("postgres"), request.getfixturevalue("postgres_template")
    with pytest.MonkeyPatch.context() as patch:
        # No transaction is broken off because this machine stood still in the middle of it.
        patch.setattr("thebes.store.postgres.IDLE_IN_TRANSACTION_S", 600)
        yield lambda: server.url(server.new_database(template))


@pytest.fixture
def place(new_place: NewPlace) -> Path | str:
    return new_place()


@pytest.fixture
def store(place: Path | str) -> Iterator[Store]:
    """An empty store in either database."""
    from thebes.store import Store

    with Store.open(place) as opened:
        yield opened


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One running server for all tests of a file."""
    from kit.api_world import running_world

    with running_world(tmp_path_factory.mktemp("world") / "instance") as started:
        yield started


@pytest.fixture
def thebes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """The command line as a person meets it: arguments in; exit code, stdout and stderr out."""
    from kit.command_line import run

    return lambda *args: run(args, capsys, monkeypatch)
