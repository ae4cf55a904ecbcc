"""The folder of one instance: where everything lies in it, which processes live, and how its small files are written.

Liveness is a lock, never a pid: each process of an instance holds an `flock` on its file below `run/` as long as it
lives, and the kernel lets go of it however the process ends. Files are replaced, never changed in place: a crash leaves
the old or the new one. Only the standard library is used here: the keeper imports little else.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from thebes.model.errors import UserError

FOLDERS = ("run", "log", "jobs", "nodes")
GOING_S = 0.25  # for a holder that is just ending
LOOK_S = 10.0  # how long a process that only looks at a lock may keep us from it: a busy machine stalls


class LockHeld(UserError):  # noqa: N818 - reads as what it says
    """Another process holds the lock."""

    def __init__(self, message: str, *, hint: str = "", pid: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.pid = pid


class Lock:
    """A lock that is held; it goes with the process at the latest."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    def release(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def is_in_place(self) -> bool:
        """Whether the file is still where others look for it: not so when somebody has removed the folder."""
        try:
            return os.path.samestat(os.fstat(self.fd), self.path.stat())
        except OSError:
            return False

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(frozen=True)
class Instance:
    """Paths and locks of one instance. Nothing is created before `create`."""

    dir: Path

    @staticmethod
    def at(folder: str | Path | None = None) -> Instance:
        """The instance of `--dir`, else of THEBES_DIR, else of ~/.thebes."""
        chosen = folder or os.environ.get("THEBES_DIR") or "~/.thebes"
        try:
            return Instance(Path(chosen).expanduser().absolute())
        except RuntimeError:
            raise UserError(f"'{chosen}': there is no such home directory", hint="name a folder with --dir") from None

    @property
    def config(self) -> Path:
        return self.dir / "config.json"

    @property
    def store(self) -> Path:
        return self.dir / "store.db"

    @property
    def token(self) -> Path:
        return self.dir / "token"

    @property
    def run(self) -> Path:
        return self.dir / "run"

    @property
    def log(self) -> Path:
        return self.dir / "log"

    @property
    def jobs(self) -> Path:
        return self.dir / "jobs"

    @property
    def nodes(self) -> Path:
        return self.dir / "nodes"

    @property
    def endpoint(self) -> Path:
        return self.run / "endpoint.json"

    def lock_path(self, name: str) -> Path:
        return self.run / f"{name}.lock"

    @property
    def exists(self) -> bool:
        return self.config.exists()

    def create(self) -> None:
        """Make the folder, for its owner alone. A folder that holds something else is left as it is and refused."""
        path = self.dir
        try:
            if path.exists():
                self._check_ours()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.mkdir(mode=0o700, exist_ok=True)
            if stat.S_IMODE(path.stat().st_mode) != 0o700:
                path.chmod(0o700)
            for name in FOLDERS:
                (path / name).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise explain(error, path, "cannot be made") from error
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise UserError(f"{path}: no permission to write there", hint="choose another folder with --dir")

    def _check_ours(self) -> None:
        path = self.dir
        if not path.is_dir():
            raise UserError(f"{path} is not a folder", hint="choose another one with --dir")
        owner = path.stat().st_uid
        if owner != os.geteuid():
            raise UserError(
                f"{path} belongs to another user (uid {owner})", hint="choose a folder of your own with --dir"
            )
        strangers = sorted(entry.name for entry in path.iterdir() if entry.name not in FOLDERS)
        if strangers and not (self.exists or self.store.exists()):
            raise UserError(
                f"{path} is not empty and is no instance of Thebes (it holds '{strangers[0]}')",
                hint="choose a new or an empty folder with --dir",
            )

    def hold_lock(self, name: str, *, wait_s: float = 0.0) -> Lock:
        """Take `run/NAME.lock` and put our pid into it; LockHeld if somebody else has it after `wait_s`."""
        path = self.lock_path(name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise explain(error, path, "cannot be opened") from error
        try:
            if not take(fd, wait_s=max(wait_s, GOING_S)):
                pid = self.holder_pid(name)
                raise LockHeld(f"{name} runs already in {self.dir} (pid {pid})", pid=pid)
            text = f"{os.getpid()}\n".encode()
            os.pwrite(fd, text, 0)
            os.ftruncate(fd, len(text))
        except OSError as error:
            os.close(fd)
            raise explain(error, path, "cannot be locked") from error
        except BaseException:
            os.close(fd)
            raise
        return Lock(path, fd)

    def holder_pid(self, name: str) -> int | None:
        """The pid of the process that holds `run/NAME.lock`; None if none does, whatever pid the file names."""
        return holder_of(self.lock_path(name))

    def read_endpoint(self) -> dict[str, Any] | None:
        """Where the controller answers or last answered: url and pid."""
        try:
            found = json.loads(self.endpoint.read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        except OSError as error:
            raise explain(error, self.endpoint, "cannot be read") from error
        return found if isinstance(found, dict) and isinstance(found.get("url"), str) else None

    def write_endpoint(self, url: str, **more: Any) -> None:
        write_json(self.endpoint, {"url": url, "pid": os.getpid(), **more})

    def read_token(self) -> str:
        """The admin's token; a UserError says what is missing."""
        try:
            return self.token.read_text().strip()
        except FileNotFoundError:
            raise UserError(f"{self.token}: no such file", hint="is the instance up? `thebes up` creates it") from None
        except OSError as error:
            raise explain(error, self.token, "cannot be read") from error

    def live_attempts(self) -> Iterator[LivingAttempt]:
        """Incarnations whose supervisor lives, on all nodes; asks neither controller nor agents."""
        for lock in sorted(self.nodes.glob("*/attempts/*/lock")):
            with suppress(UserError):  # gone in the meantime, or just being made
                pid = holder_of(lock)
                if pid is not None:
                    job_id, _, incarnation = lock.parent.name.rpartition(".")
                    yield LivingAttempt(lock.parent, job_id, int(incarnation), lock.parent.parent.parent.name, pid)


@dataclass(frozen=True)
class LivingAttempt:
    """One incarnation of a job on one node, with the pid of its supervisor."""

    dir: Path
    job_id: str
    incarnation: int
    node: str
    pid: int

    @property
    def lives(self) -> bool:
        return holder_of(self.dir / "lock") is not None

    def command(self, line: str) -> bool:
        """Write one command to the supervisor; whether it could be reached."""
        try:
            fd = os.open(self.dir / "ctl", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            os.write(fd, line.encode() + b"\n")
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def state(self) -> dict[str, Any]:
        """What the supervisor has written last; empty if nothing can be read."""
        try:
            found = json.loads((self.dir / "state.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def holder_of(path: Path, *, within_s: float = 10.0) -> int | None:
    """The pid in a lock file, if a living process holds the lock.

    Between taking the lock and writing the pid lies a moment in which the file is empty; a busy machine can make it a
    long one.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise explain(error, path, "cannot be read") from error
    try:
        deadline = time.monotonic() + within_s
        while True:
            if _flock(fd, fcntl.LOCK_SH):
                return None
            text = os.pread(fd, 32, 0).strip()
            if text.isdigit():
                return int(text)
            if time.monotonic() > deadline:
                raise UserError(f"{path} is held by a process that has not written its pid into it")
            time.sleep(0.002)
    finally:
        os.close(fd)


def take(fd: int, *, wait_s: float = GOING_S) -> bool:
    """Lock an open file, unless somebody holds it for longer than `wait_s`. To look, as above, is not to hold."""
    deadline = time.monotonic() + wait_s
    while not _flock(fd, fcntl.LOCK_EX):
        looked_at = _flock(fd, fcntl.LOCK_SH)  # its holder does not share it
        if looked_at:
            fcntl.flock(fd, fcntl.LOCK_UN)
        if time.monotonic() >= deadline + (LOOK_S if looked_at else 0.0):
            return False
        time.sleep(0.01)
    return True


def _flock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_json(path: Path, value: Any, *, mode: int = 0o600) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n", mode=mode)


def write_text(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Replace a file durably: after a crash it is the old one or the new one, whole. UserError if it cannot be."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        draft.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise explain(error, path, "cannot be written") from error


def explain(error: OSError, path: Path, what: str) -> UserError:
    """An operating system's error as a sentence with something to do about it."""
    where = Path(error.filename) if isinstance(error.filename, str) else path
    reasons = {
        errno.EACCES: ("no permission", f"look at the rights of {where.parent}, or choose another folder with --dir"),
        errno.EPERM: ("no permission", "the folder must be your own: choose another one with --dir"),
        errno.EROFS: ("the file system is read-only", "choose another folder with --dir"),
        errno.ENOSPC: ("the disk is full", "free some space and try again"),
        errno.EDQUOT: ("your disk quota is used up", "free some space and try again"),
        errno.ENOTDIR: ("a part of the path is a file", "choose another folder with --dir"),
        errno.EEXIST: ("a part of the path is a file", "choose another folder with --dir"),
        errno.ENAMETOOLONG: ("the path is too long", "choose a shorter folder with --dir"),
        errno.ENOENT: ("no such file or folder", "is the instance up? `thebes status` tells"),
    }
    reason, hint = reasons.get(error.errno or 0, (error.strerror or str(error), ""))
    return UserError(f"{path} {what}: {reason}", hint=hint)


def stop_process(pid: int, lock: Path, *, patience_s: float) -> bool:
    """SIGTERM, then SIGKILL after `patience_s`, to the process that holds `lock`; whether it went by itself.

    The pid is pinned by a pidfd before the lock is looked at again, so that no other process with its number is hit.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if holder_of(lock) != pid:
            return True
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        if wait_gone(pidfd, patience_s):
            return True
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        wait_gone(pidfd, 5.0)
        return False
    except ProcessLookupError:
        return True
    finally:
        os.close(pidfd)


def wait_gone(pidfd: int, timeout_s: float) -> bool:
    """Whether the process has ended within the time; a zombie has."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


class EventLog:
    """A structured log: one JSON object per line, two files of `limit_bytes` at most. A full disk is no error."""

    def __init__(self, path: Path, *, limit_bytes: int = 8 << 20) -> None:
        self.path = path
        self.limit_bytes = limit_bytes
        self.fd = -1

    def write(self, event: str, **fields: Any) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        line = json.dumps({"time": stamp, "event": event, **fields}, default=str) + "\n"
        with suppress(OSError):
            self._ready()
            os.write(self.fd, line.encode())

    def _ready(self) -> None:
        if self.fd >= 0 and os.fstat(self.fd).st_size >= self.limit_bytes:
            self.close()
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        if self.fd < 0:
            self.fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
