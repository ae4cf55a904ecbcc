"""A reader of command lines as getopt_long reads them: short options may be joined, long ones may be shortened."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from thebes.jobspec.slurm_options import MAYBE, NEEDED, NONE, Option


class Stop(Exception):  # noqa: N818 - an end, not always an error
    """The command ends with this exit code, after this text on stderr."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


@dataclass
class GivenOptions:
    """What a command line holds: options in order, as (long name, value), and the other words."""

    options: list[tuple[str, str]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    def has(self, name: str) -> bool:
        return any(option == name for option, _ in self.options)

    def get(self, name: str) -> str | None:
        """The last value given, because the last one counts."""
        return next((value for option, value in reversed(self.options) if option == name), None)

    def listed(self, name: str) -> list[str]:
        """A value that lists words between commas. If the option was given several times, the last one counts."""
        return [word for word in (self.get(name) or "").split(",") if word]


def parse(
    command: str, words: Sequence[str], known: Mapping[str, Option], *, mixed: bool = True, code: int = 1
) -> GivenOptions:
    """Read options up to the first other word, or (mixed) wherever they stand. `code` is the exit code of an error."""
    given = GivenOptions()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            given.words += rest
            break
        if word.startswith("--"):
            _long(command, word, rest, known, given, code)
        elif word.startswith("-") and len(word) > 1:
            _short(command, word, rest, known, given, code)
        elif mixed:
            given.words.append(word)
        else:
            given.words += [word, *rest]
            break
    return given


def _long(
    command: str, word: str, rest: list[str], known: Mapping[str, Option], given: GivenOptions, code: int
) -> None:
    name, equals, value = word[2:].partition("=")
    full = name if name in known else None
    if full is None:
        close = [one for one in known if one.startswith(name)] if name else []
        if len(close) > 1:
            told = " ".join(f"'--{one}'" for one in close)
            raise _not_understood(command, f"option '{word}' is ambiguous; possibilities: {told}", code)
        if not close:
            raise _not_understood(command, f"unrecognized option '{word}'", code)
        full = close[0]
    takes = known[full].takes
    if takes == NONE and equals:
        raise _not_understood(command, f"option '--{full}' doesn't allow an argument", code)
    if takes == NEEDED and not equals:
        if not rest:
            raise _not_understood(command, f"option '--{full}' requires an argument", code)
        value = rest.pop(0)
    take(command, full, value, f"--{full}", known, given)


def _short(
    command: str, word: str, rest: list[str], known: Mapping[str, Option], given: GivenOptions, code: int
) -> None:
    names = {option.short: name for name, option in known.items() if option.short}
    letters = word[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        if letter not in names:
            raise _not_understood(command, f"invalid option -- '{letter}'", code)
        name, value = names[letter], ""
        takes = known[name].takes
        if takes != NONE:
            value, letters = letters, ""
            if takes == NEEDED and not value:
                if not rest:
                    raise _not_understood(command, f"option requires an argument -- '{letter}'", code)
                value = rest.pop(0)
        take(command, name, value, f"-{letter}", known, given)


def take(command: str, name: str, value: str, shown: str, known: Mapping[str, Option], given: GivenOptions) -> None:
    """Note an option, refuse it, or remember that it is not used."""
    option = known[name]
    if option.unsupported:
        raise Stop(f"{command}: error: {shown} is not supported by Thebes: {option.unsupported}. Nothing was done.")
    if option.unused:
        given.unused.append(shown)
    else:
        given.options.append((name, value))


def _not_understood(command: str, problem: str, code: int) -> Stop:
    return Stop(f'{command}: {problem}\nTry "{command} --help" for more information', code)


def warn_of_unused(command: str, unused: Sequence[str]) -> None:
    """Print one line about all options that change nothing here."""
    if unused:
        plural = "are" if len(set(unused)) > 1 else "is"
        print(f"{command}: warning: {', '.join(dict.fromkeys(unused))} {plural} not used by Thebes.", file=sys.stderr)


def help_text(command: str, about: str, known: Mapping[str, Option]) -> str:
    """A list of what is supported, what is accepted without effect, and what is refused."""

    def shown(name: str, option: Option) -> str:
        value = {NONE: "", NEEDED: "=…", MAYBE: "[=…]"}[option.takes]
        return (f"-{option.short}, " if option.short else "") + f"--{name}{value}"

    def listed(title: str, names: list[str]) -> list[str]:
        return [title, *(f"  {name}" for name in names)] if names else []

    used = [shown(name, option) for name, option in known.items() if not option.unused and not option.unsupported]
    unused = [shown(name, option) for name, option in known.items() if option.unused]
    refused = [f"{shown(name, option)}  ({option.unsupported})" for name, option in known.items() if option.unsupported]
    lines = [about, "", *listed("Options:", used)]
    lines += [line for part in (listed("Accepted, without effect:", unused), listed("Not supported:", refused))
              for line in ["", *part] if part]  # fmt: skip
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------- lists of names


def folded(names: Sequence[str]) -> str:
    """Node names as Slurm writes them, such as n[0-3,7],login. Leading zeros are kept, as in n[08-11]."""
    groups: dict[tuple[str, int], list[int]] = {}
    order: list[tuple[str, int] | str] = []
    for name in sorted(names, key=natural):
        found = re.fullmatch(r"(.*?)(\d{1,15})", name)
        if found is None:
            order.append(name)
            continue
        digits = found[2]
        key = (found[1], len(digits) if digits.startswith("0") and len(digits) > 1 else 0)
        if key not in groups:
            # Both n[8-11] and n[08-11] are one list: numbers join those with leading zeros if they are equally wide.
            padded = (found[1], len(digits))
            key = padded if padded in groups else key
        if key not in groups:
            order.append(key)
        groups.setdefault(key, []).append(int(digits))
    parts = []
    for one in order:
        if isinstance(one, str):
            parts.append(one)
            continue
        prefix, width = one
        numbers = groups[one]
        inside = ranges(numbers, width)
        parts.append(f"{prefix}{inside}" if len(numbers) == 1 else f"{prefix}[{inside}]")
    return ",".join(parts)


def ranges(numbers: Sequence[int], width: int = 0) -> str:
    """Sorted numbers as ranges, such as 0-3,7."""
    parts: list[str] = []
    row = 0
    while row < len(numbers):
        last = row
        while last + 1 < len(numbers) and numbers[last + 1] == numbers[last] + 1:
            last += 1
        first = f"{numbers[row]:0{width}d}"
        parts.append(first if last == row else f"{first}-{numbers[last]:0{width}d}")
        row = last + 1
    return ",".join(parts)


def natural(name: str) -> list[tuple[bool, int, str]]:
    """A sorting key that puts n2 before n10."""
    return [(word.isdigit(), int(word) if word.isdigit() else 0, word) for word in re.split(r"(\d+)", name) if word]


def unfolded(text: str) -> list[str]:
    """The names in a list such as n[0-3,7],login."""
    names: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text) if text else []:
        found = re.fullmatch(r"([^\[]*)\[([\d,-]+)\]", part)
        if found is None and ("[" in part or "]" in part):
            raise ValueError(text)
        if found is None:
            names.append(part)
            continue
        for piece in found[2].split(","):
            low, _, high = piece.partition("-")
            if not low.isdigit() or not (high or low).isdigit():
                raise ValueError(text)
            names += [f"{found[1]}{number:0{len(low)}d}" for number in range(int(low), int(high or low) + 1)]
    return names
