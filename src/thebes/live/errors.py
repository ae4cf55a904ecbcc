"""Errors that travel over HTTP: a UserError with a status, and how every error becomes one readable answer.

Any `UserError` may be raised anywhere below the API; one without a status of its own is answered with 400. The body is
always {"error": message, "hint": hint}. A traceback never leaves the server.
"""

# ruff: noqa: N818 - these names read as what they say

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from thebes.model.errors import UserError, nearest


class HttpError(UserError):
    """A UserError that knows its HTTP status."""

    status: ClassVar[int] = 400


class Unauthorised(HttpError):
    """No token, or one that is not (or no longer) good."""

    status = 401


class Forbidden(HttpError):
    """The asker is known, and may not do this."""

    status = 403


class NotFound(HttpError):
    """There is no such thing, or the asker may not know that there is."""

    status = 404


class Conflict(HttpError):
    """The thing is in a state in which this cannot be done."""

    status = 409


class TooLarge(HttpError):
    """The body is larger than the limit."""

    status = 413


class Invalid(HttpError):
    """The request was understood, but what it says is not valid."""

    status = 422


class TooMany(HttpError):
    """The requests come faster than the limit allows; `retry_after_s` says when to come back."""

    status = 429

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class Unavailable(HttpError):
    """It is not possible now, because a node or the store cannot be reached. The same request may work later."""

    status = 503


def status_of(error: UserError) -> int:
    """The HTTP status of any UserError."""
    return int(getattr(error, "status", 400))


def headers_of(error: UserError) -> dict[str, str]:
    """The headers that belong to an error."""
    if isinstance(error, Unauthorised):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, TooMany):
        return {"retry-after": f"{max(1, round(error.retry_after_s))}"}
    return {}


def error_body(message: str, hint: str = "") -> bytes:
    """The body of an error, which always has the same form."""
    return json.dumps({"error": message, "hint": hint}).encode("utf-8", "backslashreplace")


def invalid(faults: Sequence[Mapping[str, Any]], *, known: Sequence[str] = (), what: str = "the request") -> Invalid:
    """One message for what pydantic found: the first fault by name, and how many more there are."""
    first = faults[0]
    path = [str(part) for part in first["loc"] if part not in ("body", "query", "path", "header")]
    field = ".".join(path)
    kind = str(first["type"])
    if kind == "json_invalid":
        return Invalid(f"{what} is not valid JSON: {_reason(first)}", hint="send one JSON object")
    if kind == "extra_forbidden":
        text, hint = f"{what} has no field '{field}'", nearest(path[-1], known) if known and len(path) == 1 else ""
    elif kind == "string_pattern_mismatch" and field == "job_id":
        text, hint = (
            f"'{str(first['input'])[:100]}' is not the id of a job",
            "as in 17, or 17_3 for a member of array 17",
        )
    elif kind == "missing":
        text, hint = f"{what} needs '{field}'", f"add '{field}'"
    else:
        shown = f"{field}: " if field else ""
        text, hint = f"{shown}{_reason(first)}", _got(first)
    more = len(faults) - 1
    if more:
        text += f" (and {more} more {'fault' if more == 1 else 'faults'})"
    return Invalid(text, hint=hint)


def _reason(fault: Mapping[str, Any]) -> str:
    """Pydantic's sentence without its prefix, in lower case as our own messages are."""
    text = str(fault["msg"]).removeprefix("Value error, ").removeprefix("Invalid JSON: ")
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def _got(fault: Mapping[str, Any]) -> str:
    """What was sent, if it is short and plain. Values of `env` are secrets and never repeated."""
    value = fault.get("input")
    if "env" in fault["loc"] or not isinstance(value, str | int | float | bool) or len(str(value)) > 100:
        return ""
    return f"got {value!r}"
