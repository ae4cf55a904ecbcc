"""The scripts that run beside every job, and the few modules that they load: small enough for one process per job.

They run with `python -I -S`: without site-packages, without our package, without any module of the standard library
that pulls in others. So a bare module imports only bare modules, from `thebes.node` and `thebes.protocol`, and they lie
compiled in one folder, in sub-folders of these names. Imported from the package they are ordinary modules: agent,
engine and tests use them, too.
"""

from __future__ import annotations

import hashlib
import os
import py_compile
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
SUPERVISOR = "node/supervisor"
STEP = "node/step"
SUPERVISOR_FILES = (
    SUPERVISOR,
    *("node/conduct", "node/log_limit", "node/process_tree", "node/ranks"),
    *("protocol/clock", "protocol/lease", "protocol/plain_json"),
)
STEP_FILES = (
    STEP,
    *SUPERVISOR_FILES,
    *("node/log_steps", "node/ports", "node/slurm_head", "node/step_line"),
    *("protocol/inherited", "protocol/log_file", "protocol/progress", "protocol/refused", "protocol/seal"),
)


def install(files: Sequence[str], folder: Path) -> Path:
    """Compile these files below `folder`, unless this version is there already; where the first of them lies.

    OSError or PyCompileError when that cannot be done.
    """
    sources = [PACKAGE / f"{name}.py" for name in files]
    texts = [source.read_bytes() for source in sources]
    digest = hashlib.sha256(b"\0".join([sys.version.encode(), *texts])).hexdigest()[:12]
    place = folder / f"bin-{digest}"
    script = place / PACKAGE.name / f"{files[0]}.pyc"
    if not script.exists():
        draft = folder / f".bin-{digest}.{os.getpid()}"
        draft.mkdir(mode=0o700, exist_ok=True)
        for name, source in zip(files, sources, strict=True):
            compiled = draft / PACKAGE.name / f"{name}.pyc"
            py_compile.compile(str(source), cfile=str(compiled), doraise=True, optimize=1)
        with suppress(OSError):  # somebody else was faster
            draft.rename(place)
        shutil.rmtree(draft, ignore_errors=True)
    return script


def installed_in(script: Path) -> Path:
    """The folder `bin-HASH` of an installed script."""
    return script.parents[2]
