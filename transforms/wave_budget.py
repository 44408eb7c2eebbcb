"""How many packed tokens a wave may have in a budget of memory, and why.

memory = prompts (activations, K, V) + gradients (K, V, parameters) + outputs + one wave
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from augtree_fx.layout import TreeLayout
from augtree_fx.memory import shown
from augtree_fx.transforms.footprint import Footprint, local
from augtree_fx.transforms.skeleton import named_layers

logger = logging.getLogger("augtree_fx")

# Shares of the free memory that memory="auto" takes. Behind one forward the rest is for what the caller makes of its
# outputs, logits of all tokens perhaps, which the decoder cannot know.
PREFILL_SHARE, FORWARD_SHARE = 0.9, 0.5


@dataclass(frozen=True)
class Extent:
    """Sizes of a tree in tokens.

    Attributes:
        computed: all of them.
        waved: those that go through waves: all but prompts.
        above: the most that a wave can have above it: all prompts, and a branch of branches.
        stage: the most that is computed at once and kept: all prompts, or one branch of branches.
        longest: of one response, which no wave cuts.
    """

    computed: int
    waved: int
    above: int
    stage: int
    longest: int

    @staticmethod
    def of(layout: TreeLayout) -> Extent:
        """Sizes of a layout."""
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
    """

    gradients: int
    gathered: int = 0
    outputs: int = 0
    head_token: float = 0.0
    head_tokens: int = 0


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
    if whole and sum(always.values()) + everything <= memory:
        return WaveBudget(memory, always, everything, None)
    parts = {
        "prompts": int(extent.above * (footprint.keys + (footprint.kept if kept else 0.0))),
        "gradients of their K and V": int(extent.above * footprint.key_gradients),
        "K and V of a layer": int(extent.above * footprint.layer_keys),
        **always,
    }

    def wave_bytes(tokens: int) -> int:
        head = around.head_token * min(tokens, around.head_tokens)
        return int((footprint.kept + 2 * footprint.hidden) * tokens + max(footprint.layer * tokens, head))

    left = memory - sum(parts.values())
    tokens = bisect_right(range(1, max(extent.waved, 1) + 1), left, key=wave_bytes)
    budget = WaveBudget(memory, parts, wave_bytes(tokens), tokens)
    if tokens < 1:
        raise ValueError(
            f"memory must hold prompts and a wave of at least 1 token, which takes {shown(wave_bytes(1))}; "
            f"{shown(memory)}{budget.spent} leaves {shown(left)}. Give more, or let prompts take less: checkpoint the "
            "layers, or activations='recompute' of augtree_fx.prefill"
        )
    again = int((footprint.layer + (0.0 if kept else footprint.kept)) * extent.stage)
    if again > left:
        _warn("the backward of the prompts", again, left, "max_prompt_tokens of augtree_fx.prefill cuts them")
    if wave_bytes(extent.longest) > left:
        what = f"a response of {extent.longest} tokens, which is a wave of its own,"
        _warn(what, wave_bytes(extent.longest), left, "checkpoint the layers, or give more")
    return budget


def _warn(what: str, needed: int, left: int, way_out: str) -> None:
    logger.warning("augtree-fx: %s may take %s, %s of memory are left; %s", what, shown(needed), shown(left), way_out)


def missing_gradients(module: nn.Module) -> int:
    """Bytes of gradients that parameters do not have yet, on this rank."""
    return sum(local(x).nbytes for x in module.parameters() if x.requires_grad and x.grad is None)


def gathered_parameters(stack: nn.Module, groups: list[Any]) -> int:
    """Bytes of layers' parameters that FSDP2 holds at a time: two layers', and as many gradients."""
    layers = [layer for _, layer in named_layers(stack)] if groups else []
    return 4 * max((sum(x.numel() * x.itemsize for x in layer.parameters()) for layer in layers), default=0)
