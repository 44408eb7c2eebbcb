"""Waves of lanes in a budget of memory: each rank counts for its own lane, and a lane takes the least of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from augtree_fx.dtensor_ops.agreement import HostGroup
from augtree_fx.dtensor_ops.lanes import LanePlan, one_pass_schedule
from augtree_fx.dtensor_ops.schedules import MOVE_Q, ROTATE_KV
from augtree_fx.layout import TreeLayout
from augtree_fx.transforms.wave_budget import Extent, WaveBudget


def lane_extent(plan: LanePlan, tree: TreeLayout, min_chunk_tokens: int) -> Extent:
    """Sizes of a rank's share of a lane's tree."""
    moves = {plan.prefill_schedule or plan.schedule or one_pass_schedule(tree), plan.schedule or ROTATE_KV}
    return Extent.of_lane(tree, len(plan.ranks), min_chunk_tokens, rotates=moves <= {ROTATE_KV, MOVE_Q})


def may_move_queries(plan: LanePlan) -> bool:
    """Whether queries of waves may move between the ranks of a lane."""
    return len(plan.ranks) > 1 and plan.schedule in (None, MOVE_Q)


def agreed_limits(
    plans: Sequence[LanePlan], host: HostGroup, choose: Callable[[], WaveBudget]
) -> tuple[list[int | None], WaveBudget]:
    """``[lanes]`` packed tokens of a wave that fit on every rank of each, ``None`` for all; and this rank's budget.

    Args:
        plans: of all lanes.
        host: the ranks of the axis, all of which call this at once.
        choose: what fits on this rank.

    Raises:
        ValueError: on all ranks, if a budget of some rank holds no wave.
    """
    budget, error = None, None
    try:
        budget = choose()
    except ValueError as raised:
        error = raised
    found = host.exchange((None if budget is None else budget.max_tokens, str(error) if error else ""))
    if error is not None:
        raise error
    failed = [number for number, (_, text) in enumerate(found) if text]
    if failed:
        raise ValueError(f"on rank {host.ranks[failed[0]]}: {found[failed[0]][1]}")
    assert budget is not None
    limits = []
    for plan in plans:
        known = [plan.wave_tokens, *(found[rank][0] for rank in plan.ranks)]
        limits.append(min((each for each in known if each is not None), default=None))
    return limits, budget
