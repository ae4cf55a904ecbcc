"""Our own trace file: the columns of `TRACE_SCHEMA`, as CSV (plain or gzip) or Parquet, then any columns of the user's.

Only job_id, submit_time, duration and num_gpus must be there. A column that looks like a misspelt schema name is an
error, since the column it was meant to be would silently count as unknown; any other column is kept as it is.
"""

from __future__ import annotations

from difflib import get_close_matches

from thebes.model.errors import UserError
from thebes.model.trace import REQUIRED_COLUMNS, TRACE_SCHEMA
from thebes.trace.draft import Draft, draft_of_table
from thebes.trace.source import Source
from thebes.trace.table import Table, parse

NUMBERS = ("submit_time", "duration", "num_gpus")


def read(source: Source) -> Draft:
    table = parse(source)
    table.require(REQUIRED_COLUMNS, "a normalised trace")
    _refuse_misspelt(table)
    columns = {name: table.text(name) for name in TRACE_SCHEMA if table.has(name)}
    columns |= {name: table.number(name) for name in NUMBERS}
    if table.has("num_nodes"):
        columns["num_nodes"] = table.number("num_nodes")
    return draft_of_table(table, columns)


def _refuse_misspelt(table: Table) -> None:
    """Refuse misspelt columns. Only absent schema names are compared: beside `num_gpus`, `num_cpus` is no mistake."""
    absent = [name for name in TRACE_SCHEMA if not table.has(name)]
    for name in table.columns:
        plain = name.lower().replace(" ", "_").replace("-", "_")
        close = [] if name in TRACE_SCHEMA else get_close_matches(plain, absent, n=1, cutoff=0.8)
        if close:
            raise UserError(
                f"{table.source.at(None if table.source.is_parquet else 1, name)}: unknown column; "
                f"did you mean '{close[0]}'?",
                hint=f"Rename it to '{close[0]}', or to something less similar to keep it as a column of your own.",
            )
