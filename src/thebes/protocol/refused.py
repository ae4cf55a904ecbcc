"""The word for "no". It has a module of its own so that steps can load it (see `node/bare.py`)."""

from __future__ import annotations


class Refused(Exception):  # noqa: N818 - reads as what it says
    """The engine will not do it (an older incarnation, a mechanism that does not work here); the text says why."""
