"""Jobs with execution plans: what each of them asked for, and the plan behind every row of a Decision.

This is the door for the trace's columns plan, cpus, global_batch, guaranteed and plans, and for everything that can be
wrong with them. During a run it turns the plans that a policy names into rows of the profile table, and refuses a plan
that the job's GPUs cannot hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from thebes.model.cluster import Cluster
from thebes.model.decision import Decision, Execution, counts_of
from thebes.model.errors import UserError
from thebes.model.jobs import HELD, JobTable
from thebes.model.plan import FAMILIES, ZERO_DP, ZERO_OFFLOAD, Plan, parse_plan, plan_of
from thebes.model.profiles import Profiles
from thebes.perf.models import Model
from thebes.perf.plans.book import Outlook, PlanBook
from thebes.perf.plans.profiles import PlanProfiles
from thebes.perf.plans.site import A800, known_gpus, site_of
from thebes.perf.plans.speed import Plans, facts_of
from thebes.perf.plans.survey import why_none
from thebes.perf.plans.transformer import Transformer, with_batch

# A plan may be named by its type alone. It then uses the GPUs that the job has, and accumulates as its memory needs.
_TYPES: Mapping[str, Plan] = {
    "dp": Plan(),
    "dp+gc": Plan(gc=True),
    "zero-dp": Plan(zero=ZERO_DP),
    "zero-dp+gc": Plan(zero=ZERO_DP, gc=True),
    "zero-offload": Plan(zero=ZERO_OFFLOAD),
    "zero-offload+gc": Plan(zero=ZERO_OFFLOAD, gc=True),
}


class CannotRun(UserError):  # noqa: N818 - reads as what it says
    """These nodes cannot give some jobs their own plan, GPUs or CPUs. The message is about the first of them."""

    def __init__(self, first: UserError, positions: list[int], jobs: int) -> None:
        others = f" ({len(positions)} of {jobs} jobs cannot run here as they ask to)" if len(positions) > 1 else ""
        super().__init__(first.message + others, hint=f"{first.hint}; --skip-oversize leaves such jobs out")
        self.positions = positions


@dataclass(frozen=True)
class Executions:
    """The plans of one workload on one cluster."""

    profiles: PlanProfiles
    names: tuple[str, ...]  # of the book's models, each name once
    number: NDArray[np.int64]  # per job, the number of its model in the book
    asked: Execution  # what each job asked for
    guaranteed: NDArray[np.bool_]

    @property
    def book(self) -> PlanBook:
        return self.profiles.book

    @property
    def models(self) -> list[str]:
        """For each job, the name of its model."""
        return [self.names[number] for number in self.number.tolist()]

    def most_gpus(self, asked: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each job, the most GPUs that any plan of its model can use here; never fewer than it asked for."""
        most = np.array([self.book.most_gpus(number) for number in range(len(self.book.models))], dtype=np.int64)
        return np.maximum(most[self.number], asked)

    @property
    def facts(self) -> dict[str, Model]:
        return {name: facts_of(model, name) for name, model in zip(self.names, self.book.models, strict=True)}

    def of(self, table: JobTable, decision: Decision, policy: str) -> tuple[Execution, Profiles]:
        """What each row of a Decision is asked to run under, and the profiles that this refers to."""
        jobs, rows = table.jobs, decision.rows
        if len(rows) and (rows.min() < 0 or rows.max() >= len(jobs)):
            rows = np.clip(rows, 0, len(jobs) - 1)  # a wrong row must not raise here: the checker names it
        counts = counts_of(table, decision)
        stays = (jobs["phase"][rows] == HELD) & (counts == jobs["width"][rows])
        plan = np.where(stays, jobs["plan"][rows], self.asked.plan[rows]) if decision.plans is None else decision.plans
        cpus = self.asked.cpus[rows] if decision.cpus is None else decision.cpus
        own = (plan == self.asked.plan[rows]) & (counts == jobs["gpus"][rows])
        asked = own & (cpus == self.asked.cpus[rows])
        accepted = own | (stays & (plan == jobs["plan"][rows]))  # its own plan may leave GPUs idle
        execution = Execution(*(column[rows] for column in self.asked))  # type: ignore[arg-type] - columns of two types
        for i in np.flatnonzero(~asked).tolist():
            row, count, held, code = int(rows[i]), int(counts[i]), int(cpus[i]), int(plan[i])
            if accepted[i]:
                chosen = self._named(row, code, plan_of(code).gpus, held, policy)
            elif decision.plans is None:
                chosen = self._stretched(row, count, held)
            else:
                chosen = self._named(row, code, count, held, policy)
            self._write(execution, i, row, chosen, held, count)
        return execution, self.profiles.table

    def _write(self, execution: Execution, i: int, row: int, chosen: Outlook, cpus: int, count: int) -> None:
        execution.plan[i] = chosen.plan.code
        execution.profile[i] = self.profiles.row(int(self.number[row]), chosen.plan, cpus, count)
        execution.cpus[i] = cpus
        execution.host_gib[i], execution.memory_gib[i] = chosen.host_gib, chosen.gpu_gib

    def _named(self, row: int, code: int, count: int, cpus: int, policy: str) -> Outlook:
        """The plan that the policy names, if the job can run under it."""
        number = int(self.number[row])
        model = self.book.models[number].name
        if code <= 0:
            raise UserError(
                f"policy {policy}: its decision names no execution plan for job row {row} ({model})",
                hint="plans holds the code of a plan per row: view.plans.best(...).plan.code",
            )
        plan = plan_of(code)
        if plan.gpus != count:
            raise UserError(
                f"policy {policy}: its decision gives job row {row} ({model}) plan {plan}, which takes {plan.gpus} "
                f"GPUs, and {count} GPUs",
                hint="dp x tp x pp is the number of GPUs",
            )
        found = self.book.of(number, plan, self._fewest_nodes(count), cpus)
        if found is None:
            why = self.book.why_not(number, plan, self._fewest_nodes(count), cpus)
            raise UserError(
                f"policy {policy}: its decision gives job row {row} ({model}) plan {plan}, which cannot run: {why}",
                hint="take a plan from view.plans.best(...)",
            )
        return found

    def _stretched(self, row: int, count: int, cpus: int) -> Outlook:
        """The asked type of plan on another number of GPUs. GPUs that it cannot use stand idle."""
        number, like = int(self.number[row]), plan_of(int(self.asked.plan[row]))
        found = _largest(self.book, number, count, cpus, like) or _largest(self.book, number, count, cpus, None)
        if found is not None:
            return found
        raise UserError(
            f"no execution plan of {self.book.models[number].name} runs on {count} GPUs or fewer",
            hint="raise min_gpus of the job; `thebes plan` lists the numbers of GPUs that a model can use",
        )

    def _fewest_nodes(self, gpus: int) -> int:
        return -(-gpus // self.book.site.node_gpus)


def _largest(book: PlanBook, number: int, gpus: int, cpus: int, like: Plan | None) -> Outlook | None:
    """The best plan on as many of these GPUs as any plan can use."""
    for count in range(gpus, 0, -1):
        found = book.best(number, count, -(-count // book.site.node_gpus), cpus, like=like)
        if found is not None:
            return found
    return None


def executions_for(
    perf: Plans,
    cluster: Cluster,
    jobs: pl.DataFrame,
    gpus: NDArray[np.int64],
    models: list[str | None],
    name: str,
    *,
    assigned: bool,
    notes: list[str],
) -> Executions:
    """Read what the trace says of plans; jobs that say nothing get the best plan for the GPUs they ask for.

    A model that was assigned, not named by the trace, may leave GPUs idle if no plan of it can use them.
    """
    perf.check(cluster)
    site = site_of(cluster, 0)
    if site.gpu_type not in known_gpus():
        notes.append(
            f"gpu_type {site.gpu_type} is not one that plans know: taken as {A800.gpu_type} with {site.gpu_gib:g} GiB"
        )
    ids = jobs["job_id"].to_list()
    books: dict[Transformer, int] = {}
    number = np.zeros(len(jobs), dtype=np.int64)
    batches, families = _batches(jobs, name), _column(jobs, "plans")
    for i, (model, batch, accepted) in enumerate(zip(models, batches, families, strict=True)):
        chosen = _transformer(perf, model, batch, accepted, f"{name}: job {ids[i]}")
        number[i] = books.setdefault(chosen, len(books))
    book = PlanBook(tuple(books), site, cluster.total_gpus)
    cpus = _cpus(jobs, name, site.cpus_per_gpu)
    profiles = PlanProfiles(book, cluster, as_measured=perf.truth == "measured")
    known: dict[tuple[int, int, str, int], Outlook | UserError] = {}
    outlooks: list[Outlook] = []
    wrong: list[tuple[int, UserError]] = []
    for i, text in enumerate(_column(jobs, "plan")):
        key = (int(number[i]), int(gpus[i]), text or "", int(cpus[i]))
        if key not in known:
            known[key] = _asked_or_why_not(book, *key, f"{name}: job {ids[i]}", may_idle=assigned and not text)
        found = known[key]
        if isinstance(found, UserError):
            wrong.append((i, found))
        else:
            outlooks.append(found)
    if wrong:
        raise CannotRun(wrong[0][1], [i for i, _ in wrong], len(jobs))
    asked = Execution(
        plan=np.array([o.plan.code for o in outlooks], dtype=np.int64),
        profile=np.array(
            [
                profiles.row(n, o.plan, c, g)
                for n, o, c, g in zip(number.tolist(), outlooks, cpus.tolist(), gpus.tolist(), strict=True)
            ],
            dtype=np.int64,
        ),
        cpus=cpus,
        host_gib=np.array([o.host_gib for o in outlooks]),
        memory_gib=np.array([o.gpu_gib for o in outlooks]),
    )
    idle = sum(o.plan.gpus < g for o, g in zip(outlooks, gpus.tolist(), strict=True))
    if idle:
        notes.append(f"{idle} of {len(jobs)} jobs ask for a number of GPUs that no plan of their model uses: some idle")
    return Executions(profiles, _own_names(book.models), number, asked, _guaranteed(jobs, name))


def _asked_or_why_not(
    book: PlanBook, number: int, gpus: int, text: str, cpus: int, where: str, *, may_idle: bool
) -> Outlook | UserError:
    fewer = _largest(book, number, gpus, cpus, None) if may_idle else None
    if fewer is not None:
        return fewer
    try:
        return _asked(book, number, gpus, text, cpus, where)
    except UserError as error:
        return error


def _column(jobs: pl.DataFrame, column: str) -> list[str | None]:
    """Texts of an optional column; empty where the trace says nothing."""
    if column not in jobs.columns:
        return [None] * len(jobs)
    return [value.strip() or None if value else None for value in jobs[column].cast(pl.String).to_list()]


def _numbers(jobs: pl.DataFrame, column: str, default: int | None, name: str, what: str) -> list[int | None]:
    values: list[int | None] = []
    for i, text in enumerate(_column(jobs, column)):
        try:
            value = float(text) if text is not None else None
        except ValueError:
            value = np.nan
        if value is not None and not (value >= 1 and value == int(value)):
            raise UserError(f"{name}: job {jobs['job_id'][i]}: {column} = {text}", hint=what)
        values.append(default if value is None else int(value))
    return values


def _batches(jobs: pl.DataFrame, name: str) -> list[int | None]:
    return _numbers(
        jobs, "global_batch", None, name, "global_batch is the samples of one iteration, a whole number from 1"
    )


def _cpus(jobs: pl.DataFrame, name: str, share: int) -> NDArray[np.int64]:
    """CPUs for each GPU: as many as asked for, or an even share of the node's."""
    what = "cpus is the number of CPUs for each GPU, a whole number from 1"
    return np.array(_numbers(jobs, "cpus", share, name, what), dtype=np.int64)


def _guaranteed(jobs: pl.DataFrame, name: str) -> NDArray[np.bool_]:
    meaning = {None: False, "0": False, "1": True, "false": False, "true": True, "no": False, "yes": True}
    values: list[bool] = []
    for i, text in enumerate(_column(jobs, "guaranteed")):
        known = meaning.get(text.lower().removesuffix(".0") if text else None)
        if known is None:
            raise UserError(
                f"{name}: job {jobs['job_id'][i]}: guaranteed = {text}", hint="write 1 (guaranteed) or 0 (best effort)"
            )
        values.append(known)
    return np.array(values, dtype=np.bool_)


def _transformer(perf: Plans, model: str | None, batch: int | None, accepted: str | None, where: str) -> Transformer:
    if model is None:
        raise UserError(f"{where}: names no model, though other jobs do", hint="fill in the column `model`")
    chosen = perf.transformers[model]
    if batch is not None:
        chosen = with_batch(chosen, batch)
    if accepted is None:
        return chosen
    words = {word.strip().lower() for word in accepted.split("|")}
    unknown = sorted(words - {*FAMILIES, "gc"})
    if unknown:
        raise UserError(
            f"{where}: plans = {accepted}: '{unknown[0]}' is no family of plans",
            hint=f"join by a bar any of {', '.join(FAMILIES)}, gc",
        )
    families = frozenset(words - {"gc"}) & chosen.families
    if not families:
        raise UserError(
            f"{where}: plans = {accepted}: {chosen.name} accepts none of them",
            hint=f"it accepts {', '.join(sorted(chosen.families))}",
        )
    return replace(chosen, families=families, recompute=chosen.recompute and "gc" in words)


def _own_names(models: Sequence[Transformer]) -> tuple[str, ...]:
    """A name for each model. Jobs of one model that differ in batch or accepted plans are different work."""
    names: dict[str, None] = {}
    for model in models:
        name = model.name
        if name in names:
            name += f" (batch {model.global_batch})"
        while name in names:
            name += "'"
        names[name] = None
    return tuple(names)


def _asked(book: PlanBook, number: int, gpus: int, text: str, cpus: int, where: str) -> Outlook:
    """The plan that the user wrote, on the GPUs that the user asked for."""
    model, nodes, site = book.models[number], -(-gpus // book.site.node_gpus), book.site
    if cpus > site.cpus_per_gpu:
        raise UserError(
            f"{where}: cpus = {cpus} for each GPU, but a node has {site.node_cpus} CPUs for {site.node_gpus} GPUs",
            hint=f"at most {site.cpus_per_gpu}; `cpus` counts per GPU, not per job",
        )
    if not text:
        found = book.best(number, gpus, nodes, cpus)
        if found is None:
            raise UserError(
                f"{where}: {_no_plan(book, number, gpus, cpus)}", hint=f"`thebes plan {model.name}` lists all"
            )
        return found
    if text.lower() in _TYPES:
        like = _TYPES[text.lower()]
        found = book.best(number, gpus, nodes, cpus, like=like) or (
            None if like.gc else book.best(number, gpus, nodes, cpus, like=replace(like, gc=True))
        )
        if found is None:
            why = book.why_not(number, replace(like, dp=gpus), nodes, cpus)
            raise UserError(
                f"{where}: plan = {text}: {model.name} cannot run under it on {gpus} GPUs ({why})",
                hint=f"{_no_plan(book, number, gpus, cpus)}; `thebes plan {model.name}` lists all",
            )
        return found
    plan = parse_plan(text, f"{where}: plan")
    if plan.gpus != gpus:
        raise UserError(
            f"{where}: plan = {text} takes {plan.gpus} GPUs, num_gpus = {gpus}",
            hint="dp x tp x pp is the number of GPUs: change one of the two",
        )
    found = book.of(number, plan, nodes, cpus)
    if found is None:
        raise UserError(
            f"{where}: plan = {text}: {model.name} cannot run under it: {book.why_not(number, plan, nodes, cpus)}",
            hint=f"{_no_plan(book, number, gpus, cpus)}; `thebes plan {model.name}` lists all",
        )
    return found


def _no_plan(book: PlanBook, number: int, gpus: int, cpus: int) -> str:
    """What to do instead: the best plan for so many GPUs, or the nearest numbers of GPUs that some plan can use."""
    model = book.models[number].name
    best = book.best(number, gpus, -(-gpus // book.site.node_gpus), cpus)
    if best is not None:
        return f"plan = {best.plan} would do"
    most = book.most_gpus(number)
    usable = [g for g in range(1, most + 1) if book.best(number, g, -(-g // book.site.node_gpus), cpus)]
    alone = PlanBook((book.models[number],), book.site, book.gpus)
    why = why_none(alone, gpus, -(-gpus // book.site.node_gpus), cpus)
    if not usable:
        return f"no execution plan of {model} fits into this cluster's memory: {why}"
    below = [g for g in usable if g < gpus][-1:]
    above = [g for g in usable if g > gpus][:1]
    would = " or ".join(str(g) for g in below + above)
    return f"no execution plan of {model} uses {gpus} GPUs: {why}; num_gpus = {would} would do"
