"""Our own code for the nodes of a Ray cluster: what runs there is what runs here, and nobody has to install it there.

The first half runs here. The second half travels by value, so it imports nothing of ours.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import stat
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path


@cache
def package() -> tuple[str, bytes]:
    """Name (a digest) and ZIP of this package; the reader of GPUs is in it where we have it."""
    root = Path(__file__).parents[2]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sources(root):
            file.write(path, f"thebes/{path.relative_to(root)}")
        for folder in map(Path, sys.path):
            if (folder / "pynvml.py").is_file():  # one file of plain Python
                file.write(folder / "pynvml.py", "pynvml.py")
                break
    return digest(root), buffer.getvalue()


# On the nodes --------------------------------------------------------------------------------------------------------


def sources(root: Path) -> list[Path]:
    found = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return sorted(path for path in found if "__pycache__" not in path.parts)


def digest(root: Path) -> str:
    """A digest that differs between versions of the package."""
    found = hashlib.sha256()
    for path in sources(root):
        data = path.read_bytes()
        found.update(f"{path.relative_to(root)}\0{len(data)}\0".encode() + data)
    return found.hexdigest()[:16]


def installed(name: str) -> Path | None:
    """The folder that holds the very same package on this machine already: what it has compiled is of use then."""
    found = importlib.util.find_spec("thebes")
    if found is None or not found.origin:
        return None
    root = Path(found.origin).parent
    return root.parent if digest(root) == name else None


def node_folder() -> Path:
    """Where Thebes keeps its things on a node: THEBES_RAY_DIR in the raylet's environment, or a folder in /tmp."""
    chosen = os.environ.get("THEBES_RAY_DIR")
    path = Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"thebes-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or (not chosen and found.st_mode & 0o022):
        raise PermissionError(f"{path} on {os.uname().nodename} belongs to somebody else")
    return path


def unpack(name: str, data: bytes) -> Path:
    """The folder to put on the path of Python; made once per version, by the first process that needs it."""
    here = installed(name)
    if here is not None:
        return here
    folder = node_folder() / "code" / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        file.extractall(draft)
    try:
        draft.rename(folder)
    except OSError:  # somebody else was first
        if not folder.is_dir():
            raise
    return folder
