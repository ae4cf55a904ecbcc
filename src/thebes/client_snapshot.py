"""A copy of the work directory as one archive; the same files always give the same digest.

The copy leaves out version control, caches, virtual environments, what git ignores if the folder is part of a git
repository, and what a `.thebesignore` in the folder names (one shell pattern per line, matched against the relative
path and the bare name).
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from thebes.model.errors import UserError

MAX_SNAPSHOT_BYTES = 256 << 20
LEFT_OUT = (".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".ruff_cache")
IGNORE_FILE = ".thebesignore"


def pack(folder: str | os.PathLike[str], *, limit_bytes: int = MAX_SNAPSHOT_BYTES) -> tuple[Path, str]:
    """Write the folder into a temporary .tar.gz; returns its path and its SHA-256."""
    base = Path(folder).absolute()
    if not base.is_dir():
        raise UserError(f"cannot take a snapshot of {base}: not a folder")
    handle, name = tempfile.mkstemp(prefix="thebes-", suffix=".tar.gz")
    packed = Path(name)
    try:
        with (
            os.fdopen(handle, "wb") as raw,
            gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=3, mtime=0) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for path in _chosen(base):
                _add(archive, base, path)
                if raw.tell() > limit_bytes:
                    raise UserError(
                        f"{base} is too large for a snapshot: more than {limit_bytes >> 20} MiB packed",
                        hint=f"name what is not needed (data, checkpoints) in {base / IGNORE_FILE}",
                    )
        return packed, _digest(packed)
    except OSError as error:
        packed.unlink(missing_ok=True)
        raise UserError(f"cannot take a snapshot of {base}: {error.strerror}: {error.filename}") from None
    except BaseException:
        packed.unlink(missing_ok=True)
        raise


def _chosen(base: Path) -> Iterator[Path]:
    patterns = _patterns(base)
    by_git = _ignored_by_git(base)
    for folder, names, files in os.walk(base):
        here = Path(folder)
        names[:] = sorted(n for n in names if here / n not in by_git and not _ignored(here / n, base, patterns))
        files[:] = [name for name in files if here / name not in by_git]
        links = [name for name in names if (here / name).is_symlink()]
        yield from (here / name for name in names)
        names[:] = [name for name in names if name not in links]
        yield from (here / name for name in sorted(files) if not _ignored(here / name, base, patterns))


def _ignored_by_git(base: Path) -> set[Path]:
    """Files and whole folders that git ignores; none if there is no repository, or no git."""
    asked = ["git", "-C", str(base), "ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z"]
    try:
        found = subprocess.run(asked, capture_output=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return set()
    return {base / os.fsdecode(name).rstrip("/") for name in found.split(b"\0") if name}


def _patterns(base: Path) -> tuple[str, ...]:
    try:
        lines = (base / IGNORE_FILE).read_text().splitlines()
    except OSError:
        lines = []
    own = (line.strip().rstrip("/") for line in lines)
    return (*LEFT_OUT, *(line for line in own if line and not line.startswith("#")))


def _ignored(path: Path, base: Path, patterns: tuple[str, ...]) -> bool:
    inside = str(path.relative_to(base))
    return any(fnmatch.fnmatch(path.name, pattern) or fnmatch.fnmatch(inside, pattern) for pattern in patterns)


def _add(archive: tarfile.TarFile, base: Path, path: Path) -> None:
    """Add a file, folder or link inside the folder; sockets, pipes and links that lead out are left out."""
    inside = str(path.relative_to(base))
    info = archive.gettarinfo(path, arcname=inside)
    # For a socket it is None, whatever its type says.
    if info is None or not (  # pyright: ignore[reportUnnecessaryComparison]
        info.isreg() or info.isdir() or info.issym() or info.islnk()
    ):
        return
    if info.issym() and not _stays_inside(inside, info.linkname):
        return
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mtime = int(info.mtime)
    if info.isreg():
        with path.open("rb") as stream:
            archive.addfile(info, stream)
    else:
        archive.addfile(info)


def _stays_inside(name: str, link: str) -> bool:
    where = os.path.normpath(os.path.join(os.path.dirname(name), link))  # noqa: PTH118, PTH120 - plain text
    return not link.startswith("/") and where != ".." and not where.startswith("../")


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
