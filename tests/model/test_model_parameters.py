"""Errors that suggest the fix, parameters that say what they take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from thebes import UserError, parameter
from thebes.model.errors import nearest
from thebes.model.parameters import configure, parameters_of, show_value


@dataclass(frozen=True)
class Oven:
    """Something with a parameter of each type."""

    heat: float = parameter(180.0, "degrees", low=0, high=300)
    trays: int = parameter(2, "how many", low=1)
    fan: bool = parameter(True, "air moves")
    dish: str = parameter("bread", "what is baked")
    steps: tuple[float, ...] = parameter((10.0, 20.0), "minutes per step", low=1)
    recipe: Path | None = parameter(None, "a file")  # noqa: RUF009
    serial: int = 7  # not a parameter


class Spoon:
    """Something without parameters."""


def test_nearest_names_one_lists_all_or_says_that_there_are_none() -> None:
    assert nearest("tiresias", ["tiresias-l", "fifo"]) == "did you mean 'tiresias-l'?"
    assert nearest("FIFO", ["tiresias-l", "fifo"]) == "did you mean 'fifo'?"
    assert nearest("zzz", ["fifo", "backfill"]) == "valid names: backfill, fifo"
    assert nearest("zzz", []) == "there are no valid names here"


def test_an_error_is_its_message_and_then_its_hint() -> None:
    assert str(UserError("it is wrong", hint="do that")) == "it is wrong\ndo that"
    assert str(UserError("it is wrong")) == "it is wrong"


def test_declared_parameters_are_known_with_their_documentation() -> None:
    known = parameters_of(Oven)
    assert list(known) == ["heat", "trays", "fan", "dish", "steps", "recipe"]
    assert (known["heat"].doc, known["heat"].low, known["heat"].high) == ("degrees", 0, 300)
    assert parameters_of(Spoon) == {}


def test_settings_are_taken_in_by_type() -> None:
    settings = {"heat": "99.5", "trays": "3", "fan": "off", "dish": "cake", "steps": "1,2.5", "recipe": "r.txt"}
    assert configure(Oven, settings, what="oven") == Oven(99.5, 3, False, "cake", (1.0, 2.5), Path("r.txt"))
    assert configure(Oven, {"steps": "none", "recipe": "none"}, what="oven") == Oven(steps=())


@pytest.mark.parametrize("text", ["yes", "TRUE", "1", "on"])
def test_many_words_for_yes(text: str) -> None:
    assert configure(Oven, {"fan": text}, what="oven").fan is True


@pytest.mark.parametrize("owner", [Oven(), Oven(1.5, 9, False, "", (), Path("x"))])
def test_what_is_shown_can_be_set_again(owner: Oven) -> None:
    shown = {name: show_value(getattr(owner, name)) for name in parameters_of(Oven) if name != "dish"}
    assert configure(Oven, shown | {"dish": owner.dish}, what="oven") == owner
    assert show_value("") == show_value(None) == show_value(()) == "none"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"haet": "1"}, "oven has no parameter 'haet'\ndid you mean 'heat'?"),
        ({"serial": "1"}, "oven has no parameter 'serial'"),
        ({"heat": "hot"}, "oven: heat=hot is not a number\nthe default is 180"),
        ({"heat": "nan"}, "oven: heat=nan is not a number"),
        ({"trays": "2.5"}, "oven: trays=2.5 is not a whole number\nthe default is 2"),
        ({"fan": "maybe"}, "oven: fan=maybe is not yes or no\nthe default is yes"),
        ({"steps": "1,x"}, "oven: steps=1,x is not a list of numbers such as 3250,7200\nthe default is 10,20"),
        ({"heat": "301"}, "oven: heat=301 must be between 0 and 300\nthe default is 180"),
        ({"trays": "0"}, "oven: trays=0 must be at least 1\nthe default is 2"),
        ({"steps": "5,0"}, "oven: steps=5,0 must be at least 1"),
    ],
)
def test_mistakes_name_the_parameter(settings: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        configure(Oven, settings, what="oven")
    assert str(caught.value).startswith(message)


@dataclass(frozen=True)
class Kettle:
    """Has a parameter of a type that no text can give."""

    lid: complex = parameter(1j, "shape")


def test_a_parameter_of_an_odd_type_cannot_be_set() -> None:
    with pytest.raises(UserError, match=r"kettle: lid cannot be set from text .*\nparameters are float, int, bool"):
        configure(Kettle, {"lid": "2"}, what="kettle")


def test_something_without_parameters_says_so() -> None:
    with pytest.raises(UserError, match="spoon has no parameter 'size'\nspoon has no parameters"):
        configure(Spoon, {"size": "1"}, what="spoon")
