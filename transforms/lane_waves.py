"""Waves behind one forward under context parallelism: every lane goes through its own, each shared out among its ranks.

tokens of a rank    |share of the prompts| |share of wave 1| |share of wave 2| ...     as its outputs come back
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from augtree_fx.dtensor_ops.lanes import Division, Lane, LanePlan, Pass
from augtree_fx.dtensor_ops.shards import Shards
from augtree_fx.layout import TreeLayout
from augtree_fx.lockstep import pad_alike
from augtree_fx.transforms.context import Shelf
from augtree_fx.transforms.in_waves import lengthened, run_beside, run_in_waves
from augtree_fx.transforms.lane_arguments import wave_arguments
from augtree_fx.transforms.packing import idle_forward
from augtree_fx.transforms.positions import call_packed
from augtree_fx.transforms.state import StackState
from augtree_fx.trie import IntArray
from augtree_fx.waves import Stage, branch_tokens, part_of, plan_waves, token_index


def wave_limits(plans: Sequence[LanePlan], max_wave_tokens: int | None) -> list[int | None]:
    """``[lanes]`` packed tokens of branches that each has alive at a time: what it says, or its ranks' share.

    Args:
        plans: of all lanes.
        max_wave_tokens: of all ranks; ``None`` for all tokens.
    """
    ranks = sum(len(plan.ranks) for plan in plans)
    return [
        plan.wave_tokens or (None if max_wave_tokens is None else max(1, max_wave_tokens * len(plan.ranks) // ranks))
        for plan in plans
    ]


def needs_waves(division: Division, limits: Sequence[int | None]) -> bool:
    """Whether the branches of some lane do not fit at once."""
    pairs = zip(division.trees, limits, strict=True)
    return any(limit is not None and branch_tokens(tree) > limit for tree, limit in pairs)


def cut_of(tree: TreeLayout, limit: int | None) -> Stage:
    """A lane's tree in stages and waves; all of it in one pass where its branches fit at once, or nothing is there."""
    if limit is None or branch_tokens(tree) <= limit:
        return Stage(np.arange(tree.num_nodes), idle=tree.num_nodes == 0)
    return plan_waves(tree, limit)


def passes_of(plan: Stage, tree: TreeLayout, lane: LanePlan, min_chunk_tokens: int) -> dict[bytes, Pass]:
    """What every forward of a lane computes, by its nodes and those above, in the order in which they run."""
    cut = partial(Shards.of, num_ranks=len(lane.ranks), min_chunk_tokens=min_chunk_tokens, cut=lane.cut)
    paths: dict[bytes, tuple[Shards, ...]] = {b"": ()}
    found: dict[bytes, Pass] = {}
    for above, nodes in plan.passes():
        everything = np.concatenate([above, nodes])
        path = paths[above.tobytes()]
        shards = cut(part_of(tree, everything), above=path)
        paths[everything.tobytes()] = (*path, shards)
        found[everything.tobytes()] = shards, token_index(tree, everything)
    if not found:  # a lane without rows computes padding
        nothing = np.empty(0, dtype=np.int64)
        found[b""] = cut(tree), nothing
    return found


@dataclass(frozen=True)
class LaneParts:
    """A batch that goes through the stack in parts, in every lane its own.

    Attributes:
        plan: the parts of this rank's lane, and where it has fewer than other lanes, idle ones.
        lane: this rank's lane.
        shards: of each of its forwards, by their nodes and those above.
        share: tokens of every rank's outputs, padding included.
        index: ``[slots]`` where each slot of this rank's caller lies in the outputs of all ranks.
        extras: further keywords of the stack's forward.
    """

    plan: Stage
    lane: Lane
    shards: Mapping[bytes, Shards]
    share: int
    index: IntArray
    extras: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(division: Division, limits: Sequence[int | None], own: slice, *, in_step: bool) -> LaneParts:
        """The parts of a batch.

        Args:
            division: among lanes.
            limits: ``[lanes]`` see `wave_limits`.
            own: which slots of the batch are this rank's caller's.
            in_step: whether lanes have to run as many forwards as each other, see `lockstep`.
        """
        plans = [cut_of(tree, limit) for tree, limit in zip(division.trees, limits, strict=True)]
        passes = [
            passes_of(plan, tree, lane, division.min_chunk_tokens)
            for plan, tree, lane in zip(plans, division.trees, division.plans, strict=True)
        ]
        share = max(sum(shards.share for shards, _ in each.values()) for each in passes)
        index = division.index([list(each.values()) for each in passes], share)[own]
        mine = plans[division.number]
        if in_step:
            pad_alike(mine, plans)
        shards = {key: one for key, (one, _) in passes[division.number].items()}
        return LaneParts(mine, division.lane, shards, share, index)

    def run(self, stack: nn.Module, state: StackState, original: Callable[..., Any]) -> tuple[Any, Tensor, int]:
        """As `packing.Parts.run`; slots count through the tokens of all ranks."""

        def forward(nodes: IntArray, above: IntArray, prompts: Shelf | None, kept: Shelf | None) -> Any:
            shards = self.shards[np.concatenate([above, nodes]).tobytes()]
            arguments = wave_arguments(stack, state, self.lane, shards, prompts, kept)
            return call_packed(stack, state.positions, original, self.extras | arguments)

        device, nothing = next(iter(self.shards.values())).layout.device, np.empty(0, dtype=np.int64)
        idle = idle_forward(stack, state, original, device)
        if b"" in self.shards:
            outputs = run_beside(forward(nothing, nothing, None, None), self.plan, idle)
        else:
            outputs, _ = run_in_waves(self.plan, forward, idle)
        computed = sum(shards.share for shards in self.shards.values())
        return lengthened(outputs, computed, self.share), torch.from_numpy(self.index).to(device), self.share
