"""The nursery starts supervisors quickly: one process that has loaded all they need forks them on demand.

It belongs to one agent and ends with it; the supervisors it has forked go on.
"""

from __future__ import annotations

import os
import py_compile
import resource
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from thebes.node import bare

NURSERY_S = 3.0  # it answers in 2 ms unless it hangs
NEW_NURSERY_S = 20.0  # it must start first, perhaps on a machine that can hardly breathe


class Nursery:
    """The process and how to ask it. Used by one thread at a time."""

    def __init__(self, folder: Path) -> None:
        try:
            self.script = bare.install(bare.SUPERVISOR_FILES, folder)
        except (OSError, py_compile.PyCompileError):
            self.script = bare.PACKAGE / f"{bare.SUPERVISOR}.py"
        self.limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(self.script), "--nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"LC_ALL": "C.UTF-8"},
            cwd="/",
            bufsize=0,
        )
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, self.limits)  # jobs get what the agent was given
        return process

    def spawn(self, attempt: Path) -> int:
        """A supervisor for this attempt; its pid. A nursery that was killed is replaced."""
        for patience_s in (NURSERY_S, NEW_NURSERY_S):
            with suppress(BrokenPipeError):
                self.process.stdin.write(os.fsencode(attempt) + b"\0")  # type: ignore[union-attr]
                ready, _, _ = select.select([self.process.stdout], [], [], patience_s)  # type: ignore[list-item]
                answer = self.process.stdout.readline() if ready else b""  # type: ignore[union-attr]
                if answer:
                    return int(answer)
            self.process.kill()
            self.process.wait()
            self.process = self._start()
        raise OSError("no supervisor could be started")

    def close(self) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
