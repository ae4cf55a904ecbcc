"""`thebes plan`: the table, every plan of one allocation, JSON and drawings, and what it refuses."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from thebes.cli.plan import _survey_table, gpu_counts
from thebes.model.errors import UserError
from thebes.model.plan import parse_plan
from thebes.perf.plans.site import A800
from thebes.perf.plans.survey import survey
from thebes.perf.plans.transformer import find, names

OWN = """
layers = 8
hidden = 1024
heads = 8
sequence = 512
global_batch = 8
"""


def rows_of(out: str) -> dict[int, str]:
    """The lines of a table that begin with a number of GPUs."""
    return {int(found[1]): found[0] for found in re.finditer(r"^ +(\d+) .*$", out, re.MULTILINE)}


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_every_usable_number_of_gpus(thebes) -> None:
    ran = thebes("plan", "llama-2-7b")

    assert ran.code == 0
    assert list(rows_of(ran.out)) == [1, 2, 4, 8, 16, 32, 64]
    assert "6.74 billion parameters, 32 layers of 4096, 32 heads, sequences of 2048, global batch 8" in ran.out
    for head in ("GPUs", "nodes", "best plan", "s/iter", "samples/s", "speedup", "GPU GiB", "host GiB", "CPUs"):
        assert head in ran.out
    assert "zero-offload1" in rows_of(ran.out)[1]
    assert "1.0x" in rows_of(ran.out)[1]


def test_numbers_of_gpus_that_no_plan_uses_are_told_with_the_reason(thebes) -> None:
    ran = thebes("plan", "llama-2-7b", "--gpus", "1..8")

    assert "not 3, 5-7: no plan divides batch 8, 32 heads and 32 layers over so many GPUs" in ran.out


def test_rejected_plans_are_counted_by_reason(thebes) -> None:
    assert "GPU memory" in rows_of(thebes("plan", "llama-2-7b", "--gpus", 1).out)[1]
    assert "batch" in rows_of(thebes("plan", "llama-2-7b", "--gpus", 16).out)[16]


def test_an_allocation_that_fewer_gpus_come_within_1_percent_of_is_marked(thebes) -> None:
    ran = thebes("plan", "gpt-2", "--gpus", "4,5,8")

    assert "≈ 4" in rows_of(ran.out)[5]  # five GPUs can only be split five ways over the heads
    assert "≈" not in rows_of(ran.out)[4]
    assert "N GPUs are as fast, or within 1 %" in ran.out


@pytest.mark.parametrize("model", names())
def test_a_narrow_screen_gets_a_narrow_table(model: str) -> None:
    text = io.StringIO()

    Console(file=text, width=80).print(_survey_table(survey(find(model), A800, range(1, 65), 12), roomy=False))

    assert "…" not in text.getvalue()


def test_a_table_is_not_cut_in_a_pipe() -> None:
    command = [sys.executable, "-c", "from thebes.cli import main; main()", "plan", "llama-2-7b"]

    piped = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "…" not in piped
    assert max(map(len, piped.splitlines())) <= 140


def test_options_reach_the_survey(thebes) -> None:
    few = thebes("plan", "gpt-2", "--gpus", 8, "--node-size", 4, "--gpu-type", "a100-40gb", "--batch", 32, "--cpus", 3)
    spread = thebes("plan", "gpt-2", "--gpus", 8, "--nodes", 4)

    assert "global batch 32" in few.out
    assert "on nodes of 4 x A100-40GB, 48 CPUs, 800 GiB" in few.out
    assert rows_of(few.out)[8].split()[1] == "2"
    assert rows_of(spread.out)[8].split()[1] == "4"


def test_a_model_of_ones_own(thebes, tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(OWN)

    ran = thebes("plan", path, "--gpus", "1,2,3")

    assert ran.code == 0
    assert "tiny: 101 million parameters" in ran.out
    assert list(rows_of(ran.out)) == [1, 2]


# --- why --------------------------------------------------------------------------------------------------------------


def test_why_shows_every_plan_that_fits_and_why_the_others_do_not(thebes) -> None:
    ran = thebes("plan", "llama-2-7b", "--why", 1)

    assert "plans fit" in ran.out
    assert "18 plans rejected" in ran.out
    assert re.search(r"dp1\+ga8 +needs 142.2 GiB on each GPU, has 80", ran.out)


def test_what_was_measured_stands_beside_what_is_predicted(thebes) -> None:
    ran = thebes("plan", "gpt-2", "--why", 8)

    assert re.search(r"zero-dp8 +0\.\d+ +0\.530 ", ran.out)
    assert "measured" not in thebes("plan", "gpt-2", "--why", 8, "--gpu-type", "h100").out


def test_a_very_large_allocation(thebes) -> None:
    ran = thebes("plan", "gpt-2", "--gpus", 3840, "--batch", 3840)

    assert ran.code == 0
    assert list(rows_of(ran.out)) == [3840]


def test_why_explains_a_number_of_gpus_that_nothing_fits(thebes) -> None:
    ran = thebes("plan", "llama-2-7b", "--why", 3)

    assert ran.code == 0
    assert "no plan fits" in ran.out
    assert "tp 3 does not divide 32 heads: 2 or 4 would do" in ran.out
    assert "global batch 8 is not divisible by dp 3: 2 or 4 would do" in ran.out


# --- files ------------------------------------------------------------------------------------------------------------


def test_json_has_every_plan_and_every_reason(thebes) -> None:
    found = json.loads(thebes("plan", "llama-2-7b", "--gpus", "1..4", "--json", "-").out)

    assert found["model"]["name"] == "llama-2-7b"
    assert found["site"]["gpu_type"] == "A800-80GB"
    assert [row["gpus"] for row in found["allocations"]] == [1, 2, 3, 4]
    one, _, three, _ = found["allocations"]
    seconds = [plan["iteration_s"] for plan in one["plans"]]
    assert seconds == sorted(seconds)
    assert all(parse_plan(plan["plan"]).gpus == 1 for plan in one["plans"] + one["rejected"])
    assert sum(v for k, v in one["breakdown_s"].items() if k not in ("total", "wire_s")) == pytest.approx(seconds[0])
    assert three["plans"] == []
    assert three["why_none"].startswith("no plan divides")
    assert {no["obstacle"] for no in three["rejected"]} == {"batch", "heads", "layers"}


def test_json_goes_into_a_file(thebes, tmp_path: Path) -> None:
    ran = thebes("plan", "vit", "--gpus", 8, "--json", tmp_path / "plans.json")

    assert f"json: {tmp_path / 'plans.json'}" in ran.err
    assert json.loads((tmp_path / "plans.json").read_text())["allocations"][0]["near_equal_gpus"] == 8


@pytest.mark.parametrize(
    ("name", "begins"), [("p.html", b"<!doctype html>"), ("p.png", b"\x89PNG"), ("p.pdf", b"%PDF")]
)
def test_a_drawing_in_each_format(thebes, tmp_path: Path, name: str, begins: bytes) -> None:
    ran = thebes("plan", "llama-2-7b", "--plot", tmp_path / name)

    assert ran.code == 0
    assert f"plot: {tmp_path / name}" in ran.err
    assert (tmp_path / name).read_bytes().startswith(begins)


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("lama-2-7b",), "unknown model 'lama-2-7b'", "did you mean 'llama-2-7b'?"),
        (("none.toml",), "none.toml: no such file", "llama-2-7b"),
        (("llama-2-7b", "--gpus", 3), "llama-2-7b cannot use 3 GPUs", "2 or 4 GPUs would do"),
        (("llama-2-7b", "--gpus", 3), "no plan divides batch 8", "a global batch of 6 or 9 (--batch)"),
        (("vit", "--gpus", "9..15"), "no plan divides batch 64 over so many GPUs", "8 or 16 GPUs would do"),
        (("vit", "--gpus", 4, "--batch", 10), "no plan divides batch 10", "2 or 5 GPUs would do"),
        (("llama-30b", "--gpus", "1,2"), "too large for 1 to 2 GPUs of type A800-80GB", "4 GPUs would do"),
        (
            ("llama-2-7b", "--gpu-type", "t4", "--gpus", "1..4"),
            "the most frugal plan needs 17.8 GiB on each GPU, has 16",
            "8 GPUs would do",
        ),
        (("gpt-2", "--gpus", "0"), "--gpus: 0 is not between 1 and 4,096", "1..64"),
        (("gpt-2", "--gpus", "many"), "--gpus: 'many' is neither a number nor a range", "1,2,4,8"),
        (("gpt-2", "--gpus", "1,,2"), "--gpus: '' is neither a number nor a range", "1,2,4,8"),
        (("gpt-2", "--gpus", "8..1"), "--gpus: 8..1 runs backwards", "write 1..8"),
        (("gpt-2", "--cpus", 0), "--cpus 0: a node has 96 CPUs for 8 GPUs", "from 1 to 12 per GPU"),
        (("gpt-2", "--gpus", 8, "--cpus", 13), "--cpus 13: a node has 96 CPUs", "from 1 to 12 per GPU"),
        (("gpt-2", "--gpus", 8, "--nodes", 9), "--nodes 9: 8 GPUs cannot lie on 9 nodes", "leave --nodes out"),
        (("llama-2-7b", "--gpus", "3,8", "--nodes", 9), "--nodes 9: 8 GPUs cannot lie on 9", "leave --nodes out"),
        (("llama-30b", "--gpus", "1,8", "--cpus", 20), "--cpus 20: 20 CPUs for each of 8 GPUs", "leave --cpus out"),
        (("llama-2-7b", "--gpus", "3,5"), "llama-2-7b cannot use 3 or 5 GPUs", "2 or 4 GPUs would do"),
        (("gpt-2", "--nodes", 0), "--nodes 0 is not between", "--nodes 8"),
        (("gpt-2", "--node-size", 0), "--node-size 0 is not between", "--node-size 8"),
        (("gpt-2", "--why", 0), "--why 0 is not between", "--why 8"),
        (("gpt-2", "--batch", 0), "model gpt-2: global_batch = 0 is not a whole number", "write global_batch = 8"),
        (("gpt-2", "--gpu-type", "a800x"), "unknown GPU type 'a800x'", "a800-80gb"),
        (("gpt-2", "--plot", "p.svg"), "--plot p.svg: the name must end in .html, .png, .pdf", "write p.html"),
    ],
)
def test_mistakes_are_told_with_what_would_do(thebes, words: tuple[object, ...], message: str, hint: str) -> None:
    ran = thebes("plan", *words)

    assert ran.code == 2
    assert message in ran.err
    assert hint in ran.err
    assert ran.out == ""


@pytest.mark.parametrize(
    ("text", "counts"),
    [("8", [8]), ("1,2,4", [1, 2, 4]), ("1..4", [1, 2, 3, 4]), ("2-4", [2, 3, 4]), ("8, 1..2,2", [1, 2, 8])],
)
def test_lists_and_ranges_of_gpus(text: str, counts: list[int]) -> None:
    assert gpu_counts(text) == counts


def test_a_range_without_an_end_is_no_range() -> None:
    with pytest.raises(UserError, match=r"'1\.\.' is neither"):
        gpu_counts("1..")
