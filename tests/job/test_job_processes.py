"""What needs a process of its own: imports, signals, forks, exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from attempts import ROOT, Job, environment

from kit.waiting import IMPORT_PATIENCE_S, until

LOOP = """
import sys, time
from thebes import job
print("ready", flush=True)
step = 0
while not job.should_stop():
    step += 1
    job.report(step)
    if step == 1:
        print("looping", flush=True)
    time.sleep(0.002)
print(f"left {job.seconds_left():.1f}", flush=True)
job.exit_preempted()
"""


@pytest.fixture
def made(tmp_path: Path) -> Job:
    job = Job(tmp_path)
    job.next_attempt()
    return job


def started(job: Job, script: str, until: str) -> subprocess.Popen[str]:
    process = job.start("-c", script)
    assert process.stdout is not None
    seen = ""
    while until not in seen:
        line = process.stdout.readline()
        assert line, f"ended before it said '{until}': {seen}"
        seen += line
    return process


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and what it printed after the last line read."""
    output, _ = process.communicate(timeout=IMPORT_PATIENCE_S)
    return process.returncode, output


def test_only_the_standard_library_is_loaded() -> None:
    script = """
import sys
before = set(sys.modules)
import thebes.job
job = thebes.job
job.should_stop(); job.should_stop_all(); job.report(1); job.seconds_left(); job.resume_path(); job.rank()
new = {name.partition(".")[0] for name in set(sys.modules) - before} - {"thebes"}
assert new <= sys.stdlib_module_names, new - sys.stdlib_module_names
ours = {name for name in sys.modules if name.startswith("thebes")}
assert ours == {"thebes", "thebes.job", "thebes.job.files", "thebes.job.gang", "thebes.job.handshake"}, ours
heavy = {"asyncio", "subprocess", "socket", "multiprocessing", "logging", "inspect", "dataclasses"} & new
assert not heavy, heavy
"""
    # -S: without site-packages there is nothing else to load.
    subprocess.run([sys.executable, "-S", "-c", script], env=environment(), check=True, timeout=IMPORT_PATIENCE_S)


def test_without_a_cluster_signals_are_left_alone() -> None:
    script = """
import signal
from thebes import job
assert not job.should_stop()
assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
assert job.install_signals()          # unless asked to
signal.raise_signal(signal.SIGUSR1)
assert job.should_stop() and job.deadline_s() is None
"""
    subprocess.run([sys.executable, "-c", script], env=environment(), check=True, timeout=IMPORT_PATIENCE_S)


def test_the_flag_file_alone_is_enough(made: Job) -> None:
    process = started(made, LOOP, "looping")
    made.notice(grace_s=200.0)
    code, output = ended(process)
    assert code == 85
    assert 30.0 < float(output.split()[-1]) <= 200.0  # 30 s are what it has without a word from us
    assert made.has("ack")


@pytest.mark.parametrize(
    ("number", "at_least_s", "at_most_s"), [(signal.SIGUSR1, 5.1, 30.0), (signal.SIGTERM, 0.0, 5.0)]
)
def test_a_signal_alone_is_enough(made: Job, number: signal.Signals, at_least_s: float, at_most_s: float) -> None:
    process = started(made, LOOP, "looping")
    process.send_signal(number)
    code, output = ended(process)
    assert code == 85
    assert at_least_s <= float(output.split()[-1]) <= at_most_s
    assert made.has("ack")


def test_sigterm_before_the_deadline_does_not_cut_a_save_short(made: Job) -> None:
    script = """
import time
from thebes import job
while not job.should_stop():
    time.sleep(0.002)
def slowly(file):
    print("saving", flush=True)
    for _ in range(50):
        file.write(b"x"); time.sleep(0.01)
path = job.checkpoint_dir() / "step-5.bin"
job.atomic_save(slowly, path)
job.checkpointed(5, path)
job.exit_preempted()
"""
    process = made.start("-c", script)
    made.notice()
    assert process.stdout is not None
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 85
    assert made.remember() == 5
    assert Path(made.told).stat().st_size == 50


@pytest.mark.parametrize(("leave", "code"), [("job.exit_preempted()", 85), ("pass", 0), ("sys.exit(3)", 3)])
def test_a_process_waits_at_its_end_for_what_threads_of_pytorch_are_about(made: Job, leave: str, code: int) -> None:
    """One of gloo's that lets go of a tensor too late aborts the process: seen in one of some fifty runs."""
    script = f"""
import hashlib, sys, threading, types
from thebes import job
sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
began = threading.Event()
def work():
    began.set()
    hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 300_000)  # computes without Python's lock
    print("done", flush=True)
threading.Thread(target=work, daemon=True).start()
began.wait()
{leave}
"""
    assert ended(made.start("-c", script)) == (code, "done\n")


def test_the_script_of_the_guide_takes_part(made: Job) -> None:
    guide = (ROOT / "docs" / "preemption.md").read_text(encoding="utf-8")
    script = guide.split("```python\n")[1].split("```")[0]
    (made.attempt / "notice").touch()  # as the guide does it by hand
    code, output = ended(made.start("-c", script))
    assert code == 85, output
    assert made.remember() == 0
    made.next_attempt()
    assert ended(made.start("-c", script)) == (0, "")
    assert made.read("progress") | {"step": 1000, "first_step": 1} == made.read("progress")


def test_the_last_report_is_written_at_the_end(made: Job) -> None:
    process = made.start("-c", "from thebes import job\nfor step in range(1000): job.report(step + 1)")
    assert ended(process)[0] == 0
    assert made.read("progress")["step"] == 1000


def test_before_the_loop_begins_a_job_dies_of_sigterm_as_usual(made: Job) -> None:
    process = started(made, "import time\nfrom thebes import job\nprint('ready', flush=True)\ntime.sleep(60)", "ready")
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == -signal.SIGTERM


def test_a_handler_of_the_program_is_called_as_well(made: Job) -> None:
    script = """
import signal, time
from thebes import job
heard = []
signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
job.should_stop()
signal.raise_signal(signal.SIGUSR1)
assert job.should_stop() and heard == [signal.SIGUSR1]
job.install_signals()   # again: no loop of handlers
signal.raise_signal(signal.SIGUSR1)
assert len(heard) == 2
"""
    code, output = ended(made.start("-c", script))
    assert code == 0, output


def test_a_handler_installed_later_wins_and_the_file_still_works(made: Job) -> None:
    script = "import signal\n" + LOOP.replace("step += 1", "step += 1; signal.signal(signal.SIGUSR1, lambda *_: None)")
    process = started(made, script, "looping")
    process.send_signal(signal.SIGUSR1)
    made.notice()
    assert ended(process)[0] == 85


def test_asked_from_another_thread_the_file_is_enough(made: Job) -> None:
    script = LOOP.replace("job.exit_preempted()", "")
    threaded = f"import threading\nthread = threading.Thread(target=exec, args=({script!r}, {{}}))\nthread.start()\n"
    process = started(made, threaded + "thread.join()\nimport sys; sys.exit(85)", "looping")
    made.notice()
    assert ended(process)[0] == 85


@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1"])
def test_a_forked_worker_dies_of_a_signal_as_if_we_were_not_there(made: Job, number: str) -> None:
    """Pools and data loaders end their workers by SIGTERM; one that only took note of it would hang them."""
    script = f"""
import os, signal, time
from thebes import job
assert not job.should_stop()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
os.kill(child, signal.{number})
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == -signal.{number}
signal.raise_signal(signal.{number})
assert job.should_stop()   # the parent still takes note
"""
    code, output = ended(made.start("-c", script))
    assert code == 0, output


def test_a_pool_can_be_terminated(made: Job) -> None:
    script = """
import multiprocessing, time
from thebes import job
job.should_stop()
with multiprocessing.get_context("fork").Pool(2) as pool:
    pool.apply_async(time.sleep, (60,))
    pool.apply(abs, (1,))
print("terminated")
"""
    code, output = ended(made.start("-c", script))
    assert (code, output) == (0, "terminated\n")


def test_a_reader_never_sees_half_a_message(made: Job) -> None:
    """As the agent does, read while the job writes as fast as it can."""
    script = """
import pathlib
from thebes import job
path = job.checkpoint_dir() / "step-1.bin"
path.touch()
for step in range(300):
    job.report(step)
    job.checkpointed(step, path)
"""
    process = made.start("-c", script)
    until(lambda: made.has("checkpoint.json"), "the first checkpoint")
    seen: list[int] = []
    while process.poll() is None:
        seen.append(json.loads((made.attempt / "checkpoint.json").read_text())["step"])
        json.loads((made.attempt / "progress").read_text())
    assert ended(process)[0] == 0
    assert seen == sorted(seen)
    assert made.read("checkpoint.json")["step"] == made.read("progress")["step"] == 299


def test_a_signal_that_comes_while_python_shuts_down_does_not_change_the_exit_code(made: Job) -> None:
    process = started(made, LOOP.replace("job.exit_preempted()", "time.sleep(1)\njob.exit_preempted()"), "looping")
    stop = threading.Event()

    def storm() -> None:
        while process.poll() is None and not stop.is_set():
            process.send_signal(signal.SIGUSR1)
            stop.wait(0.001)

    thread = threading.Thread(target=storm)
    thread.start()
    try:
        assert process.wait(timeout=IMPORT_PATIENCE_S) == 85
    finally:
        stop.set()
        thread.join()
    ended(process)
