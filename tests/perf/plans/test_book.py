"""The plan book: the fastest plan that fits, why others do not, and the cheapest allocation within 1 %."""

from __future__ import annotations

from thebes.perf.plans.book import PlanBook
from thebes.perf.plans.site import A800
from thebes.perf.plans.transformer import catalogue

LLAMA = catalogue()["llama-2-7b"]
BOOK = PlanBook((LLAMA, catalogue()["gpt-2"]), A800)


def test_one_gpu_trains_llama_7b_only_with_offload() -> None:
    found = BOOK.best(0, 1, 1, 12)

    assert found is not None
    assert found.plan.family == "zero-offload"
    assert found.gpu_gib <= 80
