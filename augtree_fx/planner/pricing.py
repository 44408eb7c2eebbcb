"""The price of a placement: rounds and waves that fit in memory, the best schedule of each lane, and the time of the step.

Rounds and waves are slow to find and can only add time, so a placement is first priced as if memory had no end; that is a
lower bound, and most placements are out by it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from augtree_fx.planner.loads import Loads, loads_of
from augtree_fx.planner.memory import MemoryModel
from augtree_fx.planner.packing import Packing, pack
from augtree_fx.planner.placement import Placement
from augtree_fx.planner.replay_shape import IntArray
from augtree_fx.planner.schedule import Schedule
from augtree_fx.planner.terms import Terms, terms_of
from augtree_fx.planner.units import FloatArray
from augtree_fx.planner.work import SCHEDULES, Costs


@dataclass(frozen=True, eq=False)
class Priced:
    """A placement with its price.

    Attributes:
        placement: what was priced.
        packing: its rounds and waves; ``None`` while the price is a lower bound.
        loads: of its lanes.
        terms: of its lanes under every schedule.
        schedule: ``[lanes]`` index of each lane's schedule.
        reuse: whether shared tokens are computed once.
        schedules: those that lanes may choose from.
    """

    placement: Placement
    packing: Packing | None
    loads: Loads
    terms: Terms
    schedule: IntArray
    reuse: bool
    schedules: Collection[Schedule]

    @cached_property
    def lane_us(self) -> FloatArray:
        """``[lanes]`` time of each lane."""
        return self.terms.total_us[self.schedule, np.arange(len(self.schedule))]

    @cached_property
    def total_us(self) -> float:
        """Time of the step: that of its slowest lane."""
        return float(self.lane_us.max())

    @cached_property
    def rank(self) -> tuple[float, float, bool]:
        """Order of preference: time, then what is left of it without FSDP's collectives, then plans that share."""
        weights = self.terms.weights_us[self.schedule, np.arange(len(self.schedule))]
        return self.total_us, float((self.lane_us - weights).max()), not self.reuse


def bound(
    placement: Placement, costs: Costs, *, reuse: bool, schedules: Collection[Schedule] = SCHEDULES
) -> Priced:
    """Price a placement as if everything ran in one pass.

    Args:
        placement: units in lanes.
        costs: what prices depend on.
        reuse: whether the shape that was placed shares tokens, for tables.
        schedules: those a lane may choose from.
    """
    levels = placement.family.units.shape.num_levels
    loads = loads_of(placement.family.work, placement.lane_of_unit, placement.lane_degrees, levels)
    terms = terms_of(loads, 1, 1, costs)
    return Priced(placement, None, loads, terms, _schedules(loads, terms, schedules), reuse, schedules)


def refine(priced: Priced, costs: Costs) -> Priced | None:
    """The price with the rounds and waves that memory asks for; ``None`` if it does not fit."""
    packing = pack(priced.placement, MemoryModel.of(costs))
    if packing is None:
        return None
    if packing.rounds == packing.waves == 1:
        return replace(priced, packing=packing)
    terms = terms_of(priced.loads, packing.waves, packing.rounds, costs)
    schedule = _schedules(priced.loads, terms, priced.schedules)
    return replace(priced, packing=packing, terms=terms, schedule=schedule)


def best_of(bounds: list[Priced], costs: Costs) -> tuple[Priced | None, list[Priced]]:
    """The cheapest placement that fits, and the others in order of preference, some of them as lower bounds."""
    best: Priced | None = None
    others = []
    for candidate in sorted(bounds, key=lambda priced: priced.rank):
        if best is not None and candidate.rank >= best.rank:
            others.append(candidate)
            continue
        refined = refine(candidate, costs)
        if refined is not None and (best is None or refined.rank < best.rank):
            others += [best] if best else []
            best = refined
        elif refined is not None:
            others.append(refined)
    return best, sorted(others, key=lambda priced: priced.rank)


def _schedules(loads: Loads, terms: Terms, schedules: Collection[Schedule]) -> IntArray:
    allowed = [index for index, schedule in enumerate(SCHEDULES) if schedule in schedules]
    choice = terms.total_us[allowed].argmin(axis=0)
    # Nothing moves in a lane of one rank, or without branches: the last one is gather, the reference, where allowed.
    still = (loads.degree == 1) | (loads.leaf_tokens == 0)
    return np.array(allowed)[np.where(still, len(allowed) - 1, choice)]
