"""Standard Workload Format of the Parallel Workloads Archive (Feitelson et al.): 18 fields per line, `;` comments.

Fields are separated by spaces; -1 means unknown. The format knows processors, not GPUs: num_gpus is the number of
requested processors (field 8), or of allocated ones (field 5) where the request is unknown. The user can choose with
`--gpus-column allocated_processors`. Times are seconds from the start of the log (header UnixStartTime).
"""

from __future__ import annotations

import polars as pl

from thebes.model.errors import UserError
from thebes.trace.draft import Draft
from thebes.trace.source import Source, refuse_huge_lines

FIELDS = (
    "job_number",
    "submit_time",
    "wait_time",
    "run_time",
    "allocated_processors",
    "average_cpu_time",
    "used_memory_kib",
    "requested_processors",
    "requested_time",
    "requested_memory_kib",
    "status_code",
    "user_id",
    "group_id",
    "executable",
    "queue",
    "partition",
    "preceding_job",
    "think_time",
)
STATUS = {0: "FAILED", 1: "COMPLETED", 2: "PARTIAL", 3: "PARTIAL_COMPLETED", 4: "PARTIAL_FAILED", 5: "CANCELLED"}
CALLED = {
    "job_id": "job_number",
    "duration": "run_time",
    "num_gpus": "requested_processors",
    "user": "user_id",
    "vc": "queue",
}
USED = {"job_number", "submit_time", "run_time", "status_code", "user_id", "queue"}
NOTE = "SWF counts processors: each requested processor is taken as one GPU."


def looks_like(source: Source) -> bool:
    line = next((text for text in source.data[:65536].decode("utf-8", "replace").splitlines() if _holds_job(text)), "")
    if not line:
        return source.first_line.startswith(";")
    cells = line.split()
    return len(cells) == len(FIELDS) and all(map(_is_number, cells))


def read(source: Source) -> Draft:
    refuse_huge_lines(source)
    lines, rows = _rows(source)
    frame = pl.DataFrame(rows, schema=dict.fromkeys(FIELDS, pl.Float64), orient="row")
    known = frame.select(pl.when(pl.all() != -1).then(pl.all()))
    requested, allocated = known["requested_processors"], known["allocated_processors"]
    columns = {
        "job_id": _name(known["job_number"]),
        "submit_time": frame["submit_time"],
        "duration": known["run_time"],
        "num_gpus": requested.zip_with(requested.is_not_null(), allocated),
        "user": _name(known["user_id"]),
        "vc": _name(known["queue"]),
        "status": known["status_code"].cast(pl.Int64).replace_strict(STATUS, default=None, return_dtype=pl.String),
    }
    extras = {name: known[name] for name in FIELDS if name not in USED}
    return Draft(source, columns, extras, lambda row: f"line {lines[row]}", CALLED, lenient=True, notes=(NOTE,))


def _rows(source: Source) -> tuple[list[int], list[list[float]]]:
    lines: list[int] = []
    rows: list[list[float]] = []
    for place, line in enumerate(source.data.decode("utf-8", "replace").split("\n"), 1):
        if not _holds_job(line):
            continue
        cells = line.split()
        if len(cells) != len(FIELDS):
            raise UserError(
                f"{source.at(place)}: {len(cells)} fields; an SWF line has 18.", hint="Write -1 for what is unknown."
            )
        lines.append(place)
        rows.append([_number(source, place, name, cell) for name, cell in zip(FIELDS, cells, strict=True)])
    if not rows:
        raise UserError(f"{source.name}: only comments, no job.", hint="Check how the file was exported.")
    return lines, rows


def _holds_job(line: str) -> bool:
    text = line.strip()
    return bool(text) and not text.startswith(";")


def _number(source: Source, line: int, name: str, cell: str) -> float:
    if not _is_number(cell):
        raise UserError(
            f"{source.at(line, name)}: '{cell[:40]}' is not a number.", hint="Write -1 for what is unknown."
        )
    return float(cell)


def _is_number(cell: str) -> bool:
    try:
        value = float(cell)
    except ValueError:
        return False
    return abs(value) < 2**63


def _name(numbers: pl.Series) -> pl.Series:
    return numbers.cast(pl.Int64, strict=False).cast(pl.String)
