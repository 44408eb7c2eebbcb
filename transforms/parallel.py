"""A forward under context parallelism: all ranks of a mesh axis build one tree, and each computes its share of tokens.

rows      each rank's own, or the same on all       exchanged on the host, with what every rank is about to do
tokens    a share of the packed tree on each rank   everything outside of attention is local
outputs   gathered, and shown in the caller's shape
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from augtree_fx.dtensor_ops.agreement import digest
from augtree_fx.dtensor_ops.lanes import LanePart, Lanes, one_pass_schedule, wave_schedule
from augtree_fx.dtensor_ops.shards import Shards
from augtree_fx.dtensor_ops.site import LaneTables
from augtree_fx.layout import TreeLayout
from augtree_fx.rows import HostRows
from augtree_fx.transforms.context import ReplayContext, Shelf
from augtree_fx.transforms.packing import PackedCall, carrying_mask, check_sites
from augtree_fx.transforms.path_rows import columns
from augtree_fx.transforms.requests import Unshared, costs_of, read_rows, refuse_waves
from augtree_fx.transforms.skeleton import CONTEXT
from augtree_fx.transforms.state import StackState
from augtree_fx.trie import IntArray

ROWS = ("replicated", "pooled")


def pack_rows(
    stack: nn.Module, state: StackState, lanes: Lanes, given: Mapping[str, Any], *, compiled: bool = False
) -> PackedCall:
    """The packed call of this rank's share of a batch.

    Args:
        stack: the module.
        state: its settings.
        lanes: the ranks.
        given: this rank's arguments by name.
        compiled: the stack runs as a compiled graph, which holds no module to expand `Latents` with.

    Raises:
        Unshared: no rank can share its rows, for the same reason.
        RuntimeError: ranks disagree on what to do, or on the batch.
        ValueError, NotImplementedError: strict, and the batch cannot be shared exactly.
    """
    rows, reason, error = None, "", None
    try:
        rows = read_rows(stack, state, given)
    except Unshared as unshared:
        reason = str(unshared) or "it asks for a KV cache, or generates"
    except (ValueError, NotImplementedError) as raised:
        reason, error = str(raised), raised
    said = {"what hinders sharing": reason, "compiled": compiled, **_settings(stack, state, lanes)}
    if rows is not None and lanes.rows == "replicated":
        said |= {"shape": rows.shape, "token ids and positions": digest(rows.keys, rows.begin, rows.length)}
    pooled = rows if lanes.rows == "pooled" else None
    found = lanes.host.exchange((said, None if pooled is None else _on_host(pooled)))
    lanes.host.check("what ranks do with a batch", [each for each, _ in found])
    if error is not None:
        raise error
    if rows is None:
        raise Unshared(reason)
    own = slice(0, rows.shape[0] * rows.shape[1])
    shape, num_tokens = rows.shape, int(rows.length.sum())
    if pooled is not None:
        rows, own = _pool([each for _, each in found], lanes.host.rank, rows.device)
    costs = costs_of(stack, state, rows.device)

    def subtree(some: tuple[int, ...]) -> TreeLayout:
        chosen = np.array(some, dtype=np.int64)
        return TreeLayout.from_rows(replace(rows, begin=rows.begin[chosen], length=rows.length[chosen]), costs=costs)

    layout = TreeLayout.from_rows(rows, costs=costs)
    part = lanes.part(layout, subtree)
    computed = layout.num_tokens if pooled is None else int((part.tokens() >= 0).sum())
    state.counts.add_rows(num_tokens)
    state.counts.add_shared(num_tokens, computed, 0)
    return _packed_call(stack, state, lanes, part, part.index[own], shape, latents=not compiled)


def pack_layout(stack: nn.Module, state: StackState, lanes: Lanes, layout: TreeLayout) -> PackedCall:
    """The packed call of this rank's share of an explicit layout, which all ranks pass; fit for a compiled graph.

    Raises:
        RuntimeError: ranks disagree on the layout.
    """
    lanes.host.agree("an explicit layout", described(stack, state, lanes, layout))

    def subtree(some: tuple[int, ...]) -> TreeLayout:
        raise ValueError(f"an explicit layout of {layout.num_rows} rows runs in one lane, got one of {len(some)} rows")

    part = lanes.part(layout, subtree)
    return _packed_call(stack, state, lanes, part, part.index, layout.shape, latents=False)


def described(stack: nn.Module, state: StackState, lanes: Lanes, layout: TreeLayout) -> dict[str, Any]:
    """An explicit layout and the settings it runs with, for ranks to compare."""
    tokens = digest(layout.length, layout.parent, layout.input_ids, layout.position_ids)
    batch = {"nodes": layout.num_nodes, "tokens": layout.num_tokens, "token ids and positions": tokens}
    return batch | _settings(stack, state, lanes)


def _settings(stack: nn.Module, state: StackState, lanes: Lanes) -> dict[str, Any]:
    """What decides which transfers a forward and a backward make, besides the batch."""
    weight = next(stack.parameters())
    device = weight.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return {
        "rows are": lanes.rows,
        "lanes": lanes.choice,
        "chunks": lanes.min_chunk_tokens,
        "costs": str(state.costs),
        "kernel": state.kernel,
        "dtype": str(autocast or weight.dtype),
        "attention": f"{len(state.sites)} modules of spans {sorted({str(site.span) for site in state.sites})}",
        "gradients": torch.is_grad_enabled(),
        "checkpointing": stack.training and getattr(stack, "is_gradient_checkpointing", False),
    }


def _on_host(rows: HostRows) -> tuple[IntArray, IntArray, IntArray]:
    return rows.keys, rows.begin, rows.length


def _pool(found: list[tuple[IntArray, IntArray, IntArray]], rank: int, device: torch.device) -> tuple[HostRows, slice]:
    """Rows of all ranks as those of one, their slots one after another, and which slots are this rank's."""
    sizes = [len(keys) for keys, _, _ in found]
    first = np.cumsum([0, *sizes])
    keys, begin, length = (np.concatenate(each) for each in zip(*found, strict=True))
    begin = begin + np.repeat(first[:-1], [len(each) for _, each, _ in found])
    return HostRows(keys, begin, length, (1, len(keys)), device), slice(int(first[rank]), int(first[rank + 1]))


def _packed_call(
    stack: nn.Module, state: StackState, lanes: Lanes, part: LanePart, index: IntArray, shape: tuple[int, int],
    *, latents: bool,
) -> PackedCall:  # fmt: skip
    refuse_waves(stack, state, part.layout)
    if lanes.rows == "pooled" and any(site.counts for site in state.sites):
        raise NotImplementedError("a layer counts the columns of tokens, which rows of several ranks do not share")
    arguments = local_arguments(stack, state, part.shards, part.rank, part.schedule, part.group, latents=latents)
    index_there = torch.from_numpy(index).to(part.layout.device)
    return PackedCall(arguments, index_there, shape, part.share, group=lanes.group)


def wave_arguments(
    stack: nn.Module, state: StackState, lanes: Lanes, shards: Shards, prompts: Shelf | None, kept: Shelf | None
) -> dict[str, Any]:
    """Keywords of the stack's forward for a rank's share of a stage or a wave, all ranks being one lane.

    Args:
        shards: of its nodes, on top of the stages above.
        prompts, kept: see `ReplayContext`; K and V of this rank's shares.
    """
    config: Any = stack.config
    heads = config.num_attention_heads
    kv_share = (getattr(config, "num_key_value_heads", None) or heads) / heads
    cuts = [site.cut for site in state.sites]
    if cuts and all(cut is not None for cut in cuts):  # latents travel in place of keys
        kv_share *= max(cut.elements / cut.expanded for cut in cuts if cut is not None)
    schedule = lanes.schedule
    if schedule is None and shards.above:
        first = int(shards.layout.offset[sum(each.num_nodes for each in shards.above)])
        schedule = wave_schedule(first, shards.layout.num_tokens - first, kv_share)
    schedule = schedule or one_pass_schedule(shards.layout)
    return local_arguments(stack, state, shards, lanes.host.rank, schedule, lanes.group, prompts, kept, latents=True)


def local_arguments(
    stack: nn.Module, state: StackState, shards: Shards, rank: int, schedule: str, group: str,
    prompts: Shelf | None = None, kept: Shelf | None = None, *, latents: bool,
) -> dict[str, Any]:  # fmt: skip
    """Keywords of the stack's forward for the share of a rank of a lane."""
    check_sites(stack, state)
    layout, device, tokens = shards.layout, shards.layout.device, shards.tokens(rank)
    counts = any(site.counts for site in state.sites)
    ids, positions, counted = (
        torch.from_numpy(np.where(tokens < 0, 0, _taken(x, tokens))).to(device, non_blocking=True)
        for x in (layout.input_ids, layout.position_ids, columns(layout))
    )
    tables = LaneTables.of(shards, rank, {site.span for site in state.sites}, schedule, group, latents=latents)
    context = ReplayContext(
        {}, False, state.kernel, counted if counts else None, prompts=prompts, kept=kept, lane=tables
    )
    return {
        "input_ids": ids[None],
        "attention_mask": carrying_mask(stack, state, context, device),
        "position_ids": positions[None],
        "use_cache": False,
        CONTEXT: context,
    }


def _taken(values: IntArray, tokens: IntArray) -> IntArray:
    return values[np.maximum(tokens, 0)] if len(values) else np.zeros_like(tokens)
