"""What a plan needs of GPU and host memory, so that a plan that cannot run is never proposed.

Mixed-precision Adam keeps 16 bytes per parameter (ZeRO, SC'20, section 3.1). ZeRO-DP is stage 2: gradients and the
optimiser's state are divided over the data-parallel ranks, weights stay whole, so that its traffic is that of plain
data parallelism; ZeRO-Offload (ATC'21) is stage 2 with all but the weights on the host. Activations are those of
Korthikanti et al. (MLSys'23, equation 2): tensor parallelism without sequence parallelism.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from thebes.model.arrays import Floats
from thebes.model.plan import ZERO_DP, ZERO_OFFLOAD, Plan
from thebes.perf.plans.timing import PlanArrays, plan_arrays
from thebes.perf.plans.transformer import GIB, GRADIENT_BYTES, OPTIMISER_BYTES, WEIGHT_BYTES, Transformer

# This covers what is not counted: the CUDA context, communication buffers, fragmentation.
MARGIN = 1.1
# Per layer and per token x hidden: 34 bytes, of which tensor parallelism divides 24 (LayerNorms and dropouts see whole
# activations); and 5 per head and pair of tokens for the attention matrix, divided too.
WHOLE_BYTES, LAYER_BYTES, ATTENTION_BYTES = 10, 24, 5
KEPT_BYTES = 2  # with checkpointing, only the input of a layer is kept
LOGIT_BYTES = 6  # half precision, and single precision for the loss
# The host holds the optimiser's 12 bytes and a single-precision gradient of 4.
HOST_BYTES = OPTIMISER_BYTES + 4
# Gradients go to the host in buckets, two at a time (DeepSpeed's default size, in parameters).
BUCKET = 2 * 5e8


class PlanMemory(NamedTuple):
    """GiB per GPU: on the GPU, and on its host."""

    gpu_gib: float
    host_gib: float


class Memories(NamedTuple):
    """Like PlanMemory, for many plans."""

    gpu_gib: Floats
    host_gib: Floats


def memory(model: Transformer, plan: Plan) -> PlanMemory:
    gpu_gib, host_gib = memories(model, plan_arrays([plan]))
    return PlanMemory(float(gpu_gib[0]), float(host_gib[0]))


def memories(model: Transformer, plans: PlanArrays) -> Memories:
    """What each plan needs, with the safety margin."""
    dp, tp, pp, zero, ga, gc = (np.asarray(field, dtype=np.float64) for field in plans)
    micro_batch = model.global_batch / (dp * ga)
    # The fullest stage is the one with an embedding (or with the head over the vocabulary).
    weights = (model.parameters - model.embedding) / (tp * pp) + model.embedding / tp
    sharded = zero == ZERO_DP
    offload = zero == ZERO_OFFLOAD
    per_weight = np.where(
        sharded,
        WEIGHT_BYTES + (GRADIENT_BYTES + OPTIMISER_BYTES) / dp,
        float(WEIGHT_BYTES + GRADIENT_BYTES + OPTIMISER_BYTES),
    )
    leaving = GRADIENT_BYTES * np.minimum(weights, BUCKET)
    state = np.where(offload, WEIGHT_BYTES * weights + leaving, per_weight * weights)

    tokens = model.sequence * micro_batch
    attention = 0 if model.flash_attention else ATTENTION_BYTES * model.heads * model.sequence
    divided = LAYER_BYTES * model.hidden + attention
    layer = tokens * (WHOLE_BYTES * model.hidden + divided / tp)
    kept = np.where(gc > 0, KEPT_BYTES * tokens * model.hidden, layer)
    stage = kept * model.layers / pp
    again = np.where(gc > 0, layer, 0.0)  # the layer that is being computed again
    # The first stage holds a micro-batch for each stage that follows; the last stage holds one, and the logits.
    first = stage * np.minimum(pp, ga)
    last = stage + LOGIT_BYTES * tokens * model.vocabulary / tp
    gpu = state + again + np.maximum(first, last)
    host = np.where(offload, HOST_BYTES * model.parameters / dp, 0.0)
    return Memories(MARGIN * gpu / GIB, MARGIN * host / GIB)
