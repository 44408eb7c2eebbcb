"""From a priced placement to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from augtree_fx.planner.plan import Candidate, Lane, Part, Plan, Wave
from augtree_fx.planner.pricing import Priced, slowest_terms
from augtree_fx.planner.reason import reason
from augtree_fx.planner.replay_shape import ReplayShape
from augtree_fx.planner.schedule import Schedule
from augtree_fx.planner.work import SCHEDULES, Costs


def plan_of(name: str, batch: ReplayShape, best: Priced, others: Sequence[Priced], costs: Costs) -> Plan:
    """The plan that a priced placement stands for.

    Args:
        name: of the plan.
        batch: the shape that was asked for.
        best: what was chosen, with its packing.
        others: what was rejected.
        costs: what both were priced with.
    """
    packing = best.packing
    assert packing is not None, "a plan needs its rounds and waves"
    tried = (best, *others)
    candidates = tuple(
        _candidate(priced, terms, priced is best) for priced, terms in zip(tried, slowest_terms(tried), strict=True)
    )
    return Plan(
        name=name,
        shape=best.placement.family.units.shape,
        batch=batch,
        costs=costs,
        reuse=best.reuse,
        num_rounds=packing.rounds,
        num_waves=packing.waves,
        total_us=best.total_us,
        lanes=_lanes(best),
        candidates=candidates,
        reason=reason(best, candidates[1:], costs),
    )


def lane_summary(degrees: Sequence[int]) -> str:
    """Lanes by degree: ``2 x 16 + 8 x 4`` is two lanes of sixteen ranks and eight of four."""
    return " + ".join(f"{len(list(lanes))} x {degree}" for degree, lanes in groupby(degrees))


def _candidate(priced: Priced, terms: dict[str, float], chosen: bool) -> Candidate:
    degrees = priced.placement.lane_degrees.tolist()
    schedules = ", ".join(SCHEDULES[number].value for number in sorted(priced.moves))
    return Candidate(
        name=priced.placement.name if priced.reuse else f"no reuse, {priced.placement.name.split(',')[0]}",
        lanes=lane_summary(degrees),
        schedules=schedules or "-",
        total_us=priced.total_us,
        exact=priced.packing is not None,
        terms=terms,
        chosen=chosen,
        reuse=priced.reuse,
    )


def _lanes(best: Priced) -> tuple[Lane, ...]:
    placement, packing = best.placement, best.packing
    assert packing is not None
    units = placement.family.units
    whole = units.is_whole().tolist()
    edges = np.searchsorted(units.unit_of_branch, np.arange(units.num_units + 1)).tolist()
    nodes, waves = units.branches.node.tolist(), packing.wave_of_branch.tolist()
    lengths, trees, rounds = units.shape.length.tolist(), units.tree.tolist(), packing.round_of_unit.tolist()
    order = np.argsort(placement.lane_of_unit, kind="stable")
    starts = np.searchsorted(placement.lane_of_unit[order], np.arange(len(placement.lane_degrees) + 1)).tolist()
    order_list = order.tolist()
    inner, leaf = (values[best.lanes].tolist() for values in (best.loads.inner_tokens, best.loads.leaf_tokens))
    lane_us, schedule, peak = best.lane_us.tolist(), best.schedule.tolist(), packing.peak_bytes.tolist()
    lanes, rank, terms_of = [], 0, best.lane_terms()
    for lane, degree in enumerate(placement.lane_degrees.tolist()):
        members = order_list[starts[lane] : starts[lane + 1]]
        parts = tuple(
            Part(trees[unit], tuple(nodes[edges[unit] : edges[unit + 1]]), whole[unit], rounds[unit])
            for unit in members
        )
        terms, prompt_tokens, response_tokens = terms_of[lane], round(inner[lane]), round(leaf[lane])
        gathers = SCHEDULES[schedule[lane]] is Schedule.GATHER_KV if packing.waves == 1 else terms["prefill_gathers"]
        if packing.rounds == packing.waves == 1:
            every = tuple(node for part in parts for node in part.branches)
            passes = [Wave(0, 0, every, response_tokens)]
        else:
            found: dict[tuple[int, int], list[int]] = {
                (number, wave): [] for number in range(packing.rounds) for wave in range(packing.waves)
            }
            for unit in members:
                for branch in range(edges[unit], edges[unit + 1]):
                    found[rounds[unit], waves[branch]].append(nodes[branch])
            passes = [
                Wave(number, wave, tuple(replayed), sum(lengths[node] for node in replayed))
                for (number, wave), replayed in found.items()
            ]
        lanes.append(
            Lane(
                ranks=tuple(range(rank, rank + degree)),
                schedule=SCHEDULES[schedule[lane]],
                prefill_schedule=Schedule.GATHER_KV if gathers else Schedule.ROTATE_KV,
                parts=parts,
                waves=tuple(passes),
                prompt_tokens=prompt_tokens,
                response_tokens=response_tokens,
                terms=terms,
                total_us=lane_us[lane],
                memory_bytes=peak[lane],
                cut=best.cut_branches and degree > 1,
            )
        )
        rank += degree
    return tuple(lanes)
