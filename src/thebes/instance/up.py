"""`thebes up` brings an instance up: it starts what is missing and waits until that answers."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thebes.instance.asking import ANSWER_S, ask
from thebes.instance.keeper_log import LogMark, last_said
from thebes.instance.shared_store import look_at_store, wanted_for
from thebes.instance.state import alone, check_here, living_parts, not_alive
from thebes.instance.wanted import UpOptions, differences
from thebes.live.config import (
    Config,
    admitted_policy,
    check_listening,
    live_policy,
    load,
    save,
)
from thebes.model.errors import UserError
from thebes.node.keeper import CONTROLLER_PATIENCE_S, call_keeper, start_keeper, stop_instance
from thebes.protocol.instance import Instance, explain, stop_process, wait_gone

if TYPE_CHECKING:
    from thebes.placement import Placement
    from thebes.policy import Policy

READY_S = 90.0  # loading takes three seconds, or thirty on a slow machine that is busy with training
SITE_S = 10.0  # a site that was there before need not answer within this time


@dataclass(frozen=True)
class Brought:
    """A cluster that is up."""

    config: Config
    url: str
    was_up: bool
    log: LogMark  # what the keeper has logged since then
    leader: str | None = None  # the address of the leader, if this one is a standby
    trouble: str = ""  # why none of the nodes can be used now


def bring_up(
    instance: Instance,
    options: UpOptions,
    prepare: Callable[[Policy, Placement], None] = lambda _policy, _placement: None,
) -> Brought:
    """Start what does not run yet, and wait until it answers. If that fails, what was started is stopped again.

    `prepare` is called before a start, when everything was found to be in order.
    """
    instance.create()
    with alone(instance):
        check_here(instance)
        saved = load(instance.config) if instance.exists else None
        cluster = look_at_store(instance, saved, options)
        wanted = wanted_for(cluster, saved, options)
        running = saved is not None and bool(living_parts(instance))
        if saved is not None and wanted != saved:
            _refuse_change(instance, saved, wanted, running)
        chosen = live_policy(wanted) if wanted == saved else admitted_policy(wanted)
        check_listening(wanted)
        was_up = instance.holder_pid("keeper") is not None
        mark = LogMark(instance.log / "keeper.jsonl")
        if not was_up:
            _make_shared(wanted)
            prepare(*chosen)
            if wanted != saved:
                save(instance.config, wanted)
            if cluster is not None:
                cluster.keep(wanted)
        if running:
            _go_on(instance)
        keeper = None if was_up else start_keeper(instance)
        if was_up:
            call_keeper(instance)
        try:
            known = saved is not None and saved.engine == wanted.engine and saved.nodes == wanted.nodes
            url, leader, trouble = _wait_until_ready(instance, wanted, mark, keeper, known=known)
        except BaseException:
            if not running and not was_up:
                stop_instance(instance, wanted.node_names)
                _restore(instance, saved, wanted)
            raise
    return Brought(wanted, url, was_up, mark, leader, trouble)


def _make_shared(config: Config) -> None:
    """Make the folder that all nodes see, for us alone."""
    if config.shared_dir:
        path = Path(config.shared_dir)
        try:
            for folder in (path, path / "jobs", path / "nodes"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            told = explain(error, path, "cannot be made")
            raise UserError(told.message, hint=told.hint.replace("--dir", "--shared")) from error


def wait_for_keeper(instance: Instance, log: LogMark) -> bool:
    """Wait until the keeper ends; returns whether it was told to since that mark, which may be before we wait."""
    pid = instance.holder_pid("keeper")
    with suppress(ProcessLookupError):
        if pid is not None:
            pidfd = os.pidfd_open(pid)
            try:
                while not wait_gone(pidfd, 3600.0):
                    pass
            finally:
                os.close(pidfd)
    return log.stopped()


def _go_on(instance: Instance) -> None:
    """Stop a controller that starts nothing more because a `thebes down` was broken off; the keeper starts another."""
    answer = ask(instance, "GET", "/v1/status", with_token=True, timeout_s=ANSWER_S)
    pid = instance.holder_pid("controller")
    if answer is not None and answer.body.get("closing") and pid is not None:
        stop_process(pid, instance.lock_path("controller"), patience_s=CONTROLLER_PATIENCE_S)


def _refuse_change(instance: Instance, saved: Config, wanted: Config, running: bool) -> None:
    told = differences(saved, wanted)
    if running:
        raise UserError(
            f"the cluster in {instance.dir} runs with other options: {'; '.join(told)}",
            hint="`thebes down` first, then `thebes up` with the new options; queued jobs stay",
        )
    alive = sorted({attempt.job_id for attempt in instance.live_attempts()})
    if saved.nodes != wanted.nodes and alive:
        raise UserError(
            f"jobs still run on the nodes that would change: {', '.join(alive)}",
            hint="`thebes up` without options takes them over, or `thebes down --now` ends them",
        )


def _restore(instance: Instance, saved: Config | None, wanted: Config) -> None:
    """Undo the change of the configuration after a start that failed."""
    if saved == wanted:
        return
    with suppress(UserError, OSError):
        if saved is None:
            instance.config.unlink(missing_ok=True)
        else:
            save(instance.config, saved)


def _wait_until_ready(
    instance: Instance, config: Config, mark: LogMark, keeper: subprocess.Popen[bytes] | None, *, known: bool
) -> tuple[str, str | None, str]:
    """Its address; that of the leader, if this one is a standby; and why no node can be used.

    On a site that was `known` before, the last is no reason not to come up: its jobs may run, and it will be back.
    """
    deadline_s = time.monotonic() + READY_S
    answered_s = float("inf")
    missing = "the controller does not answer"
    while time.monotonic() < deadline_s:
        failure = mark.failure()
        if failure is not None:
            raise failure
        if keeper is not None and keeper.poll() is not None and instance.holder_pid("keeper") is None:
            raise UserError(last_said(instance, "keeper") or "the keeper ended at once", hint=f"see {instance.log}")
        answer = ask(instance, "GET", "/v1/healthz", timeout_s=1.0)
        if answer is not None and answer.status == 200 and {"keeper", "controller"} <= set(living_parts(instance)):
            endpoint = instance.read_endpoint()
            url = endpoint["url"] if endpoint else ""
            if answer.body.get("role") == "standby":
                if answer.body.get("leader"):
                    return url, str(answer.body["leader"]), ""
                missing = answer.body.get("trouble") or "nobody leads the cluster yet"
                time.sleep(0.03)
                continue
            silent = silent_nodes(instance, config)
            if not silent:
                return url, None, ""
            answered_s = min(answered_s, time.monotonic())
            missing = f"no word from the agent of {', '.join(silent[:8])}"
            if config.engine != "local":
                missing = _why_silent(instance, config)
                if known and time.monotonic() > answered_s + SITE_S:
                    return url, None, missing
        elif answer is not None and answer.status != 200:
            missing = f"the controller answers: {answer.body.get('error', answer.status)}"
        time.sleep(0.03)
    last = mark.last_words()
    raise UserError(
        f"the cluster did not come up within {READY_S:g} s: {missing}" + (f" ({last})" if last else ""),
        hint=f"the logs in {instance.log} tell more; `thebes doctor` checks this machine",
    )


def _why_silent(instance: Instance, config: Config) -> str:
    """Why none of the nodes of a site can be used."""
    answer = ask(instance, "GET", "/v1/nodes", with_token=True, timeout_s=ANSWER_S)
    nodes = answer.body.get("nodes", []) if answer is not None and answer.status == 200 else []
    why = next((str(node["reason"]) for node in nodes if node.get("reason")), "")
    return f"none of the {len(config.nodes)} nodes of {config.engine.capitalize()} can be used" + (why and f" ({why})")


def silent_nodes(instance: Instance, config: Config) -> list[str]:
    """Nodes to whose agents the controller has no connection; on a site with many, one that answers is enough."""
    silent = not_alive(instance, config)
    return [] if config.engine != "local" and len(silent) < len(config.nodes) else silent
