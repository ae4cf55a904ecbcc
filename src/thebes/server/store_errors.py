"""What can go wrong with the store in a way that a person should read about. Re-exported by `thebes.server.store`."""

# ruff: noqa: N818 - these names read as what they say

from __future__ import annotations

from thebes.model.errors import UserError


class StoreUnavailable(UserError):
    """The store cannot be written (or read) now, and nothing of the request was kept."""

    status = 503


class StoreConflict(UserError):
    """The request contradicts what the store holds already."""

    status = 409
