"""What every policy promises: it is pure, sees only what it declares, leaves no GPU idle that somebody could use."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.effort import effort
from kit.workloads import mixed_cluster, trace_of, workloads
from thebes import Decision, Policy, Result, Trace, UserError, View, fill, simulate
from thebes.model.cluster import from_short_form
from thebes.model.decision import BEHIND, HOLDS, NO_GPUS, NO_PLACE, NOT_CHOSEN
from thebes.model.facts import COMMUNICATION, DISTRIBUTION, DURATIONS, NEEDS, PLANS, PROFILES, PROGRESS
from thebes.model.jobs import JOB
from thebes.model.parameters import parameters_of
from thebes.model.view import HiddenFromPolicy, JobsView
from thebes.placement import registry as placements
from thebes.policy import BUILT_IN, find, registry
from thebes.policy.orders.fifo import Backfill, Fifo
from thebes.policy.orders.tiresias import TiresiasG, TiresiasL
from thebes.policy.orders.tiresias_compat import TiresiasCompat
from thebes.sim.costs import FREE_OF_COST

POLICIES: dict[str, Policy] = {
    name: policy()
    for name, policy in registry().items()
    if name not in ("tiresias-compat", "las", "tiresias-l", "tiresias-g", "multi-dlas", "gittins")
    and PLANS not in policy.needs  # those have worlds of their own: test_policy_rubick.py and its neighbours
} | {
    "las": find("las")(quantum_s=7.0),
    "gittins": find("gittins")(quantum_s=10.0, delta_gpu_s=40.0),
    "tiresias-l": TiresiasL(queue_limits=(20.0, 60.0), promote_knob=2.0, promote_floor_s=10.0),
    "tiresias-g": TiresiasG(queue_limits=(20.0, 60.0), quantum_s=10.0),
    "multi-dlas": find("multi-dlas")(queue_limit=20.0, split_every_s=30.0),
    "themis": find("themis")(lease_s=15.0),
    "ftf": find("ftf")(round_s=15.0),
    **{name: find(name)(lease_s=100.0) for name in ("dally", "dally-manual", "dally-no-wait", "dally-consolidated")},
}
# These leave GPUs idle on purpose: in strict order, or while a job waits for closer ones.
NOT_WORK_CONSERVING = {"fifo", "dally", "dally-manual", "dally-consolidated"}


class Watched(Policy):
    """Another policy with somebody looking over its shoulder at every decision."""

    def __init__(self, policy: Policy, look: Any) -> None:
        self.policy, self.look = policy, look
        self.needs: Any = policy.needs
        self.shares: Any = policy.shares
        self.decisions = 0

    def decide(self, view: View) -> Decision:
        decision = self.policy.decide(view)
        self.look(self.policy, view, decision)
        self.decisions += 1
        return decision


def watch(trace: Trace, cluster: Any, policy: Policy, look: Any, **options: Any) -> Result:
    watched = Watched(policy, look)
    result = simulate(trace, cluster, watched, **options)
    assert watched.decisions > 0
    return result


def is_pure(policy: Policy, view: View, decision: Decision) -> None:
    """The same View, asked again, gives the same Decision, and asking changed nothing in the world."""
    owners = view.machine.gpus["owner"].copy()
    again = policy.decide(view)
    for field in fields(Decision):
        np.testing.assert_equal(getattr(again, field.name), getattr(decision, field.name), err_msg=field.name)
    np.testing.assert_array_equal(view.machine.gpus["owner"], owners)
    assert np.array_equal(view.jobs.rows[decision.fate == HOLDS], decision.rows)
    assert decision.wake_s > view.now_s


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(trace=workloads(most_gpus=4), placement=st.sampled_from(sorted(placements())))
@effort(8)
def test_a_policy_is_pure(name: str, trace: Trace, placement: str) -> None:
    watch(trace, mixed_cluster(), POLICIES[name], is_pure, placement=placement)


def leaves_nothing_idle(_: Policy, view: View, decision: Decision) -> None:
    """With GPUs only counted, nobody waits who would fit into what is left."""
    left = view.total_gpus - len(decision.gpus)
    waiting = ~np.isin(view.jobs.rows, decision.rows)
    assert (view.jobs.gpus[waiting] > left).all()


@pytest.mark.parametrize("name", sorted(set(POLICIES) - NOT_WORK_CONSERVING))
@given(trace=workloads(most_gpus=6))
@effort(12)
def test_policies_are_work_conserving(name: str, trace: Trace) -> None:
    watch(trace, from_short_form("3x2"), POLICIES[name], leaves_nothing_idle, placement="count")


@given(trace=workloads(most_gpus=6))
@effort(25)
def test_fifo_starts_in_order_of_submission(trace: Trace) -> None:
    result = simulate(trace, "3x2", "fifo")
    assert result.jobs["first_start_s"].is_sorted()
    assert result.metrics["preemptions"] == 0


def test_nothing_is_left_idle_where_kinds_are_mixed() -> None:
    """Given a demoted job on A100s and newcomers: they take GPUs that are idle, and nobody has to make room."""
    trace = trace_of((0, 3, 50), (5, 4, 10), (5, 2, 10), (5, 2, 10))
    policy = TiresiasL(queue_limits=(10.0,))
    watch(trace, mixed_cluster(), policy, leaves_nothing_idle, placement="count", costs=FREE_OF_COST)


# --- the placement ----------------------------------------------------------------------------------------------------


def seats(policy: Policy, placement: str) -> list[list[int]]:
    """The GPUs of every decision of a small run under this placement, whatever the policy says of it."""
    given: list[list[int]] = []
    trace = trace_of((0, 4, 90), (0, 2, 60), (5, 3, 90), (10, 4, 40), (20, 1, 30), model=["vgg19"] * 5)
    watch(trace, "3x4", policy, lambda _, __, decision: given.append(decision.gpus.tolist()), placement=placement)
    return given


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"ada-srsf", "srsf-1", "srsf-2", "srsf-3"}))
def test_a_policy_heeds_the_placement_or_says_that_it_does_not(name: str) -> None:
    policy = POLICIES[name]
    usual, others = seats(policy, "consolidate"), [seats(policy, other) for other in ("random", "yarn", "relaxed")]
    if "placement" in policy.ignores():
        assert all(other == usual for other in others)
    else:
        assert others[0] != usual


def test_a_simulation_notes_a_placement_that_has_no_effect() -> None:
    trace = trace_of((0, 1, 9))
    told = "dally does not use placement yarn: it offers GPUs by network tier, and a job accepts a tier or waits"
    assert told in simulate(trace, "1x2", "dally", placement="yarn").notes
    assert not any("placement" in note for note in simulate(trace, "1x2", "dally").notes)


# --- reasons ----------------------------------------------------------------------------------------------------------


def fates(trace: Trace, policy: Policy, cluster: str, at_s: float, **options: Any) -> list[int]:
    """What becomes of each job alive at one instant."""
    seen: list[list[int]] = []

    def look(_: Policy, view: View, decision: Decision) -> None:
        if view.now_s == at_s:
            seen.append(decision.fate.tolist())
            assert all(decision.reason(i) for i in range(len(decision.fate)))

    watch(trace, cluster, policy, look, **options)
    return seen[0]


class OnlyFirst(Policy):
    """Serves the job submitted first and nobody else."""

    def decide(self, view: View) -> Decision:
        return fill(view, np.arange(1))


def test_who_waits_is_told_why() -> None:
    crowd = trace_of((0, 1, 10), (0, 2, 10), (0, 1, 10))
    assert fates(crowd, Fifo(), "1x2", 0.0) == [HOLDS, NO_GPUS, BEHIND]
    assert fates(crowd, Backfill(), "1x2", 0.0) == [HOLDS, NO_GPUS, HOLDS]
    assert fates(crowd, OnlyFirst(), "1x4", 0.0) == [HOLDS, NOT_CHOSEN, NOT_CHOSEN]
    scattered = trace_of((0, 2, 9), (0, 2, 9), (1, 2, 9))
    assert fates(scattered, Backfill(), "2x3", 1.0, placement="yarn") == [HOLDS, HOLDS, NO_PLACE]


def test_reasons_in_words() -> None:
    decision = Decision(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.arange(5))
    assert [decision.reason(i) for i in range(5)] == [
        "holds its GPUs",
        "the GPUs it could use go to jobs before it in the order",
        "enough GPUs are free, but not where the placement rule wants them",
        "an earlier job must start first (strict order)",
        "the policy did not choose it",
    ]


# --- what a policy may see --------------------------------------------------------------------------------------------


# The fields of a record that the columns of a View show to everybody, or that rules for everybody go by (`want_nodes`,
# `holds`: the placement; `unread_s`, `aged_wait_s`: ticks and promotion). All others are hidden, those to come as well.
SHOWN = frozenset(
    """
    phase gpus width node_kind id min_gpus max_gpus submit_s kinds skew state_gib memory_gib model utilisation
    asked_plan asked_cpus guaranteed best_tier min_nodes want_nodes priority tenant suspend_s resume_s first_slot
    gang_class share plan cpus since_s run_from_s tier nodes holds executed_s age_s unread_s aged_wait_s waited_s
    first_start_s queue queue_since_s preemptions migrations resizes reconfigurations
    """.split()  # noqa: SIM905 - a word a field: quotes would hide the names
)
OF_FACT = {
    DURATIONS: frozenset({"work_s", "left_s", "kept_left_s", "finish_s"}),
    PROGRESS: frozenset({"speed", "progress_s", "full_s", "paced_s"}),
    COMMUNICATION: frozenset({"talked_s", "talk_share", "paced_s"}),
    PROFILES: frozenset({"profile"}),
    PLANS: frozenset({"asked_profile", "plan_profile", "host_gib"}),
}


def hidden_from(policy: Policy) -> list[str]:
    known = [OF_FACT.get(fact, frozenset()) for fact in (*policy.needs, *policy.uses)]
    return sorted(set(JOB.names or ()) - SHOWN.union(*known))


def with_lies(view: View, hidden: list[str], seed: int) -> View:
    """The same instant, but for what is hidden: nonsense stands there."""
    rng, jobs = np.random.default_rng(seed), view.jobs
    records = view.board.table.jobs.copy()
    for name in hidden:
        lies = rng.uniform(-1e4, 1e4, len(records)) if JOB[name].kind == "f" else rng.integers(0, 2, len(records))
        records[name] = lies.astype(JOB[name])
    table = view.board.table._replace(jobs=records)
    return replace(
        view,
        jobs=JobsView(table, jobs.rows, view.now_s, jobs.needs, jobs._tier_speeds, jobs.knowledge),
        board=view.board._replace(table=table),
    )


def is_blind(policy: Policy, view: View, decision: Decision) -> None:
    """Whatever stands in the fields that are hidden from it, the policy decides alike and remembers the same."""
    hidden = hidden_from(policy)
    assert {"work_s", "left_s", "kept_left_s", "finish_s", "event_s"} <= set(hidden)
    for seed in range(2):
        blind = policy.decide(with_lies(view, hidden, seed))
        for field in fields(Decision):
            np.testing.assert_equal(getattr(blind, field.name), getattr(decision, field.name), err_msg=field.name)


BLIND = {name: policy for name, policy in POLICIES.items() if DURATIONS not in policy.needs}


@pytest.mark.parametrize("name", sorted(BLIND))
@given(trace=workloads(most_gpus=4), placement=st.sampled_from(sorted(placements())))
@effort(6)
def test_what_is_hidden_from_a_policy_does_not_change_its_decisions(name: str, trace: Trace, placement: str) -> None:
    watch(trace, mixed_cluster(), BLIND[name], is_blind, placement=placement)


@pytest.mark.parametrize("name", sorted(name for name, policy in registry().items() if PLANS in policy.needs))
def test_what_is_hidden_from_a_policy_of_plans_does_not_change_its_decisions(name: str) -> None:
    jobs = [(30.0 * i, (1, 2, 4, 8)[i % 4], 300.0 + 200.0 * (i % 3)) for i in range(10)]
    models = [("gpt-2", "bert-large")[i % 2] for i in range(10)]
    watch(trace_of(*jobs, model=models), "2x8", registry()[name](), is_blind, perf="plans")


def test_a_policy_that_looks_into_the_records_is_found_out() -> None:
    class Spies(Policy):
        def decide(self, view: View) -> Decision:
            return fill(view, np.argsort(view.board.table.jobs["left_s"][view.jobs.rows], kind="stable"))

    with pytest.raises(UserError, match="Arrays are not equal"):
        watch(trace_of(*((0, 1, 10.0 + i) for i in range(6))), "1x2", Spies(), is_blind)


class Peeks(Policy):
    """Asks for a column that it did not declare."""

    def __init__(self, column: str, needs: frozenset[str] = frozenset()) -> None:
        self.column = column
        self.needs: Any = needs

    def decide(self, view: View) -> Decision:
        getattr(view.jobs, self.column)
        return fill(view, np.arange(len(view.jobs)))


@pytest.mark.parametrize("column", ["duration_s", "remaining_s"])
def test_durations_are_hidden_unless_declared(column: str) -> None:
    trace = trace_of((0, 1, 10))
    with pytest.raises(HiddenFromPolicy) as caught:
        simulate(trace, "1x1", Peeks(column))
    assert f"view.jobs.{column} is hidden: the policy does not declare that it needs 'durations'" in str(caught.value)
    assert 'needs = frozenset({"durations"})' in str(caught.value)
    assert simulate(trace, "1x1", Peeks(column, frozenset({DURATIONS}))).metrics["completed"] == 1


def test_the_service_of_finished_jobs_is_hidden_unless_declared() -> None:
    seen: dict[bool, list[list[float]]] = {True: [], False: []}

    class Looks(Policy):
        def decide(self, view: View) -> Decision:
            seen[DISTRIBUTION in self.needs].append(view.finished_gpu_s.tolist())
            return fill(view, np.arange(len(view.jobs)))

    class LooksOpenly(Looks):
        needs = frozenset({DISTRIBUTION})

    trace = trace_of((0, 2, 10), (20, 1, 5), (30, 1, 1))
    for policy in (Looks(), LooksOpenly()):
        simulate(trace, "1x2", policy, perf="ideal")
    assert seen[False] == [[], [], []]
    assert seen[True] == [[], [20.0], [20.0, 5.0]]


def test_only_oracles_and_gittins_declare_anything() -> None:
    declared = {policy.name: policy.needs for policy in BUILT_IN if policy.needs}
    assert declared == {
        "srtf": {DURATIONS},
        "srsf": {DURATIONS},
        "gittins": {DISTRIBUTION},
        "shortest-expected": {DISTRIBUTION},
        "tiresias-g": {DISTRIBUTION},
        "tiresias-compat": {DURATIONS, DISTRIBUTION},
        "themis": {DURATIONS, PROFILES},
        "ftf": {DURATIONS, PROFILES},
        **{name: {DURATIONS, PROFILES} for name in ("ada-srsf", "srsf-1", "srsf-2", "srsf-3")},
        **{name: {PLANS} for name in ("rubick", "rubick-e", "rubick-r", "rubick-n")},
        **{name: {PLANS} for name in ("sia-like", "synergy-like", "antman-like")},
    }
    assert set().union(*declared.values()) <= set(NEEDS)


def test_the_columns_of_a_view() -> None:
    """Given a job on 2 GPUs from 0 on and one that waits since then, a view at 10 shows what each has had."""
    views: list[dict[str, list[Any]]] = []
    columns = (
        "gpus", "submit_s", "running", "first_start_s", "since_s", "attained_s", "attained_gpu_s", "waited_s",
        "preemptions", "duration_s", "remaining_s",
    )  # fmt: skip

    class Notes(Policy):
        needs = frozenset({DURATIONS})

        def decide(self, view: View) -> Decision:
            views.append({name: getattr(view.jobs, name).tolist() for name in columns})
            assert (view.free_gpus, view.total_gpus) == (2 - view.jobs.gpus[view.jobs.running].sum(), 2)
            return fill(view, np.arange(len(view.jobs)), wake_s=10.0 if view.now_s < 10 else np.inf)

    simulate(trace_of((0, 2, 100), (0, 1, 7)), "1x2", Notes(), perf="ideal")
    assert views[1] == {
        "gpus": [2, 1],
        "submit_s": [0.0, 0.0],
        "running": [True, False],
        "first_start_s": [0.0, np.inf],
        "since_s": [0.0, 0.0],
        "attained_s": [10.0, 0.0],
        "attained_gpu_s": [20.0, 0.0],
        "waited_s": [0.0, 10.0],
        "preemptions": [0, 0],
        "duration_s": [100.0, 7.0],
        "remaining_s": [90.0, 7.0],
    }


# --- by name, and mistakes --------------------------------------------------------------------------------------------


def test_every_policy_has_a_name_a_description_and_documented_parameters() -> None:
    for policy in BUILT_IN:
        assert policy.name
        assert policy.paper
        assert policy.__doc__
        assert all(info.doc for info in parameters_of(policy).values())
        assert policy().label == policy.name


def test_a_policy_without_a_name_is_called_by_its_class() -> None:
    assert OnlyFirst().label == "OnlyFirst"


def test_a_policy_must_say_how_it_decides() -> None:
    class Mute(Policy):
        pass

    with pytest.raises(UserError, match=r"Mute does not say how it decides: write decide\(self, view\)"):
        simulate(trace_of((0, 1, 1)), "1x1", Mute())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: find("tiresias"), "unknown policy 'tiresias'\ndid you mean 'tiresias-l'?"),
        (lambda: find("zzz"), "unknown policy 'zzz'\nvalid names: "),
        (lambda: TiresiasL(queue_limits=(7200.0, 3250.0)), "tiresias: queue_limits=7200,3250 do not ascend\nwrite the"),
        (lambda: TiresiasG(queue_limits=(10.0, 10.0)), "tiresias: queue_limits=10,10 do not ascend"),
        (lambda: TiresiasL(order="random"), "tiresias-l: order=random is unknown\norder is start"),
        (lambda: find(":Mine"), "policy ':Mine' names no file or module\nwrite FILE.py:CLASS or package.module:CLASS"),
        (lambda: TiresiasCompat().decide(None), "tiresias-compat cannot decide on its own\nit runs only in the simul"),
    ],
)  # fmt: skip
def test_mistakes(make: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_policies_of_ones_own(tmp_path: Any) -> None:
    own = tmp_path / "own_policies.py"
    own.write_text("import thebes\nclass Mine(thebes.Policy):\n    pass\nclass Other:\n    pass\n")
    bad = tmp_path / "bad_policies.py"
    bad.write_text("import nothing_of_the_kind\n")
    assert find(f"{own}:Mine")().label == "Mine"
    for name, message in (
        (f"{own}:Nine", "own_policies.py has no class 'Nine'\ndid you mean 'Mine'?"),
        (f"{own}:Other", "own_policies.py:Other is not a policy\nderive the class from thebes.Policy"),
        (f"{tmp_path}/none.py:X", "none.py': no such file\nwrite FILE.py:CLASS"),
        (f"{bad}:X", "bad_policies.py' does not load: ModuleNotFoundError: No module named 'nothing_of_the_kind'"),
        ("nothing.at.all:X", "policy module 'nothing.at.all' does not load: No module named 'nothing'"),
    ):
        with pytest.raises(UserError) as caught:
            find(name)
        assert message in str(caught.value)
