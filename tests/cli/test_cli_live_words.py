"""The live commands without a cluster: what a newcomer types wrong, what is printed, how fast help comes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from thebes.cli import COMMANDS, build
from thebes.cli.follow import event_words
from thebes.cli.jobs import _end_of, job_table, jobs_page
from thebes.cli.nodes import node_table
from thebes.cli.screen import clean, duration, table
from thebes.cli.submit import ALSO_OF_SCRIPTS, plan_lines
from thebes.jobspec.jobfile import file_schema
from thebes.model.errors import UserError


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No cluster, no variables that name one, an empty work directory."""
    for name in ("THEBES_URL", "THEBES_TOKEN", "THEBES_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("THEBES_DIR", str(tmp_path / "none"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


ONE_JOB = [
    ("show", "1"), ("logs", "1"), ("attach", "1"), ("wait", "1"), ("cancel", "1", "2"), ("hold", "1"),
    ("release", "1"), ("requeue", "1"), ("preempt", "1"),
]  # fmt: skip


@pytest.mark.parametrize(
    "words", [*ONE_JOB, ("ps",), ("events",), ("nodes",), ("drain", "n0"), ("undrain", "n0"), ("top",)]
)
def test_without_a_cluster(thebes, nowhere: Path, words: tuple[str, ...]) -> None:
    ran = thebes(*words)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.count("no Thebes cluster is running") == 1
    assert "thebes up" in ran.err


def test_submit_without_a_cluster(thebes) -> None:
    ran = thebes("submit", "--", "python", "train.py")
    assert (ran.code, ran.out) == (2, "")
    assert "no Thebes cluster is running" in ran.err


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("submit",), "there is no command to run", "thebes submit --gpus 2 -- python train.py"),
        (("submit", "--gpus", "4"), "there is no command to run", "thebes submit -f job.yaml"),
        (("submit", "--gpus", "four", "--", "x"), "--gpus: 'four' is not a whole number", "as in 4"),
        (("submit", "--gpus", "1.5", "--", "x"), "--gpus: '1.5' is not a whole number", ""),
        (("submit", "--gpus", "0", "--", "x"), "--gpus: must be at least 1, not 0", "at least one GPU"),
        (("submit", "--gpus", "-1", "--", "x"), "--gpus: must be at least 1, not -1", ""),
        (("submit", "--gpus", "3", "--nodes", "2", "--", "x"), "--nodes: 3 GPUs do not spread evenly over 2", ""),
        (("submit", "--array", "9-1", "--", "x"), "--array: '9-1' names no array index", "1-50"),
        (("submit", "--array", "all", "--", "x"), "--array: 'all' is not a list of array indices", "1-50"),
        (("submit", "--time", "soon", "--", "x"), "--time: 'soon' is not a length of time", "1:30:00"),
        (("submit", "--time", "0", "--", "x"), "--time: must be more than 0", ""),
        (("submit", "--after", "last", "--", "x"), "--after: 'last' is not a job id", "17_3"),
        (("submit", "--after-any", "last", "--", "x"), "--after-any: 'last' is not a job id", "17_3"),
        (("submit", "--array", "1-9%0", "--", "x"), "--array: '1-9%0': the limit after % is not a number", "0-99%4"),
        (("submit", "--array", "1-9%x", "--", "x"), "--array: '1-9%x': the limit after % is not a number", "0-99%4"),
        (("submit", "--array", "%2", "--", "x"), "--array: '' is not a list of array indices", "1-50"),
        (("submit", "--env", "A-B=1", "--", "x"), "--env: 'A-B=1' is not an environment variable", "KEY=VALUE"),
        (("submit", "--env", "NOT_THERE", "--", "x"), "--env: NOT_THERE has no value here", "NOT_THERE=VALUE"),
        (("submit", "--launcher", "mpirun", "--", "x"), "--launcher: 'mpirun' is not known", "plain"),
        (("submit", "--mechanism", "check", "--", "x"), "--mechanism: 'check' is not known", "checkpoint"),
        (("submit", "--name", "a b", "--", "x"), "--name: 'a b' is not a valid name", "Letters"),
        (("submit", "--progress", "step", "--", "x"), "--progress: the pattern needs exactly one group", ""),
        (("submit", "-f", "missing.yaml"), "missing.yaml: there is no such file", ""),
        (("submit", "missing.yaml"), "missing.yaml: there is no such file", ""),
        (("submit", "missing.sh"), "missing.sh: there is no such file", ""),
        (("submit", "-f", "."), "cannot be read", ""),
        (("show", "last"), "'last' is not a job id", "thebes ps -a"),
        (("logs", "-5"), "", ""),
        (("wait", "1", "--timeout", "long"), "--timeout: 'long' is not a length of time", ""),
        (("preempt", "1", "--grace", "x"), "--grace: 'x' is not a length of time", ""),
        (("ps", "--state", "runing"), "--state: there is no state 'runing'", "did you mean 'running'?"),
        (("replay",), "", ""),
    ],
)
def test_what_a_newcomer_types(thebes, words: tuple[str, ...], message: str, hint: str) -> None:
    ran = thebes(*words)
    assert ran.code == 2, ran.err
    assert message in ran.err
    assert hint in ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""


def test_a_python_file_needs_to_be_told_how_to_run(thebes, nowhere: Path) -> None:
    (nowhere / "train.py").write_text("print(1)\n")
    ran = thebes("submit", "train.py")
    assert "train.py has no #! line" in ran.err
    assert "thebes submit -- python train.py" in ran.err


def test_a_script_given_as_a_job_file(thebes, nowhere: Path) -> None:
    (nowhere / "train.sh").write_text("#!/bin/bash\necho hi\n")
    assert "Leave out the -f: thebes submit train.sh" in thebes("submit", "-f", "train.sh").err


def test_errors_of_a_job_file_name_file_and_line(thebes, nowhere: Path) -> None:
    (nowhere / "job.yaml").write_text("run: python train.py\ngpuz: 2\n")
    ran = thebes("submit", "-f", "job.yaml")
    assert "job.yaml, line 2: unknown key 'gpuz'" in ran.err
    assert "did you mean 'gpus'?" in ran.err


def test_options_after_the_command_are_pointed_out(thebes, nowhere: Path) -> None:
    (nowhere / "train.sh").write_text("#!/bin/bash\necho hi\n")
    assert "--gpus comes after train.sh and is passed to it" in thebes("submit", "train.sh", "--gpus", "4").err
    assert "--no-pack comes after train.sh" in thebes("submit", "train.sh", "--no-pack").err
    assert "comes after" not in thebes("submit", "train.sh", "--model", "gpt-2", "--output=x", "--", "--gpus").err
    (nowhere / "job.yaml").write_text("run: x")
    ran = thebes("submit", "job.yaml", "--gpus", "4")
    assert "thebes submit --gpus 4 job.yaml" in ran.err


def test_what_scripts_have_as_well_are_options_of_submit() -> None:
    params = typer.main.get_group(build(["submit"])).commands["submit"].params
    ours = {name for option in params for name in option.opts}
    assert ours > ALSO_OF_SCRIPTS


def test_several_bad_ids_are_each_told(thebes) -> None:
    ran = thebes("cancel", "x", "y")
    assert ran.code == 1
    assert "'x' is not a job id" in ran.err
    assert "'y' is not a job id" in ran.err


def test_the_schema_is_printed(thebes) -> None:
    assert json.loads(thebes("submit", "--schema").out) == file_schema()


def test_help_has_panels_and_names_every_command(thebes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    told = thebes("--help").out
    for panel in ("Simulate", "Live cluster", "Jobs", "Administration"):
        assert f"─ {panel} ─" in told
    for command, entry in COMMANDS.items():
        assert (f"│ {command} " in told) is not entry.hidden


def test_an_unknown_command_is_refused_with_the_nearest(thebes) -> None:
    ran = thebes("sumbit")
    assert ran.code == 2
    assert "sumbit" in ran.err


def test_only_the_wanted_command_is_built() -> None:
    assert [command.name for command in build(["ps"]).registered_commands] == ["ps"]
    assert len(build([]).registered_commands) > 20


def test_ps_loads_neither_pydantic_nor_rich_nor_numpy(nowhere: Path) -> None:
    code = (
        "import sys\nsys.argv = ['thebes', 'ps']\nimport thebes.cli\n"
        "try: thebes.cli.main()\nexcept SystemExit: pass\n"
        "print(sorted({'pydantic', 'rich', 'numpy', 'yaml', 'fastapi', 'sqlalchemy', 'polars'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_packages_that_are_not_installed(thebes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    ran = thebes("ps")
    assert ran.code == 2
    assert "needs the package httpx" in ran.err
    assert "thebes[live]" in ran.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("ps", "--limit", "0"), "--limit"),
        (("ps", "--limit", "many"), "--limit"),
        (("ps", "-o", "yaml"), "yaml"),
        (("logs", "1", "--rank", "-1"), "--rank"),
        (("top", "--every", "0"), "--every"),
        (("show",), "JOB"),
    ],
)
def test_options_that_typer_refuses(thebes, words: tuple[str, ...], told: str) -> None:
    ran = thebes(*words)
    assert ran.code == 2
    assert told in ran.err


# how things are shown


def test_durations_have_two_units() -> None:
    shown = [duration(seconds) for seconds in (None, 0.4, 59, 60, 3599, 3600, 86_400, 200_000)]
    assert shown == ["–", "0s", "59s", "1m 00s", "59m 59s", "1h 00m", "1d 00h", "2d 07h"]


def test_a_table_cuts_only_its_last_column() -> None:
    lines = table(["ID", "N", "WHY"], [["1", "22", "x" * 50]], right=["N"], width=30, colours=False)
    assert lines[0] == "ID   N  WHY"
    assert len(lines[1]) == 30
    assert lines[1].endswith("x…")
    assert len(table(["ID", "WHY"], [["1", "x" * 50]], colours=False)[1]) == 54


def test_names_cannot_move_the_cursor() -> None:
    assert clean("a\x1b[2Jb\nc") == "a [2Jb c"


NOW = time.time()


def job(number: int, state: str, **more: object) -> dict[str, object]:
    base: dict[str, object] = {
        "id": str(number), "name": None, "user": "ann", "tenant": "lab", "state": state, "reason": "", "gpus": 2,
        "nodes": None, "priority": 0, "submit_s": NOW - 60, "first_start_s": None, "end_s": None,
        "incarnation": 0, "exit_code": None, "preemptions": 0, "run_s": 0.0, "lost_gpu_s": 0.0,
    }  # fmt: skip
    return {**base, **more}


def test_the_table_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thebes.cli.jobs.time", SimpleNamespace(time=lambda: NOW))  # should this machine stall
    lines = job_table(
        [
            job(3, "running", incarnation=2, preemptions=1, run_s=30.0, gpus_held={"n0": [0, 1]}),
            job(4, "queued", reason="no room"),
        ]
    )
    assert lines[0].split() == ["ID", "NAME", "STATE", "GPUS", "NODES", "RAN", "WAITED", "WHY"]
    assert lines[1].split() == ["3", "–", "running", "2", "n0", "30s", "30s", "preempted", "1×"]
    assert lines[2].split() == ["4", "–", "queued", "2", "–", "–", "1m", "00s", "no", "room"]
    assert "USER" in job_table([job(3, "running"), job(4, "queued", user="bob")])[0]


class Pages:
    """Stands for a server with these jobs; counts what it is asked."""

    def __init__(self, jobs: list[dict[str, object]]) -> None:
        self.jobs = jobs

    def jobs_page(self, *, limit: int, cursor: str | None, state: list[str] | None, oldest: bool | None, **_: object):
        found = [one for one in self.jobs if state is None or one["state"] in state]
        found = found if oldest else found[::-1]
        first = int(cursor or 0)
        rest = first + limit < len(found)
        return {"jobs": found[first : first + limit], "next": str(first + limit) if rest else None}


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 50])
def test_pages_hold_every_job_once(limit: int) -> None:
    states = ["queued", "running", "completed", "held", "suspended", "failed", "running", "queued"]
    jobs = [job(number, state, end_s=time.time() if state in ("completed", "failed") else None)
            for number, state in enumerate(states, start=1)]  # fmt: skip
    jobs.insert(0, job(99, "completed", end_s=time.time() - 7200))
    seen, cursor = [], None
    for _ in range(20):
        page = jobs_page(Pages(jobs), {}, [], False, limit, cursor)  # type: ignore[arg-type]
        assert len(page["jobs"]) <= limit
        seen += [one["id"] for one in page["jobs"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert seen == ["7", "5", "2", "1", "4", "8", "6", "3"]  # running newest first, waiting in order, ended lately


def test_a_cursor_of_another_list() -> None:
    with pytest.raises(UserError, match="does not belong to this list"):
        jobs_page(Pages([]), {}, ["running"], False, 10, "2.5")  # type: ignore[arg-type]


def test_plans_in_words() -> None:
    now = {"starts": "now", "start_in_s": 0, "nodes": {"n0": [0, 1]}, "preempts": ["7"], "reason": "fits"}
    assert plan_lines(now) == [
        "would start now",
        "  on         n0 (GPU 0, 1)",
        "  preempts   7",
        "  because    fits",
    ]
    later = plan_lines({"starts": "later", "start_in_s": 90, "position": 3, "nodes": {}, "preempts": []})
    assert later == ["would wait, about 1m 30s; place 3 in the queue"]


def test_events_in_words() -> None:
    event = {"kind": "preempted", "job_id": "3", "actor": "", "detail": {"for_jobs": ["7"], "policy": "srtf"}}
    assert event_words(event) == "for job 7, by srtf"
    assert event_words({"job_id": "3", "actor": "ann", "detail": {"on": {"n0": [0, 1]}}}) == "on n0:0,1, by ann"
    assert event_words({"job_id": "3", "detail": {"took_s": 0.25, "waited_s": 90}}) == "took 0.25s, waited 1m 30s"


def test_nodes_in_a_table() -> None:
    gpus = [{"index": 0, "virtual": True, "job": "4"}, {"index": 1, "virtual": True, "job": None}]
    lines = node_table([{"name": "n0", "alive": True, "drained": True, "reason": "fan", "gpus": gpus}])
    assert lines[1].split() == ["n0", "drained", "2", "1", "virtual", "4:0", "fan"]


def test_gpus_that_somebody_else_has_are_not_free_and_say_who() -> None:
    whose = "Slurm job 9 of bob"
    gpus = [{"index": number, "taken": whose if number in (1, 2) else ""} for number in range(4)]
    gpus[0]["job"] = "4"
    gpus[3]["healthy"] = False
    lines = node_table([{"name": "n1", "alive": True, "drained": False, "reason": "", "gpus": gpus}])
    assert lines[1].split(maxsplit=6) == ["n1", "up", "4", "0", "GPU", "4:0", f"GPUs 1,2: {whose}; GPU 3: sick"]


def test_a_start_that_somebody_was_faster_than_is_no_loss() -> None:
    detail = "not started: n1 GPU 0 has Slurm job 9 of bob"
    assert _end_of({"codes": {}, "cause": "lost", "detail": detail}) == detail
    assert _end_of({"codes": {}, "cause": "lost", "detail": "n1 is gone"}) == "lost, n1 is gone"
