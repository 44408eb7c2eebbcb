"""The lengths of a batch's prefix trees: all that a planner sees of a batch.

Nodes are level-major, as `TreeLayout` packs them: all prompts, then their children ordered by parent, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from augtree_fx.layout import TreeLayout

IntArray = npt.NDArray[np.int64]
EDGES_PER_OCTAVE = 8  # bucket edges are 9% apart: a plan is at most that much too long, and on average half of it
_MAX_OCTAVES = 40
MAX_TOKENS = 1 << _MAX_OCTAVES


def bucket_edges(per_octave: int) -> IntArray:
    """Ascending edges, geometric and whole; every power of two is one of them."""
    powers = np.arange(_MAX_OCTAVES * per_octave + 1) / per_octave
    return np.unique(np.concatenate([[0], np.ceil(np.exp2(powers) - 1e-6)]).astype(np.int64))


_EDGES = bucket_edges(EDGES_PER_OCTAVE)
_EDGE_OF_LENGTH = np.searchsorted(_EDGES, np.arange(1 << 17)).astype(np.int16)  # a look-up is 5 times faster


def edge_index(lengths: IntArray) -> npt.NDArray[np.int16]:
    """Index of the first edge that is not below each length."""
    try:
        return _EDGE_OF_LENGTH[lengths]
    except IndexError:  # asking for the largest one first takes as long as the look-up
        return np.searchsorted(_EDGES, lengths).astype(np.int16)


class Key(tuple[bytes, ...]):
    """Arrays of a shape. Equality compares all of them, the hash is of the first one: hashing takes far longer."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(self[0])


@dataclass(frozen=True, eq=False)
class ReplayShape:
    """Lengths of the nodes of a forest of prefix trees. Two shapes are equal if all their arrays are.

    Attributes:
        parent: ``[nodes]`` index of each node's parent, -1 for a root (a prompt, or what several prompts share).
        length: ``[nodes]`` tokens of each node.
        num_rows: ``[nodes]`` rows of the batch that end in each node.
        scored_tokens: ``[nodes]`` tokens of each node whose logits the loss needs.
    """

    parent: IntArray
    length: IntArray
    num_rows: IntArray
    scored_tokens: IntArray

    def __post_init__(self) -> None:
        for array in (self.parent, self.length, self.num_rows, self.scored_tokens):
            array.setflags(write=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReplayShape) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return (
            f"ReplayShape({self.num_trees} trees, {self.num_nodes} nodes in {self.num_levels} levels, "
            f"{int(self.num_rows.sum())} rows: {self.num_row_tokens} tokens, {self.num_tokens} distinct)"
        )

    @staticmethod
    def from_groups(prompt_tokens: Sequence[int], response_tokens: Sequence[Sequence[int]]) -> ReplayShape:
        """Groups of one prompt and its responses.

        Args:
            prompt_tokens: tokens of each group's prompt, at least 1.
            response_tokens: tokens of each group's responses; a response may be empty, a group may have none.

        Raises:
            ValueError: the two differ in length, there is no group, or a length is out of range.
        """
        if len(prompt_tokens) != len(response_tokens):
            raise ValueError(
                "every prompt must have its list of responses, got "
                f"{len(prompt_tokens)} prompts and {len(response_tokens)} lists; pass [] for a prompt without any"
            )
        counts = [len(group) for group in response_tokens]
        parent = np.concatenate([np.full(len(counts), -1), np.repeat(np.arange(len(counts)), counts)])
        length = [*prompt_tokens, *(tokens for group in response_tokens for tokens in group)]
        return ReplayShape.from_nodes(parent, length)

    @staticmethod
    def from_nodes(
        parent: Sequence[int] | IntArray,
        length: Sequence[int] | IntArray,
        *,
        num_rows: Sequence[int] | IntArray | None = None,
        scored_tokens: Sequence[int] | IntArray | None = None,
    ) -> ReplayShape:
        """Any forest, of any depth.

        Args:
            parent: index of each node's parent, -1 for roots; level by level, inside a level ordered by parent.
            length: tokens of each node; roots have at least 1.
            num_rows: rows that end in each node, at least one in all; by default one in each node without children.
            scored_tokens: tokens whose logits the loss needs, at most the node's; by default all of nodes that have a
                parent and no children.

        Raises:
            ValueError: arrays of unequal length, no node or row, an order that is not level-major, or a number out of
                range: a tree has at most 2**40 tokens.
        """
        try:
            parents, lengths = np.array(parent, dtype=np.int64), np.array(length, dtype=np.int64)
        except OverflowError as error:
            raise ValueError(f"a node must have at most {MAX_TOKENS} tokens, got more than 64 bits hold") from error
        _check(parents, lengths)
        leaf = np.bincount(parents[parents >= 0], minlength=len(parents)) == 0
        rows = leaf if num_rows is None else num_rows
        scored = np.where(leaf & (parents >= 0), lengths, 0) if scored_tokens is None else scored_tokens
        rows, scored = np.array(rows, dtype=np.int64), np.array(scored, dtype=np.int64)
        _check_counts(lengths, rows, scored)
        return ReplayShape(parents, lengths, rows, scored)

    @staticmethod
    def from_layout(layout: TreeLayout) -> ReplayShape:
        """The trees of a batch's layout."""
        ends = layout.row_node[layout.row_node >= 0]
        num_rows = np.bincount(ends, minlength=layout.num_nodes)
        if not len(ends) or layout.length.min() < 1 or layout.length.max() > MAX_TOKENS:
            return ReplayShape.from_nodes(layout.parent, layout.length, num_rows=num_rows)
        # The rest of what is checked there holds for every layout.
        roots = int(np.searchsorted(layout.parent, 0))
        scored = layout.length.copy()
        scored[:roots] = scored[layout.parent[roots:]] = 0
        return ReplayShape(layout.parent.copy(), layout.length.copy(), num_rows, scored)

    @cached_property
    def key(self) -> Key:
        """What makes two shapes the same."""
        arrays = (self.length, self.parent, self.num_rows, self.scored_tokens)
        return Key(array.tobytes() for array in arrays)

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    @cached_property
    def num_trees(self) -> int:
        return int(np.searchsorted(self.parent, 0))

    @cached_property
    def level_begin(self) -> IntArray:
        """``[levels + 1]`` first node of each level."""
        begins = [0, self.num_trees]
        while begins[-1] < self.num_nodes:
            begins.append(int(np.searchsorted(self.parent, begins[-1])))
        return np.array(begins)

    @property
    def num_levels(self) -> int:
        return len(self.level_begin) - 1

    @cached_property
    def has_children(self) -> npt.NDArray[np.bool_]:
        """``[nodes]`` whether others continue a node."""
        return np.bincount(self.parent[self.num_trees :], minlength=self.num_nodes) > 0

    @cached_property
    def is_leaf(self) -> npt.NDArray[np.bool_]:
        """``[nodes]`` whether a node is replayed: it has a parent and no children. All others are prefilled."""
        return ~self.has_children & (self.parent >= 0)

    @cached_property
    def tree(self) -> IntArray:
        """``[nodes]`` index of each node's root."""
        tree = np.arange(self.num_nodes)
        for first, last in zip(self.level_begin[1:-1], self.level_begin[2:], strict=True):
            tree[first:last] = tree[self.parent[first:last]]
        return tree

    @cached_property
    def path_start(self) -> IntArray:
        """``[nodes]`` tokens before each node on its path from the root."""
        start = np.zeros(self.num_nodes, dtype=np.int64)
        for first, last in zip(self.level_begin[1:-1], self.level_begin[2:], strict=True):
            above = self.parent[first:last]
            start[first:last] = start[above] + self.length[above]
        return start

    @cached_property
    def num_tokens(self) -> int:
        """Distinct tokens."""
        return int(self.length.sum())

    @cached_property
    def num_row_tokens(self) -> int:
        """Tokens of all rows: what is computed without reuse."""
        return int((self.num_rows * (self.path_start + self.length)).sum())

    @cached_property
    def bucket_key(self) -> Key:
        """Equal for the shapes of one bucket: same trees, and lengths between the same edges."""
        length, scored = edge_index(self.length), edge_index(self.scored_tokens)
        return Key((length.tobytes(), self.parent.tobytes(), self.num_rows.tobytes(), scored.tobytes()))

    def bucketed(self) -> ReplayShape:
        """The shape that stands for all shapes of one bucket: every length rounded up to the next edge."""
        length, scored = _EDGES[edge_index(self.length)], _EDGES[edge_index(self.scored_tokens)]
        return ReplayShape(self.parent, length, self.num_rows, scored)

    def flat(self) -> ReplayShape:
        """The batch without reuse: every row is a tree of one node."""
        rows = np.repeat(np.arange(self.num_nodes), self.num_rows)
        length = (self.path_start + self.length)[rows]
        ones = np.ones(len(rows), dtype=np.int64)
        return ReplayShape(-ones, length, ones.copy(), np.minimum(self.scored_tokens[rows], length))


def _check(parent: IntArray, length: IntArray) -> None:
    if parent.ndim != 1 or parent.shape != length.shape or not len(parent):
        raise ValueError(
            f"a shape needs one parent and one length a node and at least one node, got {parent.shape} parents and "
            f"{length.shape} lengths"
        )
    if parent[0] != -1 or (np.diff(parent) < 0).any() or (parent >= np.arange(len(parent))).any() or parent.min() < -1:
        raise ValueError(
            f"nodes must be level-major, each level ordered by parent, roots first with parent -1, got parents "
            f"{parent[:16].tolist()}{' ...' if len(parent) > 16 else ''}; TreeLayout orders them that way"
        )
    if length.min() < 0 or length[parent < 0].min() < 1:
        where = int(np.flatnonzero((length < 0) | ((parent < 0) & (length < 1)))[0])
        raise ValueError(
            f"a root must have at least 1 token and other nodes at least 0, got {int(length[where])} at node {where}; "
            "leave groups without a prompt out"
        )
    if length.max() > MAX_TOKENS:
        where = int(length.argmax())
        raise ValueError(f"a node must have at most {MAX_TOKENS} tokens, got {int(length[where])} at node {where}")


def _check_counts(length: IntArray, num_rows: IntArray, scored_tokens: IntArray) -> None:
    if num_rows.shape != length.shape or num_rows.min() < 0 or not num_rows.any():
        raise ValueError(
            "num_rows must be one number a node, none below 0 and at least one above, got "
            f"{num_rows[:16].tolist()} for {len(length)} nodes"
        )
    if scored_tokens.shape != length.shape or (scored_tokens < 0).any() or (scored_tokens > length).any():
        raise ValueError(
            f"scored_tokens must be one number a node, from 0 to its length, got {scored_tokens[:16].tolist()} for "
            f"lengths {length[:16].tolist()}"
        )
