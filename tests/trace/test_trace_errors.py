"""Bad input gets one clear message with file, line, column and what to do. Each of them is written out here."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from trace_samples import GAVEL_7, GAVEL_10, PAI_TASKS, PHILLY, PLAIN, SACCT, SIA, SWF

from thebes.model.errors import UserError
from thebes.model.trace import Trace
from thebes.trace import read, sample_path, write

HEAD = "job_id,submit_time,duration,num_gpus\n"


def test_missing_file_suggests_near_names(tmp_path: Path):
    (tmp_path / "philly.csv").write_text(PLAIN)
    with pytest.raises(UserError, match=r"philly\.cvs: there is no such file\.\nDid you mean philly\.csv\?"):
        read(tmp_path / "philly.cvs")


def test_missing_file_with_no_near_name(tmp_path: Path):
    with pytest.raises(UserError, match=r"there is no such file\.\nNo file in .* has a similar name\."):
        read(tmp_path / "philly.csv")


def test_missing_folder(tmp_path: Path):
    with pytest.raises(UserError, match=r"there is no such file\.\nThe folder .*/nowhere does not exist either\."):
        read(tmp_path / "nowhere" / "philly.csv")


def test_a_file_used_as_a_folder(tmp_path: Path):
    (tmp_path / "a.csv").write_text(PLAIN)
    with pytest.raises(UserError, match=r"a part of this path is a file, not a folder\.\nCheck the path"):
        read(tmp_path / "a.csv" / "b.csv")


def test_a_folder_in_place_of_a_file(tmp_path: Path):
    with pytest.raises(UserError, match=r"this is a folder, not a trace file\.\nName the file inside it"):
        read(tmp_path)


def test_an_impossible_path():
    with pytest.raises(UserError, match=r"cannot be read|no such file"):
        read("a\x00b")


def test_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "secret.csv"
    path.write_text(PLAIN)
    path.chmod(0)
    if os.geteuid() == 0:  # root may read anything: let the system call refuse in its place

        def refuse(_: Path) -> bytes:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=r"secret\.csv: permission denied\.\nAsk its owner for read access"):
        read(path)


@pytest.mark.parametrize("content", ["", " \n\n", gzip.compress(b"", mtime=0)], ids=["nothing", "blank", "gzip"])
def test_empty_file(complaint, content):
    assert complaint(content) == "trace.csv: the file is empty.\nA trace needs a header line and at least one job."


@pytest.mark.parametrize("content", [HEAD, HEAD.strip(), HEAD + "\n \n"])
def test_header_only(complaint, content):
    assert complaint(content).startswith("trace.csv: there is a header line but no job below it.\nCheck how")


def test_header_and_empty_cells_only(complaint):
    assert complaint(HEAD + ",,,\n").startswith("trace.csv: no line holds a job.")


def test_cut_off_gzip(complaint):
    message = complaint(gzip.compress(PLAIN.encode() * 50)[:-20], "trace.csv.gz")
    assert message == ("trace.csv.gz: the gzip data is cut off.\nCopy or download the file again; `gzip -t` tests it.")


def test_damaged_gzip(complaint):
    data = bytearray(gzip.compress(os.urandom(500)))
    data[-6] ^= 0xFF
    assert complaint(bytes(data)).startswith("trace.csv: the gzip data is damaged (")


def test_gz_ending_without_gzip_inside(complaint):
    assert complaint(PLAIN, "trace.csv.gz") == (
        "trace.csv.gz: ends in .gz but is not gzip data.\n"
        "If it is plain text, rename it without .gz; otherwise download it again."
    )


@pytest.mark.parametrize(
    ("magic", "what"),
    [
        (b"PK\x03\x04", "a zip archive"),
        (b"\xfd7zXZ\x00", "an xz file"),
        (b"BZh9", "a bzip2 file"),
        (b"\x28\xb5\x2f\xfd", "a Zstandard file"),
        (b"SQLite format 3\x00", "an SQLite database"),
        (b"\x89PNG\r\n", "a PNG picture"),
    ],
)
def test_other_containers_are_named(complaint, magic, what):
    assert complaint(magic + b"1234") == (
        f"trace.csv: this is {what}, not a trace.\nUnpack it and name the trace file inside."
    )


def test_binary_junk(complaint):
    assert complaint(b"abc\x00\x01\x02") == (
        "trace.csv: binary data (a zero byte at offset 3), not a trace.\n`thebes trace formats` lists what can be read."
    )


def test_utf16(complaint):
    assert complaint(PLAIN.encode("utf-16")).startswith("trace.csv: the text is UTF-16.\nSave it as UTF-8")


def test_undecodable_bytes_have_a_line(complaint):
    message = complaint(HEAD.encode() + b"a,0,1,1\nb\xff,0,1,1\n")
    assert message.startswith("trace.csv, line 3: byte 0xff is not UTF-8 text.\nText in an older encoding")


def test_huge_lines(complaint):
    message = complaint(PLAIN + "c,1,1,1" + "," * (3 << 20))
    assert message.startswith("trace.csv, line 4: the line is 3.0 MiB long; no job record is.\nCheck that the file")


def test_damaged_parquet(complaint, tmp_path: Path):
    write(read(sample_path()), tmp_path / "good.parquet")
    data = (tmp_path / "good.parquet").read_bytes()
    for broken in (data[:-30], data[:40], b"PAR1", b"PAR1" + os.urandom(200) + b"PAR1"):
        assert complaint(broken) == (
            "trace.csv: begins like Parquet but is damaged or cut off.\nCopy or write the file again."
        )


def test_unknown_format_name(complaint):
    assert complaint(PLAIN, format="helois") == (
        "unknown trace format 'helois'; did you mean 'helios'?\n`thebes trace formats` explains them."
    )


def test_unrecognised_table(complaint):
    assert complaint("colour,taste\nred,sweet\n") == (
        "trace.csv: the format is not recognised; the first line is 'colour,taste'.\n"
        "A trace table needs at least job_id, submit_time, duration, num_gpus; "
        "`thebes trace formats` lists every format."
    )


def test_missing_columns_name_the_nearest(complaint):
    assert complaint("job_id,submit_tme,duration\na,0,1\n") == (
        "trace.csv, line 1: missing columns 'submit_time' (did you mean 'submit_tme'?), 'num_gpus' "
        "for a normalised trace.\nThe file has: job_id, submit_tme, duration. Rename or add the columns."
    )


def test_num_gpu_in_a_normalised_file(complaint):
    assert complaint("job_id,submit_time,duration,num_gpu\na,0,1,1\n") == (
        "trace.csv, line 1: missing column 'num_gpus' (did you mean 'num_gpu'?) for a normalised trace.\n"
        "The file has: job_id, submit_time, duration, num_gpu. Rename or add the column."
    )


def test_missing_columns_of_a_format_asked_for(complaint):
    message = complaint(PLAIN, format="helios")
    assert message.startswith("trace.csv, line 1: missing columns 'gpu_num'")
    assert "for a Helios cluster log." in message


def test_misspelt_optional_column(complaint):
    text = "job_id,submit_time,duration,num_gpus,Gpu-Types\na,0,1,1,V100\n"
    assert complaint(text) == (
        "trace.csv, line 1, column 'Gpu-Types': unknown column; did you mean 'gpu_type'?\n"
        "Rename it to 'gpu_type', or to something less similar to keep it as a column of your own."
    )


def test_doubled_column(complaint):
    assert complaint("job_id,submit_time,duration,num_gpus,x,x\na,0,1,1,1,2\n") == (
        "trace.csv, line 1: column 'x' occurs more than once.\nGive every column a name of its own."
    )


def test_two_nameless_columns(complaint):
    assert "more than one column has no name" in complaint(",,job_id,submit_time,duration,num_gpus\n1,2,a,0,1,1\n")


@pytest.mark.parametrize("value", ["abc", "inf", "1e999", "1,5", "0x10", "--3"])
def test_not_a_number_has_line_and_column(complaint, value):
    message = complaint(HEAD + f'a,0,10,1\n\nb,0,"{value}",1\n')
    assert message == (
        f"trace.csv, line 4, column 'duration': '{value}' is not a number.\nCorrect the value, or remove the line."
    )


def test_the_line_is_right_after_cells_with_line_ends_inside(complaint):
    message = complaint('\n\njob_id,submit_time,duration,num_gpus,user\na,0,10,1,"x\ny\nz"\nb,0,oops,1,\n')
    assert message.startswith("trace.csv, line 7, column 'duration': 'oops' is not a number.")


@pytest.mark.parametrize(("row", "column", "unit"), [
    ("b,0,-3,1", "duration", "seconds of run time"),
    ("b,0,3,-1", "num_gpus", "a number of GPUs"),
])  # fmt: skip
def test_negative_values(complaint, row, column, unit):
    value = "-3" if column == "duration" else "-1"
    assert complaint(HEAD + "a,0,1,1\n" + row + "\n") == (
        f"trace.csv, line 3, column '{column}': {value} is negative; it must be {unit}.\nCorrect or remove the line."
    )


@pytest.mark.parametrize("row", ["b,,3,1", "b,0,3,", "b,0,3,None"])
def test_missing_values(complaint, row):
    message = complaint(HEAD + "a,0,1,1\n" + row + "\n")
    assert "trace.csv, line 3, column '" in message
    assert "': the value is missing.\nEvery job needs job_id, submit_time, duration, num_gpus." in message


def test_milliseconds_since_1970_are_noticed(complaint):
    assert complaint(HEAD + "a,1700000000000,1,1\n") == (
        "trace.csv, line 2, column 'submit_time': 1700000000000 is not a plausible number of seconds.\n"
        "If the times are milliseconds, divide them by 1000."
    )


def test_implausible_numbers(complaint):
    assert "1e+30 is not a plausible number of GPUs" in complaint(HEAD + "a,0,1,1e30\n")
    assert "-1e+30 is not a plausible time" in complaint(HEAD + "a,-1e30,1,1\n")


def test_doubled_ids_name_both_lines(complaint):
    assert complaint(HEAD + "a,0,1,1\nb,0,1,1\na,0,1,1\nb,0,1,1\n") == (
        "trace.csv, line 4, column 'job_id': id 'a' was already used on line 2 (2 ids repeated in all).\n"
        "Ids must be unique: remove the repeated job or give it another id."
    )


def test_blank_id(complaint):
    assert complaint(HEAD + "a,0,1,1\n,0,1,1\n").startswith("trace.csv, line 3, column 'job_id': the job has no id.")


def test_too_many_cells(complaint):
    assert complaint(HEAD + "a,0,1,1\nb,0,1,1,5,6\n").startswith(
        "trace.csv, line 3: 6 values, but there are 4 columns.\nQuote values that contain the separator"
    )


def test_open_quotation_mark(complaint):
    assert complaint(HEAD + 'a,0,1,1\n"b,0,1,1\nc,0,1,1\n').startswith(
        "trace.csv, line 3: a quotation mark is opened and not closed properly."
    )


def test_no_job_left(complaint):
    assert complaint(HEAD + "a,0,0,1\nb,0,1,0\n") == (
        "trace.csv: no job is left to schedule.\nLeft out 1 job without GPUs (b). Left out 1 job that ran for 0 s (a)."
    )


def test_unknown_duration_column(complaint):
    text = "job_id,submit_time,duration,num_gpus,duration_est,note\na,0,1,1,2,x\n"
    assert complaint(text, duration_column="duration_set") == (
        "trace.csv: there is no column 'duration_set' to take duration from; did you mean 'duration_est'?\n"
        "Leave the option away to use 'duration'."
    )
    assert "column 'note': holds text, not the numbers that duration needs" in complaint(text, duration_column="note")


def test_bad_calendar_time(complaint):
    text = "timestamp,duration,num_gpus,cluster\n2017-10-09 07:01:55,66,1,x\n2017-13-09 07:01:55,66,1,x\n"
    assert complaint(text).startswith(
        "trace.csv, line 3, column 'timestamp': '2017-13-09 07:01:55' is not a time.\nTimes look like"
    )


def test_rows_of_a_parquet_file_are_named(tmp_path: Path):
    trace = read(sample_path())
    jobs = trace.jobs.head(5)
    write(Trace("bad", jobs.with_columns(num_gpus=-jobs["num_gpus"])), tmp_path / "bad.parquet")
    with pytest.raises(UserError, match=r"bad\.parquet, row 1, column 'num_gpus': -4 is negative"):
        read(tmp_path / "bad.parquet")


def test_sia_without_profile(complaint):
    assert complaint(SIA + "x,1,gpt5,4,32\n").startswith(
        "trace.csv, line 4, column 'application': no profile of 'gpt5'; "
    )
    assert complaint(SIA + "x,1,bert,4,7\n") == (
        "trace.csv, line 4, column 'batch_size': 'bert' was not profiled at batch size 7, "
        "only at 12, 24, 48, 96, 192, 384.\nAdd a `duration` column in seconds to the file."
    )


def test_gavel_without_rate(complaint):
    assert complaint(GAVEL_10.replace("Transformer", "Transfomer")).startswith(
        "trace.csv, line 1, column 'job_type': Gavel has no V100 rate for 'Transfomer (batch size 128)'; did you mean '"
    )
    assert "no V100 rate for 'Transformer (batch size 128)' on 64 GPUs" in complaint(
        GAVEL_10.replace("\t19605\t1\t", "\t19605\t64\t")
    )


def test_gavel_with_another_number_of_columns(complaint):
    assert complaint(GAVEL_7.replace("\t1433605", ""), format="gavel") == (
        "trace.csv, line 1: 6 tab-separated columns; Gavel traces have 7, 10 or 12.\n"
        "Check that tabs were not turned into spaces."
    )


def test_swf_errors(complaint):
    assert complaint(SWF + "4 100 -1 3\n") == (
        "trace.csv, line 7: 4 fields; an SWF line has 18.\nWrite -1 for what is unknown."
    )
    assert complaint(SWF.replace("3600", "36OO", 1), format="swf").startswith(
        "trace.csv, line 4, column 'run_time': '36OO' is not a number."
    )
    assert complaint("; only\n; comments\n").startswith("trace.csv: only comments, no job.")


def test_slurm_errors(complaint):
    assert complaint("JobID|Submit|State\n1|2024-01-01T00:00:00|COMPLETED\n").startswith(
        "trace.csv, line 1: missing column 'AllocTRES' (or 'ReqTRES'), which tells the GPUs of a job.\n"
        "Export with: sacct"
    )
    assert complaint("JobID|Submit|AllocTRES\n1|2024-01-01T00:00:00|gres/gpu=1\n").startswith(
        "trace.csv, line 1: no run time; sacct output needs one of ElapsedRaw, Elapsed, Start and End.\nExport with"
    )
    assert complaint("JobID|State|AllocTRES\n1|COMPLETED|gres/gpu=1\n").startswith(
        "trace.csv, line 1: missing column 'Submit'"
    )
    assert "'soon' is not a run time" in complaint(
        "JobID|Submit|Elapsed|ReqTRES\n1|2024-01-01T00:00:00|soon|gres/gpu=1\n"
    )
    header, *lines = SACCT.splitlines(keepends=True)
    assert complaint(header + lines[1]).startswith("trace.csv: only job steps, no job.\nExport with")


def test_philly_errors(complaint):
    text = json.dumps(PHILLY, indent=1)
    assert complaint(text[:200]).startswith("trace.csv, line 11, character 16: not valid JSON (Expecting value).")
    assert complaint('{"a": 1}').startswith("trace.csv: a JSON record, not a list of jobs.\nExpected is Philly's")
    assert complaint("[]").startswith("trace.csv: the JSON list is empty.")
    assert complaint("[1]").startswith("trace.csv, record 1: a number, not a job record.")
    assert complaint('[{"jobid": "x"}]').startswith("trace.csv, record 1: without submitted_time, attempts.")
    assert "'attempts' is not a list of records" in complaint(text.replace('"attempts": []', '"attempts": 3'))
    assert "'detail' is not a list of machines" in complaint(text.replace('"detail": null', '"detail": 3'))
    assert complaint(text.replace("2017-10-06 01:00:00", "yesterday")).startswith(
        "trace.csv, record 2, 'submitted_time': 'yesterday' is not a time.\nTimes look like"
    )
    assert complaint(text.replace('"j2"', '"j1"')).startswith(
        "trace.csv, record 2, column 'jobid': id 'j1' was already used on record 1."
    )
    assert "the JSON cannot be read" in complaint("[" * 200_000)


def test_pai_line_numbers_without_a_header(complaint):
    assert complaint(PAI_TASKS + "9,worker,x,Terminated,1,2,3,4,5,T4\n").startswith(
        "trace.csv, line 5, column 'inst_num': 'x' is not a number."
    )


def test_write_needs_a_known_ending(tmp_path: Path):
    trace = read(sample_path())
    with pytest.raises(UserError, match=r"cannot tell the format .*\nEnd it in \.csv, \.csv\.gz, \.parquet\."):
        write(trace, tmp_path / "out.xlsx")


def test_write_where_one_cannot(tmp_path: Path):
    trace = read(sample_path())
    with pytest.raises(
        UserError, match=r"cannot be written: No such file or directory\.\nCheck that the folder exists"
    ):
        write(trace, tmp_path / "nowhere" / "out.csv")


@pytest.mark.parametrize("row", ["b,nan,3,1", "b,0,NaN,1", "b,0,3,nan"])
def test_not_a_number_is_no_blank(complaint, row):
    message = complaint(HEAD + "a,0,1,1\n" + row + "\n")
    assert "trace.csv, line 3, column '" in message
    assert "is not a number.\nCorrect the value, or remove the line." in message
