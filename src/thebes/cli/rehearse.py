"""`thebes rehearse` runs real processes on a small live cluster, and shows the simulator's prediction beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thebes.cli.screen import paint, plural, say, table, terminal_width
from thebes.cli.site_options import (
    AccountOption,
    HomeOption,
    PartitionOption,
    QosOption,
    RayAddressOption,
    ReservationOption,
)

if TYPE_CHECKING:
    from thebes.instance.rehearsal import Rehearsal

SHOWN = 20


def rehearse(
    jobs: Annotated[int, typer.Option(min=1, max=1000, help="Jobs of the workload.")] = 60,
    seconds: Annotated[float, typer.Option(min=5, max=3600, help="About how long the run should take.")] = 120.0,
    gpus: Annotated[int | None, typer.Option(min=1, max=64, help="Virtual GPUs, on this machine.  [8]")] = None,
    policy: Annotated[str, typer.Option(metavar="NAME", help="The policy (see `thebes policies`).")] = "tiresias-l",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter of the policy.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another workload.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")] = None,
    engine: Annotated[str | None, typer.Option(metavar="NAME", help="local, slurm or ray, as in `up`.")] = None,
    partition: PartitionOption = None,
    reservation: ReservationOption = None,
    account: AccountOption = None,
    qos: QosOption = None,
    address: RayAddressOption = None,
    home: HomeOption = None,
    below: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Make the temporary folder here: Slurm's nodes must see it.")
    ] = None,
) -> None:
    """Run a workload on a live cluster of its own, in compressed time, and compare with the simulator.

    Jobs are real processes that train something tiny, are preempted by the policy and resume. The queue limits of
    tiresias are fitted to the workload. The cluster lives in a temporary folder and is removed at the end. With
    --engine slurm or ray it works on the nodes of that cluster: a rehearsal before people rely on it.
    """
    import json
    import shutil
    import tempfile

    from thebes.cli.instance import compile_ahead
    from thebes.client import Client
    from thebes.instance import rehearsal
    from thebes.instance.down import take_down
    from thebes.instance.up import bring_up
    from thebes.instance.wanted import UpOptions, wanted_config
    from thebes.model.errors import UserError
    from thebes.protocol.instance import Instance

    where = UpOptions(
        engine=engine,
        partition=partition,
        reservation=reservation,
        account=account,
        qos=qos,
        address=address,
        home=home,
    )
    if engine in (None, "local"):
        where = replace(where, virtual_gpus=gpus or 8)
    elif gpus is not None:
        raise UserError(f"--gpus is for this machine: {engine} tells how many there are", hint="leave it out")
    found = wanted_config(None, where)
    largest = max(node.gpus for node in found.nodes)
    acts = rehearsal.make_workload(jobs, seconds, found.gpus, seed=seed)
    chosen = list(settings or ())
    if policy.startswith("tiresias") and not any(text.startswith("queue_limits") for text in chosen):
        chosen.append("queue_limits=" + ",".join(f"{limit:g}" for limit in rehearsal.queue_limits(acts)))
    folder = Path(tempfile.mkdtemp(prefix="thebes-rehearsal-", dir=below))
    instance = Instance(folder)
    try:
        brought = bring_up(instance, replace(where, policy=policy, settings=chosen), compile_ahead)
        on = plural(found.gpus, "virtual GPU" if found.nodes[0].virtual else "GPU")
        say(f"{plural(jobs, 'job')} on {on} under {policy}, {' '.join(chosen)}")
        client = Client(dir=folder)
        ids, took_s = rehearsal.play(client, acts, _progress, gpus_per_node=largest)
        done = rehearsal.compare(client, acts, ids, took_s, brought.config)
    finally:
        take_down(instance, "kill", lambda text: None)
        shutil.rmtree(folder, ignore_errors=True)
    if json_file is not None:
        json_file.write_text(json.dumps(done.to_json(), indent=2) + "\n")
    print("\n".join(report_lines(done)))


def _progress(ended: int, total: int) -> None:
    if ended and (ended % max(1, total // 5) == 0 or ended == total):
        say(f"  {ended} of {total} jobs have ended")


def report_lines(done: Rehearsal) -> list[str]:
    """The comparison in words. The jobs that were preempted most come first."""
    rows = [
        (
            p.job_id,
            str(p.act.gpus),
            f"{p.act.duration_s:.1f}",
            str(p.preemptions),
            f"{p.jct_s:.1f}",
            f"{p.predicted_s:.1f}",
            f"{100 * p.error:+.1f} %",
        )
        for p in sorted(done.played, key=lambda p: (-p.preemptions, int(p.job_id)))
    ]
    heads = ("JOB", "GPUS", "WORK s", "PREEMPTED", "TOOK s", "SIMULATED s", "ERROR")
    lines = table(heads, rows[:SHOWN], right=heads[1:], width=terminal_width())
    if len(rows) > SHOWN:
        lines.append(f"… and {len(rows) - SHOWN} more")
    lost = sum(p.lost_gpu_s for p in done.played)
    whole = all(p.same_weights for p in done.played)
    weights = "as in an uninterrupted run" if whole else paint("NOT as in an uninterrupted run", "red")
    lines += [
        "",
        f"{plural(len(done.played), 'job')}, {plural(done.preemptions, 'preemption')}, lost work {lost:.1f} GPU-s, "
        f"final weights {weights}",
        f"measured      start {done.start_s:.2f} s, save {done.suspend_s:.2f} s, resume {done.resume_s:.2f} s, "
        f"end {done.finish_s:.2f} s",
        f"mean JCT      {done.mean_jct_s:.2f} s, simulated {done.mean_predicted_s:.2f} s "
        f"({100 * done.error_of_mean:+.1f} %)",
        f"per job       off by {100 * done.mean_error:.1f} % on average",
    ]
    return lines
