"""What the actor of a Ray node does: it keeps an ordinary agent running there, and tells it what the head says.

The agent is not a child of Ray. Measured with Ray 2.60, of processes that a worker has started:

    ended by                      same process group   own session   own session, orphan (what we do)
    kill -9 of the worker         dies                 lives         lives
    kill -9 of the raylet         dies                 dies          lives
    ray.kill(actor), exit         dies                 dies          lives

So a shell starts it in a session of its own and ends at once. Only the deprecated setting
RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper reaches such a process; `thebes engine check ray` warns.

The actor may die at any time: the next one reads `spec.json` in the node's folder, finds the agent by its lock, and
goes on. Every sixth of the lease it asks the head whether this node is alive; the time at which it asked goes into the
file `head`, which renews the agent's lease.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from thebes.model.errors import UserError
from thebes.node import gpus as gpu_discovery
from thebes.protocol.clock import boot_s
from thebes.protocol.contract import Gpu
from thebes.protocol.instance import EventLog, Instance, stop_process, write_json

LOOK_EVERY_S = 0.5
AGAIN_FIRST_S, AGAIN_LAST_S = 0.5, 10.0
STOPS_WITHIN_S = 10.0
STARTS_WITHIN_S = 20.0
START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from thebes.node.agent import main; sys.exit(main())"
SUBREAPER = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"


class NodeKeeper:
    """The keeper of one node's agent. `alive` asks the head whether this node is one of its own; it may block. `done`
    ends the actor, because no controller wants it.
    """

    def __init__(
        self, folder: Path, spec: Mapping[str, Any], alive: Callable[[], bool], done: Callable[[], None]
    ) -> None:
        self.instance = Instance(folder)
        for path in (self.instance.run, self.instance.log, self.instance.nodes):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.node: str = spec["node"]
        self.spec = dict(spec)
        self.alive, self.done = alive, done
        self.gone = self.instance.run / "gone"  # left by an agent that went because nobody needs it
        self.head_file = self.instance.run / "head"
        self.log = EventLog(self.instance.log / "actor.jsonl")
        self.trouble = ""
        self.started_s = 0.0  # when an agent was last started, monotonic
        self.wait_s = AGAIN_FIRST_S
        self.ending = threading.Event()
        self.guard = threading.Lock()
        self._spawn(self._keep)
        self._spawn(self._ask_the_head)

    def _spawn(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, daemon=True, name=work.__name__).start()

    # Words of the engine ---------------------------------------------------------------------------------------------

    def configure(self, spec: Mapping[str, Any]) -> None:
        """Of homes and lease the agent hears from the controller itself; another number of GPUs needs a new agent."""
        with self.guard:
            self.spec = dict(spec)
            self.gone.unlink(missing_ok=True)

    def look(self) -> dict[str, Any]:
        return {
            "pid": self.instance.holder_pid(f"agent-{self.node}"),
            "folder": str(self.instance.dir),
            "trouble": self.trouble,
            "python": sys.version.split()[0],
            "subreaper": os.environ.get(SUBREAPER, "0").lower() in ("1", "true"),
        }

    def retire(self) -> None:
        """The cluster is taken down: the agent goes, unless it has jobs."""
        self.ending.set()
        with self.guard:
            pid = self.instance.holder_pid(f"agent-{self.node}")
            if pid is not None and not any(self.instance.live_attempts()):
                stop_process(pid, self.instance.lock_path(f"agent-{self.node}"), patience_s=STOPS_WITHIN_S)
        self.log.write("retired", node=self.node, pid=pid)

    # The agent -------------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self.ending.is_set():
            try:
                with self.guard:
                    self._look_after()
                self.trouble = ""
            except (OSError, UserError, subprocess.SubprocessError) as error:
                if str(error) != self.trouble:
                    self.log.write("no agent", node=self.node, error=str(error))
                self.trouble = str(error)
            self.ending.wait(LOOK_EVERY_S)

    def _look_after(self) -> None:
        """One look: is there an agent, and is it the one that is wanted?"""
        if self.ending.is_set():
            return
        pid = self.instance.holder_pid(f"agent-{self.node}")
        wanted = {name: self.spec[name] for name in ("code", "gpus", "virtual", "python")}
        if pid is not None and self._running() == wanted:
            if time.monotonic() - self.started_s > STARTS_WITHIN_S:
                self.wait_s = AGAIN_FIRST_S
            return
        if pid is None and self.gone.exists():
            self.log.write("nobody needs us", node=self.node)
            self.ending.set()
            self.done()
            return
        if pid is not None:
            self.log.write("replaced", node=self.node, pid=pid)
            stop_process(pid, self.instance.lock_path(f"agent-{self.node}"), patience_s=STOPS_WITHIN_S)
        elif time.monotonic() - self.started_s < self.wait_s:
            return
        self.wait_s = min(AGAIN_LAST_S, 2 * self.wait_s) if self.started_s else AGAIN_FIRST_S
        self.started_s = time.monotonic()
        self._start()
        write_json(self.instance.run / "running.json", wanted)

    def _running(self) -> dict[str, Any]:
        try:
            return json.loads((self.instance.run / "running.json").read_bytes())
        except (OSError, ValueError):
            return {}

    def _start(self) -> None:
        spec = self.spec
        write_json(
            self.instance.config,
            {"version": 1, "nodes": [{"name": self.node, "gpus": spec["gpus"], "virtual": spec["virtual"]}]},
        )
        env = outside_env()
        if not spec["virtual"]:
            self._number_gpus(env.get("CUDA_VISIBLE_DEVICES"))
        command = [
            *(spec["python"] or sys.executable, "-c", START, spec["path"], str(self.instance.dir), self.node),
            *("--homes", ",".join(spec["homes"]), "--lease", str(spec["lease_s"])),
            *("--head-file", str(self.head_file), "--alone", str(spec["alone_s"])),
        ]
        errors = self.instance.log / f"agent-{self.node}.err"
        with errors.open("ab") as file:
            # The shell ends at once: the agent is an orphan in a session that Ray knows nothing of.
            done = subprocess.run(
                ["/bin/sh", "-c", '"$@" >&2 & echo $!', "sh", *command],
                env={**env, "THEBES_HOME_KEY": spec["key"]},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
                cwd="/",
                timeout=STARTS_WITHIN_S,
                check=True,
            )
        pid = int(done.stdout.split()[0])
        self.log.write("started an agent", node=self.node, pid=pid)
        deadline = time.monotonic() + STARTS_WITHIN_S
        while self.instance.holder_pid(f"agent-{self.node}") is None:
            if not Path(f"/proc/{pid}").exists() or time.monotonic() > deadline:
                said = errors.read_text(errors="replace").strip().splitlines()
                raise OSError(f"the agent does not start: {said[-1] if said else 'it says nothing'}")
            time.sleep(0.02)

    def _number_gpus(self, visible: str | None) -> None:
        """Of a node that was started with some of the machine's GPUs only, those; once, for numbers must stay."""
        path = self.instance.nodes / self.node / "gpus.json"
        if visible is None or path.exists():
            return
        with suppress(UserError):
            found = visible_gpus(gpu_discovery.discover(), visible)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(path, [asdict(gpu) for gpu in found])

    # The head --------------------------------------------------------------------------------------------------------

    def _ask_the_head(self) -> None:
        while not self.ending.is_set():
            asked_s = boot_s()
            try:
                if self.alive():
                    draft = self.head_file.with_suffix(".new")
                    draft.write_text(f"{asked_s}\n")
                    draft.replace(self.head_file)
            except Exception as error:  # Ray has many; none of them is a word from the head
                self.log.write("the head does not answer", node=self.node, error=str(error)[:200])
            self.ending.wait(max(0.1, self.spec["lease_s"] / 6 - (boot_s() - asked_s)))


def visible_gpus(found: tuple[Gpu, ...], visible: str) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES names, by number or by the beginning of their UUID, in its order."""
    named: list[Gpu] = []
    for word in visible.split(","):
        word = word.strip()
        matches = [
            gpu for gpu in found if (word.isdigit() and gpu.index == int(word)) or (word and gpu.uuid.startswith(word))
        ]
        if not matches:
            break
        named.append(matches[0])
    return [replace(gpu, index=index) for index, gpu in enumerate(named)]


def outside_env() -> dict[str, str]:
    """The environment that Ray was started with on this node: what Ray sets for its workers is not for jobs."""
    raylet = os.environ.get("RAY_RAYLET_PID") or str(os.getppid())
    try:
        data = Path(f"/proc/{raylet}/environ").read_bytes()
        found = dict(entry.split("=", 1) for entry in os.fsdecode(data).split("\0") if "=" in entry)
    except (OSError, ValueError):
        found = {}
    if not found:
        found = {
            name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
        }
    return {name: value for name, value in found.items() if not name.startswith("RAY_") or name == "RAY_ADDRESS"}
