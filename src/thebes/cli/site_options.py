"""The options of `up`, `rehearse` and `engine check` that say on which cluster to work, and under which account."""

from __future__ import annotations

from typing import Annotated

import typer

SITE = "On Slurm or Ray"  # the panel of the help page

PartitionOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", rich_help_panel=SITE, help="Slurm: the partition to work in. Default: Slurm's."),
]
ReservationOption = Annotated[
    str | None, typer.Option(metavar="NAME", rich_help_panel=SITE, help="Slurm: the reservation to work in.")
]
AccountOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", rich_help_panel=SITE, help="Slurm: the account of our jobs. Default: yours."),
]
QosOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", rich_help_panel=SITE, help="Slurm: their quality of service. Default: yours."),
]
RayAddressOption = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", rich_help_panel=SITE, help="Ray: the head of the cluster, or auto."),
]
HomeOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST[:PORT]", rich_help_panel=SITE, help="Where nodes reach us. Default: this machine's name."
    ),
]
