"""`thebes engine check slurm|ray` tells what an existing cluster supports, before `thebes up --engine` relies on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from thebes.cli.live import ShortOutput, ShortOutputOption
from thebes.cli.screen import LEVEL_STYLES, clean, paint, print_json
from thebes.cli.site_options import (
    AccountOption,
    HomeOption,
    PartitionOption,
    QosOption,
    RayAddressOption,
    ReservationOption,
)
from thebes.engine.finding import SiteFinding, worst
from thebes.model.errors import UserError

ENGINES = ("slurm", "ray")

app = typer.Typer(help="Look at the cluster that Thebes shall run on.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Make this a group, although it has only one command."""


@app.command("check")
def check(
    engine: Annotated[str, typer.Argument(metavar="slurm|ray", help="Which kind of cluster.")],
    partition: PartitionOption = None,
    reservation: ReservationOption = None,
    account: AccountOption = None,
    qos: QosOption = None,
    shared: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Slurm: a folder that all nodes see. Default: this one.")
    ] = None,
    home: HomeOption = None,
    address: RayAddressOption = None,
    output: ShortOutputOption = ShortOutput.table,
) -> None:
    """Say what the site supports, what is lost where it does not, and what to do about it."""
    if engine not in ENGINES:
        raise UserError(f"there is no engine '{engine}' to check", hint="slurm or ray")
    _only_for("ray", engine, {"--address": address})
    told = {"--partition": partition, "--reservation": reservation, "--account": account, "--qos": qos}
    _only_for("slurm", engine, {**told, "--shared": shared, "--home": home})
    if engine == "slurm":
        from thebes.engine.slurm.check import check as look
        from thebes.engine.slurm.commands import SlurmTerms

        host = (home or "").rpartition(":")[0] if (home or "").rpartition(":")[2].isdigit() else home or ""
        terms = SlurmTerms(partition or "", reservation or "", account or "", qos or "")
        found = look(terms, shared=shared.absolute() if shared else None, home=host)
    else:
        from thebes.engine.ray.check import check as look_at_ray

        found = look_at_ray(address or "")
    if output is ShortOutput.json:
        print_json([asdict(finding) for finding in found])
    else:
        print("\n".join(lines(found)))
    if worst(found) == "problem":
        raise typer.Exit(1)


def _only_for(owner: str, engine: str, options: dict[str, object]) -> None:
    for name, value in options.items():
        if value is not None and engine != owner:
            raise UserError(f"{name} is for `thebes engine check {owner}`", hint="leave it out")


def lines(found: Sequence[SiteFinding]) -> list[str]:
    """A line per finding, and below it what to do."""
    width = max((len(finding.what) for finding in found), default=0)
    told: list[str] = []
    for finding in found:
        level = paint(f"{finding.level:<8}", LEVEL_STYLES[finding.level])
        told.append(f"{level} {finding.what:<{width}}  {clean(finding.detail)}")
        if finding.hint and finding.level != "ok":
            told.append(f"{'':<{11 + width}}→ {clean(finding.hint)}")
    return told
