"""The address of the cluster and the token of the asker: from arguments, environment variables or an instance folder.

They are looked for in this order: `url`, `dir`, THEBES_URL, THEBES_DIR, ~/.thebes. With an address the token comes from
`token`, THEBES_TOKEN or the file THEBES_TOKEN_FILE; with a folder it lies in that folder, unless one is given. A server
with a certificate of its own is trusted if THEBES_CA_FILE names it, or the folder does. Where several controllers share
a cluster, there may be several addresses with commas between them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from thebes.model.errors import UserError
from thebes.protocol.instance import Instance

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True)
class Target:
    """An address, a token, and the instance folder when there is one on this machine."""

    url: str
    token: str
    dir: Path | None = None
    certificate: str | None = None  # the server's own, or that of its signer
    followed: bool = False  # a standby has sent us there

    def tls(self) -> ssl.SSLContext | bool:
        """How to check the server. Loading certificates takes a while, so plain HTTP does without."""
        if not self.url.startswith("https:"):
            return False
        import ssl

        try:
            context = ssl.create_default_context(cafile=self.certificate)
        except OSError as error:
            raise UserError(f"cannot use the certificate {self.certificate}: {error.strerror or error}") from None
        # An instance's own folder holds the server's own certificate, which we trust instead of the name in it.
        context.check_hostname = self.dir is None
        return context

    def at(self, url: str) -> Target:
        """The same cluster at another address, as a standby has named it."""
        if self.url.startswith("https:") and not url.startswith("https:"):
            raise UserError(
                f"{self.url} sends us on to {url}, where the token would travel in the clear",
                hint="give all controllers a certificate (`thebes up --tls-cert`)",
            )
        if url == self.url:
            return self
        return replace(self, url=_checked_url(url), followed=True)

    def may_come_back(self) -> bool:
        """Whether a keeper lives that could start the controller again; for another machine that is unknown."""
        if self.dir is None or self.followed:
            return True
        found = Instance(self.dir)
        return any(found.holder_pid(part) is not None for part in ("keeper", "standby", "controller"))


def find_target(
    url: str | None = None, token: str | None = None, folder: str | os.PathLike[str] | None = None, *, turn: int = 0
) -> Target:
    """The cluster to talk to; of several addresses, the one whose turn it is."""
    if url is None and folder is None:
        url = os.environ.get("THEBES_URL") or None
    if url is not None:
        certificate = os.environ.get("THEBES_CA_FILE") or None
        urls = [_checked_url(one.strip()) for one in url.split(",") if one.strip()] or [_checked_url(url)]
        return Target(urls[turn % len(urls)], token or _token_of_environment(url), certificate=certificate)
    found = Instance.at(os.fspath(folder) if folder is not None else None)
    endpoint = found.read_endpoint()
    if endpoint is None:
        raise _not_running_in(found.dir)
    given = token or os.environ.get("THEBES_TOKEN")
    return Target(endpoint["url"], given or found.read_token(), found.dir, endpoint.get("tls_cert"))


def not_running(target: Target) -> UserError:
    """The one message for a cluster that does not answer."""
    assert target.dir is not None
    return _not_running_in(target.dir)


def _not_running_in(base: Path) -> UserError:
    option = "" if base == Instance.at("~/.thebes").dir else f" --dir {base}"
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


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise UserError(f"cannot read the token in {path}: {error.strerror}", hint="or set THEBES_TOKEN") from None
