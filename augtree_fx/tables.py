"""Attention tables: the attention of a packed tree as a short list of variable-length calls without exotic masks.

own        every node's tokens attend to themselves, causally             one call over all nodes
replay     tokens of level m attend to one ancestor level l, unmasked     one call per pair (l, m)
windowed   K and V of each node are preceded by the part of its path that the window reaches: one causal call
chunked    every part of a node in one chunk, after the part of its path in that chunk: one causal call over all of them

Large segments get a call of their own, so that a dense kernel can take them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from augtree_fx.layout import TreeLayout

# (query, key) pairs from which a segment is a call of its own, so that cuDNN's dense kernel can take it. Below, one
# variable-length call over many segments is better: cuDNN plans every new shape, 45-60 ms forward and 50-75 ms
# backward, and an 8192 x 8192 causal call saves 3.0 of FlashAttention-2's 6.5 ms in each of some 36 layers.
# H200, torch 2.11, 2026-11-29.
DENSE_PAIRS = 8192 * 8192


class Chunks(NamedTuple):
    """A query sees the keys of its own chunk of its row, up to itself; rows are cut every ``size`` tokens."""

    size: int

    def __str__(self) -> str:
        return f"chunks of {self.size}"


Span = int | Chunks | None  # keys that a query sees, itself included; those of its chunk; or its whole path


@dataclass(frozen=True)
class Segment:
    """Queries ``[q_begin, q_end)`` attend to keys ``[k_begin, k_end)``."""

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int

    @property
    def num_queries(self) -> int:
        return self.q_end - self.q_begin

    @property
    def num_keys(self) -> int:
        return self.k_end - self.k_begin

    @property
    def is_large(self) -> bool:
        """Whether it is a call of its own."""
        return self.num_queries * self.num_keys >= DENSE_PAIRS


Run = tuple[bool, tuple[Segment, ...]]  # whether a call is causal, and its segments


@dataclass(frozen=True)
class AttentionCall:
    """One kernel call: neighbouring segments, all causal (aligned at the last key) or all unmasked.

    Attributes:
        segments: neighbours, in packed order; no gap between the keys of one and the next, nor between queries.
        causal: query i of a segment sees keys up to ``i + num_keys - num_queries``.
        cu_q, cu_k: ``[segments + 1]`` int32 cumulative lengths on the device, starting from 0.
    """

    segments: tuple[Segment, ...]
    causal: bool
    cu_q: Tensor
    cu_k: Tensor

    @property
    def q_range(self) -> slice:
        return slice(self.segments[0].q_begin, self.segments[-1].q_end)

    @property
    def k_range(self) -> slice:
        return slice(self.segments[0].k_begin, self.segments[-1].k_end)

    @property
    def max_q(self) -> int:
        return max(segment.num_queries for segment in self.segments)

    @property
    def max_k(self) -> int:
        return max(segment.num_keys for segment in self.segments)


@dataclass(frozen=True, eq=False)
class AttentionTables:
    """The calls of a tree as tensors, the form in which they are arguments of an op.

    Attributes:
        segments: ``[segments, 6]`` int64 on the host: call, causal (0 or 1), q_begin, q_end, k_begin, k_end.
        cu_seqlens: ``[2, segments + calls]`` int32 on the device: per call, cumulative query and key lengths.
        kv_index: ``[gathered keys]`` int64 on the device, packed token of each key, or ``None`` when keys are
            addressed by packed token (no window).
    """

    segments: Tensor
    cu_seqlens: Tensor
    kv_index: Tensor | None

    @property
    def num_calls(self) -> int:
        return int(self.segments[-1, 0]) + 1 if len(self.segments) else 0

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> AttentionTables:
        """The same calls for queries and keys on another device; the segments stay on the host."""
        cu_seqlens = self.cu_seqlens.to(device, non_blocking=non_blocking)
        kv_index = None if self.kv_index is None else self.kv_index.to(device, non_blocking=non_blocking)
        if cu_seqlens is self.cu_seqlens and kv_index is self.kv_index:
            return self
        return AttentionTables(self.segments, cu_seqlens, kv_index)


@dataclass(frozen=True, eq=False)
class Calls(Sequence[AttentionCall]):
    """The calls of a tree.

    Attributes:
        items: the calls.
        key: what they are as bytes, rows of ``call, causal, q_begin, q_end, k_begin, k_end`` in int64, by which what is
            derived from them is cached: every layer of a model has the same.
    """

    items: tuple[AttentionCall, ...]
    key: bytes

    @overload
    def __getitem__(self, index: int) -> AttentionCall: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[AttentionCall, ...]: ...
    def __getitem__(self, index: int | slice) -> AttentionCall | tuple[AttentionCall, ...]:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


def decode_calls(segments: Tensor, cu_seqlens: Tensor) -> Calls:
    """The calls that a pair of table tensors (see `AttentionTables`) stands for.

    Raises:
        ValueError: tensors of other shapes or dtypes than those.
    """
    if segments.dtype != torch.int64 or segments.ndim != 2 or segments.shape[1] != 6:
        raise ValueError(f"segments must be [segments, 6] int64, got {tuple(segments.shape)} {segments.dtype}")
    key = segments.numpy().tobytes()
    calls, first = [], 0
    for causal, members in decode_segments(key):
        last = first + len(members) + 1
        calls.append(AttentionCall(members, causal, cu_seqlens[0, first:last], cu_seqlens[1, first:last]))
        first = last
    if cu_seqlens.shape != (2, first):
        raise ValueError(f"cu_seqlens must be [2, {first}] for these segments, got {tuple(cu_seqlens.shape)}")
    return Calls(tuple(calls), key)


@lru_cache(maxsize=64)
def decode_segments(key: bytes) -> tuple[Run, ...]:
    """Mask and segments of the calls that `Calls.key` stands for."""
    grouped: list[tuple[bool, list[Segment]]] = []
    for call, causal, *bounds in np.frombuffer(key, dtype=np.int64).reshape(-1, 6).tolist():
        if call == len(grouped):
            grouped.append((bool(causal), []))
        grouped[call][1].append(Segment(*bounds))
    return tuple((causal, tuple(members)) for causal, members in grouped)


def build_tables(layout: TreeLayout, window: Span, first_node: int = 0) -> AttentionTables:
    """Tables of a layout: over the whole path (``window=None``), its last ``window`` tokens, or chunks of it.

    Args:
        layout: the tree; keys are all of its tokens.
        window: keys that a query sees.
        first_node: only tokens of this node and the ones after it are queries, numbered from its first.
    """
    if isinstance(window, Chunks):
        return _chunked_tables(layout, window.size, first_node)
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, the token itself, got {window}; None means the whole path")
    longest = int((layout.path_start + layout.length).max()) if layout.num_nodes else 0
    if window is not None and window < longest:
        index, segments = _windowed_segments(layout, window, first_node)
        return tables_of(split_calls(segments, causal=True), layout.device, index)
    bounds, before = layout.offset[first_node:].tolist(), int(layout.offset[first_node])
    own = [
        Segment(first - before, last - before, first, last) for first, last in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    calls = split_calls(own, causal=True)
    for lower in range(1, layout.num_levels):
        for segments in _ancestor_segments(layout, lower, first_node):
            calls += split_calls(segments, causal=False)
    return tables_of(calls, layout.device, None)


def _ancestor_segments(layout: TreeLayout, lower: int, first_node: int) -> list[list[Segment]]:
    """Per level above ``lower``, and node of it: its descendants there, which are neighbours, attend to all of it.

    Levels of which each node's tokens follow its parent's are one: a prompt in chunks is read at once.
    """
    first = max(int(layout.level_begin[lower]), first_node)
    ancestor = np.arange(first, layout.level_begin[lower + 1])
    found: list[list[Segment]] = []
    if not len(ancestor):
        return found
    before = int(layout.offset[first_node])
    for _ in range(lower):
        ancestor = layout.parent[ancestor]
        starts = np.flatnonzero(np.append(True, np.diff(ancestor) != 0))
        ends = np.append(starts[1:], len(ancestor))
        nodes = ancestor[starts]
        bounds = (layout.offset[first + starts] - before, layout.offset[first + ends] - before)
        keys = (layout.offset[nodes], layout.offset[nodes + 1])
        segments = [Segment(*each) for each in zip(*(x.tolist() for x in (*bounds, *keys)), strict=True)]
        below = found[-1] if found else []
        if [(x.q_begin, x.q_end, x.k_end) for x in segments] == [(x.q_begin, x.q_end, x.k_begin) for x in below]:
            found[-1] = [replace(x, k_begin=y.k_begin) for x, y in zip(below, segments, strict=True)]
        else:
            found.append(segments)
    return found[::-1]


def _windowed_segments(layout: TreeLayout, window: int, first_node: int) -> tuple[np.ndarray, list[Segment]]:
    """Keys of each node preceded by what the window reaches of its ancestors, gathered into one run per node."""
    index, segments, num_keys, before = [], [], 0, int(layout.offset[first_node])
    for node in range(first_node, layout.num_nodes):
        gathered = path_end(layout, node, min(window - 1, int(layout.path_start[node])))
        index.append(gathered)
        first, last = int(layout.offset[node]) - before, int(layout.offset[node + 1]) - before
        segments.append(Segment(first, last, num_keys, num_keys + len(gathered)))
        num_keys += len(gathered)
    return np.concatenate(index), segments


def path_end(layout: TreeLayout, node: int, reach: int) -> np.ndarray:
    """Packed tokens of a node after those of the last ``reach`` tokens of its ancestors."""
    keys = [np.arange(layout.offset[node], layout.offset[node + 1])]
    ancestor = int(layout.parent[node])
    while reach > 0:
        taken = min(reach, int(layout.length[ancestor]))
        end = int(layout.offset[ancestor + 1])
        keys.append(np.arange(end - taken, end))
        reach, ancestor = reach - taken, int(layout.parent[ancestor])
    return np.concatenate(keys[::-1])


def _chunked_tables(layout: TreeLayout, size: int, first_node: int) -> AttentionTables:
    if size < 1:
        raise ValueError(f"chunks must have at least 1 token, got {size}")
    longest = int((layout.path_start + layout.length).max()) if layout.num_nodes else 0
    if size >= longest:
        return build_tables(layout, None, first_node)
    index, segments, num_keys, before = [], [], 0, int(layout.offset[first_node])
    for node in range(first_node, layout.num_nodes):
        start, length, offset = (int(x[node]) for x in (layout.path_start, layout.length, layout.offset))
        first = start - start % size  # where the chunk of the node's first token starts
        path = path_end(layout, node, start - first)
        for begin in range(first, start + length, size):
            end = min(begin + size, start + length)
            index.append(path[begin - first : end - first])
            query = offset - before + max(begin, start) - start
            segments.append(Segment(query, offset - before + end - start, num_keys, num_keys + end - begin))
            num_keys += end - begin
    return tables_of(split_calls(segments, causal=True), layout.device, np.concatenate(index))


def split_calls(segments: Iterable[Segment], *, causal: bool) -> list[tuple[bool, list[Segment]]]:
    """Runs of neighbouring small segments; large ones alone; a gap in queries or keys starts a new run."""
    calls: list[tuple[bool, list[Segment]]] = []
    run_open = False
    for segment in segments:
        large = segment.is_large
        if run_open and not large:
            last = calls[-1][1][-1]
            run_open = last.q_end == segment.q_begin and last.k_end == segment.k_begin
        if run_open and not large:
            calls[-1][1].append(segment)
        else:
            calls.append((causal, [segment]))
        run_open = not large
    return calls


def tables_of(
    calls: Sequence[tuple[bool, list[Segment]]], device: torch.device, kv_index: np.ndarray | None
) -> AttentionTables:
    rows = [
        [number, int(causal), segment.q_begin, segment.q_end, segment.k_begin, segment.k_end]
        for number, (causal, members) in enumerate(calls)
        for segment in members
    ]
    cumulative: list[list[int]] = [[], []]
    for _, members in calls:
        cumulative[0] += [0] + [s.q_end - members[0].q_begin for s in members]
        cumulative[1] += [0] + [s.k_end - members[0].k_begin for s in members]
    return AttentionTables(
        segments=torch.tensor(rows, dtype=torch.int64).reshape(-1, 6),
        cu_seqlens=torch.tensor(cumulative, dtype=torch.int32).to(device),
        kv_index=None if kv_index is None else torch.from_numpy(kv_index).to(device),
    )
