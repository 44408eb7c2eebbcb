"""Ways to place units in lanes.

What is tried depends on computation and memory alone, never on the links of the machine: every placement is then priced
with the real links, so that a faster link can only make the best one cheaper.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add

import numpy as np
import numpy.typing as npt

from augtree_fx.planner.memory import FLOAT32_BYTES, MemoryModel
from augtree_fx.planner.replay_shape import IntArray, ReplayShape
from augtree_fx.planner.terms import head_us, linear_us
from augtree_fx.planner.units import Branches, FloatArray, Units, cut, joined
from augtree_fx.planner.work import BranchWork, Costs, Work, measure

# Links that placements are made for: free ones, and one port of a network. Constants, for the reason above.
ASSUMED_BYTES_PER_S = (float("inf"), 50e9)
GRAIN = 4  # trees are cut until no unit is more than a lane's average work, or down to a quarter of it
_BISECTIONS = 6
_NEGLIGIBLE = 0.01


@dataclass(frozen=True, eq=False)
class Family:
    """One way to cut the trees, with the work of its units.

    Attributes:
        units: the units.
        branch_work: of the shape's branches.
        work: of the units.
        weights: one ``[units, degrees]`` estimate of microseconds for each of `ASSUMED_BYTES_PER_S`; infinite where a
            unit does not fit.
        rank_us: ``[units]`` microseconds on one rank, whether or not it fits there.
    """

    units: Units
    branch_work: BranchWork
    work: Work
    weights: tuple[FloatArray, ...]
    rank_us: FloatArray

    @cached_property
    def fits(self) -> bool:
        """Whether every unit fits in a lane of some degree."""
        return bool(np.isfinite(self.weights[0]).any(axis=1).all())


@dataclass(frozen=True, eq=False)
class Placement:
    """Which unit runs in which lane.

    Attributes:
        family: the units.
        lane_of_unit: ``[units]``.
        lane_degrees: ``[lanes]`` ranks of each lane, descending, so that lanes of powers of two are aligned.
        name: of the way it was made, for tables.
    """

    family: Family
    lane_of_unit: IntArray
    lane_degrees: IntArray
    name: str


def degrees_of(world_size: int) -> tuple[int, ...]:
    """Degrees that a lane may have: powers of two, and the whole axis."""
    powers = [1 << power for power in range(world_size.bit_length()) if 1 << power <= world_size]
    return tuple(sorted({*powers, world_size}))


def family_of(branches: Branches, branch_work: BranchWork, parts: IntArray, shape: ReplayShape, costs: Costs) -> Family:
    """Cut the trees of a shape and weigh the units."""
    return _weighed(cut(shape, branches, parts), branch_work, costs)


def merged(placement: Placement, costs: Costs) -> Placement:
    """The placement as it runs: what a lane has of one tree is one unit, whose ancestors are computed once there."""
    units, lane = placement.family.units, placement.lane_of_unit
    if units.num_units == units.shape.num_trees:
        return placement
    where = np.sort(units.tree * len(placement.lane_degrees) + lane)
    if (where[1:] != where[:-1]).all():
        return placement
    found, lane_of_unit = joined(units, lane)
    family = _weighed(found, placement.family.branch_work, costs)
    return replace(placement, family=family, lane_of_unit=lane_of_unit)


def _weighed(units: Units, branch_work: BranchWork, costs: Costs) -> Family:
    degrees = degrees_of(costs.world_size)
    work = measure(units, branch_work, degrees, costs)
    memory = MemoryModel.of(costs)
    degree = np.array(degrees, dtype=np.float64)
    tokens = work.inner_tokens + work.leaf_tokens
    fits: npt.NDArray[np.bool_] | None = None
    if not memory.surely_fits(float(tokens.max())):
        peak = memory.peak_bytes(work.inner_tokens[:, None], work.longest_leaf[:, None], degree, waved=True)
        alone = memory.peak_bytes(work.inner_tokens[:, None], work.leaf_tokens[:, None], degree, waved=False)
        fits = np.minimum(peak, alone) <= memory.limit_bytes
    share = max(float(tokens.sum()) / costs.world_size, 1.0)
    token_us = float(linear_us(np.array(share), 1, costs)) / share
    scored = max(float(work.scored_tokens.sum()) / costs.world_size, 1.0)
    scored_us = float(head_us(np.array(scored), costs)) / scored
    rest = (tokens * token_us + work.scored_tokens * scored_us)[:, None] / degree
    attention = work.prefill_us + work.cross_us.min(axis=0) + work.own_us[:, None] / degree
    execution, model = costs.execution, costs.model
    kv_bytes = model.dtype_bytes * (execution.forwards + execution.backwards) + FLOAT32_BYTES * execution.backwards
    moved = (work.kv_token_layers * model.kv_values_per_token * kv_bytes)[:, None] * (degree - 1) / degree
    estimates = (rest + np.maximum(attention, moved * (1e6 / bandwidth)) for bandwidth in ASSUMED_BYTES_PER_S)
    weights = tuple((each if fits is None else np.where(fits, each, np.inf)).round(3) for each in estimates)
    return Family(units, branch_work, work, weights, rest[:, 0] + attention[:, 0])


def placements(shape: ReplayShape, branches: Branches, costs: Costs) -> Iterator[Placement]:
    """All placements that are tried: lanes of one degree, and of mixed degrees, of trees whole and cut.

    Where a lane has several units of one tree, they are tried as one, and apart: that may fit where one does not.
    """
    for each in _placements(shape, branches, costs):
        together = merged(each, costs)
        if together is not each:
            yield together
        yield each


def _placements(shape: ReplayShape, branches: Branches, costs: Costs) -> Iterator[Placement]:
    world = costs.world_size
    branch_work = BranchWork.of(shape, branches, costs)
    whole = family_of(branches, branch_work, np.ones(shape.num_trees, dtype=np.int64), shape, costs)
    for single in _placed(whole, _even_lanes(1, world), 0, "degree 1, whole trees"):
        yield single
        if _is_balanced(single, costs):
            if world > 1:
                yield from _placed(whole, _even_lanes(world, world), 0, f"degree {world}, whole trees")
            return
    yield from _mixed(whole, costs, "whole trees")
    for degree in degrees_of(world)[1:]:
        yield from _placed(whole, _even_lanes(degree, world), 0, f"degree {degree}, whole trees")
    even = [_even_lanes(degree, world) for degree in degrees_of(world)]
    grains = {GRAIN * world // GRAIN**power for power in range(world.bit_length())}
    few = {len(lanes) for lanes in even if len(lanes) > shape.num_trees}  # a piece a lane
    for pieces in sorted((grains | few) - {0, 1}, reverse=True):
        parts = _parts(whole, branches, pieces)
        if (parts == 1).all():
            return
        family = family_of(branches, branch_work, parts, shape, costs)
        if pieces in grains:
            yield from _mixed(family, costs, f"trees cut in {pieces}")
        for degree, lanes in zip(degrees_of(world), even, strict=True):
            if pieces == len(lanes) or (pieces in grains and len(lanes) <= pieces <= GRAIN * len(lanes)):
                yield from _placed(family, lanes, 0, f"degree {degree}, trees cut in {pieces}")


def even_placement(shape: ReplayShape, branches: Branches, degree: int, costs: Costs) -> Placement | None:
    """Whole trees in lanes of one degree; ``None`` if some tree does not fit in one."""
    branch_work = BranchWork.of(shape, branches, costs)
    whole = family_of(branches, branch_work, np.ones(shape.num_trees, dtype=np.int64), shape, costs)
    return next(_placed(whole, _even_lanes(degree, costs.world_size), 0, f"degree {degree}, whole trees"), None)


def _is_balanced(single: Placement, costs: Costs) -> bool:
    """Whether lanes of one rank fit in memory in one pass and are so even that nothing else gains `_NEGLIGIBLE`."""
    weights, work = single.family.weights[0], single.family.work
    loads = np.bincount(single.lane_of_unit, weights=weights[:, 0], minlength=costs.world_size)
    tokens = np.bincount(single.lane_of_unit, weights=work.inner_tokens + work.leaf_tokens, minlength=costs.world_size)
    memory = MemoryModel.of(costs)
    fits = memory.peak_bytes(tokens, 0, 1, waved=False).max() <= memory.limit_bytes
    return bool(fits and loads.max() <= (1 + _NEGLIGIBLE) * loads.mean())


def _parts(whole: Family, branches: Branches, pieces: int) -> IntArray:
    """Units for each tree, powers of two, so that none is much more than one of `pieces` equal pieces of all work."""
    weight = np.zeros(whole.units.shape.num_trees)
    weight[whole.units.tree] = whole.rank_us
    share = np.maximum(weight * pieces / weight.sum(), 1.0)
    roots = slice(0, whole.units.shape.num_trees)
    most = np.maximum(branches.end[roots] - branches.begin[roots], 1)
    return np.minimum(np.exp2(np.ceil(np.log2(share) - 1e-9)).astype(np.int64), most)


def _even_lanes(degree: int, world_size: int) -> IntArray:
    """As many lanes of a degree as there is room for, and smaller powers of two for the rest."""
    lanes = [degree] * (world_size // degree)
    return np.array(lanes + _powers(world_size % degree), dtype=np.int64)


def _powers(ranks: int) -> list[int]:
    return [1 << bit for bit in range(ranks.bit_length() - 1, -1, -1) if ranks >> bit & 1]


def _placed(family: Family, lane_degrees: IntArray, assumed: int, name: str) -> Iterator[Placement]:
    """Longest unit first, each in the lane where it ends first; nothing if some unit fits in none of the lanes."""
    weights = family.weights[assumed]
    lanes = lane_degrees.tolist()
    column_of = {degree: family.work.degrees.index(degree) for degree in set(lanes)}
    columns = sorted(column_of.values())
    usable = weights[:, columns]
    best = usable.min(axis=1)
    if not np.isfinite(best).all():
        return
    order = np.argsort(-best, kind="stable").tolist()
    lane_of_unit = [0] * len(order)
    if len(columns) == 1:
        _spread(order, best.tolist(), len(lanes), lane_of_unit)
    else:
        heaps = [
            [(0.0, lane) for lane, degree in enumerate(lanes) if column_of[degree] == column] for column in columns
        ]
        rows, free = usable.tolist(), [0.0] * len(heaps)
        for unit in order:
            ends = list(map(add, free, rows[unit]))
            end = min(ends)
            choice = ends.index(end)
            heap = heaps[choice]
            lane_of_unit[unit] = heap[0][1]
            heapq.heapreplace(heap, (end, heap[0][1]))
            free[choice] = heap[0][0]
    yield Placement(family, np.array(lane_of_unit), lane_degrees, name)


def _spread(order: list[int], times: list[float], num_lanes: int, lane_of_unit: list[int]) -> None:
    """Units in their order, each to the equal lane that is free first, of several the first one."""
    first = order[:num_lanes]
    if times[first[-1]] == 0:  # an empty lane would take more than one
        first = []
    heap = [(times[unit], lane) for lane, unit in enumerate(first)]
    heap += [(0.0, lane) for lane in range(len(first), num_lanes)]
    heapq.heapify(heap)
    for lane, unit in enumerate(first):
        lane_of_unit[unit] = lane
    put = heapq.heapreplace
    for unit in order[len(first) :]:
        load, lane = heap[0]
        put(heap, (load + times[unit], lane))
        lane_of_unit[unit] = lane


def _mixed(family: Family, costs: Costs, name: str) -> Iterator[Placement]:
    """Lanes of several degrees. Nothing if all units want the same degree, or some unit fits nowhere.

    For a deadline, every unit takes the degree at which it occupies the fewest rank-microseconds in time; the shortest
    deadline whose total fits on the machine is found by bisection (dual approximation of moldable tasks: Turek, Wolf
    and Yu, SPAA 1992).
    """
    single = family.weights[0][:, 0]
    if not family.fits or single.max() <= single.sum() / costs.world_size:
        return  # no unit is too long for one rank
    seen = set()
    for assumed, weights in enumerate(family.weights):
        chosen, deadline = _degrees_for_deadline(weights, family.work.degrees, costs.world_size)
        lanes = _lanes_for(chosen, deadline, weights, family.work.degrees, costs.world_size)
        if lanes.tobytes() not in seen and len(set(lanes.tolist())) > 1:
            seen.add(lanes.tobytes())
            yield from _placed(family, lanes, assumed, f"mixed degrees, {name}")


def _degrees_for_deadline(weights: FloatArray, degrees: tuple[int, ...], world_size: int) -> tuple[IntArray, float]:
    """Column of each unit's degree, and the deadline."""
    area = weights * np.array(degrees)
    rows = np.arange(len(weights))
    high = float(weights.min(axis=1).sum())
    low = max(float(weights.min(axis=1).max()), float(area.min(axis=1).sum()) / world_size)

    def choose(deadline: float) -> IntArray:
        return np.where(weights <= deadline * (1 + 1e-9), area, np.inf).argmin(axis=1)

    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5  # the range spans orders of magnitude
        if float(area[rows, choose(middle)].sum()) <= world_size * middle:
            high = middle
        else:
            low = middle
    return choose(high), high


def _lanes_for(
    chosen: npt.NDArray[np.int64], deadline: float, weights: FloatArray, degrees: tuple[int, ...], world_size: int
) -> IntArray:
    """Numbers of lanes of each degree, in proportion to the work that wants it, largest degree first."""
    time = weights[np.arange(len(weights)), chosen]
    wanted = np.bincount(chosen, weights=time, minlength=len(degrees)) / deadline
    lanes: list[int] = []
    left = world_size
    for column in range(len(degrees) - 1, -1, -1):
        if wanted[column] > 0:
            count = min(max(round(float(wanted[column])), 1), left // degrees[column])
            lanes += [degrees[column]] * count
            left -= count * degrees[column]
    smallest = degrees[int(chosen.min())]
    lanes += [smallest] * (left // smallest) + _powers(left % smallest)
    return np.array(sorted(lanes, reverse=True), dtype=np.int64)
