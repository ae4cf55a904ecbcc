"""The standby keeps the code of the controller loaded and forks controllers, so that a new one answers within moments.

It is `python -m thebes.instance.standby DIR`, started by the keeper. Loading everything takes seconds, longer than the
rest of a recovery. This process has done so, has no threads, opens nothing and waits for the controller to end. If it
is killed itself, the controller goes on, and the next standby adopts it.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

from thebes.instance.main import (
    EXIT_DEPOSED,
    EXIT_HELD,
    EXIT_MISTAKE,
    EXIT_PORT_TAKEN,
    EXIT_STOPPED,
    open_door,
    run,
    tell_and_leave,
)
from thebes.model.errors import UserError
from thebes.protocol.instance import Instance, Lock, wait_gone

if TYPE_CHECKING:
    from thebes.placement import Placement
    from thebes.policy import Policy

YOUNG_S = 5.0
PAUSE_S = 0.1
YOUNG_CRASHES = 3  # after so many in a row the keeper, which waits longer and longer, is to start from the beginning
# What a controller imports when it serves. These are names, because a linter would remove imports that nothing uses.
NEEDED = (
    "thebes.api.app",
    "thebes.live.controller",
    "thebes.live.engines",
    "thebes.store",
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
)
ENGINES = {
    "local": "thebes.engine.local",
    "slurm": "thebes.engine.slurm.engine",
    "ray": "thebes.engine.ray.engine",
}
PATIENCE_S = 9.0  # for the controller to stop; the keeper gives us a little more


def load(instance: Instance) -> None:
    """Import what a controller needs, and rehearse a decision, which loads the compiled code."""
    # NumPy would start threads for linear algebra, which is not used here; a process that forks should have none.
    os.environ.update(dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    for name in NEEDED:
        import_module(name)
    from thebes.live import config
    from thebes.store.database import database_at

    with suppress(UserError):  # the controller itself tells what is wrong with the configuration
        found = config.load(instance.config)
        import_module(ENGINES[found.engine])
        if found.store:
            import_module("thebes.instance.shift")
        # An engine of SQLAlchemy loads the dialect and the driver; it connects only at its first use, in the child.
        database_at(found.store or instance.store).reader_engine().dispose()
        rehearse(*config.live_policy(found))
    gc.collect()
    gc.freeze()  # else the collector would touch, and thereby copy, the memory that is shared with the child


def rehearse(policy: Policy, placement: Placement) -> None:
    """Decide about two jobs on two GPUs that do not exist, which compiles or loads all that this needs."""
    from thebes.live.entries import Arrive, Ran
    from thebes.live.ledger import Ledger, NodeSpec

    ledger = Ledger([NodeSpec("n0", 2)], policy, placement)
    with suppress(Exception):  # a policy of the user's own may fail; the controller tells about it when it does
        for time_s, job in ((1.0, "1"), (2.0, "2")):
            ledger.apply(Arrive(time_s, job=job, gpus=2, tenant="t", submit_s=time_s))
            planned, _ = ledger.decide(time_s)
            ledger.apply(planned.entry())
        ledger.apply(Ran(3.0, "1"))
        ledger.decide(4.0)


class Standby:
    """The loop: it forks a controller if there is none, and waits until that ends or a stop is asked for."""

    def __init__(self, instance: Instance, lock: Lock) -> None:
        self.instance = instance
        self.lock = lock
        self.stopping = False
        self.wake, self.wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> int:
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        crashes = 0
        while not self.stopping:
            began_s = time.monotonic()
            pid, own = self._controller()
            if pid is None:
                continue
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:  # an adopted controller that has just gone
                continue
            try:
                self._wait(pidfd)
                if self.stopping:
                    self._stop(pidfd)
            finally:
                os.close(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if own else -signal.SIGKILL
            if self.stopping:
                break
            if code in (EXIT_MISTAKE, EXIT_PORT_TAKEN):
                return code
            young = time.monotonic() - began_s < YOUNG_S
            # It was killed or another one leads, so it is no fault of its own.
            killed = code in (EXIT_STOPPED, EXIT_HELD, EXIT_DEPOSED, -signal.SIGKILL)
            crashes = crashes + 1 if young and not killed else 0
            if crashes >= YOUNG_CRASHES:
                return 1
            if young:
                self._pause()
        return EXIT_STOPPED

    def _on_signal(self, number: int, frame: object) -> None:
        self.stopping = True

    def _controller(self) -> tuple[int | None, bool]:
        """The pid of the controller that lives, or of a new child; and whether it is our child."""
        with suppress(UserError):
            pid = self.instance.holder_pid("controller")
            if pid is not None:
                return pid, False
        pid = os.fork()
        if pid == 0:
            self._be_the_controller()
        return pid, True

    def _be_the_controller(self) -> None:
        """Be the controller, in the child; this never returns."""
        code = 1
        try:
            os.close(self.lock.fd)  # a lock lives as long as any process has it open, so this copy must not stay
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.close(self.wake)
            os.close(self.wake_write)
            os.setsid()
            code = run(self.instance)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with suppress(BaseException):
                sys.stderr.flush()
            os._exit(code)

    def _pause(self) -> None:
        """Pause between two short lives, so that an endless row of them leaves the machine to others."""
        poll = select.poll()
        poll.register(self.wake, select.POLLIN)
        poll.poll(PAUSE_S * 1000)

    def _wait(self, pidfd: int) -> None:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        while not self.stopping:
            ready = {fd for fd, _ in poll.poll()}
            if self.wake in ready:
                with suppress(BlockingIOError):
                    os.read(self.wake, 512)
            if pidfd in ready:
                return

    def _stop(self, pidfd: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            if not wait_gone(pidfd, PATIENCE_S):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                wait_gone(pidfd, 5.0)


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m thebes.instance.standby DIR", file=sys.stderr)
        return EXIT_MISTAKE
    instance = Instance.at(argv[0])
    try:
        with instance.hold_lock("standby") as lock:
            if instance.holder_pid("controller") is None:
                open_door(instance)[1].close()  # an error is then told before everything is loaded
            load(instance)
            return Standby(instance, lock).run()
    except UserError as error:
        return tell_and_leave(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
