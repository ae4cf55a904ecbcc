"""`thebes replay` makes the journalled decisions of an instance again, and compares them with the journal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thebes.cli.live import Folder, ShortOutput, ShortOutputOption
from thebes.cli.screen import clock, paint, plural, print_json

if TYPE_CHECKING:
    from thebes.live.replay import Replayed


def replay(
    since: Annotated[
        int | None, typer.Option("--from", metavar="SEQ", help="From this entry of the journal on.")
    ] = None,
    decision: Annotated[int | None, typer.Option(metavar="SEQ", help="Only this decision, with its reasons.")] = None,
    output: ShortOutputOption = ShortOutput.table,
    folder: Folder = None,
) -> None:
    """Make past decisions again from the journal and compare. Exit code 1: a decision came out differently.

    The command reads the instance's folder; the cluster need not run.
    """
    from thebes.live.replay import replay_store
    from thebes.protocol.instance import Instance

    started_s = time.monotonic()
    done = replay_store(Instance.at(folder).dir, since=since, decision=decision)
    took_s = time.monotonic() - started_s
    different = [one for one in done if not one.same]
    if output is ShortOutput.json:
        print_json({"decisions": [_as_json(one, decision is not None) for one in done], "different": len(different)})
    elif decision is not None:
        print("\n".join(decision_lines(done[0])))
    else:
        for one in different:
            print(f"decision {one.seq} at {clock(one.time_s, time.time())} differs in {', '.join(one.differs)}")
        for version in dict.fromkeys(one.version for one in done if one.by_another_version):
            older = plural(sum(one.version == version for one in done), "decision")
            print(f"{older} by version {version}: what was done is compared, not the fingerprint of what was seen")
        verdict = paint("all the same", "green") if not different else paint(f"{len(different):,} differ", "red")
        rate = f" ({len(done) / took_s:,.0f} per second)" if took_s > 0.5 else ""
        print(f"{plural(len(done), 'decision')} made again{rate}: {verdict}" if done else "no decision to make again")
    if different:
        raise typer.Exit(1)


def _as_json(one: Replayed, whole: bool) -> dict[str, Any]:
    told: dict[str, Any] = {
        "seq": one.seq,
        "time_s": one.time_s,
        "digest": one.digest,
        "jobs": one.jobs,
        "same": one.same,
        "version": one.version,
        "differs": list(one.differs),
    }
    return {**told, "entry": dict(one.entry), "again": dict(one.again), "reasons": dict(one.reasons)} if whole else told


def decision_lines(one: Replayed) -> list[str]:
    """One decision in words: what was seen, what was done, which jobs waited and why."""
    verdict = paint("the same again", "green") if one.same else paint(f"differs in {', '.join(one.differs)}", "red")
    facts = [
        ("decision", f"{one.seq}  {clock(one.time_s, time.time())}"),
        ("saw", f"{plural(one.jobs, 'job')}, digest {one.digest}"),
        ("came out", verdict),
    ]
    for name, word in (("suspend", "suspended"), ("start", "started"), ("migrate", "moved"), ("promote", "promoted")):
        if one.entry[name]:
            facts.append((word, ", ".join(_named(item) for item in one.entry[name])))
    lines = [f"{paint(label.ljust(12), 'dim')}{value}" for label, value in facts]
    waiting: dict[str, list[str]] = {}
    for job, reason in one.reasons.items():
        waiting.setdefault(reason, []).append(job)
    for reason, jobs in waiting.items():
        shown = ", ".join(jobs[:12]) + (f" … {len(jobs) - 12:,} more" if len(jobs) > 12 else "")
        lines.append(f"{paint('waited'.ljust(12), 'dim')}{shown}: {reason}")
    return lines


def _named(item: Any) -> str:
    if isinstance(item, str):
        return item
    job, gpus = item
    return f"{job} (GPU {', '.join(map(str, gpus))})"
