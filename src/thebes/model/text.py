"""Text that somebody else supplied, made fit to be stored and to be shown.

Names, reasons, tags and error messages come from jobs, users, nodes and policies. Shown raw, they could move the
cursor, change the terminal's title, fill its clipboard or turn the order of letters around; and a lone surrogate can
be neither stored nor sent. These functions leave everything that people write alone.
"""

from __future__ import annotations

import re

# Control characters (C0, DEL and C1, which terminals obey), separators that are line ends to some programs, marks
# that turn the direction of writing around, surrogates, and what is invisible by definition.
_UNSHOWABLE = (
    "\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
)
UNSHOWABLE = re.compile(f"[{_UNSHOWABLE}]")
_SPACES = re.compile("[\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]+")
_SHORT = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


def encodable(text: str) -> str:
    """The text with surrogates written as `\\udcff`: what is left can be stored, sent and printed as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def printable(text: object) -> str:
    """The text on one line, with all that is not to be shown raw written as in Python: `\\x1b`, `\\u202e`, `\\n`."""
    return UNSHOWABLE.sub(lambda found: escape(found[0]), str(text))


def in_one_line(text: object) -> str:
    """Like `printable`, for a table or a sentence: line ends and tabs become a space."""
    return printable(_SPACES.sub(" ", str(text)))


def printable_json(text: str) -> str:
    """JSON with such characters escaped in JSON's own way, so that its reader gets the same value.

    `text` comes from `json.dumps`, where they stand in strings alone, except for the line ends between them.
    """
    return UNSHOWABLE.sub(lambda found: found[0] if found[0] == "\n" else _json_escape(ord(found[0])), text)


def escape(character: str) -> str:
    """One character as Python writes it in a string."""
    code = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _json_escape(code: int) -> str:
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 | code >> 10:04x}\\u{0xDC00 | code & 0x3FF:04x}"
