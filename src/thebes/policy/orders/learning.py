"""When a distribution learned from finished jobs is made again: after the first 32, then with every tenth more.

A fixed schedule instead of "now and then" keeps policies pure: how many finished jobs a decision knows depends on their
number alone. It also makes learning cheap, since the order of all waiting jobs is rebuilt only so often.
"""

from __future__ import annotations

FIRST_REFRESH = 32


def next_refresh(known: int) -> int:
    """How many jobs must have finished before the distribution, now made of `known`, is made again."""
    if known < FIRST_REFRESH:
        return FIRST_REFRESH
    return known + max(8, known // 10)


def known_count(finished: int) -> int:
    """How many of `finished` jobs the distribution is made of."""
    known = 0
    while next_refresh(known) <= finished:
        known = next_refresh(known)
    return known
