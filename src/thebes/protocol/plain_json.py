"""JSON for processes that must stay small: what `json` itself is made of, without the `re` that it loads.

Agents and the engine read the small files of an attempt by the same function as steps do, so that a file which a job
has spoilt looks spoilt to all of them.
"""

# pathlib would be loaded for this alone:
# ruff: noqa: PTH123
from __future__ import annotations

from _json import encode_basestring_ascii, make_scanner

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from typing import Any

SMALL_BYTES = 64 << 10  # no file that a job writes for us is longer


class _Plain:
    """How the scanner shall read: as `json.loads` does."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float = parse_constant = float
    parse_int = int


_scan = make_scanner(_Plain)  # type: ignore[arg-type] - it asks for these attributes alone


def parse(text: str) -> Any:
    """The value; ValueError when the text is not JSON."""
    try:
        value, end = _scan(text, len(text) - len(text.lstrip()))
    except StopIteration:
        raise ValueError("this is not JSON") from None
    if text[end:].strip():
        raise ValueError("there is more behind the JSON")
    return value


def dump(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{encode_basestring_ascii(str(key))}:{dump(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(dump(item) for item in value) + "]"
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


def read_object(path: str | os.PathLike[str], limit_bytes: int = SMALL_BYTES) -> dict[str, Any]:
    """The object in a JSON file; a file that is missing or spoilt is taken as empty."""
    try:
        with open(path, "rb") as file:
            found = parse(file.read(limit_bytes).decode())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
