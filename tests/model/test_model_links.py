"""Links by name, whole networks, and links that cannot be."""

from __future__ import annotations

import pytest

from thebes.model.cluster import Cluster, from_short_form, from_toml
from thebes.model.errors import UserError
from thebes.model.links import NETWORKS, PRESETS, TIERS, Link, check_links, network, with_network

NODE = "[[node]]\ncount = 2\ngpus = 4\n"

# Spec 4.3: gigabytes per second that a transfer gets.
USABLE = {
    "nvlink2": 120, "nvlink3": 235, "nvlink4": 370, "pcie3": 12, "pcie4": 24, "pcie5": 48, "hdr": 24, "ndr": 48,
    "10gbe": 1.17, "25gbe": 2.6, "100gbe": 11, "200gbe": 22, "400gbe": 44,
}  # fmt: skip


def links_of(*tables: str) -> dict[str, Link]:
    return dict(from_toml(NODE + "\n".join(tables), "c.toml").links)


def test_presets_are_the_usable_bandwidths_in_gigabits() -> None:
    assert {name: link.bandwidth_gbps for name, link in PRESETS.items()} == {
        name: pytest.approx(8 * gigabytes) for name, gigabytes in USABLE.items()
    }


def test_latency_grows_outwards() -> None:
    nvlink, pcie, infiniband, ethernet, tcp = (
        PRESETS[name].latency_us or 0 for name in ("nvlink3", "pcie4", "hdr", "100gbe", "10gbe")
    )
    assert nvlink < pcie < infiniband < ethernet < tcp


def test_a_link_by_preset_and_what_overrides_it() -> None:
    assert links_of('[link.rack]\npreset = "hdr"') == {"rack": Link(192.0, 14.0)}
    assert links_of('[link.rack]\npreset = "hdr"\nbandwidth_gbps = 100') == {"rack": Link(100.0, 14.0)}
    assert links_of('[link.rack]\npreset = "hdr"\nlatency_us = 2') == {"rack": Link(192.0, 2.0)}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_wires_every_tier_and_is_sound(name: str) -> None:
    links = network(name)
    assert tuple(links) == TIERS
    check_links(links, name)


def test_with_network_changes_the_wires_and_nothing_else() -> None:
    before = from_toml(NODE + "[link.node]\nbandwidth_gbps = 7\n", "c.toml")
    after = with_network(before, "nvlink+hdr")
    assert isinstance(after, Cluster)
    assert after.links == {
        "group": PRESETS["nvlink3"], "node": PRESETS["nvlink3"], "rack": PRESETS["hdr"], "cluster": PRESETS["hdr"]
    }  # fmt: skip
    assert before.links == {"node": Link(7.0)}
    assert after.describe() == before.describe()
    assert after.node_names == before.node_names


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('[link.rack]\npreset = "hdrr"', "c.toml, [link.rack]: unknown preset 'hdrr'\ndid you mean 'hdr'?"),
        ("[link.rack]\npreset = 4", "c.toml, [link.rack]: preset = 4 is not a name\nwrite preset = \"hdr\""),
        ("[link.rack]\nbandwidth_gbps = 0", "c.toml, [link.rack]: bandwidth_gbps = 0 is not a positive number"),
        ("[link.rack]\nbandwidth_gbps = -5", "c.toml, [link.rack]: bandwidth_gbps = -5 is not a positive number"),
        (
            '[link.node]\npreset = "pcie3"\n[link.rack]\npreset = "hdr"',
            "c.toml: [link.rack] with 192 Gb/s is faster than [link.node] with 96 Gb/s",
        ),
        (
            "[link.group]\nbandwidth_gbps = 10\n[link.cluster]\nbandwidth_gbps = 20",
            "c.toml: [link.cluster] with 20 Gb/s is faster than [link.group] with 10 Gb/s",
        ),
    ],
)  # fmt: skip
def test_links_that_cannot_be_are_refused(table: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        links_of(table)
    assert str(caught.value).startswith(message)


def test_an_unknown_network_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        with_network(from_short_form("2x4"), "10gb")  # type: ignore[arg-type]
    assert str(caught.value) == "unknown network '10gb'\ndid you mean '10gbe'?"
