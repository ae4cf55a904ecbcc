"""The job of the fault tests: writes down what it does, and proves that no other incarnation of it lives.

`python faulty_job.py FOLDER KEY KIND STEPS STEP_S`. Every line goes to FOLDER/KEY.log with O_APPEND, so nothing is lost
when it is killed. While it lives, each rank (and every daemon it leaves, which inherits the lock) holds an flock of its
own incarnation; a rank that finds the lock of another incarnation held writes DOUBLE.

Kinds: plain takes part in the handshake; deaf ignores every signal; daemon leaves processes of two sorts behind; fails
exits with 7; chatty prints a lot; careless knows nothing of Thebes and starts from the beginning each time. While there
is a file FOLDER/go-on, it makes more steps than it was told.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from itertools import count
from pathlib import Path

FAILS_WITH = 7


class Diary:
    """The job's own file of lines, and its locks."""

    def __init__(self, folder: Path, key: str) -> None:
        self.incarnation = int(os.environ["THEBES_INCARNATION"])
        self.rank = int(os.environ["RANK"])
        self.folder, self.key = folder, key
        self.fd = os.open(folder / f"{key}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, *words: object) -> None:
        os.write(self.fd, (" ".join(map(str, (*words, self.incarnation, self.rank))) + "\n").encode())

    def prove_alone(self) -> None:
        """Own lock first, then a look at all others: of two that live at once, one at least sees the other."""
        own = self.folder / f"{self.key}.{self.incarnation}.{self.rank}.lock"
        self.lock = os.open(own, os.O_RDWR | os.O_CREAT, 0o600)
        os.set_inheritable(self.lock, True)
        if not _try_for(self.lock, fcntl.LOCK_EX, 20.0):  # others only look for a moment
            self.write("DOUBLE", "same")
        for other in self.folder.glob(f"{self.key}.*.lock"):
            incarnation = int(other.name.removeprefix(self.key).split(".")[1])
            if incarnation == self.incarnation:
                continue
            fd = os.open(other, os.O_RDWR)
            if not _try_for(fd, fcntl.LOCK_SH, 0.0):
                self.write("DOUBLE", incarnation)
            os.close(fd)


def _try_for(fd: int, kind: int, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)


def leave_daemons() -> None:
    """One in a session of its own, and one that has also lost its parent."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        os._exit(0)
    os.waitpid(middle, 0)


def main(folder: str, key: str, kind: str, steps: str, step_s: str) -> int:
    diary = Diary(Path(folder), key)
    diary.prove_alone()
    first = 0
    saved = Path(os.environ["THEBES_CHECKPOINT_DIR"], "step")
    job = None
    if kind in ("plain", "daemon", "chatty"):
        from thebes import job

        if saved.exists():
            first = int(saved.read_text())
    diary.write("start", first)
    if kind == "deaf":
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
    if kind == "daemon":
        leave_daemons()
    for step in count(first):
        if step >= int(steps) and not (diary.folder / "go-on").exists():
            break
        if job is not None and job.should_stop():
            if diary.rank == 0:
                job.atomic_save(lambda file, step=step: file.write(str(step).encode()), saved)
                diary.write("saved", step)
                job.checkpointed(step, saved)
            diary.write("leave", step)
            job.exit_preempted()
        time.sleep(float(step_s))
        diary.write("step", step)
        if kind == "chatty":
            print("x" * 100 * 1000, flush=True)
        if job is not None:
            job.report(step + 1)
    if kind == "fails":
        diary.write("fail")
        return FAILS_WITH
    diary.write("end", steps)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
