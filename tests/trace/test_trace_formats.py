"""Every format on a few lines written here: what each reader makes of its columns, units and gaps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import polars as pl
import pytest
from trace_samples import (
    ELASTICFLOW,
    GAVEL_7,
    GAVEL_10,
    GAVEL_12,
    HELIOS,
    KALOS,
    MORPHLING,
    MURI,
    OPENB,
    PAI_JOBS,
    PAI_TASKS,
    PHILLY,
    PLAIN,
    POLLUX,
    SACCT,
    SAMPLES,
    SIA,
    SPOT,
    SWF,
    TF_JOB,
    TIRESIAS,
)

from thebes.model.trace import TRACE_SCHEMA
from thebes.trace import FORMATS, read


def rows(trace, *names):
    return trace.jobs.select(names).rows()


def core(trace):
    return rows(trace, "job_id", "submit_time", "duration", "num_gpus")


def test_every_format_has_a_sample_here():
    assert set(SAMPLES) == {known.name for known in FORMATS}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_format_is_known_by_its_content_whatever_the_file_is_called(load, name):
    trace = load(SAMPLES[name], "anything.dat")

    assert trace.format == name
    assert trace.jobs.columns[: len(TRACE_SCHEMA)] == list(TRACE_SCHEMA)
    assert dict(list(trace.jobs.schema.items())[: len(TRACE_SCHEMA)]) == TRACE_SCHEMA
    assert trace.jobs["submit_time"].is_sorted()


@pytest.mark.parametrize("name", SAMPLES)
def test_gzip_is_known_by_its_magic_bytes(load, name):
    plain = load(SAMPLES[name])
    packed = load(gzip.compress(SAMPLES[name].encode()), "no_ending")

    assert packed.jobs.equals(plain.jobs)


@pytest.mark.parametrize("name", [known.name for known in FORMATS if known.columns])
def test_a_headed_table_may_come_as_parquet(tmp_path: Path, load, name):
    plain = load(SAMPLES[name])
    pl.read_csv(SAMPLES[name].encode(), try_parse_dates=True).write_parquet(tmp_path / "table")

    assert core(read(tmp_path / "table")) == core(plain)


@pytest.mark.parametrize("name", SAMPLES)
def test_windows_line_ends_and_a_byte_order_mark_change_nothing(load, name):
    plain = load(SAMPLES[name])

    assert load("\ufeff" + SAMPLES[name].replace("\n", "\r\n")).jobs.equals(plain.jobs)


def test_normalised_keeps_extra_columns_and_types_them(load):
    header = "job_id,submit_time,duration,num_gpus,user,capped,code,duration_est\n"
    text = header + "a,-5,10,0.5,ann,1,007,1.5\nb,0,20,2,,0,008,\n"
    trace = load(text)

    assert core(trace) == [("a", -5.0, 10.0, 0.5), ("b", 0.0, 20.0, 2.0)]
    assert rows(trace, "user", "capped", "code", "duration_est") == [("ann", 1, "007", 1.5), (None, 0, "008", None)]
    assert trace.notes == ()


@pytest.mark.parametrize("mark", ["\t", ";", "|"])
def test_other_separators_are_seen_in_the_header(load, mark):
    assert core(load(PLAIN.replace(",", mark))) == core(load(PLAIN))


def test_blank_lines_and_quoted_cells_are_read(load):
    trace = load('\njob_id,submit_time,duration,num_gpus,user\n\n"a,1",0,10,1," ann "\n\n"b\nc",1,10,1,\n\n')

    assert rows(trace, "job_id", "user") == [("a,1", "ann"), ("b\nc", None)]


def test_run_times_can_be_taken_from_another_column(load):
    text = "job_id,submit_time,duration,num_gpus,duration_est\na,0,10,1,15\nb,5,20,2,20\n"
    trace = load(text, duration_column="duration_est")

    assert trace.jobs["duration"].to_list() == [15.0, 20.0]
    assert trace.notes == ("Column duration is taken from 'duration_est'.",)


def test_unsorted_jobs_are_sorted_stably_with_a_note(load):
    trace = load("job_id,submit_time,duration,num_gpus\nc,5,1,1\na,0,1,1\nd,5,1,1\nb,0,1,1\n")

    assert trace.jobs["job_id"].to_list() == ["a", "b", "c", "d"]
    assert trace.notes == ("Jobs were not in order of submission; they are sorted now.",)


def test_jobs_that_cannot_be_scheduled_are_left_out_with_examples(load):
    text = "job_id,submit_time,duration,num_gpus\na,0,1,1\nb,0,1,0\nc,0,,1\nd,0,0,2\n" + "".join(
        f"e{n},1,0,1\n" for n in range(3)
    )
    trace = load(text)

    assert trace.jobs["job_id"].to_list() == ["a"]
    assert trace.notes == (
        "Left out 1 job without GPUs (b).",
        "Left out 1 job without a known run time (c).",
        "Left out 4 jobs that ran for 0 s (d, e0, e1, …).",
    )


def test_tiresias(load):
    trace = load(TIRESIAS)

    assert core(trace) == [("0", 0.0, 164.0, 1.0), ("1", 30.0, 147.0, 8.0)]
    assert rows(trace, "model", "iterations", "interval") == [("vgg19", 606, 30), ("vgg11", 133, 23)]


def test_tiresias_in_the_older_layout(load):
    trace = load(TF_JOB)

    assert (trace.format, core(trace)) == ("tiresias", [("10", 11.0, 20.0, 12.0)])


def test_chronus_is_read_as_it_stands_with_a_warning(load):
    text = "job_id,user,num_gpu,submit_time,model_name,duration,expect_time_list\n0,vc_a,1,5,vgg16,96,159-189\n"
    trace = load(text)

    assert rows(trace, "user", "duration") == [("vc_a", 96.0)]
    assert trace.notes == ("This is a Chronus workload: its times are probably minutes; they are read as they stand.",)


def test_muri_milliseconds_become_seconds(load):
    assert core(load(MURI)) == [("0", 0.0, 5095.0, 8.0), ("1", 1534.0, 281.5, 8.0)]


def test_elasticflow_takes_the_duration_column_and_keeps_deadlines(load):
    trace = load(ELASTICFLOW)

    assert core(trace) == [("0", 0.0, 976571.0, 1.0)]
    assert trace.jobs["ddl"].to_list() == [771220]


def test_helios_counts_from_the_first_gpu_job(load):
    trace = load(HELIOS)

    assert core(trace) == [("1", 0.0, 36848.0, 1.0), ("3", 26.0, 249.0, 4.0)]
    assert rows(trace, "user", "vc", "status", "num_nodes")[0] == ("uA", "vcJ", "COMPLETED", 1)
    assert trace.notes == (
        "Left out 1 job without GPUs (2).",
        "Times are seconds since the first job, 2020-06-09 18:41:01.",
    )


def test_acme_run_times_are_end_minus_start_and_zones_are_honoured(load):
    trace = load(KALOS)

    assert core(trace) == [("d1", 0.0, 8.0, 64.0), ("d2", 60.0, 5.0, 8.0)]
    assert trace.jobs["stated_duration"].to_list() == [18.0, 5.0]
    assert trace.notes[0] == "1 stated duration differed from end minus start; the difference is used."


def test_openb_shares_of_one_gpu_are_fractions(load):
    trace = load(OPENB)

    assert core(trace) == [("p0", 0.0, 90.0, 0.46), ("p1", 5.0, 45.0, 2.0)]
    assert rows(trace, "status", "gpu_type") == [("Running", None), ("Failed", "V100M16|V100M32")]
    assert trace.notes == (
        "1 pod never scheduled: run time is deletion minus creation.",
        "Left out 1 job without GPUs (p2).",
    )


def test_spot_gpus_are_per_worker(load):
    assert core(load(SPOT)) == [("239255", 0.0, 2764799.0, 6.0)]


def test_morphling(load):
    trace = load(MORPHLING)

    assert core(trace) == [("vit-0", 0.0, 3163.09, 2.0)]
    assert rows(trace, "model", "exec_plan") == [("vit", "zero-dp")]


def test_pollux_rows_get_ids_by_place(load):
    trace = load(POLLUX)

    assert core(trace) == [("1", 0.0, 2951.0, 1.0), ("0", 2932.0, 66.0, 1.0)]
    assert trace.jobs["vc"].to_list() == ["6214e9", "11cb48"]


def test_sia_run_times_come_from_the_shipped_profiles(load):
    trace = load(SIA)

    assert core(trace) == [("cifar10-0", 107.0, 853.0, 6.0), ("bert-1", 110.0, 3363.0, 4.0)]
    assert trace.notes == ("Run times are full training on T4 GPUs as profiled by Pollux; the file has none.",)


def test_sia_between_profiled_gpu_counts_lies_between_their_run_times(load):
    trace = load("name,time,application,num_replicas,batch_size\nx,0,cifar10,5,2048\n")

    assert 853.0 < trace.jobs["duration"][0] < 1254.0


def test_sia_with_run_times_of_its_own_uses_them(load):
    trace = load("name,time,application,num_replicas,batch_size,duration\nx,0,anything,5,2,77\n")

    assert (trace.jobs["duration"][0], trace.notes) == (77.0, ())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GAVEL_7, ("0", 5.0, 10000.0, 4.0)),  # one rate per job type, whatever the GPUs
        (GAVEL_10, ("0", 7.0, 3599.817, 1.0)),
        (GAVEL_12, ("0", 9.0, 1418.0, 2.0)),  # states the run time
    ],
)
def test_gavel_layouts(load, text, expected):
    trace = load(text)

    assert core(trace) == [expected]
    assert trace.jobs["model"][0] in ("LM (batch size 10)", "Transformer (batch size 128)")


def test_swf_takes_requested_processors_as_gpus(load):
    trace = load(SWF)

    assert core(trace) == [("1", 0.0, 3600.0, 4.0), ("2", 60.0, 100.0, 16.0)]
    assert rows(trace, "user", "vc", "status") == [("3", "2", "COMPLETED"), ("4", "2", "FAILED")]
    assert trace.notes == (
        "SWF counts processors: each requested processor is taken as one GPU.",
        "Left out 1 job without a known run time (3).",
    )


def test_swf_can_take_allocated_processors_instead(load):
    assert load(SWF, gpus_column="allocated_processors").jobs["num_gpus"].to_list() == [8.0, 16.0]


def test_slurm(load):
    trace = load(SACCT)

    assert core(trace) == [("100", 0.0, 3600.0, 8.0), ("12_3", 600.0, 60.0, 3.0)]
    assert rows(trace, "user", "vc", "status", "gpu_type", "num_nodes", "account", "job_name") == [
        ("ann", "gpu", "COMPLETED", "a100", 2, "phys", 'train "big"'),
        ("bob", "gpu", "CANCELLED", "v100|a100", 1, "bio", "sweep"),
    ]
    assert trace.notes == (
        "Skipped 2 job steps.",
        "Left out 2 jobs without GPUs (101, 102).",
        "Times are seconds since the first job, 2024-01-01 00:00:00.",
    )


@pytest.mark.parametrize(
    ("elapsed", "seconds"),
    [("00:10:00", 600.0), ("1-02:03:04", 93784.0), ("05:06", 306.0), ("100:00:00", 360000.0), ("00:01.500", 1.5)],
)
def test_slurm_elapsed_clock(load, elapsed, seconds):
    text = f"JobID|Submit|Elapsed|ReqTRES\n1|2024-01-01T00:00:00|{elapsed}|cpu=1,gres/gpu=1\n"

    assert load(text).jobs["duration"].to_list() == [seconds]


def test_slurm_run_time_from_start_and_end_and_request_where_nothing_is_allocated(load):
    text = (
        "State|End|Start|Submit|JobID|ReqTRES|AllocTRES|\n"
        "RUNNING|2024-01-01T00:00:30|2024-01-01T00:00:10|2024-01-01T00:00:00|7|gres/gpu=4||\n"
        "COMPLETED|Unknown|None|2024-01-01T00:00:05|8|gres/gpu=4|gres/gpu=2|\n"
        "COMPLETED|2024-01-01T00:00:10|2024-01-01T00:00:30|2024-01-01T00:00:05|9|gres/gpu=4|gres/gpu=2|\n"
    )
    trace = load(text)

    assert core(trace) == [("7", 0.0, 20.0, 4.0)]
    assert trace.notes[:3] == (
        "1 job still running: the run time is what had passed.",
        "Left out 1 job without a known run time (8).",
        "Left out 1 job whose end precedes the start (9).",
    )


def test_slurm_last_record_of_a_requeued_job_counts(load):
    text = (
        "JobID|Submit|ElapsedRaw|State|AllocTRES\n"
        "1|2024-01-01T00:00:00|5|PREEMPTED|gres/gpu=1\n"
        "1|2024-01-01T00:00:00|50|COMPLETED|gres/gpu=1\n"
    )
    trace = load(text)

    assert core(trace) == [("1", 0.0, 50.0, 1.0)]
    assert trace.notes[0] == "1 earlier record of requeued jobs dropped; the last one counts."


def test_philly_adds_up_complete_attempts_and_takes_the_largest(load):
    trace = load(json.dumps(PHILLY))

    assert core(trace) == [("j1", 0.0, 84.0, 3.0)]
    assert rows(trace, "user", "vc", "status", "num_nodes") == [("ce2f4c", "ee9e8c", "Pass", 2)]
    assert trace.notes == (
        "2 attempts of 4 without start or end: not counted in the run time.",
        "Left out 1 job without GPUs (j2).",
        "Times are seconds since the first job, 2017-10-07 01:11:39.",
    )


def test_pai_plans_are_per_cent_of_a_gpu(load):
    trace = load(PAI_TASKS, "pai_task_table.csv")

    assert core(trace) == [("8ca1/worker", 1739100.0, 100.0, 10.0), ("4f05/tensorflow", 1739162.0, 38.0, 0.5)]
    assert trace.jobs["gpu_type"].to_list() == ["V100", "MISC"]
    assert "No pai_job_table beside the file" in trace.notes[0]


@pytest.mark.parametrize("as_folder", [True, False])
def test_pai_takes_users_and_submissions_from_the_job_table_beside(tmp_path: Path, as_folder):
    (tmp_path / "pai_task_table.csv").write_text(PAI_TASKS)
    (tmp_path / "pai_job_table.csv.gz").write_bytes(gzip.compress(PAI_JOBS.encode()))
    trace = read(tmp_path if as_folder else tmp_path / "pai_task_table.csv")

    assert rows(trace, "job_id", "submit_time", "user")[0] == ("8ca1/worker", 1739000.0, "5854")
    assert trace.notes[0] == "Submission and user of 2 tasks of 4 from pai_job_table.csv.gz."


def test_pai_with_a_header_line(load):
    header = "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"

    assert core(load(header + PAI_TASKS)) == core(load(PAI_TASKS))
