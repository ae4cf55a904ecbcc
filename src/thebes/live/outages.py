"""Nodes come and go, are drained by an admin or the site, and GPUs fall sick: where nothing new may begin."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from thebes import store as db
from thebes.live import entries, launching, orders, recording
from thebes.live.errors import Conflict, NotFound
from thebes.protocol.contract import Gpu, NodeFacts

if TYPE_CHECKING:
    from thebes.live.core import Core


def nodes_changed(core: Core, changed: Collection[NodeFacts], now_s: float) -> None:
    """Take in all changes at once, because a site that is back may bring a thousand nodes."""
    for facts in changed:
        node_changed(core, facts, now_s)
    block(core, now_s)
    if any(facts.alive for facts in changed):
        launching.launch_what_can(core, now_s)


def node_changed(core: Core, facts: NodeFacts, now_s: float) -> None:
    before = core.nodes.get(facts.name)
    core.nodes[facts.name] = facts
    if before is None or before.alive != facts.alive:
        kind = "node-up" if facts.alive else "node-down"
        core.event(now_s, kind, None, node=facts.name, detail=facts.detail)
    if facts.drained and (before is None or not before.drained):
        core.event(now_s, "site-drain", None, node=facts.name, reason=facts.drained)
        clear_out(core, facts.name, "the site", now_s, preempt=True)
    elif before is not None and before.drained and not facts.drained:
        core.event(now_s, "site-undrain", None, node=facts.name)


def drain(core: Core, node: str, reason: str, actor: str, now_s: float, *, preempt: bool) -> None:
    if node not in core.ledger.node_index:
        raise NotFound(f"there is no node '{node}'", hint=f"nodes: {', '.join(core.ledger.node_index)}")
    core.drained[node] = reason
    core.writes.append(lambda c: db.set_drained(c, node, True, reason))
    core.event(now_s, "drain", None, node=node, actor=actor, reason=reason)
    clear_out(core, node, actor, now_s, preempt=preempt)
    block(core, now_s)


def clear_out(core: Core, node: str, actor: str, now_s: float, *, preempt: bool) -> None:
    """Begin nothing more on this node; with `preempt`, jobs that run there save and go elsewhere."""
    if preempt:
        for job in list(core.jobs.values()):
            attempt = job.active
            if attempt is not None and not job.cancelled and any(part.node == node for part in attempt.parts):
                orders.requeue(core, job.id, actor, now_s)
    for job in list(core.jobs.values()):  # jobs that were given GPUs there but have not begun are to begin elsewhere
        if job.target is not None and job.active is None and any(n == node for n, _ in core.ledger.parts(job.target)):
            recording.give_back(core, job, now_s)


def undrain(core: Core, node: str, actor: str, now_s: float) -> None:
    if node not in core.ledger.node_index:
        raise NotFound(f"there is no node '{node}'", hint=f"nodes: {', '.join(core.ledger.node_index)}")
    if node not in core.drained:
        raise Conflict(f"node {node} is not drained")
    del core.drained[node]
    core.writes.append(lambda c: db.set_drained(c, node, False))
    core.event(now_s, "undrain", None, node=node, actor=actor)
    block(core, now_s)


def block(core: Core, now_s: float) -> None:
    down = {name for name in core.ledger.node_index if name in core.nodes and not core.nodes[name].alive}
    emptied = {name for name, facts in core.nodes.items() if facts.drained}
    blocked = sorted(((set(core.drained) | emptied) & set(core.ledger.node_index)) | down)
    sick = sick_gpus(core)
    if blocked == sorted(core.ledger.blocked) and sick == sorted(core.ledger.sick):
        return
    for gpu in set(sick) - core.ledger.sick:
        node, number = core.ledger.local(gpu)
        if not _gpu(core, gpu).taken:  # other people's work comes and goes all the time
            core.event(now_s, "gpu-sick", None, node=node, gpu=number)
    for job in list(core.jobs.values()):  # jobs that were to begin there are to begin elsewhere
        if job.target is not None and job.active is None and set(job.target) & set(sick):
            recording.give_back(core, job, now_s)
    recording.record(core, entries.Nodes(now_s, tuple(blocked), tuple(sick)))


def sick_gpus(core: Core) -> list[int]:
    """GPUs that no job can be given: not healthy, or in use by others."""
    return sorted(
        core.ledger.gpu_number(name, gpu.index)
        for name, facts in core.nodes.items()
        if name in core.ledger.node_index
        for gpu in facts.gpus
        if (not gpu.healthy or gpu.taken) and gpu.index < core.ledger.nodes[core.ledger.node_index[name]].gpus
    )


def _gpu(core: Core, number: int) -> Gpu:
    node, index = core.ledger.local(number)
    return next(gpu for gpu in core.nodes[node].gpus if gpu.index == index)
