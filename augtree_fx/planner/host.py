"""Time of the host: Python, dispatch and launches of a layer, which a device with less to do has to wait for.

The host runs ahead where it can. In forward nothing is ahead of the first layer; while the device computes the LM head,
which is few and long kernels, the host is already in backward.
"""

from __future__ import annotations

import numpy as np

from augtree_fx.planner.loads import Loads, by_degree
from augtree_fx.planner.schedule import Schedule
from augtree_fx.planner.units import FloatArray
from augtree_fx.planner.work import SCHEDULES, Costs

# In launches of `Hardware.call_us`; backward takes two forwards. A layer: micro-batches of one short row, bound by
# launches, take 10.5 to 13.3 ms a layer with checkpointing (examples/results/2026-11-29-step-h200.md, unmodified
# 0.6B to 4B at 1024 + 64 x 1024).
LAYER_LAUNCHES = 388.0
# An attention call: 0.28 ms, by which 45 calls a layer in place of 5 took longer (two H200, trees of four levels).
CALL_LAUNCHES = 41.0
# Lookup, packing and sums in a lane of several ranks, and each transfer: fitted to 52 steps of two H200, many of which
# wait for their hosts (examples/results/2026-11-30-planner-2xh200.md). Attention alone takes 9 to 12 ms where keys
# are few (2026-11-30-context-parallel-h200.md, 16384 + 16 x 64); these say 11 to 17, autograd and all.
LANE_LAUNCHES, TRANSFER_LAUNCHES = 235.0, 118.0
# Transfers of a pass that moves queries, a forward: queries, outputs and LSEs against one of keys; in backward queries,
# their outputs, LSEs and gradients go out and gradients come back, five in the time of two forwards.
QUERY_TRANSFERS = {False: 3.0, True: 5.0}


def num_calls(degree: int, num_levels: int, schedule: Schedule) -> int:
    """Attention calls of a rank in one layer: at most, on several ranks, those of `dtensor_ops.tables`.

    One rank: a causal one, and one for each pair of levels. Several: three on own keys, two on each other rank's; on
    gathered ones no more than three.
    """
    if degree == 1:
        return 1 + num_levels * (num_levels - 1) // 2
    others = 2 * degree - 2
    return 3 + (min(others, 3) if schedule is Schedule.GATHER_KV else others)


def num_transfers(degree: int, schedule: Schedule, *, backward: bool, keys: bool = True) -> float:
    """Transfers of a rank in one layer and direction; ``keys``: whether those of prompts move beside queries."""
    if degree == 1:
        return 0.0
    rounds = (1.0 + backward) * (1 if schedule is Schedule.GATHER_KV else degree - 1)
    return rounds * keys + QUERY_TRANSFERS[backward] if schedule is Schedule.MOVE_Q else rounds


def layer_us(
    degree: int, num_levels: int, schedule: Schedule, costs: Costs, *, backward: bool, keys: bool = True
) -> float:
    """Microseconds of one layer in one direction."""
    forwards = 2 if backward else 1
    launches = LAYER_LAUNCHES + CALL_LAUNCHES * num_calls(degree, num_levels, schedule)
    launches += LANE_LAUNCHES if degree > 1 else 0.0
    sent = num_transfers(degree, schedule, backward=backward, keys=keys)
    return costs.hardware.call_us * (forwards * launches + TRANSFER_LAUNCHES * sent)


def waits_us(
    loads: Loads, waves: int, rounds: int, layers_us: FloatArray, head_us: FloatArray, costs: Costs
) -> FloatArray:
    """``[schedules, lanes]`` time for which a device waits for its host.

    Args:
        loads: work of the lanes.
        waves: passes over branches in each round.
        rounds: parts of the batch.
        layers_us: ``[schedules, lanes]`` the device's time in layers.
        head_us: ``[lanes]`` its time in the LM head.
        costs: what prices depend on.
    """
    execution = costs.execution
    passes = rounds * (waves + 1 if waves > 1 else 1)

    def row_of(ranks: int) -> list[float]:
        return [
            execution.forwards * layer_us(ranks, loads.num_levels, schedule, costs, backward=False, keys=waves == 1)
            + execution.backwards * layer_us(ranks, loads.num_levels, schedule, costs, backward=True, keys=waves == 1)
            for schedule in SCHEDULES
        ]

    host = by_degree(loads.degree, row_of)
    used = loads.inner_tokens + loads.leaf_tokens > 0
    late = np.maximum(np.where(used, host * costs.model.num_layers * passes, 0.0) - layers_us, 0.0)
    first = 1 / (execution.forwards + 2 * execution.backwards)  # of it the forward, before the head
    return late * first + np.maximum(late * (1 - first) - head_us, 0.0)
