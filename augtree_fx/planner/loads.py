"""What every lane of a placement has to do: the work of its units, added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from augtree_fx.planner.units import FloatArray, summed_rows
from augtree_fx.planner.work import SUMS, Amounts

if TYPE_CHECKING:
    from augtree_fx.planner.placement import Placement

_OWN_US = SUMS.index("own_us")


class Skew(NamedTuple):
    """``[lanes]`` what the rank that takes longest has, over the lane's mean: of tokens, scored tokens, and attention.

    Attributes:
        keys: of moving keys, the most that any rank has.
        cut_tokens: of branches that are cut, whose keys move as well; tokens of the lane.
    """

    tokens: FloatArray
    scored: FloatArray
    prefill: FloatArray
    own: FloatArray
    cross: FloatArray
    keys: FloatArray
    cut_tokens: FloatArray

    @staticmethod
    def even(num_lanes: int) -> Skew:
        """Every rank has the mean: the least that a lane can take."""
        one = np.ones(num_lanes)
        return Skew(one, one, one, one, one, one, np.zeros(num_lanes))


@dataclass(frozen=True, eq=False)
class Loads(Amounts):
    """Sums over the units of each lane, times at the lane's degree.

    Attributes:
        degree: ``[lanes]`` ranks of each lane.
        num_levels: levels of the batch's trees.
        prefill_us: ``[lanes]`` attention of prefilled nodes.
        cross_us: ``[schedules, lanes]`` attention of branches to their ancestors.
        skew: how unevenly ranks share all that.
    """

    degree: FloatArray
    num_levels: int
    prefill_us: FloatArray
    cross_us: FloatArray
    skew: Skew

    def of(self, lanes: slice) -> Loads:
        """Some of the lanes."""
        skew = Skew(*(values[lanes] for values in self.skew))
        own = self.sums[:, lanes], self.longest_leaf[lanes], self.degree[lanes]
        return Loads(*own, self.num_levels, self.prefill_us[lanes], self.cross_us[:, lanes], skew)


def by_degree(degree: FloatArray, row_of: Callable[[int], Sequence[float]]) -> FloatArray:
    """``[values, lanes]``: numbers that depend on a lane's degree alone, asked for once a degree."""
    distinct = np.array(sorted(set(degree.tolist())))
    return np.array([row_of(int(ranks)) for ranks in distinct]).T[:, np.searchsorted(distinct, degree)]


def loads_of(placements: Sequence[Placement]) -> Loads:
    """Lanes of several placements of one shape, one placement after another."""
    parts = [_summed(list(same)) for _, same in groupby(placements, key=lambda placement: id(placement.family))]
    totals, longest = (np.concatenate(each, axis=-1) for each in zip(*parts, strict=True))
    degree = np.concatenate([placement.lane_degrees for placement in placements]).astype(np.float64)
    sums = totals[: len(SUMS)]
    sums[_OWN_US] /= degree
    levels = placements[0].family.units.shape.num_levels
    even = Skew.even(len(degree))
    return Loads(sums, longest, degree, levels, totals[len(SUMS)], totals[len(SUMS) + 1 :], even)


def _summed(placements: Sequence[Placement]) -> tuple[FloatArray, FloatArray]:
    """Totals of lanes, `SUMS`, prefill and cross attention one below another, and longest branches, of one family."""
    work = placements[0].family.work
    first = np.cumsum([0, *(len(placement.lane_degrees) for placement in placements)])
    lane = np.stack([placement.lane_of_unit for placement in placements]) + first[:-1, None]
    degrees = np.concatenate([placement.lane_degrees for placement in placements])
    column = np.searchsorted(np.array(work.degrees), degrees)[lane]
    unit = np.arange(lane.shape[1])
    values = np.empty((len(SUMS) + 1 + len(work.cross_us), *lane.shape))
    values[: len(SUMS)] = work.sums[:, None]
    values[len(SUMS)] = work.prefill_us[unit, column]
    values[len(SUMS) + 1 :] = work.cross_us[:, unit, column]
    longest = np.zeros(len(degrees))
    np.maximum.at(longest, lane, np.broadcast_to(work.longest_leaf, lane.shape))
    return summed_rows(lane.ravel(), values.reshape(len(values), -1), len(degrees)), longest
