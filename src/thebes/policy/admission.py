"""Whether a policy can run in a world: what it needs to know must be known there, and what it does must be carried out
there; and whether a placement can. `thebes up` refuses by this, and `thebes policies` prints it, so that the answer is
computed and not written by hand.
"""

from __future__ import annotations

from collections.abc import Mapping

from thebes.model.errors import UserError
from thebes.model.facts import DURATIONS, FACTS, LIVE, PLANS, PROFILES, Knowledge
from thebes.placement import Placement
from thebes.policy.base import DECISIONS, Policy

# What a Decision can ask for beyond whole GPUs in the number that each job asked for.
SHARES = "shares"
COUNTS = "counts"
_TRY = "`thebes policies` tells what each needs; tiresias-l, las and fifo need nothing"


_WHOLE_GPUS = "`--engine local` carries it out; tiresias-l, las and fifo give whole GPUs, as many as asked for"


def obstacle(
    policy: Policy, carried: frozenset[str], known: Knowledge = LIVE, *, engine: str = "this"
) -> UserError | None:
    """The first reason why the policy cannot run in a world that knows and carries out this; None if it can."""
    label = policy.label
    if DURATIONS in policy.needs - known.facts:
        return UserError(
            f"policy {label} needs to know how long each job will run, which nobody knows on a live cluster", hint=_TRY
        )
    if PROFILES in policy.needs - known.facts:
        return UserError(
            f"policy {label} needs profiles of the models, which a live cluster does not have yet", hint=_TRY
        )
    if PLANS in policy.needs - known.facts:
        return UserError(
            f"policy {label} changes the execution plans of running jobs, which the engines do not carry out yet",
            hint=f"try it in simulation: `thebes simulate … --policy {label} --perf plans`",
        )
    for fact in sorted(policy.needs - known.facts):
        return UserError(
            f"policy {label} needs to know {FACTS[fact].what}, which is not known in {known.world}",
            hint=FACTS[fact].remedy,
        )
    if policy.grain != DECISIONS:
        return UserError(
            f"policy {label} runs only in a simulation of its own, at the grain of {policy.grain}", hint=_TRY
        )
    if policy.shares and SHARES not in carried:
        return UserError(
            f"policy {label} shares GPUs by itself, which was not tried with {engine} engine: so it is not carried out",
            hint=_WHOLE_GPUS,
        )
    if policy.resizes and COUNTS not in carried:
        return UserError(
            f"policy {label} changes how many GPUs a job has, which was not tried with {engine} engine: so it is not "
            "carried out",
            hint=_WHOLE_GPUS,
        )
    return None


def obstacle_of_placement(placement: Placement, known: Knowledge = LIVE) -> UserError | None:
    """Why the placement cannot run where this is known; none if it can.

    One that learns compares how fast a gang runs here with how fast it would run at its best place. The speeds that
    live jobs report are relative to the best that each of them has had so far: a gang that was always spread shows 1.
    """
    if placement.learns and PROFILES not in known.facts:
        return UserError(
            f"placement {placement.name} cannot learn on a live cluster: nobody measures yet how fast a job would run "
            "on fewer nodes",
            hint="leave placement.learn=yes out, and give a limit: --set placement.pack_limit=0.3",
        )
    return None


def missing(policy: Policy, known: Knowledge = LIVE) -> dict[str, str]:
    """Facts that the policy would use but that are not known there, and what it does instead."""
    return {fact: instead for fact, instead in policy.uses.items() if fact not in known.facts}


def runs_live(policy: Policy, carried: frozenset[str], known: Knowledge = LIVE) -> str:
    """A few words for a table: "yes", what it does without, or why it cannot run."""
    if obstacle(policy, carried, known) is None:
        without = "; ".join(f"without {fact}: {instead}" for fact, instead in missing(policy, known).items())
        return f"yes; {without}" if without else "yes"
    unknown = sorted(policy.needs - known.facts)
    if unknown:
        return f"no: needs {', '.join(unknown)}"
    if policy.grain != DECISIONS:
        return f"no: simulated at the grain of {policy.grain}"
    return "no: shares GPUs" if policy.shares and SHARES not in carried else "no: resizes jobs"


def runs_live_on(policy: Policy, engines: Mapping[str, frozenset[str]], known: Knowledge = LIVE) -> str:
    """The same for all engines and what they carry out; engines are named if only some can run the policy."""
    able = [engine for engine, carried in engines.items() if obstacle(policy, carried, known) is None]
    said = runs_live(policy, engines[able[0]] if able else frozenset().union(*engines.values()), known)
    if not able or len(able) == len(engines):
        return said
    return said.replace("yes", f"yes, with --engine {' or '.join(able)}", 1)
