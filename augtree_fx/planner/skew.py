"""How unevenly the ranks of a lane share its nodes, by the rule of `dtensor_ops.shards`.

Long prompts are cut into chunks, equally much on every rank. What is left, branches and short prompts, lies whole on
the rank with fewest tokens, the longest first, unless a branch is so long that it is cut, too. The rank that takes
longest makes its lane wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from augtree_fx.dtensor_ops.shards import MIN_CHUNK_TOKENS, MIN_CUT_TOKENS, UNEVEN
from augtree_fx.planner.loads import Loads, Skew
from augtree_fx.planner.packing import Packing
from augtree_fx.planner.placement import Placement
from augtree_fx.planner.replay_shape import IntArray
from augtree_fx.planner.terms import Terms
from augtree_fx.planner.units import FloatArray, summed, summed_rows
from augtree_fx.planner.work import causal_pairs

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class _Nodes:
    """Nodes of lanes of several ranks, each in the *share* of its lane that runs in one pass. Arrays are ``[nodes]``.

    Attributes:
        length: tokens.
        share: which share it belongs to.
        inner: whether it is prefilled.
        parent: whether it has children.
        amounts: ``[6, nodes]``: tokens, scored tokens, attention of prompts, of branches to themselves, to ancestors,
            in any unit that is one for all nodes; tokens whose keys move. Whole numbers, so that sums are exact.
    """

    length: IntArray
    share: IntArray
    inner: BoolArray
    parent: BoolArray
    amounts: FloatArray


def skews_of(
    placement: Placement, packing: Packing, loads: Loads, terms: Terms, schedule: IntArray
) -> Callable[[bool], Skew]:
    """How uneven the lanes of a placement are, as a function of whether branches are cut wherever they can be.

    Args:
        placement: units in lanes.
        packing: its rounds and waves.
        loads: of these lanes alone.
        terms: what a lane's ranks take if they share evenly, which decides which rank takes longest.
        schedule: ``[lanes]`` of each lane.
    """
    lanes = len(placement.lane_degrees)
    if placement.lane_degrees.max() == 1:
        return lambda cut: Skew.even(lanes)
    nodes, lane_of_share = _nodes(placement, packing)
    degree = placement.lane_degrees[lane_of_share]
    first = np.cumsum(degree) - degree  # of each share's ranks
    num_shares, num_ranks = len(degree), int(degree.sum())
    share_of_rank = np.repeat(np.arange(num_shares), degree)
    total = summed_rows(nodes.share, nodes.amounts, num_shares)
    mean = summed_rows(lane_of_share, total / degree, lanes)
    pace = _pace(summed_rows(lane_of_share, total[:-1], lanes), terms, schedule)[:, lane_of_share[share_of_rank]]

    def skew(cut: bool) -> Skew:
        rank, in_pieces = _dealt(nodes, degree, cut=cut)
        whole = rank >= 0
        apart = summed_rows(first[nodes.share[whole]] + rank[whole], nodes.amounts[:, whole], num_ranks)
        spread = (total - np.add.reduceat(apart, first, axis=1)) / degree
        here = spread[:, share_of_rank] + apart
        slowest = _last_of_each(share_of_rank, (pace * here[:-1]).sum(axis=0), first)
        most = summed_rows(lane_of_share, here[:, slowest], lanes)
        # At least 1, so that no price is below that of even shares: what this rank has less of, it waits for.
        most[-1] = summed(lane_of_share, np.maximum.reduceat(here[-1], first), lanes)  # of keys, any rank's
        ratios = np.where(mean > 0, most / np.where(mean > 0, mean, 1.0), 1.0)
        cut_tokens = summed(lane_of_share[nodes.share], np.where(in_pieces & ~nodes.inner, nodes.length, 0.0), lanes)
        tokens, scored, prefill, own, cross, keys = np.maximum(ratios, 1.0)
        return Skew(tokens, scored, prefill, own, cross, keys, cut_tokens)

    return skew


def skew_of_runs(placement: Placement, loads: Loads) -> Skew:
    """How uneven ranks are that hold equal runs of a lane's branches, one branch after another, as rings do it.

    Prompts are in zigzag. A rank with the end of a long branch has more pairs than one with its beginning.
    """
    units, skew = placement.family.units, loads.skew
    node, lane_of = units.branches.node, placement.lane_of_unit[units.unit_of_branch]
    length, start = units.shape.length[node].astype(np.float64), units.shape.path_start[node].astype(np.float64)
    own, cross = skew.own.copy(), skew.cross.copy()
    for lane in np.flatnonzero(placement.lane_degrees > 1).tolist():
        mine, degree = np.flatnonzero(lane_of == lane), int(placement.lane_degrees[lane])
        if not len(mine) or not length[mine].any():
            continue
        ends = np.cumsum(length[mine])
        bounds = np.arange(degree + 1) * ends[-1] / degree
        branch = np.minimum(np.searchsorted(ends, bounds, side="left"), len(mine) - 1)
        inside = bounds - (ends - length[mine])[branch]  # tokens of that branch before each bound
        pairs = np.stack([causal_pairs(length[mine], None), length[mine] * start[mine]])
        before = (np.cumsum(pairs, axis=1) - pairs)[:, branch]
        held = np.diff(before + np.stack([causal_pairs(inside, None), inside * start[mine][branch]]))
        most = int(held.sum(axis=0).argmax())
        mean = np.maximum(held.mean(axis=1), 1e-9)
        own[lane], cross[lane] = np.maximum(held[:, most] / mean, 1.0)
    return skew._replace(own=own, cross=cross)


def _nodes(placement: Placement, packing: Packing) -> tuple[_Nodes, IntArray]:
    """Nodes of lanes of several ranks, and the lane of each share."""
    units = placement.family.units
    shape, branches = units.shape, units.branches.node
    passes = packing.waves + 1 if packing.waves > 1 else 1
    unit = np.concatenate([units.block_unit, units.unit_of_branch])
    node = np.concatenate([units.block_node, branches])
    waves = packing.wave_of_branch + (passes > 1)
    number = np.concatenate([np.zeros(len(units.block_unit), dtype=np.int64), waves])
    key = (placement.lane_of_unit[unit] * packing.rounds + packing.round_of_unit[unit]) * passes + number
    shared = placement.lane_degrees[placement.lane_of_unit[unit]] > 1
    inner = (np.arange(len(node)) < len(units.block_unit))[shared]
    key, node = key[shared], node[shared]
    present = np.bincount(key) > 0
    share = (np.cumsum(present) - 1)[key]
    length, start = shape.length[node], shape.path_start[node]
    own, above = causal_pairs(length.astype(np.float64), None), length.astype(np.float64) * start
    amounts = [length, shape.scored_tokens[node], (own + above) * inner, own * ~inner, above * ~inner, length * inner]
    nodes = _Nodes(length, share, inner, shape.has_children[node], np.array(amounts, dtype=np.float64))
    return nodes, np.flatnonzero(present) // (packing.rounds * passes)


def _dealt(nodes: _Nodes, degree: IntArray, *, cut: bool) -> tuple[IntArray, BoolArray]:
    """``[nodes]`` rank of each node in its lane, -1 for those that are cut, and which are."""
    long = nodes.length >= 2 * degree[nodes.share] * MIN_CHUNK_TOKENS
    rank = np.full(len(long), -1, dtype=np.int64)
    prompts = long & nodes.parent
    total = summed(nodes.share, nodes.length, len(degree))
    most = (UNEVEN * total / degree).tolist()
    even = (summed(nodes.share, np.where(prompts, nodes.length, 0), len(degree)) / degree).tolist()
    rest = np.flatnonzero(~prompts)
    rest = rest[np.argsort(nodes.share[rest] * (int(nodes.length.max()) + 1) - nodes.length[rest], kind="stable")]
    share = nodes.share[rest]
    begins = np.searchsorted(share, np.arange(len(degree) + 1))
    may_cut = nodes.length[rest] >= 2 * degree[share] * (MIN_CUT_TOKENS if cut else MIN_CHUNK_TOKENS)
    splits = begins[:-1] + np.bincount(share[may_cut], minlength=len(degree))  # they are the longest
    # A rank's tokens and its number are one integer: a heap orders those several times faster than pairs.
    bits = int(degree.max()).bit_length()
    steps = (nodes.length[rest] << bits).tolist()
    put, found = heapq.heapreplace, []
    spans = zip(begins.tolist(), splits.tolist(), begins[1:].tolist(), degree.tolist(), strict=False)
    for number, (begin, split, end, ranks) in enumerate(spans):
        heap = list(range(ranks))
        for step in steps[begin:split]:
            if cut or even[number] + (heap[0] >> bits) + (step >> bits) > most[number]:
                even[number] += (step >> bits) / ranks
                found.append(-1)
            else:
                found.append(put(heap, heap[0] + step))
        found += [put(heap, heap[0] + step) for step in steps[split:end]]
    owner = np.array(found, dtype=np.int64)
    rank[rest] = np.where(owner < 0, -1, owner & ((1 << bits) - 1))
    return rank, rank < 0


def _pace(total: FloatArray, terms: Terms, schedule: IntArray) -> FloatArray:
    """``[5, lanes]`` time of one of each amount."""
    numbers = np.arange(len(schedule))
    replay = terms.replay_attention_us[schedule, numbers]
    own = total[3] / np.maximum(total[3] + total[4], 1.0) * replay
    times = np.stack([terms.linear_us, terms.head_us, terms.prefill_attention_us, own, replay - own])
    return times / np.maximum(total, 1.0)


def _last_of_each(share_of_rank: IntArray, time: FloatArray, first: IntArray) -> IntArray:
    """The rank of each share that takes longest, the first of several."""
    longest = np.maximum.reduceat(time, first)[share_of_rank]
    found = np.flatnonzero(time >= longest * (1 - 1e-12))
    return found[np.searchsorted(share_of_rank[found], np.arange(len(first)))]
