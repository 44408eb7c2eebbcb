"""Trees cut into units of placement: a run of neighbouring branches with all of their ancestors.

A unit runs in one lane. An ancestor of branches in several units is computed once in each of them; gradients add up as
those of two groups with equal prompts would, so a cut needs no communication between lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from augtree_fx.planner.replay_shape import IntArray, ReplayShape

FloatArray = npt.NDArray[np.float64]


def summed(where: IntArray, values: npt.NDArray, size: int) -> FloatArray:
    """``[size]`` sums of the values that have the same index."""
    return np.bincount(where, weights=values, minlength=size).astype(np.float64, copy=False)


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

    def sum_blocks(self, values: npt.NDArray) -> FloatArray:
        """``[blocks] -> [units]``."""
        return summed(self.block_unit, values, self.num_units)

    def sum_branches(self, values: npt.NDArray) -> FloatArray:
        """``[branches] -> [units]``."""
        return summed(self.unit_of_branch, values, self.num_units)

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
    node, length = branches.node, shape.length.astype(np.float64)
    label = _labels(shape, branches, parts)
    leaf_length = length[node]
    total_before = np.concatenate([[0.0], np.cumsum(leaf_length)])
    inner = np.flatnonzero(~shape.is_leaf)
    barren = branches.begin[inner] == branches.end[inner]
    # Trees without branches come after all labels, one unit each.
    first = last = np.zeros(len(inner), dtype=np.int64)
    if len(node):
        first = np.where(barren, 0, label.first[np.where(barren, 0, branches.begin[inner])])
        last = np.where(barren, 0, label.first[np.where(barren, 0, branches.end[inner] - 1)])
    alone = np.flatnonzero(barren & (shape.parent[inner] < 0))
    num_labels = len(label.tree)
    first[alone] = num_labels + np.arange(len(alone))
    last[alone] = first[alone]
    spans = last - first + 1
    block = np.repeat(np.arange(len(inner)), spans)
    block_unit = first[block] + np.arange(len(block)) - (np.cumsum(spans) - spans)[block]
    block_node = inner[block]
    edge = np.append(label.begin, len(node))
    low = np.maximum(branches.begin[block_node], edge[np.minimum(block_unit, num_labels)])
    high = np.minimum(branches.end[block_node], edge[np.minimum(block_unit + 1, num_labels)])
    leaf_below = np.where(barren[block], 0.0, total_before[np.maximum(high, low)] - total_before[low])
    inner_below = _inner_below(shape, block_node, block_unit, length)
    tree = np.concatenate([label.tree, inner[alone]]).astype(np.int64)
    return Units(shape, branches, tree, label.first, block_node, block_unit, inner_below, leaf_below)


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
    length = shape.length[branches.node] + 1.0  # an empty branch is somewhere, too
    total = np.bincount(tree, weights=length, minlength=shape.num_trees)
    starts = np.concatenate([[0.0], np.cumsum(total)])[tree]
    middle = np.cumsum(length) - length / 2 - starts
    part = np.minimum((middle * parts[tree] / total[tree]).astype(np.int64), parts[tree] - 1)
    new = np.empty(len(tree), dtype=bool)
    new[0] = True
    new[1:] = (np.diff(tree) != 0) | (np.diff(part) != 0)
    begin = np.flatnonzero(new)
    return _Labels(np.cumsum(new) - 1, tree[begin], begin)


def _inner_below(shape: ReplayShape, node: IntArray, unit: IntArray, length: FloatArray) -> FloatArray:
    """Prefilled tokens below each block in its unit, from the deepest level up."""
    below = np.zeros(len(node))
    if shape.num_levels <= 2 and not (shape.parent[node] >= 0).any():
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
