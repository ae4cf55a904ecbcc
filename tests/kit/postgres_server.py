"""A real PostgreSQL for tests: started from what Debian installs, in a folder of its own, and gone with the tests."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kit.components import require
from thebes.engine.door import free_port

USER = "postgres"


def binaries() -> Path | None:
    """The folder with initdb and postgres: the newest version that is installed."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if not found and (initdb := shutil.which("initdb")):
        found = [Path(initdb).resolve().parent]
    return max(found, key=lambda path: [int(n) for n in re.findall(r"\d+", str(path))], default=None)


class PostgresServer:
    """One server; databases by name. It refuses to run as root, so root hands it to another user."""

    def __init__(self) -> None:
        bin_dir = binaries()
        assert bin_dir is not None, "require('postgres') was not called"
        self.bin = bin_dir
        self.folder = Path(tempfile.mkdtemp(prefix="thebes-pg-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.number = 0
        self.identity: dict[str, Any] = {}
        if os.geteuid() == 0:
            name = "postgres" if _has_user("postgres") else "nobody"
            self.identity = {"user": name, "group": None, "extra_groups": []}
            shutil.chown(self.folder, name)
            import pwd

            self.identity["group"] = pwd.getpwnam(name).pw_gid
        self.data = self.folder / "data"
        subprocess.run(
            [self.bin / "initdb", "-D", self.data, "-U", USER, "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C"],
            check=True,
            capture_output=True,
            cwd=self.folder,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C", "TZ": "UTC"},
            **self.identity,
        )
        (self.data / "pg_hba.conf").write_text(
            "local all all trust\nhost all guarded 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n"
        )

    def start(self) -> None:
        log = (self.folder / "log").open("ab")
        self.process = subprocess.Popen(
            [
                self.bin / "postgres",
                *("-D", self.data, "-k", self.folder, "-p", str(self.port), "-h", "127.0.0.1"),
                *("-c", "fsync=off", "-c", "full_page_writes=off", "-c", "max_connections=200"),
                *("-c", "shared_buffers=32MB", "-c", "max_wal_size=256MB", "-c", "autovacuum=off"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=self.folder,
            start_new_session=True,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C", "TZ": "UTC"},
            **self.identity,
        )
        log.close()
        self.wait_ready()

    def wait_ready(self, within_s: float = 120.0) -> None:
        import psycopg

        until = time.monotonic() + within_s
        while True:
            try:
                psycopg.connect(self.url("postgres"), connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                assert self.process is not None
                assert self.process.poll() is None, (self.folder / "log").read_text()[-3000:]
                assert time.monotonic() < until, (self.folder / "log").read_text()[-3000:]
                time.sleep(0.02)

    def url(self, database: str, user: str = USER, password: str = "", **parameters: str) -> str:
        secret = f":{password}" if password else ""
        more = "?" + "&".join(f"{key}={value}" for key, value in parameters.items()) if parameters else ""
        return f"postgresql://{user}{secret}@127.0.0.1:{self.port}/{database}{more}"

    def sql(self, text: str, database: str = "postgres") -> list[Any]:
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(text)
            return cursor.fetchall() if cursor.description else []

    def new_database(self, template: str = "template0") -> str:
        """The name of a fresh one, sorted by words and not by bytes where the server can do so."""
        self.number += 1
        name = f"t{os.getpid()}_{self.number}"
        how = "ENCODING 'UTF8' LOCALE 'C.UTF-8' LOCALE_PROVIDER icu ICU_LOCALE 'en-US'"
        self.sql(f"CREATE DATABASE {name} TEMPLATE {template} {how if template == 'template0' else ''}")
        return name

    def crash(self) -> None:
        """kill -9 of the whole server."""
        assert self.process is not None
        for _ in range(2):  # the second time for one that was being forked
            for pid in self._processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _processes(self) -> list[int]:
        """The postmaster and its children: the data folder is where they all are."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cwd"):
            with suppress(OSError):
                if path.readlink() == self.data:
                    found.append(int(path.parent.name))
        return sorted(found)

    def stop(self, number: int = signal.SIGINT) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(timeout=120)

    def close(self) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)


def _has_user(name: str) -> bool:
    import pwd

    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


@contextmanager
def running_server() -> Iterator[PostgresServer]:
    """A server that is up, and gone at the end. Skips where there is no PostgreSQL; CI insists on it."""
    require("postgres")
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.close()
