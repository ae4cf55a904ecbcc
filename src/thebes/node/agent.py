"""The agent of one node: it starts supervisors, watches them, and tells its listeners what becomes of them.

It decides nothing and holds nothing that is not in files: killed at any moment, the next agent finds every attempt in
its folder, adopts what lives, and writes the result "lost" for supervisors that vanished, after ending whatever they
left behind. Jobs do not notice.

    python -m thebes.node.agent DIR NODE [--virtual-gpus N]
                                [--homes HOST:PORT,… --lease SECONDS --head-file FILE --alone SECONDS]

On the controller's own machine it listens on a Unix socket. With `--homes` it calls the controller (the key is in
THEBES_HOME_KEY) and keeps a lease: cut off from the controller, and from the head of the cluster, it stops its jobs.
The process that can ask the head writes the boot time of the last good answer into the head file. With `--alone`, an
agent without jobs goes when it has heard nothing from a controller for so long: none may be left to end it.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import re
import resource
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from thebes.model.errors import UserError
from thebes.node import old_attempts, suspend, upkeep
from thebes.node.attempts import Attempts
from thebes.node.ending import AttemptEnding
from thebes.node.gpus import node_gpus
from thebes.node.home import CallHome
from thebes.node.mps_daemon import MpsDaemon
from thebes.node.node_lease import Away, NodeLease
from thebes.node.nursery import Nursery
from thebes.node.reporting import Reporter
from thebes.node.requests import Requests
from thebes.node.starting import Starting
from thebes.node.supervision import Supervision
from thebes.node.supervisor import PR_SET_CHILD_SUBREAPER
from thebes.node.suspending import Suspending
from thebes.protocol import wire
from thebes.protocol.clock import boot_s
from thebes.protocol.contract import Gpu, NodeFacts
from thebes.protocol.instance import EventLog, Instance, LockHeld
from thebes.protocol.tasks import Tasks

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Agent:
    """The parts of an agent, put together; and its life from start to end."""

    def __init__(
        self,
        instance: Instance,
        node: str,
        gpus: Sequence[Gpu],
        virtual: bool,
        log: EventLog,
        away: Away | None = None,
    ) -> None:
        self.instance, self.node, self.virtual, self.log = instance, node, virtual, log
        self.alone_s = away.alone_s if away else None
        self.stop = asyncio.Event()
        self.tasks = Tasks(lambda error: log.write("error", node=node, error=repr(error)))
        self.poke_path = instance.run / f"agent-{node}.poke"
        folder = instance.nodes / node
        self.attempts = Attempts(node, folder)
        self.home: CallHome | None = None
        self.lease: NodeLease | None = None
        if away is not None:
            self.home = CallHome(f"node:{node}", away.homes, away.key, self._talk, heard=self._heard_from_home)
            self.lease = NodeLease(away, self.home, folder)
        facts = NodeFacts(node, tuple(gpus), pid=os.getpid(), mechanisms=suspend.offered(gpus))
        self.reporter = Reporter(self.attempts, facts, log)
        self.nursery = Nursery(instance.run)
        self.supervision = Supervision(self.attempts, self.reporter, self.nursery, self.tasks, log)
        self.ending = AttemptEnding(self.attempts, self.reporter, self.tasks, log)
        self.suspending = Suspending(self.attempts, self.reporter, self.ending, log)
        self.mps_daemon = MpsDaemon(node, instance.run / f"mps-{node}", log, virtual=virtual)
        starting = Starting(self.supervision, self.ending, self.mps_daemon, self.lease, self.poke_path)
        self.requests = Requests(starting, self.suspending, home=self.home, lease=self.lease, go=self._go)

    async def _talk(self, reader: object, writer: object) -> None:
        await self.requests.talk(reader, writer)

    def _heard_from_home(self) -> None:
        if self.lease is not None:
            self.lease.heard()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(64))  # a suspend by the driver may keep one for a minute
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop.set)
        self._open_poke(loop)
        for attempt in self.supervision.adopt_all():
            self.tasks.spawn(self.suspending.undo_cuda(attempt))
        path = self.instance.run / f"agent-{self.node}.sock"
        server = await asyncio.start_unix_server(
            self.requests.serve, sock=wire.listening_socket(path), limit=wire.LINE_LIMIT_BYTES
        )
        self._begin_what_goes_on()
        gpus = self.reporter.facts.gpus
        self.log.write(
            "agent up",
            node=self.node,
            pid=os.getpid(),
            gpus=len(gpus),
            unhealthy=[gpu.index for gpu in gpus if not gpu.healthy],
            virtual=self.virtual,
        )
        await self.stop.wait()
        self.supervision.end_the_unreachable()
        server.close()
        await self.mps_daemon.stop(self.attempts, self.reporter)
        self.log.write("agent down", node=self.node, attempts=len(self.attempts.alive()))
        self.nursery.close()
        path.unlink(missing_ok=True)

    def _begin_what_goes_on(self) -> None:
        if self.home is not None and self.lease is not None:
            self.tasks.spawn(self.home.keep_up())
            self.tasks.spawn(self.lease.keep(self.attempts, self.ending, self.log))
            if self.alone_s is not None:
                self.tasks.spawn(self._go_when_alone(self.lease, self.alone_s))
        self.tasks.spawn(self.reporter.watch_progress())
        self.tasks.spawn(old_attempts.keep_tidy(self._remove_old))
        if not self.virtual:
            self.tasks.spawn(upkeep.watch_health(self.reporter, self.log))

    async def _remove_old(self, before_s: float, limit: int) -> int:
        return await upkeep.remove_old(self.attempts, self.log, before_s, limit)

    # Pokes of supervisors: the names of attempts whose state has changed ---------------------------------------------

    def _open_poke(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(FileExistsError):
            os.mkfifo(self.poke_path, 0o600)
        self.poke_fd = os.open(self.poke_path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        loop.add_reader(self.poke_fd, self._poked)

    def _poked(self) -> None:
        with suppress(BlockingIOError):
            names = set(os.read(self.poke_fd, 65536).decode("utf-8", "replace").split())
            for name in names:
                folder = self.attempts.named(name)
                attempt = folder and self.attempts.find(folder)
                if attempt:
                    self.reporter.refresh(attempt)

    # The end ---------------------------------------------------------------------------------------------------------

    async def _go_when_alone(self, lease: NodeLease, alone_s: float) -> None:
        """What we know is in files: a controller that wants it starts another agent."""
        while not self.stop.is_set():
            await asyncio.sleep(max(0.05, min(alone_s, lease.heard_s + alone_s - boot_s())))
            if boot_s() - lease.heard_s >= alone_s and not self.attempts.alive():
                self.log.write("alone", node=self.node, silent_s=boot_s() - lease.heard_s)
                self._go()

    def _go(self) -> None:
        """For good: the mark tells our keeper not to start another agent."""
        with suppress(OSError):
            (self.instance.run / "gone").touch()
        self.stop.set()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="thebes-agent", description="The agent of one node; started by the keeper.")
    parser.add_argument("dir")
    parser.add_argument("node")
    parser.add_argument("--virtual-gpus", type=int, default=None)
    parser.add_argument("--homes", default="", help="HOST:PORT of controllers, separated by commas")
    parser.add_argument("--lease", type=float, default=60.0, help="seconds")
    parser.add_argument("--head-file", type=Path, default=None)
    parser.add_argument("--alone", type=float, default=None, help="seconds")
    options = parser.parse_args(argv)
    key = bytes.fromhex(os.environ.pop("THEBES_HOME_KEY", ""))
    try:
        if not _NODE.fullmatch(options.node):
            raise UserError(f"'{options.node}' is not the name of a node")
        instance = Instance.at(options.dir)
        for folder in (instance.run, instance.log, instance.nodes):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = instance.hold_lock(f"agent-{options.node}")
        gpus, virtual = node_gpus(instance, options.node, options.virtual_gpus)
    except LockHeld as error:
        print(error, file=sys.stderr)
        return 4  # as the controller: 2 and 3 are mistakes, which end `thebes up`
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    with lock:
        log = EventLog(instance.log / f"agent-{options.node}.jsonl")
        homes = tuple(home for home in options.homes.split(",") if home)
        away = Away(homes, key, options.lease, options.head_file, options.alone) if homes else None
        agent = Agent(instance, options.node, gpus, virtual, log, away)
        _prepare_process()
        asyncio.run(agent.run())
    return 0


def _prepare_process() -> None:
    """Orphans of killed supervisors become our children, so that none escapes; room for a pidfd per job."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
