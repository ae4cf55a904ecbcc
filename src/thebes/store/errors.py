"""Errors of the store that a person should read about. `thebes.store` exports them, too."""

# ruff: noqa: N818 - these names read as what they say

from __future__ import annotations

from thebes.model.errors import UserError


class StoreUnavailable(UserError):
    """The store cannot be written (or read) now, and nothing of the request was kept."""

    status = 503


class StoreConflict(UserError):
    """The request contradicts what the store holds already."""

    status = 409


class StorageFault(Exception):
    """The whole transaction is lost; the message is about disk, file, memory or server."""

    def __init__(self, told: str, *, in_doubt: bool = False) -> None:
        super().__init__(told)
        self.in_doubt = in_doubt  # the answer to a commit was lost, so that it may have been made or not


class Deposed(StorageFault):
    """Another controller leads, or the database is not the same as before: this process must not write any more."""
