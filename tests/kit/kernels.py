"""Compiles what the tests run before they start: once per version of the sources, whoever comes first.

The process that hands tests out to workers calls `compile_ahead`, as does `make kernels`; whoever comes second waits
for the first. So no two workers compile the same function.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys

import numba

from thebes.model.compiled import cache_folder


def compile_ahead() -> None:
    """Return when everything that ships is compiled."""
    folder = cache_folder()
    done = folder / "compiled-for-tests"
    if numba.config.DISABLE_JIT or done.exists():
        return
    with (folder / "compiling-for-tests").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            subprocess.run([sys.executable, "-m", "thebes.sim.warmup", "--all"], check=True)
            done.touch()


if __name__ == "__main__":
    compile_ahead()
