"""How far a job travels: the functions and modules of ours that it passes through, simulated and live.

    python -m benchmarks.hops [--out FILE]

A profile hook in every process notes each function of the package when it is first called. One job is simulated under
`tiresias-l` on one node (uncompiled, so that compiled functions are seen as well), and one job is submitted to a live
cluster of one virtual GPU and waited for. Live, what an idle cluster calls by itself is taken off. Supervisors run
without the package and are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import thebes

PACKAGE = Path(thebes.__file__).parent
IDLE, AT_WORK = 1, 2  # what the cluster is doing: 0 is coming up, or going down

# Loaded by every Python process that finds it on its path. One byte of a shared file says what the cluster is doing.
HOOK = """
import mmap, os, sys, threading
folder, package = os.environ["HOPS_DIR"], os.environ["HOPS_PACKAGE"]
with open(os.path.join(folder, "stage"), "rb") as file:
    stage = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
seen = set()
def note(frame, event, arg):
    if event == "call":
        code, now = frame.f_code, stage[0]
        if now and (code, now) not in seen:
            seen.add((code, now))
            if code.co_filename.startswith(package):
                line = f"{now}\\t{code.co_filename[len(package) + 1:]}\\t{code.co_qualname}\\n".encode()
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                out = os.open(os.path.join(folder, f"calls-{os.getpid()}"), flags, 0o600)
                os.write(out, line)
                os.close(out)
sys.setprofile(note)
threading.setprofile(note)
"""

SIMULATED = """
import thebes
from thebes.model.trace import Trace
columns = {"job_id": ["a"], "submit_time": [0.0], "duration": [10.0], "num_gpus": [1.0]}
thebes.simulate(Trace.of("one", columns), "1x1", "tiresias-l")
stage(bytes([2]))
thebes.simulate(Trace.of("one", columns), "1x1", "tiresias-l")
"""


class Watched:
    """A folder in which every process that inherits `env` notes what it calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "stage").write_bytes(b"\0")
        (folder / "sitecustomize.py").write_text(HOOK)
        self.env = os.environ | {
            "HOPS_DIR": str(folder),
            "HOPS_PACKAGE": str(PACKAGE),
            "PYTHONPATH": f"{folder}:{PACKAGE.parent}",
        }

    def enter(self, stage: int) -> None:
        with (self.folder / "stage").open("r+b") as file:  # in place: the processes have it mapped
            file.write(bytes([stage]))

    def calls(self, stage: int) -> set[tuple[str, str]]:
        """(file, function) of everything called in this stage, comprehensions and the like left out."""
        found: set[tuple[str, str]] = set()
        for notes in self.folder.glob("calls-*"):
            for line in notes.read_text().splitlines():
                when, file, function = line.split("\t")
                if int(when) == stage and "<" not in function.rpartition(".")[2]:
                    found.add((file, function))
        return found


def simulated() -> set[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as name:
        watched = Watched(Path(name))
        told = f"stage = open({str(watched.folder / 'stage')!r}, 'r+b', buffering=0).write\n"
        env = watched.env | {"NUMBA_DISABLE_JIT": "1"}
        subprocess.run([sys.executable, "-c", told + SIMULATED], env=env, check=True)
        return watched.calls(AT_WORK)


def live() -> set[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as name:
        watched = Watched(Path(name))
        env = watched.env | {"THEBES_DIR": str(Path(name) / "cluster")}

        def run(*words: str) -> None:
            subprocess.run(
                [sys.executable, "-c", "from thebes.cli import main; main()", *words],
                env=env,
                check=True,
                stdout=subprocess.DEVNULL,
            )

        run("up", "--virtual-gpus", "1")
        try:
            time.sleep(5.0)
            watched.enter(IDLE)
            time.sleep(15.0)
            watched.enter(AT_WORK)
            run("submit", "--gpus", "1", "--", "sleep", "1")
            run("wait", "1")
            time.sleep(1.0)
            watched.enter(0)
        finally:
            run("down")
        return watched.calls(AT_WORK) - watched.calls(IDLE)


def table(calls: set[tuple[str, str]]) -> dict[str, list[str]]:
    """The functions by module."""
    return {file: sorted(f for where, f in calls if where == file) for file in sorted({file for file, _ in calls})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write every function, by module, as JSON")
    out = parser.parse_args().out
    found = {"simulated": simulated(), "live": live()}
    for world, calls in found.items():
        print(f"{world}: {len(calls)} functions in {len({file for file, _ in calls})} modules")
    if out is not None:
        out.write_text(json.dumps({world: table(calls) for world, calls in found.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
