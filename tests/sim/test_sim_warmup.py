"""What is compiled ahead: one run of a few jobs per family of policies, once, and people are told."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import numba
import pytest
from numba.core import event

from thebes import Decision, Policy, View, fill
from thebes.model import compiled as compiled_module
from thebes.model.compiled import OBJECTS_BETWEEN_COLLECTIONS, OPTIMISATION, compiled, rarely_collecting
from thebes.policy import find, registry
from thebes.sim import warmup

pytestmark = pytest.mark.skipif(numba.config.DISABLE_JIT, reason="nothing is compiled")


class Mine(Policy):
    def decide(self, view: View) -> Decision:
        return fill(view, view.jobs.submit_s.argsort())


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No marks yet. (The code itself was compiled before: only the marks tell whether it was.)"""
    monkeypatch.setattr(warmup, "cache_folder", lambda: tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("fifo", warmup.ORDER),
        ("tiresias-g", warmup.ORDER),
        ("ada-srsf", warmup.GRAIN),
        ("tiresias-compat", None),
        ("dally-manual", "dally"),
        ("gandiva-gavel", "gavel"),
    ],
)
def test_policies_of_one_family_need_the_same_code(name: str, family: str | None) -> None:
    assert warmup.family_of(find(name)()) == family


def test_a_policy_that_somebody_wrote_needs_the_general_path() -> None:
    assert warmup.family_of(Mine()) == warmup.GENERAL


def test_one_policy_stands_for_its_family_and_every_family_is_there() -> None:
    chosen = warmup.one_of_each_family(list(registry()))
    families = [warmup.family_of(find(name)()) for name in chosen]
    assert len(families) == len(set(families))
    assert set(families) == {warmup.family_of(policy()) for policy in registry().values()} - {None}
    assert families[0] == warmup.ORDER


@pytest.mark.parametrize("policy", [find("las")(), Mine(), find("dally-no-wait")()], ids=lambda policy: policy.label)
def test_a_family_is_compiled_once(policy: Policy, nothing_compiled: Path) -> None:
    assert warmup.needs_compiling(policy)
    warmup.compile_for(policy)
    assert [mark.name for mark in nothing_compiled.iterdir()] == [f"compiled-for-{warmup.family_of(policy)}"]
    assert not warmup.needs_compiling(policy)
    assert warmup.announcement([policy]) is None


@pytest.mark.usefixtures("nothing_compiled")
def test_people_are_told_how_long_it_takes() -> None:
    assert warmup.announcement([find("las")(), find("fifo")()]) == (
        "Compiling the simulator for this machine (once per version, about 20 s) …"
    )
    assert warmup.announcement([find("las")(), find("dally")()]) == (
        "Compiling the simulator for this machine (once per version, about 40 s) …"
    )
    assert warmup.announcement([policy() for policy in registry().values()]) == (
        "Compiling the simulator for this machine (once per version, about a minute or two) …"
    )
    assert warmup.announcement([find("tiresias-compat")()]) is None


def test_the_readme_names_no_policy_that_setup_leaves_out() -> None:
    """Given the lines of the README that name policies, `make setup` compiles all that these need."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    named = [name for line in readme.splitlines() if "--polic" in line for name in registry() if f"{name}" in line]
    assert named
    families = {warmup.family_of(find(name)()) for name in named}
    assert families <= {warmup.family_of(find(name)()) for name in warmup.README}


@pytest.fixture
def unmarked_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder with all compiled code and no marks, for this process and for those that it starts."""
    mine = tmp_path / warmup.cache_folder().name
    shutil.copytree(warmup.cache_folder(), mine, ignore=shutil.ignore_patterns("compil*-for-*"))
    monkeypatch.setenv("THEBES_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(warmup, "cache_folder", lambda: mine)
    return mine


def marks_in(folder: Path) -> set[str]:
    return {mark.name.removeprefix("compiled-for-") for mark in folder.glob("compiled-for-*")}


def test_families_are_compiled_in_processes_of_their_own_and_people_are_told_once(
    unmarked_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warmup.main(["fifo", "gandiva"])
    assert capsys.readouterr().out == "Compiling the simulator for this machine (once per version, about 40 s) …\n"
    assert marks_in(unmarked_copy) == {warmup.ORDER, warmup.GENERAL, "gandiva"}
    warmup.main(["fifo", "gandiva"])
    assert capsys.readouterr().out == ""


def test_one_family_needs_no_others_first(unmarked_copy: Path) -> None:
    warmup.compile_side_by_side(["las", "fifo"])
    assert marks_in(unmarked_copy) == {warmup.ORDER}


def test_a_process_compiles_what_it_is_named_and_marks_it(unmarked_copy: Path) -> None:
    warmup.main(["--here", warmup.GENERAL, "ada-srsf"])
    assert marks_in(unmarked_copy) == {warmup.GENERAL, warmup.GRAIN}


def test_a_process_that_fails_is_told(unmarked_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup.sys, "executable", "false")  # a program that only fails
    with pytest.raises(SystemExit, match="The simulator could not be compiled; what went wrong stands above"):
        warmup.main(["fifo"])
    assert marks_in(unmarked_copy) == set()


def test_settings_of_the_process_are_as_before_once_something_was_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Numba's level of optimisation and Python's collector are others' business, too.

    The function has an empty cache folder: in the usual one it would lie since the last run of this test.
    """
    monkeypatch.setattr(compiled_module, "cache_folder", lambda: tmp_path)
    before = int(numba.config.OPT), gc.get_threshold()
    levels: list[int] = []

    @compiled
    def square(number: int) -> int:
        return number * number

    class Watcher(event.Listener):
        def on_start(self, event: event.Event) -> None:
            levels.append(int(numba.config.OPT))

        def on_end(self, event: event.Event) -> None:
            pass

    watcher = Watcher()
    with event.install_listener("numba:compile", watcher):
        assert square(7) == 49
    assert levels == [OPTIMISATION]
    with rarely_collecting():
        assert gc.get_threshold() == OBJECTS_BETWEEN_COLLECTIONS
    assert (int(numba.config.OPT), gc.get_threshold()) == before
