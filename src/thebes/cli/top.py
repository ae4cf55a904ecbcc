"""`thebes top`: one screen with GPUs, who holds them, and the queue."""

from __future__ import annotations

from thebes.cli.live import Folder


def top(folder: Folder = None) -> None:
    """Show GPUs, who holds them, and the queue, live."""
