"""How long one iteration takes under an execution plan: Rubick's performance model (arXiv 2408.08586), our form of it.

An iteration is m micro-batches through pp stages, (m + pp - 1) slots of forward and backward; the gradients of the last
micro-batch are summed over the data-parallel ranks while its backward pass runs; then come the optimiser and, with
ZeRO-Offload, the way to the host and back. Two things that overlap take f_k(x, y) = (x^k + y^k)^(1/k): k = 1 is one
after the other, a large k hides the shorter.

Ranks are numbered as Megatron does: tensor parallel first, then data parallel, then stages. So tensor groups are
neighbours, a data-parallel group takes every tp-th GPU, and stages lie furthest apart. A transfer whose group sits in
one node goes over that node's inner link; all others share the node's wire, and a gang that holds few of a node's GPUs
reaches only the network cards beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thebes.model.plan import ZERO_DP, ZERO_OFFLOAD, Plan

if TYPE_CHECKING:
    from thebes.perf.plans.site import Site
    from thebes.perf.plans.transformer import Transformer

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

GB = 1e9
HALF, SINGLE = 2, 4  # bytes of a number: activations and weights, gradients


class Constants(NamedTuple):
    """The seven fitted parameters of a model; times are per 1e9 parameters."""

    k_bwd: float = 2.0  # backward pass, in forward passes
    k_sync: float = 2.0  # overlap of the backward pass and the exchange of gradients
    k_opt: float = 0.08  # seconds: the optimiser on the GPU
    k_opt_off: float = 1.0  # seconds on one CPU: the optimiser on the host
    k_off: float = 2.0  # overlap of that exchange and of gradients on their way to the host
    k_swap: float = 2.0  # overlap of the update on the host and of weights on their way back
    k_const: float = 0.01  # seconds that every iteration takes, whatever the plan


class Environment(NamedTuple):
    """What a site really reaches: found once, the same for all models and plans."""

    inner: float = 0.6  # share of the inner link's bandwidth
    wire: float = 0.8  # share of the wire's bandwidth
    pcie: float = 0.8  # share of the host link's bandwidth
    gpus_per_card: int = 2  # GPUs beside one network card
    layer_s: float = 0.0003  # starting the kernels of one layer, forward, whatever the batch
    message_s: float = 0.00001  # one step of a ring
    split: float = 0.97  # efficiency of a layer on twice as many tensor-parallel GPUs
    mfu: float = 0.45  # share of peak arithmetic in a forward pass, where nobody measured it


ENVIRONMENT = Environment()


class PlanArrays(NamedTuple):
    """Many plans at once, one array per field of Plan."""

    dp: Ints
    tp: Ints
    pp: Ints
    zero: Ints
    ga: Ints
    gc: Ints

    @property
    def gpus(self) -> Ints:
        return self.dp * self.tp * self.pp


def plan_arrays(plans: Sequence[Plan]) -> PlanArrays:
    fields = [[int(getattr(plan, name)) for plan in plans] for name in PlanArrays._fields]
    return PlanArrays(*(np.array(values, dtype=np.int64) for values in fields))


class Breakdown(NamedTuple):
    """Seconds of one iteration; the parts add up to the total. What overlaps counts only as far as it shows."""

    forward: float
    backward: float  # with the second forward pass of gradient checkpointing
    tp: float
    pp: float
    bubble: float
    sync: float
    optimiser: float
    offload: float
    const: float
    total: float
    wire_s: float  # that part of the total which is traffic between nodes


def overlap(x: ArrayLike, y: ArrayLike, k: float) -> Floats:
    """f_k(x, y), without overflow for large k."""
    large = np.maximum(x, y)
    small = np.minimum(x, y)
    ratio = np.divide(small, large, out=np.zeros_like(large, dtype=np.float64), where=large > 0)
    return large * (1.0 + ratio**k) ** (1.0 / k)


def forward_s(model: Transformer, site: Site, environment: Environment = ENVIRONMENT) -> float:
    """Seconds of the forward pass of one sample on one GPU: as profiled, else from arithmetic."""
    for gpu_type, seconds in model.forward_s_per_sample:
        if gpu_type == site.gpu_type:
            return seconds
    return forward_flop(model) / (site.tflops * 1e12 * environment.mfu)


def forward_flop(model: Transformer) -> float:
    """Two operations per parameter and token, and attention's products."""
    return 2 * model.sequence * (model.parameters + 2 * model.layers * model.sequence * model.hidden)


def iteration_s(
    model: Transformer,
    site: Site,
    constants: Constants,
    plans: PlanArrays,
    gpus: ArrayLike,
    nodes: ArrayLike,
    cpus: ArrayLike,
    *,
    fewest: ArrayLike | None = None,
    environment: Environment = ENVIRONMENT,
) -> Floats:
    """Seconds per iteration of each plan. `cpus` per GPU; `fewest`: GPUs on the node that holds the smallest part of
    an uneven gang, by default the gang is spread evenly."""
    return breakdowns(model, site, constants, plans, gpus, nodes, cpus, fewest=fewest, environment=environment).total


def breakdown(
    model: Transformer,
    site: Site,
    constants: Constants,
    plan: Plan,
    nodes: int,
    cpus: float,
    *,
    fewest: int | None = None,
    environment: Environment = ENVIRONMENT,
) -> Breakdown:
    """Where the time of one plan goes."""
    arrays = plan_arrays([plan])
    whole = breakdowns(model, site, constants, arrays, arrays.gpus, nodes, cpus, fewest=fewest, environment=environment)
    return Breakdown(*(float(part[0]) for part in whole))


class Breakdowns(NamedTuple):
    """As Breakdown, for many plans."""

    forward: Floats
    backward: Floats
    tp: Floats
    pp: Floats
    bubble: Floats
    sync: Floats
    optimiser: Floats
    offload: Floats
    const: Floats
    total: Floats
    wire_s: Floats


def breakdowns(
    model: Transformer,
    site: Site,
    constants: Constants,
    plans: PlanArrays,
    gpus: ArrayLike,
    nodes: ArrayLike,
    cpus: ArrayLike,
    *,
    fewest: ArrayLike | None = None,
    environment: Environment = ENVIRONMENT,
) -> Breakdowns:
    k, world = constants, environment
    dp, tp, pp, zero, ga, gc = (np.asarray(field, dtype=np.float64) for field in plans)
    gpus, nodes, cpus = (np.asarray(value, dtype=np.float64) for value in (gpus, nodes, cpus))
    held = gpus / nodes if fewest is None else np.asarray(fewest, dtype=np.float64)  # GPUs on the smallest node
    micro_batch = model.global_batch / (dp * ga)
    split = tp * pp
    one_node = nodes <= 1

    # Bandwidths in bytes/s. The wire belongs to the node: its GPUs share it, and each card serves the GPUs beside it.
    inner = site.inner_gb_s * GB * world.inner
    cards = np.ceil(held / world.gpus_per_card) / np.ceil(site.node_gpus / world.gpus_per_card)
    wire = site.wire_gb_s * GB * world.wire * np.minimum(1.0, cards)
    pcie = site.pcie_gb_s * GB * world.pcie

    # A stage computes its share of one micro-batch.
    stage = (forward_s(model, site, world) * micro_batch / tp + world.layer_s * model.layers) / pp
    stage = stage / world.split ** np.log2(tp)
    back = stage * (k.k_bwd + gc)
    slots = ga + pp - 1

    # Tensor parallel: two sums of the activations per layer forward, two backward, two more when computed again.
    activations = HALF * micro_batch * model.sequence * model.hidden
    sums = model.layers / pp * (4 + 2 * gc) * (tp > 1)
    tp_inside = one_node | ((tp <= held) & (held % tp == 0))
    tp_rate = np.where(tp_inside, inner, wire / np.maximum(1.0, held / tp))
    tp_slot = sums * (2 * (tp - 1) / tp * activations / tp_rate + 2 * (tp - 1) * world.message_s)

    # Stages hand activations on and gradients back; the slowest hand-over is between nodes if any is.
    pp_rate = np.where(one_node, inner, wire / held)
    pp_slot = (pp > 1) * 2 * (activations / tp / pp_rate + world.message_s)

    # Gradients are summed over the data-parallel ranks, each tensor-parallel index in a ring of its own.
    state = model.parameters / split
    dp_inside = one_node | ((dp * tp <= held) & (held % (dp * tp) == 0))
    dp_rate = np.where(dp_inside, inner, wire / np.minimum(tp, held))
    half_ring = (dp - 1) / dp * SINGLE * state / dp_rate + (dp - 1) * world.message_s
    sharded = (zero == ZERO_DP) | (zero == ZERO_OFFLOAD)
    exchange = np.where(sharded, 1.0, 2.0) * half_ring  # ZeRO scatters the sums; weights are gathered after the update
    gather = np.where(sharded, half_ring, 0.0)

    # With offload each rank's gradients leave while they are summed, and its weights return while others are updated.
    offload = zero == ZERO_OFFLOAD
    off = np.where(offload, SINGLE * state / dp / pcie, 0.0)
    leaving = np.where(offload, overlap(exchange, off, k.k_off), exchange)
    sync = overlap(back, leaving, k.k_sync) - back
    exposed_gradients = np.where(offload, overlap(back, exchange, k.k_sync) - back, sync)

    billions = state / 1e9
    on_gpu = k.k_opt * billions / np.where(zero == ZERO_DP, dp, 1.0)
    on_host = k.k_opt_off * billions / (dp * cpus)
    optimiser = np.where(offload, on_host, on_gpu)
    swap = np.where(offload, overlap(on_host, off, k.k_swap) - on_host, 0.0)

    parts = (
        stage * ga,
        back * ga,
        tp_slot * slots,
        pp_slot * slots,
        (stage + back) * (pp - 1),
        exposed_gradients + gather,
        optimiser,
        sync - exposed_gradients + swap,
        np.full_like(stage, k.k_const),
    )
    total = np.sum(parts, axis=0)
    between = (
        np.where(tp_inside, 0.0, parts[2]) + np.where(one_node, 0.0, parts[3]) + np.where(dp_inside, 0.0, parts[5])
    )
    return Breakdowns(*parts, total, between)
