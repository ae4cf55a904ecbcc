"""The linter of our prose finds each kind of fault that it is for, and leaves alone what is no prose."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "prose.py"

_spec = importlib.util.spec_from_file_location("prose", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
prose = importlib.util.module_from_spec(_spec)
sys.modules["prose"] = prose
_spec.loader.exec_module(prose)


def found(text: str) -> list[tuple[int, str]]:
    return [(fault.line, fault.message) for fault in prose.faults(text)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("The agent says that he is alive.", "'he': write it, or the name of the thing"),
        ("The jobs utilize all GPUs.", "'utilize': write use"),
        ("In order to run it, type `thebes up`.", "'In order to': write to"),
        ("A job is evicted at once.", "'evicted': write preempt"),
        ("The behavior is the same.", "'behavior': write behaviour"),
        ("The job who waits longest goes first.", "'job who': 'who' is said of people; write that or which"),
        ("It names the job to whom they belong.", "'job to whom': 'who' is said of people"),
        ("Whoever waits longest goes first.", "'Whoever': write the name of the thing"),
        ("The controller restarts. Is done at once.", "'Is …' begins a sentence that has no subject"),
        ("- Has no effect on Slurm.", "'Has …' begins a sentence that has no subject"),
        ("It runs on the the cluster.", "'the the': the word stands there twice"),
        ("It is a" + " very long" * 31 + " one.", "a sentence of 66 words: the limit is 60"),
        ("| a cell | another, of the evicted job |", "'evicted': write preempt"),
    ],
)
def test_a_fault_is_found(text: str, message: str) -> None:
    (line, said), *_ = found(f"# A page\n\nThis line is good.\n\n{text}\n")
    assert line == 5
    assert said.startswith(message)


@pytest.mark.parametrize(
    "text",
    [
        "People who know Slurm may keep `sbatch`.",
        "Give tokens to people to whom you would lend that account.",
        "Is it alive? Does it answer?",
        'The word is `evicted` in code, and "he" in a quotation.',
        "```text\nIs evicted. He utilizes it.\n```",
        "<!-- table: policies -->\n| evicted |\n<!-- end -->",
        "See [the page](evicted.md).",
        "| Is a cell | that may begin with a verb |",
        "The theme, the shell and the hem are no pronouns.",
    ],
)
def test_what_is_good_or_no_prose_is_left_alone(text: str) -> None:
    assert found(f"# A page\n\n{text}\n") == []


def test_a_fault_in_the_middle_of_a_paragraph_has_its_own_line() -> None:
    text = "A first line\nof a paragraph. The second\nsentence is good. The third\nis told about him.\n"
    assert [line for line, _ in found(text)] == [3], "the line on which the sentence begins"


def test_lines_are_counted_through_code() -> None:
    assert [line for line, _ in found("```text\na\nb\n```\n\nIs wrong.\n")] == [6]


def found_in_code(source: str) -> list[tuple[int, str]]:
    return [(fault.line, fault.message) for fault in prose.faults_in_code(source)]


@pytest.mark.parametrize(
    ("source", "line", "message"),
    [
        ('"""The agent and who it reports to."""\n', 1, "'and who': 'who' is said of people"),
        ('"""A module.\n\nIs loaded at once.\n"""\n', 3, "'Is …' begins a sentence that has no subject"),
        ('def f():\n    """The job whoever it is."""\n', 2, "'whoever': write the name of the thing"),
        ('class A:\n    """A."""\n\n    x = 1\n    """He utilizes x."""\n', 5, "'He': write it"),
        ("x = 1  # the daemon's own\n", 1, "'daemon': write keeper"),
        (
            "x = 1\n# A first line that is good\n# and ends here. A job is evicted.\ny = 2\n",
            3,
            "'evicted': write preempt",
        ),
        ("x = [  # fmt: skip\n    1,\n]  # noqa: N801 - its behavior is old\n", 3, "'behavior': write behaviour"),
    ],
)
def test_a_fault_in_a_comment_or_docstring_is_found(source: str, line: int, message: str) -> None:
    (at, said), *_ = found_in_code(source)
    assert at == line
    assert said.startswith(message)


@pytest.mark.parametrize(
    "source",
    [
        'said = "the daemon, whoever it is, says that he is evicted"\n',
        'f(\n    "Is evicted",\n)\n',
        "daemon = evicted(his)\n",
        'def f():\n    """Run it:\n\n        evicted --daemon\n\n    The end is good.\n    """\n',
        "# `evicted` is Slurm's word\nx = 1  # type: ignore[arg-type] - people who know it\n",
        "x = 1  # pyright: ignore[reportMissingImports]\n# ruff: noqa: PTH110, SIM105\n",
        "# --------------------------------------------------------\n",
    ],
)
def test_code_and_what_comments_say_to_programs_are_left_alone(source: str) -> None:
    assert found_in_code(source) == []


def test_a_comment_behind_code_does_not_join_the_next_lines() -> None:
    assert [text for _, text in prose.comments("x = 1  # of jobs\n# A line\n# and one more\n\n# Alone\n")] == [
        "of jobs",
        "A line\nand one more",
        "Alone",
    ]


def test_our_pages_and_modules_have_no_fault() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    assert {page.name for page in prose.pages()} >= {"README.md", "CONTRIBUTING.md", "SECURITY.md", "terms.md"}
    assert {path.parent.name for path in prose.modules()} >= {"thebes", "cli", "live", "model", "orders", "slurm"}


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("page.md", "The keeper starts him again.\n", 1),
        ("module.py", '"""A good module."""\n\nx = 1  # the keeper starts him again\n', 3),
    ],
)
def test_a_planted_fault_fails_the_command(tmp_path: Path, name: str, text: str, line: int) -> None:
    planted = tmp_path / name
    planted.write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, str(SCRIPT), str(planted)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"{name}:{line}: 'him': write it" in done.stdout


def test_make_lint_runs_it() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "docs/prose.py" in makefile.split("\nlint:", 1)[1].split("\n\n", 1)[0]
