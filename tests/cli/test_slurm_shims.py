"""Slurm's commands for Thebes, without a cluster: what is printed against what Slurm 22.05 printed (recorded_slurm),
how command lines are read, and every refusal."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thebes.cli.slurm import commands, sbatch, scancel, scontrol, sinfo, squeue
from thebes.cli.slurm.formats import lines_of, long_span, parse_format, parse_long_format, span
from thebes.cli.slurm.jobs import REASONS, QueueLine, ids_of, reason_of, states_of, together
from thebes.cli.slurm.options import Stop, folded, parse, unfolded
from thebes.jobspec.slurm_options import Option
from thebes.live.array_limits import kept_back
from thebes.model import decision

RECORDED = Path(__file__).parent / "recorded_slurm"
NOW = 1_794_781_000.0
FULL = "the GPUs it could use go to jobs before it in the order"


@pytest.fixture(autouse=True)
def the_clock_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that those who have run for three seconds still have, should this machine stall."""
    monkeypatch.setattr("thebes.cli.slurm.jobs.time", SimpleNamespace(time=lambda: NOW))


def recorded(name: str) -> list[str]:
    """What the real command printed, with our one partition in the place of its own."""
    text = (RECORDED / f"{name}.txt").read_text(encoding="utf-8")
    return text.replace("     main ", "   thebes ").splitlines()


def job(number: str, **more: Any) -> QueueLine:
    array, _, index = number.partition("_")
    facts: dict[str, Any] = {
        "id": number, "array_id": array if index else None, "array_index": int(index) if index else None,
        "user": "root", "tenant": "vision", "name": "train_model_big", "state": "queued", "reason": FULL, "gpus": 1,
        "nodes": 1, "priority": 0, "submit_s": NOW, "first_start_s": None, "end_s": None, "incarnation": 0,
        "expected_start_s": None, "gpus_held": {}, "command": "bash -c …", "run_s": 0.0,
    }  # fmt: skip
    limit_s = more.pop("time_s", None)
    held = more.get("gpus_held")
    if held:
        facts |= {"state": "running", "reason": "", "first_start_s": NOW - 3.5, "incarnation": 1}
    found = QueueLine({**facts, **more})
    found.details = {"spec": {"time_s": limit_s, "workdir": "/w"}, "attempts": []}
    return found


def queue() -> list[QueueLine]:
    """The jobs that Slurm had when its output was recorded."""
    arr = {"name": "arr", "gpus": 2}
    return [
        job("1", gpus_held={"n0": [0, 1]}, time_s=7200.0),
        job("2", name="wrap", nodes=2, gpus_held={"n1": [0, 1, 2, 3], "n2": [0, 1, 2, 3]}),
        job("3_1", gpus_held={"n0": [2, 3]}, **arr),
        job("3_2", gpus_held={"n3": [0, 1]}, **arr),
        job("3_3", gpus_held={"n3": [2, 3]}, **arr),
        job("3_4", **arr),
        job("3_5", **arr),
        job("3_6", **arr),
        job("4", reason="waits for job 1", time_s=7200.0),
        job("6", nodes=4, reason="an earlier job must start first (strict order)", time_s=93_840.0),
        job("5", state="held", reason="held by its user", time_s=7200.0),
    ]


def shown(text: str, jobs: list[QueueLine], order: str = "P,t,-p") -> list[str]:
    return lines_of(parse_format("squeue", text, squeue.FIELDS), squeue.sorted_jobs(jobs, order), heading=True)


def grouped() -> list[QueueLine]:
    lines = together(queue())
    for line in lines:
        line.details = line.details or {"spec": {}, "attempts": []}
    return lines


# --- tables, byte for byte -------------------------------------------------------------------------------------------


def test_squeue_is_slurms_table():
    assert shown(squeue.DEFAULT, grouped()) == recorded("squeue")


def test_squeue_with_each_member_of_an_array():
    assert shown(squeue.DEFAULT, queue()) == recorded("squeue_r")


def test_squeue_long_does_not_cut_times():
    assert shown(squeue.LONG, grouped()) == recorded("squeue_l")[1:]


def test_squeue_start_says_when():
    lines = [line for line in grouped() if line.waits]
    lines[0].facts["expected_start_s"] = time.mktime((2027, 11, 15, 22, 16, 32, 0, 0, -1))
    table = shown(squeue.START, lines, "S,i")
    expected = recorded("squeue_start")
    assert table[0] == expected[0]
    assert table[1].replace("(null)", "n0    ") == expected[1]
    assert sorted(table[2:]) == sorted(expected[2:])


def test_widths_cut_and_align_as_slurm_does():
    names = shown("%.5i|%8j|%.3j|%3j", grouped())
    assert names[0] == "JOBID|NAME    |NAM|NAM"
    assert names[1:3] == ["3_[4-|arr     |arr|arr", "    4|train_mo|tra|tra"]


def test_squeue_of_many_members_is_cut_as_slurm_cuts_it():
    many = together([job(f"9_{index}") for index in range(1, 200, 2)])
    assert len(many) == 1
    assert many[0].id.startswith("9_[1,3,5,")
    assert many[0].id.endswith("...]")


def nodes(*states: str) -> list[dict[str, Any]]:
    busy = {"idle": 0, "drain": 0, "mix": 2, "alloc": 4, "drng": 2, "down": 0}
    return [
        {
            "name": f"n{place}",
            "alive": state != "down",
            "drained": state in ("drain", "drng"),
            "reason": "fan is loud" if state in ("drain", "drng") else "",
            "gpus_total": 4,
            "gpus_busy": busy[state],
            "gpus": [{"name": "A100", "virtual": False}] * 4,
        }
        for place, state in enumerate(states)
    ]


def sinfo_lines(words: list[str], found: list[dict[str, Any]]) -> list[str]:
    given = parse("sinfo", words, sinfo.OPTIONS)
    return lines_of(sinfo.pieces_for(given, found), sinfo.groups_of(given, found), heading=True)


@pytest.mark.parametrize(
    ("name", "words", "states"),
    [
        ("sinfo", [], ("mix", "mix", "mix", "mix")),
        ("sinfo_N", ["-N"], ("mix", "mix", "mix", "mix")),
        ("sinfo_s", ["-s"], ("mix", "mix", "mix", "mix")),
        ("sinfo_states", [], ("alloc", "mix", "drain", "idle")),
        ("sinfo_states2", [], ("alloc", "drng", "drain", "idle")),
        ("sinfo_states2N", ["-N"], ("alloc", "drng", "drain", "idle")),
    ],
)
def test_sinfo_is_slurms_table(name, words, states):
    text = (RECORDED / f"{name}.txt").read_text(encoding="utf-8")
    text = text.replace("    main* ", "  thebes* ").replace("main*   ", "thebes* ")
    assert sinfo_lines(words, nodes(*states)) == text.splitlines()


def test_sinfo_long_and_by_node():
    text = (RECORDED / "sinfo_states2l.txt").read_text(encoding="utf-8").replace("main*   ", "thebes* ")
    assert sinfo_lines(["-l"], nodes("alloc", "drng", "drain", "idle")) == text.splitlines()[1:]
    table = sinfo_lines(["-N", "-l"], nodes("mix", "down"))
    assert table[0] == (RECORDED / "sinfo_Nl.txt").read_text(encoding="utf-8").splitlines()[1]
    assert table[1].startswith("n0             1   thebes*       mixed N/A ")
    assert table[2].split()[3] == "down*"


def test_sinfo_reasons_and_gpu_types():
    assert sinfo_lines(["-R"], nodes("drain"))[1].startswith("fan is loud          Unknown ")
    assert sinfo_lines(["-o", "%N %t %G"], nodes("idle", "idle")) == ["NODELIST STATE GRES", "n[0-1] idle gpu:a100:4"]
    assert sinfo_lines([], []) == [
        "PARTITION AVAIL  TIMELIMIT  NODES  STATE NODELIST",
        "thebes*      up   infinite      0    n/a ",
    ]


def test_fields_of_squeue():
    done = job("7", state="completed", end_s=NOW + 65, first_start_s=NOW + 5, incarnation=2, time_s=600.0)
    done.details["attempts"] = [  # type: ignore[index]
        {"parts": [["n3", [0]]], "started_s": NOW + 5},
        {"parts": [["n1", [0]], ["n2", [0]]], "started_s": NOW + 35},
    ]
    text = "%i|%A|%F|%K|%t|%T|%M|%L|%N|%R|%a|%Q|%b|%Z|%C|%B"
    [_, line] = shown(text, [done])
    assert line == "7|7|7|N/A|CD|COMPLETED|0:30|9:30|n[1-2]|n[1-2]|vision|0|gres:gpu:1|/w|N/A|n[1-2]"
    [waits] = together([job("8_2"), job("8_4")])
    assert shown("%i %F %K %r %E %e %S", [waits])[1] == "8_[2,4] 8 2,4 Resources (null) N/A N/A"
    after = job("9")
    after.details = {"spec": {"after": ["7", "8_2"], "gpu_type": "A100"}, "attempts": []}
    assert shown("%E %b", [after])[1] == "afterok:7,afterok:8_2 gres:gpu:A100:1"
    after.details["spec"] = {"after": ["7"], "after_any": ["6", "8_2"]}
    assert shown("%E", [after])[1] == "afterok:7,afterany:6,afterany:8_2"
    limited = together([job(f"8_{index}", array_limit=2) for index in (3, 4, 5, 9)])
    assert shown("%i %K", limited)[1] == "8_[3-5,9%2] 3-5,9"
    assert squeue.as_json(done)["start_time"] == NOW + 35


def test_long_names_of_fields():
    fields = {name: squeue.FIELDS[letter] for name, letter in squeue.LONG_NAMES.items()}
    pieces = parse_long_format("squeue", "JobID,Name:8,State:.10,tres-per-node", fields)
    assert lines_of(pieces, [job("4")], heading=True) == [
        "JOBID               NAME         STATETRES_PER_NODE       ",
        "4                   train_mo   PENDINGgres:gpu:1          ",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59, "0:59"), (3599.9, "59:59"), (3600, "1:00:00"), (93_784, "1-02:03:04"), (None, "UNLIMITED")],
)
def test_run_times(seconds, text):
    assert span(seconds) == text


def test_run_times_of_scontrol():
    assert [long_span(s) for s in (6, 7200, 93_784, None)] == ["00:00:06", "02:00:00", "1-02:03:04", "UNLIMITED"]


def test_every_reason_of_a_policy_has_a_word_of_slurms():
    assert set(REASONS) == set(decision.REASONS[1:])


@pytest.mark.parametrize(
    ("state", "text", "word"),
    [
        ("held", "held by its user", "JobHeldUser"),
        ("queued", "waits for job 3", "Dependency"),
        ("queued", kept_back(4), "JobArrayTaskLimit"),
        ("queued", "is being started", "None"),
        ("queued", "", "None"),
        ("queued", "something new", "Resources"),
        ("queued", "its tenant's quota goes to jobs before it in the order", "AssocGrpGRES"),
        ("running", "", "None"),
        ("failed", "rank 0 exited with code 1", "NonZeroExitCode"),
        ("timeout", "it reached its time limit of 5 s", "TimeLimit"),
    ],
)
def test_reasons(state, text, word):
    assert reason_of(state, text) == word


# --- lists of nodes and jobs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["n0", "n1", "n2", "n3"], "n[0-3]"),
        (["n2", "n0"], "n[0,2]"),
        (["gpu"], "gpu"),
        (["a1", "b1", "b2"], "a1,b[1-2]"),
        (["n08", "n09", "n10", "n11"], "n[08-11]"),
        (["rack1-n1", "rack1-n2", "rack2-n1"], "rack1-n[1-2],rack2-n1"),
        (["n9", "n10", "n11"], "n[9-11]"),
        ([], ""),
    ],
)
def test_names_are_folded(names, text):
    assert folded(names) == text
    assert sorted(unfolded(text)) == sorted(names)


def test_lists_that_are_none():
    with pytest.raises(ValueError, match="n"):
        unfolded("n[a-b]")


def test_ids():
    assert ids_of("scancel", ["12", "12_3", "12_[1-4,7]"]) == [("12", None), ("12", [3]), ("12", [1, 2, 3, 4, 7])]
    assert ids_of("scancel", ["12_[1-4%2]"]) == [("12", [1, 2, 3, 4])], "as squeue shows them"


# --- messages --------------------------------------------------------------------------------------------------------


def nobody() -> Any:
    raise AssertionError("nothing may be asked of the cluster")


def stopped(command: Callable[[Any, list[str]], int], *words: str) -> tuple[str, int]:
    with pytest.raises(Stop) as caught:
        command(nobody, list(words))
    return caught.value.message, caught.value.code


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SBATCH_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "a.sh"
    path.write_text("#!/bin/bash\n#SBATCH --gres=gpu:2\n#SBATCH -t 10\necho hi\n")
    return path


SHIMS = {
    "sbatch": (sbatch.sbatch, sbatch.OPTIONS),
    "squeue": (squeue.squeue, squeue.OPTIONS),
    "scancel": (scancel.scancel, scancel.OPTIONS),
    "sinfo": (sinfo.sinfo, sinfo.OPTIONS),
}


def refusals() -> list[Any]:
    return [
        pytest.param(command, name, option, id=f"{command}-{name}")
        for command, (_, options) in SHIMS.items()
        for name, option in options.items()
        if option.unsupported
    ]


@pytest.mark.parametrize(("command", "name", "option"), refusals())
def test_what_is_not_supported_is_named_and_nothing_is_done(command, name, option, script):
    word = f"--{name}=1" if option.takes else f"--{name}"
    message, code = stopped(SHIMS[command][0], word, "a.sh")
    assert message == f"{command}: error: --{name} is not supported by Thebes: {option.unsupported}. Nothing was done."
    assert "\n" not in message
    assert code == 1


@pytest.mark.parametrize("name", [name for name, option in sbatch.OPTIONS.items() if option.unsupported])
def test_a_script_may_not_ask_for_it_either(name, script):
    value = "=1" if sbatch.OPTIONS[name].takes else ""
    script.write_text(f"#!/bin/bash\n#SBATCH --{name}{value}\n")
    message, _ = stopped(sbatch.sbatch, "a.sh")
    assert message.startswith(f"sbatch: error: a.sh, line 2: --{name} is not supported by Thebes: ")


def test_nor_may_the_environment(script, monkeypatch):
    monkeypatch.setenv("SBATCH_RESERVATION", "maint")
    assert stopped(sbatch.sbatch, "a.sh")[0].startswith("sbatch: error: SBATCH_RESERVATION is not supported by Thebes")


def test_command_lines_that_make_no_sense_end_as_with_slurm(script):
    told = (RECORDED / "sb_opt.txt").read_text(encoding="utf-8").rstrip("\n")
    assert stopped(sbatch.sbatch, "--foo", "a.sh") == (told, 255)
    assert stopped(squeue.squeue, "--foo") == (told.replace("sbatch", "squeue"), 1)
    assert stopped(sbatch.sbatch, "-Y", "a.sh")[0].startswith("sbatch: invalid option -- 'Y'\nTry")
    assert stopped(sbatch.sbatch, "--time")[0].startswith("sbatch: option '--time' requires an argument\n")
    assert stopped(sbatch.sbatch, "-t")[0].startswith("sbatch: option requires an argument -- 't'\n")
    assert stopped(sbatch.sbatch, "--parsable=1")[0].startswith("sbatch: option '--parsable' doesn't allow an argument")
    assert stopped(sbatch.sbatch, "--mem-=1")[0].startswith("sbatch: option '--mem-=1' is ambiguous; possibilities: '")
    script.write_text("#!/bin/bash\n#SBATCH --foo=3\n")
    message, code = stopped(sbatch.sbatch, "a.sh")
    assert message.startswith("sbatch: unrecognized option '--foo' (a.sh, line 2)\nTry")
    assert code == 255


def test_options_are_read_as_getopt_reads_them():
    known = {"states": Option("t", "="), "noheader": Option("h"), "long": Option("l"), "nice": Option("", "?")}
    given = parse("x", ["-hl", "-tPD", "--sta=R", "a", "--nice", "b", "--", "-h"], known)
    assert given.options == [("noheader", ""), ("long", ""), ("states", "PD"), ("states", "R"), ("nice", "")]
    assert given.words == ["a", "b", "-h"]
    assert given.listed("states") == ["R"]


def test_scripts_that_sbatch_does_not_take(script, monkeypatch):
    assert stopped(sbatch.sbatch, "nofile.sh") == ((RECORDED / "sb_none.txt").read_text().rstrip("\n"), 1)
    script.write_text("echo hi\n")
    assert stopped(sbatch.sbatch, "a.sh") == ((RECORDED / "sb_plain.txt").read_text().rstrip("\n"), 1)
    script.write_text(" \n")
    assert stopped(sbatch.sbatch, "a.sh")[0] == "sbatch: error: Batch script is empty!"
    script.write_bytes(b"\x7fELF\xff")
    assert stopped(sbatch.sbatch, "a.sh")[0] == "sbatch: error: a.sh is not a text file."
    message = "sbatch: error: Script arguments not permitted with --wrap option"
    assert stopped(sbatch.sbatch, "--wrap", "echo", "a.sh")[0] == message
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert stopped(sbatch.sbatch)[0] == "sbatch: error: Batch script is empty!"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-t", "foo"], "sbatch: error: --time: 'foo' is not a length of time."),
        (["-d", "afternotok:3"], "sbatch: error: --dependency: 'afternotok:3' is not supported."),
        (["-d", "afterany:3?afterok:4"], "sbatch: error: --dependency: 'afterany:3?afterok:4' is not supported: '?'"),
        (["-d", "afterany:"], "sbatch: error: --dependency: 'afterany:' does not name a job."),
        (["-a", "1-9%0"], "sbatch: error: --array: '1-9%0': the limit after % is not a number from 1 to 999,999."),
        (["-a", "1-9%few"], "sbatch: error: --array: '1-9%few': the limit after % is not a number from 1 to 999,999."),
        (["-a", "x"], "sbatch: error: --array: 'x' is not a list of array indices."),
        (["-o", "%q.txt"], "sbatch: error: '%q.txt': %q is not known."),
        (["-o", ""], "sbatch: error: '' is not the name of a file for output."),
        (["--open-mode", "new"], "sbatch: error: --open-mode: 'new' is neither append nor truncate."),
        (["--gpus", "many"], "sbatch: error: --gpus: 'many' is not a number of GPUs."),
        (["-N", "0"], "sbatch: error: --nodes: '0' is not a number of at least 1."),
    ],
)
def test_values_that_make_no_sense(script, words, told):
    message, code = stopped(sbatch.sbatch, *words, "a.sh")
    assert message.startswith(told)
    assert code == 255


def test_squeue_and_sinfo_and_scancel_refuse_what_slurm_refuses():
    assert stopped(squeue.squeue, "-i", "0")[0] == "squeue: error: Error: invalid entry for --iterate=|0|"
    assert stopped(squeue.squeue, "17")[0].startswith("squeue: error: Unrecognized option: 17\nTry")
    assert stopped(sinfo.sinfo, "17")[0].startswith("sinfo: error: Unrecognized option: 17\nTry")
    unknown = "is not a field that Thebes knows. Nothing was done."
    assert stopped(squeue.squeue, "-o", "%i %!")[0] == f"squeue: error: --format: '%!' {unknown}"
    assert stopped(squeue.squeue, "-O", "JobID,Colour")[0] == f"squeue: error: --Format: 'Colour' {unknown}"
    assert stopped(sinfo.sinfo, "-o", "%Q")[0] == f"sinfo: error: --format: '%Q' {unknown}"
    assert stopped(sinfo.sinfo, "-t", "foo")[0].startswith('sinfo: error: Bad state string: "foo"\nsinfo: error: valid')
    assert (
        stopped(sinfo.sinfo, "-n", "n[a]")[0]
        == "sinfo: error: --nodes: 'n[a]' is not a list of nodes. Nothing was done."
    )
    assert stopped(scancel.scancel)[0] == (RECORDED / "scancel_none.txt").read_text().rstrip("\n")
    assert stopped(scancel.scancel, "abc")[0] == (RECORDED / "scancel_bad2.txt").read_text().rstrip("\n")
    assert stopped(scancel.scancel, "3_[x]")[0] == "scancel: error: Invalid job id 3_[x]"
    assert stopped(scancel.scancel, "3_[4-1]")[0] == "scancel: error: Invalid job id 3_[4-1]"
    assert stopped(scancel.scancel, "-t", "XX")[0] == (RECORDED / "scancel_state.txt").read_text().rstrip("\n")
    with pytest.raises(Stop) as caught:
        states_of("squeue", ["XX"])
    assert caught.value.message.splitlines()[0] == (RECORDED / "squeue_bad.txt").read_text().splitlines()[0]
    with pytest.raises(Stop) as caught:
        squeue.sorted_jobs([], "x")
    assert caught.value.message == "squeue: error: --sort: 'x' is not a field that Thebes sorts by. Nothing was done."
    with pytest.raises(Stop) as caught:
        squeue.hosts_of("n[")
    assert "is not a list of nodes" in caught.value.message


def test_states_by_short_and_long_name():
    assert states_of("squeue", ["pd", "SUSPENDED"]) == {"queued", "held", "suspended"}
    assert states_of("squeue", ["CG"]) == {"preempting"}
    assert states_of("squeue", ["NF"]) == set()
    assert len(states_of("squeue", ["all"])) == 10


def test_scontrol_says_what_to_use_instead():
    assert stopped(scontrol.scontrol)[0].startswith("scontrol: error: the prompt of scontrol is not there in Thebes")
    assert stopped(scontrol.scontrol, "frob")[0] == "invalid keyword: frob"
    assert stopped(scontrol.scontrol, "show")[0] == "too few arguments for keyword:show"
    assert stopped(scontrol.scontrol, "hold")[0] == "too few arguments for keyword:hold"
    assert stopped(scontrol.scontrol, "show", "partition")[0] == (
        "scontrol: error: show partition is not supported by Thebes. Nothing was done."
    )
    assert stopped(scontrol.scontrol, "show", "hostnames", "n[x]")[0] == "Invalid hostlist: n[x]"
    assert stopped(scontrol.scontrol, "hold", "abc")[0] == "scontrol: error: Invalid job id abc"
    for verb, instead in scontrol.INSTEAD.items():
        told = f"scontrol: error: {verb} is not supported by Thebes: {instead}. Nothing was done."
        assert stopped(scontrol.scontrol, verb, "1")[0] == told


def test_scontrol_folds_and_unfolds_names(capsys):
    assert scontrol.scontrol(nobody, ["show", "hostnames", "n[0-2],m"]) == 0
    assert scontrol.scontrol(nobody, ["show", "hostlist", "n2,n1,n0"]) == 0
    assert capsys.readouterr().out == "n0\nn1\nn2\nm\nn[0-2]\n"


def test_help_version_and_srun(thebes):
    ran = thebes("slurm-shim", "sbatch", "--help")
    assert ran.code == 0
    assert "--gpus-per-node=…" in ran.out
    assert "Accepted, without effect:" in ran.out
    assert "--nodelist=…  (the policy decides which nodes a job gets)" in ran.out
    assert "  -H, --hold\n" in ran.out
    assert thebes("slurm-shim", "squeue", "--version").out.startswith("thebes ")
    ran = thebes("slurm-shim", "srun", "hostname")
    assert ran.code == 1
    assert ran.err.startswith("srun: error: Thebes has no srun: a script runs once on each of its nodes. Nothing was")
    ran = thebes("slurm-shim", "sacctmgr")
    assert ran.code == 2
    assert "the first word is one of sbatch, squeue" in ran.err


def test_without_a_cluster(thebes, tmp_path, monkeypatch):
    monkeypatch.setenv("THEBES_DIR", str(tmp_path))
    monkeypatch.delenv("THEBES_URL", raising=False)
    ran = thebes("slurm-shim", "squeue", "-h")
    assert ran.code == 1
    assert ran.err.startswith("squeue: error: no Thebes cluster is running in")


# --- what sbatch makes of a script -----------------------------------------------------------------------------------


def made(text: str, *words: str) -> Any:
    given = parse("sbatch", list(words), sbatch.OPTIONS, mixed=False)
    return sbatch.job_of(sbatch.wanted_of(given, text, "a.sh"), text, "a.sh", tuple(given.words))


BARE = "#!/bin/bash\necho hi\n"


@pytest.mark.parametrize(
    ("words", "gpus", "count"),
    [
        (["--gres=gpu:4"], 4, 1),
        (["--gres=gpu:a100:2", "-N2"], 4, 2),
        (["--gpus=8", "-N", "2"], 8, 2),
        (["-G", "3"], 3, 1),
        (["--gpus-per-node=4", "--nodes=3"], 12, 3),
        (["-N2", "--ntasks-per-node=4", "--gpus-per-task=1"], 8, 2),
    ],
)
def test_sizes(script, words, gpus, count):
    fields = made(BARE, *words).fields
    assert (fields["gpus"], fields["nodes"]) == (gpus, count)


def test_command_line_over_environment_over_script(script, monkeypatch):
    text = "#!/bin/bash\n#SBATCH --gpus=8 -t 10 -J inside -A phys\n"
    assert made(text).fields["gpus"] == 8
    monkeypatch.setenv("SBATCH_TIMELIMIT", "20")
    monkeypatch.setenv("SBATCH_JOB_NAME", "outside")
    fields = made(text, "-J", "last", "--gres=gpu:1").fields
    assert fields["gpus"] == 1, "one way to count GPUs replaces the other"
    assert (fields["time_s"], fields["name"], fields["tenant"]) == (1200.0, "last", "phys")


def test_fields_of_a_job(script, monkeypatch):
    monkeypatch.setenv("KEEP", "1")
    words = [
        "--array=1-5:2%2",
        "-d",
        "afterok:3:4_1,afterany:7",
        "-H",
        "-D",
        "sub",
        "--export=NONE,A=b",
        "-t",
        "1-02:03:04",
    ]
    merged = made(BARE, *words, "--signal=B:USR2@120")
    fields = merged.fields
    assert (fields["array"], fields["after"], fields["time_s"]) == ([1, 3, 5], ["3", "4_1"], 93_784.0)
    assert (fields["array_limit"], fields["after_any"], fields["hold"]) == (2, ["7"], True)
    assert made("#!/bin/bash\n#SBATCH -a 1-9%3\n", "-a", "1-2").fields.get("array_limit") is None
    assert fields["workdir"] == str(script.parent / "sub")
    assert fields["env"] == {"A": "b"}
    assert fields["grace_s"] == 120.0
    assert "--signal: the notice of Thebes is SIGUSR1, not SIGUSR2; the lead time is its grace." in merged.notes
    assert "no GPUs are asked for; it gets one, for every job of Thebes holds at least one." in merged.notes


def run_here(command: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    given = {"THEBES_JOB_ID": "12", "THEBES_INCARNATION": "1", "NODE_RANK": "0", "THEBES_NODE_RANK": "0", "RANK": "0",
             "THEBES_NODE_NAMES": "n7,n8", "PATH": os.environ["PATH"], **env}  # fmt: skip
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("pattern", "file"),
    [
        ("slurm-%j.out", "slurm-12_3.out"),
        ("%x-%A_%a.txt", "a b-12_3.txt"),
        ("%A-%4a-%N-%n-%t-%b%%", "12-0003-n7-0-0-3%"),
        ("it's $HOME `x`", "it's $HOME `x`"),
        ("\\%j", "%j"),
    ],
)
def test_output_patterns(script, pattern, file):
    merged = made(BARE, "-o", pattern, "-a", "3", "-J", "a_b")
    command = [
        word.replace("a_b", "'a b'") if place == 2 else word for place, word in enumerate(merged.fields["command"])
    ]
    ran = run_here(command, script.parent, THEBES_JOB_ID="12_3", THEBES_ARRAY_INDEX="3")
    assert ran.returncode == 0, ran.stderr
    assert (script.parent / file).read_text() == "hi\n"
    assert ran.stdout == f"sbatch: output goes to {script.parent}/{file}\n"


def test_a_later_start_goes_on_in_the_same_file(script):
    command = made(BARE).fields["command"]
    file = script.parent / "slurm-12.out"
    file.write_text("old\n")
    run_here(command, script.parent)
    run_here(command, script.parent, THEBES_INCARNATION="2")
    assert file.read_text() == "hi\nhi\n"
    run_here(made(BARE, "--open-mode=append").fields["command"], script.parent)
    assert file.read_text() == "hi\nhi\nhi\n"


def test_errors_and_input_have_files_of_their_own(script):
    (script.parent / "in").write_text("line\n")
    text = "#!/bin/bash\nread x; echo $x; echo bad >&2; exit 7\n"
    merged = made(text, "-o", "out", "-e", "/dev/null", "-i", "in")
    ran = run_here(merged.fields["command"], script.parent)
    assert ran.returncode == 7
    assert (script.parent / "out").read_text() == "line\n"
    assert ran.stdout.endswith("/out, errors to /dev/null\n")


def test_a_folder_for_output_that_is_not_there_fails_the_job(script):
    ran = run_here(made(BARE, "-o", "no/such/file").fields["command"], script.parent)
    assert ran.returncode == 1
    assert "no/such/file: No such file or directory" in ran.stderr


def test_what_a_job_runs_is_named_by_its_script(script):
    found = job("1")
    for text, words, name in (
        (BARE, [], "/w/a.sh"),
        ("#!/usr/bin/python3\n", [], "/w/a.sh"),
        (BARE, ["x"], "/w/a.sh"),
    ):
        found.details = {"spec": {"command": made(text, *words).fields["command"], "workdir": "/w"}}
        assert found.command() == name
    found.details = {"spec": {"command": ["python", "train.py"]}}
    assert found.command() == "bash -c …"


# --- install and remove ----------------------------------------------------------------------------------------------


def test_install_and_remove(thebes, tmp_path, monkeypatch):
    folder = tmp_path / "of mine" / "bin"
    monkeypatch.setenv("PATH", "/nowhere")
    ran = thebes("shims", "install", folder)
    assert ran.code == 0
    assert ran.out == f"export PATH='{folder}':\"$PATH\"\n"
    assert ran.err == f"{folder}: sbatch, squeue, scancel, sinfo, scontrol, srun\n"
    assert all(stat.S_IMODE((folder / name).stat().st_mode) == 0o755 for name in commands.NAMES)
    assert thebes("shims", "install", folder).code == 0, "again: the same"
    done = subprocess.run([str(folder / "squeue"), "--version"], capture_output=True, text=True, check=False,
                          env={"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert done.stdout.endswith("(as squeue)\n"), done.stderr
    ran = thebes("shims", "remove", folder)
    assert ran.err == f"{folder}: removed sbatch, squeue, scancel, sinfo, scontrol, srun\n"
    assert list(folder.iterdir()) == []
    ran = thebes("shims", "remove", folder)
    assert ran.code == 2
    assert "there is nothing that `thebes shims install` made." in ran.err


def test_a_real_slurm_is_neither_overwritten_nor_hidden_silently(thebes, tmp_path, monkeypatch):
    real = tmp_path / "real"
    real.mkdir()
    (real / "squeue").write_text("#!/bin/sh\n")
    (real / "squeue").chmod(0o755)
    ran = thebes("shims", "install", real)
    assert ran.code == 2
    assert f"{real}: there is another squeue." in ran.err
    assert [path.name for path in real.iterdir()] == ["squeue"]
    monkeypatch.setenv("PATH", f"{tmp_path / 'mine'}:{real}")
    ran = thebes("shims", "install", tmp_path / "mine")
    assert f"note: a real Slurm is installed ({real}/squeue); with this PATH its names mean Thebes:" in ran.err
    assert commands.real_command("squeue") == str(real / "squeue")
    assert commands.real_command("sbatch") is None


def test_the_engine_for_slurm_finds_the_real_commands(thebes, tmp_path):
    from thebes.engine.slurm.client import clean_env

    thebes("shims", "install", tmp_path / "mine")
    env = clean_env({"PATH": f"{tmp_path / 'mine'}:/usr/bin::/nowhere", "THEBES_DIR": "x"})
    assert env == {"PATH": "/usr/bin::/nowhere"}


def test_a_folder_that_cannot_be_written(thebes, tmp_path):
    (tmp_path / "file").write_text("")
    ran = thebes("shims", "install", tmp_path / "file" / "bin")
    assert ran.code == 2
    assert "cannot be written: Not a directory." in ran.err


def test_help_lists_the_shims_but_not_what_they_call(thebes):
    out = thebes("--help").out
    assert " shims " in out
    assert "slurm-shim" not in out
