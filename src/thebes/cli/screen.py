"""Plain tables and words for the live commands: our own, because importing Rich takes longer than the answer."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
LEVEL_STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}
STATE_STYLES = {
    "running": "green",
    "starting": "green",
    "completed": "dim",
    "failed": "red",
    "timeout": "red",
    "cancelled": "dim",
    "preempting": "yellow",
    "suspended": "yellow",
    "held": "blue",
    "queued": "cyan",
}
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
UNSAFE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")  # such characters in names and reasons could move the cursor


def colourful(stream: Any = None) -> bool:
    """Whether colours are welcome: the output is a terminal, and NO_COLOR is not set."""
    return (stream or sys.stdout).isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, *, on: bool | None = None) -> str:
    if not style or not (colourful() if on is None else on):
        return text
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def say(text: str) -> None:
    """Print friendly words on stderr, because scripts read stdout."""
    print(text, file=sys.stderr)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def clean(value: Any) -> str:
    return UNSAFE.sub(" ", str(value))


def duration(seconds: float | None) -> str:
    """A duration in at most two units: 45s, 12m 05s, 3h 07m, 2d 04h."""
    if seconds is None:
        return "–"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600:02}h"


def clock(time_s: float | None, now_s: float) -> str:
    """The time of day, with the date in front when it is not today."""
    from time import localtime, strftime

    if time_s is None:
        return "–"
    same_day = strftime("%F", localtime(time_s)) == strftime("%F", localtime(now_s))
    return strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", localtime(time_s))


def plural(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Iterable[str] = (),
    width: int | None = None,
    style: Callable[[int, str], str] = lambda _column, _text: "",
    colours: bool | None = None,
) -> list[str]:
    """Lines of a table. The last column takes what room is left and is cut there when the width is known."""
    cells = [[clean(cell) for cell in row] for row in rows]
    widths = [max([len(name), *(len(row[place]) for row in cells)]) for place, name in enumerate(columns)]
    aligned = {place for place, name in enumerate(columns) if name in set(right)}
    last = len(columns) - 1
    room = None if width is None else max(12, width - sum(widths[:last]) - 2 * last)
    on = colourful() if colours is None else colours

    def line(row: Sequence[str], paint_cell: Callable[[int, str], str]) -> str:
        parts = []
        for place, cell in enumerate(row):
            if place == last and room is not None and len(cell) > room:
                cell = cell[: room - 1] + "…"
            padding = " " * (widths[place] - len(cell))
            shown = paint(cell, paint_cell(place, cell), on=on)
            parts.append(padding + shown if place in aligned else shown + (padding if place != last else ""))
        return "  ".join(parts).rstrip()

    return [line(columns, lambda _place, _cell: "bold"), *(line(row, style) for row in cells)]


@dataclass(frozen=True)
class TableColumn:
    """One column of a table of things (jobs, nodes …): its title, and what stands in it for each of them."""

    title: str
    cell: Callable[[Mapping[str, Any]], str]
    right: bool = False  # numbers stand to the right
    wide: bool = False  # shown only with `-o wide`


def table_of(
    columns: Sequence[TableColumn],
    things: Iterable[Mapping[str, Any]],
    *,
    width: int | None = None,
    styles: dict[str, str] = STATE_STYLES,
) -> list[str]:
    """Lines of a table. The cells of a column STATE are coloured by what they say."""
    titles = [column.title for column in columns]
    return table(
        titles,
        [[column.cell(thing) for column in columns] for thing in things],
        right=[column.title for column in columns if column.right],
        width=width,
        style=coloured(titles.index("STATE"), styles),
    )


def coloured(place: int, styles: dict[str, str] = STATE_STYLES) -> Callable[[int, str], str]:
    """Colours for the cells of one column of a table, by what they say."""
    return lambda column, cell: styles.get(cell, "") if column == place else ""


def terminal_width() -> int | None:
    """The width of the terminal. It is None when the output goes to a file or a pipe, where nothing is cut."""
    return shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else None


def watch(frame: Callable[[], list[str]], every_s: float = 1.0) -> None:
    """Show a frame again and again, until Ctrl-C: in place on a terminal, one below the other elsewhere."""
    import time

    terminal = sys.stdout.isatty()
    try:
        if terminal:
            sys.stdout.write("\x1b[?1049h\x1b[?25l")
        while True:
            lines = frame()
            if terminal:
                height = shutil.get_terminal_size((100, 24)).lines
                shown = (
                    lines if len(lines) < height else [*lines[: height - 2], f"… {len(lines) - height + 2} more lines"]
                )
                sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in shown) + "\x1b[J")
            else:
                sys.stdout.write("".join(f"{line}\n" for line in [*lines, ""]))
            sys.stdout.flush()
            time.sleep(every_s)
    except KeyboardInterrupt:
        pass
    finally:
        if terminal:
            sys.stdout.write("\x1b[?25h\x1b[?1049l")
            sys.stdout.flush()
