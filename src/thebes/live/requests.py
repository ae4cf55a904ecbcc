"""What users ask of the controller: submit, act on a job, drain a node, plan, shut down. Rights are checked here.

A request is given to the loop as a message, and answered when its result is committed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy import Connection

from thebes import store as db
from thebes.jobspec.spec import JobSpec
from thebes.live import arrivals, endings, orders, outages, recovery
from thebes.live.errors import Conflict, Forbidden, Invalid, NotFound
from thebes.live.forecast import forecast
from thebes.live.stored import check_dependencies, last_checkpoints, named, unfinished_dependencies
from thebes.model.errors import UserError
from thebes.protocol.contract import Refused
from thebes.protocol.launch import torchrun_command

if TYPE_CHECKING:
    from thebes.live.controller import Controller
    from thebes.store.principal import Principal


async def submit(
    controller: Controller, spec: JobSpec, principal: Principal, *, client_key: str | None = None
) -> list[str]:
    """Accept a job: when this returns, it is in the store. Returns the ids of the job, or of an array's members."""
    tenant = _check(controller, spec, principal)
    spec_json = spec.model_dump_json(exclude_defaults=True)
    now_s = controller.clock.now_s()
    members: list[int | None] = [None] if spec.array is None else list(dict.fromkeys(spec.array))

    def create(c: Connection) -> tuple[list[db.JobRow], bool, set[str], tuple[str, str] | None]:
        again = client_key is not None and db.key_is_used(c, principal.user, client_key)
        waits_for, failed = (set[str](), None) if again else check_dependencies(c, spec, principal)
        rows = db.create_jobs(
            c,
            spec_json,
            members=members,
            user=principal.user,
            tenant=tenant,
            name=spec.name,
            gpus=spec.gpus,
            nodes=spec.nodes,
            priority=spec.priority,
            submit_s=now_s,
            client_key=client_key,
            held=spec.hold,
            after=[*spec.after, *spec.after_any],
        )
        return rows, again, waits_for, failed

    def accepted(created: asyncio.Future[Any]) -> None:
        if created.cancelled() or created.exception() is not None:
            return
        rows, again, waits_for, failed = created.result()
        if not again:  # otherwise it has arrived already, and may have ended
            waits = {row.id: waits_for for row in rows}
            controller.tell(
                lambda now_s: _arrive(controller, rows, waits, {row.id: failed for row in rows if failed}, now_s)
            )
            controller.metrics.submitted(tenant, len(rows))

    created = controller.store.change(create, must=False)
    created.add_done_callback(accepted)
    rows, *_ = await asyncio.shield(created)  # what is committed arrives, even if the caller has given up waiting
    return [row.id for row in rows]


def _arrive(
    controller: Controller,
    rows: list[db.JobRow],
    waits_for: Mapping[str, Collection[str]],
    failed: Mapping[str, tuple[str, str]],
    now_s: float,
) -> None:
    if any(other not in controller.core.jobs for others in waits_for.values() for other in others):
        controller.background(_arrive_later(controller, rows))  # some ended between the commit and now: look again
        return
    for row in rows:
        if row.id in failed:
            endings.dependency_failed(controller.core, [row], *failed[row.id], now_s)
        else:
            arrivals.arrived(controller.core, [row], waits_for.get(row.id, ()), now_s)


async def _arrive_later(controller: Controller, rows: list[db.JobRow]) -> None:
    def look() -> tuple[dict[str, set[str]], dict[str, tuple[str, str]]]:
        with controller.store.read() as c:
            return unfinished_dependencies(c, rows)

    found = await asyncio.to_thread(look)
    controller.tell(lambda now_s: _arrive(controller, rows, *found, now_s))


def _check(controller: Controller, spec: JobSpec, principal: Principal) -> str:
    """Refuse what can never run; returns the tenant for which it runs."""
    if controller.core.closing:
        raise Conflict("the cluster is going down", hint="`thebes up` starts it again")
    tenant = spec.tenant or principal.tenant
    if tenant != principal.tenant and not principal.is_admin:
        raise Forbidden(f"your jobs run for tenant '{principal.tenant}', not '{tenant}'", hint="leave --tenant out")
    why_not = controller.core.ledger.never_fits(spec.gpus, spec.nodes, spec.gpu_type)
    if why_not:
        raise Invalid(f"the job can never run: {why_not}", hint="`thebes nodes` shows what there is")
    if spec.launcher == "torchrun":
        try:
            torchrun_command(spec.command, nodes=1, node_rank=0, ranks=1, master_addr="", master_port=0)
        except Refused as refused:
            raise Invalid(f"the job can never run: {refused}", hint="or use the plain launcher") from None
    if spec.priority > 0 and not principal.is_admin:
        raise Forbidden(
            "a priority above 0 would put your job before everybody else's: only an admin can give one",
            hint="leave --priority out; below 0 lets others go first",
        )
    most = quota(controller, tenant)
    if most is not None and spec.gpus > most:
        raise Invalid(
            f"the job can never run: it asks for {spec.gpus} GPUs, the quota of tenant '{tenant}' is {most}",
            hint="ask for fewer GPUs, or have an admin raise the quota",
        )
    if spec.snapshot is not None and not controller.snapshots.has(spec.snapshot):
        raise Invalid("the snapshot named was not uploaded", hint="`thebes submit --snapshot` does both")
    return tenant


def quota(controller: Controller, tenant: str) -> int | None:
    """GPUs that the tenant may hold at once; None if there is no limit."""
    ledger = controller.core.ledger
    if tenant not in ledger.tenants:
        return None
    quota = ledger.limits[ledger.tenants.index(tenant)]
    return None if quota >= 1 << 60 else quota


async def set_quota(controller: Controller, tenant: str, gpus: int | None) -> None:
    """Let an admin's change of a tenant hold from now on."""
    await controller.ask(lambda now_s: orders.set_quota(controller.core, tenant, gpus, now_s))


async def act(controller: Controller, verb: str, job_id: str, principal: Principal, **options: Any) -> list[str]:
    """cancel, hold, release, requeue or preempt a job, or all members of an array that it can be done to."""

    def look() -> list[db.JobRow]:
        with controller.store.read() as c:
            return named(c, job_id)

    rows = await asyncio.to_thread(look)
    if not rows or not (principal.is_admin or rows[0].user == principal.user):
        raise NotFound(f"there is no job {job_id}", hint="`thebes ps` lists yours")
    whole_array = rows[0].id != job_id

    def act(now_s: float) -> list[str]:
        done: list[str] = []
        refused: UserError | None = None
        for row in rows:
            try:
                _act_on(controller, verb, row, principal.user, now_s, **options)
                done.append(row.id)
            except UserError as error:
                refused = error
                if not whole_array:
                    raise
        if not done and refused is not None:
            raise refused
        return done

    return await controller.ask(act)


def _act_on(
    controller: Controller, verb: str, row: db.JobRow, actor: str, now_s: float, *, grace_s: float | None = None
) -> None:
    core = controller.core
    if row.id not in core.jobs:
        if not row.terminal:
            raise Conflict(f"job {row.id} has just been submitted or has just ended", hint="try again")
        if verb == "requeue":
            ended, waits_for, checkpoints = _as_it_ended(controller, row)
            orders.requeue_ended(core, ended, waits_for, actor, now_s)
            recovery.note_checkpoints(core, checkpoints)
            return
        raise Conflict(f"job {row.id} has ended already: {row.state}", hint=f"`thebes requeue {row.id}` runs it again")
    if verb == "cancel":
        orders.cancel(core, row.id, actor, now_s)
    elif verb == "hold":
        orders.hold(core, row.id, actor, now_s)
    elif verb == "release":
        orders.release(core, row.id, actor, now_s)
    elif verb == "requeue":
        orders.requeue(core, row.id, actor, now_s)
    elif verb == "preempt":
        orders.requeue(core, row.id, actor, now_s, why="preempt", grace_s=grace_s)
    else:
        raise Invalid(f"there is no '{verb}'", hint="cancel, hold, release, requeue or preempt")


def _as_it_ended(
    controller: Controller, row: db.JobRow
) -> tuple[db.JobRow, set[str], dict[str, tuple[int | None, str]]]:
    """Look again, as the job may have run once more since it was read. Returns it with the jobs it comes after that
    have not ended, and the last checkpoint that it told."""
    with controller.store.read() as c:
        row = db.get_job(c, row.id) or row
        checkpoints = last_checkpoints(c, row.id)
        waits_for, failed = unfinished_dependencies(c, [row])
    if not row.terminal:
        raise Conflict(f"job {row.id} has just ended", hint="try again")
    if row.incarnation:  # its dependencies were satisfied once, so it never waits for them again
        return row, set(), checkpoints
    if row.id in failed:
        other, state = failed[row.id]
        raise Conflict(
            f"job {row.id} comes after job {other}, which is {state}", hint=f"`thebes requeue {other}` first"
        )
    # What has just ended is perhaps not in the store yet, but it is not in the core any more.
    return row, waits_for.get(row.id, set()) & controller.core.jobs.keys(), checkpoints


async def drain(controller: Controller, node: str, reason: str, preempt: bool, actor: str) -> None:
    await controller.ask(lambda now_s: outages.drain(controller.core, node, reason, actor, now_s, preempt=preempt))


async def undrain(controller: Controller, node: str, actor: str) -> None:
    await controller.ask(lambda now_s: outages.undrain(controller.core, node, actor, now_s))


async def shutdown(controller: Controller, mode: Literal["checkpoint", "keep", "kill"]) -> dict[str, Any]:
    """Settle what becomes of running jobs when the cluster is stopped; answers when all that is to end has ended."""
    if mode == "keep":
        await controller.leave()
        return {"mode": mode, "stopped": []}
    stopped = await controller.ask(lambda now_s: orders.stop_all(controller.core, mode, now_s))
    patience_s = 10.0 + max((_grace_s(controller, job) for job in stopped), default=0.0)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and any(
        controller.core.jobs[job].attempts for job in stopped if job in controller.core.jobs
    ):
        await asyncio.sleep(0.02)
    await controller.ask(lambda _: None)  # how they ended is now in the store for anybody to ask
    retire = getattr(controller.engine, "retire", None)  # see `Retires`
    if retire is not None:
        await retire()
    return {"mode": mode, "stopped": stopped}


def _grace_s(controller: Controller, job_id: str) -> float:
    job = controller.core.jobs.get(job_id)
    return controller.config.grace_s if job is None or job.spec.grace_s is None else job.spec.grace_s


async def plan(controller: Controller, spec: JobSpec, principal: Principal) -> dict[str, Any]:
    """What would become of this job if it were submitted now."""

    def look() -> tuple[set[str], tuple[str, str] | None]:
        with controller.store.read() as c:
            return check_dependencies(c, spec, principal)

    try:
        tenant = _check(controller, spec, principal)
        waits_for, failed = await asyncio.to_thread(look) if spec.after or spec.after_any else (set[str](), None)
        if failed is not None:
            raise Invalid(f"it would be cancelled at once: {endings.failed_dependency(*failed)}")
    except Invalid as error:
        return {"starts": "never", "start_in_s": None, "reason": error.message, "nodes": {}, "preempts": []}
    return forecast(controller.core, spec, tenant, waits_for, controller.clock.now_s())
