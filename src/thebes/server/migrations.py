"""How a store gets its tables and how an older one is brought up to date.

The table `schema_version` holds one number. Each upgrade is a function that lifts it by one, in one transaction, after
a copy of the file was kept beside it (store.db.v1). A store of a newer Thebes is refused: it would be misread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sqlalchemy import Connection, inspect, select

from thebes.model.errors import UserError
from thebes.server import schema, sqlite

Upgrade = Callable[[Connection], None]

# The first brings version 1 to 2, and so on. New stores are made from schema.py, which is always the newest version.
UPGRADES: tuple[Upgrade, ...] = ()


def migrate(connection: Connection, path: Path, upgrades: Sequence[Upgrade] = UPGRADES) -> None:
    """Make or upgrade the tables; afterwards the store has version 1 + len(upgrades)."""
    newest = 1 + len(upgrades)
    found = version_of(connection, path, newest)
    if found is None:
        _in_transaction(connection, _create, newest)
        return
    if found < newest:
        sqlite.keep_copy(connection, path.with_name(f"{path.name}.v{found}"))
    for version in range(found, newest):
        _in_transaction(connection, upgrades[version - 1], version + 1)


def version_of(connection: Connection, path: Path, newest: int) -> int | None:
    """None for an empty database; an error for one that is not ours or newer than `newest`."""
    tables = set(inspect(connection).get_table_names())
    if not tables:
        return None
    ours = {"schema_version", "jobs"} <= tables
    rows = connection.execute(select(schema.schema_version)).all() if ours else []
    if len(rows) != 1:
        raise UserError(
            f"{path} is not a Thebes store: it is a SQLite file of another program",
            hint="It was left as it is. Move it away, or choose another folder (--dir).",
        )
    found = int(rows[0].version)
    if found > newest:
        raise UserError(
            f"the store {path} was written by a newer Thebes (version {found} of the tables; this one knows {newest})",
            hint="Upgrade Thebes, or choose another folder (--dir). The store was left as it is.",
        )
    return found


def _create(connection: Connection) -> None:
    if inspect(connection).get_table_names():
        return  # another process was faster; the transaction sees what it made
    schema.metadata.create_all(connection)
    connection.execute(schema.schema_version.insert(), {"version": 0})
    connection.execute(schema.counters.insert(), {"name": "job", "value": 0})


def _in_transaction(connection: Connection, change: Upgrade, version: int) -> None:
    raw = sqlite.driver(connection)
    sqlite.begin_write(raw)
    try:
        change(connection)
        connection.execute(schema.schema_version.update().values(version=version))
        raw.commit()
    except BaseException:
        raw.rollback()
        raise
