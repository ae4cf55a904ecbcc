"""An execution plan says how a job divides its model and batch over the GPUs that it holds (Rubick, arXiv 2408.08586).

The global batch of a job never changes, whatever its plan, because a scheduler must not touch accuracy. A plan is
written `dp2+tp4+pp2+ga4+gc`, `zero-dp8+ga2` or `zero-offload1+gc`; compiled code and Decisions carry it as one number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from thebes.model.errors import UserError

# Which part of the optimiser's state is divided over the data-parallel ranks (ZeRO), and whether it lives on the host.
NO_ZERO, ZERO_DP, ZERO_OFFLOAD = range(3)
_ZERO_NAMES = ("dp", "zero-dp", "zero-offload")

# Families are what a job means by "my kind of plan": sizes may change inside a family, but the family may not.
DP, ZERO, OFFLOAD, SPLIT = "dp", "zero-dp", "zero-offload", "3d"
FAMILIES = (DP, ZERO, OFFLOAD, SPLIT)

NO_PLAN = 0  # the code of a job that knows nothing of plans
_BITS = (("dp", 14), ("tp", 10), ("pp", 10), ("zero", 2), ("ga", 20), ("gc", 1))
_WORDS = re.compile(r"(zero-offload|zero-dp|dp|tp|pp|ga)(\d+)$")


@dataclass(frozen=True, order=True)
class Plan:
    """dp x tp x pp GPUs; each data-parallel rank takes its share of the batch in `ga` steps of one micro-batch."""

    dp: int = 1  # data parallel
    tp: int = 1  # tensor parallel
    pp: int = 1  # pipeline stages
    zero: int = NO_ZERO
    ga: int = 1  # gradient accumulation: micro-batches per iteration and rank
    gc: bool = False  # gradient checkpointing: activations are computed twice instead of kept

    def __post_init__(self) -> None:
        for name, bits in _BITS:
            value = int(getattr(self, name))
            least = 0 if name in ("zero", "gc") else 1
            if not least <= value < 1 << bits:
                raise UserError(f"an execution plan has {name} = {value}", hint=f"from {least} to {(1 << bits) - 1}")
        if self.zero and (self.tp > 1 or self.pp > 1):
            raise UserError(
                f"plan {self}: ZeRO is not combined with tensor or pipeline parallelism",
                hint="leave tp and pp out, or write dp instead of zero-dp",
            )

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def family(self) -> str:
        if self.zero:
            return ZERO if self.zero == ZERO_DP else OFFLOAD
        return DP if self.tp == self.pp == 1 else SPLIT

    def like(self, other: Plan) -> bool:
        """Whether this is the same plan on other GPUs: only data-parallel size and accumulation may differ."""
        return (self.tp, self.pp, self.zero, self.gc) == (other.tp, other.pp, other.zero, other.gc)

    @property
    def code(self) -> int:
        """The plan as one whole number above 0."""
        code = 0
        for name, bits in _BITS:
            code = code << bits | int(getattr(self, name))
        return code

    def __str__(self) -> str:
        words = [f"{_ZERO_NAMES[self.zero]}{self.dp}"]
        words += [f"{name}{getattr(self, name)}" for name in ("tp", "pp", "ga") if getattr(self, name) > 1]
        return "+".join(words + ["gc"] * self.gc)


@cache
def plan_of(code: int) -> Plan:
    """The plan of a code. NO_PLAN is the code of no plan."""
    values: dict[str, int] = {}
    for name, bits in reversed(_BITS):
        values[name] = code & (1 << bits) - 1
        code >>= bits
    return Plan(values["dp"], values["tp"], values["pp"], values["zero"], values["ga"], bool(values["gc"]))


def parse_plan(text: str, where: str = "plan") -> Plan:
    """`dp2+tp4+pp2+ga4+gc` -> Plan; every word may come once."""
    given: dict[str, int] = {}
    for word in text.strip().lower().split("+"):
        found = _WORDS.match(word)
        if word == "gc":
            pairs = {"gc": 1}
        elif found and found[1] in _ZERO_NAMES:
            pairs = {"dp": int(found[2]), "zero": _ZERO_NAMES.index(found[1])}
        elif found:
            pairs = {found[1]: int(found[2])}
        else:
            raise UserError(
                f"{where}: '{word}' in '{text}' is no part of an execution plan",
                hint="write dp2+tp4+pp2+ga4+gc, zero-dp8 or zero-offload8+gc, each size after its word",
            )
        if given.keys() & pairs.keys():
            raise UserError(f"{where}: '{text}' says {found[1] if found else word} twice", hint="say it once")
        given |= pairs
    gc = bool(given.pop("gc", 0))
    return Plan(**given, gc=gc)
