"""The job table has one record per job of the workload: first what was asked for, then what happened to it.

Every event touches this state, so it is one flat array that compiled code and NumPy share. Running work is never
counted up second by second: a record holds the instant from which a job has been running, and what it had done before
that; what it has done by now follows. So an event touches only the jobs that it is about.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import Record, Records, inlined, inner

# The phases in the life of a job.
UNSUBMITTED, WAITING, HELD, FINISHED = range(4)

NEVER = np.inf

JOB = np.dtype(
    [
        # What every decision reads of every running job lies together, so that it is fetched together.
        ("phase", np.int64),
        ("gpus", np.int64),
        ("width", np.int64),  # GPUs that it holds; what it asked for while it waits
        ("node_kind", np.int64),
        ("rank", np.int64),  # its place in the simulator's own order (see thebes.sim.lines)
        ("key", np.float64),
        ("event_s", np.float64),  # its next event (see thebes.sim.calendar)
        ("event_at", np.int64),
        # the number of the job, which stays the same for ever, while rows are given up and numbered again
        ("id", np.int64),
        # what was asked for
        ("min_gpus", np.int64),  # an elastic job runs on anything between these two, others on what they asked for
        ("max_gpus", np.int64),
        ("submit_s", np.float64),
        ("work_s", np.float64),  # seconds of running at full speed
        ("kinds", np.int64),  # bit k is set if node kind k will do
        ("skew", np.float64),  # share of the largest tensor in the model
        ("state_gib", np.float64),  # what a checkpoint has to write
        ("memory_gib", np.float64),  # of each of its GPUs
        ("model", np.int64),  # number of its model in this world, because neighbours disturb each other by model
        ("utilisation", np.float64),  # share of a GPU's time that it computes when alone
        ("profile", np.int64),  # first row of its profiles (see thebes.model.profiles)
        ("full_s", np.float64),  # the iteration that counts as speed 1, on the GPUs it asked for
        ("asked_plan", np.int64),  # its own execution plan (thebes.model.plan); NO_PLAN where plans play no part
        ("asked_cpus", np.int64),  # for each of its GPUs
        ("asked_profile", np.int64),  # the first row of profiles of that plan, with these CPUs
        ("guaranteed", np.bool_),  # its tenant's quota guarantees its speed; otherwise it takes what is left
        ("best_tier", np.int64),  # the narrowest network in which it could be placed, on an idle cluster
        ("min_nodes", np.int64),
        ("want_nodes", np.int64),  # spread evenly over exactly so many nodes; 0 leaves it to the placement
        ("priority", np.int64),  # higher goes first, before the policy's own order
        ("tenant", np.int64),  # position in the table's quotas
        ("suspend_s", np.float64),  # the expected cost of a suspension and of a resume, which is measured when live
        ("resume_s", np.float64),
        ("first_slot", np.int64),  # its GPUs are slots[first_slot : first_slot + width] while it holds any
        ("gang_class", np.int64),  # jobs of one class fit, or do not fit, alike
        # where the job is
        ("share", np.float64),  # of each GPU; if it is below 1, other jobs sit there too
        ("plan", np.int64),  # the plan under which it runs, or ran last; before that, the one it asked for
        ("plan_profile", np.int64),  # where the profiles have its plan with its CPUs
        ("cpus", np.int64),  # held with each of its GPUs
        ("host_gib", np.float64),  # host memory, for each GPU
        ("since_s", np.float64),  # when this wait, or this hold, began
        ("saved_s", np.float64),  # a suspended job cannot run again before this instant, when its state is written
        ("ready_s", np.float64),  # when this hold's GPUs are clear and the job's own state is written
        ("run_from_s", np.float64),  # when this hold's work began, after waiting for GPUs and restoring
        ("finish_s", np.float64),  # when it ends if left alone, or when it ended
        ("speed", np.float64),  # work done per running second, since `paced_s`
        ("paced_s", np.float64),  # since when it has this speed: the start of the run, or a neighbour's coming or going
        ("booked_s", np.float64),  # idle and overhead time of this hold are in the account up to this instant
        ("talk_share", np.float64),  # share of each running second in exposed communication, at that speed
        ("touched", np.bool_),  # its speed has to be worked out again before this instant is over
        ("tier", np.int64),
        ("nodes", np.int64),
        # what the job has done: the first four up to `paced_s`, the others up to the beginning of this hold
        ("left_s", np.float64),  # work still to do
        ("kept_left_s", np.float64),  # work still to do if it were killed: the last periodic checkpoint counts
        ("progress_s", np.float64),  # work done, all holds
        ("talked_s", np.float64),  # running time that went into communication, all holds
        ("executed_s", np.float64),  # running time, all holds
        ("age_s", np.float64),  # running time since the last promotion: its attained service per GPU
        ("unread_s", np.float64),  # the part of that age that no tick of the policy's clock has read yet
        ("aged_wait_s", np.float64),  # waiting time since it first ran or was last promoted
        ("waited_s", np.float64),  # all waits
        ("first_start_s", np.float64),
        ("queue", np.int64),
        ("queue_since_s", np.float64),  # when it came into that queue
        # counts of events
        ("holds", np.int64),
        ("preemptions", np.int64),
        ("promotions", np.int64),
        ("demotions", np.int64),
        ("migrations", np.int64),
        ("resizes", np.int64),
        ("reconfigurations", np.int64),  # another plan on as many GPUs
        # the account of the GPU-seconds that it held
        ("useful_gpu_s", np.float64),
        ("overhead_gpu_s", np.float64),
        ("lost_gpu_s", np.float64),
        ("idle_gpu_s", np.float64),
        ("spread_gpu_s", np.float64),  # the useful part on more nodes than it needs
    ]
)


class JobTable(NamedTuple):
    """Records in order of submission, the GPUs that each holds, and the GPUs that each tenant may hold."""

    jobs: Records
    slots: NDArray[np.int64]
    quotas: NDArray[np.int64]


NO_QUOTA = np.int64(2**62)


def without_quotas(tenants: int = 1) -> NDArray[np.int64]:
    """The quotas of a world in which every tenant may have everything."""
    return np.full(tenants, NO_QUOTA, dtype=np.int64)


@inner
def running_s(job: Record, now_s: float) -> float:
    """Seconds for which a job has been running in this hold; restoring and waiting for GPUs do not count."""
    if job.phase == HELD and now_s > job.run_from_s:
        return now_s - job.run_from_s
    return 0.0


@inner
def paced_for_s(job: Record, now_s: float) -> float:
    """Seconds for which a job has been running at its present speed."""
    if job.phase == HELD and now_s > job.paced_s:
        return now_s - job.paced_s
    return 0.0


@inner
def attained_s(job: Record, now_s: float) -> float:
    """Running time since the last promotion: `t` in the Tiresias paper."""
    return job.age_s + running_s(job, now_s)


@inner
def remaining_s(job: Record, now_s: float) -> float:
    """Work still to do, in seconds at full speed. Only oracles may know it."""
    return job.left_s - paced_for_s(job, now_s) * job.speed


@inner
def copy_numbers(source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
    """Write `source` at the beginning of `target`."""
    for i in range(source.size):
        target[i] = source[i]


@inlined
def gpus_of(table: JobTable, row: int) -> NDArray[np.int64]:
    """The slots of one job: the GPUs it holds, sorted."""
    job = table.jobs[row]
    return table.slots[job.first_slot : job.first_slot + job.width]
