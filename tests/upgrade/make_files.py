"""How `data/` was made: run with the Python of a checkout of the old version, `python make_files.py FOLDER DATA`.

It starts two real clusters of virtual GPUs, brings their jobs into every state that a job can be in, kills every
process at once as a power cut would, and packs what is left of the two folders. The tests do not run it: they read what
it made.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thebes.client import Client

# The first rank keeps a diary and a count of its steps in its checkpoint folder, holds a lock there while it lives, and
# goes on until the cluster's folder holds a file `finish`; other ranks wait for that. It takes part in the handshake by
# hand, so it needs no interpreter.
JOB = r"""
mkdir -p "$THEBES_CHECKPOINT_DIR" && cd "$THEBES_CHECKPOINT_DIR" || exit 9
if [ "$RANK" != 0 ]; then
  while [ ! -e ../../../finish ]; do
    [ -e "$THEBES_ATTEMPT_DIR/notice" ] && exit 85
    sleep 0.1
  done
  exit 0
fi
exec 9>lock
flock -n 9 || { echo "twice $THEBES_INCARNATION" >> diary; exit 9; }
echo "start $THEBES_INCARNATION" >> diary
step=$(cat step 2>/dev/null || echo 0)
while [ ! -e ../../../finish ]; do
  step=$((step + 1)); echo "step $step"
  echo $step > step.new && mv step.new step
  if [ -e "$THEBES_ATTEMPT_DIR/notice" ]; then
    echo "saved $step" >> diary
    printf '{"step": %d, "path": "%s", "at_s": %s}' $step "$PWD/step" "$(cut -d' ' -f1 /proc/uptime)" > told.new
    mv told.new "$THEBES_ATTEMPT_DIR/checkpoint.json"
    exit 85
  fi
  sleep 0.1
done
echo "end $step" >> diary
"""


class OldCluster:
    """A cluster of the version whose Python runs this."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        thebes = Path(sys.executable).with_name("thebes")
        subprocess.run([thebes, "up", "--dir", folder, "--grace", "4", *options], check=True)
        self.client = Client(dir=folder)

    def submit(self, gpus: int = 1, **fields: Any) -> str:
        spec = {"command": ["/bin/sh", "-c", JOB], "workdir": "/", "gpus": gpus, "env": {"PATH": "/usr/bin:/bin"}}
        if gpus > 1:
            spec["ranks_per_node"] = 1
        return str(self.client.submit_spec(spec | fields))

    def until(self, what: str, look: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not look():
            if time.monotonic() > deadline:
                raise SystemExit(f"waited {timeout_s:g} s in vain for: {what}; {self.states()}")
            time.sleep(0.1)
        print(what, self.states(), flush=True)

    def states(self) -> dict[str, str]:
        return {job["id"]: job["state"] for job in self.client.jobs()}

    def until_state(self, state: str, *jobs: str) -> None:
        self.until(f"{jobs} {state}", lambda: all(self.states()[job] == state for job in jobs))

    def kinds(self) -> set[str]:
        return {event["kind"] for event in self.client.events(limit=1000)}

    def processes(self) -> list[int]:
        """All that name the folder in their command line or environment; and this one is not among them."""
        found, mark = [], str(self.folder).encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if mark in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def kill_controller(self) -> None:
        pid = int((self.folder / "run" / "controller.lock").read_text())
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
        self.until("a new controller", lambda: bool(self.client.status()))

    def crash(self) -> None:
        """All at once: each is stopped first, so that none sees another one die."""
        pids = self.processes()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
        time.sleep(1.0)
        if left := self.processes():
            raise SystemExit(f"still alive: {left}")

    def keep(self, target: Path) -> None:
        """Without logs, pipes, sockets and compiled code: no process is left that they could belong to."""

        def chosen(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
            if "/log/" in info.name or info.name.endswith(".pyc") or not (info.isfile() or info.isdir()):
                return None
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            return info

        with tarfile.open(target, "w:xz") as archive:
            archive.add(self.folder, arcname="instance", filter=chosen)
        print(target, target.stat().st_size, "bytes", flush=True)


def tiresias(folder: Path, target: Path) -> None:
    settings = ("--set", "queue_limits=20,100")
    cluster = OldCluster(folder, "--virtual-gpus", "4", "--packing", "--policy", "tiresias-l", *settings)
    packs = {"pack": True, "progress_pattern": r"step (\d+)"}
    host, guest = cluster.submit(**packs), cluster.submit(**packs)
    frozen = cluster.submit(2, mechanism="freeze")
    cluster.client.put_tenant("vision", gpu_quota=2, open=True)
    failed = cluster.submit(command=["/bin/false"])
    cluster.until_state("failed", failed)
    cluster.until_state("running", host, guest, frozen)
    time.sleep(24)  # all three are in the second queue now, and the rates of the first two are known
    cluster.submit(2)  # takes the place of the frozen one
    cluster.until_state("suspended", frozen)
    cluster.kill_controller()
    array = cluster.client.submit_spec(
        {
            "command": ["/bin/sh", "-c", JOB],
            "workdir": "/",
            "gpus": 1,
            "env": {"PATH": "/usr/bin:/bin"},
            "array": [0, 1, 2],
            "array_limit": 1,
        }
    )
    cluster.submit(2)  # with the array it leaves one GPU to the first two, which allow packing
    cluster.until("the array has begun", lambda: "running" in cluster.states().values() and bool(array))
    cluster.until("two jobs share a GPU", lambda: "packed" in cluster.kinds(), 40.0)
    cluster.submit(hold=True, tenant="vision")
    cluster.submit(after=[cluster.submit(4)])
    cluster.client.cancel(cluster.submit(4))
    time.sleep(2)
    print(cluster.states(), flush=True)
    cluster.crash()
    cluster.keep(target)


def dally(folder: Path, target: Path) -> None:
    settings = ("--set", "lease_s=5")
    cluster = OldCluster(folder, "--virtual-gpus", "2", "--nodes", "2", "--policy", "dally", *settings)
    cluster.submit(2, model="VGG19")
    cluster.submit(1)
    cluster.submit(2, mechanism="freeze", model="ResNet50")
    time.sleep(8)
    cluster.submit(1)
    cluster.submit(4, model="BERT")
    time.sleep(14)
    cluster.kill_controller()
    cluster.submit(1)
    time.sleep(7)
    print(cluster.states(), sorted(cluster.kinds()), flush=True)
    cluster.crash()
    cluster.keep(target)


def main(folder: str, data: str) -> None:
    tiresias(Path(folder) / "tiresias-l", Path(data) / "0.1-tiresias-l.tar.xz")
    dally(Path(folder) / "dally", Path(data) / "0.1-dally.tar.xz")


if __name__ == "__main__":
    main(*sys.argv[1:])
