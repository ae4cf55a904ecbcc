"""Parts of the world that some suites need: Slurm, Ray, PostgreSQL. Absent, a suite skips and says so; CI insists."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest


def require(component: str) -> None:
    """Skip the calling module or test without `component`; fail where THEBES_REQUIRE names it."""
    missing = _missing(component)
    if missing is None:
        return
    if component in os.environ.get("THEBES_REQUIRE", "").split(","):
        pytest.fail(f"{missing}, and THEBES_REQUIRE says that it must be here", pytrace=False)
    pytest.skip(missing, allow_module_level=True)


def _missing(component: str) -> str | None:
    if component == "slurm":
        needed = ("slurmctld", "slurmd", "srun", "salloc", "munged")
        absent = [name for name in needed if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
        if absent:
            return (
                f"Slurm is not installed ({absent[0]} is missing: apt-get install slurmctld slurmd slurm-client munge)"
            )
        if os.geteuid() != 0:
            return "a Slurm of our own with fake GPUs needs root"
        return None
    if component == "postgres":
        if not list(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
            return "PostgreSQL is not installed (apt-get install postgresql)"
        component = "psycopg"
    if importlib.util.find_spec(component) is None:
        return f"the Python package {component} is not installed"
    return None
