"""Who may call home, what a sealed line withstands, and when a node that is cut off stops its jobs."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thebes.protocol import lease as lease_file
from thebes.protocol.lease import Lease, over_s
from thebes.protocol.seal import BadSeal, Caller, LineSeal, Proofs, check_door, mac, same

KEY = b"k" * 32


@given(st.binary(max_size=200), st.lists(st.binary(max_size=100), max_size=4))
def test_the_keyed_hash_is_that_of_rfc_2104(key: bytes, parts: list[bytes]) -> None:
    text = b"".join(b"%d:%s" % (len(part), part) for part in parts)
    assert mac(key, *parts) == hmac.new(key, text, hashlib.sha256).hexdigest()


def test_strings_are_the_same_or_not() -> None:
    assert same("abc", "abc")
    assert not same("abc", "abd")
    assert not same("abc", "abcd")


def ends() -> tuple[LineSeal, LineSeal]:
    session = Proofs(KEY, "node:n1", "1", "2", 3).session
    return LineSeal(session, is_door=True), LineSeal(session, is_door=False)


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=50).filter(lambda text: b"\n" not in text)), max_size=20))
def test_what_one_end_wraps_the_other_unwraps(lines: list[tuple[bool, bytes]]) -> None:
    door, caller = ends()
    for from_door, text in lines:
        says, hears = (door, caller) if from_door else (caller, door)
        assert hears.unwrap(says.wrap(text)) == text


def test_a_line_changed_repeated_left_out_or_turned_back_is_refused() -> None:
    door, caller = ends()
    first, second = door.wrap(b"one"), door.wrap(b"two")
    with pytest.raises(BadSeal):
        caller.unwrap(first.replace(b"one", b"eno"))
    with pytest.raises(BadSeal):
        caller.unwrap(second)  # the first was left out
    with pytest.raises(BadSeal):
        door.unwrap(first)  # our own words, turned back
    assert caller.unwrap(first) == b"one"
    with pytest.raises(BadSeal):
        caller.unwrap(first)  # played again
    with pytest.raises(BadSeal):
        caller.unwrap(b"\n")


def test_a_door_that_does_not_know_the_key_is_not_ours() -> None:
    theirs = Proofs(b"x" * 32, "node:n1", "1", "2", 3)
    answer = {"nonce": "2", "epoch": 3, "proof": theirs.door_proof}
    with pytest.raises(BadSeal, match="does not know our key"):
        check_door(KEY, "node:n1", "1", answer)
    ours = Proofs(KEY, "node:n1", "1", "2", 3)
    with pytest.raises(BadSeal):  # an epoch that was made greater on the way
        check_door(KEY, "node:n1", "1", {"nonce": "2", "epoch": 4, "proof": ours.door_proof})
    found = check_door(KEY, "node:n1", "1", {"nonce": "2", "epoch": 3, "proof": ours.door_proof})
    assert found.session == ours.session


def verdicts(lease: Lease, from_s: float, to_s: float) -> list[tuple[float, str]]:
    """What a lease says when it is asked as often as it wants to be."""
    told, now_s = [], from_s
    while now_s <= to_s:
        verdict = lease.verdict(now_s)
        if verdict != "held":
            told.append((now_s, verdict))
        now_s = lease.next_s(now_s)
    return told


def test_a_lease_asks_the_head_then_warns_then_kills() -> None:
    told = verdicts(Lease(12.0, 100.0), 100.0, 119.0)
    assert told == [(106.0, "ask"), (108.0, "ask"), (110.0, "ask"), (112.0, "notice"), (118.0, "kill")]
    assert over_s(12.0) > 18.0  # the controller waits longer than the node lives


def test_word_from_the_controller_renews_it_and_a_second_time_it_warns_again() -> None:
    lease = Lease(12.0, 100.0)
    assert lease.verdict(112.5) == "notice"
    assert lease.verdict(112.6) == "held"  # told once
    lease.renew(113.0)
    assert lease.verdict(118.0) == "held"
    assert lease.verdict(125.0) == "notice"
    lease.renew(90.0)  # an old answer of the head changes nothing
    assert lease.silent_s(125.0) == 12.0
    assert lease.verdict(126.0) == "held"  # told once


def test_a_node_that_was_left_on_purpose_waits_for_that_long_and_then_its_lease() -> None:
    lease = Lease(12.0, 4.0)
    lease.park(1000.0)
    lease.renew(5.0)  # he was about to go
    assert verdicts(lease, 4.0, 1009.0) == []
    assert lease.over_at_s == 1004.0 + 18.0
    assert [verdict for _, verdict in verdicts(lease, 1009.0, 1023.0)] == ["ask", "ask", "ask", "notice", "kill"]
    lease = Lease.resumed(*lease.kept())  # another agent goes on with it
    assert lease.verdict(1003.0) == "held"
    lease.greet()  # somebody is back
    assert lease.verdict(1003.0) == "held"
    lease.renew(50.0)  # and has heard of us: the ordinary lease holds again
    assert lease.verdict(68.0) == "kill"


# The file of a lease -------------------------------------------------------------------------------------------------


def test_the_next_agent_goes_on_with_the_lease_in_the_file_and_supervisors_know_when_it_is_over() -> None:
    lease = Lease(60.0, 100.0)
    lease.park(500.0)
    line = lease_file.to_line(lease, "boot-1", epoch=7)
    assert len(line) == lease_file.FILE_BYTES
    found = lease_file.from_line(line, "boot-1")
    assert found is not None
    assert (found[0].kept(), found[0].over_at_s, found[1]) == (lease.kept(), lease.over_at_s, 7)
    assert lease_file.over_at_in(line, "boot-1") == lease.over_at_s


@pytest.mark.parametrize("line", [b"", b"boot-1\n", b"boot-1 1 x 2 3 4\n", b"boot-1 1 1 2 3 x\n"])
def test_a_lease_file_that_is_spoilt_or_of_another_boot_counts_for_nothing(line: bytes) -> None:
    assert lease_file.from_line(line, "boot-1") is None
    good = lease_file.to_line(Lease(60.0, 100.0), "boot-0", epoch=1)
    assert lease_file.from_line(good, "boot-1") is None
    assert lease_file.over_at_in(good, "boot-1") is None


# The caller ----------------------------------------------------------------------------------------------------------


def door_says(hello: dict[str, Any], epoch: int) -> dict[str, Any]:
    proofs = Proofs(KEY, hello["who"], hello["nonce"], "2", epoch)
    return {"nonce": "2", "epoch": epoch, "proof": proofs.door_proof}


def test_a_caller_turns_away_from_a_leader_of_the_past() -> None:
    caller = Caller("node:n1", KEY)
    hello = caller.hello()
    answer, seal = caller.answer(door_says(hello, 3))
    proofs = Proofs(KEY, "node:n1", hello["nonce"], "2", 3)
    assert answer == {"proof": proofs.caller_proof}
    assert LineSeal(proofs.session, is_door=True).unwrap(seal.wrap(b"a word")) == b"a word"
    with pytest.raises(BadSeal, match="a leader of the past: epoch 2, we have heard of 3"):
        caller.answer(door_says(caller.hello(), 2))
    assert caller.epoch == 3
