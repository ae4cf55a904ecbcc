"""The address of a PostgreSQL database, and the driver that reads it; no password is ever shown."""

from __future__ import annotations

from typing import Any

from thebes.model.errors import UserError

# Defaults where the address says nothing: a server that is gone is noticed within about ten seconds.
CONNECT = {
    "connect_timeout": "5",
    "keepalives_idle": "4",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}


def load_driver() -> Any:
    """psycopg, or an error that says which extra installs it."""
    try:
        import psycopg
        from psycopg.types.string import StrDumper, StrDumperUnknown
    except ImportError as error:
        raise UserError(
            f"a store in PostgreSQL needs the driver psycopg, which is not installed ({error})",
            hint="pip install 'thebes[postgres]'",
        ) from None

    # PostgreSQL's texts cannot hold a NUL. It occurs in the last output of broken programs, and means nothing there.
    class WithoutNul(StrDumper):
        def dump(self, obj: str) -> Any:
            return super().dump(obj.replace("\0", "\N{REPLACEMENT CHARACTER}"))

    class UnknownWithoutNul(StrDumperUnknown):
        def dump(self, obj: str) -> Any:
            return super().dump(obj.replace("\0", "\N{REPLACEMENT CHARACTER}"))

    psycopg.adapters.register_dumper(str, UnknownWithoutNul)
    psycopg.adapters.register_dumper(str, WithoutNul)
    return psycopg


class Address:
    """The address of a database, parsed by libpq itself."""

    def __init__(self, url: str) -> None:
        psycopg = load_driver()
        try:
            found: dict[str, Any] = dict(psycopg.conninfo.conninfo_to_dict(url))
        except psycopg.Error:
            raise _misread() from None
        ports = str(found.get("port", "")).replace(",", "")
        strange = any(mark in str(found.get(key, "")) for key in ("host", "dbname", "user") for mark in "@:?")
        if (ports and not ports.isdigit()) or (strange and "[" not in url) or "/" in str(found.get("dbname", "")):
            raise _misread()
        self.parameters = {**CONNECT, **found}
        self._secrets = [str(found[key]) for key in ("password", "sslpassword") if found.get(key)]

    @property
    def database(self) -> str:
        return str(self.parameters.get("dbname") or self.parameters.get("user") or "thebes")

    @property
    def label(self) -> str:
        """The address for people, without the password."""
        told = self.parameters
        user = f"{told['user']}@" if told.get("user") else ""
        hosts, ports = str(told.get("host") or "").split(","), str(told.get("port") or "").split(",")
        if hosts[0].startswith("/"):
            return f"postgresql://{user}/{self.database}?host={hosts[0]}" + (f"&port={ports[0]}" if ports[0] else "")
        ports += ports[-1:] * (len(hosts) - len(ports))
        where = ",".join(host + (f":{port}" if port else "") for host, port in zip(hosts, ports, strict=False))
        service = f"?service={told['service']}" if told.get("service") else ""
        return f"postgresql://{user}{where}/{told.get('dbname') or ''}{service}"

    def scrub(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _misread() -> UserError:
    # What was given is not repeated, because a part of it may be a password in the wrong place.
    return UserError(
        "--store: this is not an address of a PostgreSQL database",
        hint="as in postgresql://USER@HOST:5432/DATABASE; in a password write / as %2F, @ as %40, : as %3A, ? as %3F, "
        "or keep it in ~/.pgpass",
    )


def without_password(url: str) -> str:
    """The address for people, without the password."""
    return Address(url).label
