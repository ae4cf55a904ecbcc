"""LWF-kappa, least workload first, on GPUs that may hold several jobs; and the rules with which it is compared.

Wang et al., "Communication contention aware scheduling of multiple deep learning training jobs" (arXiv 2002.10105):
a gang of up to kappa workers takes the GPUs with the least work left, wherever they are; a larger one walks the nodes
from the least mean work on and takes what has room there, so that it is consolidated. Work left counts communication
as well, for jobs that span nodes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import inlined, inner
from thebes.model.machine import Machine
from thebes.placement.strategies import mix, sort_gpus

# The ways in which the GPUs of a gang are chosen.
LEAST_WORKLOAD, FIRST_FIT, SCATTERED = range(3)
CHOICES = {"lwf": LEAST_WORKLOAD, "first-fit": FIRST_FIT, "random": SCATTERED}


@inlined
def choose(
    m: Machine,
    choice: int,
    kappa: int,
    seed: int,
    job: int,
    workers: int,
    load_s: NDArray[np.float64],
    room: NDArray[np.bool_],
    out: NDArray[np.int64],
) -> bool:
    """Write GPUs for `workers` workers, out of those with `room`, sorted, to `out`; False if there are too few."""
    roomy = 0
    for gpu in range(room.size):
        roomy += room[gpu]
    if roomy < workers:
        return False
    if choice == LEAST_WORKLOAD:
        lwf(m, kappa, workers, load_s, room, out)
    elif choice == FIRST_FIT:
        first_fit(workers, room, out)
    else:
        scattered(seed, job, workers, room, out)
    sort_gpus(out[:workers])
    return True


@inlined
def lwf(
    m: Machine,
    kappa: int,
    workers: int,
    load_s: NDArray[np.float64],
    room: NDArray[np.bool_],
    out: NDArray[np.int64],
) -> None:
    """Choose by LWF-kappa, where `room` has enough GPUs. Ties go to the lower number."""
    if workers <= kappa:
        _least_loaded(load_s, room, 0, room.size, workers, out, 0)
        return
    mean_s = np.empty(m.nodes.size)
    for node in range(m.nodes.size):
        first, last = m.nodes[node].first, m.nodes[node].first + m.nodes[node].gpus
        roomy = 0
        for gpu in range(first, last):
            roomy += room[gpu]
        mean_s[node] = load_s[first:last].sum() / (last - first) if roomy > 0 else np.inf
    at = 0
    while at < workers:
        node = np.argmin(mean_s)
        mean_s[node] = np.inf
        first, last = m.nodes[node].first, m.nodes[node].first + m.nodes[node].gpus
        at = _least_loaded(load_s, room, first, last, workers, out, at)


@inner
def _least_loaded(
    load_s: NDArray[np.float64],
    room: NDArray[np.bool_],
    first: int,
    last: int,
    workers: int,
    out: NDArray[np.int64],
    at: int,
) -> int:
    """Take GPUs from first to last, least work first, until there are enough; returns how many there are."""
    began = at
    while at < workers:
        best = -1
        for gpu in range(first, last):
            if room[gpu] and (best < 0 or load_s[gpu] < load_s[best]):
                taken = False
                for i in range(began, at):
                    taken = taken or out[i] == gpu
                if not taken:
                    best = gpu
        if best < 0:
            return at
        out[at] = best
        at += 1
    return at


@inlined
def first_fit(workers: int, room: NDArray[np.bool_], out: NDArray[np.int64]) -> None:
    """Take the lowest-numbered GPUs with room, so that each is filled up before the next is used."""
    at = 0
    for gpu in range(room.size):
        if room[gpu] and at < workers:
            out[at] = gpu
            at += 1


@inlined
def scattered(seed: int, job: int, workers: int, room: NDArray[np.bool_], out: NDArray[np.int64]) -> None:
    """Take any GPUs with room, each set with equal chance, by seed and job."""
    open_gpus = np.flatnonzero(room)
    state = mix(np.uint64(seed) ^ mix(np.uint64(job)))
    for at in range(workers):
        state = mix(state)
        other = at + np.int64(state % np.uint64(open_gpus.size - at))
        open_gpus[at], open_gpus[other] = open_gpus[other], open_gpus[at]
        out[at] = open_gpus[at]
