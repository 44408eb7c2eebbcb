"""Attention time and tokens of every unit, for every degree a lane may have. Layers of all windows are added up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from augtree_fx.planner.execution import Execution
from augtree_fx.planner.hardware import Hardware
from augtree_fx.planner.model_shape import ModelShape
from augtree_fx.planner.schedule import Schedule
from augtree_fx.planner.units import FloatArray, Units, summed

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


@dataclass(frozen=True, eq=False)
class Work:
    """Work of units; arrays start with ``[units]``, times are microseconds of one rank over all layers, both passes.

    Attributes:
        degrees: degrees of the columns below.
        inner_tokens: prefilled tokens.
        leaf_tokens: replayed tokens.
        scored_tokens: tokens through the LM head.
        longest_leaf: tokens of the longest branch.
        kv_token_layers: prefilled tokens whose keys and values the lane's ranks need, times layers.
        own_us: branches' attention to themselves on one rank; a lane of degree d takes a d-th of it.
        own_pairs: (query, key) pairs of that in a layer without a window.
        own_cubes: sum of cubed branch lengths.
        prefill_us: ``[units, degrees]`` attention of prefilled nodes.
        cross_us: ``[schedules, units, degrees]`` attention of branches to their ancestors, in the order of `SCHEDULES`.
    """

    degrees: tuple[int, ...]
    inner_tokens: FloatArray
    leaf_tokens: FloatArray
    scored_tokens: FloatArray
    longest_leaf: FloatArray
    kv_token_layers: FloatArray
    own_us: FloatArray
    own_pairs: FloatArray
    own_cubes: FloatArray
    prefill_us: FloatArray
    cross_us: FloatArray


def causal_pairs(length: FloatArray, window: int | None) -> FloatArray:
    """(query, key) pairs of a causal block, diagonal included: the sum of ``min(position + 1, window)``."""
    if window is None:
        return length * (length + 1) / 2
    inside = np.minimum(length, window)
    return inside * (inside + 1) / 2 + (length - inside) * window


def measure(units: Units, degrees: tuple[int, ...], costs: Costs) -> Work:
    """Work of every unit in lanes of every degree."""
    shape, model = units.shape, costs.model
    length = shape.length.astype(np.float64)
    block, leaf = length[units.block_node], length[units.branches.node]
    degree = np.array(degrees, dtype=np.float64)
    own, kv_layers = np.zeros(len(leaf)), np.zeros(len(block))
    prefill = np.zeros((len(block), len(degrees)))
    cross = np.zeros((len(SCHEDULES), len(block), len(degrees)))
    late = np.zeros((units.num_units, len(degrees)))
    for window, layers in model.windows:
        reach = float("inf") if window is None else float(window)
        own += layers * _pair_us(causal_pairs(leaf, window), np.minimum(leaf, reach), costs, causal=True)
        kv_layers += layers * np.minimum(block, reach)
        chunk = np.minimum(block[:, None] / np.where(degree > 1, 2 * degree, 1), reach)
        pairs = causal_pairs(block, window)[:, None] / degree
        prefill += layers * _pair_us(pairs, chunk, costs, causal=True)
        if window is not None:
            late += layers * _windowed_cross_us(units, window, costs)[:, None] / degree
            continue
        if shape.num_levels > 2:
            prefill += layers * _block_us(block, units.inner_below, 1 / degree, 1 / degree, costs)
        cross += layers * _cross_us(block, units.leaf_below, degree, costs)
    unit, num_units = units.block_unit, units.num_units
    scored = shape.scored_tokens.astype(np.float64)
    longest = np.zeros(num_units)
    np.maximum.at(longest, units.unit_of_branch, leaf)
    return Work(
        degrees=degrees,
        inner_tokens=units.sum_blocks(block),
        leaf_tokens=units.sum_branches(leaf),
        scored_tokens=units.sum_branches(scored[units.branches.node]) + units.sum_blocks(scored[units.block_node]),
        longest_leaf=longest,
        kv_token_layers=units.sum_blocks(kv_layers),
        own_us=units.sum_branches(own),
        own_pairs=units.sum_branches(causal_pairs(leaf, None)),
        own_cubes=units.sum_branches(leaf**3),
        prefill_us=_sum_rows(prefill, unit, num_units),
        cross_us=np.stack([_sum_rows(one, unit, num_units) + late for one in cross]),
    )


def _sum_rows(values: FloatArray, unit: np.ndarray, num_units: int) -> FloatArray:
    if len(values) == num_units and (np.diff(unit) == 1).all():
        return values  # one block a unit, in order
    columns = values.shape[1]
    flat = (unit[:, None] * columns + np.arange(columns)).ravel()
    return summed(flat, values.ravel(), num_units * columns).reshape(num_units, columns)


def _pair_us(pairs: FloatArray, size: FloatArray, costs: Costs, *, causal: bool) -> FloatArray:
    """Microseconds of attention pairs in pieces of a size, with as many forwards and backwards as a step has."""
    machine, execution = costs.hardware, costs.execution
    forward, backward = machine.full_forward, machine.full_backward
    if causal:
        forward, backward = machine.causal_forward, machine.causal_backward
    time = execution.forwards * forward.us_per_flop(size)
    if execution.backwards:
        time = time + BACKWARD_FLOP * backward.us_per_flop(size)
    return pairs * costs.model.pair_flop * time


def _block_us(
    keys: FloatArray, queries: FloatArray, key_share: FloatArray, query_share: FloatArray, costs: Costs
) -> FloatArray:
    """One unmasked block a row, of which a rank computes the given shares at a time, by degree."""
    size = np.minimum(keys[:, None] * key_share, queries[:, None] * query_share)
    return _pair_us((keys * queries)[:, None] * np.minimum(key_share, query_share), size, costs, causal=False)


def _cross_us(keys: FloatArray, queries: FloatArray, degree: FloatArray, costs: Costs) -> FloatArray:
    """``[schedules, blocks, degrees]``: a d-th of the pairs, in pieces as large as each schedule leaves them."""
    ones, share = np.ones_like(degree), 1 / degree
    rotate_size = np.minimum(keys, queries)[:, None] * share
    pairs = (keys * queries)[:, None] * share
    rotate = _pair_us(pairs, rotate_size, costs, causal=False)
    move = _block_us(keys, queries, share, ones, costs)
    gather = _block_us(keys, queries, ones, share, costs)
    return np.stack([rotate, move, gather])


def _windowed_cross_us(units: Units, window: int, costs: Costs) -> FloatArray:
    """``[units]`` attention to ancestors inside a window, on one rank: what a path sees less what a node itself has."""
    start, length = units.shape.path_start.astype(np.float64), units.shape.length.astype(np.float64)
    pairs = causal_pairs(start + length, window) - causal_pairs(start, window) - causal_pairs(length, window)
    time = _pair_us(np.maximum(pairs, 0.0), np.minimum(length, window), costs, causal=False)
    return units.sum_blocks(time[units.block_node]) + units.sum_branches(time[units.branches.node])
