"""A site's history from sacct: files that Slurm 22.05 wrote (recorded_sacct), and every way in which one can be odd."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thebes.model.cluster import Cluster
from thebes.model.errors import UserError
from thebes.report.actual import LABEL, actual
from thebes.trace import read, write
from thebes.trace.cluster_file import read_cluster
from thebes.trace.sacct import EXPORT, FIELDS, History, guessed_cluster, peak_gpus, read_history

RECORDED = Path(__file__).parent / "recorded_sacct"
HEAD = "|".join(FIELDS)


def line(number: object, submit: int = 0, start: int | None = 0, ran: int = 60, **more: Any) -> str:
    """A job of one GPU; times in minutes after midnight, run time in seconds."""

    def clock(minute: int | None, seconds: int = 0) -> str:
        if minute is None:
            return "Unknown"
        second = minute * 60 + seconds
        return f"2024-01-{1 + second // 86400:02}T{second // 3600 % 24:02}:{second // 60 % 60:02}:{second % 60:02}"

    cells = {
        "JobID": number, "Submit": clock(submit), "Eligible": clock(submit), "Start": clock(start),
        "End": clock(start, ran), "ElapsedRaw": ran, "State": "COMPLETED", "User": "ann", "Account": "vision",
        "Partition": "gpu", "AllocTRES": "cpu=8,gres/gpu:a100=1,gres/gpu=1,node=1", "ReqTRES": "cpu=8,gres/gpu=1",
        "NNodes": 1, "JobName": "train",
    }  # fmt: skip
    if "eligible" in more:
        more["Eligible"] = clock(more.pop("eligible"))
    if "gpus" in more:
        gpus = more.pop("gpus")
        more["AllocTRES"] = f"cpu=8,gres/gpu:a100={gpus},gres/gpu={gpus}" if gpus else "cpu=8"
    return "|".join(str(value) for value in (cells | more).values())


@pytest.fixture
def history(tmp_path: Path) -> Callable[..., History]:
    def make(*lines: str, head: str = HEAD, **options: Any) -> History:
        path = tmp_path / "jobs.txt"
        path.write_text("\n".join([head, *lines]) + "\n")
        return read_history(str(path), **options)

    return make


@pytest.fixture
def refused(history: Callable[..., History], tmp_path: Path) -> Callable[..., str]:
    def message(*lines: str, **options: Any) -> str:
        with pytest.raises(UserError) as caught:
            history(*lines, **options)
        return str(caught.value).replace(f"{tmp_path}/", "")

    return message


def rows(found: History, *columns: str) -> list[tuple[Any, ...]]:
    return found.trace.jobs.select(columns).rows()


# --- what Slurm wrote ------------------------------------------------------------------------------------------------


def test_all_forms_of_one_history_agree():
    plain = read_history(str(RECORDED / "jobs.txt"))
    closed = read_history(str(RECORDED / "closed.txt"))
    doubled = read_history(str(RECORDED / "duplicates.txt"))
    fields = ("job_id", "duration", "num_gpus", "status", "gpu_type", "num_nodes")
    assert rows(plain, *fields) == rows(closed, *fields)
    listed = read_history(str(RECORDED / "jobs.json"))
    ended = [sorted(row for row in rows(one, *fields[:4]) if row[3] != "RUNNING") for one in (doubled, listed)]
    assert ended[0] == ended[1]
    assert peak_gpus(plain) == 13
    assert guessed_cluster(plain) == (4, 4)


def test_what_became_of_each_recorded_job():
    found = read_history(str(RECORDED / "duplicates.txt"))
    status = dict(rows(found, "job_id", "status"))
    assert status == {
        "1": "COMPLETED", "2": "FAILED", "4": "TIMEOUT", "8": "COMPLETED", "3_1": "COMPLETED", "3_2": "COMPLETED",
        "3_3": "COMPLETED", "7": "COMPLETED", "11": "CANCELLED", "13": "CANCELLED", "14": "RUNNING", "15": "RUNNING",
        "16": "NODE_FAIL",
    }  # fmt: skip
    [requeued] = [
        row for row in rows(found, "job_id", "submit_time", "duration", "restarts", "earlier_run_s") if row[0] == "7"
    ]
    assert requeued == ("7", 0.0, 20.0, 1, 11.0), "submitted once, started twice"
    assert dict(rows(found, "job_id", "job_name"))["8"] == "we", "a bar in a job name ends it"
    assert found.trace.notes == (
        "Skipped 16 job steps.",
        "1 earlier record of 1 requeued or preempted job merged: the run time is that of the last start, and 0.0 "
        "GPU-hours of earlier ones are not replayed.",
        "Left out 1 job that never started: 1 cancelled (6).",
        "2 jobs had not ended yet: counted as if they ended at the time of the export.",
        "5 jobs did not complete (CANCELLED 2, FAILED 1, TIMEOUT 1, NODE_FAIL 1): replayed for as long as they ran.",
        "Tenants are Slurm's accounts.",
        "Left out 1 job without GPUs (5).",
        "Times are seconds since the first job, 2026-11-15 22:18:00.",
        "Jobs were not in order of submission; they are sorted now.",
    )


def test_a_table_for_people_is_refused_with_the_command_to_run():
    with pytest.raises(UserError) as caught:
        read_history(str(RECORDED / "fixed.txt"))
    assert "this is sacct's table for people, which cuts its cells off.\n" in str(caught.value)
    assert str(caught.value).endswith(f"Export with -P: {EXPORT}")


# --- what it makes of jobs -------------------------------------------------------------------------------------------


def test_columns_and_clock(history):
    found = history(line(1, 10, 12, 300, gpus=4), line("2_7", 11, 20, 60, State="CANCELLED by 1000", Account="bio"))
    assert rows(found, "job_id", "submit_time", "duration", "num_gpus", "user", "vc", "status", "gpu_type") == [
        ("1", 0.0, 300.0, 4.0, "ann", "vision", "COMPLETED", "a100"),
        ("2_7", 60.0, 60.0, 1.0, "ann", "bio", "CANCELLED", "a100"),
    ]
    assert rows(found, "start_time", "end_time", "partition") == [(120.0, 420.0, "gpu"), (600.0, 660.0, "gpu")]
    assert found.complete


def test_tenants_by_choice(history):
    assert rows(history(line(1), tenant="user"), "vc", "account") == [("ann", "vision")]
    assert rows(history(line(1), tenant="partition"), "vc") == [("gpu",)]
    assert rows(history(line(1, Account="")), "vc") == [("gpu",)]


def test_a_job_arrives_when_it_could_have_started(history):
    lines = line(1), line(2, 0, 90, eligible=60)
    assert rows(history(*lines), "submit_time") == [(0.0,), (3600.0,)]
    assert "1 job could not start when submitted (dependencies, --begin, holds): they arrive when Slurm says they " in (
        " ".join(history(*lines).trace.notes)
    )
    assert rows(history(*lines, arrival="submit"), "submit_time") == [(0.0,), (0.0,)]


def test_starts_that_were_taken_back_are_one_job(history):
    lines = [
        line(1, 0, 5, 600, State="PREEMPTED", gpus=6),
        line(1, 20, 30, 60, State="NODE_FAIL", gpus=6),
        line(1, 40, 50, 120, gpus=6),
    ]
    found = history(*lines)
    columns = ("job_id", "submit_time", "start_time", "end_time", "duration", "restarts", "earlier_run_s")
    assert rows(found, *columns) == [("1", 0.0, 300.0, 3120.0, 120.0, 2, 660.0)]
    assert found.runs.rows() == [(0, 300.0, 900.0), (0, 1800.0, 1860.0), (0, 3000.0, 3120.0)]
    assert "2 earlier records of 1 requeued or preempted job merged" in found.trace.notes[0]
    assert "1.1 GPU-hours" in found.trace.notes[0]
    together = history(*lines, requeued="sum")
    assert rows(together, "duration", "earlier_run_s") == [(780.0, 0.0)]
    assert "the run time is that of all starts together." in together.trace.notes[0]


def test_the_order_of_records_does_not_matter(history):
    lines = [line(1, 0, 5, 600, State="REQUEUED"), line(1, 20, 30, 60), line(2, 3, 4)]
    assert history(*lines).trace.jobs.equals(history(*reversed(lines)).trace.jobs)


def test_a_requeued_job_that_was_then_cancelled_keeps_its_last_start(history):
    found = history(
        line(1, 0, 5, 600, State="PREEMPTED"),
        line(1, 20, None, 0, State="CANCELLED by 7", AllocTRES=""),
        line(2),
    )
    assert ("1", 600.0, "CANCELLED") in rows(found, "job_id", "duration", "status")


def test_an_id_used_again_is_another_job(history):
    found = history(line(1), line(1, 100, 110), line(1, 200, 210))
    assert rows(found, "job_id", "submit_time") == [("1", 0.0), ("1#2", 6000.0), ("1#3", 12000.0)]
    assert "2 records use the id of an earlier job that had ended: jobs of their own (#2)." in found.trace.notes


def test_parts_of_a_heterogeneous_job_are_one(history):
    found = history(line("5+0", gpus=4, NNodes=1), line("5+1", gpus=8, NNodes=2), line(6))
    assert rows(found, "job_id", "num_gpus", "num_nodes") == [("5", 12.0, 3), ("6", 1.0, 1)]
    assert "2 components of heterogeneous jobs joined into 1 job." in found.trace.notes


def test_jobs_that_never_ran_or_need_no_gpu_are_counted(history):
    found = history(
        line(1),
        line(2, gpus=0, ReqTRES="cpu=1"),
        line(3, 0, None, 0, State="CANCELLED by 5", AllocTRES=""),
        line("4_[1-9]", 0, None, 0, State="PENDING", AllocTRES=""),
        line("5.batch"),
        line("5.0"),
    )
    assert [row[0] for row in rows(found, "job_id")] == ["1"]
    assert found.trace.notes[:2] == (
        "Skipped 2 job steps.",
        "Left out 2 jobs that never started: 1 cancelled, 1 still waiting (3, 4_[1-9]).",
    )
    assert "Left out 1 job without GPUs (2)." in found.trace.notes


def test_a_job_that_still_runs_ends_now(history):
    found = history(line(1, 0, 1, 600, State="RUNNING", End="Unknown"), line(2))
    assert ("1", 600.0, 660.0) in rows(found, "job_id", "duration", "end_time")


def test_clocks_that_run_backwards(history):
    found = history(line(1, 10, 5, 60), line(2, 20, 30, 7200, End="2024-01-01T01:30:00"), line(3, 1, 1))
    assert ("1", 240.0, 240.0) in rows(found, "job_id", "submit_time", "start_time")
    assert ("2", 9000.0 - 60.0) in rows(found, "job_id", "end_time"), "by Elapsed, for End lies before"
    assert "1 job started before submission by the clock: they count as submitted at their start." in found.trace.notes


def test_a_change_to_summer_time_is_noticed(history):
    found = history(line(1, 0, 0, 3600, End="2024-01-01T02:00:00"), line(2))
    assert any("differ by exactly an hour: a change to or from summer time." in note for note in found.trace.notes)


@pytest.mark.parametrize(
    ("column", "text", "nodes", "gpus", "kind"),
    [
        ("AllocTRES", "cpu=1,gres/gpu=4", 1, 4.0, None),
        ("AllocTRES", "cpu=1,gres/gpu:a100=2,gres/gpu:v100=1", 1, 3.0, "a100|v100"),
        ("ReqTRES", "gres/gpu:h100=8", 1, 8.0, "h100"),
        ("ReqTRES", "billing=1,gres/gpumem=5G,gres/gpu=2", 1, 2.0, None),
        ("AllocGRES", "gpu:a100:8", 2, 8.0, "a100"),
        ("AllocGRES", "gpu:8", 2, 8.0, None),
        ("ReqGRES", "gpu:a100:4", 2, 8.0, "a100"),
        ("ReqGRES", "gpu:2", 3, 6.0, None),
        ("ReqGRES", "gres:gpu:2", 1, 2.0, None),
    ],
)
def test_gpus_in_all_their_spellings(history, column, text, nodes, gpus, kind):
    head = f"JobID|Submit|Start|End|ElapsedRaw|State|NNodes|{column}"
    times = "2024-01-01T00:00:00|2024-01-01T00:00:00|2024-01-01T00:01:00|60"
    found = history(f"1|{times}|COMPLETED|{nodes}|{text}", head=head)
    assert rows(found, "num_gpus", "gpu_type") == [(gpus, kind)]


def test_the_json_of_later_versions(tmp_path):
    number = {"set": True, "infinite": False, "number": 1704067200}
    job = {
        "job_id": 7, "array": {"job_id": 5, "task_id": {"set": True, "infinite": False, "number": 3}}, "name": "x",
        "time": {"submission": number, "eligible": 1704067200, "start": 1704067260, "end": 1704067320, "elapsed": 60},
        "state": {"current": ["COMPLETED"]}, "user": "", "association": {"user": "ann"}, "account": "vision",
        "partition": "gpu", "allocation_nodes": 1, "het": {"job_id": 0},
        "tres": {"allocated": [{"type": "gres", "name": "gpu", "count": 2}, {"type": "mem", "count": None}]},
    }  # fmt: skip
    het = {
        **job,
        "array": {"job_id": 0, "task_id": None},
        "het": {"job_id": 9, "job_offset": {"set": True, "number": 1}},
    }
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps({"jobs": [job, het]}))
    found = read_history(str(path))
    assert rows(found, "job_id", "num_gpus", "user", "start_time") == [
        ("5_3", 2.0, "ann", 60.0),
        ("9", 2.0, "ann", 60.0),
    ]


def test_from_standard_input(monkeypatch):
    data = (RECORDED / "jobs.txt").read_bytes()
    monkeypatch.setattr("sys.stdin", type("In", (), {"buffer": io.BytesIO(data)})())
    assert len(read_history("-").trace) == 13


def test_what_is_written_reads_back(history, tmp_path):
    found = history(line(1, 0, 5), line(2, 3, 9))
    write(found.trace, tmp_path / "out.csv")
    assert (
        read(tmp_path / "out.csv")
        .jobs.select("job_id", "duration")
        .equals(found.trace.jobs.select("job_id", "duration"))
    )


# --- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (
            [line(1), "2|2024-01-01T00:00:00"],
            "jobs.txt, line 3: 2 values, but there are 14 columns.\nThe line is cut off.",
        ),
        (["1|2", "2|3", line(3)], "jobs.txt, line 2: 2 values, but there are 14 columns (2 such lines in all)."),
        ([line(1), line(2, Submit="yesterday")], "jobs.txt, line 3, column 'Submit': 'yesterday' is not a time."),
        ([line(1), "", line(2, Start="soon")], "jobs.txt, line 4, column 'Start': 'soon' is not a time."),
        (
            [line(1), line("2.0"), line(3, ElapsedRaw="x")],
            "jobs.txt, line 4, column 'ElapsedRaw': 'x' is not a number.",
        ),
        (
            [line(1), line(2, ElapsedRaw=-5)],
            "jobs.txt, line 3, column 'ElapsedRaw': -5 is negative; it must be seconds",
        ),
        ([line(1), line("")], "jobs.txt, line 3, column 'JobID': the job has no id."),
        ([line(1), line(2, NNodes="two")], "jobs.txt, line 3, column 'NNodes': 'two' is not a number."),
        ([line("1.batch")], "jobs.txt: only job steps, no job.\nExport with: TZ=UTC sacct"),
        ([line(1, gpus=0, ReqTRES="")], "jobs.txt: no job is left to schedule."),
        ([], "jobs.txt: there is a header line but no job below it.\nsacct shows your own jobs since midnight"),
    ],
)
def test_bad_lines_are_named(refused, lines, told):
    assert refused(*lines).startswith(told)


def test_bad_headers(refused):
    assert refused(line(2), head=line(1)).startswith(
        "jobs.txt: there is no header line of sacct; the first line is a job."
    )
    assert refused("1,2", head="a,b").startswith("jobs.txt: there is no header line of sacct; the first line is 'a,b'.")
    assert refused("1|2|3", head="JobID|Submit|JobID").startswith(
        "jobs.txt, line 1: column 'JobID' occurs more than once"
    )
    assert refused("1|x", head="JobID|State").startswith("jobs.txt, line 1: missing column 'Submit'")
    assert refused("1|2024-01-01T00:00:00|5", head="JobID|Submit|ElapsedRaw").startswith(
        "jobs.txt, line 1: missing column 'AllocTRES' (or 'ReqTRES')"
    )
    assert refused("1|2024-01-01T00:00:00|gres/gpu=1", head="JobID|Submit|AllocTRES").startswith(
        "jobs.txt, line 1: no run time"
    )
    with_name_first = "JobName|JobID|Submit|ElapsedRaw|AllocTRES"
    assert "3: 6 values, but there are 5 columns.\nA job name may contain '|': put JobName last." in refused(
        "x|1|2024-01-01T00:00:00|5|gres/gpu=1", "a|b|2|2024-01-01T00:00:00|5|gres/gpu=1", head=with_name_first
    )


def test_bad_files(tmp_path):
    def told(content: bytes, name: str = "f") -> str:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as caught:
            read_history(str(tmp_path / name))
        return str(caught.value).replace(f"{tmp_path}/", "")

    assert told(b"").startswith("f: the file is empty.")
    assert told(b"PAR1xxxx").startswith("f: this is Parquet, not what sacct writes.")
    assert told(b'{"jobs": [').startswith("f, line 1: not valid JSON (")
    assert told(b'{"other": 1}').startswith("f: JSON, but not that of `sacct --json`.")
    assert told(b'{"jobs": [{"job_id": 1}]}').startswith("f: JSON, but not that of `sacct --json`.")
    assert told(b'{"jobs": []}').startswith("f: the list of jobs is empty.")
    with pytest.raises(UserError, match="there is no such file"):
        read_history(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="--tenant: there is no 'acount'; did you mean 'account'"):
        read_history("x", tenant="acount")


@pytest.mark.slow
def test_a_million_lines_take_seconds(tmp_path):
    """Here a fifth of that, so that the suite stays quick: linear, and well under a minute for the whole."""
    path = tmp_path / "large.txt"
    with path.open("w") as stream:
        stream.write(HEAD + "\n")
        for number in range(200_000):
            minute = number // 10 % 40_000
            stream.write(line(number, minute, minute + number % 50, 60 + number % 999) + "\n")
    began = time.process_time()
    found = read_history(str(path))
    assert len(found.trace) == 200_000
    assert time.process_time() - began < 30.0  # a slow machine needs 6


# --- what really happened --------------------------------------------------------------------------------------------


def cluster(spec: str) -> Cluster:
    return read_cluster(spec)


def test_figures_of_what_happened(history):
    found = history(
        line(1, 0, 0, 3600, gpus=2),  # waits 0, runs an hour
        line(2, 0, 60, 1800, gpus=4),  # waits an hour
        line(3, 30, 30, 600, gpus=2, State="PREEMPTED"),
        line(3, 40, 90, 1800, gpus=2),
    )
    outcome = actual(found.trace, found.runs, cluster("1x4"))
    figures = outcome.metrics
    assert figures["policy"] == LABEL
    assert figures["avg_jct"] == pytest.approx((3600 + 5400 + 5400) / 3)
    assert figures["avg_queue_delay"] == pytest.approx((0 + 3600 + 3000) / 3)
    assert figures["makespan"] == 7200.0
    assert figures["preemptions"] == 1
    assert figures["useful_gpu_seconds"] == 2 * 3600 + 4 * 1800 + 2 * 1800
    assert figures["lost_gpu_seconds"] == 2 * 600
    assert figures["gpu_utilization"] == pytest.approx(18_000 / (4 * 7200))
    assert figures["unused_gpu_seconds"] == pytest.approx(4 * 7200 - 18_000 - 1200)
    assert outcome.timeline.rows() == [
        (0.0, 2, 1, 1, 4),
        (1800.0, 4, 1, 2, 4),
        (2400.0, 2, 2, 1, 6),
        (3600.0, 4, 1, 1, 2),
        (5400.0, 2, 0, 1, 0),
        (7200.0, 0, 0, 0, 0),
    ]
    kinds = outcome.events["kind"].cast(str).to_list()
    assert sorted(kinds) == sorted(["submit"] * 3 + ["start"] * 3 + ["finish"] * 3 + ["suspend", "resume"])
    assert outcome.events["time_s"].is_sorted()


def test_an_empty_queue_under_fifo_is_what_happened(history):
    """Where nobody waits, the simulator and the site agree to the second."""
    from thebes import simulate

    found = history(*(line(n, n * 20, n * 20, 600 + n, gpus=1 + n % 4) for n in range(20)))
    happened = actual(found.trace, found.runs, cluster("1x4")).metrics
    simulated = simulate(found.trace, "1x4", "fifo", perf="ideal", ignore_gpu_type=True).metrics
    for key in ("avg_jct", "median_jct", "p95_jct", "makespan", "avg_queue_delay", "gpu_utilization"):
        assert happened[key] == pytest.approx(simulated[key], abs=1e-6), key


def test_parts_of_a_history(history):
    found = history(line(1, 0, 5), line(2, 1, 6), line(3, 2, 7, State="PREEMPTED"), line(3, 3, 9))
    first = found.head(2)
    assert rows(first, "job_id") == [("1",), ("2",)]
    assert first.runs["job"].to_list() == [0, 1]
    last = found.only(found.trace.jobs["job_id"] == "3")
    assert last.runs["job"].to_list() == [0, 0]


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    from typer.testing import CliRunner

    from thebes.cli import app

    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> Any:
        return CliRunner().invoke(app, ["import", "sacct", *map(str, words)])

    return call


def test_the_command_compares_with_what_happened(run, tmp_path):
    done = run(RECORDED / "jobs.txt", "-o", "trace.csv", "--report", "r.html", "--json", "f.json", "--workers", "1",
               "--policies", "fifo,las")  # fmt: skip
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    at = next(place for place, text in enumerate(lines) if text.startswith("policy"))
    assert [text.split("  ")[0] for text in lines[at + 1 : at + 4]] == [LABEL, "fifo", "las"]
    assert "trace.csv: 13 jobs (sacct → normalised)" in done.stderr
    assert (
        "note: The cluster is guessed: 4x4, for at most 13 GPUs were in use at once. --cluster names it." in done.stderr
    )
    assert f"note: {LABEL} is what the site's own scheduler did, by the recorded Start and End" in done.stderr
    figures = json.loads((tmp_path / "f.json").read_text())
    assert [one["policy"] for one in figures["results"]] == [LABEL, "fifo", "las"]
    assert LABEL in (tmp_path / "r.html").read_text()
    assert len(read(tmp_path / "trace.csv")) == 13


def test_the_command_without_a_comparison(run):
    done = run(RECORDED / "jobs.txt", "--no-compare", "--limit", "5")
    assert done.exit_code == 0
    assert "jobs           5" in done.stdout
    assert "policy" not in done.stdout


def test_json_to_stdout_is_json_alone(run):
    done = run(RECORDED / "jobs.txt", "--policies", "fifo", "--json", "-", "--workers", "1")
    assert [one["policy"] for one in json.loads(done.stdout)["results"]] == [LABEL, "fifo"]


def test_a_cluster_that_is_too_small(run):
    done = run(RECORDED / "jobs.txt", "--policies", "fifo", "--cluster", "1x4", "--workers", "1")
    assert done.exit_code == 0
    assert "note: The site had 13 GPUs in use at once, the cluster has 4: no fair comparison with what" in done.stderr
    assert "note: Left out 1 job of more GPUs than the cluster has." in done.stderr


def test_without_start_and_end_only_policies_are_told(run, tmp_path):
    (tmp_path / "jobs.txt").write_text("JobID|Submit|ElapsedRaw|AllocTRES\n1|2024-01-01T00:00:00|60|gres/gpu=2\n")
    done = run("jobs.txt", "--policies", "fifo", "--workers", "1")
    assert done.exit_code == 0, done.output
    assert "note: What really happened cannot be told: the export lacks Start or End." in done.stderr
    assert LABEL not in done.stdout


def test_the_command_refuses(run, tmp_path):
    def told(*words: object) -> str:
        done = run(RECORDED / "jobs.txt", *words)
        assert isinstance(done.exception, UserError), done.output
        return str(done.exception)

    (tmp_path / "there.csv").write_text("")
    assert told("-o", "there.csv").startswith("there.csv: the file exists.")
    assert told("--no-compare", "--json", "-").startswith("--json and --report tell of a comparison.")
    assert "nosuch" in told("--policies", "nosuch")
    assert told("--policies", "").startswith("--policies names no policy")
    assert told("--report", "there.csv/r.html").startswith("cannot make the folder there.csv")
    assert told("--tenant", "team").startswith("--tenant: there is no 'team'")
    assert told("-o", "x.txt", "--no-compare").startswith("x.txt: cannot tell the format to write")
