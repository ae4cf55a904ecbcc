"""What cannot be written is found out before the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from thebes.model.errors import UserError
from thebes.report.files import check_target


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it is a folder"):
        check_target(tmp_path)


def test_a_place_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root, whom nothing is denied
    with pytest.raises(UserError, match="permission denied") as error:
        check_target(tmp_path / "report.html")
    assert "that you may write to" in error.value.hint


def test_missing_folders_are_made(tmp_path: Path) -> None:
    check_target(tmp_path / "a" / "b" / "report.html")
    assert (tmp_path / "a" / "b").is_dir()
