"""A forward under context parallelism: all ranks of a mesh axis build one tree, and each computes its share of tokens.

rows      each rank's own, or the same on all       exchanged on the host, with what every rank is about to do
tokens    a share of the packed tree on each rank   everything outside of attention is local
outputs   gathered, and shown in the caller's shape
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from augtree_fx.dtensor_ops.agreement import digest
from augtree_fx.dtensor_ops.lanes import Division, LanePart, Lanes
from augtree_fx.layout import TreeLayout
from augtree_fx.rows import HostRows
from augtree_fx.transforms.counts import prompt_tokens_of
from augtree_fx.transforms.lane_arguments import local_arguments
from augtree_fx.transforms.lane_waves import LaneParts, needs_waves, wave_limits
from augtree_fx.transforms.packing import PackedCall
from augtree_fx.transforms.requests import Unshared, costs_of, count, has_cache, read_rows, refuse_waves
from augtree_fx.transforms.state import StackState
from augtree_fx.trie import IntArray

ROWS = ("replicated", "pooled")


def pack_rows(
    stack: nn.Module, state: StackState, lanes: Lanes, given: Mapping[str, Any], *, compiled: bool = False,
    in_step: bool = False, limits_of: Callable[[Division, int], list[int | None]] | None = None,
) -> PackedCall:  # fmt: skip
    """The packed call of this rank's share of a batch.

    Args:
        stack: the module.
        state: its settings.
        lanes: the ranks.
        given: this rank's arguments by name.
        compiled: the stack runs as a compiled graph, which holds no module to expand `Latents` with.
        in_step: lanes run as many forwards as each other.
        limits_of: of a batch in lanes and the number of this rank's slots: ``[lanes]`` packed tokens of branches that
            each has alive at a time, ``None`` for all of them.

    Raises:
        Unshared: no rank can share its rows, for the same reason; or this one generates, for itself.
        RuntimeError: ranks disagree on what to do, or on the batch.
        ValueError, NotImplementedError: strict, and the batch cannot be shared exactly.
    """
    if lanes.rows == "pooled" and has_cache(given):
        raise Unshared("")  # nothing is exchanged: ranks generate different numbers of tokens
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
    prompts = None if rows is None else prompt_tokens_of(rows, state.prompt_columns)
    found = lanes.host.exchange((said, None if pooled is None else (_on_host(pooled), prompts)))
    lanes.host.check("what ranks do with a batch", [each for each, _ in found])
    if error is not None:
        raise error
    if rows is None:
        raise Unshared(reason)
    own = slice(0, rows.shape[0] * rows.shape[1])
    shape = rows.shape
    if pooled is not None:
        rows, own = _pool([each for _, (each, _) in found], lanes.host.rank, rows.device)
        if not len(rows.keys):
            raise ValueError("the batch is empty on all ranks; leave the call out, or pass some rows on one of them")
        known = [each for _, (_, each) in found if each is not None]
        prompts = np.concatenate(known) if len(known) == len(found) else None
    costs = costs_of(stack, state, rows.device)

    def subtree(some: tuple[int, ...]) -> TreeLayout:
        chosen = np.array(some, dtype=np.int64)
        return TreeLayout.from_rows(replace(rows, begin=rows.begin[chosen], length=rows.length[chosen]), costs=costs)

    layout = TreeLayout.from_rows(rows, costs=costs)
    if state.recorder is not None:
        state.recorder.last.layout = layout
    count(stack, state, rows)
    division = lanes.divide(layout, subtree)
    if limits_of is None:
        limits = wave_limits(division.plans, state.max_wave_tokens)
    else:
        limits = limits_of(division, own.stop - own.start)
    if needs_waves(division, limits):
        return _call_in_waves(stack, state, lanes, division, limits, own, shape, prompts, in_step=in_step)
    state.counts.add_shared(layout, division.num_tokens, 0, prompts)
    part = division.in_one_pass()
    return _packed_call(stack, state, lanes, part, part.index[own], shape, latents=not compiled)


def _call_in_waves(
    stack: nn.Module, state: StackState, lanes: Lanes, division: Division, limits: list[int | None], own: slice,
    shape: tuple[int, int], prompts: IntArray | None, *, in_step: bool,
) -> PackedCall:  # fmt: skip
    """The call of a batch in waves."""
    try:
        _refuse(stack, state, lanes, division.layout)
    except NotImplementedError as error:
        if state.strict:
            raise
        raise Unshared(str(error)) from error
    parts = LaneParts.of(division, limits, own, in_step=in_step)
    waves = sum(len(nodes) > 0 for nodes in parts.plan.walk())
    state.counts.add_shared(division.layout, division.num_tokens, waves, prompts)
    return PackedCall({}, torch.from_numpy(parts.index), shape, division.num_tokens, parts, lanes.group)


def pack_layout(stack: nn.Module, state: StackState, lanes: Lanes, layout: TreeLayout) -> PackedCall:
    """The packed call of this rank's share of an explicit layout, which all ranks pass; fit for a compiled graph.

    Raises:
        RuntimeError: ranks disagree on the layout.
    """
    lanes.host.agree("an explicit layout", described(stack, state, lanes, layout))

    def subtree(some: tuple[int, ...]) -> TreeLayout:
        raise ValueError(f"an explicit layout of {layout.num_rows} rows runs in one lane, got one of {len(some)} rows")

    part = lanes.divide(layout, subtree).in_one_pass()
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
        "strict": state.strict,
        "max_wave_tokens": state.max_wave_tokens,
        "memory": state.memory,
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
    layout = part.shards.layout
    _refuse(stack, state, lanes, layout)
    arguments = local_arguments(stack, state, part.lane, part.shards, part.lane.plan.schedule, latents=latents)
    index_there = torch.from_numpy(index).to(layout.device)
    return PackedCall(arguments, index_there, shape, part.share, group=lanes.group)


def _refuse(stack: nn.Module, state: StackState, lanes: Lanes, layout: TreeLayout) -> None:
    """Raise NotImplementedError where a batch cannot be computed in shares."""
    refuse_waves(stack, state, layout)
    if lanes.rows == "pooled" and any(site.counts for site in state.sites):
        raise NotImplementedError("a layer counts the columns of tokens, which rows of several ranks do not share")
