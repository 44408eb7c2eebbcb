"""What every single rank has to do in one pass, counted pair by pair: the input of the simulation.

Nothing here is shared with the closed-form costs but the measured rates of kernels. Nodes are dealt to ranks as
`dtensor_ops.shards` deals them: long prompts in zigzag, so that every rank has the same share of each; branches whole,
unless they are longer than a share. Baselines cut branches into equal runs of tokens in packed order. A rank with more
tokens or pairs than its neighbour makes it wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from augtree_fx.dtensor_ops.shards import MIN_CHUNK_TOKENS, MIN_CUT_TOKENS, UNEVEN
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
        prompt_tokens: ``[ranks]`` prefilled tokens.
        branch_tokens: ``[ranks]`` replayed tokens.
        scored_tokens: ``[ranks]``.
        attention: one entry a kind of layer, in the order of the model's `windows`.
        kv_tokens: one entry a kind of layer: tokens whose KV moves, the most that one rank has.
    """

    prompt_tokens: FloatArray
    branch_tokens: FloatArray
    scored_tokens: FloatArray
    attention: tuple[Attention, ...]
    kv_tokens: tuple[float, ...]


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
    prefilled = ancestors if prefills else ancestors[:0]
    segments, prompts = _dealt(plan, lane, leaves, prefilled)
    queries = _queries(plan, leaves, segments, ancestors, degree)
    tokens = segments.end - segments.begin
    leaf_scores = shape.scored_tokens[leaves] / np.maximum(shape.length[leaves], 1)
    prompt_scores = shape.scored_tokens[prefilled] / np.maximum(shape.length[prefilled], 1)
    held = _dealt(plan, lane, leaves[:0], ancestors)[1]
    pieces, passed_on = np.bincount(segments.leaf, minlength=len(leaves))[segments.leaf], 0.0
    cut_tokens = np.where(pieces > 1, tokens, 0.0)
    if plan.name != "augtree":  # the keys of a cut branch go to its later ranks alone
        cut_tokens, passed_on = cut_tokens * 0, segments.begin.max(initial=0.0) / max(degree - 1, 1)

    def moving(window: int | None) -> float:
        reach = np.inf if window is None else float(window)
        seen = np.minimum(1.0, reach / np.maximum(shape.length[ancestors][held.leaf], 1))
        keys = summed(held.rank, (held.end - held.begin) * seen, degree)
        return float((keys + summed(segments.rank, cut_tokens, degree)).max() + passed_on)

    return LanePass(
        prompt_tokens=summed(prompts.rank, prompts.end - prompts.begin, degree),
        branch_tokens=summed(segments.rank, tokens, degree),
        scored_tokens=summed(segments.rank, tokens * leaf_scores[segments.leaf], degree)
        + summed(prompts.rank, (prompts.end - prompts.begin) * prompt_scores[prompts.leaf], degree),
        attention=tuple(
            _attention(plan, lane, leaves, segments, queries, prompts, prefilled, ancestors, window)
            for window, _ in model.windows
        ),
        kv_tokens=tuple(moving(window) for window, _ in model.windows),
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
    """Runs of tokens ``[begin, end)`` of node number `leaf` on rank `rank`."""

    leaf: IntArray
    rank: IntArray
    begin: FloatArray
    end: FloatArray


def _dealt(plan: Plan, lane: Lane, leaves: IntArray, prefilled: IntArray) -> tuple[_Segments, _Segments]:
    """Runs of branches and of prefilled nodes that run in one pass."""
    shape, degree = plan.shape, lane.degree
    nodes = np.concatenate([prefilled, leaves])
    lengths = shape.length[nodes]
    with_branches = np.isin(nodes, shape.parent)
    long = lengths >= 2 * degree * MIN_CHUNK_TOKENS
    asked = lane.cut & (lengths >= 2 * degree * MIN_CUT_TOKENS)
    cut = long & with_branches & (degree > 1)
    if plan.name != "augtree":
        cut = np.full(len(nodes), degree > 1)
    load = np.full(degree, lengths[cut].sum() / degree)
    owner = np.full(len(nodes), -1, dtype=np.int64)
    rest = np.flatnonzero(~cut)
    for number in rest[np.argsort(-lengths[rest], kind="stable")].tolist():
        least = int(load.argmin())
        most = UNEVEN * lengths.sum() / degree
        if asked[number] or (degree > 1 and long[number] and load[least] + lengths[number] > most):
            load += lengths[number] / degree
        else:
            owner[number] = least
            load[least] += lengths[number]
    chunks = np.where(owner < 0, 2 * degree, 1)
    node = np.repeat(np.arange(len(nodes)), chunks)
    piece = np.arange(len(node)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    rank = np.where(owner[node] < 0, np.minimum(piece, 2 * degree - 1 - piece), owner[node])
    begin, end = (lengths[node] * (piece + step) / chunks[node] for step in (0, 1))
    first = node < len(prefilled)
    prompts = _Segments(node[first], rank[first], begin[first], end[first])
    if plan.name != "augtree":
        return _runs(shape.length[leaves], degree), prompts
    return _Segments(node[~first] - len(prefilled), rank[~first], begin[~first], end[~first]), prompts


def _runs(lengths: IntArray, degree: int) -> _Segments:
    """Branches one after another, cut into as many equal runs of tokens as there are ranks."""
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
    prompts: _Segments,
    prefilled: IntArray,
    ancestors: IntArray,
    window: int | None,
) -> Attention:
    costs, degree, shape = plan.costs, lane.degree, plan.shape
    reach = np.inf if window is None else float(window)
    chunk = np.minimum(prompts.end - prompts.begin, reach)
    if lane.schedule is None:
        chunk = np.minimum(shape.length[prefilled][prompts.leaf], reach)  # heads are split, not tokens
    pairs = causal_pairs(prompts.end, window) - causal_pairs(prompts.begin, window)
    start = shape.path_start[prefilled][prompts.leaf].astype(np.float64)
    seen = causal_pairs(start + prompts.end, window) - causal_pairs(start + prompts.begin, window) - pairs
    prefill_us = _time(pairs, chunk, costs, causal=True) + _time(seen, chunk, costs, causal=False)
    prefill = np.stack([summed(prompts.rank, one, degree) for one in prefill_us])
    own = causal_pairs(segments.end, window) - causal_pairs(segments.begin, window)
    own_us = _time(own, np.minimum(segments.end - segments.begin, reach), costs, causal=True)
    own_by_rank = np.stack([summed(segments.rank, one, degree) for one in own_us])
    cross = _cross(plan, lane, leaves, segments, queries, ancestors, window)
    return Attention(prefill, own_by_rank, cross)


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
