"""How long one iteration takes under an execution plan: Rubick's performance model (arXiv 2408.08586), our form of it.

An iteration is m micro-batches through pp stages: one way through all stages, then (m - 1) times the slowest of them,
which for equal stages is (m + pp - 1) slots. The gradients of the last micro-batch are summed over the data-parallel
ranks while its backward pass runs; then come the optimiser and, with ZeRO-Offload, the way to the host and back. Two
things that overlap take f_k(x, y) = (x^k + y^k)^(1/k): with k = 1 one follows the other, a large k hides the shorter.

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

from thebes.model.arrays import Floats, Ints
from thebes.model.plan import NO_ZERO, ZERO_OFFLOAD, Plan

if TYPE_CHECKING:
    from thebes.perf.plans.site import Site
    from thebes.perf.plans.transformer import Transformer


GB = 1e9
HALF, SINGLE = 2, 4  # bytes: of activations and transfers with the host; of gradients and ZeRO's weights
BUCKET = 25e6  # bytes of gradients that are exchanged together


class Constants(NamedTuple):
    """The seven fitted parameters of a model; times are per 1e9 parameters."""

    k_bwd: float = 2.0  # the backward pass, measured in forward passes
    k_sync: float = 1.3  # overlap of the backward pass and the exchange of gradients
    k_opt: float = 0.04  # seconds: the optimiser on the GPU
    k_opt_off: float = 8.0  # seconds on one CPU: the optimiser on the host
    k_off: float = 1.8  # overlap of that exchange with gradients on their way to the host
    k_swap: float = 1.7  # overlap of the update on the host with weights on their way back
    k_const: float = 0.04  # seconds that every iteration takes, whatever the plan


class Environment(NamedTuple):
    """What share of its data sheet a site really reaches; it is the same for all models and plans.

    The values are those of the A800 cluster of Rubick's evaluation, fitted once over all models measured there
    (benchmarks/plan_accuracy.py --calibrate). Shares are of the bandwidths that Site names.
    """

    inner: float = 0.7  # share of the inner link: ring sums inside a node
    wire: float = 0.8  # share of the wire: ring sums between nodes
    handing: float = 0.45  # share of the wire: one stage to the next, a single stream per GPU
    pcie: float = 0.25  # share of the host link, through buffers that are copied once more
    gpus_per_card: int = 2  # GPUs beside one network card
    layer_s: float = 0.0004  # starting the kernels of one layer's forward pass, however small the batch
    start_overlap: float = 4.0  # overlap of starting kernels and running them
    message_s: float = 0.000001  # one step of a ring inside a node
    hop_s: float = 0.00002  # one step of a ring between nodes
    shard_s: float = 0.00012  # ZeRO: one step between nodes of the messages of one layer
    split: float = 0.93  # efficiency of a layer on twice as many tensor-parallel GPUs: smaller matrices
    mfu: float = 0.2  # share of peak arithmetic in a forward pass that was not profiled: the median of six models


ENVIRONMENT = Environment()


class PlanArrays(NamedTuple):
    """Many plans as arrays, one array per field of Plan."""

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
    """Seconds of one iteration; the parts add up to the total. Of what overlaps, only the exposed part counts."""

    forward: float
    backward: float  # it includes the second forward pass of gradient checkpointing
    tp: float
    pp: float
    bubble: float
    sync: float
    optimiser: float
    offload: float
    const: float
    total: float
    wire_s: float  # the part of the total that is traffic between nodes


def overlap(x: ArrayLike, y: ArrayLike, k: float) -> Floats:
    """f_k(x, y), without overflow for large k."""
    large = np.maximum(x, y)
    small = np.minimum(x, y)
    ratio = np.divide(small, large, out=np.zeros_like(large, dtype=np.float64), where=large > 0)
    return large * (1.0 + ratio**k) ** (1.0 / k)


def forward_s(model: Transformer, site: Site, environment: Environment = ENVIRONMENT) -> float:
    """Seconds of the forward pass of one sample on one GPU: as profiled, or else computed from its arithmetic."""
    for gpu_type, seconds in model.forward_s_per_sample:
        if gpu_type == site.gpu_type:
            return seconds
    return forward_flop(model) / (site.tflops * 1e12 * environment.mfu)


def forward_flop(model: Transformer) -> float:
    """Operations of a forward pass: two per parameter and token, and those of attention."""
    return 2 * model.sequence * (model.parameters + 2 * model.layers * model.sequence * model.hidden)


def logits_layers(model: Transformer) -> float:
    """The product with the vocabulary, as the number of layers with the same arithmetic."""
    return model.vocabulary / (12 * model.hidden + 2 * model.sequence)


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
    batch: ArrayLike | None = None,
    environment: Environment = ENVIRONMENT,
) -> Floats:
    """Seconds per iteration of each plan. `cpus` is per GPU; `fewest` counts GPUs on the node with the smallest part of
    an uneven gang; by default the gang is spread evenly."""
    return breakdowns(
        model, site, constants, plans, gpus, nodes, cpus, fewest=fewest, batch=batch, environment=environment
    ).total


def breakdown(
    model: Transformer,
    site: Site,
    constants: Constants,
    plan: Plan,
    nodes: int,
    cpus: float,
    *,
    fewest: int | None = None,
    batch: int | None = None,
    environment: Environment = ENVIRONMENT,
) -> Breakdown:
    """The time of one plan, part by part."""
    arrays = plan_arrays([plan])
    whole = breakdowns(
        model, site, constants, arrays, arrays.gpus, nodes, cpus, fewest=fewest, batch=batch, environment=environment
    )
    return Breakdown(*(float(part[0]) for part in whole))


class Breakdowns(NamedTuple):
    """Like Breakdown, for many plans."""

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
    batch: ArrayLike | None = None,
    environment: Environment = ENVIRONMENT,
) -> Breakdowns:
    """The time of each plan, part by part; the arguments are those of `iteration_s`."""
    k, world = constants, environment
    dp, tp, pp, _, ga, gc = (np.asarray(field, dtype=np.float64) for field in plans)
    split = tp * pp
    micro_batch = (model.global_batch if batch is None else np.asarray(batch, dtype=np.float64)) / (dp * ga)
    way = _ways(site, plans, gpus, nodes, fewest, world)

    # One micro-batch passes through all stages, and the last stage also computes the logits. Kernels are started while
    # others run, so the slower of the two counts.
    start = world.layer_s * model.layers / pp
    compute = forward_s(model, site, world) * micro_batch / (tp * world.split ** np.log2(tp))
    extra = logits_layers(model) / (model.layers + logits_layers(model))
    last = overlap(start, compute * ((1 - extra) / pp + extra), world.start_overlap)
    through = last + (pp - 1) * overlap(start, compute * (1 - extra) / pp, world.start_overlap)
    forward = through / pp
    backward = forward * (k.k_bwd + gc)
    # After the first micro-batch, the slowest stage sets the pace; the time that a GPU waits is the bubble.
    bubble = (1 + k.k_bwd + gc) * (through + (ga - 1) * last - ga * forward)
    slots = ga + pp - 1

    # Tensor parallelism sums activations twice per layer forward, twice backward, and twice more where they are
    # computed again. Stages hand on whole activations, and as much comes back.
    activations = HALF * micro_batch * model.sequence * model.hidden
    sums = (tp > 1) * model.layers / pp * (4 + 2 * gc)
    summing = (
        sums * 2 * (tp - 1) * (activations / tp / way.tp_rate + np.where(way.tp_inside, world.message_s, world.hop_s))
    )
    handing = (pp > 1) * 2 * (activations / way.pp_rate + world.hop_s)

    # Gradients are reduced over the data-parallel ranks and then gathered. ZeRO gathers weights, after the update.
    state = model.parameters / split
    offload, sharded = plans.zero == ZERO_OFFLOAD, plans.zero != NO_ZERO
    hops = np.where(way.dp_inside, (dp - 1) * world.message_s, (way.dp_nodes - 1) * world.hop_s)
    half_ring = (dp - 1) / dp * SINGLE * state / way.dp_rate + hops * SINGLE * state / BUCKET
    half_ring = half_ring + (sharded & ~way.dp_inside) * (way.dp_nodes - 1) * model.layers * world.shard_s
    exchange = np.where(sharded, 1.0, 2.0) * half_ring
    gather = sharded * half_ring
    exposed = overlap(backward, exchange, k.k_sync) - backward

    # With offload, a rank's share of the gradients leaves during the exchange, and every rank takes all weights back.
    billions = state / 1e9
    on_gpu = k.k_opt * billions / np.where(sharded, dp, 1.0)
    if np.any(offload):
        pcie = site.pcie_gb_s * GB * world.pcie
        leaving = overlap(exchange, HALF * state / dp / pcie, k.k_off)
        leaving = np.where(offload, overlap(backward, leaving, k.k_sync) - backward - exposed, 0.0)
        on_host = k.k_opt_off * billions / (dp * np.asarray(cpus, dtype=np.float64))
        returning = np.where(offload, overlap(on_host, HALF * state / pcie, k.k_swap) - on_host, 0.0)
        update, moved = np.where(offload, on_host, on_gpu), leaving + returning
    else:
        update, moved = on_gpu, np.zeros_like(forward)

    parts = (
        forward * ga,
        backward * ga,
        summing * slots,
        handing * (slots - 1),
        bubble,
        exposed + gather,
        update,
        moved,
        np.full_like(forward, k.k_const),
    )
    between = np.where(way.tp_inside, 0.0, parts[2]) + np.where(way.one_node, 0.0, parts[3])
    between = between + np.where(way.dp_inside, 0.0, parts[5])
    return Breakdowns(*parts, sum(parts[1:], parts[0]), between)


class _Ways(NamedTuple):
    """Which groups sit in one node, and the bytes per second that their transfers get."""

    one_node: NDArray[np.bool_]
    tp_inside: NDArray[np.bool_]
    dp_inside: NDArray[np.bool_]
    tp_rate: Floats
    pp_rate: Floats
    dp_rate: Floats
    dp_nodes: Floats  # nodes that a data-parallel ring passes


def _ways(
    site: Site, plans: PlanArrays, gpus: ArrayLike, nodes: ArrayLike, fewest: ArrayLike | None, world: Environment
) -> _Ways:
    dp, tp = plans.dp, plans.tp
    gpus, nodes = np.asarray(gpus, dtype=np.int64), np.asarray(nodes, dtype=np.int64)
    one_node = np.broadcast_to(nodes <= 1, dp.shape)
    held = np.maximum(1, gpus // nodes if fewest is None else np.asarray(fewest, dtype=np.int64))
    even = gpus == held * nodes
    tp_inside = one_node | (even & (held % tp == 0))
    dp_inside = one_node | (even & (held % (dp * tp) == 0))

    # Each card serves the GPUs beside it, so a gang that holds few GPUs of a node gets only a part of its wire.
    cards = -(-site.node_gpus // world.gpus_per_card)
    card = site.wire_gb_s * GB * world.wire / cards

    def reach(used: NDArray[np.int64]) -> Floats:
        return card * np.minimum(cards, -(-used // world.gpus_per_card))

    inner = site.inner_gb_s * GB * world.inner
    # If tensor groups do not fill a node evenly, the two groups that straddle its ends share its wire.
    ends = np.where(tp % held == 0, 1.0, 2.0)
    # There is one ring per tensor index. A ring is as fast as in the node where it has the fewest members; if groups do
    # not fill nodes evenly, it has a single member in some node.
    rings = np.minimum(tp, held)
    filled = (dp * tp == plans.gpus) & (tp == 1) | ((dp * tp % held == 0) & (held % tp == 0))
    members = np.where(filled, np.maximum(1, held // tp), 1)
    return _Ways(
        one_node,
        tp_inside,
        dp_inside,
        np.where(tp_inside, inner, reach(held) / ends),
        np.where(one_node, inner, reach(held) / held * world.handing / world.wire),
        np.where(dp_inside, inner, reach(rings * members) / rings),
        np.minimum(nodes, dp).astype(np.float64),
    )
