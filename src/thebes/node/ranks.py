"""Starting the ranks of a job: fork, exec, and what to do about it when that fails."""

# pathlib and contextlib would be loaded for these alone:
# ruff: noqa: PTH110, PTH118, SIM105
from __future__ import annotations

import errno
import os
from _signal import (  # pyright: ignore[reportMissingImports]
    SIG_DFL,
    SIG_SETMASK,
    SIGCHLD,
    SIGHUP,
    SIGINT,
    SIGIO,
    SIGKILL,
    SIGPIPE,
    SIGTERM,
    SIGXFSZ,
    pthread_sigmask,
    signal,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PR_SET_PDEATHSIG = 1


class NotStarted(Exception):  # noqa: N818 - reads as what it says
    """A rank could not be started; the text says what to do."""


def start_rank(libc: Any, launch: dict[str, Any], env: dict[str, str], group: int, log_path: str) -> int:
    """Fork and exec one rank; its pid. The exec has happened when this returns."""
    parent = os.getpid()
    told, tell = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(told)
        os.close(tell)
        raise NotStarted(explain("fork", error.errno or 0, launch, log_path)) from None
    if pid == 0:
        stage, number = "exec", 0
        try:
            os.setpgid(0, group)
            libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(127)
            for one in (SIGPIPE, SIGXFSZ, SIGCHLD, SIGIO, SIGHUP, SIGINT, SIGTERM):
                signal(one, SIG_DFL)
            pthread_sigmask(SIG_SETMASK, ())
            stage = "log"
            log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            os.dup2(null, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            stage = "chdir"
            os.chdir(launch["workdir"])
            stage = "exec"
            number = execute(launch["command"], env)
        except OSError as error:
            number = error.errno
        except BaseException:
            number = errno.EINVAL
        os.write(tell, b"%s %d" % (stage.encode(), number))
        os._exit(127)
    os.close(tell)
    try:
        os.setpgid(pid, group or pid)  # both sides do it, so that neither has to wait
    except OSError:
        pass
    answer = os.read(told, 100)
    os.close(told)
    if answer:
        stage, number = answer.decode().split()
        raise NotStarted(explain(stage, int(number), launch, log_path))
    return pid


def execute(command: list[str], env: dict[str, str]) -> int:
    """Become the program, looked for in the job's own PATH; the error number if that cannot be.

    os.execvpe does the same after importing `warnings`, which takes longer than all the rest.
    """
    program = command[0]
    folders = [""] if "/" in program else env.get("PATH", os.defpath).split(":")
    worst = errno.ENOENT
    for folder in folders:
        try:
            os.execve(os.path.join(folder, program), command, env)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                worst = error.errno or worst
    return worst


def explain(stage: str, number: int, launch: dict[str, Any], log_path: str) -> str:
    """What went wrong and what to do about it."""
    reason = os.strerror(number)
    program, workdir, node = launch["command"][0], launch["workdir"], launch["node"]
    if stage == "chdir":
        what = f"the work directory {workdir} cannot be entered on node {node} ({reason}): "
        if number == errno.ENOENT:
            return what + "create it, or submit with another --workdir"
        if number == errno.ENOTDIR:
            return what + "name a directory with --workdir"
        return what + "the user who runs Thebes needs the right to enter it"
    if stage == "log":
        return f"the log {log_path} cannot be written ({reason}): free space on node {node} and requeue the job"
    if stage == "fork" or number in (errno.EAGAIN, errno.ENOMEM):
        return f"node {node} has no room for another process ({reason}): look at `ulimit -u` and at its memory"
    if number == errno.ENOENT and "/" in program and os.path.exists(os.path.join(workdir, program)):
        return f"'{program}' names an interpreter in its first line that node {node} does not have: correct it"
    if number in (errno.ENOENT, errno.ENOTDIR):
        where = "does not exist" if "/" in program else "was not found in PATH"
        return f"the program '{program}' {where} on node {node}: give its full path, or set PATH with --env"
    if number == errno.EACCES:
        return f"'{program}' may not be executed ({reason}): try `chmod +x`, or start it with its interpreter"
    if number == errno.ENOEXEC:
        return f"'{program}' is not a program: begin it with a line like #!/bin/bash, or start it with its interpreter"
    if number == errno.E2BIG:
        return f"command and environment of '{program}' are too long together: put values into a file"
    return f"'{program}' cannot be started on node {node}: {reason}"
