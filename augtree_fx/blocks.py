"""A whole tree as blocks of the (query, key) plane, so that one block-sparse launch does what many calls would.

A block of 128 queries x 128 keys is full (every pair visible), partial (an elementwise mask decides) or absent. The
mask needs three numbers a token: its node's place in a depth-first walk, and the ends of that node's subtree there.

              keys
              P1   P2   a    b    c
queries  P1   part
         P2        part                 part: the diagonal of a node
         a    full      part            full: descendants x ancestor
         b    full           part
         c         full           part
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from augtree_fx.tables import Run, Segment

BLOCK = 128  # queries and keys of a block: the tile of FlashAttention-4 on Hopper, forward
MAX_BLOCKS = 1 << 21  # full and partial blocks of one tree; more take the host longer than they save


@dataclass(frozen=True, eq=False)
class BlockLists:
    """For each row of blocks, which blocks of it are partial and which are full.

    Attributes:
        partial_count, full_count: ``[rows]`` int32.
        partial, full: ``[rows, most]`` int32 block numbers in ascending order; entries past the count mean nothing.
    """

    partial_count: Tensor
    partial: Tensor
    full_count: Tensor
    full: Tensor


@dataclass(frozen=True, eq=False)
class TreeBlocks:
    """Block lists of a tree on a device.

    Attributes:
        by_query: key blocks of each query block, what a forward walks.
        by_key: query blocks of each key block, what a backward walks.
        first, last: ``[tokens]`` int32: a token's node comes ``first``-th in the depth-first walk, its last descendant
            at ``last - 1``. Query i sees key j where ``j <= i`` and ``first[j] <= first[i] < last[j]``.
        num_blocks: full and partial blocks.
    """

    by_query: BlockLists
    by_key: BlockLists
    first: Tensor
    last: Tensor
    num_blocks: int


def why_not_a_tree(runs: Sequence[Run], num_tokens: int) -> str | None:
    """Why calls cannot be one block-sparse launch, or ``None``."""
    own = [segment for causal, segments in runs if causal for segment in segments]
    if any((s.q_begin, s.q_end) != (s.k_begin, s.k_end) for s in own):
        return "a window gathers the keys of its calls"
    bounds = sorted((segment.q_begin, segment.q_end) for segment in own)
    ends = [0, *(end for _, end in bounds)]
    if ends[-1] != num_tokens or any(begin != end for (begin, _), end in zip(bounds, ends[:-1], strict=True)):
        return "its calls are not those of a whole tree"
    least = sum(s.num_queries * s.num_keys for _, segments in runs for s in segments) // BLOCK**2
    if least > MAX_BLOCKS:
        return f"its {least} blocks are more than {MAX_BLOCKS}"
    replayed = [segment for causal, segments in runs if not causal for segment in segments]
    begin = np.array([begin for begin, end in bounds if end > begin], dtype=np.int64)
    # The mask takes a path to be whole nodes; what calls leave out of it, or see besides, would differ from them.
    edges = {*begin.tolist(), num_tokens}
    if any(s.k_begin not in edges or s.k_end not in edges for s in replayed if s.num_queries and s.num_keys):
        return "its calls are not those of whole paths"
    if sum(s.num_queries * s.num_keys for s in replayed) != _pairs_of_paths(begin, replayed, num_tokens):
        return "its calls are not those of whole paths"
    return None


@lru_cache(maxsize=16)
def tree_blocks(segments: bytes, num_tokens: int, device: torch.device) -> TreeBlocks:
    """Blocks of a tree; cached, since every layer of a model and both directions ask for the same.

    Args:
        segments: the calls as `augtree_fx.tables.Calls.key`.
        num_tokens: packed tokens.
        device: where the lists go.
    """
    table = np.frombuffer(segments, dtype=np.int64).reshape(-1, 6)[:, 1:]
    row, column, pairs = _visible_pairs(table)
    num_blocks = -(-num_tokens // BLOCK)
    size = np.minimum((np.arange(num_blocks) + 1) * BLOCK, num_tokens) - np.arange(num_blocks) * BLOCK
    full = pairs == size[row] * size[column]
    first, last = _walk(table, num_tokens)
    return TreeBlocks(
        by_query=_lists(row, column, full, num_blocks, device),
        by_key=_lists(column, row, full, num_blocks, device),
        first=torch.from_numpy(first).to(device),
        last=torch.from_numpy(last).to(device),
        num_blocks=len(row),
    )


def _visible_pairs(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Query block, key block and number of visible pairs of every block that has any, in ascending order."""
    keys, counts = [], []
    num_blocks = -(-int(table[:, [2, 4]].max(initial=0)) // BLOCK)
    for causal, *bounds in table.tolist():
        segment = Segment(*bounds)
        rows = np.arange(segment.q_begin // BLOCK, -(-segment.q_end // BLOCK))
        columns = np.arange(segment.k_begin // BLOCK, -(-segment.k_end // BLOCK))
        # Local query and key numbers at the edges of the blocks.
        q_edge = np.clip(np.append(rows, rows[-1:] + 1) * BLOCK - segment.q_begin, 0, segment.num_queries)
        k_edge = np.clip(np.append(columns, columns[-1:] + 1) * BLOCK - segment.k_begin, 0, segment.num_keys)
        below = _pairs_before(q_edge[:, None], k_edge[None, :], bool(causal))
        count = np.diff(np.diff(below, axis=0), axis=1)
        row, column = np.nonzero(count)
        keys.append((row + rows[:1]) * num_blocks + column + columns[:1] if len(rows) else row)
        counts.append(count[row, column])
    key, inverse = np.unique(np.concatenate(keys), return_inverse=True)
    total = np.bincount(inverse, weights=np.concatenate(counts), minlength=len(key)).astype(np.int64)
    return key // num_blocks, key % num_blocks, total


def _pairs_before(q: np.ndarray, k: np.ndarray, causal: bool) -> np.ndarray:
    """Visible pairs among the first ``q`` queries and ``k`` keys of a segment, a causal one being square."""
    if not causal:
        return q * k
    rising = np.clip(np.minimum(k, q), 0, None)  # query i sees i + 1 keys until those are k
    return rising * (rising + 1) // 2 + (q - rising) * k


def _lists(row: np.ndarray, column: np.ndarray, full: np.ndarray, num_blocks: int, device: torch.device) -> BlockLists:
    counts, entries = [], []
    for chosen in (~full, full):
        order = np.lexsort((column[chosen], row[chosen]))
        rows, columns = row[chosen][order], column[chosen][order]
        count = np.bincount(rows, minlength=num_blocks)
        table = np.zeros((num_blocks, max(int(count.max(initial=0)), 1)), dtype=np.int32)
        table[rows, np.arange(len(rows)) - (np.cumsum(count) - count)[rows]] = columns
        counts.append(torch.from_numpy(count.astype(np.int32)).to(device))
        entries.append(torch.from_numpy(table).to(device))
    return BlockLists(counts[0], entries[0], counts[1], entries[1])


def _parents(begin: np.ndarray, replayed: Sequence[Segment]) -> np.ndarray:
    """Number of each node's parent, -1 for a root; nodes are those that have tokens, in packed order."""
    parent = np.full(len(begin), -1)
    for segment in replayed:
        if segment.num_queries and segment.num_keys:
            below = slice(*np.searchsorted(begin, [segment.q_begin, segment.q_end]))
            # Levels follow one another, so of two ancestors the nearer one has the larger number: a segment's last.
            parent[below] = np.maximum(parent[below], np.searchsorted(begin, segment.k_end) - 1)
    return parent


def _pairs_of_paths(begin: np.ndarray, replayed: Sequence[Segment], num_tokens: int) -> int:
    """Pairs of a query and a key in another node of its path, whatever the calls say."""
    length = np.diff(np.append(begin, num_tokens))
    before = np.zeros(len(begin), dtype=np.int64)
    for node, parent in enumerate(_parents(begin, replayed).tolist()):
        if parent >= 0:
            before[node] = before[parent] + length[parent]
    return int(before @ length)


def _walk(table: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Place of each token's node in a depth-first walk of the tree, and the end of its subtree there."""
    own = table[table[:, 0] == 1]
    begin = np.sort(own[own[:, 2] > own[:, 1], 1])
    num_nodes = len(begin)
    parent = _parents(begin, [Segment(*bounds) for _, *bounds in table[table[:, 0] == 0].tolist()])
    size = np.ones(num_nodes, dtype=np.int64)
    for node in range(num_nodes - 1, -1, -1):
        if parent[node] >= 0:
            size[parent[node]] += size[node]
    place = np.zeros(num_nodes, dtype=np.int64)
    free = np.zeros(num_nodes + 1, dtype=np.int64)  # the next place below each node; the last entry is for roots
    for node in range(num_nodes):
        place[node] = free[parent[node]]
        free[parent[node]] += size[node]
        free[node] = place[node] + 1
    length = np.diff(np.append(begin, num_tokens))
    return (np.repeat(x, length).astype(np.int32) for x in (place, place + size))  # type: ignore[return-value]
