"""`thebes backup` writes the store of a cluster into one file; `thebes restore` puts it back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from thebes.cli.live import Folder
from thebes.cli.screen import plural
from thebes.model.errors import UserError


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it; a file that is there is replaced.")],
    folder: Folder = None,
) -> None:
    """Write all that the cluster remembers into one file, also while it runs. Keep it safe: it holds environments."""
    from thebes.instance.wanted import shown_store
    from thebes.live.config import load
    from thebes.protocol.instance import Instance
    from thebes.store.backup import save

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
        bool, typer.Option("--force", help="Also into a store that is not empty, whose contents are then gone.")
    ] = False,
) -> None:
    """Put a backup into an empty store of either kind, for instance to move to PostgreSQL. Stop the cluster first."""
    from thebes.cli.instance import hide_password
    from thebes.instance.state import living_parts
    from thebes.instance.wanted import shown_store
    from thebes.live.config import load
    from thebes.protocol.instance import Instance
    from thebes.store.backup import restore as put_back
    from thebes.store.database import POSTGRES_SCHEMES

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
