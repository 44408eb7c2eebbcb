"""The search: price every placement of the trees, and of the rows without reuse where those could be cheaper."""

from __future__ import annotations

import numpy as np

from augtree_fx.memory import shown
from augtree_fx.planner.memory import MemoryModel
from augtree_fx.planner.placement import placements
from augtree_fx.planner.pricing import Priced, best_of, bounds
from augtree_fx.planner.replay_shape import ReplayShape
from augtree_fx.planner.terms import head_us, linear_us
from augtree_fx.planner.units import branches_of
from augtree_fx.planner.work import BACKWARD_FLOP, Costs, causal_pairs


def search(shape: ReplayShape, costs: Costs) -> tuple[Priced, list[Priced]]:
    """The best placement, and the others in order of preference.

    Raises:
        ValueError: none fits in memory.
    """
    best, others = best_of(bounds_of(shape, costs, reuse=True), costs)
    if shape.num_levels > 1 and (best is None or least_us(shape, costs) < best.total_us):
        rows = bounds_of(shape.flat(), costs, reuse=False)
        best, others = best_of(([best] if best else []) + others + rows, costs)
    if best is None:
        raise ValueError(_no_room(shape, costs))
    return best, others


def bounds_of(shape: ReplayShape, costs: Costs, *, reuse: bool) -> list[Priced]:
    """Lower bounds of all placements of a shape's own trees."""
    tried = list(placements(shape, branches_of(shape), costs))
    return bounds(tried, costs, reuse=reuse) if tried else []


def least_us(shape: ReplayShape, costs: Costs) -> float:
    """What the rows without reuse take at least: tokens and pairs at the best rates, evenly spread, nothing moved."""
    machine, model, execution = costs.hardware, costs.model, costs.execution
    ends = np.flatnonzero(shape.num_rows)
    rows = (shape.path_start + shape.length)[ends].astype(np.float64)
    times = shape.num_rows[ends]
    pairs = sum(layers * (times * causal_pairs(rows, window)).sum() for window, layers in model.windows)
    largest = 1 << 24
    pair_us = execution.forwards * machine.causal_forward.us_per_flop(largest)
    pair_us = pair_us + execution.backwards * BACKWARD_FLOP * machine.causal_backward.us_per_flop(largest)
    token_us = linear_us(np.array(float(largest)), 1, costs) / largest
    scored_us = head_us(np.array(float(largest)), costs) / largest
    scored = (times * np.minimum(shape.scored_tokens[ends], rows)).sum()
    total = shape.num_row_tokens * token_us + scored * scored_us + pairs * model.pair_flop * pair_us
    return float(total) / costs.world_size


def _no_room(shape: ReplayShape, costs: Costs) -> str:
    memory = MemoryModel.of(costs)
    longest = int((shape.path_start + shape.length).max())
    needed = float(memory.peak_bytes(longest, 0, costs.world_size, waved=False))
    ways = [
        "more ranks",
        *([] if costs.execution.checkpointing or costs.execution.forward_only else ["checkpointing"]),
        *([] if costs.execution.shard_weights else ["sharded weights"]),
        "shorter rows",
    ]
    return (
        f"a plan must fit in {shown(memory.limit_bytes)} a rank, got {shown(needed)} for the longest "
        f"row ({longest} tokens) over all {costs.world_size} ranks, {shown(memory.fixed_bytes)} of it weights, "
        f"optimizer and buffers; use {' or '.join(ways)}"
    )
