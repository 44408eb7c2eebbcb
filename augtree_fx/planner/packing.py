"""Rounds and waves: what a lane runs one after another, so that memory suffices.

A round is a prefill of some of a lane's units with the waves that replay their branches; a wave is one pass over some
branches. A lane's round whose branches are all in wave 0 runs them together with their prompts, in one pass. All lanes
make the same number of passes, since FSDP's collectives meet in each; some of them are empty.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from augtree_fx.planner.memory import MemoryModel
from augtree_fx.planner.placement import Placement
from augtree_fx.planner.replay_shape import IntArray

# Prompts of a round with several units leave this much of the free memory to branches.
_BRANCH_SHARE = 0.5


@dataclass(frozen=True, eq=False)
class Packing:
    """When each unit's prompts and each branch run.

    Attributes:
        rounds: rounds of every lane.
        waves: passes over branches in each round.
        round_of_unit: ``[units]``.
        wave_of_branch: ``[branches]`` wave within the round, branches in depth-first order.
        peak_bytes: ``[lanes]`` of one rank.
    """

    rounds: int
    waves: int
    round_of_unit: IntArray
    wave_of_branch: IntArray
    peak_bytes: np.ndarray


def pack(placement: Placement, memory: MemoryModel) -> Packing | None:
    """Fewest rounds and waves found; ``None`` if a lane cannot hold its units one at a time."""
    work = placement.family.work
    num_lanes = len(placement.lane_degrees)
    inner = np.bincount(placement.lane_of_unit, weights=work.inner_tokens, minlength=num_lanes)
    leaf = np.bincount(placement.lane_of_unit, weights=work.leaf_tokens, minlength=num_lanes)
    once = memory.peak_bytes(inner, leaf, placement.lane_degrees, waved=False)
    units = placement.family.units
    round_of_unit = np.zeros(units.num_units, dtype=np.int64)
    wave_of_branch = np.zeros(len(units.unit_of_branch), dtype=np.int64)
    if (once <= memory.limit_bytes).all():
        return Packing(1, 1, round_of_unit, wave_of_branch, once)
    lanes = [_rounds_of(placement, lane, memory) for lane in range(num_lanes)]
    if any(rounds is None for rounds in lanes):
        return None
    rounds = max(len(lane) for lane in lanes if lane is not None)
    waves = 1
    begins = np.searchsorted(units.unit_of_branch, np.arange(units.num_units + 1))
    tokens = units.shape.length[units.branches.node]
    peak = np.zeros(num_lanes)
    for lane, lane_rounds in enumerate(lanes):
        degree = int(placement.lane_degrees[lane])
        for number, members in enumerate(lane_rounds or ()):
            round_of_unit[members] = number
            branches = np.concatenate([np.arange(begins[unit], begins[unit + 1]) for unit in members])
            prompt = float(work.inner_tokens[members].sum())
            replayed = float(tokens[branches].sum())
            whole = float(memory.peak_bytes(prompt, replayed, degree, waved=False))
            if whole > memory.limit_bytes:
                found = _waves_of(tokens[branches], memory.wave_tokens(prompt, degree))
                wave_of_branch[branches] = found
                most = float(np.bincount(found, weights=tokens[branches]).max())
                waves = max(waves, int(found.max()) + 1)
                whole = float(memory.peak_bytes(prompt, most, degree, waved=True))
            peak[lane] = max(peak[lane], whole)
        peak[lane] = max(peak[lane], memory.fixed_bytes)
    return Packing(rounds, waves, round_of_unit, wave_of_branch, peak)


def _rounds_of(placement: Placement, lane: int, memory: MemoryModel) -> list[list[int]] | None:
    """Units of each round of a lane: most prompt tokens first, each into the first round with room."""
    work, degree = placement.family.work, int(placement.lane_degrees[lane])
    members = np.flatnonzero(placement.lane_of_unit == lane)
    members = members[np.argsort(-work.inner_tokens[members], kind="stable")]
    room = memory.limit_bytes - memory.fixed_bytes
    rounds: list[list[int]] = []
    inner: list[float] = []
    for unit in members.tolist():
        prompt, longest = float(work.inner_tokens[unit]), float(work.longest_leaf[unit])
        needed = memory.peak_bytes(prompt, longest, degree, waved=True)
        whole = memory.peak_bytes(prompt, work.leaf_tokens[unit], degree, waved=False)
        if min(needed, whole) > memory.limit_bytes:
            return None
        for number, held in enumerate(inner):
            prompts = float(memory.peak_bytes(held + prompt, 0, degree, waved=True)) - memory.fixed_bytes
            most = max(longest, *(float(work.longest_leaf[other]) for other in rounds[number]))
            if prompts <= room * (1 - _BRANCH_SHARE) and most <= memory.wave_tokens(held + prompt, degree):
                rounds[number].append(unit)
                inner[number] += prompt
                break
        else:
            rounds.append([unit])
            inner.append(prompt)
    return rounds


def _waves_of(tokens: IntArray, most_tokens: int) -> IntArray:
    """Wave of each branch, none above `most_tokens` (but for a branch that is longer by itself): longest first."""
    order = np.argsort(-tokens, kind="stable").tolist()
    sizes = tokens.tolist()
    count = max(-(-int(tokens.sum()) // max(most_tokens, 1)), 1)
    while True:
        heap = [(0, wave) for wave in range(count)]
        found = [0] * len(sizes)
        for branch in order:
            load, wave = heap[0]
            heapq.heapreplace(heap, (load + sizes[branch], wave))
            found[branch] = wave
        if max(load for load, _ in heap) <= max(most_tokens, sizes[order[0]]) or count >= len(sizes):
            return np.array(found, dtype=np.int64)
        count += 1
