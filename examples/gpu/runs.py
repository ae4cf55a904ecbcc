"""Starts plain training processes and reads their progress from their log lines. Used by the scripts beside it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from thebes.live.packing import StepSample, Window, window

HERE = Path(__file__).parent
TRAIN = (sys.executable, str(HERE / "train_plain.py"))
LINE = re.compile(r"step (\d+) loss (\S+)")
FIRST_STEP_S = 180.0


@dataclass(frozen=True)
class Line:
    """One log line, and when it came."""

    time_s: float
    step: int
    loss: str  # as printed: compared exactly


class Run:
    """A training process under way."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.lines: list[Line] = []
        self.other: list[str] = []
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            command, env=os.environ | dict(env or {}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def step(self) -> int:
        return self.lines[-1].step if self.lines else 0

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            match = LINE.search(text)
            if match:
                self.lines.append(Line(time.monotonic(), int(match[1]), match[2]))
            else:
                self.other.append(text.rstrip())

    def wait_for(self, condition: Callable[[Run], bool], timeout_s: float = FIRST_STEP_S) -> None:
        """Until the condition holds; an error when the process ends before, or the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while not condition(self):
            if self.process.poll() is not None:
                tail = "\n".join(self.other[-15:])
                raise SystemExit(f"{self.name} ended with code {self.process.returncode}\n{tail}")
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{self.name}: nothing for {timeout_s:.0f} s (at step {self.step})")
            time.sleep(0.01)

    def first_step(self) -> float:
        """Waits for the first line; the seconds from the start of the process to it."""
        self.wait_for(lambda run: bool(run.lines))
        return self.lines[0].time_s - self.started_s

    def more_steps(self, timeout_s: float = 30.0) -> int:
        """Waits until it has made steps from now on; how many."""
        before = self.step
        self.wait_for(lambda run: run.step > before, timeout_s)
        return self.step - before

    def measure(self, from_s: float, to_s: float) -> Window:
        return window([StepSample(line.time_s, line.step) for line in list(self.lines)], from_s, to_s)

    def losses(self) -> dict[int, str]:
        return {line.step: line.loss for line in list(self.lines)}

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()


def train(name: str, *options: str, env: Mapping[str, str] | None = None) -> Run:
    return Run(name, (*TRAIN, *options), env)


def need_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("this example trains with PyTorch, and this Python has none: pip install torch")


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    gpu, driver, memory = subprocess.check_output(query, text=True).splitlines()[0].split(", ")
    torch = [TRAIN[0], "-c", "import torch; print(torch.__version__)"]
    meminfo = Path("/proc/meminfo").read_text().split()
    return {
        "gpu": gpu,
        "gpu_memory": memory,
        "driver": driver,
        "torch": subprocess.check_output(torch, text=True).strip(),
        "python": sys.version.split()[0],
        "kernel": os.uname().release,
        "cpus": str(os.cpu_count()),
        "host_memory_gib": f"{int(meminfo[1]) / (1 << 20):.0f}",
    }


def write(path: str | None, figures: object) -> None:
    if path:
        Path(path).write_text(json.dumps(figures, indent=2) + "\n")
        print(f"written: {path}")
