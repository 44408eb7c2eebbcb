"""Rounds and waves: what a lane runs one after another, so that memory suffices.

A round is some of a lane's units. With one wave a round, prompts and branches run in one pass. With several, prompts
have a pass of their own, and every wave is a pass over some of the round's branches, so that a group may be larger than
memory. All lanes make the same number of passes, since FSDP's collectives meet in each; some of them are empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from augtree_fx.planner.memory import MemoryModel
from augtree_fx.planner.placement import Placement
from augtree_fx.planner.replay_shape import IntArray
from augtree_fx.planner.units import FloatArray, spread, summed

# Prompts of a round with several units leave this much of the free memory to branches.
_BRANCH_SHARE = 0.5


@dataclass(frozen=True, eq=False)
class Packing:
    """When each unit's prompts and each branch run.

    Attributes:
        rounds: rounds of every lane.
        waves: passes over branches in each round; 1 means that prompts run in the same pass.
        round_of_unit: ``[units]``.
        wave_of_branch: ``[branches]`` wave within the round, branches in depth-first order.
        peak_bytes: ``[lanes]`` of one rank.
    """

    rounds: int
    waves: int
    round_of_unit: IntArray
    wave_of_branch: IntArray
    peak_bytes: FloatArray


def pack(placement: Placement, memory: MemoryModel) -> Packing | None:
    """One pass if it fits, else rounds of one pass each, else waves; ``None`` if a lane cannot hold some unit."""
    work, lanes = placement.family.work, len(placement.lane_degrees)
    units = placement.family.units
    inner, leaf = (summed(placement.lane_of_unit, values, lanes) for values in (work.inner_tokens, work.leaf_tokens))
    once = memory.peak_bytes(inner, leaf, placement.lane_degrees, waved=False)
    if (once <= memory.limit_bytes).all():
        still = np.zeros(len(units.unit_of_branch), dtype=np.int64)
        return Packing(1, 1, np.zeros(units.num_units, dtype=np.int64), still, once)
    return _joint(placement, memory) or _waved(placement, memory)


def _joint(placement: Placement, memory: MemoryModel) -> Packing | None:
    """Rounds in which prompts and branches run together."""
    work = placement.family.work
    degree_of_unit = placement.lane_degrees[placement.lane_of_unit]
    alone = memory.peak_bytes(work.inner_tokens, work.leaf_tokens, degree_of_unit, waved=False)
    if (alone > memory.limit_bytes).any():
        return None
    order = np.lexsort((-(work.inner_tokens + work.leaf_tokens), placement.lane_of_unit))
    begins = np.searchsorted(placement.lane_of_unit[order], np.arange(len(placement.lane_degrees) + 1)).tolist()
    inner, leaf = work.inner_tokens[order].tolist(), work.leaf_tokens[order].tolist()
    peak = np.full(len(placement.lane_degrees), memory.fixed_bytes)
    found, num_rounds = [], 1
    for lane, degree in enumerate(placement.lane_degrees.tolist()):
        units = slice(begins[lane], begins[lane + 1])
        numbers, needed = _first_fit(inner[units], leaf[units], degree, memory)
        found += numbers
        peak[lane] = max(needed, default=memory.fixed_bytes)
        num_rounds = max(num_rounds, len(needed))
    round_of_unit = np.empty(len(order), dtype=np.int64)
    round_of_unit[order] = found
    still = np.zeros(len(placement.family.units.unit_of_branch), dtype=np.int64)
    return Packing(num_rounds, 1, round_of_unit, still, peak)


def _first_fit(
    inner: list[float], leaf: list[float], degree: int, memory: MemoryModel
) -> tuple[list[int], list[float]]:
    """Round of each unit of a lane, the first one with room, and peak bytes of each round. Every unit fits alone."""
    least = min(inner, default=0.0), min(leaf, default=0.0)
    of_any, of_longer = memory.slopes(degree)
    longer = leaf if sum(leaf) > sum(inner) else inner
    lowest = [
        (prompt + replayed) * of_any + more * of_longer
        for prompt, replayed, more in zip(inner, leaf, longer, strict=True)
    ]
    free_bytes = (memory.limit_bytes - memory.fixed_bytes) * (1 + 1e-9)
    filled: list[float] = []  # bytes of each round at least: most that are full are quickly told by that
    held: list[tuple[float, float]] = []
    needed: list[float] = []
    numbers: list[int] = []
    room: list[int] = []  # rounds in which something may still fit
    for prompt, replayed, low in zip(inner, leaf, lowest, strict=True):
        for number in room:
            if filled[number] + low > free_bytes:
                continue
            both = held[number][0] + prompt, held[number][1] + replayed
            peak = memory.peak_of_lane(*both, degree, waved=False)
            if peak <= memory.limit_bytes:
                held[number], needed[number] = both, peak
                filled[number] += low
                break
        else:
            number, both = len(held), (prompt, replayed)
            held.append(both)
            filled.append(low)
            needed.append(memory.peak_of_lane(*both, degree, waved=False))
            room.append(number)
        numbers.append(number)
        if memory.peak_of_lane(both[0] + least[0], both[1] + least[1], degree, waved=False) > memory.limit_bytes:
            room.remove(number)
    return numbers, needed


def _waved(placement: Placement, memory: MemoryModel) -> Packing | None:
    """Rounds whose prompts outlive their pass, and waves of branches."""
    units, work = placement.family.units, placement.family.work
    round_of_unit = np.zeros(units.num_units, dtype=np.int64)
    wave_of_branch = np.zeros(len(units.unit_of_branch), dtype=np.int64)
    begins = np.searchsorted(units.unit_of_branch, np.arange(units.num_units + 1))
    tokens = units.shape.length[units.branches.node]
    peak = np.full(len(placement.lane_degrees), memory.fixed_bytes)
    num_rounds, num_waves = 1, 2
    for lane, degree in enumerate(placement.lane_degrees.tolist()):
        rounds = _prompt_rounds(placement, lane, memory)
        if rounds is None:
            return None
        num_rounds = max(num_rounds, len(rounds))
        for number, members in enumerate(rounds):
            round_of_unit[members] = number
            branches = np.concatenate([np.arange(begins[unit], begins[unit + 1]) for unit in members])
            prompt = float(work.inner_tokens[members].sum())
            most = 0.0
            if len(branches):
                found = _waves_of(tokens[branches], memory.wave_tokens(prompt, degree))
                wave_of_branch[branches] = found
                num_waves = max(num_waves, int(found.max()) + 1)
                most = float(summed(found, tokens[branches], int(found.max()) + 1).max())
            peak[lane] = max(peak[lane], memory.peak_of_lane(prompt, most, degree, waved=True))
    return Packing(num_rounds, num_waves, round_of_unit, wave_of_branch, peak)


def _prompt_rounds(placement: Placement, lane: int, memory: MemoryModel) -> list[list[int]] | None:
    """Units of each round of a lane: most prompt tokens first, each into the first round with room."""
    work, degree = placement.family.work, int(placement.lane_degrees[lane])
    members = np.flatnonzero(placement.lane_of_unit == lane)
    members = members[np.argsort(-work.inner_tokens[members], kind="stable")]
    room = memory.limit_bytes - memory.fixed_bytes
    rounds: list[list[int]] = []
    held: list[tuple[float, float]] = []  # prompt tokens and longest branch of each round
    for unit in members.tolist():
        prompt, longest = float(work.inner_tokens[unit]), float(work.longest_leaf[unit])
        if memory.peak_of_lane(prompt, longest, degree, waved=True) > memory.limit_bytes:
            return None
        for number, (inner, leaf) in enumerate(held):
            most = max(longest, leaf)
            prompts = memory.peak_of_lane(inner + prompt, 0.0, degree, waved=True) - memory.fixed_bytes
            if prompts <= room * (1 - _BRANCH_SHARE) and most <= memory.wave_tokens(inner + prompt, degree):
                rounds[number].append(unit)
                held[number] = inner + prompt, most
                break
        else:
            rounds.append([unit])
            held.append((prompt, longest))
    return rounds


def _waves_of(tokens: IntArray, most_tokens: int) -> IntArray:
    """Wave of each branch, none above `most_tokens` (but for a branch that is longer by itself): longest first."""
    order = np.argsort(-tokens, kind="stable")
    found = np.empty(len(order), dtype=np.int64)
    most = max(most_tokens, int(tokens.max()))
    count = max(-(-int(tokens.sum()) // max(most_tokens, 1)), 1)
    while True:
        found[order] = spread(tokens[order], count)
        if summed(found, tokens, count).max() <= most or count >= len(order):
            return found
        count += 1
