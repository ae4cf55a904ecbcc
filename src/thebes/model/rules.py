"""The rule book: how a job's record changes when it waits, holds GPUs, runs, gives them up or ends, and its account.

Every world follows these rules: the fast path, the general path and the iteration world of the simulator, and the live
ledger. When a hold is ready, when it runs and how fast are facts: the simulator computes them ahead from its costs and
its speed model, whereas a live cluster hears of them, perhaps late; both tell them by `run` and `measure`. Clocks,
logs, neighbours and costs belong to each world.

A hold goes through three stretches: idle (its GPUs are given, but the last owner of some is still writing its state, or
the job's own state is not yet written), overhead (start or restore), running. Every stretch is charged when it ends, to
the job that caused it, so the account adds up exactly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from thebes.model.cluster import Cluster
from thebes.model.compiled import Record, Records, compiled, inlined, inner
from thebes.model.jobs import FINISHED, HELD, NEVER, WAITING, JobTable, gpus_of, paced_for_s, running_s
from thebes.model.machine import FREE, Machine, nodes_spanned, occupy, release, tier_spanned

# -- from waiting to holding -------------------------------------------------------------------------------------------


@compiled
def submit(job: Record, now_s: float) -> None:
    """Schedule the job from now on."""
    job.phase = WAITING
    job.since_s = now_s
    job.queue_since_s = now_s


@compiled
def seat(table: JobTable, m: Machine, row: int) -> None:
    """Note what the job's slots span."""
    job, gpus = table.jobs[row], gpus_of(table, row)
    job.tier = tier_spanned(m, gpus)
    job.nodes = nodes_spanned(m, gpus)
    job.node_kind = m.nodes[m.gpus[gpus[0]].node].node_kind


@inner
def sit(m: Machine, row: int, gpus: NDArray[np.int64]) -> int:
    """Let the job take GPUs, beside the jobs that sit there; returns how many were free.

    The owner of a shared GPU is the earliest job on it, in whatever order they came, so the machine can be redrawn.
    """
    fresh = 0
    for i in range(gpus.size):
        owner = m.gpus[gpus[i]].owner
        if owner == FREE:
            occupy(m, row, gpus[i : i + 1])
            fresh += 1
        elif row < owner:
            m.gpus[gpus[i]].owner = row
    return fresh


@inner
def rise(m: Machine, gpu: NDArray[np.int64], heir: int) -> int:
    """Let a job leave one GPU to the earliest of the jobs that stay there, or to FREE; returns 1 if it is free now."""
    if heir == FREE:
        release(m, gpu)
        return 1
    m.gpus[gpu[0]].owner = heir
    return 0


@inner
def hold(table: JobTable, m: Machine, row: int, now_s: float) -> None:
    """Let the job hold its slots from now on; the machine knows already. `run` tells when it runs."""
    job = table.jobs[row]
    wait_s = now_s - job.since_s
    job.waited_s += wait_s
    if job.first_start_s < NEVER:
        job.aged_wait_s += wait_s
    else:
        job.first_start_s = now_s
    job.phase = HELD
    job.since_s = now_s
    job.ready_s = NEVER
    job.run_from_s = NEVER
    job.paced_s = NEVER
    job.finish_s = NEVER
    job.booked_s = now_s
    job.kept_left_s = job.left_s
    seat(table, m, row)
    job.holds += 1


@compiled
def run(job: Record, ready_s: float, run_from_s: float) -> None:
    """Note, ahead or late, that this hold's GPUs are clear from `ready_s` on and its work begins at `run_from_s`.

    What was measured in this hold before stays: work is added from the measurement on, not from `run_from_s`.
    """
    measured = job.paced_s < NEVER and job.paced_s != job.run_from_s
    if measured and job.run_from_s == NEVER:  # what was done before the first report
        book_useful(job, max(0.0, job.paced_s - run_from_s))
    job.paced_s = max(job.paced_s, run_from_s) if measured else run_from_s
    job.ready_s = ready_s
    job.run_from_s = run_from_s


@compiled
def measure(job: Record, at_s: float, progress_s: float, speed: float, full_s: float) -> None:
    """Note that by `at_s` the job had done `progress_s` of work and goes on at `speed`; `full_s` is for speed 1.

    A measurement that comes out of turn changes nothing, such as one of an earlier hold, or one that is older than the
    record: adding work from there on would count a wait as work, or the same work twice.
    """
    if at_s < job.since_s or (job.phase == HELD and job.paced_s < NEVER and at_s < job.paced_s):
        return
    book_useful(job, paced_for_s(job, at_s))
    job.progress_s = progress_s
    job.paced_s = at_s
    job.speed = speed
    job.full_s = full_s


# -- the account -------------------------------------------------------------------------------------------------------


@inner
def charge_beginning(table: JobTable, m: Machine, row: int, now_s: float) -> None:
    """Book idle and overhead time of this hold, from where it was booked last up to now, at the present share."""
    job = table.jobs[row]
    idle_until_s = min(now_s, job.ready_s)
    for gpu in gpus_of(table, row):  # the last owner pays until its state is written
        clear_s = max(job.booked_s, m.gpus[gpu].clear_s)
        job.idle_gpu_s += job.share * max(0.0, idle_until_s - clear_s)
    restored_s = min(now_s, job.run_from_s) - max(job.ready_s, job.booked_s)
    job.overhead_gpu_s += job.width * job.share * max(0.0, restored_s)
    job.booked_s = now_s


@inner
def book_useful(job: Record, ran_s: float) -> None:
    """The job ran for so long, on the GPUs and at the share that it has."""
    useful_gpu_s = job.width * ran_s * job.share
    job.useful_gpu_s += useful_gpu_s
    if job.nodes > job.min_nodes:
        job.spread_gpu_s += useful_gpu_s


@inner
def charge_pace(job: Record, now_s: float, checkpoint_every_s: float) -> None:
    """Book what the job did at its present speed, up to now."""
    ran_s = paced_for_s(job, now_s)
    if ran_s <= 0.0:
        return
    if checkpoint_every_s > 0.0:
        begun_s = job.paced_s - job.run_from_s
        saved_s = np.floor((begun_s + ran_s) / checkpoint_every_s) * checkpoint_every_s
        if saved_s >= begun_s and saved_s > 0.0:
            job.kept_left_s = job.left_s - (saved_s - begun_s) * job.speed
    job.left_s -= ran_s * job.speed
    job.progress_s += ran_s * job.speed
    job.talked_s += ran_s * job.talk_share
    book_useful(job, ran_s)
    job.paced_s = now_s


@compiled
def change_share(table: JobTable, m: Machine, row: int, share: float, now_s: float, checkpoint_every_s: float) -> bool:
    """Give the job another share of its GPUs from now on; a hold that goes on is charged at the old one up to now.

    Returns whether there was such a hold, so that its speed has to be worked out again.
    """
    job = table.jobs[row]
    goes_on = job.phase == HELD and job.share != share
    if goes_on:
        charge_pace(job, now_s, checkpoint_every_s)
        charge_beginning(table, m, row, now_s)
    job.share = share
    return goes_on


@inlined
def count_run(job: Record, now_s: float) -> float:
    """Add this hold's running time to the job's age, and return it."""
    ran_s = running_s(job, now_s)
    job.executed_s += ran_s
    job.age_s += ran_s
    return ran_s


@inlined
def close_account(table: JobTable, m: Machine, row: int, now_s: float, checkpoint_every_s: float) -> float:
    """Charge this hold up to now; returns the seconds for which it ran."""
    job = table.jobs[row]
    charge_beginning(table, m, row, now_s)
    charge_pace(job, now_s, checkpoint_every_s)
    return count_run(job, now_s)


@inner
def ticks_until(quantum_s: float, now_s: float) -> float:
    """Whole quanta on the clock so far. It compares just as the next tick is announced; a division alone may differ."""
    count = np.floor(now_s / quantum_s)
    while now_s >= (count + 1.0) * quantum_s:
        count += 1.0
    while now_s < count * quantum_s:
        count -= 1.0
    return count


@inlined
def _unread_after(quantum_s: float, job: Record, ran_s: float, now_s: float) -> float:
    """How much of a stopped job's running time no tick has read: its run since the last tick that found it here."""
    if quantum_s <= 0.0:
        return 0.0
    last_tick_s = ticks_until(quantum_s, now_s) * quantum_s
    if last_tick_s > job.since_s:
        return max(0.0, now_s - max(last_tick_s, job.run_from_s))
    return job.unread_s + ran_s


# -- from holding to waiting, or to the end ----------------------------------------------------------------------------


@inner
def lose(job: Record, ran_s: float, checkpoint_every_s: float) -> None:
    """Take back what a killed job did since its last periodic checkpoint, which has to be done again."""
    kept_s = np.floor(ran_s / checkpoint_every_s) * checkpoint_every_s if checkpoint_every_s > 0.0 else 0.0
    lost_gpu_s = job.width * job.share * (ran_s - kept_s)
    job.useful_gpu_s -= lost_gpu_s
    job.lost_gpu_s += lost_gpu_s
    job.progress_s -= job.kept_left_s - job.left_s
    job.left_s = job.kept_left_s


@inner
def save(job: Record, now_s: float, suspend_s: float) -> None:
    """Note that the job's state is being written out, which takes so long; until then it cannot run elsewhere."""
    job.saved_s = now_s + suspend_s
    job.overhead_gpu_s += job.width * job.share * suspend_s


@inner
def keep_busy(table: JobTable, m: Machine, row: int, until_s: float) -> None:
    """Keep the GPUs of a stopped job busy until its state is written."""
    for gpu in gpus_of(table, row):
        slot = m.gpus[gpu]
        slot.clear_s = max(slot.clear_s, until_s)


@inlined
def vacate(job: Record, now_s: float, ran_s: float, quantum_s: float) -> None:
    """Let the job wait again after the account of this hold is closed. The caller frees the machine's GPUs."""
    job.unread_s = _unread_after(quantum_s, job, ran_s, now_s)
    job.phase = WAITING
    job.since_s = now_s
    job.run_from_s = NEVER
    job.finish_s = NEVER


@compiled
def suspend(job: Record) -> None:
    """Count a preemption of a job that has vacated its GPUs; it asks for its own number of GPUs again."""
    job.preemptions += 1
    job.width = job.gpus


@compiled
def count_move(job: Record, resized: bool, reconfigured: bool) -> None:
    """Count a move of a job that ran: it goes on elsewhere, on another number of GPUs, or under another plan."""
    if resized:
        job.resizes += 1
    elif reconfigured:
        job.reconfigurations += 1
    else:
        job.migrations += 1


@compiled
def service_of(job: Record) -> float:
    """GPU-seconds for which a job ran; policies may learn from this once it has finished."""
    return job.executed_s * job.gpus


@compiled
def finish(job: Record, now_s: float) -> None:
    """End a job that has done all its work and whose account is closed."""
    job.left_s = 0.0
    job.finish_s = now_s
    job.phase = FINISHED


@compiled
def start(table: JobTable, m: Machine, row: int, now_s: float) -> None:
    """Let the job take its slots and hold them from now on."""
    sit(m, row, gpus_of(table, row))
    hold(table, m, row, now_s)


@compiled
def stop(table: JobTable, m: Machine, row: int, now_s: float, quantum_s: float, heirs: NDArray[np.int64]) -> None:
    """Let the job leave its slots and wait again. `heirs`: the job left on each slot; if empty, the machine stays."""
    if heirs.size:
        gpus = gpus_of(table, row)
        for i in range(gpus.size):
            rise(m, gpus[i : i + 1], heirs[i])
    ran_s = close_account(table, m, row, now_s, 0.0)
    vacate(table.jobs[row], now_s, ran_s, quantum_s)


# -- queues ------------------------------------------------------------------------------------------------------------


@compiled
def promote(job: Record, now_s: float) -> None:
    """Put a job back into the first queue: the age that decides priority starts again, the work done stays done."""
    job.age_s = 0.0
    job.unread_s = 0.0
    job.aged_wait_s = 0.0
    job.waited_s += now_s - job.since_s
    job.since_s = now_s
    job.promotions += 1
    job.queue = 0
    job.queue_since_s = now_s


@inner
def set_queue(job: Record, queue: int, now_s: float) -> bool:
    """Remember the queue that the policy put a job in; true if that is a demotion."""
    demoted = queue > job.queue
    if demoted:
        job.demotions += 1
    if queue != job.queue:
        job.queue = queue
        job.queue_since_s = now_s
    return demoted


# -- which GPUs suit, and what can never run ---------------------------------------------------------------------------


def kinds_that_suit(cluster: Cluster, gpu_type: str | None) -> int:
    """Node kinds, as bits, whose GPUs suit a request such as "A100" or "A100|H100".

    A type suits if its words contain those of the request in that order: "A100" is meant by "NVIDIA A100-SXM4-80GB",
    "A10" is not. A node of unknown type suits every job.
    """
    if not gpu_type:
        return (1 << len(cluster.kinds)) - 1
    wanted = [_words_of(name) for name in gpu_type.split("|")]
    return sum(
        1 << k
        for k, kind in enumerate(cluster.kinds)
        if not kind.gpu_type or any(_contains(_words_of(kind.gpu_type), words) for words in wanted)
    )


def _words_of(gpu_type: str) -> list[str]:
    return re.findall(r"[a-z0-9.]+", gpu_type.lower())


def _contains(words: Sequence[str], wanted: Sequence[str]) -> bool:
    rest = iter(words)
    return bool(wanted) and all(word in rest for word in wanted)


def never_runs(
    cluster: Cluster, largest_gang: Sequence[int], gpus: int, nodes: int, kinds: int, gpu_type: str | None = None
) -> str:
    """Why a gang can never run on this cluster, with all its nodes up and idle; empty if it can.

    A gang needs GPUs of one kind. `largest_gang` is, per kind, the most GPUs that the placement ever gives to one gang;
    a job that asks for so many `nodes` (0: it does not) gets them evenly, whatever the placement.
    """
    if not kinds:
        types = sorted({kind.gpu_type for kind in cluster.kinds if kind.gpu_type})
        return f"no node has GPUs of type {gpu_type} (there are: {', '.join(types)})"
    mine = [kind for kind in range(len(cluster.kinds)) if (kinds >> kind) & 1]
    sizes = {kind: cluster.node_gpus[cluster.node_kind == kind] for kind in mine}
    most = max(int(here.sum()) for here in sizes.values())
    if most < gpus:
        return f"it asks for {gpus} GPUs, the cluster has {most} that it could use together"
    if nodes:
        share = gpus // nodes
        if any(here.sum() >= gpus and (here >= share).sum() >= nodes for here in sizes.values()):
            return ""
        return f"there are not {nodes} nodes with {share} GPUs each ({cluster.describe()})"
    seats = max(largest_gang[kind] for kind in mine)
    if seats < gpus:
        return f"it asks for {gpus} GPUs, the placement never gives more than {seats} to one job here"
    return ""


def best_shape(
    cluster: Cluster, gpus: NDArray[np.int64], kinds: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What each job's best placement on an idle cluster spans: the narrowest tier, and the fewest nodes."""
    best_tier = np.full(len(gpus), 3, dtype=np.int64)
    min_nodes = np.full(len(gpus), np.iinfo(np.int64).max, dtype=np.int64)
    for kind, spec in enumerate(cluster.kinds):
        allowed = ((kinds >> kind) & 1).astype(np.bool_)
        here = cluster.node_kind == kind
        rack_gpus = np.bincount(cluster.node_rack[here], weights=cluster.node_gpus[here]).max()
        largest_group = max(spec.groups or (spec.gpus,))
        tier = np.where(gpus <= largest_group, 0, np.where(gpus <= spec.gpus, 1, np.where(gpus <= rack_gpus, 2, 3)))
        best_tier = np.where(allowed, np.minimum(best_tier, tier), best_tier)
        min_nodes = np.where(allowed, np.minimum(min_nodes, -(-gpus // spec.gpus)), min_nodes)
    return best_tier, min_nodes


class GangClasses:
    """Classes of jobs that fit, or do not fit, alike; their numbers follow the order in which they first appeared.

    A class is decided by GPUs, kinds, the nodes asked for and, where the placement looks at it (`by_skew`), the skew.
    """

    def __init__(self, *, by_skew: bool) -> None:
        self.by_skew = by_skew
        self.keys: dict[tuple[int, int, int, float], int] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def copy(self) -> GangClasses:
        other = GangClasses(by_skew=self.by_skew)
        other.keys = dict(self.keys)
        return other

    def number(self, jobs: Records) -> NDArray[np.int64]:
        """The class of each of these records; new classes get the next numbers."""
        skew = np.ascontiguousarray(jobs["skew"]) if self.by_skew else np.zeros(len(jobs))
        keys = np.stack([jobs["gpus"], jobs["kinds"], jobs["want_nodes"], skew.view(np.int64)])
        order = np.lexsort(keys)  # it is stable, so that of equal ones the first comes first
        is_new = np.concatenate(([True], (keys[:, order[1:]] != keys[:, order[:-1]]).any(axis=0)))
        firsts = order[is_new]
        numbers = np.zeros(len(firsts), dtype=np.int64)
        for at in np.argsort(firsts).tolist():
            row = firsts[at]
            gpus, kinds, nodes, _ = keys[:, row].tolist()
            numbers[at] = self.keys.setdefault((gpus, kinds, nodes, float(skew[row])), len(self.keys))
        found = np.empty(len(order), dtype=np.int64)
        found[order] = numbers[np.cumsum(is_new) - 1]
        return found


@compiled
def set_queues(jobs: Records, rows: NDArray[np.int64], queues: NDArray[np.int64], now_s: float) -> None:
    for i in range(rows.size):
        set_queue(jobs[rows[i]], queues[i], now_s)
