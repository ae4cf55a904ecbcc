"""`thebes simulate`, `compare`, `policies`, `placements`: what they print, write and refuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from thebes.perf import registry as perf_registry
from thebes.policy import registry
from thebes.report.metrics import REQUIRED_KEYS
from thebes.sim import warmup

TEN = ("philly-sample", "--cluster", "8x8", "--limit", 10)

OWN_POLICY = '''
import numpy as np
import thebes

class Newest(thebes.Policy):
    """The newest job first."""
    def decide(self, view):
        return thebes.fill(view, np.argsort(-view.jobs.submit_s, kind="stable"))

class NotAPolicy:
    pass
'''


@pytest.fixture
def own_policy(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(OWN_POLICY)
    return path


def test_help_names_every_command(thebes) -> None:
    ran = thebes("--help")
    assert ran.code == 0
    for command in ("simulate", "compare", "policies", "placements", "trace"):
        assert command in ran.out


def test_help_does_not_load_the_simulator() -> None:
    code = "import sys, thebes.cli; print(sorted({'numpy', 'polars', 'numba', 'plotly', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_up_shows_first_things_first(thebes) -> None:
    text = thebes("up", "--help").out
    panels = [line.split("─ ")[1].split(" ─")[0] for line in text.splitlines() if line.startswith("╭─")]
    assert panels == ["Options", "On Slurm or Ray", "What is decided", "As a service"]
    assert text.index("--engine") < text.index("--partition") < text.index("--grace") < text.index("--tls-cert")
    for default in ("tiresias-l", "consolidate", "127.0.0.1", "the default"):
        assert default in text.replace("│\n│", ""), default


def test_a_reader_that_has_gone_is_no_error() -> None:
    command = f"{sys.executable} -c 'from thebes.cli import main; main()' policies | true"
    ran = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert ran.stderr == ""


def test_a_first_run_says_that_it_compiles_and_how_long_it_takes(thebes, monkeypatch, tmp_path: Path) -> None:
    """Given a cache folder without marks, the first run tells about compiling, the second one does not."""
    monkeypatch.setattr(warmup, "cache_folder", lambda: tmp_path)
    first, second = (thebes("simulate", *TEN, "--policy", "fifo") for _ in range(2))
    assert "Compiling the simulator for this machine (once per version, about 20 s) …\n" in first.err
    assert re.search(r"^Compiled in \d+ s\.$", first.err, re.MULTILINE)
    assert "ompil" not in second.err


def test_version(thebes) -> None:
    assert re.fullmatch(r"thebes \d+\.\d+\.\d+\n", thebes("--version").out)


def test_simulate_prints_a_table_and_tells_its_notes(thebes) -> None:
    ran = thebes("simulate", *TEN, "--policy", "tiresias-l")
    assert ran.code == 0
    assert "average JCT" in ran.out
    assert "10 of 10" in ran.out
    assert "note: the trace names no models: assigned by seed 0" in ran.err


def test_json_has_the_promised_keys_first_and_in_order(thebes) -> None:
    ran = thebes("simulate", *TEN, "--policy", "tiresias-g", "--json", "-")
    figures = json.loads(ran.out)
    assert tuple(figures)[: len(REQUIRED_KEYS)] == REQUIRED_KEYS
    assert figures["policy"] == "tiresias-g"
    assert figures["placement"] == "consolidate"
    assert figures["trace"] == "philly-sample"
    assert figures["cluster"] == "8x8"
    assert figures["completed"] == figures["jobs"] == 10
    assert figures["parameters"]["queue_limits"] == "3250,7200"


def test_json_is_byte_identical_from_run_to_run_but_for_the_wall_clock(thebes, tmp_path: Path) -> None:
    texts = []
    for name in ("a.json", "b.json"):
        thebes("simulate", *TEN, "--policy", "srtf", "--json", tmp_path / name)
        texts.append(re.sub(r'"wall_seconds": [^,]+', "", (tmp_path / name).read_text()))
    assert texts[0] == texts[1]


def test_settings_reach_policy_placement_speed_and_costs(thebes) -> None:
    settings = ("queue_limits=100,200,300", "placement.pack_limit=0.5", "perf.skewed=1,0.9,0.8,0.7", "cost.resume_s=7")
    flags = [flag for setting in settings for flag in ("--set", setting)]
    ran = thebes("simulate", *TEN, "--policy", "tiresias-l", "--placement", "skew", *flags, "--json", "-")
    parameters = json.loads(ran.out)["parameters"]
    assert parameters["queue_limits"] == "100,200,300"
    assert parameters["placement.pack_limit"] == "0.5"
    assert parameters["perf.skewed"] == "1,0.9,0.8,0.7"
    assert parameters["cost.resume_s"] == "7"


def test_report_figures_and_events_are_written(thebes, tmp_path: Path) -> None:
    report, events = tmp_path / "sub" / "r.html", tmp_path / "e.parquet"
    ran = thebes(
        "simulate", *TEN, "--policy", "fifo", "--report", report, "--figures", tmp_path / "figures", "--events", events
    )
    assert ran.code == 0
    assert report.read_text().startswith("<!doctype html>")
    assert f"report: {report}" in ran.err
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".png", ".pdf"}
    assert pl.read_parquet(events)["kind"].value_counts().height >= 3


def test_compare_runs_policies_side_by_side_with_ratios(thebes, tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    ran = thebes("compare", *TEN, "--policies", "fifo,srtf,tiresias-l", "--workers", 2, "--json", out)
    assert ran.code == 0
    assert [line.split()[0] for line in ran.out.splitlines() if line.startswith(("fifo", "srtf", "tiresias-l"))] == [
        "fifo",
        "srtf",
        "tiresias-l",
    ]
    found = json.loads(out.read_text())
    assert [result["policy"] for result in found["results"]] == ["fifo", "srtf", "tiresias-l"]
    assert found["ratios_to_first"]["fifo"]["avg_jct"] == 1.0
    expected = found["results"][1]["avg_jct"] / found["results"][0]["avg_jct"]
    assert found["ratios_to_first"]["srtf"]["avg_jct"] == expected


def test_compare_gives_the_same_figures_as_simulate(thebes) -> None:
    alone = json.loads(thebes("simulate", *TEN, "--policy", "srsf", "--json", "-").out)
    both = json.loads(thebes("compare", *TEN, "--policies", "fifo,srsf", "--workers", 2, "--json", "-").out)["results"][
        1
    ]
    assert {k: v for k, v in both.items() if k != "wall_seconds"} == {
        k: v for k, v in alone.items() if k != "wall_seconds"
    }


def test_compare_sends_settings_to_the_policies_that_know_them(thebes) -> None:
    flags = ("--set", "promote_knob=4", "--set", "tiresias-l.queue_limits=500", "--set", "cost.suspend_s=3")
    ran = thebes("compare", *TEN, "--policies", "fifo,tiresias-l,tiresias-g", "--workers", 1, *flags, "--json", "-")
    fifo, las, gittins = (result["parameters"] for result in json.loads(ran.out)["results"])
    assert "promote_knob" not in fifo
    assert las["promote_knob"] == gittins["promote_knob"] == "4"
    assert las["queue_limits"] == "500"
    assert gittins["queue_limits"] == "3250,7200"
    assert fifo["cost.suspend_s"] == "3"


def test_a_policy_of_ones_own_runs_from_a_file(thebes, own_policy: Path) -> None:
    ran = thebes("simulate", *TEN, "--policy", f"{own_policy}:Newest", "--json", "-")
    assert json.loads(ran.out)["policy"] == "Newest"


def test_a_policy_of_ones_own_runs_in_a_comparison(thebes, own_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = thebes("compare", *TEN, "--policies", f"fifo,{own_policy}:Newest", "--workers", 2, "--json", "-")
    assert ran.code == 0, ran.err
    assert [result["policy"] for result in json.loads(ran.out)["results"]] == ["fifo", "Newest"]


def test_policies_lists_all_and_tells_the_oracles(thebes) -> None:
    out = thebes("policies").out
    for name in registry():
        assert name in out
    assert "oracle" in out


@pytest.mark.parametrize("name", sorted(registry()))
def test_every_policy_can_be_shown(thebes, name: str) -> None:
    ran = thebes("policies", "show", name)
    assert ran.code == 0
    for word in (name, "paper:", "needs to know:", "parameters" if "--set" not in ran.out else "--set"):
        assert word in ran.out


def test_placements_are_listed_with_their_parameters(thebes) -> None:
    out = thebes("placements").out
    for word in ("consolidate", "relaxed", "skew", "yarn", "count", "random", "placement.pack_limit"):
        assert word in out


def test_speed_models_are_listed_with_their_parameters_and_so_is_what_wraps_them(thebes) -> None:
    out = thebes("perf").out
    for word in (*perf_registry(), "perf.skewed", "contention.eta", "interference.node_loss", "nvlink+hdr", "10gbe"):
        assert word in out


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_help_names_every_speed_model(thebes, command: str) -> None:
    words = thebes(command, "--help").out.replace("│", " ").split()
    for name in perf_registry():
        assert name in [word.strip(",") for word in words]


def test_contention_is_a_flag_and_its_law_can_be_set(thebes) -> None:
    def parameters(*flags: str) -> dict[str, str]:
        return json.loads(thebes("simulate", *TEN, "--policy", "fifo", *flags, "--json", "-").out)["parameters"]

    assert parameters()["contention.on"] == "no"
    assert parameters("--contention")["contention.on"] == "yes"
    assert parameters("--set", "contention.on=yes")["contention.on"] == "yes"
    chosen = parameters("--contention", "--set", "contention.eta=0.5", "--set", "interference.node_loss=0.1")
    assert (chosen["contention.eta"], chosen["interference.node_loss"]) == ("0.5", "0.1")


def test_a_network_is_chosen_by_name_and_a_slower_one_costs_more(thebes) -> None:
    def share(network: str) -> float:
        flags = ("--policy", "fifo", "--perf", "network", "--network", network, "--contention")
        figures = json.loads(
            thebes("simulate", "philly-sample", "--cluster", "8x8", "--limit", 60, *flags, "--json", "-").out
        )
        return figures["communication_share"]

    assert share("10gbe") > share("nvlink+hdr") > 0


def test_compat_reproduces_a_published_figure_and_tells_when_jobs_are_left(thebes, tmp_path: Path) -> None:
    trace = Path(__file__).parents[1] / "anchors" / "data" / "60_job.csv"
    cluster = tmp_path / "n4g4.csv"
    cluster.write_text("num_switch,num_node_p_switch,num_gpu_p_node,num_cpu_p_node,mem_p_node\n1,4,4,128,256\n")
    ran = thebes(
        "simulate", trace, "--cluster", cluster, "--policy", "tiresias-compat", "--set", "schedule=sjf", "--json", "-"
    )
    assert round(json.loads(ran.out)["avg_jct"], 3) == 198.2
    left = thebes("simulate", trace, "--cluster", "1x4", "--policy", "tiresias-compat", "--set", "schedule=fifo")
    assert left.code == 1
    assert "59 of 60 jobs never finished" in left.err


BAD = {
    "no policy": ((*TEN,), "Missing option '--policy'"),
    "unknown policy": ((*TEN, "--policy", "tiresia"), "did you mean 'tiresias-l'?"),
    "unknown parameter": ((*TEN, "--policy", "las", "--set", "quantum=3"), "did you mean 'quantum_s'?"),
    "no parameters": ((*TEN, "--policy", "fifo", "--set", "x=3"), "policy fifo has no parameters"),
    "not a number": ((*TEN, "--policy", "las", "--set", "quantum_s=soon"), "quantum_s=soon is not a number"),
    "out of range": ((*TEN, "--policy", "las", "--set", "quantum_s=0"), "must be at least 0.001"),
    "not yes or no": ((*TEN, "--policy", "las", "--set", "gpu_time=maybe"), "is not yes or no"),
    "descending": ((*TEN, "--policy", "tiresias-l", "--set", "queue_limits=3,2"), "do not ascend"),
    "bad order": ((*TEN, "--policy", "tiresias-l", "--set", "order=lifo"), "order is start, first-start, submit"),
    "not a setting": ((*TEN, "--policy", "fifo", "--set", "x"), "--set x: not KEY=VALUE"),
    "no such part": ((*TEN, "--policy", "fifo", "--set", "plac.x=1"), "there is no 'plac' in this run"),
    "an option that is gone": ((*TEN, "--policy", "fifo", "--fractional"), "No such option: --fractional"),
    "unknown placement": ((*TEN, "--policy", "fifo", "--placement", "random2"), "did you mean 'random'?"),
    "unknown perf": ((*TEN, "--policy", "fifo", "--perf", "tier"), "did you mean 'tiers'?"),
    "unknown cost": ((*TEN, "--policy", "fifo", "--set", "cost.resume=1"), "did you mean 'resume_s'?"),
    "unknown mechanism": ((*TEN, "--policy", "fifo", "--set", "cost.mechanism=kil"), "did you mean 'kill'?"),
    "unknown contention": ((*TEN, "--policy", "fifo", "--set", "contention.etta=1"), "did you mean 'eta'?"),
    "contention overlap": ((*TEN, "--policy", "fifo", "--set", "contention.overlap=ful"), "did you mean 'full'?"),
    "interference": ((*TEN, "--policy", "fifo", "--set", "interference.node=1"), "did you mean 'node_loss'?"),
    "near prefix": ((*TEN, "--policy", "fifo", "--set", "contension.eta=1"), "did you mean 'contention'?"),
    "unknown network": ((*TEN, "--policy", "fifo", "--network", "10gb"), "did you mean '10gbe'?"),
    "few speeds": ((*TEN, "--policy", "fifo", "--set", "perf.skewed=1,1"), "needs 4 speeds"),
    "sample file": ((*TEN, "--policy", "gittins", "--set", "samples_file=nowhere.csv"), "cannot read samples"),
    "no trace": (("nowhere.csv", "--cluster", "8x8", "--policy", "fifo"), "no such file"),
    "near trace": (("philly-sampel", "--cluster", "8x8", "--policy", "fifo"), "philly-sample"),
    "no cluster": (("philly-sample", "--cluster", "8by8", "--policy", "fifo"), "not a short form either"),
    "oversize": (("philly-sample", "--cluster", "2x8", "--policy", "fifo"), "--skip-oversize leaves them out"),
    "compat placement": (
        (*TEN, "--policy", "tiresias-compat", "--placement", "skew"),
        "knows the placements count and yarn",
    ),
    "compat schedule": ((*TEN, "--policy", "tiresias-compat", "--set", "schedule=dlsa"), "no schedule 'dlsa'"),
    "events ending": ((*TEN, "--policy", "fifo", "--events", "e.txt"), "written as .parquet or .csv"),
    "json is a folder": ((*TEN, "--policy", "fifo", "--json", "."), "it is a folder"),
    "report is a folder": ((*TEN, "--policy", "fifo", "--report", "."), "it is a folder"),
    "no such file": ((*TEN, "--policy", "nowhere.py:X"), "policy file 'nowhere.py': no such file"),
    "no such module": ((*TEN, "--policy", "nowhere.at.all:X"), "does not load"),
}


@pytest.mark.parametrize("case", BAD, ids=BAD.keys())
def test_bad_input_gets_one_clear_error(thebes, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args, message = BAD[case]
    ran = thebes("simulate", *args)
    assert ran.code == 2
    assert message in ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""


def test_a_file_without_the_class_suggests_the_policies_in_it(thebes, own_policy: Path) -> None:
    assert "did you mean 'Newest'?" in thebes("simulate", *TEN, "--policy", f"{own_policy}:Newst").err
    assert "derive the class from thebes.Policy" in thebes("simulate", *TEN, "--policy", f"{own_policy}:NotAPolicy").err


def test_a_policy_file_that_does_not_load_says_why(thebes, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import thebes\nthebes.nothing_like_that\n")
    ran = thebes("simulate", *TEN, "--policy", f"{tmp_path / 'broken.py'}:X")
    assert ran.code == 2
    assert "does not load: AttributeError" in ran.err


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ("fifo,fifo", "--policies names 'fifo' twice"),
        (",", "--policies names no policy"),
        ("fifo,srft", "did you mean 'srtf'?"),
    ],
)
def test_compare_refuses_odd_lists(thebes, policies: str, message: str) -> None:
    ran = thebes("compare", *TEN, "--policies", policies)
    assert ran.code == 2
    assert message in ran.err


def test_compare_refuses_settings_that_nobody_knows(thebes) -> None:
    ran = thebes("compare", *TEN, "--policies", "fifo,las", "--set", "quantums=3")
    assert "none of these policies has a parameter 'quantums'" in ran.err
    ran = thebes("compare", *TEN, "--policies", "fifo,las", "--set", "sjf.x=3")
    assert "there is no 'sjf' in this run" in ran.err


def test_an_error_in_a_worker_process_reaches_the_user(thebes) -> None:
    ran = thebes("compare", "philly-sample", "--cluster", "2x8", "--policies", "fifo,las", "--workers", 2)
    assert ran.code == 2
    assert "can never run on this cluster" in ran.err
    assert "Traceback" not in ran.err


def test_progress_bars_are_drawn_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from thebes.cli.simulate import progress

    with progress(["las"]) as advance:
        advance(0, 0.5)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with progress(["las"]) as advance:
        advance(0, 0.5)
    assert "las" in capsys.readouterr().err


@pytest.mark.parametrize("name", [":Foo", "..x:Foo"])
def test_a_policy_name_without_a_place_is_refused(thebes, name: str) -> None:
    ran = thebes("simulate", *TEN, "--policy", name)
    assert ran.code == 2
    assert "names no file or module" in ran.err


def test_a_policy_file_may_be_called_like_a_module_of_python(thebes, tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text(OWN_POLICY)
    assert thebes("simulate", *TEN, "--policy", f"{tmp_path / 'random.py'}:Newest").code == 0


def test_a_hidden_column_is_one_clear_error(thebes, tmp_path: Path) -> None:
    path = tmp_path / "peeks.py"
    path.write_text(OWN_POLICY.replace("-view.jobs.submit_s", "view.jobs.duration_s"))
    ran = thebes("simulate", *TEN, "--policy", f"{path}:Newest")
    assert ran.code == 2
    assert "view.jobs.duration_s is hidden" in ran.err
    assert "frozenset" in ran.err


def test_a_parameter_that_text_cannot_give_is_refused(thebes, tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    odd = OWN_POLICY.replace("class Newest", "from dataclasses import dataclass\n@dataclass\nclass Newest")
    path.write_text(odd.replace('first."""\n', 'first."""\n    size: int | None = thebes.parameter(None, "odd")\n'))
    ran = thebes("simulate", *TEN, "--policy", f"{path}:Newest", "--set", "size=3")
    assert ran.code == 2
    assert "size cannot be set from text" in ran.err


def test_infinite_costs_are_refused(thebes) -> None:
    ran = thebes("simulate", *TEN, "--policy", "fifo", "--set", "cost.resume_s=inf")
    assert ran.code == 2
    assert "must be between 0 and 1e+09" in ran.err


def test_jobs_that_are_killed_for_ever_are_noticed(thebes, tmp_path: Path) -> None:
    trace = tmp_path / "two.csv"
    trace.write_text("job_id,submit_time,duration,num_gpus\na,0,3000,1\nb,0,3000,1\n")
    ran = thebes("simulate", trace, "--cluster", "1x1", "--policy", "las", "--set", "cost.mechanism=kill")
    assert ran.code == 2
    assert "no work is kept any more under las" in ran.err
    assert "checkpoint_every_s" in ran.err


def test_nodes_that_differ_in_cpus_only_hold_one_gang(thebes, tmp_path: Path) -> None:
    cluster, trace = tmp_path / "k2.toml", tmp_path / "j16.csv"
    cluster.write_text("[[node]]\ngpus = 8\ncpus = 64\n[[node]]\ngpus = 8\ncpus = 96\n")
    trace.write_text("job_id,submit_time,duration,num_gpus\na,0,30,16\n")
    assert thebes("simulate", trace, "--cluster", cluster, "--policy", "fifo").code == 0


def test_more_kinds_than_fit_are_refused(thebes, tmp_path: Path) -> None:
    cluster = tmp_path / "many.toml"
    cluster.write_text("".join(f"[[node]]\ngpus = {n}\n" for n in range(1, 70)))
    ran = thebes("simulate", "philly-sample", "--cluster", cluster, "--policy", "fifo")
    assert ran.code == 2
    assert "more than 62 kinds of node" in ran.err
