"""How unevenly the ranks of a lane share its nodes, by the rule of `dtensor_ops.shards`.

Long prompts are cut into chunks, equally much on every rank. What is left, branches and short prompts, lies whole on
the rank with fewest tokens, the longest first, unless a branch is so long that it is cut, too. The rank that takes
longest makes its lane wait.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from augtree_fx.dtensor_ops.shards import MIN_CHUNK_TOKENS, UNEVEN
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


def skew_of(placement: Placement, packing: Packing, loads: Loads, terms: Terms, schedule: IntArray) -> Skew:
    """How uneven the lanes of a placement are.

    Args:
        placement: units in lanes.
        packing: its rounds and waves.
        loads: of these lanes alone.
        terms: what a lane's ranks take if they share evenly, which decides which rank takes longest.
        schedule: ``[lanes]`` of each lane.
    """
    lanes = len(placement.lane_degrees)
    if placement.lane_degrees.max() == 1:
        return Skew.even(lanes)
    nodes, lane_of_share = _nodes(placement, packing)
    degree = placement.lane_degrees[lane_of_share]
    first = np.cumsum(degree) - degree  # of each share's ranks
    rank, cut = _dealt(nodes, degree)
    whole = rank >= 0
    at = first[nodes.share[whole]] + rank[whole]
    num_shares, num_ranks = len(degree), int(degree.sum())
    share_of_rank = np.repeat(np.arange(num_shares), degree)
    total = summed_rows(nodes.share, nodes.amounts, num_shares)
    apart = summed_rows(at, nodes.amounts[:, whole], num_ranks)
    spread = (total - np.add.reduceat(apart, first, axis=1)) / degree
    here = spread[:, share_of_rank] + apart
    work, keys = here[:-1], here[-1]
    pace = _pace(summed_rows(lane_of_share, total[:-1], lanes), terms, schedule)[:, lane_of_share[share_of_rank]]
    slowest = _last_of_each(share_of_rank, (pace * work).sum(axis=0), first)
    most = summed_rows(lane_of_share, here[:, slowest], lanes)
    mean = summed_rows(lane_of_share, total / degree, lanes)
    # At least 1, so that no price is below that of even shares: what this rank has less of, it waits for.
    most[-1] = summed(lane_of_share, np.maximum.reduceat(keys, first), lanes)  # of keys, any rank's
    ratios = np.where(mean > 0, most / np.where(mean > 0, mean, 1.0), 1.0)
    cut_tokens = summed(lane_of_share[nodes.share], np.where(cut & ~nodes.inner, nodes.length, 0.0), lanes)
    return Skew(*np.vstack([np.maximum(ratios, 1.0), cut_tokens]))


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


def _dealt(nodes: _Nodes, degree: IntArray) -> tuple[IntArray, BoolArray]:
    """``[nodes]`` rank of each node in its lane, -1 for those that are cut, and which are."""
    long = nodes.length >= 2 * degree[nodes.share] * MIN_CHUNK_TOKENS
    rank = np.full(len(long), -1, dtype=np.int64)
    cut = long & nodes.parent
    total = summed(nodes.share, nodes.length, len(degree))
    most = (UNEVEN * total / degree).tolist()
    even = (summed(nodes.share, np.where(cut, nodes.length, 0), len(degree)) / degree).tolist()
    rest = np.flatnonzero(~cut)
    rest = rest[np.argsort(nodes.share[rest] * (int(nodes.length.max()) + 1) - nodes.length[rest], kind="stable")]
    share = nodes.share[rest]
    begins = np.searchsorted(share, np.arange(len(degree) + 1))
    splits = begins[:-1] + np.bincount(share[long[rest]], minlength=len(degree))  # the longest may be cut
    # A rank's tokens and its number are one integer: a heap orders those several times faster than pairs.
    bits = int(degree.max()).bit_length()
    steps = (nodes.length[rest] << bits).tolist()
    put, found = heapq.heapreplace, []
    spans = zip(begins.tolist(), splits.tolist(), begins[1:].tolist(), degree.tolist(), strict=False)
    for number, (begin, split, end, ranks) in enumerate(spans):
        heap = list(range(ranks))
        for step in steps[begin:split]:
            if even[number] + (heap[0] >> bits) + (step >> bits) > most[number]:
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
