"""Clusters: three notations, one meaning; and every mistake in them told in one message."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from thebes import UserError, read_cluster
from thebes.model.cluster import Cluster, Link, NodeKind, build, from_short_form, from_tiresias_csv, from_toml

# --- short forms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "racks", "nodes", "gpus"),
    [("8x8", 1, 8, 64), ("1x1", 1, 1, 1), ("4x8x8", 4, 32, 256), ("12500x8", 1, 12_500, 100_000)],
)
def test_short_forms(text: str, racks: int, nodes: int, gpus: int) -> None:
    cluster = read_cluster(text)
    assert (cluster.num_racks, cluster.num_nodes, cluster.total_gpus, cluster.name) == (racks, nodes, gpus, text)
    assert np.bincount(cluster.node_rack).tolist() == [nodes // racks] * racks


@pytest.mark.parametrize("text", ["8", "8x", "x8", "8x8x8x8", "8*8", "8X8", "-8x8", "8x8.csv", "", "9" * 200 + "x8"])
def test_what_is_not_a_short_form(text: str) -> None:
    assert from_short_form(text) is None


def test_a_node_has_a_contiguous_range_of_gpus() -> None:
    cluster = read_cluster("2x2x3")
    assert cluster.gpu_node.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert cluster.node_first_gpu.tolist() == [0, 3, 6, 9]
    assert cluster.node_rack.tolist() == [0, 0, 1, 1]
    assert cluster.gpu_group.tolist() == cluster.gpu_node.tolist()  # without groups a node is one
    assert cluster.describe() == "12 GPUs: 4 nodes x 3, 2 racks"


def test_one_of_each_is_told_in_the_singular() -> None:
    assert read_cluster("1x8").describe() == "8 GPUs: 1 node x 8, 1 rack"


# --- the Tiresias CSV -------------------------------------------------------------------------------------------------

HEADER = "num_switch,num_node_p_switch,num_gpu_p_node,num_cpu_p_node,mem_p_node\n"


def test_tiresias_csv() -> None:
    cluster = from_tiresias_csv(HEADER + "5,32,8,64,256\n", "n160g8.csv")
    assert (cluster.num_racks, cluster.num_nodes, cluster.total_gpus) == (5, 160, 1280)
    assert cluster.kinds == (NodeKind(8, cpus=64, memory_gib=256),)


def test_tiresias_csv_as_people_save_it(tmp_path: Path) -> None:
    """Byte order mark, Windows line ends, blanks, columns in another order, no CPUs and memory."""
    path = tmp_path / "spec.csv"
    path.write_bytes("\ufeff\r\nnum_gpu_p_node, num_switch , num_node_p_switch\r\n 4,1, 16\r\n\r\n".encode())
    assert read_cluster(str(path)).describe() == "64 GPUs: 16 nodes x 4, 1 rack"


@pytest.mark.parametrize(
    ("name", "shape"),
    [("cluster_spec.csv", (1, 16, 4)), ("n32g4.csv", (1, 32, 4)), ("n160g8.csv", (5, 32, 8)), ("n8g8.csv", (1, 8, 8))],
)
def test_the_published_specifications(shared: Path, name: str, shape: tuple[int, int, int]) -> None:
    cluster = read_cluster(str(shared / "tiresias" / name))
    racks, nodes, gpus = shape
    assert (cluster.num_racks, cluster.num_nodes, set(cluster.node_gpus.tolist())) == (racks, racks * nodes, {gpus})


# --- TOML -------------------------------------------------------------------------------------------------------------

FULL = """
name = "lab"

[[node]]
count = 4
racks = 2
gpus = 8
gpu_type = "A100"
gpu_memory_gib = 80
groups = [4, 4]
cpus = 128
memory_gib = 1024.5

[[node]]
count = 3
rack = "old"
gpus = 2
gpu_type = "V100"

[[node]]
rack = "old"
gpus = 1

[link.group]
bandwidth_gbps = 2400
[link.rack]
bandwidth_gbps = 100
latency_us = 2.5
"""


def lab() -> Cluster:
    return from_toml(FULL, "lab.toml")


def test_a_real_cluster() -> None:
    cluster = lab()
    assert cluster.name == "lab"
    assert cluster.describe() == "39 GPUs: 4 nodes x 8 A100, 3 nodes x 2 V100, 1 node x 1, 3 racks"
    assert cluster.kinds[0] == NodeKind(8, "A100", 80.0, (4, 4), 128, 1024.5)
    assert cluster.kinds[2] == NodeKind(1)
    assert cluster.node_rack.tolist() == [0, 0, 1, 1, 2, 2, 2, 2]
    assert cluster.kind_gpus.tolist() == [32, 6, 1]
    assert cluster.links == {"group": Link(2400.0), "rack": Link(100.0, 2.5)}


def test_groups_are_numbered_through_the_cluster() -> None:
    assert lab().gpu_group[:16].tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert lab().gpu_group[32:].tolist() == [8, 8, 9, 9, 10, 10, 11]


def test_nodes_of_one_rack_stand_together_even_if_written_apart() -> None:
    text = "".join(f'[[node]]\nrack = "{rack}"\ngpus = {gpus}\n' for rack, gpus in (("a", 1), ("b", 2), ("a", 3)))
    cluster = from_toml(text, "apart.toml")
    assert cluster.node_rack.tolist() == [0, 0, 1]
    assert cluster.node_gpus.tolist() == [1, 3, 2]


def test_equal_tables_are_one_kind_and_unnamed_racks_one_rack() -> None:
    cluster = from_toml("[[node]]\ncount = 2\ngpus = 4\n[[node]]\ngpus = 4\n", "two.toml")
    assert cluster.describe() == "12 GPUs: 3 nodes x 4, 1 rack"
    assert (len(cluster.kinds), cluster.name) == (1, "two.toml")


def test_a_toml_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "notepad.toml"
    path.write_text("\ufeff[[node]]\ngpus = 8\n", encoding="utf-8")
    assert read_cluster(str(path)).total_gpus == 8


# --- every message ----------------------------------------------------------------------------------------------------


def complaint(content: str | bytes, path: Path) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError) as caught:
        read_cluster(str(path))
    return str(caught.value).replace(f"{path.parent}/", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0x8", "cluster '0x8' has no GPUs\nevery number must be at least 1, as in 8x8"),
        ("8x0x8", "cluster '8x0x8' has no GPUs"),
        ("9999999x8", "cluster '9999999x8' has more than 10,000,000 GPUs\nthe order is nodes x GPUs per node"),
    ],
)
def test_mistakes_in_a_short_form(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_cluster(text)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("num_switch,num_gpu_p_node\n1,8\n", "spec.csv, line 1: no column 'num_node_p_switch'\nexpected num_switch,"),
        (HEADER, "spec.csv: a header but no data line\nadd one line such as 1,8,8,64,256"),
        (HEADER + "1,eight,8,1,1\n", "spec.csv, line 2, column 'num_node_p_switch': 'eight' is not a whole number"),
        (HEADER + "1,8.5,8,1,1\n", "column 'num_node_p_switch': '8.5' is not a whole number\nwrite it in digits"),
        (HEADER + "1,8,0,1,1\n", "spec.csv, line 2, column 'num_gpu_p_node': must be at least 1\na cluster needs GPUs"),
        (HEADER + "1,8\n", "spec.csv, line 2, column 'num_gpu_p_node': must be at least 1"),
        (HEADER + "10000,10000,8,1,1\n", "spec.csv: more than 10,000,000 GPUs\ncheck the three numbers of line 2"),
        ("num_switch," + "x" * 200_000, "spec.csv: not a CSV file: field larger than field limit"),
    ],
)
def test_mistakes_in_a_tiresias_csv(content: str, message: str, tmp_path: Path) -> None:
    assert message in complaint(content, tmp_path / "spec.csv")


NODE = "[[node]]\ngpus = 8\n"


def test_nodes_that_differ_only_in_cpus_and_memory_are_one_kind_for_a_gang() -> None:
    cluster = from_toml(NODE + "cpus = 64\n" + NODE + "memory_gib = 512\n" + NODE + 'gpu_type = "A100"\n', "c.toml")
    assert cluster.node_kind.tolist() == [0, 0, 1]


def test_nodes_of_one_kind_count_as_having_what_the_poorest_of_them_has() -> None:
    rich, poor = NodeKind(8, cpus=96, memory_gib=512), NodeKind(8, cpus=48)
    for given in ((rich, poor), (poor, rich)):
        cluster = build("lab", [(kind, 1, [0]) for kind in given])
        assert cluster.kinds == (NodeKind(8, cpus=48, memory_gib=512),)


def test_more_kinds_than_a_gang_can_choose_from(tmp_path: Path) -> None:
    text = "".join(f"[[node]]\ngpus = {gpus}\n" for gpus in range(1, 64))
    assert "c.toml: more than 62 kinds of node\ndescribe equal nodes by equal" in complaint(text, tmp_path / "c.toml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[node\n", "c.toml: not valid TOML: "),
        ("nodes = 8\n", "c.toml: unknown key 'nodes'\ndid you mean 'node'?"),
        ('name = "x"\n', "c.toml: no [[node]] table\nadd [[node]] with count = 8 and gpus = 8"),
        ("[node]\ngpus = 8\n", "c.toml: no [[node]] table"),
        ("node = [8]\n", "c.toml: no [[node]] table"),
        (NODE + "count = 9999999\n", "c.toml, [[node]] number 1: more than 10,000,000 GPUs\ncheck `count` and `gpus`"),
        (NODE + "count = 1000000000000000000000\n", "c.toml, [[node]] number 1: more than 10,000,000 GPUs"),
        (NODE + "gpu_typ = 'A100'\n", "c.toml, [[node]] number 1: unknown key 'gpu_typ'\ndid you mean 'gpu_type'?"),
        ("[[node]]\ncount = 2\n", "c.toml, [[node]] number 1: no 'gpus'\nadd gpus = 8"),
        (NODE + "[[node]]\ngpus = 0\n", "[[node]] number 2: gpus = 0 is not a whole number of at least 1"),
        ("[[node]]\ngpus = true\n", "gpus = True is not a whole number of at least 1\nwrite gpus = 8"),
        (NODE + "count = 1.5\n", "count = 1.5 is not a whole number of at least 1"),
        (NODE + "cpus = -1\n", "cpus = -1 is not a whole number of at least 1"),
        (NODE + "memory_gib = 0\n", "memory_gib = 0 is not a positive number\nleave memory_gib out if it is unknown"),
        (NODE + "gpu_memory_gib = inf\n", "gpu_memory_gib = inf is not a positive number"),
        (NODE + "gpu_memory_gib = 'big'\n", "gpu_memory_gib = 'big' is not a positive number"),
        (NODE + "groups = 4\n", "groups = 4 is not a list of sizes\nwrite groups = [4, 4]"),
        (NODE + "groups = [4, 0, 4]\n", "groups = [4, 0, 4] is not a list of sizes"),
        (NODE + "groups = [true, 7]\n", "groups = [True, 7] is not a list of sizes"),
        (NODE + "groups = [4, 2]\n", "[[node]] number 1: groups add up to 6, but gpus = 8\nmake them equal"),
        (NODE + "gpu_type = 100\n", "gpu_type = 100 is not a name\nwrite gpu_type = \"A100\""),
        (NODE + "rack = 'a'\nracks = 2\n", "both 'rack' and 'racks'\nname one rack, or say over how many to spread"),
        (NODE + "count = 3\nracks = 2\n", "3 nodes do not spread evenly over 2 racks\nuse one [[node]] table per rack"),
        ("link = 4\n" + NODE, "c.toml: 'link' is not a set of tables\nwrite [link.node] and so on"),
        (NODE + "[link.racks]\n", "c.toml: unknown tier [link.racks]\ndid you mean 'rack'?"),
        (NODE + "[link]\nnode = 4\n", "c.toml, [link.node] is not a table\nwrite bandwidth_gbps = 100 below it"),
        (NODE + "[link.node]\nbandwith = 4\n", "[link.node]: unknown key 'bandwith'\ndid you mean 'bandwidth_gbps'?"),
        (NODE + "[link.node]\nlatency_us = -1\n", "c.toml, [link.node]: latency_us = -1 is not a positive number"),
    ],
)  # fmt: skip
def test_mistakes_in_toml(content: str, message: str, tmp_path: Path) -> None:
    assert message in complaint(content, tmp_path / "c.toml")


FORMS = "give nodes x GPUs (8x8), racks x nodes x GPUs (4x8x8), a TOML file or a Tiresias CSV"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", f"c.toml: the file is empty\n{FORMS}"),
        ("\ufeff \n\n", f"c.toml: the file is empty\n{FORMS}"),
        (b"\x80\x81\xfe junk", f"c.toml: not a text file\n{FORMS}"),
        (b"#" * ((16 << 20) + 1), f"c.toml: too large for a cluster file\n{FORMS}"),
    ],
    ids=["empty", "blank", "binary", "huge"],
)
def test_files_that_are_no_cluster(content: str | bytes, message: str, tmp_path: Path) -> None:
    assert complaint(content, tmp_path / "c.toml") == message


def test_a_folder_a_missing_file_and_a_path_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "lab.toml").write_text(NODE)
    for spec, message in (
        (tmp_path, f"{tmp_path} is a folder, not a cluster file\n{FORMS}"),
        (tmp_path / "lap.toml", "no such file, and not a short form either\ndid you mean 'lab.toml'?"),
        (tmp_path / "8by8", f"no such file, and not a short form either\n{FORMS}"),
        (tmp_path / "zzz.csv", f"no such file, and not a short form either\n{FORMS}"),
        (tmp_path / "lab.toml" / "x.toml", f"Not a directory\n{FORMS}"),
        ("lab\0.toml", f"embedded null byte\n{FORMS}"),
    ):
        with pytest.raises(UserError) as caught:
            read_cluster(str(spec))
        assert str(caught.value).endswith(message)
