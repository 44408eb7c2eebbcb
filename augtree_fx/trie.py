"""The prefix tree of a batch of rows, on the host.

Rows are sorted as byte strings, so that rows with a common start are neighbours; the lengths shared by
neighbours are then all that a compact prefix tree needs. Exact: tokens are compared, nothing is hashed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from augtree_fx.costs import CostModel

IntArray = npt.NDArray[np.int64]


@dataclass(eq=False)
class TrieNode:
    """A run of tokens with one parent: tokens ``[start, end)`` of every row that passes through it."""

    start: int
    end: int
    row: int
    parent: TrieNode | None = None
    children: list[TrieNode] = field(default_factory=list)
    descendant_tokens: int = 0
    merged_into: TrieNode | None = None

    @property
    def length(self) -> int:
        return self.end - self.start

    def resolve(self) -> TrieNode:
        """The node that holds this node's tokens now (itself, unless it was dissolved)."""
        node = self
        while node.merged_into is not None:
            node = node.merged_into
        return node


def shared_prefix_length(first: IntArray, second: IntArray) -> int:
    """Number of leading tokens two rows have in common."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    where = int(differs.argmax()) if length else 0
    return where if length and differs[where] else length


def build_trie(rows: Sequence[IntArray]) -> tuple[TrieNode, list[TrieNode]]:
    """Compact prefix tree of all rows.

    Args:
        rows: one int64 array a row; tokens are equal when their numbers are.

    Returns:
        The root (which holds no token) and, per row, the node in which the row ends.
    """
    order = sorted(range(len(rows)), key=lambda index: rows[index].tobytes())
    root = TrieNode(0, 0, row=-1)
    stack = [root]
    ends: list[TrieNode] = [root] * len(rows)
    previous: IntArray | None = None
    for index in order:
        row = rows[index]
        shared = 0 if previous is None else shared_prefix_length(previous, row)
        last: TrieNode | None = None
        while stack[-1].end > shared:
            last = stack.pop()
        if stack[-1].end < shared:
            assert last is not None
            middle = TrieNode(stack[-1].end, shared, last.row, parent=stack[-1])
            last.start, last.parent = shared, middle
            stack.append(middle)
        if len(row) > shared:
            stack.append(TrieNode(shared, len(row), index, parent=stack[-1]))
        ends[index] = stack[-1]
        previous = row
    _link_children(ends)
    return root, ends


def _link_children(ends: Sequence[TrieNode]) -> None:
    seen: set[int] = set()
    for node in ends:
        while node.parent is not None and id(node) not in seen:
            seen.add(id(node))
            node.parent.children.append(node)
            node = node.parent


def keep_what_pays(root: TrieNode, costs: CostModel) -> None:
    """Dissolve, deepest first, every inner node whose sharing saves less than its attention piece costs.

    A dissolved node's tokens are prepended to each of its children: they are computed once per child
    instead of once. An only child swallows its parent for free (rows that are prefixes of other rows).
    """
    for node in _deepest_first(root):
        node.descendant_tokens = sum(child.length + child.descendant_tokens for child in node.children)
        saved_tokens = (len(node.children) - 1) * node.length
        if not node.children or (saved_tokens and saved_tokens >= costs.piece_tokens(node.descendant_tokens)):
            continue
        assert node.parent is not None
        for child in node.children:
            child.start, child.parent = node.start, node.parent
        position = node.parent.children.index(node)
        node.parent.children[position : position + 1] = node.children
        node.merged_into = node.children[0]


def _deepest_first(root: TrieNode) -> list[TrieNode]:
    nodes, frontier = [], list(root.children)
    while frontier:
        nodes.extend(frontier)
        frontier = [child for node in frontier for child in node.children]
    return sorted(nodes, key=lambda node: -node.end)


def levels_of(root: TrieNode) -> list[list[TrieNode]]:
    """Nodes by depth; within a level ordered by parent, so that the descendants of a node are neighbours.

    Siblings that have children come first: fewer gaps between ancestors, hence fewer kernel calls.
    """
    levels, frontier = [], _parents_first(root)
    while frontier:
        levels.append(frontier)
        frontier = [child for node in frontier for child in _parents_first(node)]
    return levels


def _parents_first(node: TrieNode) -> list[TrieNode]:
    return sorted(node.children, key=lambda child: not child.children)
