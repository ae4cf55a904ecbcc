"""Command and environment of ranks: pure functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.node_cluster import launch
from thebes.model.errors import UserError
from thebes.node import suspend
from thebes.node.gpus import discover, looked_at_again, numbered, virtual_gpus
from thebes.node.torchrun import code_of
from thebes.protocol.contract import Gpu, Part, Refused
from thebes.protocol.launch import TORCHRUN, PartLaunch, part_launch, torchrun_command

REAL = (Gpu(0, uuid="GPU-aa"), Gpu(1, uuid="GPU-bb"), Gpu(2, uuid="GPU-cc"))


def part(one=None, index: int = 0, gpus=REAL, base=None, **more) -> PartLaunch:
    return part_launch(
        one or launch("5", "python", "train.py", **more),
        index,
        gpus=gpus,
        base_env=base or {},
        attempt_dir="/a",
        poke="/p",
        master_addr="127.0.0.1",
        master_port=23456,
    )


def test_real_gpus_are_named_by_uuid_and_virtual_ones_by_number() -> None:
    assert part(parts=(Part("n0", (2, 0)),)).env["CUDA_VISIBLE_DEVICES"] == "GPU-cc,GPU-aa"
    found = part(parts=(Part("n0", (2, 0)),), gpus=virtual_gpus(3)).env
    assert (found["CUDA_VISIBLE_DEVICES"], found["THEBES_VIRTUAL_GPUS"]) == ("2,0", "1")


def test_ranks_are_numbered_through_the_parts() -> None:
    parts = (Part("n0", (0, 1, 2)), Part("n1", (0, 1)))
    second = part(parts=parts, index=1)
    assert [one.rank for one in second.ranks] == [3, 4]
    assert second.ranks[1].env == {"RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert (second.env["NODE_RANK"], second.env["THEBES_NODE_NAMES"]) == ("1", "n0,n1")
    assert (second.env["THEBES_GPUS"], second.env["THEBES_GPUS_PER_NODE"]) == ("5", "2")


def test_one_process_per_node_if_wished() -> None:
    parts = (Part("n0", (0, 1, 2)), Part("n1", (0, 1)))
    assert [one.rank for one in part(parts=parts, index=1, ranks_per_node=1).ranks] == [1]


def test_the_jobs_own_variables_win_over_the_nodes_and_ours_over_both() -> None:
    base = {"PATH": "/bin", "A": "node", "RANK": "7", "THEBES_DIR": "/x", "THEBES_TOKEN": "secret"}
    found = part(base=base, env={"A": "job", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}).env
    assert (found["PATH"], found["A"]) == ("/bin", "job")
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "THEBES_DIR" not in found
    assert "THEBES_TOKEN" not in found
    assert "RANK" not in found


def test_output_is_not_held_back_unless_the_job_says_so() -> None:
    assert part().env["PYTHONUNBUFFERED"] == "1"
    assert part(env={"PYTHONUNBUFFERED": ""}).env["PYTHONUNBUFFERED"] == ""


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(Refused, match="node n0 has no GPU 3: it has 3"):
        part(parts=(Part("n0", (3,)),))


OPTIONS = (
    *("--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "4"),
    *("--master-addr", "127.0.0.1", "--master-port", "23456"),
)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("python", "train.py", "--lr", "1"), ("python", str(TORCHRUN), *OPTIONS, "train.py", "--lr", "1")),
        (("/v/bin/python3.11", "-u", "train.py"), ("/v/bin/python3.11", "-u", str(TORCHRUN), *OPTIONS, "train.py")),
        (("python", "-X", "dev", "-m", "my.train"), ("python", "-X", "dev", str(TORCHRUN), *OPTIONS, "-m", "my.train")),
        (("train.py", "x"), ("python", str(TORCHRUN), *OPTIONS, "train.py", "x")),
        (("./run.sh", "x"), ("python", str(TORCHRUN), *OPTIONS, "--no-python", "./run.sh", "x")),
    ],
)
def test_torchrun_takes_the_place_of_the_interpreters_script(
    command: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    found = torchrun_command(command, nodes=2, node_rank=1, ranks=4, master_addr="127.0.0.1", master_port=23456)
    assert found == expected


@pytest.mark.parametrize("command", [("python", "-c", "1"), ("python",), ("python", "-u")])
def test_torchrun_needs_a_script(command: tuple[str, ...]) -> None:
    with pytest.raises(Refused, match="torchrun needs a script"):
        torchrun_command(command, nodes=1, node_rank=0, ranks=1, master_addr="", master_port=1)


def test_under_torchrun_there_is_one_process_per_node() -> None:
    parts = (Part("n0", (0, 1)), Part("n1", (0, 1)))
    found = part(parts=parts, index=1, launcher="torchrun")
    assert [one.rank for one in found.ranks] == [1]
    assert "--nproc-per-node" in found.command
    assert "RANK" not in {**found.env, **found.ranks[0].env}


@pytest.mark.parametrize(
    ("codes", "code"), [({85}, 85), ({85, -15}, 85), ({85, 1}, None), ({1}, None), ({-15}, None), (set(), None)]
)
def test_torchrun_ends_with_85_when_its_workers_did(codes: set[int], code: int | None) -> None:
    assert code_of(codes) == code


def test_what_nodes_offer() -> None:
    assert suspend.offered(virtual_gpus(2)) == ("checkpoint", "freeze")
    assert suspend.offered(REAL)[0] == "checkpoint"
    assert "freeze" not in suspend.offered(REAL)


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="there is a driver")
def test_without_a_driver_the_message_says_what_to_do() -> None:
    with pytest.raises(UserError, match="no NVIDIA GPU can be used") as error:
        discover()
    assert "`nvidia-smi`" in error.value.hint
    assert "`thebes up --virtual-gpus N`" in error.value.hint
    assert "doctor" not in error.value.hint  # it says the same


@pytest.mark.skipif(not Path("/proc/driver/nvidia").exists(), reason="there is no NVIDIA driver")
def test_real_gpus_are_found() -> None:
    assert all(gpu.uuid.startswith("GPU-") and gpu.memory_gib > 0 and gpu.healthy for gpu in discover())


def test_gpus_keep_their_numbers_when_one_of_them_goes() -> None:
    known = tuple(Gpu(index, uuid=f"GPU-{index}", name="H200") for index in range(3))
    found = (Gpu(0, uuid="GPU-0", name="H200"), Gpu(1, uuid="GPU-2", name="H200"))
    again = looked_at_again(known, found)
    assert [(gpu.index, gpu.uuid, gpu.healthy) for gpu in again] == [
        (0, "GPU-0", True),
        (1, "GPU-1", False),
        (2, "GPU-2", True),
    ]
    assert not any(gpu.healthy for gpu in looked_at_again(known, ()))


def real(*uuids: str) -> tuple[Gpu, ...]:
    """As the driver tells them: numbered one after the other."""
    return tuple(Gpu(index, uuid=uuid, name="H200") for index, uuid in enumerate(uuids))


@pytest.mark.parametrize(
    ("known", "found", "expected"),
    [
        ("", "abc", "abc"),  # the first start
        ("", "abcd", "abc"),
        ("", "ab", "ab-"),
        ("", "", "---"),
        ("abc", "abc", "abc"),
        ("abc", "cab", "abc"),
        ("abc", "ac", "aBc"),  # one is gone: the others keep their numbers
        ("abc", "", "ABC"),
        ("abc", "acx", "axc"),  # it was replaced by a new one
        ("ab", "abc", "abc"),
        ("ab", "bc", "cb-"),
        ("abcd", "abd", "abd"),  # made smaller because one is gone
    ],
)
def test_a_node_that_comes_up_keeps_the_numbers_of_its_gpus(known: str, found: str, expected: str) -> None:
    gpus = numbered(3, real(*known), real(*found))
    assert [gpu.index for gpu in gpus] == [0, 1, 2]
    assert [gpu.uuid or "-" for gpu in gpus] == list(expected.lower())
    assert [gpu.healthy for gpu in gpus] == [letter.islower() for letter in expected]


def test_a_gpu_that_does_not_answer_keeps_its_place() -> None:
    silent = (Gpu(0, uuid="a"), Gpu(1, healthy=False), Gpu(2, uuid="c"))
    assert [(gpu.uuid, gpu.healthy) for gpu in numbered(3, (), silent)] == [("a", True), ("", False), ("c", True)]
    assert [gpu.uuid for gpu in numbered(3, real("a", "b", "c"), silent)] == ["a", "b", "c"]
    assert [gpu.uuid for gpu in numbered(3, silent, real("a", "b", "c"))] == ["a", "b", "c"]


def test_nothing_starts_on_a_gpu_that_the_driver_does_not_see() -> None:
    with pytest.raises(Refused, match="no GPU 1"):
        part(gpus=(REAL[0], Gpu(1, healthy=False)), parts=(Part("n0", (0, 1)),))
