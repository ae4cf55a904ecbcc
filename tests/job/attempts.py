"""A made-up attempt folder and the supervisor's part in it, so that scripts can be preempted without a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from kit.waiting import IMPORT_PATIENCE_S
from thebes.engine.door import free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "train"
STARTED: list[subprocess.Popen[str]] = []  # a test that fails leaves none of them behind: see conftest.py


def environment(**extra: str) -> dict[str, str]:
    """Ours, without what a cluster or a launcher would set."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("THEBES_") and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    }
    return {**ours, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **extra}


@dataclass
class Job:
    """A job over its incarnations: each gets a new attempt folder; checkpoints stay."""

    folder: Path
    incarnation: int = 0
    told: str = ""
    steps_told: list[int] = field(default_factory=list)

    @property
    def attempt(self) -> Path:
        return self.folder / f"attempt.{self.incarnation}"

    def next_attempt(self) -> None:
        self.incarnation += 1
        self.attempt.mkdir(parents=True)

    def env(self, **extra: str) -> dict[str, str]:
        ours = {
            "THEBES_ATTEMPT_DIR": str(self.attempt),
            "THEBES_CHECKPOINT_DIR": str(self.folder / "checkpoint"),
            "THEBES_RESUME": "1" if self.incarnation > 1 else "0",
            "THEBES_RESUME_FROM": self.told,
            "THEBES_GRACE_SECONDS": "30",
        }
        return environment(**{**ours, **extra})

    def start(self, *command: str | Path, **extra: str) -> subprocess.Popen[str]:
        """One rank, with its output in a pipe."""
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=self.env(**extra), cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        STARTED.append(process)
        return process

    def start_ranks(self, ranks: int, *command: str | Path) -> list[subprocess.Popen[str]]:
        port = str(free_port())
        return [
            self.start(
                *command, RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
                NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def run(self, *command: str | Path, **extra: str) -> str:
        """A run that nobody interrupts; its output."""
        process = self.start(*command, **extra)
        output, _ = process.communicate(timeout=IMPORT_PATIENCE_S)
        assert process.returncode == 0, output
        return output

    def notice(self, grace_s: float = 30.0) -> None:
        deadline_s = time.clock_gettime(time.CLOCK_BOOTTIME) + grace_s
        draft = self.attempt / "notice.tmp"
        draft.write_text(json.dumps({"deadline_s": deadline_s, "grace_s": grace_s}))
        draft.rename(self.attempt / "notice")

    def read(self, name: str) -> dict[str, float | str]:
        return json.loads((self.attempt / name).read_text())

    def has(self, name: str) -> bool:
        return (self.attempt / name).exists()

    def remember(self) -> int:
        """As the controller does: the last checkpoint told is where the next incarnation goes on."""
        entry = self.read("checkpoint.json")
        self.told = str(entry["path"])
        self.steps_told.append(int(entry["step"]))
        return int(entry["step"])
