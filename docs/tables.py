"""Fills the tables of README.md and docs/*.md from the code and from real runs, so that they cannot drift.

    python docs/tables.py            # names, parameters, formats, the demo: seconds
    python docs/tables.py --all      # the simulations of docs/reproduction.md too: a minute; needs ../shared/data

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. tests/docs compares each with what is written here.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from thebes.model.parameters import parameters_of, show_value

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data" / "tiresias"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"(<!-- table: (?P<name>[^>]+?) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)
DEMO = (
    "compare philly-sample --cluster 8x8 --policies fifo,srtf,tiresias-l,tiresias-g "
    "--json demo.json --report demo.html --workers 1"
)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Markdown; `right` are the columns of figures."""
    rule = ["---:" if i in right else "---" for i in range(len(head))]
    lines = [head, rule, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def sentences(owner: type, count: int = 1) -> str:
    """The first sentences of a docstring."""
    text = " ".join(inspect.cleandoc(owner.__doc__ or "").split("\n\n")[0].split())
    return ". ".join(text.split(". ")[:count]).rstrip(".") + "."


# --- from the registries ----------------------------------------------------------------------------------------------


def policies() -> str:
    from thebes.live.config import CARRIED
    from thebes.model.facts import DURATIONS
    from thebes.policy import BUILT_IN
    from thebes.policy.admission import runs_live_on

    def needs(policy: type) -> str:
        return "run times (oracle)" if DURATIONS in policy.needs else ", ".join(sorted(policy.needs)) or "nothing"

    def live(policy: type) -> str:
        return runs_live_on(policy(), CARRIED)

    return table(
        ("policy", "what it does", "needs to know", "runs live"),
        ((f"`{p.name}`", sentences(p), needs(p), live(p)) for p in BUILT_IN),
    )


def placements() -> str:
    from thebes.placement import registry

    return table(("placement", "where a job's GPUs are"), ((f"`{n}`", sentences(p)) for n, p in registry().items()))


def parameters(owner: type, prefix: str = "") -> str:
    known = parameters_of(owner)
    if not known:
        return "Parameters: none.\n"
    rows = ((f"`{prefix}{info.name}`", f"`{show_value(info.default)}`", info.doc) for info in known.values())
    return table(("`--set`", "default", "meaning"), rows)


def about(policy: type) -> str:
    """One policy: source, knowledge, parameters."""
    from thebes.model.facts import NEEDS

    needs = "; ".join(NEEDS[need] for need in sorted(policy.needs)) or "nothing"
    return f"Source: {policy.paper}. Needs to know: {needs}.\n\n{parameters(policy)}"


def formats() -> str:
    from thebes.trace import FORMATS

    known = sorted(FORMATS, key=lambda known: known.name)
    return table(("`--format`", "what it is"), ((f"`{f.name}`", f.title) for f in known))


def speed_models() -> str:
    from thebes.perf import registry

    return table(("`--perf`", "how fast a job runs"), ((f"`{n}`", sentences(p)) for n, p in registry().items()))


def links() -> str:
    """In gigabytes per second too, since that is how the inside of a node is usually told."""
    from thebes.model.links import PRESETS

    rows = (
        (f"`{name}`", f"{link.bandwidth_gbps:g}", f"{link.bandwidth_gbps / 8:g}", f"{link.latency_us:g}")
        for name, link in PRESETS.items()
    )
    return table(("preset", "`bandwidth_gbps`", "GB/s", "`latency_us`"), rows, right=(1, 2, 3))


def networks() -> str:
    from thebes.model.links import NETWORKS

    rows = ((f"`{name}`", f"`{inside}`", f"`{between}`") for name, (inside, between) in NETWORKS.items())
    return table(("network", "inside nodes", "between nodes"), rows)


def _accuracy() -> dict[str, Any]:
    """The published study: `python -m benchmarks.plan_accuracy --strict`."""
    return json.loads((ROOT / "benchmarks" / "results" / "plan-accuracy.json").read_text(encoding="utf-8"))


def _per_cent(share: float) -> str:
    return f"{100 * share:.1f} %"


def plan_accuracy() -> str:
    a800 = _accuracy()["a800"]
    rows = [
        (
            f"`{name}`",
            str(row["unseen"]["rows"]),
            _per_cent(row["unseen"]["mean"]),
            _per_cent(row["unseen"]["worst"]),
            _per_cent(row["naive"]["mean"]),
            f"{_per_cent(row['random']['median'])}, {_per_cent(row['random']['p90'])}",
            _per_cent(a800["environment_without_the_model"][name]["unseen"]["mean"]),
        )
        for name, row in a800["models"].items()
    ]
    return table(("model", "rows", "mean", "worst", "without a model", "at random", "strict"), rows, range(1, 7))


def plan_accuracy_by_kind() -> str:
    models = _accuracy()["a800"]["models"]
    kinds = sorted({kind for row in models.values() for kind in row["unseen_by_plan"]})
    rows: list[list[str]] = []
    for name, row in models.items():
        found = [row["unseen_by_plan"].get(kind) for kind in kinds]
        rows.append([f"`{name}`", *(f"{_per_cent(f['mean'])} / {_per_cent(f['worst'])}" if f else "" for f in found)])
    return table(("model", *kinds), rows, range(1, len(kinds) + 1))


def plan_accuracy_vtrain() -> str:
    document = _accuracy()
    rows: list[tuple[str, ...]] = []
    for cluster, where in (("vtrain_single", "one node"), ("vtrain_multi", "8 to 64 nodes")):
        for name, row in document[cluster]["models"].items():
            mark = " \\*" if name in document[cluster]["environment_calibrated_on"] else ""
            unseen, random = row["unseen"], row["random"]
            figures = (unseen["mean"], unseen["worst"], row["naive"]["mean"], random["median"])
            rows.append((name.removeprefix("gpt-") + mark, where, str(unseen["rows"]), *map(_per_cent, figures)))
    return table(("shape", "where", "rows", "mean", "worst", "without a model", "at random"), rows, range(2, 7))


def _rubick() -> dict[str, Any]:
    """The published comparison: `make bench-rubick`."""
    return json.loads((ROOT / "benchmarks" / "results" / "rubick.json").read_text(encoding="utf-8"))


def rubick_406(workload: str) -> str:
    """All policies on one workload: average JCT / p99 / makespan in seconds, and restarts, per cost of a restart."""
    document = _rubick()
    runs = {(run["restart"], run["policy"]): run for run in document["runs"] if run["workload"] == workload}
    promises = any(run["guaranteed"] for run in runs.values())
    rows: list[list[str]] = []
    for policy in document["policies"]:
        mine = [runs[restart, policy] for restart in document["restarts"]]
        cells = [
            f"{run['avg_jct']:,.0f} / {run['p99_jct']:,.0f} / {run['makespan']:,.0f} ({run['restarts']})"
            for run in mine
        ]
        missed = [" / ".join(str(run["sla_violations"]) for run in mine)] if promises else []
        rows.append([f"`{policy}`", *cells, *missed])
    head = ("policy", *document["restarts"], *(["SLA missed, of 194"] if promises else []))
    return table(head, rows, range(1, len(head)))


def rubick_gains() -> str:
    """What Rubick gains over the best of the three baselines, beside the paper."""
    rows = [
        (
            f"{gain['workload']}, {gain['restart']}",
            f"{gain['avg_jct']['gain']:.2f}x over `{gain['avg_jct']['over']}`",
            f"{gain['makespan']['gain']:.2f}x over `{gain['makespan']['over']}`",
        )
        for gain in _rubick()["gains"]
    ]
    paper = ("paper: its testbed, its traces, its versions of the baselines", "up to 3.2x", "up to 1.4x")
    return table(("workload, restarts", "average JCT", "makespan"), [*rows, paper])


def rubick_unseen() -> str:
    """Shuffled copies of the workload that nobody chose a parameter on."""
    unseen = _rubick()["unseen"]
    rows = [
        (
            f"`{name.split(',')[0]}`{name[len(name.split(',')[0]) :]}",
            *(f"{value:,.0f}" for value in unseen["avg_jct"][name]),
        )
        for name in unseen["avg_jct"]
    ]
    return table(("average JCT, s", *(f"seed {seed}" for seed in unseen["seeds"])), rows, range(1, 6))


def plan_models() -> str:
    from thebes.model.plan import FAMILIES
    from thebes.perf.plans.transformer import find, names

    def row(name: str) -> tuple[str, ...]:
        model = find(name)
        size = (
            f"{model.parameters / 1e9:.3g} billion"
            if model.parameters >= 1e9
            else f"{model.parameters / 1e6:g} million"
        )
        plans = ", ".join(family for family in FAMILIES if family in model.families)
        shape = (model.layers, model.hidden, model.heads, model.sequence, model.global_batch)
        return (f"`{name}`", size, *(f"{number:,}" for number in shape), plans)

    head = ("model", "parameters", "layers", "hidden", "heads", "sequence", "global batch", "plans")
    return table(head, (row(name) for name in names()), right=range(1, 7))


def plans_of_llama() -> str:
    from thebes.perf.plans.site import A800
    from thebes.perf.plans.survey import survey
    from thebes.perf.plans.transformer import find

    found = survey(find("llama-2-7b", 16), A800, range(1, 65), A800.cpus_per_gpu)
    rows = (
        (
            str(row.gpus),
            f"`{row.best.plan}`",
            f"{row.best.iteration_s:.3g}",
            f"{row.best.samples_s:.3g}",
            f"{row.best.gpu_gib:.1f}",
            f"{row.best.host_gib:.1f}" if row.best.host_gib else "",
        )
        for row in found.rows
    )
    head = ("GPUs", "best plan", "s/iteration", "samples/s", "GiB on each GPU", "GiB on the host, per GPU")
    return table(head, rows, right=(0, 2, 3, 4, 5))


def demo() -> str:
    """What `make demo` prints."""
    import os
    import tempfile

    from typer.testing import CliRunner

    from thebes.cli import app

    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            done = CliRunner().invoke(app, DEMO.split(), env={"COLUMNS": "80"}, catch_exceptions=False)
        finally:
            os.chdir(here)
    assert done.exit_code == 0, done.output
    lines = [line.rstrip() for line in done.stdout.splitlines() if line.strip()]
    return "```text\n" + "\n".join(lines) + "\n```\n"


def quick_tables() -> dict[str, Callable[[], str]]:
    """By name; each gives the text between the two comments."""
    from thebes.perf import Gavel, Network, Pollux, Tiers
    from thebes.perf.contention import Contention
    from thebes.perf.interference import Interference
    from thebes.placement import Skew
    from thebes.policy import BUILT_IN
    from thebes.sim.costs import Costs

    return {
        "policies": policies,
        "placements": placements,
        "formats": formats,
        "demo": demo,
        "costs": lambda: parameters(Costs, "cost."),
        "tiers": lambda: parameters(Tiers, "perf."),
        "speed models": speed_models,
        "links": links,
        "networks": networks,
        "network": lambda: parameters(Network, "perf."),
        "gavel": lambda: parameters(Gavel, "perf."),
        "pollux": lambda: parameters(Pollux, "perf."),
        "contention": lambda: parameters(Contention, "contention."),
        "interference": lambda: parameters(Interference, "interference."),
        "skew": lambda: parameters(Skew, "placement."),
        "plan models": plan_models,
        "rubick base": lambda: rubick_406("base"),
        "rubick bp": lambda: rubick_406("bp"),
        "rubick mt": lambda: rubick_406("mt"),
        "rubick gains": rubick_gains,
        "rubick unseen": rubick_unseen,
        "plan accuracy": plan_accuracy,
        "plan accuracy by kind": plan_accuracy_by_kind,
        "plan accuracy vtrain": plan_accuracy_vtrain,
        "plans of llama": plans_of_llama,
        **{f"policy {p.name}": (lambda p=p: about(p)) for p in BUILT_IN},
    }


# --- from simulations: docs/reproduction.md ---------------------------------------------------------------------------


def _simulate(
    trace: object, policy: object, *, bare: bool, cluster: str = "8x8", **options: object
) -> dict[str, float]:
    """The figures of one run. `bare`: no costs, placement does not matter, GPUs are only counted."""
    import thebes

    if bare:
        options = {"costs": thebes.Costs(mechanism="free"), "perf": "ideal", "placement": "count", **options}
    return thebes.simulate(trace, cluster, policy, **options).metrics  # type: ignore[arg-type]


def _days(seconds: float) -> str:
    return f"{seconds / 86400:.2f} d" if seconds >= 86400 else f"{seconds / 3600:.2f} h"


def _row(name: str, m: dict[str, float]) -> tuple[str, ...]:
    times = (_days(m[key]) for key in ("avg_jct", "median_jct", "p95_jct", "max_jct"))
    return (name, *times, f"{m['gpu_utilization']:.1%}", f"{m['preemptions']:,}")


_HEAD = ("policy", "avg JCT", "median", "p95", "max", "useful GPU time", "preemptions")
_FIGURES = range(1, 7)


def paper_example() -> str:
    """Three jobs on two GPUs, spec section 2.6."""
    import polars as pl

    import thebes
    from thebes.model.trace import TRACE_SCHEMA
    from thebes.policy.orders.las import LeastAttainedService

    columns = {"job_id": ["J1", "J2", "J3"], "submit_time": [0, 0, 0], "num_gpus": [2, 1, 2], "duration": [2, 8, 6]}
    frame = pl.DataFrame(
        {name: pl.Series(columns.get(name, [None] * 3)).cast(dtype) for name, dtype in TRACE_SCHEMA.items()}
    )
    trace = thebes.Trace("example", frame)
    cases = (
        ("`srsf`", "srsf", "9.3"),
        ("`las`, quantum 1 s", LeastAttainedService(quantum_s=1.0), "11.7"),
        ("`srtf`", "srtf", ""),
        ("`fifo`", "fifo", ""),
    )
    rows: list[tuple[str, ...]] = []
    for name, policy, paper in cases:
        done = thebes.simulate(
            trace, "1x2", policy, costs=thebes.Costs(mechanism="free"), perf="ideal", placement="count"
        )
        ends = ", ".join(f"{end:g}" for end in done.jobs["finish_s"])
        rows.append((name, ends, f"{done.metrics['avg_jct']:.2f}", paper))
    return table(("policy", "J1, J2, J3 end at", "avg JCT", "paper"), rows, right=(2, 3))


# Average JCT on muri3 of the re-implementation in the project's specification, two queues unless said.
_PUBLISHED_LIMITS = {(3250,): 334_089, (18_000,): 310_379, (57_600,): 294_220, (200_000,): 276_471}
_PUBLISHED_LIMITS |= {(1_000_000,): 399_424, (3250, 57_600): 289_640}


def limits_muri3() -> str:
    from thebes.policy.orders.tiresias import TiresiasL

    trace = SHARED / "muri3_job.csv"
    rows: list[tuple[str, ...]] = []
    for limits, published in _PUBLISHED_LIMITS.items():
        start, first_start = (
            _simulate(trace, TiresiasL(queue_limits=limits, order=order), bare=True)
            for order in ("start", "first-start")
        )
        full = _simulate(trace, TiresiasL(queue_limits=limits), bare=False)
        averages = (start["avg_jct"], published, first_start["avg_jct"], full["avg_jct"])
        rows.append((", ".join(f"{limit:,}" for limit in limits), *(f"{average:,.0f}" for average in averages)))
    head = ("limits (GPU-s)", "`start`, bare", "release's order, bare", "`first-start`, bare", "`start`, with costs")
    return table(head, rows, right=range(1, 5))


def orders_muri3() -> str:
    """The orders inside a queue."""
    from thebes.policy.orders.tiresias import TiresiasL

    cases = [(limits, order) for limits in ((3250, 7200), (200_000,)) for order in ("start", "first-start", "submit")]
    rows = (
        (
            ", ".join(f"{limit:,}" for limit in limits),
            *_row(f"`{order}`", _simulate(SHARED / "muri3_job.csv", TiresiasL(limits, order=order), bare=False)),
        )
        for limits, order in cases
    )
    return table(("limits (GPU-s)", "order", *_HEAD[1:]), rows, right=range(2, 8))


def limits_philly() -> str:
    from thebes.policy.orders.tiresias import TiresiasL

    rows = (
        _row(
            ", ".join(f"{limit:,}" for limit in limits),
            _simulate("philly-sample", TiresiasL(queue_limits=limits), bare=False),
        )
        for limits in _PUBLISHED_LIMITS
    )
    return table(("limits (GPU-s)", *_HEAD[1:]), rows, right=_FIGURES)


_POLICIES = ("fifo", "backfill", "sjf", "srtf", "srsf", "las", "gittins", "tiresias-l", "tiresias-g")
# `tiresias-compat` on the same trace: the schedule that each policy comes from, and the variant to compare with.
_RELEASED = {
    "fifo": ("fifo", "as-released"),
    "backfill": ("fjf", "as-released"),
    "sjf": ("sjf", "as-released"),
    "srtf": ("shortest", "as-released"),
    "srsf": ("shortest-gpu", "as-released"),
    "gittins": ("gittins", "corrected"),
    "tiresias-l": ("dlas-gpu", "corrected"),
    "tiresias-g": ("dlas-gpu-gittins", "corrected"),
}


def bare_muri3() -> str:
    from thebes.policy.orders.tiresias_compat import TiresiasCompat

    trace = SHARED / "muri3_job.csv"
    rows: list[tuple[str, ...]] = []
    for name in _POLICIES:
        ours = _simulate(trace, name, bare=True)
        theirs = ("", "")
        if name in _RELEASED:
            schedule, variant = _RELEASED[name]
            figures = _simulate(trace, TiresiasCompat(schedule=schedule, variant=variant), bare=False)
            theirs = (f"{figures['avg_jct']:,.0f}", f"`{schedule}`, {variant}")
        rows.append((f"`{name}`", f"{ours['avg_jct']:,.0f}", theirs[0], theirs[1], f"{ours['preemptions']:,}"))
    return table(("policy", "ours", "released simulator", "its schedule", "our preemptions"), rows, right=(1, 2, 4))


def _full(trace: object) -> str:
    rows = (_row(f"`{name}`", _simulate(trace, name, bare=False)) for name in _POLICIES)
    return table(_HEAD, rows, right=_FIGURES)


def paper_baselines() -> str:
    """YARN-CS and Best-effort of the paper against Tiresias, on the Philly sample."""
    from thebes.policy.orders.tiresias import TiresiasL

    best = TiresiasL(queue_limits=(200_000.0,))
    cases = (
        ("`fifo`, placement `yarn` (YARN-CS)", "fifo", "yarn"),
        ("`backfill`, placement `yarn` (Best-effort)", "backfill", "yarn"),
        ("`srtf`, placement `skew`", "srtf", "skew"),
        ("`tiresias-l`, placement `skew`", "tiresias-l", "skew"),
        ("`tiresias-l`, one limit of 200,000, `skew`", best, "skew"),
        ("`tiresias-g`, placement `skew`", "tiresias-g", "skew"),
    )
    rows = (
        _row(name, _simulate("philly-sample", policy, bare=False, placement=place)) for name, policy, place in cases
    )
    return table(_HEAD, rows, right=_FIGURES)


def knobs_muri3() -> str:
    from thebes.policy.orders.tiresias import TiresiasL

    def line(limits: tuple[float, ...], knob: int) -> tuple[str, ...]:
        policy = TiresiasL(queue_limits=limits, promote_knob=float(knob))
        m = _simulate(SHARED / "muri3_job.csv", policy, bare=False)
        return (", ".join(f"{limit:,}" for limit in limits), *_row(str(knob or "off"), m), f"{m['promotions']:,}")

    cases = [((3250, 7200), knob) for knob in (0, 8, 1)] + [((200_000,), knob) for knob in (0, 8, 4, 2, 1)]
    head = ("limits (GPU-s)", "knob", *_HEAD[1:], "promotions")
    return table(head, (line(limits, knob) for limits, knob in cases), right=range(1, 9))


def placements_muri3() -> str:
    from thebes.placement import Skew

    cases = (
        ("`consolidate`", "consolidate"),
        ("`relaxed`", "relaxed"),
        ("`skew`", "skew"),
        ("`skew`, limit learned", Skew(learn=True)),
        ("`yarn`", "yarn"),
        ("`random`", "random"),
    )
    rows = (
        _row(name, _simulate(SHARED / "muri3_job.csv", "tiresias-l", bare=False, placement=place))
        for name, place in cases
    )
    return table(("placement", *_HEAD[1:]), rows, right=_FIGURES)


def slow_tables() -> dict[str, Callable[[], str]]:
    return {
        "paper example": paper_example,
        "limits on muri3": limits_muri3,
        "limits on the Philly sample": limits_philly,
        "orders": orders_muri3,
        "muri3, bare": bare_muri3,
        "muri3": lambda: _full(SHARED / "muri3_job.csv"),
        "muri4": lambda: _full(SHARED / "muri4_job.csv"),
        "Philly sample": lambda: _full("philly-sample"),
        "paper baselines": paper_baselines,
        "knobs": knobs_muri3,
        "placements on muri3": placements_muri3,
    }


# --- into the pages ---------------------------------------------------------------------------------------------------


def blocks(text: str) -> dict[str, str]:
    """The tables that stand in a page."""
    return {found["name"]: found["body"] for found in BLOCK.finditer(text)}


def filled(text: str, makers: dict[str, Callable[[], str]]) -> str:
    """The page with the tables made anew that `makers` knows."""

    def fill(found: re.Match[str]) -> str:
        made = makers.get(found["name"])
        return found[0] if made is None else f"{found[1]}{made()}{found[4]}"

    return BLOCK.sub(fill, text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fill the tables of README.md and docs/.")
    parser.add_argument("--all", action="store_true", help="also the simulations of docs/reproduction.md")
    makers = quick_tables() | (slow_tables() if parser.parse_args().all else {})
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = filled(before, makers)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"{page.relative_to(ROOT)}: written")


if __name__ == "__main__":
    main()
