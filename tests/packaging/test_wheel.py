"""What people install is whole: the wheel and the sdist hold every file of the package, under one version.

`make wheel` goes on where this ends: it installs the wheel into a clean virtual environment and uses it there.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from typer.testing import CliRunner

import thebes
from thebes.cli import app

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "thebes"


def build(source: Path, into: Path) -> Path:
    """Wheel and sdist of a tree, by the build backend that pyproject.toml names."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(into)], cwd=source, check=True, timeout=120)
    return into


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def wheel_files(folder: Path) -> dict[str, bytes]:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def package_files() -> dict[str, bytes]:
    """Every file of the package as it lies here, code and data, apart from what Python writes beside it."""
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(PACKAGE.parent)): path.read_bytes() for path in files}


def test_the_wheel_holds_every_file_of_the_package(built: Path) -> None:
    found = {name: data for name, data in wheel_files(built).items() if ".dist-info/" not in name}
    expected = package_files()
    assert set(found) == set(expected)
    assert found == expected


def test_what_is_no_code_is_among_them(built: Path) -> None:
    names = set(wheel_files(built))
    assert "thebes/py.typed" in names, "type checkers believe our annotations only with this file"
    for suffix in (".csv", ".csv.gz", ".toml", ".SOURCE.md", ".css", ".js"):
        assert any(name.endswith(suffix) for name in names), suffix


def test_every_data_file_has_its_origin_beside_it() -> None:
    data = PACKAGE / "data"
    sources = [path.relative_to(data) for path in data.rglob("*SOURCE.md")]
    for path in data.rglob("*"):
        place = path.relative_to(data)
        if path.is_file() and place not in sources:
            near = [one for one in sources if one.parent == place.parent]
            named = [one for one in near if one.name == "SOURCE.md" or place.name.startswith(one.name.split(".")[0])]
            assert named, f"{place} does not say where it comes from"


def test_the_version_stands_in_one_place(built: Path) -> None:
    files = wheel_files(built)
    (metadata,) = (data for name, data in files.items() if name.endswith(".dist-info/METADATA"))
    said = Parser().parsestr(metadata.decode())
    assert said["Version"] == thebes.__version__
    assert CliRunner().invoke(app, ["--version"]).output == f"thebes {thebes.__version__}\n"
    (sdist,) = built.glob("*.tar.gz")
    assert sdist.name == f"thebes-{thebes.__version__}.tar.gz"
    own = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in own
    assert thebes.__version__ not in own


def test_the_wheel_can_be_built_from_the_sdist(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build(tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path / "dist")
    assert wheel_files(again) == wheel_files(built)


def test_the_changelog_knows_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {thebes.__version__} - 20" in text
