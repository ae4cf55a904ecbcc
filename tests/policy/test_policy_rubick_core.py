"""Rubick's core on curves written down by hand: slopes, the 1 % rule, transactions on nodes, CPUs, the guard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.effort import effort
from thebes.policy.rubick.board import BY_SLOPE, NOWHERE, PROMISED, STARVED, BoardJob, Seat, SeatBoard
from thebes.policy.rubick.cpus import deal_cpus
from thebes.policy.rubick.curves import BestPlanAt, DemandCurve, Footing, Room, slope
from thebes.policy.rubick.guard import burden, guarded, next_round_s
from thebes.policy.rubick.round import Rules, expand, mend, replan, schedule

ROOM = Room(nodes=4, gpus=8, cpus=96, host_gib=1600.0)
ONE_NODE = ROOM._replace(nodes=1)


def rates(**by_gpus: float) -> BestPlanAt:
    """`rates(g1=1.0, g2=1.8)`: a job that runs on one GPU or two; every node more costs a tenth."""
    table = {int(name[1:]): rate for name, rate in by_gpus.items()}

    def look(gpus: int, nodes: int, cpus: int) -> Footing | None:
        return Footing(table[gpus] * 0.9 ** (nodes - 1), cpus, 0.0, 100 + gpus) if gpus in table else None

    return look


def power(exponent: float, scale: float = 1.0, host_gib: float = 0.0) -> BestPlanAt:
    """Throughput grows as a power of the GPUs: 1 is linear, 0 does not grow at all."""

    def look(gpus: int, nodes: int, cpus: int) -> Footing | None:
        return Footing(scale * gpus**exponent * 0.95 ** (nodes - 1), cpus, host_gib, 100 + gpus)

    return look


def offloading(gpus: int, nodes: int, cpus: int) -> Footing:
    """Half of an iteration on 12 CPUs is the update on the host, which goes as 1 / CPUs."""
    return Footing(gpus * 2.0 / (1.0 + 12.0 / cpus) * 0.9 ** (nodes - 1), cpus, 100.0, 7)


def curve_of(
    look: BestPlanAt, room: Room = ROOM, levels: range | tuple[int, ...] = range(1, 33), sla: float = 0.0
) -> DemandCurve:
    return DemandCurve([g for g in levels if g <= room.nodes * room.gpus], look, room, sla=sla)


def held(curve: DemandCurve, nodes: tuple[int, ...], each: int) -> Seat:
    footing = curve.footing((len(nodes), each))
    assert footing is not None
    return Seat(nodes, (each,) * len(nodes), footing)


def board_of(room: Room, jobs: list[BoardJob], seats: list[Seat], **options: Any) -> SeatBoard:
    free = [room.gpus] * room.nodes
    for seat in seats:
        for node, count in zip(seat.nodes, seat.counts, strict=True):
            free[node] -= count
    return SeatBoard(room, free, jobs, seats, **options)


# --- curves -----------------------------------------------------------------------------------------------------------


def test_a_slope_is_the_gain_per_gpu_over_the_reference() -> None:
    curve = curve_of(rates(g1=1.0, g2=1.8, g4=2.4))
    assert slope(curve, 1, 1) == pytest.approx(0.8)
    assert slope(curve, 2, 2) == pytest.approx(0.3)
    assert slope(curve, 4, -2) == pytest.approx(0.3)
    assert slope(curve, 1, -1) == pytest.approx(1.0)


def test_spec_8_3_a_level_that_fewer_gpus_come_within_one_percent_of_does_not_exist() -> None:
    """Given 3 GPUs that bring 0.9 % over 2, and 4 that bring 2 %, when levels are made, then 3 is none and 4 is one."""
    curve = curve_of(rates(g1=1.0, g2=1.8, g3=1.8 * 1.009, g4=1.8 * 1.02))
    assert curve.levels == (1, 2, 4)


def test_spec_8_3_a_job_holds_only_levels() -> None:
    curve = curve_of(rates(g1=1.0, g2=1.8, g3=1.81, g4=1.815), ONE_NODE)
    board = board_of(ONE_NODE, [BoardJob(curve)], [NOWHERE])
    schedule(board, [], [], [0], Rules())
    expand(board, Rules())
    assert board.seats[0].gpus == 2


def test_the_promise_counts_before_the_one_percent_rule() -> None:
    """Given an SLA that 4 GPUs meet and 3 miss by half a percent, then minRes is 4."""
    look = rates(g1=1.0, g2=1.8, g3=2.388, g4=2.4)
    assert curve_of(look).levels == (1, 2, 3)
    assert curve_of(look, sla=2.4).least == 4


def test_another_plan_than_the_users_own_must_be_expected_to_be_faster_by_more_than_the_doubt() -> None:
    """Given a promise of 2.0 on 4 GPUs and a best plan that is predicted 5 % faster, then doubt decides who runs."""
    best, own = rates(g3=1.95, g4=2.1), rates(g4=2.0)

    def own_plan(gpus: int, nodes: int, cpus: int) -> Footing | None:
        found = own(gpus, nodes, cpus)
        return found and found._replace(plan=1)

    sure, doubtful = (DemandCurve(range(1, 9), best, ROOM, sla=2.0, own=own_plan, doubt=doubt) for doubt in (0.0, 0.1))
    assert sure.footing((1, 4)) == Footing(2.1, 1, 0.0, 104)
    assert doubtful.footing((1, 4)) == Footing(2.0, 1, 0.0, 1)
    assert sure.levels == doubtful.levels == (4,)


def test_the_smallest_allocation_that_keeps_the_promise_may_be_smaller_than_what_was_asked() -> None:
    assert curve_of(power(0.5), sla=8**0.5 * 0.5).least == 2


def test_cpus_beyond_the_share_of_a_gpu_are_taken_only_for_a_promise() -> None:
    best_effort, promised = curve_of(offloading), curve_of(offloading, levels=(2,), sla=3.0)
    assert best_effort.footing((1, 2)) == offloading(2, 1, 12)  # its share: 12 CPUs for a GPU
    found = promised.footing((1, 2))
    assert found is not None
    assert found.cpus == 36  # 2 x 2 / (1 + 12 / 36) = 3
    assert promised.footing((1, 8)) == offloading(8, 1, 12)  # more GPUs do not need them


def test_a_job_that_needs_no_cpus_holds_one_per_gpu() -> None:
    found = curve_of(power(1.0)).footing((1, 4))
    assert found is not None
    assert found.cpus == 1


def test_shapes_spread_evenly_and_come_fastest_first() -> None:
    curve = curve_of(power(1.0))
    assert [shape for shape, _ in curve.shapes(16)] == [(2, 8), (4, 4)]
    assert [shape for shape, _ in curve.shapes(4)] == [(1, 4), (2, 2), (4, 1)]
    assert curve.shapes(5) == (((1, 5), Footing(5.0, 1, 0.0, 105)),)  # 5 divides by nothing that has room
    assert 9 not in curve.levels or curve.shapes(9)[0][0] == (3, 3)


# --- steeper curves take from flatter ones ----------------------------------------------------------------------------


def test_spec_8_4_gpus_move_to_the_steeper_curve() -> None:
    """Given a flat job on all 8 GPUs, when a steep one comes, then it takes GPUs until the flat one is steeper."""
    flat, steep = curve_of(power(0.3), ONE_NODE), curve_of(power(0.9), ONE_NODE)
    board = board_of(ONE_NODE, [BoardJob(flat, running=True), BoardJob(steep)], [held(flat, (0,), 8), NOWHERE])
    schedule(board, [], [], [1], Rules())
    expand(board, Rules())
    few, many = board.seats[0].gpus, board.seats[1].gpus
    assert few + many == 8
    assert 1 <= few < many
    assert slope(flat, few, -1) * 1.2 > slope(steep, many, 1)


def test_nobody_gives_gpus_to_a_flatter_curve() -> None:
    flat, steep = curve_of(power(0.3, scale=0.1), ONE_NODE), curve_of(power(0.9), ONE_NODE)
    board = board_of(ONE_NODE, [BoardJob(steep, running=True), BoardJob(flat)], [held(steep, (0,), 8), NOWHERE])
    schedule(board, [], [], [1], Rules())
    expand(board, Rules())
    assert board.seats == [held(steep, (0,), 8), NOWHERE]


def test_equal_curves_are_left_alone() -> None:
    """Given equal jobs on 1 GPU each, then nobody is evicted for another of its kind (no livelock)."""
    curve = curve_of(power(0.8), ONE_NODE)
    jobs = [BoardJob(curve, running=True) for _ in range(8)] + [BoardJob(curve)]
    board = board_of(ONE_NODE, jobs, [held(curve, (0,), 1) for _ in range(8)] + [NOWHERE])
    schedule(board, [], [], [8], Rules())
    expand(board, Rules())
    assert [seat.gpus for seat in board.seats] == [1] * 8 + [0]


def test_a_large_gang_is_not_evicted_for_one_gpu() -> None:
    """Given a gang that cannot run on fewer than 8 GPUs, then one GPU is not worth what all of it brings."""
    gang, small = curve_of(rates(g8=1.0), ONE_NODE), curve_of(rates(g1=0.5), ONE_NODE)
    board = board_of(ONE_NODE, [BoardJob(gang, running=True), BoardJob(small)], [held(gang, (0,), 8), NOWHERE])
    schedule(board, [], [], [1], Rules())
    assert board.seats[0].gpus == 8


def test_expand_only_takes_nothing_from_anybody() -> None:
    flat, steep = curve_of(power(0.3), ONE_NODE), curve_of(power(0.9), ONE_NODE)
    board = board_of(ONE_NODE, [BoardJob(flat, running=True), BoardJob(steep)], [held(flat, (0,), 8), NOWHERE])
    schedule(board, [], [], [1], Rules(shrink=False))
    expand(board, Rules(shrink=False))
    assert [seat.gpus for seat in board.seats] == [8, 0]


def test_the_guard_of_a_victim_is_heeded() -> None:
    flat, steep = curve_of(power(0.3), ONE_NODE), curve_of(power(0.9), ONE_NODE)
    jobs = [BoardJob(flat, running=True, guarded=True), BoardJob(steep)]
    board = board_of(ONE_NODE, jobs, [held(flat, (0,), 8), NOWHERE])
    schedule(board, [], [], [1], Rules())
    expand(board, Rules())
    assert [seat.gpus for seat in board.seats] == [8, 0]


def test_free_gpus_go_to_the_steepest_curve() -> None:
    flat, steep = curve_of(power(0.3), ONE_NODE), curve_of(power(0.9), ONE_NODE)
    board = board_of(ONE_NODE, [BoardJob(flat), BoardJob(steep)], [NOWHERE, NOWHERE])
    schedule(board, [], [], [1, 0], Rules())
    expand(board, Rules())
    assert [seat.gpus for seat in board.seats] == [1, 7]


def test_expand_moves_a_gang_to_more_nodes_evenly() -> None:
    curve = curve_of(power(0.9))
    board = board_of(ROOM, [BoardJob(curve)], [NOWHERE])
    schedule(board, [], [], [0], Rules())
    expand(board, Rules())
    assert board.seats[0].counts == (8, 8, 8, 8)


def test_a_running_job_is_not_restarted_for_little() -> None:
    curve = curve_of(rates(g4=1.0, g8=1.05), ONE_NODE)
    board = board_of(ONE_NODE, [BoardJob(curve, running=True)], [held(curve, (0,), 4)])
    expand(board, Rules(worth_moving=0.1))
    assert board.seats[0].gpus == 4
    expand(board, Rules(worth_moving=0.04))
    assert board.seats[0].gpus == 8


def test_a_best_effort_job_does_not_start_where_it_would_crawl() -> None:
    """Given one free GPU on which a job reaches a tenth of its usual speed per GPU, then it waits, unless starved."""
    curve, other = curve_of(rates(g1=0.0125, g8=1.0), ONE_NODE), curve_of(power(1.0), ONE_NODE)
    jobs, seats = [BoardJob(other, running=True, protected=True), BoardJob(curve)], [held(other, (0,), 7), NOWHERE]
    board = board_of(ONE_NODE, jobs, seats)
    schedule(board, [], [], [1], Rules())
    assert board.seats[1] is NOWHERE
    schedule(board, [], [1], [], Rules())
    assert board.seats[1].gpus == 1


# --- promises ---------------------------------------------------------------------------------------------------------


def test_a_guaranteed_job_takes_what_it_was_promised_from_best_effort_jobs() -> None:
    """Given steep and young best-effort jobs everywhere, then a guaranteed job still gets its minRes, and no more."""
    steep, promised = curve_of(power(1.0), ONE_NODE), curve_of(power(0.5), ONE_NODE, sla=2.0)
    jobs = [BoardJob(steep, running=True, guarded=True), BoardJob(promised, guaranteed=True)]
    board = board_of(ONE_NODE, jobs, [held(steep, (0,), 8), NOWHERE])
    schedule(board, [1], [], [], Rules())
    expand(board, Rules())
    assert [seat.gpus for seat in board.seats] == [4, 4]


def test_a_guaranteed_victim_keeps_its_promise() -> None:
    promised = curve_of(power(0.5), ONE_NODE, sla=2.0)
    jobs = [
        BoardJob(promised, guaranteed=True, running=True),
        BoardJob(curve_of(power(1.0), ONE_NODE), guaranteed=True),
    ]
    board = board_of(ONE_NODE, jobs, [held(promised, (0,), 8), NOWHERE])
    schedule(board, [1], [], [], Rules())
    expand(board, Rules())
    assert board.seats[0].gpus == 4
    assert board.seats[1].gpus == 4


def test_a_guaranteed_job_below_its_promise_comes_first() -> None:
    """Given a guaranteed job that a new fit shows to be too slow, then it gets more, whatever its guard says."""
    promised, other = curve_of(power(1.0), ONE_NODE, sla=4.0), curve_of(power(1.0), ONE_NODE)
    slow = Seat((0,), (2,), Footing(2.0, 1, 0.0, 102))
    jobs = [BoardJob(promised, guaranteed=True, running=True, guarded=True), BoardJob(other, running=True)]
    board = board_of(ONE_NODE, jobs, [slow, held(other, (0,), 6)])
    mend(board, Rules())
    assert [seat.gpus for seat in board.seats] == [4, 4]


def test_a_transaction_that_fails_changes_nothing() -> None:
    """Given victims that could give some GPUs but not enough, then none of them gives any."""
    flat, gang = curve_of(power(0.1), ONE_NODE), curve_of(rates(g8=100.0), ONE_NODE)
    jobs = [BoardJob(flat, running=True), BoardJob(flat, running=True, protected=True), BoardJob(gang)]
    seats = [held(flat, (0,), 4), held(flat, (0,), 4), NOWHERE]
    board = board_of(ONE_NODE, jobs, seats)
    free_cpus, free_gib = list(board.free_cpus), list(board.free_gib)
    assert not board.claim(2, 8)
    assert not board.claim(2, 8, STARVED)
    assert (board.seats, board.free, board.free_cpus, board.free_gib) == (seats, [0], free_cpus, free_gib)


def test_who_lost_all_its_gpus_may_go_on_elsewhere() -> None:
    """Given a node that a gang needs whole, then a small job on it moves to a free GPU."""
    small, gang = curve_of(rates(g1=0.1)), curve_of(rates(g8=4.0))
    wall = curve_of(rates(g7=7.0))
    jobs = [BoardJob(small, running=True), BoardJob(gang)] + [
        BoardJob(wall, running=True, guarded=True) for _ in range(3)
    ]
    seats = [held(small, (0,), 1), NOWHERE] + [held(wall, (node,), 7) for node in (1, 2, 3)]
    board = board_of(ROOM, jobs, seats)
    schedule(board, [], [], [1], Rules())
    assert board.seats[1].nodes == (0,)
    assert board.seats[0].nodes != (0,)
    assert board.seats[0].gpus == 1


# --- starvation -------------------------------------------------------------------------------------------------------


def test_a_starved_job_takes_from_best_effort_jobs_by_force() -> None:
    steep, flat = curve_of(power(1.0), ONE_NODE), curve_of(rates(g8=0.1), ONE_NODE)
    jobs = [BoardJob(steep, running=True, guarded=True), BoardJob(flat)]
    board = board_of(ONE_NODE, jobs, [held(steep, (0,), 8), NOWHERE])
    assert schedule(board, [], [1], [], Rules()) == [1]
    assert [seat.gpus for seat in board.seats] == [0, 8]


def test_a_starved_job_takes_nothing_from_guaranteed_jobs_or_from_protected_ones() -> None:
    promised, flat = curve_of(power(1.0), ONE_NODE, sla=4.0), curve_of(rates(g8=0.1), ONE_NODE)
    for victim in (BoardJob(promised, guaranteed=True, running=True), BoardJob(promised, protected=True, running=True)):
        board = board_of(ONE_NODE, [victim, BoardJob(flat)], [held(promised, (0,), 4), NOWHERE])
        assert schedule(board, [], [1], [], Rules()) == []
        assert [seat.gpus for seat in board.seats] == [4, 0]


def test_a_promise_goes_before_protection() -> None:
    steep, promised = curve_of(power(1.0), ONE_NODE), curve_of(power(1.0), ONE_NODE, sla=4.0)
    jobs = [BoardJob(steep, running=True, protected=True), BoardJob(promised, guaranteed=True)]
    board = board_of(ONE_NODE, jobs, [held(steep, (0,), 8), NOWHERE])
    schedule(board, [1], [], [], Rules())
    assert [seat.gpus for seat in board.seats] == [4, 4]


def test_nobody_behind_the_first_starved_job_takes_by_force() -> None:
    """Given a starved gang that still waits for a protected job, then a starved small one does not take its place."""
    steep, gang, small = (curve_of(look, ONE_NODE) for look in (power(1.0), rates(g8=0.1), rates(g1=0.01)))
    jobs = [
        BoardJob(steep, running=True, protected=True),
        BoardJob(steep, running=True),
        BoardJob(gang),
        BoardJob(small),
    ]
    board = board_of(ONE_NODE, jobs, [held(steep, (0,), 4), held(steep, (0,), 4), NOWHERE, NOWHERE])
    assert schedule(board, [], [2, 3], [], Rules()) == []
    assert [seat.gpus for seat in board.seats] == [4, 4, 0, 0]


def test_force_hits_those_first_whom_restarts_have_cost_least() -> None:
    """Given two equal young jobs, one of them restarted often, then the other gives its GPUs up."""
    steep, promised = curve_of(power(1.0), ONE_NODE), curve_of(power(1.0), ONE_NODE, sla=4.0)
    often, seldom = (BoardJob(steep, running=True, guarded=True, burden=burden) for burden in (0.5, 0.05))
    board = board_of(
        ONE_NODE,
        [often, seldom, BoardJob(promised, guaranteed=True)],
        [held(steep, (0,), 4), held(steep, (0,), 4), NOWHERE],
    )
    schedule(board, [2], [], [], Rules())
    assert [seat.gpus for seat in board.seats] == [4, 0, 4]
    assert [board.is_displaced(j) for j in range(3)] == [False, True, False]


def test_changes_that_were_forced_upon_a_job_do_not_keep_it_from_growing() -> None:
    curve = curve_of(power(1.0), ONE_NODE)
    for rooted, gpus in ((False, 8), (True, 1)):
        board = board_of(ONE_NODE, [BoardJob(curve, running=True, guarded=True, rooted=rooted)], [held(curve, (0,), 1)])
        expand(board, Rules())
        assert board.seats[0].gpus == gpus


# --- CPUs, host memory ------------------------------------------------------------------------------------------------


def test_free_cpus_go_to_the_job_that_they_speed_up_most() -> None:
    """Given an offloading job on 2 GPUs beside one that needs none, then it has more than its share of 24 CPUs."""
    first, other = curve_of(offloading, ONE_NODE), curve_of(power(1.0), ONE_NODE)
    jobs = [BoardJob(first, running=True), BoardJob(other, running=True)]
    board = board_of(ONE_NODE, jobs, [held(first, (0,), 2), held(other, (0,), 6)])
    deal_cpus(board, lambda j, cpus: offloading(2, 1, cpus) if j == 0 else Footing(6.0, cpus, 0.0, 106))
    assert 12 < board.seats[0].footing.cpus <= 45
    assert board.seats[1].footing.cpus == 1
    assert board.free_cpus[0] >= 0
    more = offloading(2, 1, board.seats[0].footing.cpus + 1).rate
    assert board.free_cpus[0] < 2 or more * 0.99 < board.seats[0].footing.rate


def test_host_memory_limits_how_many_jobs_a_node_takes() -> None:
    room = ONE_NODE._replace(host_gib=250.0)
    curve = DemandCurve((1,), power(1.0, host_gib=100.0), room)
    board = board_of(room, [BoardJob(curve)] * 4, [NOWHERE] * 4)
    schedule(board, [], [], [0, 1, 2, 3], Rules())
    assert [seat.gpus for seat in board.seats] == [1, 1, 0, 0]


# --- the guard --------------------------------------------------------------------------------------------------------


def test_the_guard_leaves_young_jobs_alone_and_old_ones_ever_longer() -> None:
    """Given a restart of 62 s and 97 %, then the first is allowed after 2,067 s, the second after 4,133 s."""
    ran_s, changes = np.array([0.0, 2066.0, 2067.0, 4133.0, 4134.0]), np.array([0, 0, 0, 1, 1])
    assert guarded(ran_s, changes, np.full(5, 62.0), 0.97).tolist() == [True, True, False, True, False]


def test_the_burden_is_what_restarts_cost_of_the_running_time() -> None:
    shares = burden(np.array([0.0, 620.0, 620.0]), np.array([0, 0, 4]), np.array([62.0, 62.0, 62.0]))
    assert shares.tolist() == [np.inf, 0.1, 0.5]
    assert burden(np.zeros(1), np.zeros(1, dtype=np.int64), np.zeros(1)).tolist() == [0.0]


def test_what_costs_nothing_is_not_guarded() -> None:
    assert not guarded(np.zeros(1), np.zeros(1, dtype=np.int64), np.zeros(1), 0.97).any()
    assert not guarded(np.zeros(1), np.zeros(1, dtype=np.int64), np.zeros(1), 1.0).any()


def test_rounds_are_multiples_of_their_length() -> None:
    assert next_round_s(0.0, 0.0, 60.0) == 60.0
    assert next_round_s(60.0, 60.0, 60.0) == 120.0
    assert next_round_s(61.0, 200.0, 60.0) == 240.0
    assert next_round_s(0.0, np.inf, 60.0) == np.inf


# --- whatever the jobs ------------------------------------------------------------------------------------------------


@st.composite
def boards(draw: st.DrawFn, override: bool = True) -> tuple[SeatBoard, dict[str, list[int]]]:
    """A cluster with some jobs running and others waiting, of all sorts."""
    room = Room(draw(st.integers(1, 4)), draw(st.sampled_from([2, 4, 8])), draw(st.sampled_from([16, 96])), 500.0)
    kinds = [
        (power(draw(st.floats(0.05, 1.1)), draw(st.floats(0.1, 3.0)), draw(st.sampled_from([0.0, 60.0]))), levels)
        for levels in (tuple(range(1, 33)), (1, 2, 4, 8, 16, 32), (4, 8, 12, 24))
    ] + [(offloading, (1, 2, 3, 4, 8))]
    jobs, seats, free = list[BoardJob](), list[Seat](), [room.gpus] * room.nodes
    cpus, gib = [room.cpus] * room.nodes, [room.host_gib] * room.nodes
    for _ in range(draw(st.integers(1, 16))):
        look, levels = draw(st.sampled_from(kinds))
        guaranteed = draw(st.booleans())
        rate = (found.rate for g in levels if g <= room.gpus for found in [look(g, 1, 1)] if found)
        curve = curve_of(look, room, levels, sla=min(rate, default=0.5) if guaranteed else 0.0)
        if not curve.levels:
            continue
        seat = NOWHERE
        if draw(st.booleans()):
            for shape, footing in curve.shapes(draw(st.sampled_from(curve.levels))):
                able = [
                    n
                    for n in range(room.nodes)
                    if free[n] >= shape[1]
                    and cpus[n] >= shape[1] * footing.cpus
                    and gib[n] >= shape[1] * footing.host_gib
                ]
                if len(able) >= shape[0]:
                    seat = Seat(tuple(able[: shape[0]]), (shape[1],) * shape[0], footing)
                    for n in seat.nodes:
                        free[n] -= shape[1]
                        cpus[n] -= shape[1] * footing.cpus
                        gib[n] -= shape[1] * footing.host_gib
                    break
        guarded = draw(st.booleans())
        jobs.append(
            BoardJob(
                curve,
                tenant=draw(st.integers(0, 1)),
                guaranteed=guaranteed,
                running=bool(seat.nodes),
                guarded=guarded,
                rooted=guarded and draw(st.booleans()),
                burden=draw(st.floats(0.03, 1.0)),
                protected=draw(st.booleans()),
            )
        )
        seats.append(seat)
    waiting = [j for j, seat in enumerate(seats) if not seat.nodes]
    queues = {
        "guaranteed": [j for j in waiting if jobs[j].guaranteed],
        "starved": [j for j in waiting if not jobs[j].guaranteed and draw(st.booleans())],
    }
    queues["best_effort"] = [j for j in waiting if not jobs[j].guaranteed and j not in queues["starved"]]
    return board_of(room, jobs, seats, quotas=(10_000, 10_000), override=override), queues


def play(board: SeatBoard, queues: dict[str, list[int]], rules: Rules) -> None:
    mend(board, rules)
    schedule(board, queues["guaranteed"], queues["starved"], queues["best_effort"], rules)
    replan(board, rules)
    expand(board, rules)
    deal_cpus(board, lambda j, cpus: board.jobs[j].curve.with_cpus((1, board.seats[j].gpus), cpus))


def is_consistent(board: SeatBoard) -> None:
    """What is free and what is held add up to what there is, on every node."""
    room = board.room
    gpus, cpus, gib = [0] * room.nodes, [0] * room.nodes, [0.0] * room.nodes
    for j, seat in enumerate(board.seats):
        assert len(seat.nodes) == len(set(seat.nodes))
        for node, count in zip(seat.nodes, seat.counts, strict=True):
            gpus[node] += count
            cpus[node] += count * seat.footing.cpus
            gib[node] += count * seat.footing.host_gib
            assert j in board.residents[node]
    assert [free + held for free, held in zip(board.free, gpus, strict=True)] == [room.gpus] * room.nodes
    assert [free + held for free, held in zip(board.free_cpus, cpus, strict=True)] == [room.cpus] * room.nodes
    assert min(board.free) >= 0
    assert min(board.free_cpus) >= 0
    assert min(board.free_gib) >= -1e-6
    assert max(gib) <= room.host_gib + 1e-6
    assert board.total_free == sum(board.free)


@given(data=st.data(), shrink=st.booleans(), override=st.booleans())
@effort(250)
def test_a_round_keeps_within_every_node_and_keeps_every_promise(
    data: st.DataObject, shrink: bool, override: bool
) -> None:
    board, queues = data.draw(boards(override))
    before = list(board.seats)
    play(board, queues, Rules(shrink=shrink))
    is_consistent(board)
    for job, old, new in zip(board.jobs, before, board.seats, strict=True):
        if job.guaranteed and (new.nodes or old.nodes):
            assert new.footing.rate >= job.curve.sla * (1 - 1e-9)
        if new.nodes:
            assert min(new.counts) == max(new.counts)
        if job.guarded and job.running and (job.guaranteed or not override or not shrink):
            assert new.gpus >= old.gpus
            if job.rooted:
                assert (new.nodes, new.counts) == (old.nodes, old.counts)
        if job.protected and job.running and not queues["guaranteed"]:
            assert new.gpus >= old.gpus
        if not shrink:
            assert new.gpus >= old.gpus


@given(drawn=boards(), data=st.data())
@effort(100)
def test_a_transaction_does_all_or_nothing(drawn: tuple[SeatBoard, dict[str, list[int]]], data: st.DataObject) -> None:
    board, _ = drawn
    waiting = [j for j, seat in enumerate(board.seats) if not seat.nodes]
    if not waiting:
        return
    j = data.draw(st.sampled_from(waiting))
    level = data.draw(st.sampled_from(board.jobs[j].curve.levels))
    before = (list(board.seats), list(board.free), list(board.free_cpus), [set(there) for there in board.residents])
    if board.claim(j, level, data.draw(st.sampled_from([BY_SLOPE, STARVED, PROMISED]))):
        assert board.seats[j].gpus == level
        is_consistent(board)
    else:
        assert (board.seats, board.free, board.free_cpus, board.residents) == before


@given(drawn=boards())
@effort(50)
def test_the_same_round_again_gives_the_same(drawn: tuple[SeatBoard, dict[str, list[int]]]) -> None:
    board, queues = drawn
    jobs, seats = list(board.jobs), list(board.seats)
    twin = board_of(board.room, jobs, seats, quotas=(10_000, 10_000))
    for one in (board, twin):
        play(one, queues, Rules())
    assert board.seats == twin.seats
