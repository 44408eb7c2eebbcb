"""Attention tables of one rank: calls on its own keys, on those of other ranks, and on keys that a window reaches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from augtree_fx.dtensor_ops.schedules import GATHER_KV, MOVE_Q
from augtree_fx.dtensor_ops.shards import Shards
from augtree_fx.tables import (
    AttentionTables,
    Calls,
    Chunks,
    Segment,
    Span,
    decode_calls,
    path_end,
    split_calls,
    tables_of,
)
from augtree_fx.trie import IntArray

Interval = tuple[int, int]
# Gathered keys that are none, so that their number is no other size of a small batch: torch.compile takes dims of equal
# sizes for the same one, and compiles again when they differ later.
_UNLIKE = 1013
# Calls on keys as they lie, from one more on which keys are brought together. A call takes the host 0.1 to 0.3 ms, and
# 45 of them in a layer of a tree of four levels took 2.3 times as long as one GPU alone (two H200, 2026-11-30).
MOST_APART = 3
# Keys that are copied for that, over the tokens of a rank's share: less than an MLP's activations, a layer at a time.
MOST_COPIED = 3
# The same where keys of all ranks are attended to at once, over the tokens of a rank's share, or over all these keys,
# whatever is more: queries of a prompt see it once in all, those of its responses once.
MOST_COPIED_AT_ONCE, MOST_COPIED_OF_GATHERED = 6, 2


class KeyTables(NamedTuple):
    """Calls of a rank's queries on the keys of one rank.

    Attributes:
        direct: on keys as they lie there.
        gathered: on keys that are brought together by ``kv_index``, a copy for each run of queries that sees others.
    """

    direct: AttentionTables
    gathered: AttentionTables


class KeyCalls(NamedTuple):
    """`KeyTables`, decoded.

    Attributes:
        kv_index: ``[gathered keys]`` int64 on the device.
    """

    direct: Calls
    gathered: Calls
    kv_index: Tensor

    @property
    def q_ranges(self) -> list[slice]:
        """Queries of each call, in their order."""
        return [call.q_range for calls in (self.direct, self.gathered) for call in calls]


@dataclass(frozen=True, eq=False)
class WholePath:
    """Calls of layers whose queries see all of their path, under one schedule.

    Attributes:
        own: of a rank's queries on its own keys.
        remote: of its queries on the keys of other ranks. A ring: of rank ``(rank - t) % ranks``, for t = 1, 2, ...;
            where queries move, of those at level 0 alone. Gathered: one set, on the keys that move of all ranks, one
            rank's after another, its own among them, which no call reads.
        visiting: where queries move, of those of rank ``(rank - t) % ranks`` on its own keys.
        sizes: what all ranks agree on, see `Sizes`.
    """

    own: KeyTables
    remote: tuple[KeyTables, ...]
    visiting: tuple[KeyTables, ...]
    sizes: Sizes


@dataclass(frozen=True)
class Sizes:
    """Tokens that move, equally many from every rank: the most that any has.

    Attributes:
        keys: keys that other ranks read, the first ones of a rank.
        prompt_keys: as many of them as own queries of level 0 read.
        queries: queries of deeper levels that read others' keys.
        first_query: the first of them on this rank.
        own_queries: how many this rank has.
    """

    keys: int
    prompt_keys: int
    queries: int
    first_query: int
    own_queries: int


@dataclass(frozen=True, eq=False)
class Reached:
    """Calls of layers whose queries see the end of their path, or a chunk of it.

    Attributes:
        tables: with ``kv_index`` into a rank's own keys (those of the nodes above first) and then those it is sent.
        sent: ``[n]`` places of the keys that this rank sends, by receiver.
        num_sent, num_received: ``[ranks]`` int64 on the host, keys to and from each rank.
    """

    tables: AttentionTables
    sent: Tensor
    num_sent: Tensor
    num_received: Tensor


@dataclass(frozen=True, eq=False)
class LaneCalls:
    """Calls of a rank for one schedule as four tensors, the form in which they are arguments of an op.

    What is in them is data to a compiled graph: only lengths could be specialised on, and none is 0 or 1.

    Attributes:
        segments: ``[n, 6]`` int64 on the host, cu_seqlens: ``[2, m]`` int32 and kv_index: ``[l]`` int64 on the device,
            of one set of calls after another (see `AttentionTables`): direct ones and gathered ones of own keys, of
            those of each other rank, of visiting queries.
        sizes: int64 on the host: the fields of `Sizes`, then the numbers of segments, calls and gathered keys of each
            set.
    """

    segments: Tensor
    cu_seqlens: Tensor
    kv_index: Tensor
    sizes: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of an op's arguments."""
        return self.segments, self.cu_seqlens, self.kv_index, self.sizes

    @staticmethod
    def of(found: WholePath) -> LaneCalls:
        """Those of a schedule."""
        sets = [tables for each in (found.own, *found.remote, *found.visiting) for tables in each]
        index = [x.kv_index for x in sets if x.kv_index is not None]
        counts = [
            number
            for each in sets
            for number in (len(each.segments), each.num_calls, 0 if each.kv_index is None else len(each.kv_index))
        ]
        segments, cu_seqlens = [x.segments for x in sets], [x.cu_seqlens for x in sets]
        device = found.own.direct.cu_seqlens.device
        return LaneCalls(
            torch.cat([*segments, torch.zeros(2, 6, dtype=torch.int64)]),
            torch.cat([*cu_seqlens, torch.zeros(2, 2, dtype=torch.int32, device=device)], 1),
            torch.cat([*index, torch.zeros(_UNLIKE, dtype=torch.int64, device=device)]),
            torch.tensor([*astuple(found.sizes), *counts]),
        )

    def decoded(self) -> tuple[list[KeyCalls], Sizes]:
        """The sets of calls, and what moves."""
        num_sizes = len(fields(Sizes))
        numbers = self.sizes.tolist()
        sets, row, column, key = [], 0, 0, 0
        for segments, calls, keys in zip(*(numbers[num_sizes + part :: 3] for part in range(3)), strict=True):
            rows, columns = slice(row, row + segments), slice(column, column + segments + calls)
            found = decode_calls(self.segments[rows], self.cu_seqlens[:, columns])
            sets.append((found, self.kv_index[key : key + keys]))
            row, column, key = rows.stop, columns.stop, key + keys
        pairs = zip(sets[::2], sets[1::2], strict=True)
        calls = [KeyCalls(direct, gathered, index) for (direct, _), (gathered, index) in pairs]
        return calls, Sizes(*numbers[:num_sizes])


class Paths:
    """Where the keys of a node's path lie on each rank."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self._fragments: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        base = 0
        for each in (*shards.above, shards):
            fragments = (each.node, each.rank, each.piece, each.place + base, each.length)
            for node, rank, piece, place, length in zip(*(x.tolist() for x in fragments), strict=True):
                self._fragments[node, rank].append((piece, place, place + length))
            base += each.share
        self._paths: dict[tuple[int, int], list[Interval]] = {}

    def above(self, node: int, rank: int) -> list[Interval]:
        """Keys on a rank of all nodes above a node, in their order there."""
        chain, parent = [], int(self.shards.layout.parent[node])
        while parent >= 0 and (parent, rank) not in self._paths:
            chain.append(parent)
            parent = int(self.shards.layout.parent[parent])
        found = self._paths[parent, rank] if parent >= 0 else []
        for each in reversed(chain):
            found = self._paths[each, rank] = sorted(found + self._intervals(each, rank, None))
        return found

    def seen(self, fragment: int, rank: int) -> list[Interval]:
        """Keys on a rank that all queries of a fragment see; its own are not among them."""
        node, piece = int(self.shards.node[fragment]), int(self.shards.piece[fragment])
        return sorted(self.above(node, rank) + self._intervals(node, rank, piece)) if piece else self.above(node, rank)

    def _intervals(self, node: int, rank: int, before: int | None) -> list[Interval]:
        found = self._fragments.get((node, rank), ())
        return [(begin, end) for piece, begin, end in found if before is None or piece < before]


def _joined(intervals: list[Interval]) -> list[Interval]:
    """Of intervals in order, neighbours as one."""
    found: list[Interval] = []
    for begin, end in intervals:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def whole_path(shards: Shards, rank: int, schedule: str) -> WholePath:
    """Tables of a rank of a lane, where this moves."""
    paths, device, ranks = Paths(shards), shards.layout.device, shards.num_ranks
    others = [(rank - distance) % ranks for distance in range(1, ranks)]
    mine = list(shards.fragments(rank))
    sizes = _sizes(shards, rank)
    most = MOST_COPIED * shards.share

    def tables(fragments: list[int], keys: int, first: int = 0) -> KeyTables:
        return _tables([], _runs(shards, fragments, lambda number: paths.seen(number, keys), first), most, device)

    def anywhere(number: int) -> list[Interval]:
        """Keys of other ranks among those gathered."""
        starts = [(other * sizes.keys, paths.seen(number, other)) for other in sorted(others)]
        return [(first + begin, first + end) for first, seen in starts for begin, end in seen]

    remote: tuple[KeyTables, ...] = ()
    visiting: tuple[KeyTables, ...] = ()
    if schedule == GATHER_KV and others:
        copied = max(MOST_COPIED_AT_ONCE * shards.share, MOST_COPIED_OF_GATHERED * ranks * sizes.keys)
        remote = (_tables([], _runs(shards, mine, anywhere, 0), copied, device),)
    elif schedule == MOVE_Q:
        prompts = [number for number in mine if shards.layout.level[shards.node[number]] == 0]
        first_query = shards.num_of_kinds(0)
        moving = [[n for n in shards.fragments(other) if shards.kind[n] in (1, 2)] for other in others]
        remote = tuple(tables(prompts, other) for other in others)
        visiting = tuple(
            tables(each, rank, int(first_query[other])) for each, other in zip(moving, others, strict=True)
        )
    else:
        remote = tuple(tables(mine, other) for other in others)
    own = [
        Segment(begin, end, shards.base + begin, shards.base + end)
        for begin, end in zip(shards.place[mine], shards.place[mine] + shards.length[mine], strict=True)
    ]
    on_own = _runs(shards, mine, lambda number: paths.seen(number, rank), 0)
    return WholePath(_tables(split_calls(own, causal=True), on_own, most, device), remote, visiting, sizes)


def _sizes(shards: Shards, rank: int) -> Sizes:
    first_query, queries = shards.num_of_kinds(0), shards.num_of_kinds(1, 2)
    return Sizes(
        keys=shards.base + int(shards.num_of_kinds(0, 1).max()),
        prompt_keys=shards.base + int(first_query.max()) if first_query.any() else 0,
        queries=int(queries.max()),
        first_query=int(first_query[rank]),
        own_queries=int(queries[rank]),
    )


def _runs(
    shards: Shards, fragments: list[int], seen: Callable[[int], list[Interval]], first: int
) -> list[tuple[Interval, list[Interval]]]:
    """Neighbouring queries, which count from ``first``, with the keys that all of them see."""
    runs: list[tuple[Interval, list[Interval]]] = []
    for number in fragments:
        begin, keys = int(shards.place[number]) - first, seen(number)
        end = begin + int(shards.length[number])
        if runs and runs[-1][0][1] == begin and runs[-1][1] == keys:
            runs[-1] = ((runs[-1][0][0], end), keys)
        elif keys and begin < end:
            runs.append(((begin, end), keys))
    return runs


def _tables(
    causal: list[tuple[bool, list[Segment]]],
    runs: list[tuple[Interval, list[Interval]]],
    most: float,
    device: torch.device,
) -> KeyTables:
    """Calls of runs on all of their keys, after others; where keys lie apart in many calls, ``most`` are gathered.

    Gathered keys are those of every run, one run after another. What is too much to be copied for each run is a call
    for neighbouring runs, but for its last key: so every run has gathered keys, and its neighbours' call goes on. It
    stays where it lies, unless the same runs see more of that kind: these are copied, too, once for all runs.
    The i-th interval of keys of every run is in the i-th family of calls: in one call no query is twice.
    """
    families: dict[int, list[Segment]] = defaultdict(list)
    for queries, keys in runs:
        for family, interval in enumerate(_joined(keys)):
            families[family].append(Segment(*queries, *interval))
    apart = [call for family in sorted(families) for call in split_calls(families[family], causal=False)]
    if len(apart) <= MOST_APART:
        return KeyTables(tables_of(causal + apart, device, None), tables_of([], device, np.empty(0, dtype=np.int64)))
    alone = _staying(runs, most)
    together, index, count = [], [np.empty(0, dtype=np.int64)], 0
    for queries, keys in runs:
        begin = count
        for k_begin, k_end in keys:
            first = k_end - 1 if (k_begin, k_end) in alone else k_begin
            index.append(np.arange(first, k_end))
            count += k_end - first
        together.append(Segment(*queries, begin, count))
    stay: list[tuple[bool, list[Segment]]] = []
    gathered = split_calls(together, causal=False)
    for seen, intervals in _by_queries(alone):
        if len(intervals) == 1:
            ((k_begin, k_end),) = intervals
            stay += [(False, [Segment(*queries, k_begin, k_end - 1)]) for queries in seen]
        else:
            begin = count
            index += [np.arange(k_begin, k_end - 1) for k_begin, k_end in intervals]
            count += sum(k_end - 1 - k_begin for k_begin, k_end in intervals)
            gathered += [(False, [Segment(*queries, begin, count)]) for queries in seen]
    return KeyTables(tables_of(causal + stay, device, None), tables_of(gathered, device, np.concatenate(index)))


def _by_queries(seen: dict[Interval, list[Interval]]) -> list[tuple[list[Interval], list[Interval]]]:
    """Queries, and intervals of keys that all of these see; one with a large segment is by itself."""
    alone: list[tuple[list[Interval], list[Interval]]] = []
    found: dict[tuple[Interval, ...], list[Interval]] = {}
    for interval, queries in seen.items():
        if any(Segment(*each, *interval).is_large for each in queries):
            alone.append((queries, [interval]))
        else:
            found.setdefault(tuple(queries), []).append(interval)
    return alone + [(list(queries), intervals) for queries, intervals in found.items()]


def _staying(runs: list[tuple[Interval, list[Interval]]], most: float) -> dict[Interval, list[Interval]]:
    """Intervals of keys that are not gathered, with the queries that see each, neighbouring ones as one.

    Those of large segments, and those that would be copied most, until no more than ``most`` keys are copied.
    """
    seen: dict[Interval, list[Interval]] = defaultdict(list)
    copies: dict[Interval, int] = defaultdict(int)
    for queries, keys in runs:
        for interval in keys:
            copies[interval] += interval[1] - interval[0]
            last = seen[interval][-1] if seen[interval] else None
            if last is not None and last[1] == queries[0]:
                seen[interval][-1] = (last[0], queries[1])
            else:
                seen[interval].append(queries)
    found: dict[Interval, list[Interval]] = {}
    total = sum(copies.values())
    for interval in sorted(seen, key=lambda each: (-copies[each], each)):
        large = any(Segment(*queries, *interval).is_large for queries in seen[interval])
        if interval[1] - interval[0] > 1 and (large or total > most):
            found[interval] = seen[interval]
            total -= copies[interval]
    return found


def reached(shards: Shards, rank: int, span: Span) -> Reached:
    """Tables of a rank of a lane for a window or chunks: every rank is sent the keys that its queries reach."""
    index, segments, num_keys = [], [], 0
    for number in shards.fragments(rank):
        place = int(shards.place[number])
        for begin, end, keys in _reaches(shards, number, span):
            index.append(keys)
            segments.append(Segment(place + begin, place + end, num_keys, num_keys + len(keys)))
            num_keys += len(keys)
    needed = [_needed(shards, other, span) for other in range(shards.num_ranks)]
    owner, local = shards.keys
    received = needed[rank]
    arrival = np.full(shards.layout.num_tokens, -1, dtype=np.int64)
    arrival[received] = np.arange(len(received))
    tokens = np.concatenate(index) if index else np.empty(0, dtype=np.int64)
    places = np.where(owner[tokens] == rank, local[tokens], shards.base + shards.share + arrival[tokens])
    sent = [tokens[owner[tokens] == rank] for tokens in needed]
    device = shards.layout.device
    return Reached(
        tables=tables_of(split_calls(segments, causal=True), device, places),
        sent=torch.from_numpy(local[np.concatenate(sent)]).to(device),
        num_sent=torch.tensor([len(x) for x in sent]),
        num_received=torch.from_numpy(np.bincount(owner[received], minlength=shards.num_ranks)),
    )


def _reaches(shards: Shards, number: int, span: Span) -> list[tuple[int, int, IntArray]]:
    """Runs of a fragment's queries, with the packed tokens that they see: a path's end, and causally the run itself."""
    layout, node, begin, length = shards.layout, *(int(x[number]) for x in (shards.node, shards.begin, shards.length))
    start = int(layout.path_start[node]) + begin

    def keys(first: int, last: int, reach: int) -> IntArray:
        """Tokens ``[first, last)`` of the node, after the ``reach`` tokens before them."""
        inside = min(reach, first)
        own = np.arange(first - inside, last) + int(layout.offset[node])
        if reach == inside:
            return own
        return np.concatenate([path_end(layout, node, reach - inside)[: reach - inside], own])

    if not isinstance(span, Chunks):
        assert span is not None, "a whole path is no window"
        return [(0, length, keys(begin, begin + length, min(span - 1, start)))]
    runs = []
    for chunk in range(start - start % span.size, start + length, span.size):
        first, last = max(chunk, start), min(chunk + span.size, start + length)
        run = first - start, last - start
        runs.append((*run, keys(begin + run[0], begin + run[1], first - chunk)))
    return runs


def _needed(shards: Shards, rank: int, span: Span) -> IntArray:
    """Packed tokens of other ranks that a rank's queries reach, by their owner, each once."""
    keys = [keys for number in shards.fragments(rank) for _, _, keys in _reaches(shards, number, span)]
    tokens = np.unique(np.concatenate(keys)) if keys else np.empty(0, dtype=np.int64)
    owner = shards.keys[0][tokens]
    tokens, owner = tokens[owner != rank], owner[owner != rank]
    return tokens[np.argsort(owner, kind="stable")]
