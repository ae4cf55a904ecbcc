"""The partial-allocation auction: proportional fairness, hidden payments, leftovers (Themis spec, 2.2 and 5)."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.effort import effort
from thebes.model.errors import UserError
from thebes.policy.fairness.auction import NOTHING, AuctionResult, Bids, auction, leftovers, upper_bound, whole_gpus

VALUES = st.floats(0.05, 20.0)
TABLE = st.dictionaries(st.integers(1, 6), VALUES, min_size=1, max_size=3)  # GPUs -> value
BIDDER = st.tuples(VALUES, TABLE)  # value of nothing, table


def bids_of(*bidders: tuple[float, dict[int, float]]) -> Bids:
    rows = [(i, gpus, value) for i, (_, table) in enumerate(bidders) for gpus, value in sorted(table.items())]
    return Bids(
        np.array([row[0] for row in rows], dtype=np.int64),
        np.array([row[1] for row in rows], dtype=np.int64),
        np.array([row[2] for row in rows], dtype=np.float64),
        np.array([nothing for nothing, _ in bidders], dtype=np.float64),
    )


def best_by_hand(bidders: list[tuple[float, dict[int, float]]], capacity: int) -> float:
    """The largest product of values, by trying everything."""
    best = 0.0
    for choice in product(*([(0, nothing), *table.items()] for nothing, table in bidders)):
        if sum(gpus for gpus, _ in choice) <= capacity:
            best = max(best, float(np.prod([value for _, value in choice])))
    return best


def value_of(bids: Bids, outcome: AuctionResult, bidder: int) -> float:
    bundle = outcome.bundle[bidder]
    return float(bids.nothing[bidder] if bundle == NOTHING else bids.value[bundle])


def gpus_won(bids: Bids, outcome: AuctionResult) -> int:
    return int(bids.gpus[outcome.bundle[outcome.bundle != NOTHING]].sum())


@given(bidders=st.lists(BIDDER, min_size=1, max_size=5), capacity=st.integers(0, 12))
@effort(150)
def test_the_assignment_has_the_largest_product_of_values(bidders: Any, capacity: int) -> None:
    bids = bids_of(*bidders)
    outcome = auction(bids, capacity, payments=False)
    assert outcome.exact
    assert outcome.gap == 0.0
    assert np.isclose(np.exp(outcome.log_value), best_by_hand(bidders, capacity))
    reached = np.prod([value_of(bids, outcome, i) for i in range(len(bidders))])
    assert np.isclose(reached, np.exp(outcome.log_value))
    assert gpus_won(bids, outcome) <= capacity
    assert outcome.log_value <= upper_bound(bids, capacity) + 1e-9


@given(bidders=st.lists(BIDDER, min_size=1, max_size=6), capacity=st.integers(1, 14))
@effort(150)
def test_local_search_stays_below_its_bound_and_tells_its_gap(bidders: Any, capacity: int) -> None:
    bids = bids_of(*bidders)
    quick, exact = auction(bids, capacity, exact_up_to=0), auction(bids, capacity)
    assert gpus_won(bids, quick) <= capacity
    assert quick.log_value <= exact.log_value + 1e-9
    assert quick.log_value + quick.gap >= exact.log_value - 1e-9
    assert (quick.kept <= 1.0).all()


def test_local_search_is_close_on_large_instances() -> None:
    """Given 300 gangs that bid for 256 GPUs, greedy and local search come within a thousandth of the best gain."""
    draw = np.random.default_rng(0)
    gpus = draw.choice([1, 2, 4, 8, 16, 32], 300).astype(np.int64)
    nothing = draw.uniform(0.1, 1.0, 300)
    bids = Bids(np.arange(300), gpus, nothing * np.exp(draw.uniform(0.0, 0.5, 300)), nothing)
    exact, quick = auction(bids, 256, payments=False), auction(bids, 256, payments=False, exact_up_to=0)
    gained = exact.log_value - float(np.log(nothing).sum())
    assert not quick.exact
    assert exact.log_value - quick.log_value <= 0.001 * gained
    assert quick.gap <= 0.02 * gained


@given(
    bidders=st.lists(BIDDER, min_size=1, max_size=4),
    false=BIDDER,
    capacity=st.integers(1, 10),
    liar=st.integers(0, 3),
)
@effort(300)
def test_with_payments_a_false_rho_never_raises_the_own_value(
    bidders: Any, false: Any, capacity: int, liar: int
) -> None:
    """Given honest tables, when one bidder reports another value for each of its bundles, it is not better off.

    What it has in the end is its true value of what it won, times the share c that the payment leaves (spec 5, 3).
    """
    liar %= len(bidders)
    table = bidders[liar][1]
    reports = list(false[1].values())
    lie = (false[0], {gpus: reports[at % len(reports)] for at, gpus in enumerate(sorted(table))})
    truth = bids_of(*bidders)
    told = bids_of(*(lie if i == liar else bidder for i, bidder in enumerate(bidders)))
    honest, dishonest = auction(truth, capacity), auction(told, capacity)
    honest_value = value_of(truth, honest, liar) * honest.kept[liar]
    false_value = value_of(truth, dishonest, liar) * dishonest.kept[liar]
    assert false_value <= honest_value * (1 + 1e-9)


@given(bidders=st.lists(BIDDER, min_size=1, max_size=5), capacity=st.integers(1, 10))
@effort(100)
def test_the_hidden_payment_is_what_the_others_lose(bidders: Any, capacity: int) -> None:
    """c = product of the others' values, over what that product would be without the bidder; 1 for who wins nothing."""
    bids = bids_of(*bidders)
    outcome = auction(bids, capacity)
    for i in range(len(bidders)):
        if outcome.bundle[i] == NOTHING:
            assert outcome.kept[i] == 1.0
            continue
        others = np.prod([value_of(bids, outcome, j) for j in range(len(bidders)) if j != i])
        without = best_by_hand([bidder for j, bidder in enumerate(bidders) if j != i], capacity)
        assert np.isclose(outcome.kept[i], others / without)


@given(bidders=st.lists(BIDDER, min_size=1, max_size=5), capacity=st.integers(1, 10))
@effort(50)
def test_without_payments_every_winner_keeps_all(bidders: Any, capacity: int) -> None:
    assert (auction(bids_of(*bidders), capacity, payments=False).kept == 1.0).all()


def test_a_payment_by_hand() -> None:
    """Given two who double their value with 2 GPUs and one with 1, on 2 GPUs: the first wins, and pays one half."""
    bids = bids_of((1.0, {2: 3.0}), (1.0, {2: 2.0}), (1.0, {1: 1.2}))
    outcome = auction(bids, 2)
    assert outcome.bundle.tolist() == [0, NOTHING, NOTHING]
    assert outcome.kept.tolist() == pytest.approx([1 / 2, 1.0, 1.0])
    assert whole_gpus(bids, outcome).tolist() == [1, 0, 0]


def test_nobody_takes_what_is_worth_less_than_nothing() -> None:
    assert auction(bids_of((1.0, {2: 0.5})), 4).bundle.tolist() == [NOTHING]


@given(left=st.integers(0, 40), wants=st.lists(st.integers(0, 12), min_size=1, max_size=6))
@effort(100)
def test_leftovers_go_round_until_nobody_can_use_more(left: int, wants: list[int]) -> None:
    given_gpus = leftovers(left, np.array(wants))
    assert (given_gpus <= wants).all()
    assert given_gpus.sum() == min(left, sum(wants))
    unserved = [gpus for gpus, want in zip(given_gpus, wants, strict=True) if gpus < want]
    assert not unserved or max(given_gpus) - min(unserved) <= 1  # one at a time, in turn


@pytest.mark.parametrize(
    ("bids", "message"),
    [
        (lambda: bids_of((0.0, {1: 1.0})), "an auction has a bid that is not above 0 and finite\na value is 1/rho"),
        (lambda: bids_of((1.0, {1: np.inf})), "an auction has a bid that is not above 0 and finite"),
        (lambda: bids_of((1.0, {0: 1.0})), "an auction's bundles are not in order of bidders, or empty\nsort them"),
    ],
)
def test_bids_that_make_no_sense(bids: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        bids()
    assert str(caught.value).startswith(message)
