"""What the controller tells about jobs, nodes and itself, and the gauges that are computed when somebody looks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thebes.live.controller import Controller


def live(controller: Controller, job_id: str) -> dict[str, Any] | None:
    """What is known of a job beyond the store: why it waits, how far it is, where it runs."""
    job = controller.core.jobs.get(job_id)
    if job is None:
        return None
    return {
        "reason": controller.core.reason(job),
        "run_s": controller.core.ran_s(job, controller.clock.now_s()),
        "expected_start_s": job.expected_start_s if job.first_start_s is None else None,
        "step": job.step,
        "steps_per_s": job.steps_per_s,
        "gpus_held": {part.node: list(part.gpus) for part in job.active.parts} if job.active else {},
    }


def nodes(controller: Controller) -> list[dict[str, Any]]:
    core, found = controller.core, []
    for spec in core.ledger.nodes:
        facts = core.nodes.get(spec.name)
        gpus: list[dict[str, Any]] = []
        for index in range(spec.gpus):
            holders = sorted(core.on_gpu.get(core.ledger.gpu_number(spec.name, index), ()))
            gpu = facts.gpus[index] if facts is not None and index < len(facts.gpus) else None
            gpus.append(
                {
                    "index": index,
                    "uuid": gpu.uuid if gpu else "",
                    "name": gpu.name if gpu else "",
                    "memory_gib": gpu.memory_gib if gpu else 0.0,
                    "virtual": gpu.virtual if gpu else False,
                    "healthy": gpu.healthy if gpu else False,
                    "taken": gpu.taken if gpu else "",
                    "job": holders[0][0] if holders else None,
                    "user": core.jobs[holders[0][0]].user if holders and holders[0][0] in core.jobs else None,
                }
            )
        found.append(
            {
                "name": spec.name,
                "alive": facts is not None and facts.alive,
                "rack": spec.rack,
                "drained": spec.name in core.drained or bool(facts is not None and facts.drained),
                "reason": core.drained.get(spec.name, "")
                or (facts.detail or facts.drained if facts is not None else ""),
                "pid": facts.pid if facts is not None else None,
                "mechanisms": list(facts.mechanisms) if facts is not None else [],
                "gpus_total": spec.gpus,
                "gpus_busy": sum(gpu["job"] is not None for gpu in gpus),
                "gpus": gpus,
            }
        )
    return found


def status(controller: Controller) -> dict[str, Any]:
    core = controller.core
    states: dict[str, int] = {}
    for job in core.jobs.values():
        states[job.state] = states.get(job.state, 0) + 1
    return {
        "policy": controller.policy.label,
        "placement": controller.placement.name,
        "gpus": {"total": core.ledger.cluster.total_gpus, "busy": len(core.on_gpu)},
        "jobs": states,
        "time_s": controller.clock.now_s(),
        "trouble": controller.trouble or controller.store.trouble,
        "closing": core.closing,
    }


def refresh_metrics(controller: Controller) -> None:
    """Set the gauges that are computed when somebody looks."""
    core = controller.core
    jobs: dict[tuple[str, str], int] = {}
    for job in core.jobs.values():
        jobs[job.state, job.tenant] = jobs.get((job.state, job.tenant), 0) + 1
    controller.metrics.set_jobs(jobs)
    gpus: dict[tuple[str, str], int] = {}
    largest_free = 0
    for node in nodes(controller):
        name, busy, total = node["name"], node["gpus_busy"], node["gpus_total"]
        usable = node["alive"] and not node["drained"]
        rest = "free" if usable else "drained" if node["drained"] else "down"
        gpus[name, "busy"], gpus[name, rest] = busy, total - busy
        largest_free = max(largest_free, total - busy if usable else 0)
    controller.metrics.set_gpus(gpus)
    free = sum(count for (_, state), count in gpus.items() if state == "free")
    controller.metrics.fragmentation(1.0 - largest_free / free if free else 0.0)
    controller.metrics.store_trouble(controller.store.trouble is not None)
