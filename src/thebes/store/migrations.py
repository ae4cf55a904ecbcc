"""How a store gets its tables, and how an older store is upgraded.

The table `schema_version` holds one number. Each upgrade is a function that lifts it by one, in one transaction, after
a copy of the file was kept beside it (store.db.v1). A store of a newer Thebes is refused, because it would be misread.
Both databases have the same tables and the same upgrades.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import Connection, inspect, select

from thebes.model.errors import UserError
from thebes.store import schema
from thebes.store.database import Database, driver

Upgrade = Callable[[Connection], None]


def _add_leader(connection: Connection) -> None:
    """Version 2 adds the leader, the list of controllers, and how far each writer has come."""
    for table in (schema.leader, schema.controllers, schema.commits):
        table.create(connection, checkfirst=True)
    if connection.execute(select(schema.leader)).first() is None:
        connection.execute(schema.leader.insert(), schema.FIRST_LEADER)


def _new_formats(connection: Connection) -> None:
    """Version 3 says that the journal has entries and snapshots which version 0.1 does not know.

    The tables need nothing. But 0.1 would open the store, take the cluster over and die at the first such entry.
    """


# The first upgrade leads from version 1 to 2, and so on. New stores are made by schema.py, which is the newest version.
UPGRADES: tuple[Upgrade, ...] = (_add_leader, _new_formats)


def migrate(connection: Connection, database: Database, upgrades: Sequence[Upgrade] = UPGRADES) -> None:
    """Make or upgrade the tables; after that the store has version 1 + len(upgrades)."""
    newest = 1 + len(upgrades)
    found = version_of(connection, database, newest)
    if found is None:
        _in_transaction(connection, database, _create, newest)
        return
    if found < newest:
        database.keep_copy(connection, found)
    for version in range(found, newest):
        _in_transaction(connection, database, upgrades[version - 1], version + 1)


def version_of(connection: Connection, database: Database, newest: int) -> int | None:
    """The version of a store; None for an empty database, an error for one that is not ours or newer than `newest`."""
    tables = set(inspect(connection).get_table_names())
    if not tables:
        return None
    ours = {"schema_version", "jobs"} <= tables
    rows = connection.execute(select(schema.schema_version)).all() if ours else []
    if len(rows) != 1:
        raise database.foreign()
    found = int(rows[0].version)
    if found > newest:
        raise UserError(
            f"the store {database.label} was written by a newer Thebes (version {found} of the tables; this one knows "
            f"{newest})",
            hint=f"Upgrade Thebes, or {database.elsewhere}. The store was left as it is.",
        )
    return found


def _create(connection: Connection) -> None:
    if inspect(connection).get_table_names():
        return  # another process was faster, and this transaction sees what it made
    schema.metadata.create_all(connection)
    connection.execute(schema.schema_version.insert(), {"version": 0})
    connection.execute(schema.counters.insert(), {"name": "job", "value": 0})
    connection.execute(schema.leader.insert(), schema.FIRST_LEADER)


def _in_transaction(connection: Connection, database: Database, change: Upgrade, version: int) -> None:
    raw = driver(connection)
    database.begin_migration(connection)
    try:
        now = inspect(connection).has_table("schema_version") and connection.scalar(select(schema.schema_version))
        if not now or int(now) < version:  # another process may have been faster
            change(connection)
            connection.execute(schema.schema_version.update().values(version=version))
        raw.commit()
    except BaseException:
        raw.rollback()
        raise
