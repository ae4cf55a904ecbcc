"""The documentation is true: examples run, commands work, tables are those of the code, links lead somewhere.

Conventions in README.md and docs/*.md:
- every ```python block runs, and functions named test_… in it are called;
- every line `$ thebes …` in a ```console block runs, in one folder per page, in order; so does `$ squeue` and the like;
  a page that says `thebes up` has a live cluster of its own, which is gone at the end;
- `<!-- live -->` before a ```python block: it runs while a cluster of four virtual GPUs is up;
- `<!-- on: slurm -->` or `<!-- on: ray -->` before a ```console block: it runs on such a cluster, in that suite;
- `<!-- write: NAME -->` before a block puts its text into that file first; `<!-- run with: NAME -->`: the page needs
  the file of that name which another page shows; `<!-- needs shared -->`: the block needs ../shared/data;
- a table between `<!-- table: NAME -->` and `<!-- end -->` is made by docs/tables.py.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

import thebes
from kit.components import require
from kit.waiting import until
from kit.workloads import shared_data
from thebes.cli import app
from thebes.model.cluster import from_toml
from thebes.policy import registry
from thebes.protocol.shims import NAMES as SHIMS

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in OUTSIDE), *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"(?P<marks>(?:<!--[^>]*-->\n)*)```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
ON = re.compile(r"<!-- on: (\w+) -->")
WRITE, RUN_WITH = re.compile(r"<!-- write: (\S+) -->"), re.compile(r"<!-- run with: (\S+) -->")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    marks: str

    @property
    def where(self) -> str:
        """The cluster that it runs on; empty: this machine."""
        found = ON.search(self.marks)
        return found[1] if found else ""

    @property
    def needs_shared(self) -> bool:
        return "<!-- needs shared -->" in self.marks


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start("text")), found["language"], found["text"], found["marks"])
        for found in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
FILES = {found[1]: block.text for block in BLOCKS if (found := WRITE.search(block.marks))}


def place(block: Block) -> str:
    return f"{block.page.name}:{block.line}"


def load(path: Path) -> ModuleType:
    """A script as a module; dataclasses look their module up by name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


tables = load(ROOT / "docs" / "tables.py")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str) -> str:
    """A `thebes …` command in this process, or one of Slurm's that Thebes carries out; its output."""
    words = shlex.split(command)
    if words[0] in SHIMS:
        words = ["thebes", "slurm-shim", *words]
    assert words[0] == "thebes", command
    if words[1] == "compare":  # processes of their own would load everything anew
        words += ["--workers", "1"]
    done = CliRunner().invoke(app, words[1:], catch_exceptions=False)
    assert done.exit_code == 0, f"{command}\n{done.output}"
    return done.output


# --- code and commands -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [pytest.param(b, id=place(b)) for b in BLOCKS if b.language == "python"])
def test_python_block_runs(
    block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if block.needs_shared and not shared_data().is_dir():
        pytest.skip("needs ../shared/data")
    if "<!-- live -->" not in block.marks:
        run_python(block, folder)
        return
    monkeypatch.setenv("THEBES_DIR", str(folder / "instance"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (folder / "train.py").write_text(FILES["train.py"], encoding="utf-8")
    try:
        run("thebes up --virtual-gpus 4")
        run_python(block, folder)
    finally:
        CliRunner().invoke(app, ["down", "--now"])


def run_python(block: Block, folder: Path) -> None:
    space: dict[str, Any] = {"__name__": "an_example"}
    module = ModuleType("an_example")  # dataclasses look their module up
    sys.modules["an_example"] = module
    exec(compile("\n" * block.line + block.text, place(block), "exec"), space)
    for name, value in space.items():
        if name.startswith("test_"):
            value(*([folder] if "tmp_path" in inspect.signature(value).parameters else []))


def console_pages() -> Iterator[Any]:
    for page in PAGES:
        blocks = [block for block in blocks_of(page) if block.language == "console" and not block.where]
        if blocks:
            yield pytest.param(page, blocks, id=page.name)


def cluster_pages() -> Iterator[Any]:
    for page in PAGES:
        for where in sorted({block.where for block in blocks_of(page)} - {""}):
            blocks = [block for block in blocks_of(page) if block.where == where]
            yield pytest.param(blocks, id=f"{page.name} on {where}", marks=getattr(pytest.mark, where))


@contextmanager
def on_a_cluster(where: str) -> Iterator[dict[str, str]]:
    """What the environment needs to hold for commands to find it."""
    require(where)
    if where == "slurm":
        from kit.slurm_cluster import slurm_cluster

        with slurm_cluster(nodes=4) as slurm:
            yield slurm.env
    else:
        from kit.ray_cluster import RayCluster

        with RayCluster() as ray:
            yield {"RAY": ray.address}


@pytest.mark.parametrize("blocks", list(cluster_pages()))
def test_commands_of_a_page_run_on_a_cluster(blocks: list[Block], folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with on_a_cluster(blocks[0].where) as found:
        env = {**os.environ, "PATH": path, "THEBES_DIR": str(folder / "instance"), **found}
        try:
            for line in "\n".join(block.text for block in blocks).splitlines():
                if line.startswith("$ "):
                    done = subprocess.run(
                        ["bash", "-c", line[2:]], env=env, capture_output=True, text=True, timeout=300
                    )
                    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        finally:
            subprocess.run(["thebes", "down", "--now"], env=env, capture_output=True, timeout=300)


@pytest.mark.parametrize(("page", "blocks"), list(console_pages()))
def test_commands_of_a_page_run(page: Path, blocks: list[Block], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text(encoding="utf-8")
    monkeypatch.setenv("THEBES_DIR", str(folder / "instance"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    try:
        run_commands(text, blocks, folder)
    finally:
        if (folder / "instance" / "run").exists():
            CliRunner().invoke(app, ["down", "--now"])


def run_commands(text: str, blocks: list[Block], folder: Path) -> None:
    for name in (*WRITE.findall(text), *RUN_WITH.findall(text)):
        (folder / name).write_text(FILES[name], encoding="utf-8")
    for block in blocks:
        if block.needs_shared:
            if not shared_data().is_dir():
                continue
            if not (folder / "shared").exists():
                (folder / "shared").symlink_to(shared_data().parent)
        for line in block.text.splitlines():
            if line.startswith("$ thebes preempt "):  # a reader types slowly enough for the job to have started
                until_it_runs(line.split()[3])
            if line.startswith("$ "):
                run(line.removeprefix("$ "))


def until_it_runs(job: str) -> None:
    with thebes.Client() as client:
        until(lambda: client.job(job)["state"] == "running", f"job {job} starts")


def test_every_command_of_the_program_is_shown_somewhere() -> None:
    shown = "\n".join(block.text for block in BLOCKS if block.language == "console")
    for command in (
        "simulate",
        "compare",
        "policies",
        "policies show",
        "placements",
        *(f"trace {verb}" for verb in ("info", "convert", "generate", "formats")),
    ):
        assert f"$ thebes {command}" in shown, command


def test_the_own_policy_of_the_readme_is_ten_lines() -> None:
    example = next(b.text for b in blocks_of(ROOT / "README.md") if "thebes.Policy" in b.text)
    assert len([line for line in example.splitlines() if line.strip()]) <= 10


# --- examples --------------------------------------------------------------------------------------------------------


def test_the_example_policy_runs_and_repeats() -> None:
    head_start = load(ROOT / "examples" / "own_policy.py").HeadStart
    first, again = (thebes.simulate("philly-sample", "8x8", head_start(), limit=200) for _ in range(2))
    assert first.metrics["completed"] == 200
    assert first.jobs.equals(again.jobs)


def test_the_example_policy_runs_from_the_command_line() -> None:
    out = run(
        f"thebes simulate philly-sample --cluster 8x8 --policy {ROOT}/examples/own_policy.py:HeadStart "
        "--set head_start_s=1800 --limit 100"
    )
    assert "head-start" in out


def test_the_sweep_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = load(ROOT / "examples" / "sweep.py")
    sweep.main(["philly-sample", "8x8", "--jobs", "100"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(sweep.LIMITS)
    assert lines[0].split()[0] == "limit"


def test_the_example_cluster_is_the_one_of_the_page() -> None:
    text = (ROOT / "examples" / "cluster.toml").read_text(encoding="utf-8")
    assert FILES["cluster.toml"] == text
    cluster = from_toml(text, "cluster.toml")
    assert cluster.describe() == "160 GPUs: 16 nodes x 8 A100, 8 nodes x 4 V100, 3 racks"
    assert set(cluster.links) == {"group", "node", "rack", "cluster"}


# --- tables ----------------------------------------------------------------------------------------------------------


def standing() -> dict[tuple[Path, str], str]:
    """The tables in the pages."""
    return {
        (page, name): body for page in PAGES for name, body in tables.blocks(page.read_text(encoding="utf-8")).items()
    }


def test_every_table_has_a_maker() -> None:
    makers = tables.quick_tables() | tables.slow_tables()
    assert {name for _, name in standing()} == set(makers)


@pytest.mark.parametrize("name", list(tables.quick_tables()))
def test_table_is_that_of_the_code(name: str) -> None:
    made = tables.quick_tables()[name]()
    for (page, standing_name), body in standing().items():
        if standing_name == name:
            assert body == made, f"{page.name} is out of date: run python docs/tables.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", list(tables.slow_tables()))
def test_table_is_that_of_the_simulation(name: str, shared: Path) -> None:
    made = tables.slow_tables()[name]()
    for (page, standing_name), body in standing().items():
        if standing_name == name:
            assert body == made, f"{page.name} is out of date: run python docs/tables.py --all, and read the page again"


def test_the_readme_lists_the_registry() -> None:
    rows = tables.blocks((ROOT / "README.md").read_text(encoding="utf-8"))["policies"].splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(registry())


def test_the_demo_table_is_made_as_make_demo_makes_it() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    command = next(line for line in makefile.splitlines() if "thebes compare" in line)
    assert command.split()[1:6] == tables.DEMO.split()[:5]


def test_every_format_is_explained() -> None:
    from thebes.trace import FORMATS

    text = (ROOT / "docs" / "traces.md").read_text(encoding="utf-8")
    assert all(f"| `{known.name}` |" in text.split("The format is detected")[1] for known in FORMATS)


# --- links and machines ----------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("https://", "http://")):
            continue
        file, _, heading = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not heading or heading in anchors(target), link


NAMED_TEST = re.compile(r"`((?:tests/)?[\w/]*test_\w+\.py|tests/[\w/]+)`")


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
def test_named_tests_exist(page: Path) -> None:
    for named in NAMED_TEST.findall(page.read_text(encoding="utf-8")):
        if named.startswith("tests/"):
            assert (ROOT / named).exists(), named
        else:  # a second file of the folder named just before
            assert list((ROOT / "tests").rglob(named)), named


def test_the_picture_is_small() -> None:
    assert all(image.stat().st_size < 150_000 for image in (ROOT / "docs" / "images").iterdir())


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
def test_no_machine_is_named(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for word in ("/work/", "/home/", "/tmp/", os.uname().nodename):
        assert word not in text


def test_licence_is_the_whole_apache_licence() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
