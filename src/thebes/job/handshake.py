"""The job's side of a preemption: whether it was asked to stop, until when, and what it has saved.

Both sides talk through small files in the attempt folder (`THEBES_ATTEMPT_DIR`): the supervisor writes `notice`; we
write `ack`, `checkpoint.json` and `progress`. Signals only make it faster. None of this ever kills a training run: a
file that cannot be written is a warning. It needs only the standard library; without an attempt folder nearly every
function does nothing.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from thebes.job import files

EXIT_PREEMPTED = 85  # "my state is saved: resume me"

_LOOK_EVERY_S = 0.05  # how often should_stop() asks the file system
_REPORT_EVERY_S = 1.0
_AFTER_SIGTERM_S = 5.0  # after a SIGTERM without a notice, SIGKILL follows so much later
_THREADS_FINISH_S = 2.0  # so long, at most, a process waits at its end for threads of PyTorch
_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


def boot_s() -> float:
    """A clock that all processes of a machine share and that cannot be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Handshake:
    """One process of a job and its attempt folder. The module's functions are the methods of one Handshake."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        folder = environ.get("THEBES_ATTEMPT_DIR", "")
        self._folder = Path(folder) if folder else None
        self._notice = os.path.join(folder, "notice") if folder else ""  # noqa: PTH118 - a str is quicker to stat
        self._signalled_s: float | None = None  # this and the next one are all that the signal handler ever sets
        self._terminated = False
        self._previous: dict[int, Any] = {}
        self._signals_tried = False
        self._stop = False
        self._look_at = 0.0  # monotonic; we do not look before then
        self._first: tuple[int, float] | None = None
        self._pending: dict[str, float] | None = None
        self._reported_at = -math.inf
        self._flush_at_exit = False
        self._warned: set[str] = set()
        self._lock = threading.RLock()
        self._masks: dict[int, set[int]] = {}  # of threads that are forking just now
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._after_fork_in_child
        )
        if self._folder is not None:
            atexit.register(_let_torch_finish)

    # Being asked to stop.

    def should_stop(self) -> bool:
        """Whether this job was asked to save its state and go. It is cheap, so call it every step; True stays True."""
        if self._stop:
            return True
        if self._notice and not self._signals_tried:
            self.install_signals()
        if self._signalled_s is None and not self._noticed():
            return False
        self._acknowledge()
        return True

    def agreed_to_stop(self) -> None:
        """Note that another rank was asked, and that the ranks have agreed to stop together."""
        if not self._stop:
            self._acknowledge()

    def deadline_s(self) -> float | None:
        """When the job is killed, on the clock of `boot_s`; None if it was not asked to stop, or no time was named."""
        if self._notice:
            try:
                return float(json.loads(Path(self._notice).read_bytes())["deadline_s"])
            except FileNotFoundError:
                pass
            except (OSError, ValueError, KeyError, TypeError):
                # It is just being written, or somebody made it by hand: then the usual grace counts, from the birth of
                # the file.
                return self._counted_from(self._born_s())
        if self._signalled_s is None:
            return None
        if self._terminated and self._notice:
            return self._signalled_s + _AFTER_SIGTERM_S
        return self._counted_from(self._signalled_s)

    def seconds_left(self) -> float:
        """Seconds until the job is killed, never negative; infinite if no deadline is known."""
        deadline_s = self.deadline_s()
        return math.inf if deadline_s is None else max(0.0, deadline_s - boot_s())

    def install_signals(self) -> bool:
        """Take SIGUSR1 and SIGTERM as a request to stop. A handler that is there already is called as well.

        Under Thebes the first should_stop() does this. Elsewhere (Slurm's --signal, a spot machine) call it yourself.
        Only the main thread may do it; in another one it returns False, and the notice file does the work alone.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        self._signals_tried = True
        if not self._previous:
            atexit.register(self._ignore_late_signals)
        for number in _SIGNALS:
            previous = signal.getsignal(number)
            # None means that C code has installed it; Python cannot call that, so it stays.
            if previous is None or previous == self._on_signal:
                continue
            self._previous[number] = previous
            signal.signal(number, self._on_signal)
            # System calls of libraries in C are restarted after the signal.
            signal.siginterrupt(number, False)
        return True

    # Saying what is safe.

    def checkpointed(self, step: int, path: str | os.PathLike[str]) -> None:
        """Say that the state after `step` steps is in `path` (a file or a folder). Call it when the save has returned.

        The data is flushed to the disk first, so that what Thebes hears of survives a power cut. Only rank 0 is heard.
        An address such as s3://… is passed on as it is.
        """
        place = os.fspath(path)
        if "://" not in place:
            place = os.path.abspath(place)  # noqa: PTH100 - resolve() would follow links that may change
            if not os.path.exists(place):  # noqa: PTH110
                raise FileNotFoundError(f"checkpointed({step}, …): there is no {place}; call it after the save")
        if self._folder is None or self.rank() != 0:
            return
        try:
            if "://" not in place:
                files.sync(Path(place))
            files.write_json(
                self._folder / "checkpoint.json", {"step": int(step), "path": place, "at_s": boot_s()}, durable=True
            )
        except OSError as error:
            self._warn(f"step {step} is saved, but Thebes cannot be told: {error}")
        self.flush()

    def report(self, step: int, samples: int | None = None) -> None:
        """Say how many steps (and samples) are done. Call it after every step; it writes at most once a second."""
        if self._folder is None or self.rank() != 0:
            return
        now_s = boot_s()
        with self._lock:
            if self._first is None:
                self._first = (int(step), now_s)
            entry: dict[str, float] = {
                "step": int(step), "at_s": now_s, "first_step": self._first[0], "first_at_s": self._first[1],
            }  # fmt: skip
            if samples is not None:
                entry["samples"] = int(samples)
            self._pending = entry
            if not self._flush_at_exit:
                self._flush_at_exit = True
                atexit.register(self.flush)
            if time.monotonic() - self._reported_at >= _REPORT_EVERY_S:
                self.flush()

    def flush(self) -> None:
        """Write the last report, if it has not been written yet."""
        with self._lock:
            entry, self._pending = self._pending, None
            if entry is None or self._folder is None:
                return
            self._reported_at = time.monotonic()
            try:
                files.write_json(self._folder / "progress", entry, durable=False)
            except OSError as error:
                self._warn(f"progress cannot be told: {error}")

    def exit_preempted(self) -> NoReturn:
        """End this process with code 85: the state is saved, resume me. From the main thread."""
        self.flush()
        sys.exit(EXIT_PREEMPTED)

    # Going on.

    def resuming(self) -> bool:
        """Whether this job has run before."""
        return self._environ.get("THEBES_RESUME", "0") == "1"

    def resume_path(self) -> Path | None:
        """The checkpoint to go on from: the last one told, or else the newest in `checkpoint_dir()`.

        It is None for a job that starts afresh, so that a script run by hand never picks up an old state by itself.
        """
        if not self.resuming():
            return None
        told = self._environ.get("THEBES_RESUME_FROM", "")
        if told and os.path.exists(told):  # noqa: PTH110
            return Path(told)
        return files.latest(self.checkpoint_dir())

    def checkpoint_dir(self) -> Path:
        """The folder for checkpoints of this job, the same in each of its runs; ./checkpoints without a cluster."""
        folder = Path(self._environ.get("THEBES_CHECKPOINT_DIR") or "checkpoints").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def rank(self) -> int:
        """The number of this process in its gang: from torch.distributed if that is up, else from RANK."""
        distributed = torch_distributed()
        return int(distributed.get_rank()) if distributed else self._number("RANK", 0)

    def world_size(self) -> int:
        """How many processes the gang has."""
        distributed = torch_distributed()
        return int(distributed.get_world_size()) if distributed else self._number("WORLD_SIZE", 1)

    # Within.

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # It uses no lock, no file and no log, because it can come in the middle of anything.
        if number == signal.SIGTERM:
            self._terminated = True
        if self._signalled_s is None:
            self._signalled_s = boot_s()
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)

    def _noticed(self) -> bool:
        now = time.monotonic()
        if not self._notice or now < self._look_at:
            return False
        self._look_at = now + _LOOK_EVERY_S
        return os.path.exists(self._notice)  # noqa: PTH110 - quicker than a Path, and this is asked at every step

    def _acknowledge(self) -> None:
        with self._lock:
            if self._stop:
                return
            self._stop = True
            if self._folder is None:
                return
            try:
                (self._folder / "ack").touch()
            except OSError as error:
                self._warn(f"the notice cannot be acknowledged: {error}")

    def _born_s(self) -> float:
        try:
            age_s = time.time() - Path(self._notice).stat().st_mtime
        except OSError:
            age_s = 0.0
        return boot_s() - max(0.0, age_s)

    def _counted_from(self, instant_s: float) -> float | None:
        grace = self._environ.get("THEBES_GRACE_SECONDS", "")
        try:
            return instant_s + float(grace)
        except ValueError:
            return None

    def _number(self, name: str, default: int) -> int:
        try:
            return int(self._environ.get(name, default))
        except ValueError:
            return default

    def _warn(self, message: str) -> None:
        # Each kind of message is told once, because a full disk must not fill the log of a run that reports every
        # second.
        kind = message.split(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"thebes.job: {message}", RuntimeWarning, stacklevel=3)

    def _ignore_late_signals(self) -> None:
        """Ignore late signals: Python resets handlers while it shuts down, so that one would hide the exit code."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal and not callable(previous):
                signal.signal(number, signal.SIG_IGN)

    # A forked child (a data loader, a pool) must die of SIGTERM as if we were not there. Signals are held back while we
    # fork, because one that came before the child has its old handlers back would get lost.

    def _before_fork(self) -> None:
        if self._previous:
            self._masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def _after_fork(self) -> None:
        mask = self._masks.pop(threading.get_ident(), None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _after_fork_in_child(self) -> None:
        self._lock = threading.RLock()
        self._pending = None
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, previous)
        self._previous = {}
        self._signals_tried = False
        self._after_fork()


def _let_torch_finish() -> None:
    """Before Python is torn down, wait until PyTorch's threads have done what they are about.

    The threads of gloo outlive the process group. One that still has to let go of a tensor needs Python for it, and if
    Python is gone the whole process aborts: a rank that was done, or had saved its state, then looked failed.
    """
    if "torch.distributed" not in sys.modules:
        return
    until_s, asleep = time.monotonic() + _THREADS_FINISH_S, 0
    while asleep < 2 and time.monotonic() < until_s:
        time.sleep(0.01)
        asleep = 0 if _others_run() else asleep + 1


def _others_run() -> bool:
    """Whether a thread beside this one is on a processor or waits for one."""
    try:
        threads = [int(name) for name in os.listdir("/proc/self/task")]  # noqa: PTH208 - names are enough
        for thread in threads:
            if thread != threading.get_native_id():
                stat = Path(f"/proc/self/task/{thread}/stat").read_bytes()
                if stat.rpartition(b")")[2].split()[0] == b"R":
                    return True
    except (OSError, IndexError):  # one has just ended, or this is no Linux
        pass
    return False


def torch_distributed() -> Any | None:
    """torch.distributed, if the program has imported it and its process group is up; this never imports it itself."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    is_initialized = getattr(distributed, "is_initialized", None)  # builds without it do not have this
    return distributed if is_initialized is not None and is_initialized() else None
