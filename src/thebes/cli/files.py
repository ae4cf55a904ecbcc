"""Options that several commands share because they read traces or write figures; each option is written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FiguresFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE|-", help="Write the figures as JSON; - for stdout.")
]
EverythingFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE|-", help="Write everything as JSON; - for stdout.")
]
ReportFile = Annotated[Path | None, typer.Option("--report", metavar="FILE.html", help="Write a one-file HTML report.")]
PlotFile = Annotated[str | None, typer.Option(metavar="FILE", help="Draw it: .html, .png or .pdf.")]
FirstJobs = Annotated[int | None, typer.Option(min=1, help="Only the first N jobs.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes at a time; as many as there are cores.")]
NodeSize = Annotated[int, typer.Option(help="GPUs per node.")]
