"""What every single rank has to do in one pass, counted pair by pair: the input of the simulation.

Nothing here is shared with the closed-form costs but the measured rates of kernels. Prompts and rows are dealt in
zigzag, so that every rank has the same share of each. Branches are cut into equal runs of tokens in packed order, as a
packed tensor is sharded: a rank with the ends of long branches has more pairs than its neighbour, and waits show it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from augtree_fx.planner.plan import Lane, Plan
from augtree_fx.planner.replay_shape import IntArray
from augtree_fx.planner.schedule import Schedule
from augtree_fx.planner.units import FloatArray, summed
from augtree_fx.planner.work import BACKWARD_FLOP, Costs, causal_pairs


@dataclass(frozen=True, eq=False)
class Attention:
    """Microseconds of one layer's attention on each rank, forward and backward: arrays ``[2, ranks]``.

    Attributes:
        prefill: prefilled nodes, all steps of the ring together.
        own: branches with themselves.
        cross: branches with their ancestors, all steps together.
    """

    prefill: FloatArray
    own: FloatArray
    cross: FloatArray


@dataclass(frozen=True, eq=False)
class LanePass:
    """One lane's share of one pass.

    Attributes:
        prompt_tokens: prefilled tokens of each rank.
        branch_tokens: ``[ranks]`` replayed tokens.
        scored_tokens: of each rank.
        attention: one entry a kind of layer, in the order of the model's `windows`.
        kv_tokens: one entry a kind of layer: prefilled tokens of one rank's shard whose KV moves.
        straddling_tokens: most tokens of a branch that lie on an earlier rank than its end.
    """

    prompt_tokens: float
    branch_tokens: FloatArray
    scored_tokens: float
    attention: tuple[Attention, ...]
    kv_tokens: tuple[float, ...]
    straddling_tokens: float


def lane_pass(plan: Plan, lane: Lane, *, number: int, wave: int | None, prefills: bool) -> LanePass:
    """Count the work of one pass.

    Args:
        plan: what runs.
        lane: one of its lanes.
        number: the round.
        wave: the wave whose branches are replayed, or ``None``.
        prefills: whether the round's prompts run, too.
    """
    shape, model, degree = plan.shape, plan.costs.model, lane.degree
    ancestors = _ancestors(plan, lane, number)
    nodes = [node for one in lane.waves if (one.round, one.index) == (number, wave) for node in one.branches]
    leaves = np.array(nodes, dtype=np.int64)
    segments = _segments(shape.length[leaves], degree)
    queries = _queries(plan, leaves, segments, ancestors, degree)
    length = shape.length[ancestors].astype(np.float64)
    branch_tokens = summed(segments.rank, segments.end - segments.begin, degree)
    kinds = tuple(
        _attention(plan, lane, leaves, segments, queries, ancestors if prefills else ancestors[:0], ancestors, window)
        for window, _ in model.windows
    )
    scored = shape.scored_tokens[leaves].sum() + (shape.scored_tokens[ancestors].sum() if prefills else 0)
    return LanePass(
        prompt_tokens=float(length.sum()) / degree if prefills else 0.0,
        branch_tokens=branch_tokens,
        scored_tokens=float(scored) / degree,
        attention=kinds,
        kv_tokens=tuple(
            float(np.minimum(length, np.inf if window is None else window).sum()) / degree
            for window, _ in model.windows
        ),
        straddling_tokens=float(segments.begin.max(initial=0)),
    )


def _ancestors(plan: Plan, lane: Lane, number: int) -> IntArray:
    """Prefilled nodes of a lane's round, each once."""
    parent = plan.shape.parent
    found: set[int] = set()
    for part in lane.parts:
        if part.round != number:
            continue
        found.add(part.tree)
        for branch in part.branches:
            node = int(parent[branch])
            while node >= 0 and node not in found:
                found.add(node)
                node = int(parent[node])
    return np.array(sorted(found), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class _Segments:
    """Runs of tokens ``[begin, end)`` of branch number `leaf` on rank `rank`."""

    leaf: IntArray
    rank: IntArray
    begin: FloatArray
    end: FloatArray


def _segments(lengths: IntArray, degree: int) -> _Segments:
    """Cut branches, one after another, into as many equal runs of tokens as there are ranks."""
    total = int(lengths.sum())
    ends = np.cumsum(lengths)
    cuts = np.unique(np.concatenate([[0], ends, np.arange(1, degree) * total / degree])) if total else np.zeros(1)
    low, high = cuts[:-1], cuts[1:]
    middle = (low + high) / 2
    leaf = np.searchsorted(ends, middle)
    rank = np.minimum((middle * degree / max(total, 1)).astype(np.int64), degree - 1)
    starts = (ends - lengths)[leaf].astype(np.float64)
    return _Segments(leaf, rank, low - starts, high - starts)


def _queries(plan: Plan, leaves: IntArray, segments: _Segments, ancestors: IntArray, degree: int) -> FloatArray:
    """``[ranks, ancestors]`` branch tokens of each rank below each ancestor."""
    queries = np.zeros((degree, len(ancestors)))
    if not len(leaves):
        return queries
    above = plan.shape.parent[leaves][segments.leaf]
    tokens = segments.end - segments.begin
    while (above >= 0).any():
        inside = above >= 0
        np.add.at(queries, (segments.rank[inside], np.searchsorted(ancestors, above[inside])), tokens[inside])
        above = np.where(inside, plan.shape.parent[above], -1)
    return queries


def _attention(
    plan: Plan,
    lane: Lane,
    leaves: IntArray,
    segments: _Segments,
    queries: FloatArray,
    prefilled: IntArray,
    ancestors: IntArray,
    window: int | None,
) -> Attention:
    costs, degree, shape = plan.costs, lane.degree, plan.shape
    reach = np.inf if window is None else float(window)
    length = shape.length[prefilled].astype(np.float64)
    chunk = length / (2 * degree) if degree > 1 else length
    if lane.schedule is None:
        chunk = length  # heads are split, not tokens
    pairs = causal_pairs(length, window) / degree
    prefill = _time(pairs, np.minimum(chunk, reach), costs, causal=True).sum(axis=1)
    start = shape.path_start[prefilled].astype(np.float64)
    seen = causal_pairs(start + length, window) - causal_pairs(start, window) - causal_pairs(length, window)
    prefill = prefill + _time(seen / degree, np.minimum(chunk, reach), costs, causal=False).sum(axis=1)
    own = causal_pairs(segments.end, window) - causal_pairs(segments.begin, window)
    own_us = _time(own, np.minimum(segments.end - segments.begin, reach), costs, causal=True)
    own_by_rank = np.stack([summed(segments.rank, one, degree) for one in own_us])
    cross = _cross(plan, lane, leaves, segments, queries, ancestors, window)
    return Attention(np.repeat(prefill[:, None], degree, axis=1), own_by_rank, cross)


def _cross(
    plan: Plan,
    lane: Lane,
    leaves: IntArray,
    segments: _Segments,
    queries: FloatArray,
    ancestors: IntArray,
    window: int | None,
) -> FloatArray:
    """``[2, ranks]`` attention of branches to their ancestors."""
    costs, degree = plan.costs, lane.degree
    if window is not None:
        begin = plan.shape.path_start[leaves][segments.leaf] if len(leaves) else segments.begin
        full = causal_pairs(begin + segments.end, window) - causal_pairs(begin + segments.begin, window)
        own = causal_pairs(segments.end, window) - causal_pairs(segments.begin, window)
        time = _time(full - own, np.minimum(segments.end - segments.begin, window), costs, causal=False)
        return np.stack([summed(segments.rank, one, degree) for one in time])
    keys = plan.shape.length[ancestors].astype(np.float64)
    if lane.schedule is Schedule.MOVE_Q:
        total = queries.sum(axis=0)
        time = _time(total * keys / degree, np.minimum(total, keys / degree), costs, causal=False).sum(axis=1)
        return np.repeat(time[:, None], degree, axis=1)
    held = keys / degree if lane.schedule is Schedule.ROTATE_KV else keys
    return _time(queries * keys, np.minimum(queries, held), costs, causal=False).sum(axis=2)


def _time(pairs: FloatArray, size: FloatArray, costs: Costs, *, causal: bool) -> FloatArray:
    """``[2, ...]`` microseconds forward and backward."""
    machine = costs.hardware
    forward, backward = machine.full_forward, machine.full_backward
    if causal:
        forward, backward = machine.causal_forward, machine.causal_backward
    flop = pairs * costs.model.pair_flop
    return np.stack([flop * forward.us_per_flop(size), flop * BACKWARD_FLOP * backward.us_per_flop(size)])
