"""Bytes that move in a lane, their time, and what of it attention does not cover.

Keys, values, queries and gradients of outputs move in the model's dtype, partials and gradients of keys, values and
queries in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from augtree_fx.planner.loads import Loads, by_degree
from augtree_fx.planner.memory import FLOAT32_BYTES
from augtree_fx.planner.units import FloatArray
from augtree_fx.planner.work import SCHEDULES, Costs


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


@dataclass(frozen=True, eq=False)
class Replay:
    """Attention of branches on the fullest rank.

    Attributes:
        own_us: ``[lanes]`` to themselves.
        local_us: ``[lanes]`` of that, on keys that the rank has: all but that of branches that are cut.
        cross_us: ``[schedules, lanes]`` to ancestors.
    """

    own_us: FloatArray
    local_us: FloatArray
    cross_us: FloatArray

    @staticmethod
    def of(loads: Loads, costs: Costs) -> Replay:
        skew, degree = loads.skew.cross, loads.degree
        cut = np.minimum(loads.skew.cut_tokens / np.maximum(loads.leaf_tokens, 1.0), 1.0)
        length = loads.own_cubes / np.maximum(2 * loads.own_pairs, 1.0)  # of a branch, by its pairs
        slower = costs.causal_us.at(length / (2 * degree)) / costs.causal_us.at(length)  # in chunks
        own = loads.own_us * loads.skew.own * (1 + cut * np.maximum(slower - 1, 0.0))
        shared = np.ones_like(skew)  # queries that move are attended for by all ranks, whoever has them
        return Replay(own, own * (1 - cut * (degree - 1) / degree), loads.cross_us * np.stack([skew, shared, skew]))

    @property
    def total_us(self) -> FloatArray:
        return self.own_us + self.cross_us


class Links(NamedTuple):
    """``[lanes]``: latency in us, and us of one byte, of the link that binds each lane."""

    latency_us: FloatArray
    ring: FloatArray
    gather: FloatArray
    scatter: FloatArray
    exchange: FloatArray


def links_of(degree: FloatArray, costs: Costs) -> Links:
    def row_of(ranks: int) -> tuple[float, ...]:
        link = costs.hardware.link(ranks)
        return (
            link.latency_us,
            1e6 / link.ring_bytes_per_s,
            1e6 / link.all_gather_bytes_per_s,
            1e6 / link.reduce_scatter_bytes_per_s,
            1e6 / link.all_to_all_bytes_per_s,
        )

    return Links(*by_degree(degree, row_of))


@dataclass(frozen=True, eq=False)
class Keys:
    """``[lanes]`` microseconds in which keys and values are shown to all ranks, and their gradients come home.

    Gradients leave when the last call has made them: nothing is left to cover a gather's, or the last step of a ring's.
    """

    shown_by_ring: FloatArray
    home_by_ring: FloatArray
    shown_by_gather: FloatArray
    home_by_scatter: FloatArray

    @property
    def ring(self) -> FloatArray:
        return self.shown_by_ring + self.home_by_ring

    @property
    def gather(self) -> FloatArray:
        return self.shown_by_gather + self.home_by_scatter

    def ring_exposed(self, covered_us: FloatArray, degree: FloatArray, more_us: FloatArray | float = 0.0) -> FloatArray:
        """What attention that runs meanwhile, in all steps but the last, and more transfers leave of a ring."""
        last = self.home_by_ring / np.maximum(degree - 1, 1)
        return np.maximum(self.ring - last + more_us - covered_us, 0.0) + last

    def gather_exposed(self, covered_us: FloatArray) -> FloatArray:
        """What attention on own keys leaves of a gather."""
        return np.maximum(self.shown_by_gather - covered_us, 0.0) + self.home_by_scatter


def kv_us(loads: Loads, waves: int, rounds: int, links: Links, costs: Costs, *, cut: bool = True) -> Keys:
    """Keys and values of prompts, `waves` times a round, and of branches that are ``cut``."""
    execution, model = costs.execution, costs.model
    degree, moves = loads.degree, loads.degree > 1
    keys = loads.kv_token_layers * waves * loads.skew.keys + cut * loads.skew.cut_tokens * model.num_layers
    payload, gradients = kv_bytes(keys * (degree - 1) / degree, costs)
    call = np.where(moves & (keys > 0), model.num_layers * links.latency_us * waves * rounds, 0.0)
    shown, home = call * (execution.forwards + execution.backwards), call * execution.backwards
    return Keys(
        payload * links.ring + shown * (degree - 1),
        gradients * links.ring + home * (degree - 1),
        payload * links.gather + shown,
        gradients * links.scatter + home,
    )


def _queries_us(loads: Loads, waves: int, rounds: int, links: Links, costs: Costs) -> tuple[FloatArray, FloatArray]:
    """Queries of branches, and in backward what belongs to them, to all ranks; partials and gradients back."""
    model, execution, degree = costs.model, costs.execution, loads.degree
    moves = (loads.leaf_tokens > 0) & (degree > 1)
    away = np.where(moves, loads.leaf_tokens * model.num_layers * (degree - 1) / degree * loads.skew.tokens, 0.0)
    sent, returned = query_bytes(away, costs)
    started = np.where(moves, model.num_layers * links.latency_us * waves * rounds, 0.0)
    directions = execution.forwards + execution.backwards
    return sent * links.gather + started * directions, returned * links.exchange + started * directions


def joint_us(
    loads: Loads, rounds: int, prefill: FloatArray, replay: Replay, links: Links, costs: Costs
) -> tuple[FloatArray, FloatArray]:
    """``[schedules, lanes]`` transfer and exposed transfer where prompts and branches run in one pass: keys move once.

    Prompts' queries need all keys of prompts under every schedule; branches attend to them as they come by.
    """
    degree = loads.degree
    keys = kv_us(loads, 1, rounds, links, costs)
    out, back = _queries_us(loads, 1, rounds, links, costs)
    own, later = replay.own_us, (degree - 1) / degree
    rotating = keys.ring_exposed(own + (prefill + replay.cross_us[0]) * later, degree)
    moving = keys.ring_exposed(own + prefill * later, degree, out) + back
    gathering = keys.gather_exposed(replay.local_us + (prefill + replay.cross_us[2]) / degree)
    return np.stack([keys.ring, keys.ring + out + back, keys.gather]), np.stack([rotating, moving, gathering])


def replay_us(
    loads: Loads, waves: int, rounds: int, replay: Replay, links: Links, costs: Costs
) -> tuple[FloatArray, FloatArray]:
    """``[schedules, lanes]`` transfer and exposed transfer of waves after the prompts."""
    degree = loads.degree
    keys = kv_us(loads, waves, rounds, links, costs)
    out, back = _queries_us(loads, waves, rounds, links, costs)
    own, later = replay.own_us, (degree - 1) / degree
    rotating = keys.ring_exposed(own + replay.cross_us[0] * later, degree)
    moving = np.maximum(out - replay.local_us, 0.0) + back
    gathering = keys.gather_exposed(replay.local_us + replay.cross_us[2] / degree)
    here = np.where(loads.leaf_tokens > 0, 1.0, 0.0)
    return np.stack([keys.ring, out + back, keys.gather]) * here, np.stack([rotating, moving, gathering]) * here


assert [schedule.value for schedule in SCHEDULES] == ["rotate_kv", "move_q", "gather_kv"], "rows above follow SCHEDULES"
