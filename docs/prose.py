"""A linter for our prose: README.md, CONTRIBUTING.md, SECURITY.md, CHANGELOG.md, docs/*.md, and the comments and
docstrings of src/; part of `make lint`.

    python docs/prose.py            # all of them
    python docs/prose.py FILE.md FILE.py …

It reads docs/words.toml and finds words that we avoid, "who" said of things, sentences without a subject, doubled words
and sentences that are too long. Code, commands, links' targets, quotations and generated tables are left alone. (Vale
would do this; its packages fetch the program from elsewhere when they are installed, so a set-up without that place
would have no linter.)
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
# What is not prose. Each is replaced by as many line breaks as it had, so that lines keep their numbers.
NO_PROSE = (
    re.compile(r"^<!-- table: .*?<!-- end -->$", re.DOTALL | re.MULTILINE),
    re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"^\|[-:| ]+\|$", re.MULTILINE),
)
CODE = re.compile(r"``.+?``|`[^`]+`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
QUOTE = re.compile(r'"[^"]*"|“[^”]*”')
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*_])")
BEGINS_BLOCK = re.compile(r"^\s*(?:[-*] |\d+\. |#+ |>)")
WHO = re.compile(r"(\w+)[^\w\s]*(?: (?:to|for|of|by|from|with))? (?:who|whom)\b")
DOUBLED = re.compile(r"\b(\w+) \1\b", re.IGNORECASE)
MAY_DOUBLE = {"that", "had", "x", "code"}
CODE_WORD = "Code"  # as a sentence may begin with it
# What a comment says to a program: it stands before the words for people, if there are any.
TO_A_PROGRAM = re.compile(r"(?:type: ignore|pyright: ?\w+|noqa|fmt: ?\w+|pragma: [\w ]+)[^\s-]*(?:, *[\w=]+)*(?: -)?")
NO_STATEMENT_YET = {tokenize.ENCODING, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
WITHOUT_MEANING = {tokenize.NL, tokenize.COMMENT}


@dataclass(frozen=True)
class Words:
    """The word list, ready to be matched."""

    avoid: tuple[tuple[re.Pattern[str], str], ...]
    people: frozenset[str]
    verbs: frozenset[str]
    longest: int


@dataclass(frozen=True, order=True)
class Finding:
    """What is wrong in a line of a page."""

    line: int
    message: str


@dataclass(frozen=True)
class Sentence:
    line: int
    text: str
    in_table: bool
    heading: bool


@cache
def words() -> Words:
    listed = tomllib.loads((ROOT / "docs" / "words.toml").read_text(encoding="utf-8"))
    avoid = tuple(
        (re.compile(rf"(?<![\w-])(?:{key})(?![\w-])", re.IGNORECASE), say) for key, say in listed["avoid"].items()
    )
    return Words(
        avoid,
        frozenset(listed["people"]["words"]),
        frozenset(listed["verbs"]["words"]),
        listed["limits"]["words_in_a_sentence"],
    )


def faults(text: str) -> list[Finding]:
    """Everything that is wrong in a page."""
    return sorted(finding for sentence in sentences(text) for finding in _faults_of(sentence, words()))


def sentences(text: str) -> Iterator[Sentence]:
    """The prose of a page; a cell of a table counts as a paragraph."""
    for no_prose in NO_PROSE:
        text = no_prose.sub(lambda found: "\n" * found[0].count("\n"), text)
    for line, block in _blocks(text):
        in_table = block.lstrip().startswith("|")
        heading = block.lstrip().startswith("#")
        cells = re.split(r"(?<!\\)\|", block) if in_table else [BEGINS_BLOCK.sub("", block)]
        for cell in cells:
            clean = QUOTE.sub(CODE_WORD, LINK.sub(r"\1", CODE.sub(CODE_WORD, cell)))
            at = 0
            for part in SENTENCE_END.split(clean):
                begins = line + clean.count("\n", 0, clean.index(part, at) if part else at)
                at = clean.index(part, at) + len(part)
                if part.strip():
                    yield Sentence(begins, " ".join(part.split()), in_table, heading)


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, items of lists, headings and rows of tables, each with the number of its first line."""
    begun, gathered = 0, list[str]()
    for number, line in enumerate([*text.split("\n"), ""], 1):
        alone = line.lstrip().startswith(("|", "#"))
        if gathered and (not line.strip() or alone or BEGINS_BLOCK.match(line)):
            yield begun, "\n".join(gathered)
            gathered = []
        if not line.strip():
            continue
        if alone:
            yield number, line
            continue
        if not gathered:
            begun = number
        gathered.append(line)


def faults_in_code(source: str) -> list[Finding]:
    """Everything that is wrong in the comments and docstrings of a module of Python."""
    return sorted(
        Finding(begun + finding.line - 1, finding.message)
        for begun, text in comments(source)
        for finding in faults(text)
    )


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings, lines of comments that stand together, and comments behind code, each with its first line."""
    begun, gathered, last = 0, list[str](), 0
    before = tokenize.ENCODING  # the last token that means anything
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line, column = token.start
        if token.type == tokenize.COMMENT:
            alone = not token.line[:column].strip()
            if gathered and not (alone and line == last + 1):
                yield begun, "\n".join(gathered)
                gathered = []
            begun, last = (begun, line) if gathered else (line, line if alone else 0)
            gathered.append(TO_A_PROGRAM.sub("", token.string.lstrip("#").strip()).strip())
        elif token.type == tokenize.STRING and before in NO_STATEMENT_YET:
            yield line, _without_examples(token.string.lstrip("rR").strip("\"'"), column)
        if token.type not in WITHOUT_MEANING:
            before = token.type
    if gathered:
        yield begun, "\n".join(gathered)


def _without_examples(docstring: str, column: int) -> str:
    """A docstring, as far as it is prose: lines that are indented further than it is are code and commands."""
    first, *others = docstring.split("\n")
    return "\n".join([first, *("" if line[column:].startswith("    ") else line[column:] for line in others)])


def _faults_of(sentence: Sentence, listed: Words) -> Iterator[Finding]:
    text = sentence.text
    for pattern, instead in listed.avoid:
        for found in pattern.finditer(text):
            yield Finding(sentence.line, f"'{found[0]}': write {instead}")
    asks = text.endswith("?")
    for found in WHO.finditer(text):
        if found[1].lower() not in listed.people and not asks and not sentence.heading:
            yield Finding(sentence.line, f"'{found[0]}': 'who' is said of people; write that or which")
    if re.match(r"[\W_]*who\b", text, re.IGNORECASE) and not asks and not sentence.heading:
        yield Finding(sentence.line, "'Who …' begins no question: name the people, or the thing")
    first = re.match(r"[\W_]*([A-Z]\w*)", text)
    if first and first[1].lower() in listed.verbs and not sentence.in_table and not asks:
        yield Finding(sentence.line, f"'{first[1]} …' begins a sentence that has no subject")
    for found in DOUBLED.finditer(text):
        if found[1].lower() not in MAY_DOUBLE and not found[1].isdigit():
            yield Finding(sentence.line, f"'{found[0]}': the word stands there twice")
    count = len(text.split())
    if count > listed.longest and not sentence.in_table:
        yield Finding(sentence.line, f"a sentence of {count} words: the limit is {listed.longest}")


def pages() -> list[Path]:
    return [*(ROOT / name for name in OUTSIDE), *sorted((ROOT / "docs").glob("*.md"))]


def modules() -> list[Path]:
    return sorted((ROOT / "src").rglob("*.py"))


def main(arguments: Sequence[str]) -> int:
    found = 0
    for path in [Path(name) for name in arguments] or [*pages(), *modules()]:
        faults_of = faults_in_code if path.suffix == ".py" else faults
        for finding in faults_of(path.read_text(encoding="utf-8")):
            found += 1
            print(f"{_shown(path)}:{finding.line}: {finding.message}")
    if found:
        print(f"{found} faults of wording; docs/words.toml is the list")
    return 1 if found else 0


def _shown(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
