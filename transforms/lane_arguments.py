"""Keywords of a stack's forward for a rank's share of a tree: its tokens, and the tables of its lane."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from augtree_fx.dtensor_ops import collectives
from augtree_fx.dtensor_ops.lanes import Lane, one_pass_schedule, wave_schedule
from augtree_fx.dtensor_ops.schedules import ROTATE_KV
from augtree_fx.dtensor_ops.shards import Shards
from augtree_fx.dtensor_ops.site import LaneTables
from augtree_fx.transforms.context import ReplayContext, Shelf
from augtree_fx.transforms.packing import carrying_mask, check_sites
from augtree_fx.transforms.path_rows import columns
from augtree_fx.transforms.skeleton import CONTEXT
from augtree_fx.transforms.state import StackState
from augtree_fx.trie import IntArray


def wave_arguments(
    stack: nn.Module, state: StackState, lane: Lane, shards: Shards, prompts: Shelf | None, kept: Shelf | None
) -> dict[str, Any]:
    """Keywords of the stack's forward for a rank's share of a stage or a wave.

    Args:
        lane: its ranks, and who moves there.
        shards: of its nodes, on top of the stages above.
        prompts, kept: see `ReplayContext`; K and V of this rank's shares.
    """
    config: Any = stack.config
    heads = config.num_attention_heads
    kv_share = (getattr(config, "num_key_value_heads", None) or heads) / heads
    cuts = [site.cut for site in state.sites]
    if cuts and all(cut is not None for cut in cuts):  # latents travel in place of keys
        kv_share *= max(cut.elements / cut.expanded for cut in cuts if cut is not None)
    schedule = lane.plan.schedule
    if kept is not None and lane.plan.prefill_schedule is not None:
        schedule = lane.plan.prefill_schedule
    if schedule is None and shards.above:
        first = int(shards.layout.offset[sum(each.num_nodes for each in shards.above)])
        schedule = wave_schedule(first, shards.layout.num_tokens - first, kv_share)
    return local_arguments(stack, state, lane, shards, schedule, prompts, kept, latents=True)


def local_arguments(
    stack: nn.Module, state: StackState, lane: Lane, shards: Shards, schedule: str | None,
    prompts: Shelf | None = None, kept: Shelf | None = None, *, latents: bool,
) -> dict[str, Any]:  # fmt: skip
    """Keywords of the stack's forward for the share of a rank of a lane; ``None`` for `one_pass_schedule`."""
    check_sites(stack, state)
    layout, device, tokens = shards.layout, shards.layout.device, shards.tokens(lane.rank)
    counts = any(site.counts for site in state.sites)
    ids, positions, counted = (
        torch.from_numpy(np.where(tokens < 0, 0, _taken(x, tokens))).to(device, non_blocking=True)
        for x in (layout.input_ids, layout.position_ids, columns(layout))
    )
    if state.recorder is not None:
        collectives.watch(lane.group, state.recorder)
    moves, spans = schedule or one_pass_schedule(layout), {site.span for site in state.sites}
    if schedule is None and latents and any(site.cut is not None for site in state.sites):
        moves = ROTATE_KV  # of one rank's latents at a time keys are expanded, not of all at once
    tables = LaneTables.of(shards, lane.rank, spans, moves, lane.group, latents=latents)
    context = ReplayContext(
        {}, False, state.kernel, counted if counts else None, prompts=prompts, kept=kept, lane=tables,
        recorder=state.recorder,
    )  # fmt: skip
    return {
        "input_ids": ids[None],
        "attention_mask": carrying_mask(stack, state, context, device),
        "position_ids": positions[None],
        "use_cache": False,
        CONTEXT: context,
    }


def _taken(values: IntArray, tokens: IntArray) -> IntArray:
    return values[np.maximum(tokens, 0)] if len(values) else np.zeros_like(tokens)
