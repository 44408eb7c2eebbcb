"""Attention time and tokens of every unit, for every degree a lane may have. Layers of all windows are added up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from augtree_fx.planner.execution import Execution
from augtree_fx.planner.hardware import Curve, Hardware, WeightedCurves
from augtree_fx.planner.model_shape import ModelShape
from augtree_fx.planner.replay_shape import ReplayShape
from augtree_fx.planner.schedule import Schedule
from augtree_fx.planner.units import Branches, FloatArray, Units

BACKWARD_FLOP = 2.5  # of attention, in forwards: five products against two
SCHEDULES = (Schedule.ROTATE_KV, Schedule.MOVE_Q, Schedule.GATHER_KV)


@dataclass(frozen=True)
class Costs:
    """What prices depend on.

    Attributes:
        hardware: the machine.
        model: the decoder.
        execution: how the step runs.
        world_size: ranks of the axis.
    """

    hardware: Hardware
    model: ModelShape
    execution: Execution
    world_size: int

    @cached_property
    def causal_us(self) -> WeightedCurves:
        """Microseconds of a FLOP of causal attention, with as many forwards and backwards as a step has."""
        machine = self.hardware
        return self._both(machine.causal_forward, machine.causal_backward)

    @cached_property
    def full_us(self) -> WeightedCurves:
        """The same without a mask."""
        return self._both(self.hardware.full_forward, self.hardware.full_backward)

    def _both(self, forward: Curve, backward: Curve) -> WeightedCurves:
        execution = self.execution
        return WeightedCurves.of((forward, execution.forwards), (backward, BACKWARD_FLOP * execution.backwards))


SUMS = ("inner_tokens", "leaf_tokens", "scored_tokens", "kv_token_layers", "own_us", "own_pairs", "own_cubes")


@dataclass(frozen=True, eq=False)
class Amounts:
    """What each of some things has to do: units, or lanes. Times are microseconds over all layers, both passes.

    Attributes:
        sums: ``[len(SUMS), things]``, one row for each name in `SUMS`, which add up over the parts of a thing.
        longest_leaf: ``[things]`` tokens of the longest branch.
    """

    sums: FloatArray
    longest_leaf: FloatArray

    @property
    def inner_tokens(self) -> FloatArray:
        """``[things]`` prefilled tokens."""
        return self.sums[0]

    @property
    def leaf_tokens(self) -> FloatArray:
        """``[things]`` replayed tokens."""
        return self.sums[1]

    @property
    def scored_tokens(self) -> FloatArray:
        """``[things]`` tokens through the LM head."""
        return self.sums[2]

    @property
    def kv_token_layers(self) -> FloatArray:
        """``[things]`` prefilled tokens whose keys and values the lane's ranks need, times layers."""
        return self.sums[3]

    @property
    def own_us(self) -> FloatArray:
        """``[things]`` branches' attention to themselves: of a unit on one rank, of a lane on each of its ranks."""
        return self.sums[4]

    @property
    def own_pairs(self) -> FloatArray:
        """``[things]`` (query, key) pairs of that in a layer without a window."""
        return self.sums[5]

    @property
    def own_cubes(self) -> FloatArray:
        """``[things]`` sum of cubed branch lengths."""
        return self.sums[6]


@dataclass(frozen=True, eq=False)
class Work(Amounts):
    """Work of units, on each rank of a lane.

    Attributes:
        degrees: degrees of the columns below.
        prefill_us: ``[units, degrees]`` attention of prefilled nodes.
        cross_us: ``[schedules, units, degrees]`` attention of branches to their ancestors, in the order of `SCHEDULES`.
    """

    degrees: tuple[int, ...]
    prefill_us: FloatArray
    cross_us: FloatArray


@dataclass(frozen=True, eq=False)
class BranchWork:
    """What the branches of a shape have to do, however its trees are cut.

    Attributes:
        length: ``[branches]`` tokens.
        sums: ``[5, branches]``: tokens, scored tokens, and the last three of `SUMS`.
    """

    length: FloatArray
    sums: FloatArray

    @staticmethod
    def of(shape: ReplayShape, branches: Branches, costs: Costs) -> BranchWork:
        """Work of all branches, in their order."""
        length = shape.length[branches.node].astype(np.float64)
        own = np.zeros(len(length))
        for window, layers in costs.model.windows:
            reach = float("inf") if window is None else float(window)
            own += layers * _pair_us(causal_pairs(length, window), np.minimum(length, reach), costs, causal=True)
        scored = shape.scored_tokens[branches.node]
        return BranchWork(length, np.stack([length, scored, own, causal_pairs(length, None), length**3]))


def causal_pairs(length: FloatArray, window: int | None) -> FloatArray:
    """(query, key) pairs of a causal block, diagonal included: the sum of ``min(position + 1, window)``."""
    if window is None:
        return length * (length + 1) / 2
    inside = np.minimum(length, window)
    return inside * (inside + 1) / 2 + (length - inside) * window


def measure(units: Units, branch_work: BranchWork, degrees: tuple[int, ...], costs: Costs) -> Work:
    """Work of every unit in lanes of every degree."""
    shape, model = units.shape, costs.model
    block = shape.length[units.block_node].astype(np.float64)
    degree = np.array(degrees, dtype=np.float64)
    kv_layers = np.zeros(len(block))
    prefill = np.zeros((len(block), len(degrees)))
    cross = np.zeros((len(SCHEDULES), len(block), len(degrees)))
    late = np.zeros((units.num_units, len(degrees)))
    for window, layers in model.windows:
        reach = float("inf") if window is None else float(window)
        kv_layers += layers * np.minimum(block, reach)
        chunk = np.minimum(block[:, None] / np.where(degree > 1, 2 * degree, 1), reach)
        pairs = causal_pairs(block, window)[:, None] / degree
        prefill += layers * _pair_us(pairs, chunk, costs, causal=True)
        if window is not None:
            late += layers * _windowed_cross_us(units, window, costs)[:, None] / degree
            continue
        if shape.num_levels > 2:
            prefill += layers * _block_us(block, units.inner_below, 1 / degree, costs)
        if len(units.unit_of_branch):
            cross += layers * _cross_us(block, units.leaf_below, degree, costs)
    inner, scored, kv = units.sum_blocks(np.stack([block, shape.scored_tokens[units.block_node], kv_layers]))
    leaf, leaf_scored, *own = units.sum_branches(branch_work.sums)
    longest = np.zeros(units.num_units)
    np.maximum.at(longest, units.unit_of_branch, branch_work.length)
    by_degree = units.sum_blocks(np.concatenate([prefill[None], cross]).transpose(0, 2, 1)).transpose(0, 2, 1)
    return Work(
        sums=np.stack([inner, leaf, scored + leaf_scored, kv, *own]),
        longest_leaf=longest,
        degrees=degrees,
        prefill_us=by_degree[0],
        cross_us=by_degree[1:] + late,
    )


def _pair_us(pairs: FloatArray, size: FloatArray, costs: Costs, *, causal: bool) -> FloatArray:
    """Microseconds of attention pairs in pieces of a size, with as many forwards and backwards as a step has."""
    return pairs * (costs.model.pair_flop * (costs.causal_us if causal else costs.full_us).at(size))


def _block_us(keys: FloatArray, queries: FloatArray, share: FloatArray, costs: Costs) -> FloatArray:
    """``[blocks, degrees]``: one unmasked block a row, of which a rank computes a share of both sides at a time."""
    size = np.minimum(keys, queries)[:, None] * share
    return _pair_us((keys * queries)[:, None] * share, size, costs, causal=False)


def _cross_us(keys: FloatArray, queries: FloatArray, degree: FloatArray, costs: Costs) -> FloatArray:
    """``[schedules, blocks, degrees]``: a d-th of the pairs, in pieces as large as each schedule leaves them."""
    keys, queries, share = keys[:, None], queries[:, None], 1 / degree
    held, sent = keys * share, queries * share
    size = np.stack([np.minimum(held, sent), np.minimum(held, queries), np.minimum(keys, sent)])
    return _pair_us(keys * queries * share, size, costs, causal=False)


def _windowed_cross_us(units: Units, window: int, costs: Costs) -> FloatArray:
    """``[units]`` attention to ancestors inside a window, on one rank: what a path sees less what a node itself has."""
    start, length = units.shape.path_start.astype(np.float64), units.shape.length.astype(np.float64)
    pairs = causal_pairs(start + length, window) - causal_pairs(start, window) - causal_pairs(length, window)
    time = _pair_us(np.maximum(pairs, 0.0), np.minimum(length, window), costs, causal=False)
    return units.sum_blocks(time[units.block_node]) + units.sum_branches(time[units.branches.node])
