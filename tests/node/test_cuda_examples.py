"""The GPU examples: clear words where there is no GPU, and the comparison of losses."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "gpu"


@pytest.fixture
def time_slicing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("time_slicing", FOLDER / "time_slicing.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "time_slicing", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a GPU")
@pytest.mark.parametrize("script", ["time_slicing", "packing", "acceptance"])
def test_without_gpu_or_torch_they_say_so_in_one_line(script: str) -> None:
    done = subprocess.run([sys.executable, FOLDER / f"{script}.py"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "PyTorch" in done.stderr or "no NVIDIA driver" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_training_script_imports_nothing_of_ours() -> None:
    assert "thebes" not in (FOLDER / "train_plain.py").read_text().replace("Thebes", "")


def test_losses_are_compared_at_equal_steps_as_printed(time_slicing: ModuleType) -> None:
    same = time_slicing.compare("a", {10: "2.5", 20: "2.25"}, {10: "2.5", 20: "2.25", 30: "2.0"})
    assert (same["losses_compared"], same["differ"], same["last_step"]) == (2, 0, 20)
    other = time_slicing.compare("a", {10: "2.5", 20: "2.25"}, {10: "2.5", 20: "2.26"})
    assert (other["differ"], other["first_difference_at_step"]) == (1, 20)
    assert other["largest_difference"] == pytest.approx(0.01)
    assert time_slicing.compare("a", {}, {10: "2.5"})["losses_compared"] == 0
