"""The price of a placement: rounds and waves that fit in memory, the best schedule of each lane, the time of the step.

Rounds, waves, and what each rank of a lane has are slow to find and can only add time, so a placement is first priced
as if memory had no end and ranks shared evenly; that is a lower bound, and most placements are out by it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from augtree_fx.planner.loads import Loads, Skew, loads_of
from augtree_fx.planner.memory import MemoryModel
from augtree_fx.planner.packing import Packing, pack
from augtree_fx.planner.placement import Placement
from augtree_fx.planner.replay_shape import IntArray
from augtree_fx.planner.schedule import Schedule
from augtree_fx.planner.skew import skew_of_runs, skews_of
from augtree_fx.planner.terms import Terms, exchange_us, terms_of
from augtree_fx.planner.units import FloatArray
from augtree_fx.planner.work import SCHEDULES, SUMS, Costs

_EVEN = 0.01  # a placement whose ranks make it so much slower than even ones is tried with branches cut, too


@dataclass(frozen=True, eq=False)
class _Batch:
    """Lanes of several placements, priced together: fewer and longer array operations."""

    loads: Loads
    terms: Terms
    schedule: IntArray
    lane_us: FloatArray

    @cached_property
    def moves(self) -> list[int]:
        """``[lanes]`` index of the schedule of each lane in `SCHEDULES`, -1 where nothing moves."""
        return np.where(_still(self.loads), -1, self.schedule).tolist()


@dataclass(frozen=True, eq=False)
class Priced:
    """A placement with its price.

    Attributes:
        placement: what was priced.
        packing: its rounds and waves; ``None`` while the price is a lower bound.
        total_us: time of the step: that of its slowest lane, to the nanosecond; last bits of a float decide nothing.
        rank: order of preference: time, then what is left of it without FSDP's collectives, then plans that share.
        reuse: whether shared tokens are computed once.
        schedules: those that lanes may choose from.
        cuts: whether ranks get equal runs of tokens, as others do it, in place of what the runtime does. Keys of
            branches move then where one is longer than a run.
        cut_branches: whether the runtime cuts branches wherever it can, in place of where one is too long.
    """

    placement: Placement
    packing: Packing | None
    total_us: float
    rank: tuple[float, float, bool]
    reuse: bool
    schedules: Collection[Schedule]
    cuts: bool
    _batch: _Batch
    _first: int
    cut_branches: bool = False

    @property
    def lanes(self) -> slice:
        return slice(self._first, self._first + len(self.placement.lane_degrees))

    @property
    def lane_us(self) -> FloatArray:
        """``[lanes]`` time of each lane."""
        return self._batch.lane_us[self.lanes]

    @property
    def schedule(self) -> IntArray:
        """``[lanes]`` index of each lane's schedule in `SCHEDULES`."""
        return self._batch.schedule[self.lanes]

    @property
    def moves(self) -> set[int]:
        """Indices in `SCHEDULES` of schedules under which something moves."""
        return set(self._batch.moves[self.lanes]) - {-1}

    @property
    def loads(self) -> Loads:
        """Of all lanes that were priced together; this placement's are `lanes`."""
        return self._batch.loads

    def lane_terms(self) -> list[dict[str, float]]:
        """Every term of every lane in microseconds."""
        return self._batch.terms.rows(np.arange(self.lanes.start, self.lanes.stop), self.schedule)


def slowest_terms(priced: Sequence[Priced]) -> list[dict[str, float]]:
    """Every term of the slowest lane of each, in microseconds; those that were priced together are read together."""
    found: list[dict[str, float]] = [{}] * len(priced)
    together: dict[int, list[int]] = {}
    for number, one in enumerate(priced):
        together.setdefault(id(one._batch), []).append(number)
    for numbers in together.values():
        batch = priced[numbers[0]]._batch
        lanes = np.array([priced[number]._first + int(priced[number].lane_us.argmax()) for number in numbers])
        for number, terms in zip(numbers, batch.terms.rows(lanes, batch.schedule[lanes]), strict=True):
            found[number] = terms
    return found


def bounds(
    placements: Sequence[Placement],
    costs: Costs,
    *,
    reuse: bool,
    schedules: Collection[Schedule] = SCHEDULES,
    cuts: bool = False,
) -> list[Priced]:
    """Price placements of one shape as if each ran in one pass, on ranks that share evenly.

    Args:
        placements: units in lanes.
        costs: what prices depend on.
        reuse: whether the shape that was placed shares tokens, for tables.
        schedules: those a lane may choose from.
        cuts: see `Priced`.
    """
    firsts = np.cumsum([0] + [len(placement.lane_degrees) for placement in placements])[:-1]
    batch = _batch(loads_of(placements), 1, 1, schedules, costs)
    totals = np.maximum.reduceat(batch.lane_us, firsts).round(3).tolist()
    seconds = np.maximum.reduceat(batch.lane_us - _weights_us(batch), firsts).round(3).tolist()
    return [
        Priced(placement, None, total, (total, second, not reuse), reuse, schedules, cuts, batch, first)
        for placement, total, second, first in zip(placements, totals, seconds, firsts.tolist(), strict=True)
    ]


def refine(priced: Priced, costs: Costs) -> Priced | None:
    """The price with the rounds and waves that memory asks for, and uneven ranks; ``None`` if it does not fit.

    Where prompts and branches run in one pass, queries do not move unless nothing else is allowed, or ranks are uneven:
    keys of prompts go around for the prompts' own queries, and queries that move come on top. On two H200 they took 3%
    to 41% longer at every length (examples/results/2026-11-30-context-parallel-h200.md). The bound before this may have
    moved them. What makes ranks uneven, long branches or the attention of few branches to a long prompt, is cut over
    the ranks, or attended for by all of them, if that is cheaper.
    """
    packing = pack(priced.placement, MemoryModel.of(costs))
    if packing is None:
        return None
    schedules = priced.schedules
    if packing.waves == 1:
        schedules = [one for one in schedules if one is not Schedule.MOVE_Q] or schedules
    if packing.rounds == packing.waves == 1 and priced.placement.lane_degrees.max() == 1:
        return replace(priced, packing=packing)
    loads = priced.loads.of(priced.lanes)

    def price(skew: Skew, *, cut: bool, allowed: Collection[Schedule] = schedules) -> Priced:
        batch = _batch(replace(loads, skew=skew), packing.waves, packing.rounds, allowed, costs)
        total = round(float(batch.lane_us.max()), 3)
        rank = (total, round(float((batch.lane_us - _weights_us(batch)).max()), 3), not priced.reuse)
        return replace(priced, packing=packing, total_us=total, rank=rank, _batch=batch, _first=0, cut_branches=cut)

    if priced.cuts:
        share = loads.leaf_tokens / loads.degree / (packing.waves * packing.rounds)
        passed_on = loads.longest_leaf * loads.degree / np.maximum(loads.degree - 1, 1)  # to the ranks of its branch
        skew = skew_of_runs(priced.placement, loads)
        return price(skew._replace(cut_tokens=np.where(loads.longest_leaf > share, passed_on, 0.0)), cut=False)
    if packing.rounds == packing.waves == 1:  # as in the bound
        even = _chosen(loads, priced._batch.terms.of(priced.lanes), schedules)
    else:
        even = _batch(loads, packing.waves, packing.rounds, schedules, costs)
    dealt = skews_of(priced.placement, packing, loads, even.terms, even.schedule)
    skew = dealt(False)
    tried = [price(skew, cut=False)]
    least = _EVEN * tried[0].total_us
    if tried[0].total_us > float(even.lane_us.max()) + least:
        tried.append(price(dealt(True), cut=True))
        if ((skew.cross - 1) * loads.cross_us.max(axis=0)).max() > least:  # what queries that move could save
            tried.append(price(skew, cut=False, allowed=priced.schedules))
    return min(tried, key=lambda one: one.rank)


def exchanged(placement: Placement, packing: Packing, costs: Costs) -> Priced:
    """Price a placement of rows as Ulysses runs it: whole rows with some of the heads, all-to-all around attention."""
    loads = loads_of([placement])
    whole = np.bincount(
        placement.lane_of_unit, weights=placement.family.work.prefill_us[:, 0], minlength=len(loads.degree)
    )
    sums = loads.sums.copy()
    sums[SUMS.index("kv_token_layers")] = 0
    loads = replace(loads, prefill_us=whole / loads.degree, sums=sums)
    terms = terms_of(loads, 1, packing.rounds, costs)
    moved = exchange_us(loads.inner_tokens / loads.degree, loads.degree, costs)
    terms = replace(terms, prefill_transfer_us=moved, prefill_exposed_us=moved, merge_us=np.zeros_like(terms.merge_us))
    schedule = np.zeros(len(loads.degree), dtype=np.int64)
    batch = _Batch(loads, terms, schedule, terms.total_us[0])
    total = round(float(batch.lane_us.max()), 3)
    return Priced(placement, packing, total, (total, total, True), False, SCHEDULES, True, batch, 0)


def best_of(bounds: list[Priced], costs: Costs) -> tuple[Priced | None, list[Priced]]:
    """The cheapest placement that fits, and the others in order of preference, some of them as lower bounds."""
    best: Priced | None = None
    others = []
    for candidate in sorted(bounds, key=lambda priced: priced.rank):
        if best is not None and candidate.rank >= best.rank:
            others.append(candidate)
            continue
        refined = refine(candidate, costs) if candidate.packing is None else candidate
        if refined is not None and (best is None or refined.rank < best.rank):
            others += [best] if best else []
            best = refined
        elif refined is not None:
            others.append(refined)
    return best, sorted(others, key=lambda priced: priced.rank)


def _batch(loads: Loads, waves: int, rounds: int, schedules: Collection[Schedule], costs: Costs) -> _Batch:
    return _chosen(loads, terms_of(loads, waves, rounds, costs, may_gather=Schedule.GATHER_KV in schedules), schedules)


def _chosen(loads: Loads, terms: Terms, schedules: Collection[Schedule]) -> _Batch:
    """Every lane in the schedule that takes least."""
    total = terms.total_us
    allowed = [index for index, schedule in enumerate(SCHEDULES) if schedule in schedules]
    # Where nothing moves it is the last one: gather, the reference, where allowed.
    schedule = np.array(allowed)[np.where(_still(loads), len(allowed) - 1, total[allowed].argmin(axis=0))]
    return _Batch(loads, terms, schedule, total[schedule, np.arange(len(schedule))])


def _still(loads: Loads) -> npt.NDArray[np.bool_]:
    """``[lanes]`` those of one rank, and those without tokens."""
    return (loads.degree == 1) | (loads.inner_tokens + loads.leaf_tokens == 0)


def _weights_us(batch: _Batch) -> FloatArray:
    return batch.terms.weights_us[batch.schedule, np.arange(len(batch.schedule))]
