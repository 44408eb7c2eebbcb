"""Which rank of a lane computes which tokens of a tree, and in which order each rank keeps its own.

prompt     |0|1|2|3|        2C chunks; rank r has chunks r and 2C-1-r: equally much causal attention (zigzag)
branches   a b c d          whole, longest first to the rank with fewest tokens; cut like prompts if too long, or asked

rank 0     |0|3| a d        keys that others read first, then queries that read others' keys, then the rest
rank 1     |1|2| c b .      shares are equally long; what is missing is padding, which no kernel sees
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from augtree_fx.layout import TreeLayout
from augtree_fx.trie import IntArray

# A chunk that is shorter than this costs more in launches than an equal share of it saves.
MIN_CHUNK_TOKENS = 256
# The same of branches that are cut on request: few tokens of theirs attend to as many keys as many others do.
MIN_CUT_TOKENS = 32
# Tokens by which the longest share may exceed the mean one before a branch is cut.
UNEVEN = 1.05


@dataclass(frozen=True, eq=False)
class Shards:
    """Tokens of a tree, cut into fragments that each lie on one rank.

    Fragments are those of the tree's own nodes, sorted by rank and by their place on it; nodes before them were given
    to ranks earlier, and their keys lie before the own ones on every rank. Arrays are ``[fragments]`` int64.

    Attributes:
        layout: the tree.
        num_ranks: ranks of the lane.
        node: node of each fragment.
        begin: its first token in the node.
        length: its tokens, at least 1.
        piece: its number in the node.
        rank: where it lies.
        kind: 0 for level 0 and read by other ranks, 1 for deeper levels read by others, 2 for queries of deeper levels
            that read others' keys, 3 for the rest.
        share: own tokens of every rank, padding included: at least the most that one has, and at least 1.
        above: shards of the nodes before the own ones, each on top of those before it.
    """

    layout: TreeLayout
    num_ranks: int
    node: IntArray
    begin: IntArray
    length: IntArray
    piece: IntArray
    rank: IntArray
    kind: IntArray
    share: int
    above: tuple[Shards, ...] = ()

    @staticmethod
    def of(
        layout: TreeLayout,
        num_ranks: int,
        *,
        min_chunk_tokens: int = MIN_CHUNK_TOKENS,
        above: tuple[Shards, ...] = (),
        cut: bool = False,
    ) -> Shards:
        """Cut a tree and give its parts to ranks; every rank that asks gets the same answer.

        Args:
            layout: the tree.
            num_ranks: ranks that share it, at least 1.
            min_chunk_tokens: shorter chunks are not cut off.
            above: shards of its first nodes, whose keys are there; in node numbers of this tree.
            cut: cut branches, too, in chunks of `MIN_CUT_TOKENS` and more, so that attention is even as tokens are.

        Raises:
            ValueError: ``num_ranks`` or ``min_chunk_tokens`` is below 1.
        """
        if num_ranks < 1 or min_chunk_tokens < 1:
            raise ValueError(f"ranks and tokens of a chunk must be at least 1, got {num_ranks} and {min_chunk_tokens}")
        before = sum(shards.num_nodes for shards in above)
        bounds, ranks = _cut(layout, num_ranks, min_chunk_tokens, before, cut=cut)
        for shards in above:
            for number, owner in zip(shards.node.tolist(), shards.rank.tolist(), strict=True):
                ranks[number].append(owner)
        pieces = [(node, piece) for node in range(before, layout.num_nodes) for piece in range(len(ranks[node]))]
        node, piece = np.array(pieces, dtype=np.int64).reshape(-1, 2).T
        begin = np.array([bounds[n][p] for n, p in pieces], dtype=np.int64)
        end = np.array([bounds[n][p + 1] for n, p in pieces], dtype=np.int64)
        rank = np.array([ranks[n][p] for n, p in pieces], dtype=np.int64)
        kind = _kinds(layout, node, rank, ranks)
        order = np.lexsort((node, piece, layout.level[node], kind, rank))
        node, begin, length, piece, rank, kind = (x[order] for x in (node, begin, end - begin, piece, rank, kind))
        most = np.bincount(rank, length, num_ranks).max()
        return Shards(layout, num_ranks, node, begin, length, piece, rank, kind, max(int(most), 1), above)

    @cached_property
    def num_nodes(self) -> int:
        """Own nodes."""
        return len(np.unique(self.node))

    @cached_property
    def base(self) -> int:
        """Keys of the nodes above on every rank, padding included."""
        return sum(shards.share for shards in self.above)

    @cached_property
    def first(self) -> IntArray:
        """``[ranks + 1]`` first fragment of each rank."""
        return np.searchsorted(self.rank, np.arange(self.num_ranks + 1))

    @cached_property
    def place(self) -> IntArray:
        """``[fragments]`` first token of each on its rank."""
        before = np.cumsum(self.length) - self.length
        starts = np.append(before, self.length.sum())[self.first[:-1]]
        return before - starts[self.rank]

    def num_of_kinds(self, *kinds: int) -> IntArray:
        """``[ranks]`` tokens of some kinds on each."""
        weight = self.length * np.isin(self.kind, kinds)
        return np.bincount(self.rank, weight, self.num_ranks).astype(np.int64)

    def fragments(self, rank: int) -> range:
        """Numbers of a rank's fragments, in their order."""
        return range(int(self.first[rank]), int(self.first[rank + 1]))

    def tokens(self, rank: int) -> IntArray:
        """``[share]`` packed token of each place on a rank, -1 for padding."""
        found = np.full(self.share, -1, dtype=np.int64)
        for number in self.fragments(rank):
            first = int(self.layout.offset[self.node[number]] + self.begin[number])
            place, length = int(self.place[number]), int(self.length[number])
            found[place : place + length] = np.arange(first, first + length)
        return found

    @cached_property
    def keys(self) -> tuple[IntArray, IntArray]:
        """``[packed tokens]`` the rank of each token's key, and its place among all keys there."""
        rank, place = (np.full(self.layout.num_tokens, -1, dtype=np.int64) for _ in range(2))
        base = 0
        for shards in (*self.above, self):
            for number in range(len(shards.node)):
                first = int(self.layout.offset[shards.node[number]] + shards.begin[number])
                tokens = slice(first, first + int(shards.length[number]))
                rank[tokens] = shards.rank[number]
                place[tokens] = np.arange(int(shards.length[number])) + base + int(shards.place[number])
            base += shards.share
        return rank, place


def _cut(
    layout: TreeLayout, num_ranks: int, min_chunk: int, first_node: int, *, cut: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Per node from ``first_node`` on the bounds of its pieces, and the rank of each."""
    num_chunks = 2 * num_ranks
    zigzag = [min(chunk, num_chunks - 1 - chunk) for chunk in range(num_chunks)]
    load = np.zeros(num_ranks, dtype=np.int64)
    bounds: list[list[int]] = [[] for _ in range(layout.num_nodes)]
    ranks: list[list[int]] = [[] for _ in range(layout.num_nodes)]

    def put(node: int, ends: list[int], owners: list[int]) -> None:
        bounds[node], ranks[node] = ends, owners
        np.add.at(load, owners, np.diff(ends))

    def put_in_chunks(node: int) -> None:
        length = int(layout.length[node])
        put(node, [length * chunk // num_chunks for chunk in range(num_chunks + 1)], zigzag)

    def put_whole(node: int) -> None:
        put(node, [0, int(layout.length[node])], [int(load.argmin())])

    own = np.arange(layout.num_nodes) >= first_node
    divisible = (num_ranks > 1) & (layout.length >= num_chunks * min_chunk) & own
    asked = (layout.length >= num_chunks * min(min_chunk, MIN_CUT_TOKENS)) & (num_ranks > 1) & cut
    has_branches = np.isin(np.arange(layout.num_nodes), layout.parent)
    for node in np.flatnonzero(has_branches & divisible).tolist():
        put_in_chunks(node)
    most = UNEVEN * int(layout.length[own].sum()) / num_ranks
    rest = np.flatnonzero(own & ~(has_branches & divisible))
    for node in rest[np.argsort(-layout.length[rest], kind="stable")].tolist():
        if asked[node] or (divisible[node] and load.min() + layout.length[node] > most):
            put_in_chunks(node)
        else:
            put_whole(node)
    return bounds, ranks


def _kinds(layout: TreeLayout, node: IntArray, rank: IntArray, ranks: list[list[int]]) -> IntArray:
    """Kind of each fragment; sets of ranks are bits of an int."""
    own = [0] * layout.num_nodes
    for number, owners in enumerate(ranks):
        for owner in owners:
            own[number] |= 1 << owner
    below, above = [0] * layout.num_nodes, [0] * layout.num_nodes
    for number in range(layout.num_nodes - 1, -1, -1):
        parent = int(layout.parent[number])
        if parent >= 0:
            below[parent] |= own[number] | below[number]
    for number in range(layout.num_nodes):
        parent = int(layout.parent[number])
        if parent >= 0:
            above[number] = own[parent] | above[parent]
    kind = np.empty(len(node), dtype=np.int64)
    for number, (n, r) in enumerate(zip(node.tolist(), rank.tolist(), strict=True)):
        others = ~(1 << r)
        same = own[n] if len(ranks[n]) > 1 else 0  # chunks of a node: earlier ones are read, later ones read
        deep = layout.level[n] > 0
        if (below[n] | same) & others:
            kind[number] = 1 if deep else 0
        else:
            kind[number] = 2 if deep and above[n] & others else 3
    return kind
