"""`thebes backup` and `thebes restore`: the store of a cluster as one file, and back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from thebes.cli.live import Folder
from thebes.cli.screen import plural
from thebes.model.errors import UserError


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it; one that is there is replaced.")],
    folder: Folder = None,
) -> None:
    """Write all that the cluster remembers into one file, also while it runs. Keep it safe: it holds environments."""
    from thebes.node.instance import Instance
    from thebes.server.backup import save
    from thebes.server.config import load
    from thebes.server.lifecycle import shown_store

    instance = Instance.at(folder)
    store = load(instance.config).store
    size = save(store or instance.store, file.absolute())
    print(f"backup of {shown_store(store) or instance.dir} written: {file}, {size / (1 << 20):.1f} MiB")


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `thebes backup` has written.")],
    folder: Folder = None,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Into this database (postgresql://…), not into the folder.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also into a store that is not empty: that is gone then.")
    ] = False,
) -> None:
    """Put a backup into an empty store, of either kind: so a cluster moves to PostgreSQL. Nothing may run meanwhile."""
    from thebes.cli.instance import hide_password
    from thebes.node.instance import Instance
    from thebes.server.backup import restore as put_back
    from thebes.server.config import load
    from thebes.server.database import POSTGRES_SCHEMES
    from thebes.server.lifecycle import living_parts, shown_store

    if store is not None:
        hide_password(store)
        if not store.startswith(POSTGRES_SCHEMES):
            raise UserError(
                "--store: this is not an address of a PostgreSQL database", hint="as in postgresql://HOST/DB"
            )
    store = store or (os.environ.get("THEBES_STORE") or None if folder is None else None)
    instance = Instance.at(folder)
    if store is None:
        instance.create()
        if living_parts(instance):
            raise UserError(f"the cluster in {instance.dir} runs", hint="`thebes down --keep-jobs` first: jobs go on")
        store = load(instance.config).store if instance.exists else ""
    jobs = put_back(file, store or instance.store, force=force)
    print(f"restored into {shown_store(store) or instance.dir}: {plural(jobs, 'job')}. `thebes up` goes on from there.")
