"""The folder of an instance: where it is, whom it lets in, locks that say who lives, files that are whole."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from thebes.model.errors import UserError
from thebes.protocol.instance import GOING_S, EventLog, Instance, LockHeld, stop_process, write_json, write_text

HOLDER = """
import sys, time
from thebes.protocol.instance import Instance
lock = Instance.at(sys.argv[1]).hold_lock(sys.argv[2])
print("held", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    made = Instance.at(tmp_path / "instance")
    made.create()
    return made


def hold_elsewhere(instance: Instance, name: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, instance.dir, name], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_where_an_instance_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("THEBES_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Instance.at().dir == tmp_path / ".thebes"
    monkeypatch.setenv("THEBES_DIR", str(tmp_path / "b"))
    assert Instance.at().dir == tmp_path / "b"
    assert Instance.at(tmp_path / "c").dir == tmp_path / "c"


def test_the_folder_is_for_its_owner_alone(instance: Instance) -> None:
    for path in (instance.dir, instance.run, instance.log, instance.jobs, instance.nodes):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_an_empty_folder_is_taken_and_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    Instance(tmp_path).create()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_a_folder_with_something_else_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"not empty and is no instance of Thebes \(it holds 'thesis.tex'\)"):
        Instance(tmp_path).create()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_whose_configuration_was_moved_away_is_still_an_instance(instance: Instance) -> None:
    instance.store.touch()
    (instance.dir / "config.json.bad").touch()
    instance.create()


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not a folder"):
        Instance(tmp_path / "file").create()
    with pytest.raises(UserError, match="a part of the path is a file"):
        Instance(tmp_path / "file" / "deeper").create()


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, -1)
        path = tmp_path
    else:
        path = Path("/")
    with pytest.raises(UserError, match="belongs to another user"):
        Instance(path).create()


def test_a_path_that_is_too_long_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the path is too long"):
        Instance(tmp_path / ("x" * 300)).create()


def test_a_lock_is_held_once(instance: Instance) -> None:
    assert instance.holder_pid("part") is None
    with instance.hold_lock("part"):
        assert instance.holder_pid("part") == os.getpid()
        with pytest.raises(LockHeld, match=f"pid {os.getpid()}"):
            instance.hold_lock("part")
    assert instance.holder_pid("part") is None
    assert instance.lock_path("part").read_text() == f"{os.getpid()}\n"


def test_a_killed_holder_holds_nothing_whatever_the_file_says(instance: Instance) -> None:
    holder = hold_elsewhere(instance, "part")
    assert instance.holder_pid("part") == holder.pid
    holder.kill()
    # Not reaped: a zombie still has its pid, and yet does not live.
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    assert instance.holder_pid("part") is None
    assert int(instance.lock_path("part").read_text()) == holder.pid
    with instance.hold_lock("part"):
        assert instance.holder_pid("part") == os.getpid()
    holder.wait()


def test_looking_never_costs_anybody_the_lock(instance: Instance) -> None:
    looker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\nfrom thebes.protocol.instance import Instance\ni = Instance.at(sys.argv[1])\n"
            "print('looking', flush=True)\nwhile True: i.holder_pid('part')",
            instance.dir,
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert looker.stdout is not None
        looker.stdout.readline()
        for _ in range(200):
            instance.hold_lock("part").release()
    finally:
        looker.kill()
        looker.communicate()


def test_who_stalls_while_looking_costs_nobody_the_lock(instance: Instance) -> None:
    """A busy machine may stop him for seconds between his look and its end."""
    with instance.lock_path("part").open("w") as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)
        threading.Timer(2 * GOING_S, fcntl.flock, (looks, fcntl.LOCK_UN)).start()
        instance.hold_lock("part").release()


def test_a_lock_knows_when_its_folder_has_gone(instance: Instance) -> None:
    lock = instance.hold_lock("part")
    assert lock.is_in_place()
    instance.lock_path("part").unlink()
    assert not lock.is_in_place()
    instance.lock_path("part").touch()
    assert not lock.is_in_place()


def test_stopping_hits_the_holder_of_the_lock_only(instance: Instance) -> None:
    holder = hold_elsewhere(instance, "part")
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        assert stop_process(bystander.pid, instance.lock_path("part"), patience_s=1.0)
        assert bystander.poll() is None
        assert stop_process(holder.pid, instance.lock_path("part"), patience_s=60.0)
        assert holder.wait(60) == -signal.SIGTERM
    finally:
        bystander.kill()
        bystander.wait()


def test_json_is_replaced_whole(instance: Instance) -> None:
    path = instance.dir / "x.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not [entry for entry in instance.dir.iterdir() if entry.name.startswith(".x.json")]


def test_a_full_disk_is_told_and_the_old_file_stays(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    path = instance.dir / "x.json"
    write_json(path, {"a": 1})

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="the disk is full") as told:
        write_json(path, {"a": 2})
    assert "free some space" in told.value.hint
    assert json.loads(path.read_text()) == {"a": 1}


def test_endpoint_and_token(instance: Instance) -> None:
    assert instance.read_endpoint() is None
    instance.write_endpoint("http://127.0.0.1:7070")
    assert instance.read_endpoint() == {"url": "http://127.0.0.1:7070", "pid": os.getpid()}
    instance.endpoint.write_text("{")
    assert instance.read_endpoint() is None
    with pytest.raises(UserError, match="no such file"):
        instance.read_token()
    write_text(instance.token, "secret\n")
    assert instance.read_token() == "secret"


def test_logs_do_not_grow_without_end(instance: Instance) -> None:
    log = EventLog(instance.log / "x.jsonl", limit_bytes=1000)
    for number in range(100):
        log.write("happened", number=number)
    log.close()
    files = sorted(instance.log.iterdir())
    assert [path.name for path in files] == ["x.jsonl", "x.jsonl.1"]
    assert all(path.stat().st_size < 1100 for path in files)
    last = json.loads((instance.log / "x.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "happened"
    assert last["number"] == 99


def test_a_log_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    EventLog(tmp_path / "no" / "such.jsonl").write("happened")
