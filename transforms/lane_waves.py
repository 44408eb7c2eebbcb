"""Waves behind one forward under context parallelism: each part of the tree is shared out among all ranks, in turn.

tokens of a rank    |share of the prompts| |share of wave 1| |share of wave 2| ...     as its outputs come back
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from augtree_fx.dtensor_ops.lanes import Lanes
from augtree_fx.dtensor_ops.shards import Shards
from augtree_fx.layout import TreeLayout
from augtree_fx.transforms.context import Shelf
from augtree_fx.transforms.in_waves import run_in_waves
from augtree_fx.transforms.lane_arguments import wave_arguments
from augtree_fx.transforms.packing import idle_forward
from augtree_fx.transforms.positions import call_packed
from augtree_fx.transforms.state import StackState
from augtree_fx.trie import IntArray
from augtree_fx.waves import Stage, part_of, token_index


@dataclass(frozen=True)
class LaneParts:
    """A batch that goes through the stack in parts, on all ranks of an axis.

    Attributes:
        plan: the parts, the same on all ranks.
        layout: the tree of the whole batch.
        lanes: the ranks.
        own: which slots of the batch are this rank's caller's.
        extras: further keywords of the stack's forward.
    """

    plan: Stage
    layout: TreeLayout
    lanes: Lanes
    own: slice
    extras: dict[str, Any] = field(default_factory=dict)

    def run(self, stack: nn.Module, state: StackState, original: Callable[..., Any]) -> tuple[Any, Tensor, int]:
        """As `packing.Parts.run`; slots count through the tokens of all ranks."""
        paths: dict[bytes, tuple[Shards, ...]] = {b"": ()}  # shards of stages, by their nodes and those above
        ran: list[tuple[Shards, IntArray]] = []

        def forward(nodes: IntArray, above: IntArray, prompts: Shelf | None, kept: Shelf | None) -> Any:
            everything, path = np.concatenate([above, nodes]), paths[above.tobytes()]
            shards = Shards.of(
                part_of(self.layout, everything),
                self.lanes.num_ranks,
                min_chunk_tokens=self.lanes.min_chunk_tokens,
                above=path,
            )
            if kept is not None:
                paths[everything.tobytes()] = (*path, shards)
            ran.append((shards, token_index(self.layout, everything)))
            arguments = wave_arguments(stack, state, self.lanes, shards, prompts, kept)
            return call_packed(stack, state.positions, original, self.extras | arguments)

        idle = idle_forward(stack, state, original, self.layout.device)
        outputs, _ = run_in_waves(self.plan, forward, idle)
        share = sum(shards.share for shards, _ in ran)
        index = self._places(ran, share)[self.layout.packed_index][self.own]
        return outputs, torch.from_numpy(index).to(self.layout.device), share

    def _places(self, ran: list[tuple[Shards, IntArray]], share: int) -> IntArray:
        """``[packed tokens + 1]`` where each lies in the outputs of all ranks; the last entry is for padding."""
        place = np.full(self.layout.num_tokens + 1, -1, dtype=np.int64)
        first = 0
        for shards, tokens in ran:
            for rank in range(shards.num_ranks):
                local = shards.tokens(rank)
                here = np.flatnonzero(local >= 0)
                place[tokens[local[here]]] = rank * share + first + here
            first += shards.share
        return place
