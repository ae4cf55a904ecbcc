"""The MPS daemon's life, with a stand-in for NVIDIA's control program."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from thebes.model.errors import UserError
from thebes.node import mps
from thebes.node.mps import Mps, MpsUnavailable

# Speaks as the real one does: -d starts it, commands come on standard input, without a daemon it exits with 1.
CONTROL = """#!/bin/sh
running="$CUDA_MPS_PIPE_DIRECTORY/running"
if [ "$1" = -d ]; then
    echo "$CUDA_MPS_LOG_DIRECTORY $CUDA_VISIBLE_DEVICES" > "$running"
    exit 0
fi
[ -e "$running" ] || exit 1
read command
echo "$command" >> "$CUDA_MPS_LOG_DIRECTORY/commands"
case "$command" in quit*) rm "$running" ;; esac
"""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those who hang are to be too slow, not a busy machine."""
    monkeypatch.setattr(mps, "START_S", 60.0)
    monkeypatch.setattr(mps, "ANSWER_S", 60.0)


@pytest.fixture
def control(tmp_path: Path) -> str:
    return program(tmp_path, CONTROL)


def program(tmp_path: Path, text: str) -> str:
    path = tmp_path / "control"
    path.write_text(text)
    path.chmod(0o700)
    return str(path)


def test_it_starts_answers_and_stops(tmp_path: Path, control: str) -> None:
    daemon = mps.start(tmp_path / "mps", program=control)
    assert mps.healthy(daemon, program=control)
    assert stat.S_IMODE(daemon.pipes.stat().st_mode) == 0o700
    mps.stop(daemon, program=control, clients_end_within_s=3)
    assert not mps.healthy(daemon, program=control)
    assert "quit -t 3" in (daemon.logs / "commands").read_text()
    mps.stop(daemon, program=control)


def test_a_running_daemon_is_found_not_started_again(tmp_path: Path, control: str) -> None:
    daemon = mps.start(tmp_path / "mps", program=control)
    (daemon.pipes / "running").write_text("the first one")
    assert mps.start(tmp_path / "mps", program=control) == daemon
    assert (daemon.pipes / "running").read_text() == "the first one"


def test_the_caller_passes_none_of_its_own_cuda_settings_on(tmp_path: Path, control: str, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    daemon = mps.start(tmp_path / "mps", program=control)
    assert (daemon.pipes / "running").read_text() == f"{daemon.logs} \n"
    other = mps.start(tmp_path / "other", program=control, gpu_uuids=["GPU-1", "GPU-2"])
    assert (other.pipes / "running").read_text() == f"{other.logs} GPU-1,GPU-2\n"


def test_a_missing_program_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MpsUnavailable, match="there is no no-such-program") as caught:
        mps.start(tmp_path / "mps", program="no-such-program")
    assert "NVIDIA driver" in caught.value.hint
    assert not (tmp_path / "mps").exists()


def test_a_daemon_that_does_not_start_is_told_with_its_words(tmp_path: Path) -> None:
    broken = program(tmp_path, "#!/bin/sh\n[ \"$1\" = -d ] && echo 'no GPU here' >&2\nexit 1\n")
    with pytest.raises(MpsUnavailable, match=r"exit code 1\): no GPU here") as caught:
        mps.start(tmp_path / "mps", program=broken)
    assert "log is in" in caught.value.hint


def test_a_daemon_that_does_not_answer_is_told(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(mps, "START_S", 1.5)
    dumb = program(tmp_path, '#!/bin/sh\n[ "$1" = -d ]\n')
    with pytest.raises(MpsUnavailable, match="does not answer"):
        mps.start(tmp_path / "mps", program=dumb)


def test_a_daemon_that_hangs_is_told(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(mps, "START_S", 0.2)
    monkeypatch.setattr(mps, "ANSWER_S", 0.2)
    hanging = program(tmp_path, "#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(MpsUnavailable, match="did not start within"):
        mps.start(tmp_path / "mps", program=hanging)
    daemon = Mps(tmp_path / "mps")
    assert not mps.healthy(daemon, program=hanging)


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path, control: str) -> None:
    with pytest.raises(MpsUnavailable, match="too long") as caught:
        mps.start(tmp_path / ("x" * 100), program=control)
    assert "shorter" in caught.value.hint


def test_nothing_is_asked_where_no_daemon_ever_was(tmp_path: Path) -> None:
    daemon = Mps(tmp_path / "mps")
    assert not mps.healthy(daemon, program="no-such-program")
    mps.stop(daemon, program="no-such-program")


def test_the_environment_of_a_client() -> None:
    daemon = Mps(Path("/i/mps"))
    assert mps.client_env(daemon) == {
        "CUDA_MPS_PIPE_DIRECTORY": "/i/mps/pipe",
        "CUDA_MPS_LOG_DIRECTORY": "/i/mps/log",
    }
    env = mps.client_env(daemon, thread_percentage=50, memory_limits_gib={1: 8, 0: 1.5})
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=1536M,1=8192M"


@pytest.mark.parametrize(
    "options", [{"thread_percentage": 0}, {"thread_percentage": 101}, {"memory_limits_gib": {0: 0}}]
)
def test_limits_out_of_range_are_refused(options) -> None:
    with pytest.raises(UserError, match="MPS"):
        mps.client_env(Mps(Path("/i/mps")), **options)


def test_relative_directories_are_made_absolute(tmp_path: Path, control: str, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    daemon = mps.start(Path("mps"), program=control)
    assert os.path.isabs(mps.client_env(daemon)["CUDA_MPS_PIPE_DIRECTORY"])  # noqa: PTH117 - a plain string
