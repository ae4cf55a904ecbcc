"""One NVIDIA MPS control process per node, so that jobs packed on one GPU run their kernels side by side.

The control process lives in a private directory: a job comes under it only through the environment given here, and any
other one of the machine is left alone. A process under MPS cannot be suspended by the driver (see `cuda.py`), so a GPU
is either packed or time-sliced.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from thebes.model.errors import UserError

PROGRAM = "nvidia-cuda-mps-control"
ANSWER_S = 5.0
START_S = 10.0
_SOCKET_PATH_BYTES = 107
_LONGEST_NAME = len("/control_privileged.lock")


class MpsUnavailable(UserError):  # noqa: N818 - reads as what it says
    """MPS cannot be used here; the message says why and what to do."""


@dataclass(frozen=True)
class Mps:
    """Where a control process lives. Whether it runs is not remembered here, but asked from it."""

    directory: Path

    @property
    def pipes(self) -> Path:
        return self.directory / "pipe"

    @property
    def logs(self) -> Path:
        return self.directory / "log"


def start(directory: Path, *, program: str = PROGRAM, gpu_uuids: Sequence[str] = ()) -> Mps:
    """Start the control process below this directory, or find it running there. It survives the caller, as jobs do."""
    mps = Mps(directory.absolute())
    found = _program(program)
    _check_length(mps)
    if healthy(mps, program=program):
        return mps
    for folder in (mps.directory, mps.pipes, mps.logs):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    env = _environment(mps)
    if gpu_uuids:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_uuids)
    # This goes into a file: the control process may keep what it inherits open, and a pipe would then never end.
    told = mps.logs / "start.log"
    try:
        with told.open("wb") as out:
            code = subprocess.call(
                [found, "-d"], env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=START_S
            )
    except subprocess.TimeoutExpired:
        raise MpsUnavailable(f"the MPS daemon did not start within {START_S:.0f} s", hint=_look(mps)) from None
    if code:
        said = told.read_text(errors="replace").strip()
        raise MpsUnavailable(f"the MPS daemon did not start (exit code {code}): {said}", hint=_look(mps))
    deadline_s = time.monotonic() + START_S
    while not healthy(mps, program=program):
        if time.monotonic() > deadline_s:
            raise MpsUnavailable("the MPS daemon was started but does not answer", hint=_look(mps))
        time.sleep(0.05)
    return mps


def stop(mps: Mps, *, program: str = PROGRAM, clients_end_within_s: int = 10, answer_s: float = ANSWER_S) -> None:
    """End the control process and its servers, and after this time the clients that still run; it may be gone."""
    _ask(mps, f"quit -t {clients_end_within_s}", program, answer_s + clients_end_within_s)


def healthy(mps: Mps, *, program: str = PROGRAM) -> bool:
    """Whether the control process answers."""
    return _ask(mps, "get_server_list", program, ANSWER_S) is not None


def client_env(
    mps: Mps, *, thread_percentage: float | None = None, memory_limits_gib: Mapping[int, float] | None = None
) -> dict[str, str]:
    """What a job needs in its environment to run under this control process.

    `thread_percentage` caps the share of each GPU's processors; `memory_limits_gib` caps its memory, by the number of
    the GPU as the job counts them. Without limits packed jobs compete freely.
    """
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(mps.pipes), "CUDA_MPS_LOG_DIRECTORY": str(mps.logs)}
    if thread_percentage is not None:
        if not 0 < thread_percentage <= 100:
            raise UserError(f"an MPS thread percentage lies above 0 and at most at 100, not at {thread_percentage:g}")
        env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{thread_percentage:g}"
    if memory_limits_gib:
        if min(memory_limits_gib.values()) <= 0:
            raise UserError("an MPS memory limit must be above 0")
        limits = (f"{gpu}={int(gib * 1024)}M" for gpu, gib in sorted(memory_limits_gib.items()))
        env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(limits)
    return env


def _ask(mps: Mps, command: str, program: str, timeout_s: float) -> str | None:
    """The answer of the control process to one command; None if there is no answer."""
    if not mps.pipes.is_dir():
        return None
    try:
        done = subprocess.run(
            [_program(program)],
            input=f"{command}\n".encode(),
            env=_environment(mps),
            capture_output=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _environment(mps: Mps) -> dict[str, str]:
    # A caller that is a client of some other control process, or sees only some GPUs, must not pass that on.
    env = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
    return env | {"CUDA_MPS_PIPE_DIRECTORY": str(mps.pipes), "CUDA_MPS_LOG_DIRECTORY": str(mps.logs)}


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise MpsUnavailable(
            f"MPS is not installed on this node: there is no {name}",
            hint="it comes with the NVIDIA driver; without it jobs are not packed on real GPUs",
        )
    return found


def _check_length(mps: Mps) -> None:
    if len(os.fsencode(mps.pipes)) + _LONGEST_NAME > _SOCKET_PATH_BYTES:
        raise MpsUnavailable(
            f"the path of the MPS directory is too long for a Unix socket: {mps.pipes}",
            hint="choose an instance folder with a shorter path",
        )


def _look(mps: Mps) -> str:
    return f"its log is in {mps.logs}"
