"""Contention: transfers of different jobs that share a link slow each other down. This wraps any speed model.

The law is the one measured behind Ada-SRSF (arXiv 2002.10105): with k transfers on a link, a message takes
k*b + (k-1)*eta per byte instead of b. The links are the wires of each node and, where racks are oversubscribed, the
uplinks of each rack. The authors' own 1 GbE figures show the extra penalty only at k = 2 and 3, so it is capped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from thebes.model.compiled import Records, plain
from thebes.model.errors import UserError, nearest
from thebes.model.parameters import parameter

LAW = np.dtype(
    [
        ("contends", np.bool_),
        ("eta", np.float64),  # relative to b
        ("cap", np.float64),
        ("oversubscription", np.float64),
        ("expected", np.bool_),
        ("disturbs", np.bool_),  # jobs on one node slow each other down, also without a network
        ("shares", np.bool_),  # several jobs may sit on one GPU
    ]
)
OVERLAPS = ("full", "expected")


@dataclass(frozen=True)
class Contention:
    """Transfers that share a link: k of them take k + (k-1)*eta times as long as one alone."""

    name: ClassVar[str] = "contention"

    on: bool = parameter(False, "whether neighbours' transfers slow each other down")
    eta: float = parameter(0.275, "extra cost per further transfer, relative to the time of one alone", low=0, high=10)
    cap: float = parameter(3.0, "the extra cost grows up to so many transfers and then stays", low=1, high=1e6)
    oversubscription: float = parameter(
        1.0, "how many times the wires of a rack's nodes exceed its uplinks; 1: uplinks never limit", low=1, high=1e4
    )
    overlap: str = parameter(
        "full", "full: transfers of neighbours always meet; expected: by the share of time that each one talks"
    )

    def __post_init__(self) -> None:
        if self.overlap not in OVERLAPS:
            raise UserError(f"unknown contention.overlap '{self.overlap}'", hint=nearest(self.overlap, OVERLAPS))

    def law(self, *, disturbs: bool, shares: bool) -> Records:
        law = np.recarray(1, dtype=LAW)
        law.contends, law.eta, law.cap = self.on, self.eta, self.cap
        law.oversubscription, law.expected = self.oversubscription, self.overlap == "expected"
        law.disturbs, law.shares = disturbs, shares
        return plain(law)
