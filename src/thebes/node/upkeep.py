"""What an agent does by itself now and then: it looks whether the GPUs are all right, and removes what is old."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

from thebes.model.errors import UserError
from thebes.node import gpus as gpu_discovery
from thebes.node import old_attempts
from thebes.node.attempts import Attempts
from thebes.node.reporting import Reporter
from thebes.protocol.instance import EventLog

HEALTH_EVERY_S = 30.0


async def watch_health(reporter: Reporter, log: EventLog) -> None:
    """For ever: tell when a GPU is not all right any more, or again."""
    while True:
        await asyncio.sleep(HEALTH_EVERY_S)
        try:
            found = await asyncio.to_thread(gpu_discovery.discover)
        except UserError as error:
            found = ()
            log.write("GPUs", node=reporter.facts.name, error=error.message)
        found = gpu_discovery.looked_at_again(reporter.facts.gpus, found)
        if found != reporter.facts.gpus:
            reporter.tell_facts(replace(reporter.facts, gpus=found))


async def remove_old(attempts: Attempts, log: EventLog, before_s: float, limit: int) -> int:
    """Remove attempts and fences that are older than this (Unix seconds), so many of each at most; how many it were."""
    found = await asyncio.to_thread(
        old_attempts.old_attempts, attempts.dir, attempts.open_dir, before_s=before_s, limit=limit
    )
    removed = 0
    for folder in found:
        async with attempts.lock_of(folder.job_id):  # no start of it is under way
            if attempts.find(folder) is None:
                with suppress(OSError):
                    removed += await asyncio.to_thread(old_attempts.remove_attempt, folder)
        await asyncio.sleep(0)  # a start that waits for the lock takes it now, and the lock stays
        attempts.drop_lock(folder.job_id)
    fences = await asyncio.to_thread(
        old_attempts.old_fences, attempts.fences.dir, attempts.dir, before_s=before_s, limit=limit
    )
    # Without a pause, so that no start or kill comes in between.
    in_use = {job_id for job_id, _ in attempts.by_key} | attempts.starting()
    for path in fences:
        if path.name not in in_use and old_attempts.is_older(path, before_s):
            path.unlink(missing_ok=True)
    if removed or fences:
        log.write("removed what was old", node=attempts.node, attempts=removed, fences=len(fences))
    return max(removed, len(fences))
