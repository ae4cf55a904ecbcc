"""Packing (Gandiva, OSDI'18): when GPUs are short, a waiting job may be the guest of one that runs on a single GPU.

The pairs are chosen here, on top of any policy's Decision; whether a pair stays is judged later, by the step rates of
both (`thebes.live.packing`). Only jobs that allow it, that need one GPU and whose rate alone is known are paired, so
that there is something to judge by. For the policy a guest holds no GPU: it still waits for its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def pair_up(
    waiting: Sequence[str], hosts: Sequence[str], in_vain: Collection[frozenset[str]]
) -> tuple[tuple[str, str], ...]:
    """(guest, host) for each waiting job, in order, that finds a host with which it was not tried in vain before."""
    free = list(hosts)
    pairs: list[tuple[str, str]] = []
    for guest in waiting:
        host = next((host for host in free if frozenset((guest, host)) not in in_vain), None)
        if host is not None:
            free.remove(host)
            pairs.append((guest, host))
    return tuple(pairs)
