"""torchrun for preemptible jobs: the same launcher, but it ends with 85 when its workers did ("resume me").

torchrun itself ends with 1 whatever the workers' code was, so a preemption would look like a failure. Run as a script
by the job's own interpreter: it imports nothing of ours.
"""

from __future__ import annotations

import signal
import sys

PREEMPTED = 85


def code_of(codes: set[int]) -> int | None:
    """85 if that is what workers ended with by themselves; those torchrun stopped because of it do not count."""
    return PREEMPTED if PREEMPTED in codes and codes <= {PREEMPTED, -signal.SIGTERM, -signal.SIGKILL} else None


def main() -> None:
    del sys.path[0]  # our folder: its names are not for the job
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # pyright: ignore[reportMissingImports]
    from torch.distributed.run import main as torchrun  # pyright: ignore[reportMissingImports]

    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        code = code_of({failure.exitcode for failure in error.failures.values()})
        if code is None:
            raise
        sys.exit(code)


if __name__ == "__main__":
    main()
