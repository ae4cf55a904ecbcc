"""Where the cluster is and who asks: from arguments, environment variables or an instance folder.

In this order: `url`, `dir`, THEBES_URL, THEBES_DIR, ~/.thebes. With an address the token comes from `token`,
THEBES_TOKEN or the file THEBES_TOKEN_FILE; with a folder it lies in that folder unless one is given.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from thebes.model.errors import UserError

DEFAULT_DIR = "~/.thebes"


@dataclass(frozen=True)
class Target:
    """An address, a token, and the instance folder when there is one on this machine."""

    url: str
    token: str
    dir: Path | None = None

    def check_alive(self) -> None:
        """Raise when nobody is there who could start the controller again, so that waiting makes no sense."""
        if self.dir is not None and not (
            _held(self.dir / "run/keeper.lock") or _held(self.dir / "run/controller.lock")
        ):
            raise not_running(self.dir)


def find_target(
    url: str | None = None, token: str | None = None, folder: str | os.PathLike[str] | None = None
) -> Target:
    """The cluster to talk to."""
    if url is None and folder is None:
        url = os.environ.get("THEBES_URL") or None
    if url is not None:
        return Target(_checked_url(url), token or _token_of_environment(url))
    base = Path(folder or os.environ.get("THEBES_DIR") or DEFAULT_DIR).expanduser().absolute()
    found = _endpoint(base)
    given = token or os.environ.get("THEBES_TOKEN")
    return Target(found, given or _read_token(base / "token"), base)


def not_running(base: Path) -> UserError:
    """The one message for "there is nobody to talk to"."""
    option = "" if base == Path(DEFAULT_DIR).expanduser() else f" --dir {base}"
    return UserError(f"no Thebes cluster is running in {base}", hint=f"start one: thebes up{option}")


def _checked_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise UserError(f"'{url}' is not an address of a cluster", hint="as in http://127.0.0.1:7070")
    return url.rstrip("/")


def _token_of_environment(url: str) -> str:
    if token := os.environ.get("THEBES_TOKEN"):
        return token
    if path := os.environ.get("THEBES_TOKEN_FILE"):
        return _read_token(Path(path).expanduser())
    raise UserError(f"no token for {url}", hint="set THEBES_TOKEN or THEBES_TOKEN_FILE")


def _endpoint(base: Path) -> str:
    path = base / "run/endpoint.json"
    try:
        return str(json.loads(path.read_bytes())["url"])
    except (FileNotFoundError, NotADirectoryError):
        raise not_running(base) from None
    except PermissionError:
        raise UserError(f"{base} belongs to somebody else", hint="ask for an address and a token") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{path} is damaged", hint=f"restart the cluster: thebes down && thebes up --dir {base}"
        ) from None


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise UserError(f"cannot read the token in {path}: {error.strerror}", hint="or set THEBES_TOKEN") from None


def _held(lock: Path) -> bool:
    """Whether a living process holds this lock. Asked of /proc/locks: trying the lock could be in its owner's way."""
    try:
        inode = lock.stat().st_ino
        table = Path("/proc/locks").read_text()
    except OSError:
        return False
    return any(line.split()[-3].rsplit(":", 1)[-1] == str(inode) for line in table.splitlines() if "FLOCK" in line)
