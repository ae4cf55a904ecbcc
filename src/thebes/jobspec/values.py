"""What people write for a value, read: lengths of time, array indices, assignments. `place` says where it stands."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from thebes.model.errors import UserError

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0
UNITS_S = {"s": 1.0, "sec": 1.0, "m": MINUTE_S, "min": MINUTE_S, "h": HOUR_S, "d": DAY_S, "w": 7 * DAY_S}
MAX_ARRAY = 10_000


def parse_duration_s(text: str, *, bare_s: float, place: str = "") -> float:
    """Seconds from 90s, 10m, 1h30m, 1.5h, 2d, MM:SS, H:MM:SS, D-HH[:MM[:SS]]; a bare number counts in `bare_s`."""
    clean = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", clean):
        return float(clean) * bare_s
    if re.fullmatch(r"(\d+(\.\d+)?\s*[a-z]+\s*)+", clean):
        parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]+)", clean)
        names = [_unit(unit) for _, unit in parts]
        if None not in names:
            return sum(float(number) * UNITS_S[unit] for (number, _), unit in zip(parts, names, strict=True) if unit)
    days, dash, clock = clean.rpartition("-")
    numbers = clock.split(":")
    if all(re.fullmatch(r"\d+", number) for number in numbers) and (not dash or days.isdigit()) and len(numbers) <= 3:
        # Slurm reads it so: with days the first number is hours, without days two numbers are minutes and seconds.
        sizes = (HOUR_S, MINUTE_S, 1.0) if dash or len(numbers) == 3 else (MINUTE_S, 1.0)
        total = sum(int(number) * size for number, size in zip(numbers, sizes, strict=False))
        return total + (int(days) * DAY_S if dash else 0.0)
    raise UserError(
        f"{at_place(place)}'{text}' is not a length of time.",
        hint="Write 90s, 10m, 2h, 1h30m, 1:30:00 or 1-12:00:00 (days-hours:minutes:seconds).",
    )


def _unit(word: str) -> str | None:
    plural = {"secs": "s", "second": "s", "seconds": "s", "mins": "m", "minute": "m", "minutes": "m", "hr": "h"}
    plural |= {"hrs": "h", "hour": "h", "hours": "h", "day": "d", "days": "d", "week": "w", "weeks": "w"}
    return word if word in UNITS_S else plural.get(word)


def parse_array(text: str, place: str = "") -> list[int]:
    """Indices such as 1-50, 0-10:2 or 1,3,5-7; sorted, and each once."""
    indices: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+)(?::(\d+))?)?\s*", part)
        if found is None:
            raise UserError(f"{at_place(place)}'{text}' is not a list of array indices.", hint=_array_hint(part))
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        if last < first or step == 0:
            fault = "the step is 0" if step == 0 else f"{first} is greater than {last}"
            raise UserError(f"{at_place(place)}'{part.strip()}' names no array index: {fault}.", hint=_array_hint(""))
        if last > 999_999:
            raise UserError(f"{at_place(place)}array index {last} is too large.", hint="Indices go up to 999999.")
        indices.update(range(first, last + 1, step))
        if len(indices) > MAX_ARRAY:
            raise UserError(
                f"{at_place(place)}'{text}' has more than {MAX_ARRAY:,} indices.", hint="Submit several smaller arrays."
            )
    return sorted(indices)


def _array_hint(part: str) -> str:
    if "%" in part:
        return "A limit comes once and last, as in 0-99%4; beside a list of indices write array_limit: 4."
    return "Write 1-50, 0-10:2 (every second one) or 1,3,5-7."


def split_limit(text: str, place: str = "") -> tuple[str, str | None]:
    """The indices and the limit of 0-99%4, which in Slurm's notation means at most four of them at a time."""
    indices, percent, limit = text.partition("%")
    if not percent:
        return text, None
    if "%" in limit or "," in limit:
        raise UserError(f"{at_place(place)}'{text}' is not an array.", hint=_array_hint(text))
    if not re.fullmatch(r"\s*0*[1-9]\d{0,5}\s*", limit):
        raise UserError(
            f"{at_place(place)}'{text}': the limit after % is not a number from 1 to 999,999.",
            hint="As in 0-99%4: at most 4 jobs of the array at a time.",
        )
    return indices, limit.strip()


def parse_assignment(text: str, place: str = "", environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """KEY=VALUE; a KEY alone takes its value from the environment, as in docker."""
    name, equals, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UserError(f"{at_place(place)}'{text}' is not an environment variable.", hint="Write KEY=VALUE.")
    if equals:
        return name, value
    found = (os.environ if environ is None else environ).get(name)
    if found is None:
        raise UserError(
            f"{at_place(place)}{name} has no value here.",
            hint=f"Write {name}=VALUE, or export {name} before you submit.",
        )
    return name, found


def at_place(place: str) -> str:
    return f"{place}: " if place else ""
