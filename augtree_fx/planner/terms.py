"""Predicted time of lanes, term by term, for every schedule: the closed form that plans are chosen by.

A rank of a lane of degree d computes a d-th of the lane's tokens. Transfers overlap with attention as far as the
schedule lets them; what is left over is *exposed*. Keys, values, queries and gradients of outputs move in the model's
dtype, partials and gradients of keys, values and queries in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from augtree_fx.planner.loads import Loads
from augtree_fx.planner.replay_shape import IntArray
from augtree_fx.planner.units import FloatArray
from augtree_fx.planner.work import SCHEDULES, Costs

# Reads and writes of a token between matmuls in one layer, forward, in (hidden size + width of queries): norms, rotary
# embedding, activation, residuals in eager transformers code. Fitted to examples/results/2026-11-29-step-h200.md.
ELEMENTWISE_PASSES = 92.0
# Reads and writes of a float32 logit, forward: log-probs and entropy in chunks. Same fit.
LOGIT_PASSES = 6.0
KERNELS_PER_LAYER = 40  # launches of one layer's forward in eager transformers code; an estimate, not counted
MERGE_BYTES = 10  # read and written for each value of a partial: the partial, the sum in float32 twice
FLOAT32_BYTES = 4


@dataclass(frozen=True, eq=False)
class Terms:
    """Microseconds; ``[lanes]``, and ``[schedules, lanes]`` from `replay_attention_us` on.

    Attributes:
        linear_us: matmuls and what lies between them, of all tokens.
        head_us: LM head and log-probs.
        prefill_attention_us: attention of prefilled nodes.
        prefill_transfer_us: keys and values of prefilled nodes around the lane, and their gradients back.
        prefill_exposed_us: of it, what attention does not cover.
        prefill_gathers: whether prefill gathers instead of rotating.
        replay_attention_us: attention of branches, to themselves and to ancestors.
        transfer_us: of the replay.
        exposed_us: of it, what attention does not cover.
        merge_us: partial softmax.
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
    weights_us: FloatArray

    @property
    def total_us(self) -> FloatArray:
        """``[schedules, lanes]``."""
        lane = self.linear_us + self.head_us + self.prefill_attention_us + self.prefill_exposed_us
        return lane + self.replay_attention_us + self.exposed_us + self.merge_us + self.weights_us

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
    time = tokens * model.num_layers * products * (2 * weight_us + moved)
    launches = passes * model.num_layers * products * KERNELS_PER_LAYER * machine.call_us
    return np.maximum(time, np.where(tokens > 0, launches, 0.0))


def head_us(scored: FloatArray, costs: Costs) -> FloatArray:
    """LM head of one rank's scored tokens, in chunks: the forward runs again in backward."""
    model, machine = costs.model, costs.hardware
    products = 1 + 3 * costs.execution.backwards
    product = 2 * model.hidden_size * model.vocab_size * machine.matmul.us_per_flop(scored)
    moved = LOGIT_PASSES * model.vocab_size * FLOAT32_BYTES / machine.memory_bytes_per_s * 1e6
    return scored * products * (product + moved)


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


def kv_bytes(token_layers: FloatArray | float, costs: Costs) -> tuple[FloatArray | float, FloatArray | float]:
    """Keys and values of so many tokens times layers: bytes shown, in forward and again in backward, and bytes of their
    float32 gradients."""
    values = token_layers * costs.model.kv_values_per_token
    shown = costs.execution.forwards + costs.execution.backwards
    return values * costs.model.dtype_bytes * shown, values * FLOAT32_BYTES * costs.execution.backwards


def query_bytes(token_layers: FloatArray | float, costs: Costs) -> tuple[FloatArray | float, FloatArray | float]:
    """Queries of so many tokens times layers: bytes sent (queries, in backward with the output's gradient) and float32
    bytes that return (partials, gradients of queries)."""
    model, execution = costs.model, costs.execution
    queries, outputs = token_layers * model.query_values_per_token, token_layers * model.output_values_per_token
    sent = queries * model.dtype_bytes * (execution.forwards + execution.backwards)
    sent = sent + outputs * model.dtype_bytes * execution.backwards
    return sent, FLOAT32_BYTES * (outputs * execution.forwards + queries * execution.backwards)


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
    degree = loads.degree
    passes = rounds * (waves + 1 if waves > 1 else 1)
    lane_tokens = loads.inner_tokens + loads.leaf_tokens
    linear = linear_us(lane_tokens / degree, passes, costs)
    head = head_us(loads.scored_tokens / degree, costs)
    directions = execution.forwards + 2 * execution.backwards
    calls = costs.hardware.call_us * model.num_layers * directions
    ring_calls = np.where(loads.inner_tokens > 0, degree * calls * rounds, 0.0)
    prefill = np.maximum(loads.prefill_us, ring_calls)
    links = _links(degree, costs)
    ring, gather = _kv_us(loads, 1, rounds, links, costs)
    ring_exposed = np.maximum(ring - prefill * (degree - 1) / degree, 0.0)
    gathers = (gather < ring_exposed) & may_gather
    replay, transfer, exposed = _replay_us(loads, waves, rounds, calls, links, costs)
    depth = loads.num_levels - 1
    shards = np.stack([degree, degree, np.ones_like(degree)]) * depth
    merged = shards * loads.leaf_tokens + np.where(gathers, 0.0, degree - 1) * loads.inner_tokens
    merge_bytes = merged / degree * model.output_values_per_token * MERGE_BYTES * model.num_layers
    merge = merge_bytes * (execution.forwards + execution.backwards) / costs.hardware.memory_bytes_per_s * 1e6
    prefill_exposed = np.where(gathers, gather, ring_exposed)
    compute = linear + head + prefill + prefill_exposed + replay + exposed + merge
    return Terms(
        linear_us=linear,
        head_us=head,
        prefill_attention_us=prefill,
        prefill_transfer_us=np.where(gathers, gather, ring),
        prefill_exposed_us=prefill_exposed,
        prefill_gathers=gathers.astype(np.float64),
        replay_attention_us=replay,
        transfer_us=transfer,
        exposed_us=exposed,
        merge_us=merge,
        weights_us=weights_us(compute, passes, costs),
    )


class _Links(NamedTuple):
    """``[lanes]``: latency in us, and us of one byte, of the link that binds each lane."""

    latency_us: FloatArray
    ring: FloatArray
    gather: FloatArray
    scatter: FloatArray
    exchange: FloatArray


def _links(degree: FloatArray, costs: Costs) -> _Links:
    distinct, where = np.unique(degree, return_inverse=True)
    links = [costs.hardware.link(int(ranks)) for ranks in distinct]
    rows = [
        (
            link.latency_us,
            1e6 / link.ring_bytes_per_s,
            1e6 / link.all_gather_bytes_per_s,
            1e6 / link.reduce_scatter_bytes_per_s,
            1e6 / link.all_to_all_bytes_per_s,
        )
        for link in links
    ]
    return _Links(*np.array(rows).T[:, where])


def _kv_us(loads: Loads, waves: int, rounds: int, links: _Links, costs: Costs) -> tuple[FloatArray, FloatArray]:
    """Time to show every rank of a lane all prompt KV, `waves` times a round, and to bring float32 gradients home.

    Returns:
        By a ring, and by gather and reduce-scatter.
    """
    execution, model = costs.execution, costs.model
    degree, moves = loads.degree, loads.degree > 1
    payload, gradients = kv_bytes(loads.kv_token_layers * (degree - 1) / degree * waves, costs)
    calls = model.num_layers * (execution.forwards + 2 * execution.backwards) * links.latency_us * waves * rounds
    calls = np.where(moves & (loads.kv_token_layers > 0), calls, 0.0)
    by_ring = (payload + gradients) * links.ring + calls * (degree - 1)
    by_gather = payload * links.gather + gradients * links.scatter + calls
    return by_ring, by_gather


def _unevenness(loads: Loads, passes: int) -> FloatArray:
    """Attention of branches to themselves on the fullest rank, over the lane's average.

    A packed tensor is sharded into equal runs of tokens, and late tokens have more keys than early ones. If the longest
    branch is longer than a run, some rank has its end; otherwise runs differ as samples of branches do, and the fullest
    one is two standard deviations above the average, but never more than the longest branch all over.
    """
    tokens = np.maximum(loads.leaf_tokens, 1.0)
    share, mean_keys = tokens / loads.degree / passes, np.maximum(loads.own_pairs / tokens, 1.0)
    variance = np.maximum(loads.own_cubes / tokens / 4 - mean_keys**2, 0.0)
    sampled = mean_keys + 2 * np.sqrt(variance * 2 * mean_keys / share)
    longest = loads.longest_leaf
    keys = np.where(longest > share, longest - share / 2, np.minimum(longest / 2, sampled))
    return np.where(loads.degree > 1, np.maximum(keys / mean_keys, 1.0), 1.0)


def _replay_us(
    loads: Loads, waves: int, rounds: int, calls: float, links: _Links, costs: Costs
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """``[schedules, lanes]`` attention, transfer and exposed transfer of the replay."""
    model, execution, degree = costs.model, costs.execution, loads.degree
    replays = loads.leaf_tokens > 0
    depth = max(loads.num_levels - 1, 1)
    pieces = np.stack([degree * depth, np.full_like(degree, depth), np.full_like(degree, depth)])
    floor = np.where(replays, calls * waves * rounds, 0.0)
    own = np.maximum(loads.own_us * _unevenness(loads, waves * rounds), floor)
    cross = np.maximum(loads.cross_us, pieces * floor)
    ring, gather = (np.where(replays, time, 0.0) for time in _kv_us(loads, waves, rounds, links, costs))
    away = loads.leaf_tokens * model.num_layers * (degree - 1) / degree
    sent, returned = query_bytes(away, costs)
    started = np.where(replays & (degree > 1), model.num_layers * links.latency_us * waves * rounds, 0.0)
    directions = execution.forwards + execution.backwards
    out = sent * links.gather + started * directions
    back = returned * links.exchange + started * directions
    # A branch longer than a rank's share is sharded, and its own KV goes around too.
    share = loads.leaf_tokens / degree / (waves * rounds)
    long = np.where(loads.longest_leaf > share, np.minimum(loads.longest_leaf * degree, loads.leaf_tokens), 0.0)
    moved = sum(kv_bytes(long * model.num_layers / degree * (degree > 1), costs))
    straddle = moved * links.ring + np.where(moved > 0, started * directions, 0.0)
    transfer = np.stack([ring, out + back, gather]) + straddle
    rotating = np.maximum(ring + straddle - own - cross[0] * (degree - 1) / degree, 0.0)
    moving = np.maximum(out + straddle - own, 0.0) + back
    gathering = np.maximum(gather + straddle - own, 0.0)
    return own + cross, transfer, np.stack([rotating, moving, gathering])


assert [schedule.value for schedule in SCHEDULES] == ["rotate_kv", "move_q", "gather_kv"], "rows above follow SCHEDULES"
