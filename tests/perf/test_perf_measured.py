"""Measured speeds: the table's figures at its points, bounds between them, the trend beyond, errors for the rest."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import thebes
from kit.effort import effort
from kit.workloads import shared_data, trace_of
from thebes import UserError, simulate
from thebes.model.cluster import Cluster, from_toml
from thebes.model.profiles import shape_table
from thebes.perf import Gavel, Pollux, SpeedModel
from thebes.perf.base import Gang
from thebes.perf.measured import MeasuredCurve, bracket, gavel_models, gavel_table, pollux_table
from thebes.perf.network import network_models
from thebes.perf.profiles import iterations

DATA = Path(thebes.__file__).parent / "data" / "profiles"


def of_type(gpu_type: str, nodes: int = 16, gpus: int = 16) -> Cluster:
    return from_toml(f'[[node]]\ncount = {nodes}\ngpus = {gpus}\ngpu_type = "{gpu_type}"\n', f"{gpu_type}.toml")


def seconds_of(perf: SpeedModel, model: str, gpus: int, where: Cluster) -> np.ndarray:
    nodes, tier = shape_table(min(gpus, where.num_nodes))
    times = perf.times(Gang(where, 0, model, gpus, nodes, tier))
    assert all((part >= 0).all() for part in times)
    assert (times.compute_s > 0).all()
    return iterations(times, perf.overlap_gamma)


# --- curves -----------------------------------------------------------------------------------------------------------


def test_a_curve_between_its_points_and_beyond() -> None:
    curve = MeasuredCurve((1, 2, 8), (1.0, 2.0, 4.0))
    assert [curve.at(n) for n in (1, 2, 8)] == [1.0, 2.0, 4.0]
    assert curve.at(4) == pytest.approx(2 * 2**0.5)  # half-way on both logarithmic scales
    assert curve.trend == pytest.approx(0.5)  # from 2 to 8: GPUs times four, seconds times two
    assert curve.at(32) == pytest.approx(8.0)
    assert MeasuredCurve((1, 2, 4), (3.0, 2.0, 1.0)).at(64) == 1.0  # a falling trend does not go on for ever
    assert MeasuredCurve((1, 2, 4), (1.0, 1.0, 9.0)).trend == 1.0
    assert MeasuredCurve((1, 2, 4), (1.0, 2.0, 4.0), steady=True).at(64) == 4.0


@given(st.lists(st.floats(1e-3, 1e3), min_size=4, max_size=4), st.integers(1, 64))
@effort(60)
def test_a_curve_stays_between_its_neighbours(seconds: list[float], count: int) -> None:
    curve = MeasuredCurve((1, 2, 4, 8), tuple(seconds))
    value = curve.at(count)
    if count <= 8:
        around = [s for c, s in zip(curve.counts, seconds, strict=True) if c / 2 < count < c * 2]
        assert min(around) * (1 - 1e-9) <= value <= max(around) * (1 + 1e-9)
    else:
        assert value >= seconds[-1]


def test_bracket() -> None:
    assert bracket([4, 16], 8) == (4, 16, pytest.approx(0.5))
    assert bracket([4], 4) == (4, 4, 0.0)
    assert bracket([4, 8, 16], 16) == (8, 16, 1.0)
    assert bracket([4, 8, 16], 4) == (4, 8, 0.0)
    assert bracket([4, 8], 100) == (4, 8, 1.0)


# --- Gavel ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu_type", ["V100", "P100", "K80"])
def test_gavel_at_every_measured_point(gpu_type: str) -> None:
    """Given each row of the table, the gang's iteration is GPUs / (steps per second); spread is never the faster."""
    where = of_type(gpu_type)
    for (model, gpu, batch), curves in gavel_table().items():
        if gpu != gpu_type:
            continue
        name = f"{model} (batch size {batch})" if batch else model
        for gpus, near_s in zip(curves.consolidated.counts, curves.consolidated.seconds, strict=True):
            seconds = seconds_of(Gavel(), name, gpus, where)
            assert seconds[:2] == pytest.approx(near_s)
            assert seconds[2:] == pytest.approx(max(near_s, curves.spread.at(gpus)))


def test_gavel_numbers_of_the_specification() -> None:
    """Spec 4.4: unconsolidated over consolidated on 8 V100."""
    ratios = {
        name: (lambda s: float(s[0] / s[2]))(seconds_of(Gavel(), name, 8, of_type("V100")))
        for name in ("LM (batch size 20)", "ResNet-18 (batch size 16)", "Transformer (batch size 16)")
    }
    assert ratios == {name: pytest.approx(r, abs=0.005) for name, r in zip(ratios, (0.12, 0.17, 0.28), strict=True)}
    noisy = seconds_of(Gavel(), "ResNet-50 (batch size 64)", 8, of_type("V100"))
    assert noisy[2] == noisy[0]
    assert seconds_of(Gavel(), "ResNet-50 (batch size 64)", 1, of_type(""))[0] == pytest.approx(0.2275, abs=1e-4)


@given(st.integers(17, 127), st.integers(1, 40))
@effort(30)
def test_gavel_between_batch_sizes(batch: int, gpus: int) -> None:
    where = of_type("P100")
    sizes = [16, 32, 64, 128]
    around = [b for b in sizes if b / 2 < batch < b * 2]
    value = seconds_of(Gavel(), f"ResNet-18 (batch size {batch})", gpus, where)[0]
    bounds = [seconds_of(Gavel(), f"ResNet-18 (batch size {b})", gpus, where)[0] for b in around]
    assert min(bounds) * (1 - 1e-9) <= value <= max(bounds) * (1 + 1e-9)


def test_gavel_assigns_what_can_run() -> None:
    gpus = np.array([1, 2, 4, 8, 16, 3] * 50)
    names = Gavel().assign(gpus, 5)
    assert names == Gavel().assign(gpus, 5)
    assert len(set(names)) > 15
    for gpu_type in ("V100", "P100", "K80"):
        for count, name in zip(gpus.tolist(), names, strict=True):
            seconds_of(Gavel(), name, count, of_type(gpu_type))


def test_large_gangs_draw_large_batches() -> None:
    names = Gavel().assign(np.full(300, 16), 0)
    assert len(set(names)) > 5
    assert all(int(name.split()[-1].rstrip(")")) >= 64 for name in names)


def test_a_batch_that_one_gpu_type_lacks_is_refused_there(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text(
        "model,batch_size,gpu_type,num_gpus,consolidated,steps_per_s\n"
        "net,8,V100,1,1,4\nnet,32,V100,1,1,2\nnet,8,K80,1,1,1\n",
        encoding="utf-8",
    )
    perf, name = Gavel(file=file), "net (batch size 16)"
    assert seconds_of(perf, name, 1, of_type("V100"))[0] == pytest.approx((0.25 * 0.5) ** 0.5)
    with pytest.raises(UserError) as caught:
        simulate(trace_of((0, 1, 1), model=[name]), of_type("K80"), "fifo", perf=perf)
    assert str(caught.value) == (
        "performance model gavel: 'net (batch size 16)' was not measured on K80\nits batch sizes there are 8"
    )


def test_gavel_jobs_run_under_the_network_model_at_their_measured_step() -> None:
    known = network_models()["ResNet-50 (batch size 64)"]
    assert known.parameters == 25.6e6
    assert known.compute_s("V100") == pytest.approx(1 / 4.39477)
    assert known.compute_s("K80") == gavel_models()["ResNet-50 (batch size 64)"].step_s["K80"]


def test_a_trace_of_gavel_job_types_runs() -> None:
    names = ["LM (batch size 20)", "ResNet-50 (batch size 64)", "A3C"]
    trace = trace_of((0, 4, 10), (0, 8, 10), (0, 1, 10), model=names)
    for perf in ("gavel", "network"):
        assert simulate(trace, "4x4", "fifo", perf=perf).notes == ()


# --- Pollux and Sia ---------------------------------------------------------------------------------------------------


def test_pollux_at_measured_points() -> None:
    """Spec 4.4: BERT, batch 8 on T4: one GPU 703 ms, two nodes 1399; YOLOv3 326 and 810."""
    curves = pollux_table()["bert", "T4", 8]
    assert curves.at(1, 1) == pytest.approx((0.703262, 0))
    assert curves.at(2, 2) == pytest.approx((1.39869 - 0.757779, 0.757779))
    assert sum(curves.at(1, 4)) == pytest.approx(0.740765)
    assert sum(pollux_table()["yolov3", "T4", 8].at(2, 2)) == pytest.approx(0.810, abs=1e-3)


@pytest.mark.parametrize("model", ["bert", "cifar10", "imagenet", "yolov3", "deepspeech2", "ncf"])
@pytest.mark.parametrize(("batch", "at"), [(0.0, 0), (1.0, -1)])
def test_pollux_at_the_smallest_and_the_largest_batch(model: str, batch: float, at: int) -> None:
    perf, where = Pollux(batch=batch), of_type("T4")
    size = perf.batches()[model, "T4"][at]
    table = pl.read_csv(DATA / "pollux" / "placements.csv.gz").filter(
        (pl.col("model") == model) & (pl.col("local_bsz") == size) & (pl.col("sync_time") < pl.col("step_time"))
    )
    means = table.group_by("num_nodes", "num_gpus").agg(pl.col("step_time").mean())
    one_node = {gpus: s for nodes, gpus, s in means.rows() if nodes == 1}
    assert len(means) > 10
    for nodes, gpus, step_s in means.rows():
        shape = 0 if nodes == 1 else 2 * (nodes - 1)
        seconds = seconds_of(perf, model, gpus, where)
        assert seconds[shape] == pytest.approx(max(step_s, one_node.get(gpus, 0.0)))
        if nodes > 1:
            assert seconds[shape + 1] == seconds[shape]


@given(st.sampled_from(["bert", "cifar10", "ncf"]), st.integers(1, 40), st.floats(0, 1))
@effort(30)
def test_pollux_between_batches(model: str, gpus: int, batch: float) -> None:
    where = of_type("T4")
    value = seconds_of(Pollux(batch=batch), model, gpus, where)
    known = Pollux().batches()[model, "T4"]
    low, high, _ = bracket(known, Pollux(batch=batch).wanted_batch(model, known))
    nodes, tier = shape_table(min(gpus, 16))
    bounds = np.array([iterations(Pollux().times_at((model, "T4", b), gpus, nodes, tier), 1.0) for b in (low, high)])
    assert (value <= bounds.max(0) * (1 + 1e-9)).all()
    assert (value >= bounds.min(0) * (1 - 1e-9)).all()


def test_pollux_reads_a_table_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text(
        "model,gpu_type,cluster,num_nodes,num_gpus,local_bsz,step_time,sync_time\n"
        "tiny,H100,lab,1,1,8,1.0,0\ntiny,H100,lab,1,2,8,1.5,0.5\ntiny,H100,lab,2,2,8,3,2\n",
        encoding="utf-8",
    )
    perf = Pollux(file=file, gpu="H100")
    assert perf.models().keys() == {"tiny"}
    assert seconds_of(perf, "tiny", 2, of_type("")) == pytest.approx([1.5, 1.5, 3, 3])
    result = simulate(trace_of((0, 2, 30), model=["tiny"]), "2x1", "fifo", perf=perf)
    assert result.jobs["speed_mean"].to_list() == [1.0]


def test_sia_rows_give_other_gpus() -> None:
    file = shared_data() / "profiles" / "pollux_sia" / "placements.csv.gz"
    if not file.exists():
        pytest.skip("needs ../shared/data")
    perf = Pollux(file=file)
    assert set(perf.gpu_types()) == {"T4", "A100-40GB", "V100", "RTX2080Ti"}
    assert seconds_of(perf, "bert", 8, of_type("A100"))[0] < seconds_of(perf, "bert", 8, of_type("T4"))[0]


def test_shipped_tables_are_those_of_the_data_folder() -> None:
    folder = shared_data() / "profiles"
    if not folder.is_dir():
        pytest.skip("needs ../shared/data")
    for name in ("throughputs.csv", "pairs.csv.gz"):
        assert (DATA / "gavel" / name).read_bytes() == (folder / "gavel" / name).read_bytes()
    whole = gzip.decompress((folder / "pollux_sia" / "placements.csv.gz").read_bytes()).decode().splitlines()
    ours = gzip.decompress((DATA / "pollux" / "placements.csv.gz").read_bytes()).decode().splitlines()
    assert ours == [whole[0], *(line for line in whole if ",T4,aws," in line)]


def test_nothing_of_sia_ships() -> None:
    """Its repository states no licence: only Pollux's own T4 rows may be here."""
    table = pl.read_csv(DATA / "pollux" / "placements.csv.gz")
    assert table["cluster"].unique().to_list() == ["aws"]
    assert table["gpu_type"].unique().to_list() == ["T4"]


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("perf", "cluster", "model", "gpus", "message"),
    [
        (Gavel(), of_type(""), "ResNet-51", 1, "test: performance model gavel does not know 'ResNet-51'"),
        (Gavel(), of_type(""), "LM (batch size 7000)", 1, "test: performance model gavel does not know 'LM ("),
        (Gavel(), of_type("A100"), "LM (batch size 20)", 1, "performance model gavel does not know GPU type 'A100'"),
        (
            Gavel(), of_type("V100"), "A3C", 2,
            "performance model gavel: 'A3C' was measured on one V100 only, not on 2\ngive these jobs 1 GPU",
        ),
        (
            Gavel(), of_type("K80"), "ResNet-50 (batch size 128)", 4,
            "performance model gavel: 'ResNet-50 (batch size 128)' was measured on one K80 only, not on 4",
        ),
        (Pollux(), of_type("T4"), "bert2", 1, "test: performance model pollux does not know 'bert2'\ndid you"),
        (Pollux(), of_type("A100"), "bert", 1, "performance model pollux does not know GPU type 'A100'"),
    ],
)  # fmt: skip
def test_what_nobody_measured_is_refused_before_the_run(
    perf: SpeedModel, cluster: Cluster, model: str, gpus: int, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        simulate(trace_of((0, gpus, 1), model=[model]), cluster, "fifo", perf=perf)
    assert str(caught.value).startswith(message)


def test_a_job_without_a_model_among_others_is_refused() -> None:
    trace = trace_of((0, 1, 1), (0, 1, 1), model=["bert", None])
    with pytest.raises(UserError, match="performance model pollux: a job without a model"):
        simulate(trace, of_type("T4"), "fifo", perf="pollux")


TABLE = "model,gpu_type,cluster,num_nodes,num_gpus,local_bsz,step_time,sync_time\n"


@pytest.mark.parametrize(
    ("text", "model", "gpu_type", "message"),
    [
        (TABLE + "a,T4,x,1,1,8,1,0\n", "a", "T4", "performance model pollux: 'a' was measured on one node of T4 only"),
        (
            TABLE + "a,T4,x,1,1,8,1,0\nb,A100,x,1,1,8,1,0\n", "b", "T4",
            "performance model pollux: 'b' was not measured on T4\nmeasured there: a",
        ),
        ("model,gpu_type\na,T4\n", "a", "T4", "own.csv: no column 'cluster'"),
        ("", "a", "T4", "own.csv: cannot be read: "),
    ],
)  # fmt: skip
def test_tables_that_miss_something(text: str, model: str, gpu_type: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        simulate(trace_of((0, 2, 1), model=[model]), of_type(gpu_type), "fifo", perf=Pollux(file=file))
    assert message in str(caught.value)


def test_a_table_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"nowhere.csv: cannot be read"):
        simulate(trace_of((0, 1, 1)), of_type("T4"), "fifo", perf=Pollux(file=Path("nowhere.csv")))
