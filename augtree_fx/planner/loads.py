"""What every lane of a placement has to do: the work of its units, added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from augtree_fx.planner.replay_shape import IntArray
from augtree_fx.planner.units import FloatArray, summed
from augtree_fx.planner.work import Work


@dataclass(frozen=True, eq=False)
class Loads:
    """Sums over the units of each lane; fields as in `Work`, times at the lane's degree.

    Attributes:
        degree: ``[lanes]`` ranks of each lane.
        num_levels: levels of the batch's trees.
        cross_us: ``[schedules, lanes]``; all others are ``[lanes]``.
    """

    degree: FloatArray
    num_levels: int
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


def joined(loads: Sequence[Loads]) -> Loads:
    """Lanes of several placements of one shape, one after another."""
    names = [field.name for field in fields(Loads) if field.name != "num_levels"]
    arrays = {name: np.concatenate([getattr(one, name) for one in loads], axis=-1) for name in names}
    return Loads(num_levels=loads[0].num_levels, **arrays)


def loads_of(work: Work, lane_of_unit: IntArray, lane_degrees: IntArray, num_levels: int) -> Loads:
    """Add up a placement.

    Args:
        work: of the units.
        lane_of_unit: ``[units]``.
        lane_degrees: ``[lanes]``, each one of ``work.degrees``.
        num_levels: levels of the batch's trees.
    """
    lanes = len(lane_degrees)
    columns = np.searchsorted(np.array(work.degrees), lane_degrees)[lane_of_unit]
    rows = np.arange(len(lane_of_unit))

    def total(values: FloatArray) -> FloatArray:
        return summed(lane_of_unit, values, lanes)

    longest = np.zeros(lanes)
    np.maximum.at(longest, lane_of_unit, work.longest_leaf)
    degree = lane_degrees.astype(np.float64)
    return Loads(
        degree=degree,
        num_levels=num_levels,
        inner_tokens=total(work.inner_tokens),
        leaf_tokens=total(work.leaf_tokens),
        scored_tokens=total(work.scored_tokens),
        longest_leaf=longest,
        kv_token_layers=total(work.kv_token_layers),
        own_us=total(work.own_us) / degree,
        own_pairs=total(work.own_pairs),
        own_cubes=total(work.own_cubes),
        prefill_us=total(work.prefill_us[rows, columns]),
        cross_us=np.stack([total(one[rows, columns]) for one in work.cross_us]),
    )
