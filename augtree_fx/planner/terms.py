"""Predicted time of lanes, term by term, for every schedule: the closed form that plans are chosen by.

A rank of a lane of degree d computes a d-th of the lane's tokens, or what its skew says. Transfers overlap with
attention as far as the schedule lets them; what is left over is *exposed*.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from augtree_fx.planner.host import waits_us
from augtree_fx.planner.loads import Loads
from augtree_fx.planner.memory import HEAD_CHUNK_TOKENS
from augtree_fx.planner.replay_shape import IntArray
from augtree_fx.planner.transfers import Replay, joint_us, kv_us, links_of, replay_us
from augtree_fx.planner.units import FloatArray
from augtree_fx.planner.work import Costs

# Reads and writes of a token between matmuls in one layer, forward, in (hidden size + width of queries): norms, rotary
# embedding, activation, residuals in eager transformers code. Fitted to examples/results/2026-11-29-step-h200.md.
ELEMENTWISE_PASSES = 88.0
# Bytes read and written for each logit between matmuls, counted in torch 2.11. Forward: to float32 (6), and logsumexp
# as amax (4), difference (8), exp in place (8), sum (4). Backward: exp of a difference times a gradient (24), zeros for
# the target's (4), the sum of both (12), to bf16 (6).
LOGIT_FORWARD_BYTES, LOGIT_BACKWARD_BYTES = 30.0, 46.0
WEIGHT_SUM_PASSES = 3  # a chunk's gradient of the head's weights is added to those before: two reads, one write
MERGE_BYTES = 10  # read and written for each value of a partial: the partial, the sum in float32 twice


@dataclass(frozen=True, eq=False)
class Terms:
    """Microseconds; ``[lanes]``, and ``[schedules, lanes]`` from `replay_attention_us` on.

    Attributes:
        linear_us: matmuls and what lies between them, of all tokens.
        head_us: LM head and log-probs.
        prefill_attention_us: attention of prefilled nodes.
        prefill_transfer_us: keys and values of prefilled nodes around the lane, and their gradients back, in a pass of
            their own; where branches run in the same pass, keys move once, and count as the replay's.
        prefill_exposed_us: of it, what attention does not cover.
        prefill_gathers: whether prefill gathers instead of rotating.
        replay_attention_us: attention of branches, to themselves and to ancestors.
        transfer_us: of the replay, or of the one pass.
        exposed_us: of it, what attention does not cover.
        merge_us: partial softmax.
        host_us: waits for the host.
        weights_us: FSDP's collectives, as far as they are not covered.
    """

    linear_us: FloatArray
    head_us: FloatArray
    prefill_attention_us: FloatArray
    prefill_transfer_us: FloatArray
    prefill_exposed_us: FloatArray
    prefill_gathers: FloatArray
    replay_attention_us: FloatArray
    transfer_us: FloatArray
    exposed_us: FloatArray
    merge_us: FloatArray
    host_us: FloatArray
    weights_us: FloatArray

    @property
    def total_us(self) -> FloatArray:
        """``[schedules, lanes]``."""
        lane = self.linear_us + self.head_us + self.prefill_attention_us + self.prefill_exposed_us
        return lane + self.replay_attention_us + self.exposed_us + self.merge_us + self.host_us + self.weights_us

    def of(self, lanes: slice) -> Terms:
        """Those of some lanes."""
        return Terms(*(getattr(self, name)[..., lanes] for name in _TERMS))

    def rows(self, lanes: IntArray, schedule: IntArray) -> list[dict[str, float]]:
        """Every term of some lanes, each in its schedule."""
        arrays = [getattr(self, name) for name in _TERMS]
        columns = [(values[lanes] if values.ndim == 1 else values[schedule, lanes]).tolist() for values in arrays]
        return [dict(zip(_TERMS, row, strict=True)) for row in zip(*columns, strict=True)]


_TERMS = tuple(field.name for field in fields(Terms))


def linear_us(tokens: FloatArray, passes: FloatArray | int, costs: Costs) -> FloatArray:
    """Layers without attention: `tokens` of one rank in so many equal passes."""
    model, execution, machine = costs.model, costs.execution, costs.hardware
    rows = tokens / passes
    products = execution.forwards + 2 * execution.backwards
    weight_us = model.dense_weights * machine.matmul.us_per_flop(rows)
    if model.num_experts:
        busy = rows * model.experts_per_token / model.num_experts
        weight_us = weight_us + model.expert_weights * machine.matmul.us_per_flop(busy)
    width = model.hidden_size + model.query_values_per_token
    moved = ELEMENTWISE_PASSES * width * model.dtype_bytes / machine.memory_bytes_per_s * 1e6
    return tokens * model.num_layers * products * (2 * weight_us + moved)


def head_us(scored: FloatArray, costs: Costs) -> FloatArray:
    """LM head of one rank's scored tokens, in chunks: the forward runs again in backward."""
    model, machine, backwards = costs.model, costs.hardware, costs.execution.backwards
    weights = model.hidden_size * model.vocab_size
    product = 2 * weights * machine.matmul.us_per_flop(np.minimum(scored, HEAD_CHUNK_TOKENS))
    between = LOGIT_FORWARD_BYTES * (1 + backwards) + LOGIT_BACKWARD_BYTES * backwards
    copied_us = 1e6 / machine.memory_bytes_per_s
    sums = np.ceil(scored / HEAD_CHUNK_TOKENS) * backwards * WEIGHT_SUM_PASSES * weights * model.dtype_bytes * copied_us
    return scored * ((1 + 3 * backwards) * product + between * model.vocab_size * copied_us) + sums


def weights_us(compute_us: FloatArray, passes: FloatArray | int, costs: Costs) -> FloatArray:
    """FSDP: gather of all weights a pass and direction, reduce-scatter of gradients; beside the computation."""
    world, execution = costs.world_size, costs.execution
    if world == 1 or not execution.shard_weights:
        return np.zeros_like(compute_us)
    link = costs.hardware.link(world)
    moved = costs.model.total_weights * costs.model.dtype_bytes * (world - 1) / world * 1e6
    gathers = (1 + execution.backwards) * moved / link.all_gather_bytes_per_s
    scatters = execution.backwards * moved / link.reduce_scatter_bytes_per_s
    calls = costs.model.num_layers * (1 + 2 * execution.backwards) * link.latency_us
    return np.maximum(passes * (gathers + scatters + calls) - compute_us, 0.0)


def exchange_us(tokens: FloatArray, degree: FloatArray, costs: Costs) -> FloatArray:
    """All-to-all of queries, keys, values and outputs of a rank's tokens in all layers; gradients go the same way."""
    model, execution = costs.model, costs.execution
    kv_heads = np.maximum(degree, model.num_kv_heads)  # replicated where there are more ranks than key heads
    own = model.query_values_per_token + model.output_values_per_token
    values = own + kv_heads * (model.head_dim + model.value_head_dim)
    directions = execution.forwards + execution.backwards
    moved = tokens * values * model.dtype_bytes * model.num_layers * directions * (degree - 1) / degree
    link = costs.hardware.link(int(degree.max()))
    calls = 2 * model.num_layers * directions * link.latency_us * (degree > 1)
    return moved / link.all_to_all_bytes_per_s * 1e6 + calls


def terms_of(loads: Loads, waves: int, rounds: int, costs: Costs, *, may_gather: bool = True) -> Terms:
    """Terms of every lane under every schedule.

    Args:
        loads: work of the lanes.
        waves: passes over branches in each round.
        rounds: parts of the batch that run one after another, prompts and all.
        costs: what prices depend on.
        may_gather: whether prefill may gather keys and values where a ring takes longer.
    """
    model, execution = costs.model, costs.execution
    degree, skew = loads.degree, loads.skew
    passes = rounds * (waves + 1 if waves > 1 else 1)
    lane_tokens = loads.inner_tokens + loads.leaf_tokens
    linear = linear_us(lane_tokens / degree, passes, costs) * skew.tokens
    head = head_us(loads.scored_tokens / degree * skew.scored, costs)
    prefill = loads.prefill_us * skew.prefill
    links = links_of(degree, costs)
    replay = Replay.of(loads, costs)
    if waves == 1:
        transfer, exposed = joint_us(loads, rounds, prefill, replay, links, costs)
        ring = ring_exposed = np.zeros_like(prefill)
        gathers = np.zeros(len(prefill), dtype=bool)
    else:
        keys = kv_us(loads, 1, rounds, links, costs, cut=False)
        ring, ring_exposed = keys.ring, keys.ring_exposed(prefill * (degree - 1) / degree, degree)
        gathers = (keys.gather < ring_exposed) & may_gather
        ring, ring_exposed = (np.where(gathers, keys.gather, time) for time in (ring, ring_exposed))
        transfer, exposed = replay_us(loads, waves, rounds, replay, links, costs)
    depth = loads.num_levels - 1
    shards = np.stack([degree, degree, np.ones_like(degree)]) * depth
    merged = shards * loads.leaf_tokens + np.where(gathers, 0.0, degree - 1) * loads.inner_tokens
    merge_bytes = merged / degree * skew.tokens * model.output_values_per_token * MERGE_BYTES * model.num_layers
    merge = merge_bytes * (execution.forwards + execution.backwards) / costs.hardware.memory_bytes_per_s * 1e6
    layers = linear + prefill + ring_exposed + replay.total_us + exposed + merge
    waits = waits_us(loads, waves, rounds, layers, head, costs)
    return Terms(
        linear_us=linear,
        head_us=head,
        prefill_attention_us=prefill,
        prefill_transfer_us=ring,
        prefill_exposed_us=ring_exposed,
        prefill_gathers=gathers.astype(np.float64),
        replay_attention_us=replay.total_us,
        transfer_us=transfer,
        exposed_us=exposed,
        merge_us=merge,
        host_us=waits,
        weights_us=weights_us(layers + head + waits, passes, costs),
    )
