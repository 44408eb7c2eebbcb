"""The best plan of every kind: what lanes there are, and who moves in them. To measure what a planner only rejects."""

from __future__ import annotations

from augtree_fx.planner.assemble import lane_summary, plan_of
from augtree_fx.planner.placement import placements
from augtree_fx.planner.plan import Plan
from augtree_fx.planner.pricing import Priced, bounds, refine
from augtree_fx.planner.replay_shape import ReplayShape
from augtree_fx.planner.units import branches_of
from augtree_fx.planner.work import SCHEDULES, Costs


def kind_of(plan: Plan) -> str:
    """Lanes by degree and who moves in those of several ranks, as in ``1 x 2, gather_kv``; ``no reuse`` in front."""
    degrees = [lane.degree for lane in plan.lanes]
    moving = {lane.schedule.value if lane.schedule else "heads" for lane in plan.lanes if lane.degree > 1}
    return ", ".join([*([] if plan.reuse else ["no reuse"]), lane_summary(degrees), *sorted(moving)])


def alternatives(shape: ReplayShape, costs: Costs) -> dict[str, Plan]:
    """Plans that share, by `kind_of`: of all placements with the same lanes and schedule the cheapest one that fits.

    Args:
        shape: the batch, planned as it is, without a bucket.
        costs: what prices depend on.
    """
    tried = list(placements(shape, branches_of(shape), costs))
    priced: dict[tuple[bytes, int], list[Priced]] = {}
    for number, schedule in enumerate(SCHEDULES):
        for one in bounds(tried, costs, reuse=True, schedules=(schedule,)) if tried else []:
            degrees = one.placement.lane_degrees
            if number == 0 or degrees.max() > 1:  # nothing moves between lanes of one rank
                priced.setdefault((degrees.tobytes(), number), []).append(one)
    found = {}
    for same in priced.values():
        refined = [one for one in (refine(each, costs) for each in same) if one is not None]
        if refined:
            plan = plan_of("augtree", shape, min(refined, key=lambda one: one.rank), [], costs)
            found[kind_of(plan)] = plan
    return found
