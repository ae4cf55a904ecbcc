"""How the client finds its cluster, and what it does while nobody answers."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kit.api_world import World, running_world
from thebes import client as module
from thebes.client import AsyncClient, Client, ServerError
from thebes.client_target import find_target
from thebes.model.errors import UserError
from thebes.protocol.instance import Instance


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("THEBES_DIR", "THEBES_URL", "THEBES_TOKEN", "THEBES_TOKEN_FILE", "THEBES_CA_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(module, "RETRY_FOR_S", 60.0)  # long enough for a slow machine, and to be told from "at once"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An instance that has been up."""
    instance = Instance.at(tmp_path / "here")
    instance.create()
    instance.write_endpoint("http://127.0.0.1:9")
    instance.token.write_text("thb_file\n")
    return instance.dir


class TestWhere:
    def test_folder(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert find_target(folder=folder).url == "http://127.0.0.1:9"
        assert find_target(folder=folder).token == "thb_file"
        monkeypatch.setenv("THEBES_DIR", str(folder))
        assert find_target().dir == folder
        monkeypatch.setenv("THEBES_TOKEN", "thb_mine")
        assert find_target().token == "thb_mine"
        assert find_target(token="thb_given").token == "thb_given"

    def test_address(self, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("THEBES_DIR", str(folder))
        monkeypatch.setenv("THEBES_URL", "https://lab.example:7070/")
        with pytest.raises(UserError, match=r"no token for https://lab.example:7070") as caught:
            find_target()
        assert "THEBES_TOKEN_FILE" in caught.value.hint
        (tmp_path / "token").write_text("thb_from_file\n")
        monkeypatch.setenv("THEBES_TOKEN_FILE", str(tmp_path / "token"))
        assert (find_target().url, find_target().token) == ("https://lab.example:7070", "thb_from_file")
        monkeypatch.setenv("THEBES_TOKEN", "thb_env")
        assert find_target().token == "thb_env"
        assert find_target(folder=folder).url == "http://127.0.0.1:9", "what is given goes before the environment"

    def test_not_an_address(self) -> None:
        with pytest.raises(UserError, match="not an address"):
            find_target("lab:7070", "t")

    def test_token_that_cannot_be_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("THEBES_TOKEN_FILE", "/no/such/file")
        with pytest.raises(UserError, match="cannot read the token in /no/such/file: No such file"):
            find_target("http://x")

    def test_no_instance(self, tmp_path: Path) -> None:
        for base in (tmp_path / "nothing", tmp_path):
            with pytest.raises(UserError, match=f"no Thebes cluster is running in {base}") as caught:
                Client(dir=base).status()
            assert caught.value.hint == f"start one: thebes up --dir {base}"
        with pytest.raises(UserError) as caught:
            Client().status()
        assert caught.value.hint == "start one: thebes up"

    def test_instance_that_is_down(self, folder: Path) -> None:
        began_s = time.monotonic()
        with pytest.raises(UserError, match="no Thebes cluster is running"):
            Client(dir=folder).status()
        with pytest.raises(UserError, match="no Thebes cluster is running"):
            asyncio.run(AsyncClient(dir=folder).status())
        assert time.monotonic() - began_s < 45.0, "nobody waits for a cluster that is down"

    def test_certificate(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert find_target(folder=folder).tls() is False
        monkeypatch.setenv("THEBES_CA_FILE", "/no/such/certificate")
        with pytest.raises(UserError, match="cannot use the certificate"):
            find_target("https://x", "t").tls()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
class TestTls:
    @pytest.fixture
    def certificate(self, tmp_path: Path) -> Path:
        made = tmp_path / "cert.pem"
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
        subprocess.run([*command, "-keyout", made.with_suffix(".key"), "-out", made], check=True, capture_output=True)
        return made

    @pytest.fixture
    def port(self, certificate: Path) -> Iterator[int]:
        """A server that answers every question with {}."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, certificate.with_suffix(".key"))
        answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"

        def serve() -> None:
            with suppress(OSError):
                while True:
                    taken, _ = listener.accept()
                    with suppress(OSError), taken, context.wrap_socket(taken, server_side=True) as secured:
                        secured.recv(1 << 16)
                        secured.sendall(answer)

        with socket.create_server(("127.0.0.1", 0)) as listener:
            threading.Thread(target=serve, daemon=True).start()
            yield listener.getsockname()[1]
            listener.shutdown(socket.SHUT_RDWR)

    def test_who_is_not_known_is_refused_at_once(self, port: int) -> None:
        began_s = time.monotonic()
        with pytest.raises(ServerError, match="nobody known has signed") as caught:
            Client(f"https://localhost:{port}", "t").status()
        assert "THEBES_CA_FILE" in caught.value.hint
        assert time.monotonic() - began_s < 45.0

    def test_certificate_of_the_environment(
        self, port: int, certificate: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("THEBES_CA_FILE", str(certificate))
        assert Client(f"https://localhost:{port}", "t").status() == {}
        with pytest.raises(ServerError, match="nobody known has signed"):
            Client(f"https://127.0.0.1:{port}", "t").status()  # the certificate is for another name

    def test_certificate_of_the_folder(self, port: int, certificate: Path, folder: Path) -> None:
        Instance(folder).write_endpoint(f"https://127.0.0.1:{port}", tls_cert=str(certificate))
        assert Client(dir=folder).status() == {}
        assert asyncio.run(AsyncClient(dir=folder).status()) == {}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with running_world(tmp_path_factory.mktemp("w") / "i") as world:
        yield world


def _whole(stream: socket.socket) -> bytes:
    """One HTTP message: its head, and as much body as the head says."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = stream.recv(1 << 16)
        if not piece:
            return b""
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    sizes = [line.partition(b":")[2] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    while sizes and len(body) < int(sizes[0]):
        body += stream.recv(1 << 16)
    return head + b"\r\n\r\n" + body


class Relay:
    """Stands between client and server, and lets a test break the connection at a point of its choosing."""

    def __init__(self, world: World) -> None:
        self.to = ("127.0.0.1", int(world.url.rpartition(":")[2]))
        self.break_next: list[str] = []  # "before": the request is lost; "after": the answer is lost
        self.requests = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                taken, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(taken,), daemon=True).start()

    def _serve(self, taken: socket.socket) -> None:
        with taken, socket.create_connection(self.to) as onward:
            while request := _whole(taken):
                self.requests += 1
                fault = self.break_next.pop(0) if self.break_next else ""
                if fault == "before":
                    return
                onward.sendall(request)
                answer = _whole(onward)
                if fault == "after":
                    return
                taken.sendall(answer)

    def close(self) -> None:
        self.listener.close()


@pytest.fixture
def relay(started: World) -> Iterator[Relay]:
    relay = Relay(started)
    yield relay
    relay.close()


class TestBrokenConnections:
    def jobs_of(self, world: World, name: str) -> list[str]:
        return [job["id"] for job in world.client("ann").jobs(name=name)]

    @pytest.mark.parametrize("faults", [["before"], ["after"], ["after", "before", "after"]])
    def test_a_submit_is_repeated_and_done_once(self, started: World, relay: Relay, faults: list[str]) -> None:
        name = "-".join(["sync", *faults])
        relay.break_next = list(faults)
        job = Client(relay.url, started.tokens["ann"]).submit("true", name=name)
        assert self.jobs_of(started, name) == [job.id]
        assert relay.requests == len(faults) + 1

    def test_async_too(self, started: World, relay: Relay) -> None:
        relay.break_next = ["after", "after"]
        job = asyncio.run(AsyncClient(relay.url, started.tokens["ann"]).submit("true", name="async"))
        assert self.jobs_of(started, "async") == [job.id]

    @pytest.mark.parametrize(
        "call", [lambda c, j: c.requeue(j), lambda c, j: c.preempt(j), lambda c, j: c.create_token("x")]
    )
    def test_what_must_not_be_done_twice_is_not_repeated(
        self, started: World, relay: Relay, call: Callable[[Client, str], object]
    ) -> None:
        job = started.client("ann").submit("true", gpus=1)
        relay.break_next = ["after"]
        with pytest.raises(ServerError, match="broke before the answer came") as caught:
            call(Client(relay.url, started.tokens["admin"]), job.id)
        assert "look before you repeat it" in caught.value.hint
        assert relay.requests == 1
        started.clear()


class TestRestarts:
    def test_calls_wait_for_a_controller_that_comes_back(self, tmp_path: Path) -> None:
        """The server goes and comes back on another port, as after kill -9; the keeper's lock says that it will."""
        with running_world(tmp_path / "i") as first:
            client = Client(dir=tmp_path / "i")
            job = client.submit("true", gpus=8, name="survivor")
            held = client.submit("true", gpus=8)
            assert client.hold(held.id) == [held.id]
        with Instance.at(tmp_path / "i").hold_lock("keeper"):
            found: list[str] = []
            asking = threading.Thread(target=lambda: found.append(client.job(held.id)["state"]))
            asking.start()
            with running_world(tmp_path / "i") as second:
                asking.join(60)
                assert found == ["held"]
                assert second.url != first.url
                assert client.job(job.id)["name"] == "survivor"

    def test_patience_has_an_end(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "RETRY_FOR_S", 0.5)
        with Instance(folder).hold_lock("keeper"):
            began_s = time.monotonic()
            with pytest.raises(ServerError, match=r"no answer from http://127\.0\.0\.1:9") as caught:
                Client(dir=folder).status()
            assert 0.2 < time.monotonic() - began_s < 45.0
        assert "thebes status" in caught.value.hint

    def test_a_server_that_talks_nonsense(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def answer() -> None:
                for body in (b"HTTP/1.1 502 Bad\r\ncontent-length: 5\r\n\r\nhello",):
                    taken, _ = listener.accept()
                    with taken:
                        taken.recv(1 << 16)
                        taken.sendall(body)

            threading.Thread(target=answer, daemon=True).start()
            with pytest.raises(ServerError, match="answered 502 without saying why"):
                Client(f"http://127.0.0.1:{listener.getsockname()[1]}", "t").status()

    def test_slowed_down_by_the_server(self) -> None:
        """429 with Retry-After is waited for."""
        slow = b"HTTP/1.1 429 Slow\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}"
        body = json.dumps({"policy": "x"}).encode()
        good = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def answer() -> None:
                taken, _ = listener.accept()
                with taken:
                    for one in (slow, good):
                        taken.recv(1 << 16)
                        taken.sendall(one)

            threading.Thread(target=answer, daemon=True).start()
            began_s = time.monotonic()
            assert Client(f"http://127.0.0.1:{listener.getsockname()[1]}", "t").status() == {"policy": "x"}
            assert time.monotonic() - began_s > 0.9
