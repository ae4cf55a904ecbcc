"""Job files, #SBATCH lines and their merge: what people write, and what they are told when it is wrong."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thebes.jobspec.draft import JobDraft, text_of
from thebes.jobspec.jobfile import file_schema, parse_yaml, read_yaml
from thebes.jobspec.merge import Merged, check, exported, merge
from thebes.jobspec.sbatch import UNDERSTOOD, parse_script, read_script
from thebes.jobspec.slurm_options import OPTIONS
from thebes.jobspec.spec import JobSpec, must_complete
from thebes.jobspec.values import parse_array, parse_duration_s, split_limit
from thebes.model.errors import UserError

HERE = Path("/work-here")
SCHEMA = Path(__file__).parents[2] / "docs/job.schema.json"


def merged(*drafts: JobDraft, environ: dict[str, str] | None = None) -> Merged:
    return merge(drafts, cwd=HERE, environ=environ or {})


def from_yaml(text: str) -> JobSpec:
    return check(merged(parse_yaml(text, "job.yaml")))


def from_script(text: str, *arguments: str) -> JobSpec:
    return check(merged(parse_script(text, "train.sh", arguments, cwd=HERE)))


def sbatch(*lines: str) -> str:
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), "python train.py", ""])


def refusal(call, *args, **options) -> UserError:
    with pytest.raises(UserError) as caught:
        call(*args, **options)
    return caught.value


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30 * 60),
        ("90s", 90),
        ("10m", 600),
        ("10 min", 600),
        ("2h", 7200),
        ("1.5h", 5400),
        ("1h30m", 5400),
        ("2 days", 172_800),
        ("10:30", 630),
        ("1:30:00", 5400),
        ("1-12:00:00", 129_600),
        ("2-6", 2 * 86_400 + 6 * 3600),
        ("1-02:30", 86_400 + 2.5 * 3600),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text, bare_s=60) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5", "1:2:3:4", "5 parsecs", "1-", "-1:00", "1e3", "nan", "²"])
def test_what_is_not_a_duration(text: str) -> None:
    error = refusal(parse_duration_s, text, bare_s=60, place="--time")
    assert f"--time: '{text}' is not a length of time" in error.message
    assert "1:30:00" in error.hint


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_every_slurm_time_is_read(days: int, hours: int, minutes: int, seconds: int) -> None:
    told = days * 86_400 + hours * 3600 + minutes * 60 + seconds
    assert parse_duration_s(f"{days}-{hours:02}:{minutes:02}:{seconds:02}", bare_s=60) == told
    assert parse_duration_s(f"{days}d{hours}h{minutes}m{seconds}s", bare_s=60) == told


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("3", [3]),
        ("1-4", [1, 2, 3, 4]),
        ("0-10:5", [0, 5, 10]),
        ("7,1-2,2", [1, 2, 7]),
        (" 1 - 2".replace(" - ", "-"), [1, 2]),
    ],
)
def test_arrays(text: str, indices: list[int]) -> None:
    assert parse_array(text) == indices


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not a list"),
        ("a-b", "'a-b' is not a list of array indices"),
        ("5-1", "5 is greater than 1"),
        ("1-5:0", "the step is 0"),
        ("1-", "not a list"),
        ("-3", "not a list"),
        ("1..5", "not a list"),
        ("0-20000", "more than 10,000"),
        ("0-99999999999", "too large"),
        ("1-5,7%4", "not a list"),
    ],
)
def test_array_nonsense(text: str, told: str) -> None:
    error = refusal(parse_array, text, "--array")
    assert error.message.startswith("--array: ")
    assert told in error.message
    assert error.hint


def test_a_limit_of_members_at_a_time_comes_last() -> None:
    assert split_limit("1-50%4") == ("1-50", "4")
    assert split_limit("1-50") == ("1-50", None)
    assert "once and last" in refusal(parse_array, "1-5%4").hint  # of a list, one by one


@pytest.mark.parametrize("limit", ["", "0", "-1", "x", "1.5", "9999999"])
def test_limits_that_are_none(limit: str) -> None:
    error = refusal(from_yaml, f"run: x\narray: 0-9%{limit}")
    assert (
        error.message == f"job.yaml, line 2: array: '0-9%{limit}': the limit after % is not a number from 1 to 999,999."
    )
    assert "0-99%4" in error.hint


def test_forms_of_an_array_with_a_limit() -> None:
    for text in ("array: 0-9%4", "array: 0-9\narray_limit: 4", "array_limit: 4\narray: [0-5, 6-9]"):
        spec = from_yaml(f"run: x\n{text}")
        assert (spec.array, spec.array_limit) == (list(range(10)), 4)
    assert from_script(sbatch("-a 1-3%2")).array_limit == 2
    assert from_yaml("run: x\narray: 0-9").array_limit is None
    assert "not a list of array indices" in refusal(from_yaml, "run: x\narray: '%4'").message


def test_an_array_replaces_an_earlier_one_with_its_limit() -> None:
    script = parse_script(sbatch("-a 1-9%3"), "train.sh", cwd=HERE)
    options = JobDraft()
    options.put("array", "1-2", "--array")
    fields = merged(script, options).fields
    assert (fields["array"], "array_limit" in fields) == ([1, 2], False)
    options.put("array", "1-2%1", "--array")
    assert merged(script, options).fields["array_limit"] == 1


def test_held_and_after_any() -> None:
    spec = from_yaml("run: x\nhold: true\nafter_any: [3, 12_3]\nafter: 7")
    assert (spec.hold, spec.after_any, spec.after) == (True, ["3", "12_3"], ["7"])
    assert from_yaml("run: x\nhold: no").hold is False
    assert from_script(sbatch("-H")).hold
    assert from_script(sbatch("--hold --gpus=2")).gpus == 2  # it takes no value
    assert not from_script(sbatch("--gpus=2")).hold
    spec = from_script(sbatch("-d afterok:1:2,afterany:3:4_1,afterok:5"))
    assert (spec.after, spec.after_any) == (["1", "2", "5"], ["3", "4_1"])


def test_of_which_jobs_any_end_will_do() -> None:
    assert must_complete(["7", "8_2"], "7")
    assert must_complete(["7", "8_2"], "7_3"), "an array stands for its members"
    assert must_complete(["7", "8_2"], "8_2")
    assert not must_complete(["7", "8_2"], "8_3")
    assert not must_complete([], "7")


def test_a_whole_job_file() -> None:
    spec = from_yaml(
        """
        name: resnet
        command: |
          source env.sh
          python train.py
        gpus: 4
        nodes: 2
        gpu_type: A100|H100
        tenant: vision
        priority: 5
        time: 1:30:00
        array: 1-3
        after: [12_3, 7]
        env: {LR: 0.10, DEBUG: yes, EMPTY: }
        workdir: /data
        launcher: torchrun
        mechanism: checkpoint
        grace: 2m
        retries: 2
        progress: 'step (\\d+)'
        model: resnet50
        """.replace("\n        ", "\n")
    )
    assert spec.command == ["bash", "-c", "source env.sh\npython train.py\n"]
    assert (spec.gpus, spec.nodes, spec.gpu_type, spec.tenant, spec.priority) == (4, 2, "A100|H100", "vision", 5)
    assert (spec.time_s, spec.grace_s, spec.max_retries) == (5400, 120, 2)
    assert spec.array == [1, 2, 3]
    assert spec.after == ["12_3", "7"]  # YAML's own reading of 12_3 is 123
    assert spec.env == {"LR": "0.10", "DEBUG": "yes", "EMPTY": ""}  # texts as they were written
    assert (spec.workdir, spec.launcher, spec.progress_pattern, spec.model) == (
        "/data",
        "torchrun",
        r"step (\d+)",
        "resnet50",
    )


def test_forms_of_a_command() -> None:
    assert from_yaml("run: python train.py").command == ["bash", "-c", "python train.py"]
    assert from_yaml("command: [python, train.py, --lr, 0.1]").command == ["python", "train.py", "--lr", "0.1"]


def test_times_of_a_job_file() -> None:
    assert from_yaml("run: x\ntime: 30").time_s == 1800  # minutes, as on the command line and in Slurm
    assert from_yaml("run: x\ntime_s: 30").time_s == 30
    assert from_yaml("run: x\ntime: 90s").time_s == 90
    assert from_yaml("run: x\ngrace: 30").grace_s == 30


def test_arrays_of_a_job_file() -> None:
    assert from_yaml("run: x\narray: [1, 5-7]").array == [1, 5, 6, 7]
    assert from_yaml("run: x\narray: 4").array == [4]


def test_a_work_directory_is_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("run: x\nworkdir: sub/../data")
    assert merged(read_yaml(tmp_path / "job.yaml")).fields["workdir"] == str(tmp_path / "data")
    assert merged(parse_yaml("run: x", "job.yaml")).fields["workdir"] == str(HERE)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "job.yaml: the job file is empty", "command: python train.py"),
        ("- a\n- b", "line 1: a job file is a list of `key: value` lines", "gpus: 4"),
        ("run: x\ngpu: 2", "job.yaml, line 2: unknown key 'gpu'", "did you mean 'gpus'?"),
        ("run: x\nresources: {gpus: 4}", "line 2: unknown key 'resources'", "at the top level"),
        ("run: x\nnum_gpus: 4", "line 2: unknown key 'num_gpus'", "did you mean 'gpus'?"),
        ("kind: Job\nrun: x", "line 1: unknown key 'kind'", "Kubernetes"),
        ("run: x\nzzz: 4", "line 2: unknown key 'zzz'", "valid names: after, after_any, array"),
        ("run: x\ngpus: four", "job.yaml, line 2: gpus: 'four' is not a whole number", "as in 4"),
        ("run: x\n\ngpus: 0", "job.yaml, line 3: gpus: must be at least 1, not 0", "at least one GPU"),
        ("run: x\ngpus: [1]", "line 2: gpus: one value is wanted here, not a list", ""),
        ("run: x\ngpus: 3\nnodes: 2", "line 3: nodes: 3 GPUs do not spread evenly over 2 nodes", ""),
        ("run: x\nlauncher: torchrn", "line 2: launcher: 'torchrn' is not known", "did you mean 'torchrun'?"),
        ("run: x\nname: my job", "line 2: name: 'my job' is not a valid name", "Letters, digits"),
        ("run: x\ntime: soon", "line 2: time: 'soon' is not a length of time", "1:30:00"),
        ("run: x\narray: 5-1", "line 2: array: '5-1' names no array index", "1-50"),
        ("run: x\narray:\n- 1\n- x", "line 4: array[1]: 'x' is not a list", ""),
        ("run: x\nafter: last", "line 2: after: 'last' is not a job id", "17_3"),
        ('run: x\nafter: ""', "line 2: after: '' does not name a job", "17_3"),
        ("run: x\nafter_any: [1, ',']", "after_any[1]: ',' does not name a job", "17_3"),
        ("run: x\narray: 0-9%2%3", "line 2: array: '0-9%2%3' is not an array", "once and last"),
        ("run: x\narray: 0-3%2,5-6", "line 2: array: '0-3%2,5-6' is not an array", "once and last"),
        ("run: x\nafter_any: [1, last]", "line 2: after_any: 'last' is not a job id", "17_3"),
        ("run: x\nhold: soon", "line 2: hold: 'soon' is neither true nor false", ""),
        ("run: x\narray: [1-3%2, 5]", "line 2: array[0]: '1-3%2' is not a list of array indices", "array_limit: 4"),
        ("run: x\narray: 1-3\narray_limit: 0", "line 3: array_limit: must be at least 1, not 0", ""),
        ("run: x\narray: 1-3\narray_limit: few", "line 3: array_limit: 'few' is not a whole number", ""),
        ("run: x\narray_limit: 2", "line 2: array_limit: there is no array whose jobs it could limit.", ""),
        ("run: x\narray: 1-3%2\narray_limit: 2", "line 3: array_limit: '1-3%2' has a limit already", "Leave one"),
        ("run: x\nenv:\n  THEBES_X: 1", "env: THEBES_X: names that begin with THEBES_", ""),
        ("run: x\nenv:\n  A: {b: c}", "line 3: env.A: one value is wanted here", "quotes"),
        ("run: x\nenv: [A]", "A has no value here", "A=VALUE"),
        ("run: x\nprogress: 'step'", "line 2: progress: the pattern needs exactly one group", ""),
        ("run: x\nprogress: '('", "line 2: progress: not a regular expression", ""),
        ("run: x\nsnapshot: maybe", "line 2: snapshot: 'maybe' is neither true nor false", ""),
        ("run: ''", "line 1: run: the command is empty", "python train.py"),
        ("run: x\nrun: y", "line 2: run: the key is there twice", "line 1"),
        ("run: x\ncommand: y", "line 1: run: says the same as 'command'", "Leave one"),
        ("gpus: 2", "there is no command to run", "thebes submit"),
        ("run: x\n  gpus: 1", "job.yaml, line 2: this is not YAML", "spaces"),
        ("run: x\n\tgpus: 1", "job.yaml, line 2: this is not YAML", "tabs"),
        ("run: [a", "this is not YAML", ""),
        ("run: x\n---\nrun: y", "this is not YAML", ""),
    ],
)
def test_errors_name_file_line_and_key(text: str, message: str, hint: str) -> None:
    error = refusal(from_yaml, text)
    assert message in error.message
    assert hint in error.hint


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("run: x")
    error = refusal(read_yaml, tmp_path / "jop.yaml")
    assert "jop.yaml: there is no such file" in error.message
    assert error.hint == "did you mean 'job.yaml'?"
    assert "cannot be read" in refusal(read_yaml, tmp_path).message
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in refusal(read_yaml, tmp_path / "binary").message


def test_later_drafts_win_and_environments_are_joined() -> None:
    file = parse_yaml("run: x\ngpus: 4\nenv: {A: 1, B: 2}\nsnapshot: true", "job.yaml")
    options = JobDraft()
    options.put("gpus", "2", "--gpus")
    options.put("env", ["B=3"], "--env")
    whole = merged(file, options)
    assert whole.fields["gpus"] == 2
    assert whole.places["gpus"] == "--gpus"
    assert whole.fields["env"] == {"A": "1", "B": "3"}
    assert whole.snapshot


def test_the_schema_is_current() -> None:
    """`thebes submit --schema > docs/job.schema.json` renews it."""
    assert json.loads(SCHEMA.read_text()) == file_schema()


def test_the_schema_knows_every_key() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(file_schema())
    good = {"run": "python x", "time": "2h", "array": "1-5", "gpus": 4, "env": {"A": 1}, "after": 3, "snapshot": True}
    assert validator.is_valid(good)
    assert validator.is_valid({"command": ["python", "x"], "time": 30})
    assert not validator.is_valid({"run": "x", "gpu": 1})
    assert not validator.is_valid({"gpus": 1})
    assert not validator.is_valid({"run": "x", "gpus": 0})


# scripts


def test_a_script_with_slurm_lines() -> None:
    spec = from_script(
        sbatch(
            "--job-name='my run'",
            "--gres=gpu:a100:2",
            "-N 2",
            "-t 1-00:00:00",
            "-a 1-3",
            "-d afterok:7:9",
            "-D /data",
            "-A vision",
            "--signal=B:USR1@120",
            "--requeue",
        )
    )
    assert (spec.name, spec.gpus, spec.nodes, spec.gpu_type) == ("my_run", 4, 2, "a100")
    assert (spec.time_s, spec.array, spec.after) == (86_400, [1, 2, 3], ["7", "9"])
    assert (spec.workdir, spec.tenant, spec.grace_s, spec.ranks_per_node) == ("/data", "vision", 120, 1)


@pytest.mark.parametrize(
    ("lines", "gpus", "nodes"),
    [
        ([], 1, 1),
        (["--gres=gpu"], 1, 1),
        (["--gres=gpu:3"], 3, 1),
        (["--gres gpu:3"], 3, 1),
        (["--gres=nvme:1,gpu:h100:2"], 2, 1),
        (["--gpus=4"], 4, 1),
        (["-G a100:4"], 4, 1),
        (["-G4", "-N2"], 4, 2),
        (["--gpus-per-node=2 --nodes=3"], 6, 3),
        (["--gpus-per-task=1", "--ntasks=4"], 4, 1),
        (["--gpus-per-task=2", "--ntasks-per-node=2", "-N 2"], 8, 2),
        (["--nodes=2-4", "--gres=gpu:1"], 2, 2),
        (["--gpus=2", "--gpus=3"], 3, 1),
    ],
)
def test_gpus_of_a_script(lines: list[str], gpus: int, nodes: int) -> None:
    spec = from_script(sbatch(*lines))
    assert (spec.gpus, spec.nodes) == (gpus, nodes)


@pytest.mark.parametrize(("value", "seconds"), [("30", 1800), ("30:00", 1800), ("2:00:00", 7200), ("1-0", 86_400)])
def test_slurm_times(value: str, seconds: float) -> None:
    assert from_script(sbatch(f"--time={value}")).time_s == seconds


def test_no_time_limit_in_slurm() -> None:
    assert from_script(sbatch("--time=UNLIMITED")).time_s is None


def test_lines_after_the_first_command_do_not_count() -> None:
    text = "#!/bin/bash\n# a comment\n\n#SBATCH -J first\n##SBATCH -J off\necho hi\n#SBATCH -J late\n"
    assert from_script(text).name == "first"


def test_a_script_without_a_name_has_that_of_its_file() -> None:
    assert from_script("#!/bin/bash\necho hi\n").name == "train.sh"


def test_unknown_options_are_named_in_one_note() -> None:
    draft = parse_script(
        sbatch("--mem=4G", "-p gpu", "--mail-type ALL", "--exclusive", "-o out-%j.txt"),
        "train.sh",
        cwd=HERE,
    )
    (note,) = draft.notes
    assert "5 #SBATCH options are not used here: --mem, --partition, --mail-type, --exclusive, --output" in note
    assert "thebes logs" in note


def test_slurm_lines_are_read_by_the_options_of_sbatch() -> None:
    """A flag takes no value, a short name has its long one, and what becomes part of a job is an option of sbatch."""
    draft = parse_script(sbatch("-B 2:4", "--contiguous --mem 4G", "--exclusive --hold"), "train.sh", cwd=HERE)
    assert "--extra-node-info, --contiguous, --mem, --exclusive." in draft.notes[0]
    assert text_of(draft.given["hold"]) == "true"
    assert OPTIONS.keys() >= UNDERSTOOD
    assert not [name for name in UNDERSTOOD if OPTIONS[name].unused or OPTIONS[name].unsupported]


def test_notes_about_srun_and_several_nodes() -> None:
    text = sbatch("-N 2", "--gres=gpu:1").replace("python", "srun python")
    notes = parse_script(text, "train.sh", cwd=HERE).notes
    assert "once on each of its 2 nodes" in notes[0]
    assert "srun" in notes[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--gres=gpu:many:x", "train.sh, line 2: --gres: 'gpu:many:x' is not a number of GPUs"),
        ("--gpus=none", "train.sh, line 2: --gpus: 'none' is not a number of GPUs"),
        ("--nodes=0", "train.sh, line 2: --nodes: '0' is not a number of at least 1"),
        ("--time=tomorrow", "train.sh, line 2: --time: 'tomorrow' is not a length of time"),
        ("-d afternotok:3", "train.sh, line 2: --dependency: 'afternotok:3' is not supported"),
        ("-d afterok:1,after:3", "train.sh, line 2: --dependency: 'afterok:1,after:3' is not supported"),
        ("-d singleton", "is not supported"),
        ("-d afterok:1?afterany:2", "'?' would start it after any one of them"),
        ("-d afterany:", "train.sh, line 2: --dependency: 'afterany:' does not name a job"),
        ("-d afterok:1::2", "'afterok:1::2' does not name a job"),
        ("-d afterany:x", "train.sh, line 2: --dependency: 'x' is not a job id"),
        ("--array=1-3%0", "train.sh, line 2: --array: '1-3%0': the limit after % is not a number from 1 to 999,999"),
        ("--array=x", "train.sh, line 2: --array: 'x' is not a list of array indices"),
        ("--job-name", "train.sh, line 2: --job-name has no value"),
        ("gpu:2", "train.sh, line 2: 'gpu:2' is not an option"),
        ("-J 'open", "train.sh, line 2: no closing quotation"),
        ("--export=MISSING", "train.sh, line 2: --export: MISSING has no value here"),
    ],
)
def test_wrong_slurm_lines(line: str, message: str) -> None:
    assert message in refusal(from_script, sbatch(line)).message


def run(command: list[str], cwd: Path, **env: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={"PATH": "/usr/bin:/bin", **env}, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_the_text_at_submission_is_what_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text('#!/bin/bash\necho "$0 got $*"\nnonsense-command\n')
    command = check(merged(read_script(script, ["--lr", "0.1"], cwd=tmp_path))).command
    script.write_text("#!/bin/bash\necho edited\n")
    told = run(command, tmp_path)
    assert f"{script} got --lr 0.1" in told
    assert "line 3: nonsense-command" in told  # line numbers are those of the file


def test_a_script_without_a_first_line_runs_by_bash(tmp_path: Path) -> None:
    command = check(merged(parse_script("[[ a == a ]] && echo yes\n", "x.sh", cwd=tmp_path))).command
    assert run(command, tmp_path) == "yes\n"


def test_slurm_variables_a_script_mentions_are_set(tmp_path: Path) -> None:
    text = sbatch("-a 3-4").replace(
        "python train.py",
        'echo "$SLURM_ARRAY_TASK_ID $SLURM_ARRAY_JOB_ID $SLURM_JOB_ID $SLURM_SUBMIT_DIR $SLURM_RESTART_COUNT"\nenv',
    )
    command = check(merged(parse_script(text, "train.sh", cwd=tmp_path))).command
    told = run(command, tmp_path, THEBES_ARRAY_INDEX="3", THEBES_JOB_ID="17_3", THEBES_INCARNATION="2")
    assert told.splitlines()[0] == f"3 17 17_3 {tmp_path} 1"
    assert "SLURM_ARRAY_TASK_ID=3" in told  # libraries read it from the environment
    assert "SLURM_JOB_ID=" not in told  # this one would make them believe in srun


def test_slurm_variables_that_are_not_set_are_told() -> None:
    notes = parse_script("#!/bin/bash\necho $SLURM_CPUS_ON_NODE\n", "train.sh", cwd=HERE).notes
    assert notes == ["train.sh mentions SLURM_CPUS_ON_NODE: not set here."]


def test_other_interpreters_run_the_file() -> None:
    text = "#!/usr/bin/env python3\nprint(1)\n"
    assert from_script(text, "a").command == ["/usr/bin/env", "python3", "/work-here/train.sh", "a"]


# environment


def test_the_environment_goes_along_but_for_the_session() -> None:
    environ = {"PATH": "/bin", "WANDB_MODE": "off", "HOME": "/home/me", "SSH_TTY": "x", "RANK": "3", "THEBES_DIR": "d"}
    environ["BASH_FUNC_module%%"] = "() { x; }"
    assert exported(None, environ) == {"PATH": "/bin", "WANDB_MODE": "off"}
    assert exported("NONE", environ) == {}
    assert exported("WANDB_MODE,X=1", environ) == {"WANDB_MODE": "off", "X": "1"}
    assert exported("ALL,X=1", environ)["X"] == "1"


def test_export_of_a_script() -> None:
    draft = parse_script(sbatch("--export=NONE"), "train.sh", cwd=HERE)
    assert merged(draft, environ={"PATH": "/bin"}).fields["env"] == {}


def test_env_beats_export() -> None:
    draft = parse_yaml("run: x\nenv: {PATH: /opt}", "job.yaml")
    assert merged(draft, environ={"PATH": "/bin"}).fields["env"] == {"PATH": "/opt"}
