"""What a job of the fault tests must have written into its diary, given how it ended: see faulty_job.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.faulty_job import FAILS_WITH


@dataclass
class Known:
    """What the test knows of a job that was acknowledged."""

    key: str
    kind: str
    gpus: int
    steps: int
    cancelled: bool = False  # a cancel was acknowledged
    perhaps_cancelled: bool = False  # a cancel may have been done: no answer came


def check_job(known: Known, row: dict[str, Any], diary: Path) -> None:
    lines = [line.split() for line in diary.read_text().splitlines()] if diary.exists() else []
    told = f"{known} {row['state']} {row['reason']}: {lines[-12:]}"
    assert not [line for line in lines if line[0] == "DOUBLE"], f"two incarnations at once: {told}"
    starts = Counter((line[-2], line[-1]) for line in lines if line[0] == "start")
    assert all(count == 1 for count in starts.values()), f"an incarnation was started twice: {told}"
    if known.cancelled:
        assert row["state"] == "cancelled", told
    elif known.perhaps_cancelled and row["state"] == "cancelled":
        pass
    elif known.kind == "fails":
        assert (row["state"], row["exit_code"]) == ("failed", FAILS_WITH), told
        assert any(line[0] == "fail" for line in lines), told
    else:
        assert row["state"] == "completed", told
        # A rank may have reached its end when another one, or the supervisor, was killed before the result was written.
        last = str(max(int(line[-2]) for line in lines))
        began, reached = (
            {line[-1] for line in lines if line[0] == word and line[-2] == last} for word in ("start", "end")
        )
        assert began == reached, f"it did not reach its end: {told}"
    saved = 0
    for line in lines:  # what was saved is never done again
        if line[0] == "saved":
            saved = max(saved, int(line[1]))
        elif line[0] == "start" and known.kind in ("plain", "daemon", "chatty"):
            assert int(line[1]) >= saved, f"saved work was lost: {told}"
