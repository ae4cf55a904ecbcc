"""Text that somebody else supplied is made fit to be stored and to be shown."""

import json
import re

from hypothesis import given
from hypothesis import strategies as st

from thebes.model.text import UNSHOWABLE, encodable, in_one_line, printable, printable_json

TERMINALS_OBEY = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
any_text = st.text(st.characters(exclude_categories=()))


def test_what_people_write_stays_as_it_is() -> None:
    for text in ("llama-7b", "Übergröße", "学習ジョブ", "\u200dfamily 👨\u200d👩", "שלום", "exit code 1: no such file"):
        assert printable(text) == in_one_line(text) == encodable(text) == text


def test_escapes_controls_and_marks_of_direction_are_written_out() -> None:
    assert printable("a\x1b[2Jb") == "a\\x1b[2Jb"
    assert printable("\x1b]52;c;aGk=\x07") == "\\x1b]52;c;aGk=\\x07"
    assert printable("\x9b31m\x7f") == "\\x9b31m\\x7f"
    assert printable("evil\u202egpj.exe\u2066") == "evil\\u202egpj.exe\\u2066"
    assert printable("\udcff") == "\\udcff"
    assert printable("one\ntwo\tthree\r") == "one\\ntwo\\tthree\\r"
    assert printable("\U000e0041") == "\\U000e0041"


def test_in_a_sentence_line_ends_are_spaces() -> None:
    assert in_one_line("Traceback:\n  ValueError\r\n") == "Traceback:   ValueError "
    assert in_one_line("a\x1b[2Jb\nc") == "a\\x1b[2Jb c"


@given(any_text)
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    for made in (printable(text), in_one_line(text)):
        assert not TERMINALS_OBEY.search(made)
        made.encode()  # it can be
        assert printable(made) == made
    encodable(text).encode()


@given(st.dictionaries(any_text, any_text))
def test_json_with_escapes_is_read_as_the_same_value(value: dict[str, str]) -> None:
    shown = printable_json(json.dumps(value, indent=2, ensure_ascii=False))
    shown.encode()
    assert not UNSHOWABLE.search(shown.replace("\n", ""))
    # Two surrogates beside each other are one character to every reader of JSON.
    assert json.loads(shown) == json.loads(json.dumps(value))
