"""The controller process: `python -m thebes.instance.main DIR`; the keeper starts it, and starts it again.

It takes its lock, opens store, engine and controller, and serves the HTTP API until SIGTERM; jobs go on without it.
Exit codes: 0 stopped, 2 something that a person must put right, 3 the port is taken, 4 another controller runs, 5
another controller leads now. In each case one line on stderr says what is the matter; the keeper logs it and `thebes
up` prints it. On a store that several controllers share it stands by until it leads (`leader.py`), and tells that to
its clients.
"""

from __future__ import annotations

import asyncio
import errno
import getpass
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn

from thebes.live import jsonlog
from thebes.live.config import Config, check_listening, load, resolve
from thebes.model.errors import UserError
from thebes.protocol.instance import Instance, LockHeld, write_text

if TYPE_CHECKING:
    from thebes.store import Store

EXIT_STOPPED = 0
EXIT_MISTAKE = 2
EXIT_PORT_TAKEN = 3
EXIT_HELD = 4
EXIT_DEPOSED = 5
FIRST_TENANT = "default"
LAST_ANSWERS_S = 3  # for requests that are under way at a stop

logger = jsonlog.get("server")


class PortTaken(UserError):  # noqa: N818 - reads as what it says
    """Another process listens on the configured port."""


def listen(config: Config, last_url: str | None) -> socket.socket:
    """A listening socket. Without a configured port the last one is tried first, so that clients find us again."""
    address = resolve(config.host)[0]
    if config.port == 0:
        with suppress(UserError, ValueError):
            return _bound(address, urlsplit(last_url or "").port or 0)
    return _bound(address, config.port)


def _bound(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # The protocol must be named: only then asyncio switches Nagle's algorithm off, which delays each answer by 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        # From here on the kernel accepts clients, which wait while we open the store instead of being turned away.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"port {port} on {address} is taken by another program",
                hint="choose another with --port, or leave --port out: any free one is then taken",
            ) from None
        if error.errno == errno.EACCES:
            raise UserError(f"port {port} is reserved for root", hint="choose one from 1024 with --port") from None
        raise UserError(
            f"cannot listen on {address} port {port}: {error.strerror}", hint="choose another --host or --port"
        ) from None
    listener.setblocking(False)
    return listener


def url_of(config: Config, listener: socket.socket) -> str:
    """The address that clients on this machine should use."""
    address, port = str(listener.getsockname()[0]), int(listener.getsockname()[1])
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    host = f"[{local}]" if ":" in local else local
    return f"{'https' if config.tls_cert else 'http'}://{host}:{port}"


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers (the process is ours) and without its ten wake-ups a second."""

    def __init__(
        self, config: uvicorn.Config, tell_started: Callable[[], None], until_stopped: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(config)
        self._tell_started = tell_started
        self._until_stopped = until_stopped

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        await self.on_tick(0)
        self._tell_started()

    async def main_loop(self) -> None:
        await self._until_stopped()


async def serve(instance: Instance, config: Config, listener: socket.socket) -> None:
    """Open in order everything that lives as long as the controller, and close it in reverse."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if config.store:
        from thebes.instance.shift import serve_in_turn

        await serve_in_turn(instance, config, listener, stop)
    else:
        await _serve_alone(instance, config, listener, stop)


async def _serve_alone(instance: Instance, config: Config, listener: socket.socket, stop: asyncio.Event) -> None:
    from thebes.api.app import create_app
    from thebes.live.controller import Controller
    from thebes.live.engines import identify, make_engine
    from thebes.store import Store

    store = Store.open(instance.store)
    try:
        keep_admin_token(instance, store)
        engine = make_engine(config, instance, identify(store))
        controller = Controller(store, engine, config, instance)
        await controller.open()
        try:
            app = create_app(controller, store, config)

            async def until_stopped() -> None:
                ways_to_end = {asyncio.ensure_future(stop.wait()), asyncio.ensure_future(controller.ended())}
                await asyncio.wait(ways_to_end, return_when=asyncio.FIRST_COMPLETED)
                app.state.api.closing.set()  # streams and long polls end, because Uvicorn waits for them

            await answer(instance, config, listener, app, until_stopped)
        finally:
            await controller.close()
    finally:
        store.close()


async def answer(
    instance: Instance,
    config: Config,
    listener: socket.socket,
    app: Any,
    until_stopped: Callable[[], Awaitable[None]],
) -> None:
    """Answer requests until told to stop; requests under way are finished."""
    url = url_of(config, listener)

    def tell_started() -> None:
        more = {"tls_cert": config.tls_cert} if config.tls_cert else {}
        with suppress(UserError):  # on a full disk, the last endpoint most likely names the same port
            instance.write_endpoint(url, **more)
        logger.info("serving", extra={"fields": {"url": url}})

    await _Server(_uvicorn_config(app, config), tell_started, until_stopped).serve([listener])


def _uvicorn_config(app: Any, config: Config) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        lifespan="auto",
        ws="none",
        timeout_graceful_shutdown=LAST_ANSWERS_S,
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
    )


def keep_admin_token(instance: Instance, store: Store) -> None:
    """Make sure that the token in the instance's folder is good: at the first start, or if the store was replaced."""
    from thebes import store as queries

    if instance.token.exists():
        with store.read() as connection:
            if queries.find_token(connection, instance.read_token()) is not None:
                return
    text, _ = store.change_blocking(
        lambda connection: queries.create_token(connection, user_name(), "admin", FIRST_TENANT, None)
    )
    write_text(instance.token, text + "\n", mode=0o600)


def user_name() -> str:
    """The name of the user that runs this process, also where the user database does not know it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid{os.getuid()}"


def _start_log(instance: Instance) -> None:
    logging.raiseExceptions = False
    with suppress(OSError):  # on a full disk, it is better to run without a log than not at all
        jsonlog.start(instance.log / "controller.jsonl")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _allow_many_connections() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def open_door(instance: Instance) -> tuple[Config, socket.socket]:
    """The configuration and the listening socket. What a person may have got wrong about them is told here."""
    config = load(instance.config)
    check_listening(config)
    endpoint = instance.read_endpoint()
    return config, listen(config, endpoint["url"] if endpoint else None)


def run(instance: Instance) -> int:
    """Serve until told to stop; returns the exit code."""
    try:
        with instance.hold_lock("controller"):
            _start_log(instance)
            logger.info("starting", extra={"fields": {"pid": os.getpid()}})
            config, listener = open_door(instance)
            _allow_many_connections()
            asyncio.run(serve(instance, config, listener))
            logger.info("stopped")
            return EXIT_STOPPED
    except UserError as error:
        logger.error(error.message, extra={"fields": {"hint": error.hint}})
        return tell_and_leave(error)
    except Exception:
        logger.exception("crashed")
        raise


def tell_and_leave(error: UserError) -> int:
    """Print the error on stderr, where the keeper finds it; returns the exit code that goes with it."""
    print(f"error: {error.message}" + (f"\n  → {error.hint}" if error.hint else ""), file=sys.stderr)
    codes: dict[type[UserError], int] = {LockHeld: EXIT_HELD, PortTaken: EXIT_PORT_TAKEN}
    return codes.get(type(error), EXIT_MISTAKE)


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m thebes.instance.main DIR", file=sys.stderr)
        return EXIT_MISTAKE
    return run(Instance.at(argv[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
