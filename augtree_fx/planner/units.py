"""Trees cut into units of placement: a run of neighbouring branches with all of their ancestors.

A unit runs in one lane. An ancestor of branches in several units is computed once in each of them; gradients add up as
those of two groups with equal prompts would, so a cut needs no communication between lanes.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from augtree_fx.planner.replay_shape import IntArray, ReplayShape

FloatArray = npt.NDArray[np.float64]
_MOST_AT_ONCE = 1 << 15  # numbers, beyond which an index of all of them takes longer than a call a row


def summed(where: IntArray, values: npt.NDArray, size: int) -> FloatArray:
    """``[size]`` sums of the values that have the same index."""
    return np.bincount(where, weights=values, minlength=size).astype(np.float64, copy=False)


def summed_rows(where: IntArray, values: npt.NDArray, size: int) -> FloatArray:
    """``[..., n] -> [..., size]``: `summed` along the last dimension, all rows in one call while they are short."""
    rows = math.prod(values.shape[:-1])
    if values.size > _MOST_AT_ONCE:
        found = np.array([summed(where, row, size) for row in values.reshape(rows, -1)])
    else:
        index = np.arange(0, rows * size, size)[:, None] + where
        found = summed(index.ravel(), values.ravel(), rows * size)
    return found.reshape(*values.shape[:-1], size)


def spread(sizes: IntArray, count: int) -> IntArray:
    """Which of so many bins each thing goes to: one after another, into the bin with least, of several the first.

    What a bin has and its number are one integer: a heap orders those several times faster than pairs.
    """
    bits = count.bit_length()
    heap, put = list(range(count)), heapq.heapreplace
    taken = [put(heap, heap[0] + step) for step in (sizes << bits).tolist()]
    return np.array(taken, dtype=np.int64) & ((1 << bits) - 1)


@dataclass(frozen=True, eq=False)
class Branches:
    """Replayed nodes of a shape in depth-first order, and the run of them below every other node.

    Attributes:
        node: ``[branches]`` node of each branch.
        begin: ``[nodes]`` first branch below each node.
        end: ``[nodes]`` one past the last.
    """

    node: IntArray
    begin: IntArray
    end: IntArray


def _levels_up(shape: ReplayShape) -> list[tuple[int, int]]:
    """First node and one past the last of each level, the deepest first, roots left out."""
    begins = shape.level_begin.tolist()
    return list(zip(begins[1:-1], begins[2:], strict=True))[::-1]


def branches_of(shape: ReplayShape) -> Branches:
    """Depth-first order of the branches. In two levels, and wherever all branches lie in one level, it is their own."""
    begins = shape.level_begin
    count = shape.is_leaf.astype(np.int64)
    for first, last in _levels_up(shape):
        count += np.bincount(shape.parent[first:last], weights=count[first:last], minlength=len(count)).astype(np.int64)
    begin = np.zeros_like(count)
    begin[: begins[1]] = np.cumsum(count[: begins[1]]) - count[: begins[1]]
    for first, last in zip(begins[1:-1], begins[2:], strict=True):
        own, above = count[first:last], shape.parent[first:last]
        before = np.cumsum(own) - own
        oldest = np.searchsorted(above, above)
        begin[first:last] = begin[above] + before - before[oldest]
    leaves = np.flatnonzero(shape.is_leaf)
    return Branches(leaves[np.argsort(begin[leaves], kind="stable")], begin, begin + count)


@dataclass(frozen=True, eq=False)
class Units:
    """Units of a shape, as arrays. A *block* is one ancestor node inside one unit.

    Attributes:
        shape: what was cut.
        branches: its branches.
        tree: ``[units]`` tree of each unit.
        unit_of_branch: ``[branches]`` unit of each branch, ascending.
        block_node: ``[blocks]`` node of each block.
        block_unit: ``[blocks]`` its unit.
        inner_below: ``[blocks]`` prefilled tokens of the unit that attend to the whole block.
        leaf_below: ``[blocks]`` branch tokens of the unit that attend to the whole block.
    """

    shape: ReplayShape
    branches: Branches
    tree: IntArray
    unit_of_branch: IntArray
    block_node: IntArray
    block_unit: IntArray
    inner_below: FloatArray
    leaf_below: FloatArray

    @property
    def num_units(self) -> int:
        return len(self.tree)

    @cached_property
    def _one_block_each(self) -> bool:
        """Whether every unit has one block, in the order of units, as in trees of two levels."""
        return len(self.block_unit) == self.num_units and bool((np.diff(self.block_unit) == 1).all())

    def sum_blocks(self, values: npt.NDArray) -> FloatArray:
        """``[..., blocks] -> [..., units]``."""
        if self._one_block_each:
            return values.astype(np.float64, copy=False)
        return summed_rows(self.block_unit, values, self.num_units)

    def sum_branches(self, values: npt.NDArray) -> FloatArray:
        """``[..., branches] -> [..., units]``."""
        return summed_rows(self.unit_of_branch, values, self.num_units)

    def is_whole(self) -> npt.NDArray[np.bool_]:
        """``[units]`` whether a unit is all of its tree."""
        return np.bincount(self.tree, minlength=self.shape.num_trees)[self.tree] == 1


def cut(shape: ReplayShape, branches: Branches, parts: IntArray) -> Units:
    """Cut every tree into runs of branches of about equal tokens.

    Args:
        shape: the trees.
        branches: of `shape`.
        parts: ``[trees]`` number of units that each tree should become; fewer come out where branches are few or long.
    """
    return _units_of(shape, branches, _labels(shape, branches, parts))


def joined(units: Units, lane_of_unit: IntArray) -> tuple[Units, IntArray]:
    """Units of which no lane has two of one tree, and the lane of each: what one lane has of a tree is one unit.

    Those of a tree change places among its lanes, so that each lane has neighbours.
    """
    order = np.lexsort((lane_of_unit, units.tree))  # units are ascending by tree, but for barren ones at the end
    lanes = np.empty_like(lane_of_unit)
    lanes[np.argsort(units.tree, kind="stable")] = lane_of_unit[order]
    num_labels = int(units.unit_of_branch[-1]) + 1 if len(units.unit_of_branch) else 0
    tree, lane = units.tree[:num_labels], lanes[:num_labels]
    new = np.ones(num_labels, dtype=bool)
    new[1:] = (tree[1:] != tree[:-1]) | (lane[1:] != lane[:-1])
    first = (np.cumsum(new) - 1)[units.unit_of_branch]
    begin = np.searchsorted(first, np.arange(int(new.sum())))
    found = _units_of(units.shape, units.branches, _Labels(first, tree[new], begin))
    return found, np.concatenate([lane[new], lanes[num_labels:]])


def _units_of(shape: ReplayShape, branches: Branches, label: _Labels) -> Units:
    node, length = branches.node, shape.length.astype(np.float64)
    total_before = np.concatenate([[0.0], np.cumsum(length[node])])
    inner = np.flatnonzero(~shape.is_leaf)
    begin, end = branches.begin[inner], branches.end[inner]
    barren = begin == end
    tree, edge = label.tree, np.concatenate([label.begin, [len(node)]])
    if barren.any():
        # Trees without branches come after all labels, one unit each.
        alone = np.flatnonzero(barren & (shape.parent[inner] < 0))
        num_labels = len(tree)
        first = last = np.zeros(len(inner), dtype=np.int64)
        if len(node):
            first, last = (np.where(barren, 0, label.first[np.where(barren, 0, at)]) for at in (begin, end - 1))
        first[alone] = last[alone] = num_labels + np.arange(len(alone))
        tree = np.concatenate([tree, inner[alone]]).astype(np.int64)
        edge = np.concatenate([edge, np.full(len(alone), len(node))])
    else:
        first, last = label.first[begin], label.first[end - 1]
    spans = last - first + 1
    block = np.repeat(np.arange(len(inner)), spans)
    block_unit = first[block] + np.arange(len(block)) - (np.cumsum(spans) - spans)[block]
    low, high = np.maximum(begin[block], edge[block_unit]), np.minimum(end[block], edge[block_unit + 1])
    leaf_below = np.where(barren[block], 0.0, total_before[np.maximum(high, low)] - total_before[low])
    inner_below = _inner_below(shape, inner[block], block_unit, length)
    return Units(shape, branches, tree, label.first, inner[block], block_unit, inner_below, leaf_below)


@dataclass(frozen=True, eq=False)
class _Labels:
    """`first`: unit of each branch; `tree`: tree of each unit; `begin`: its first branch."""

    first: IntArray
    tree: IntArray
    begin: IntArray


def _labels(shape: ReplayShape, branches: Branches, parts: IntArray) -> _Labels:
    if not len(branches.node):
        empty = np.zeros(0, dtype=np.int64)
        return _Labels(empty, empty, empty)
    tree = shape.tree[branches.node]
    new = np.empty(len(tree), dtype=bool)
    new[0] = True
    np.not_equal(tree[1:], tree[:-1], out=new[1:])
    if (parts > 1).any():
        length = shape.length[branches.node] + 1.0  # an empty branch is somewhere, too
        total = np.bincount(tree, weights=length, minlength=shape.num_trees)
        starts = np.concatenate([[0.0], np.cumsum(total)])[tree]
        middle = np.cumsum(length) - length / 2 - starts
        part = np.minimum((middle * parts[tree] / total[tree]).astype(np.int64), parts[tree] - 1)
        new[1:] |= part[1:] != part[:-1]
    begin = np.flatnonzero(new)
    return _Labels(np.cumsum(new) - 1, tree[begin], begin)


def _inner_below(shape: ReplayShape, node: IntArray, unit: IntArray, length: FloatArray) -> FloatArray:
    """Prefilled tokens below each block in its unit, from the deepest level up."""
    below = np.zeros(len(node))
    if shape.num_levels <= 2:  # all blocks are roots
        return below
    key = node * (int(unit.max()) + 1) + unit
    order = np.argsort(key, kind="stable")
    sorted_key = key[order]
    for first, last in _levels_up(shape):
        here = np.flatnonzero((node >= first) & (node < last))
        parent_key = shape.parent[node[here]] * (int(unit.max()) + 1) + unit[here]
        above = order[np.searchsorted(sorted_key, parent_key)]
        np.add.at(below, above, length[node[here]] + below[here])
    return below
