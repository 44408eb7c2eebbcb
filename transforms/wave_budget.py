"""How many packed tokens a wave may have in a budget of memory, and why.

memory = prompts (activations, K, V) + gradients (K, V, parameters) + outputs + one wave
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import nn

from augtree_fx.dtensor_ops.shards import UNEVEN, Shards
from augtree_fx.layout import TreeLayout
from augtree_fx.memory import shown
from augtree_fx.reference import accumulation_dtype
from augtree_fx.transforms.footprint import Footprint, local
from augtree_fx.transforms.skeleton import named_layers
from augtree_fx.waves import part_of

logger = logging.getLogger("augtree_fx")

# Shares of the free memory that memory="auto" takes. Behind one forward the rest is for what the caller makes of its
# outputs, logits of all tokens perhaps, which the decoder cannot know.
PREFILL_SHARE, FORWARD_SHARE = 0.9, 0.5


@dataclass(frozen=True)
class Extent:
    """Sizes of a tree in tokens; of a rank's share of them, where several are a lane.

    Attributes:
        computed: all of them.
        waved: those that go through waves: all but prompts, of the whole lane.
        above: the most that a wave can have above it: all prompts, and a branch of branches.
        stage: the most that is computed at once and kept: all prompts, or one branch of branches.
        longest: of one response, which no wave cuts.
        ranks: of the lane.
        uncut: of the longest response that lies on one rank, whatever the others have.
        rotates: whether keys visit a rank one share after another, in place of all at once.
    """

    computed: int
    waved: int
    above: int
    stage: int
    longest: int
    ranks: int = 1
    uncut: int = 0
    rotates: bool = False

    @staticmethod
    def of(layout: TreeLayout) -> Extent:
        """Sizes of a layout on one rank."""
        has_branches = np.isin(np.arange(layout.num_nodes), layout.parent)
        prompts = (layout.level == 0) & has_branches
        below = np.zeros(layout.num_nodes, dtype=np.int64)  # tokens of a path below its prompt
        for node in np.flatnonzero(layout.level > 0):
            below[node] = below[layout.parent[node]] + layout.length[node]
        roots = int(layout.length[prompts].sum())
        inner = int(below[has_branches].max(initial=0))
        stage = max(roots, int(layout.length[has_branches & (layout.level > 0)].max(initial=0)))
        longest = int(layout.length[~has_branches].max(initial=0))
        return Extent(layout.num_tokens, layout.num_tokens - roots, roots + inner, stage, longest)

    @staticmethod
    def of_lane(layout: TreeLayout, ranks: int, min_chunk_tokens: int, *, rotates: bool) -> Extent:
        """Sizes of the largest share of a layout among the ranks of a lane."""
        whole = Extent.of(layout)
        if ranks == 1:
            return whole
        roots = np.flatnonzero((layout.level == 0) & np.isin(np.arange(layout.num_nodes), layout.parent))
        prompts = Shards.of(part_of(layout, roots), ranks, min_chunk_tokens=min_chunk_tokens).share
        deeper = whole.above - int(layout.length[roots].sum())
        uncut = layout.length[layout.length < 2 * ranks * min_chunk_tokens]
        return Extent(
            computed=Shards.of(layout, ranks, min_chunk_tokens=min_chunk_tokens).share,
            waved=whole.waved, above=prompts + deeper, stage=max(prompts, deeper), longest=whole.longest, ranks=ranks,
            uncut=int(uncut.max(initial=0)), rotates=rotates,
        )  # fmt: skip

    def share(self, tokens: int) -> int:
        """The most that a rank has of a wave of so many tokens of the lane, see `Shards.of`."""
        even = tokens / self.ranks
        return min(tokens, ceil(max(UNEVEN * even, even + self.uncut * (1 - 1 / self.ranks))))

    @property
    def visible(self) -> int:
        """Shares of keys that are on a rank at once: its own, in a ring two that pass by; gathered ones are copied."""
        return min(self.ranks, 3) if self.rotates else 3 * self.ranks


@dataclass(frozen=True)
class WaveBudget:
    """A choice of `choose_waves`; ``print`` it.

    Attributes:
        memory: bytes there are.
        parts: bytes set aside for what is not a wave, by what it is.
        wave_bytes: of one wave of so many tokens.
        max_tokens: packed tokens of a wave; ``None`` where all tokens fit into one forward.
    """

    memory: int
    parts: dict[str, int]
    wave_bytes: int
    max_tokens: int | None

    def __str__(self) -> str:
        if self.max_tokens is None:
            return f"all in one forward, {shown(self.wave_bytes)}: {shown(self.memory)}{self.spent}"
        return f"waves of {self.max_tokens} tokens, {shown(self.wave_bytes)} each: {shown(self.memory)}{self.spent}"

    @property
    def spent(self) -> str:
        """What is set aside, in words."""
        return "".join(f" - {name} {shown(size)}" for name, size in self.parts.items() if size)


@dataclass(frozen=True)
class Surroundings:
    """Bytes of what else is there.

    Attributes:
        gradients: of parameters, as far as they are not there yet.
        gathered: of parameters that are sharded, while they are whole.
        outputs: what is handed to the caller.
        head_token, head_tokens: the head's bytes a token, and how many tokens it takes at a time.
        moving_token: bytes a token of queries, outputs and their gradients in one layer, which are with all ranks of a
            lane where queries move.
    """

    gradients: int
    gathered: int = 0
    outputs: int = 0
    head_token: float = 0.0
    head_tokens: int = 0
    moving_token: float = 0.0


def choose_waves(
    memory: int, footprint: Footprint, extent: Extent, around: Surroundings, *, kept: bool = True, whole: bool = False
) -> WaveBudget:
    """The most tokens a wave may have.

    Args:
        memory: bytes there are beyond what is allocated.
        footprint: bytes a token of the decoder.
        extent: of the batch.
        around: what else there is.
        kept: whether prompts' activations stay on the device.
        whole: whether all tokens may go through one forward, if they fit.

    Raises:
        ValueError: no wave fits.
    """
    always = {
        "gradients of parameters": around.gradients,
        "gathered parameters": around.gathered,
        "outputs": around.outputs,
        "whatever the size": int(footprint.constant),
    }
    everything = int(footprint.computed * extent.computed)
    if extent.ranks > 1:
        everything += int(extent.computed * extent.visible * footprint.layer_keys)
    if whole and sum(always.values()) + everything <= memory:
        return WaveBudget(memory, always, everything, None)
    parts = {
        "prompts": int(extent.above * (footprint.keys + (footprint.kept if kept else 0.0))),
        "gradients of their K and V": int(extent.above * footprint.key_gradients),
        "K and V of a layer": int(extent.above * extent.visible * footprint.layer_keys),
        **always,
    }

    def wave_bytes(tokens: int) -> int:
        own = extent.share(tokens)
        head = around.head_token * min(own, around.head_tokens)
        shown = 0.0
        if extent.ranks > 1:
            shown = own * (extent.visible * footprint.layer_keys + extent.ranks * around.moving_token)
        return int((footprint.kept + 2 * footprint.hidden) * own + max(footprint.layer * own + shown, head))

    left = memory - sum(parts.values())
    tokens = bisect_right(range(1, max(extent.waved, 1) + 1), left, key=wave_bytes)
    budget = WaveBudget(memory, parts, wave_bytes(tokens), tokens)
    if tokens < 1:
        raise ValueError(
            f"memory must hold prompts and a wave of at least 1 token, which takes {shown(wave_bytes(1))}; "
            f"{shown(memory)}{budget.spent} leaves {shown(left)}. Give more, or let prompts take less: checkpoint the "
            "layers, or activations='recompute' of augtree_fx.prefill"
        )
    longest = wave_bytes(extent.longest)
    again = int((footprint.layer + (0.0 if kept else footprint.kept)) * extent.stage)
    if again > left:
        _warn("the backward of the prompts", again, left, "max_prompt_tokens of augtree_fx.prefill cuts them")
    if longest > left:
        what = f"a response of {extent.longest} tokens, which is a wave of its own,"
        _warn(what, longest, left, "checkpoint the layers, or give more")
    return budget


def _warn(what: str, needed: int, left: int, way_out: str) -> None:
    logger.warning("augtree-fx: %s may take %s, %s of memory are left; %s", what, shown(needed), shown(left), way_out)


def moving_token(config: Any, dtype: torch.dtype) -> float:
    """Bytes a token of queries and their gradient, in a layer: of `Surroundings`.

    Queries and the output's gradient come in the model's dtype, partial outputs and gradients of queries go back in the
    accumulation dtype.
    """
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    size = max(size, getattr(config, "qk_nope_head_dim", 0) + getattr(config, "qk_rope_head_dim", 0))
    return 2.0 * heads * size * (dtype.itemsize + accumulation_dtype(dtype).itemsize)


def missing_gradients(module: nn.Module) -> int:
    """Bytes of gradients that parameters do not have yet, on this rank."""
    return sum(local(x).nbytes for x in module.parameters() if x.requires_grad and x.grad is None)


def gathered_parameters(stack: nn.Module, groups: list[Any]) -> int:
    """Bytes of layers' parameters that FSDP2 holds at a time: two layers', and as many gradients."""
    layers = [layer for _, layer in named_layers(stack)] if groups else []
    return 4 * max((sum(x.numel() * x.itemsize for x in layer.parameters()) for layer in layers), default=0)
