"""The tree layout: which tokens of a batch are one and the same, and how the distinct ones are packed.

rows      P1 a   P1 b   P1 c   P2 d   P2 e          (padded or packed, as the trainer made them)
packed    P1 P2 | a b c d e                          level 0 first, then level 1 ordered by parent, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from augtree_fx import rows as batch_rows
from augtree_fx.costs import CostModel
from augtree_fx.groups import prompt_nodes
from augtree_fx.rows import HostRows
from augtree_fx.tables import AttentionTables, Span, build_tables
from augtree_fx.trie import IntArray, TrieNode, build_trie, keep_what_pays, levels_of


@dataclass(frozen=True, eq=False)
class TreeLayout:
    """Packing of a batch into the level-major nodes of its prefix tree.

    All per-node arrays are in packed order: level by level, inside a level ordered by parent.

    Attributes:
        parent: ``[nodes]`` index of the parent node, -1 at level 0.
        level: ``[nodes]`` depth of the node.
        path_start: ``[nodes]`` number of tokens before the node on its path from the root.
        length: ``[nodes]`` tokens of the node, at least 1.
        row_node: ``[rows]`` node in which each row ends, -1 for an empty row.
        row_length: ``[rows]`` tokens of each row, padding excluded.
        row_begin: ``[rows]`` flat slot of each row's first token in the caller's tensor.
        shape: the caller's shape, ``(batch, sequence)``; slots count over it, row-major.
        source: ``[packed tokens]`` int64, slot from which each packed token is read.
        position_ids: ``[packed tokens]`` int64, position of each packed token.
        input_ids: ``[packed tokens]`` int64.
        device: where tensors made from the layout go.
        declared: whether level 0 are prompts that the caller declared, also those without branches.
    """

    parent: IntArray
    level: IntArray
    path_start: IntArray
    length: IntArray
    row_node: IntArray
    row_length: IntArray
    row_begin: IntArray
    shape: tuple[int, int]
    source: IntArray
    position_ids: IntArray
    input_ids: IntArray
    device: torch.device
    declared: bool = False

    @staticmethod
    def from_padded(
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        costs: CostModel | None = None,
    ) -> TreeLayout:
        """Layout of padded rows.

        Args:
            input_ids: ``[batch, sequence]`` integer token ids.
            attention_mask: ``[batch, sequence]``, non-zero where there is a token; ``None`` means everywhere.
                Padding may be left, right or both; holes are an error.
            position_ids: ``[batch, sequence]`` or ``[1, sequence]``; ``None`` means the column, as in transformers.
            costs: what a node must save to be worth its attention piece.

        Raises:
            ValueError: empty batch, shapes or devices that disagree, masks with holes, decreasing positions.
        """
        host = batch_rows.padded_rows(input_ids, attention_mask, position_ids)
        return TreeLayout.from_rows(host, costs=costs)

    @staticmethod
    def from_packed(
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        cu_seq_lens: Tensor | None = None,
        *,
        costs: CostModel | None = None,
    ) -> TreeLayout:
        """Layout of padding-free rows, one after another in one (or several) long rows.

        Args:
            input_ids: ``[batch, total]`` or ``[total]`` integer token ids.
            position_ids: same shape; a sequence starts wherever the position does not grow by one.
            cu_seq_lens: ``[sequences + 1]`` cumulative lengths over the flattened tokens. One of the two is needed;
                with both, ``cu_seq_lens`` says where sequences start.
            costs: what a node must save to be worth its attention piece.

        Raises:
            ValueError: neither is given, an empty batch, or ``cu_seq_lens`` that do not cover the tokens.
        """
        host = batch_rows.packed_rows(input_ids, position_ids, cu_seq_lens)
        return TreeLayout.from_rows(host, costs=costs)

    @staticmethod
    def from_groups(
        prompts: Sequence[Sequence[int] | Tensor],
        responses: Sequence[Sequence[Sequence[int] | Tensor]],
        *,
        device: torch.device | str = "cpu",
    ) -> TreeLayout:
        """Layout of declared groups: prompt ``i`` is a node, ``responses[i]`` are its branches; nothing is detected.

        The caller's rows are prompt + response, in the order given, packed without padding: ``shape`` is
        ``(1, total)``. A response may be empty; a prompt may not.

        Args:
            prompts: token ids of each prompt.
            responses: token ids of each prompt's responses.
            device: the model's; ``"cuda"`` is the current one.

        Raises:
            ValueError: the two lists differ in length, there is no group, or a prompt is empty.
        """
        where = torch.empty(0, device=device).device  # with its index, as tensors and parameters have it
        host, root, ends = batch_rows.group_rows(prompts, responses, where)
        return replace(_assemble(host, root, ends), declared=True)

    @staticmethod
    def from_rows(host: HostRows, *, costs: CostModel | None = None, apart: IntArray | None = None) -> TreeLayout:
        """Layout of rows that are on the host already (see `augtree_fx.rows`).

        Args:
            host: the rows.
            costs: what a node must save to be worth its attention piece.
            apart: ``[rows]``; rows with different numbers share nothing.
        """
        keys = host.row_keys()
        root, ends = build_trie(keys if apart is None or not apart.any() else batch_rows.set_apart(keys, apart))
        keep_what_pays(root, costs or CostModel())
        return _assemble(host, root, ends)

    @property
    def num_rows(self) -> int:
        return len(self.row_length)

    @property
    def num_nodes(self) -> int:
        return len(self.length)

    @cached_property
    def num_levels(self) -> int:
        return int(self.level.max()) + 1 if self.num_nodes else 0

    @cached_property
    def num_tokens(self) -> int:
        """Tokens that are computed: distinct ones, as far as sharing them pays."""
        return int(self.length.sum())

    @cached_property
    def num_row_tokens(self) -> int:
        """Tokens of all rows, padding excluded: what a forward without reuse computes."""
        return int(self.row_length.sum())

    @property
    def shares(self) -> bool:
        """Whether any token is computed once for several rows."""
        return self.num_tokens < self.num_row_tokens

    @property
    def token_ratio(self) -> float:
        """Tokens of all rows over tokens computed, at least 1."""
        return self.num_row_tokens / max(self.num_tokens, 1)

    @cached_property
    def num_attention_pairs(self) -> int:
        """(query, key) pairs that the packed row computes."""
        return int((self.length * self.path_start + self.length * (self.length + 1) // 2).sum())

    @property
    def attention_ratio(self) -> float:
        """Causal (query, key) pairs of all rows over those of the packed row, at least 1."""
        lengths = self.row_length
        return int((lengths * (lengths + 1) // 2).sum()) / max(self.num_attention_pairs, 1)

    @cached_property
    def offset(self) -> IntArray:
        """``[nodes + 1]`` first packed token of each node."""
        return np.concatenate([[0], np.cumsum(self.length)]).astype(np.int64)

    @cached_property
    def level_begin(self) -> IntArray:
        """``[levels + 1]`` first node of each level."""
        return np.searchsorted(self.level, np.arange(self.num_levels + 1)).astype(np.int64)

    def path(self, node: int) -> list[int]:
        """Nodes from level 0 down to ``node``."""
        path = []
        while node >= 0:
            path.append(node)
            node = int(self.parent[node])
        return path[::-1]

    @cached_property
    def packed_index(self) -> IntArray:
        """``[batch * sequence]`` packed token that each slot shows, -1 where the slot is padding."""
        index = np.full(self.shape[0] * self.shape[1], -1, dtype=np.int64)
        for row in range(self.num_rows):
            begin, remaining = int(self.row_begin[row]), int(self.row_length[row])
            for node in self.path(int(self.row_node[row])) if remaining else ():
                length = min(int(self.length[node]), remaining)
                first = int(self.offset[node])
                index[begin : begin + length] = np.arange(first, first + length)
                begin, remaining = begin + length, remaining - length
            assert remaining == 0, "a row must end inside its last node"
        return index

    @cached_property
    def row_group(self) -> IntArray:
        """``[rows]`` node that makes rows a group: their prompt, declared or as far as the tree shows it.

        The row's own node where it is alone, -1 for an empty row. See `augtree_fx.groups` for what decides.
        """
        if self.declared:
            return np.array([self.path(int(node))[0] for node in self.row_node], dtype=np.int64)
        return prompt_nodes(self.parent, self.length, self.row_node)

    def padded_to_multiple_of(self, multiple: int) -> TreeLayout:
        """The layout with packed tokens that no row shows, up to the next multiple: few sizes for CUDA graphs to know.

        They are copies of the first token, a node of level 0 without branches: nothing else sees them, and no
        gradient reaches them.

        Raises:
            ValueError: ``multiple`` is below 1.
        """
        if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
            raise ValueError(f"packed tokens must be padded to a multiple of at least 1, got {multiple!r}")
        missing = -self.num_tokens % multiple
        if not missing:
            return self
        node = int(self.level_begin[1])  # the last of level 0, whose other nodes with branches stay neighbours
        token = int(self.offset[node])

        def renumbered(nodes: IntArray) -> IntArray:
            return np.where(nodes >= node, nodes + 1, nodes)

        def extended(tokens: IntArray) -> IntArray:
            return np.insert(tokens, token, np.repeat(tokens[:1], missing))

        return replace(
            self,
            parent=np.insert(renumbered(self.parent), node, -1),
            level=np.insert(self.level, node, 0),
            path_start=np.insert(self.path_start, node, 0),
            length=np.insert(self.length, node, missing),
            row_node=renumbered(self.row_node),
            source=extended(self.source),
            position_ids=extended(self.position_ids),
            input_ids=extended(self.input_ids),
        )

    def tables(self, window: Span = None, first_node: int = 0) -> AttentionTables:
        """Attention calls that make up this tree, see `build_tables`."""
        return build_tables(self, window, first_node)

    def __repr__(self) -> str:
        return (
            f"TreeLayout(rows={self.num_rows}, nodes={self.num_nodes}, levels={self.num_levels}, "
            f"tokens={self.num_row_tokens} -> {self.num_tokens}, token_ratio={self.token_ratio:.2f}, "
            f"attention_ratio={self.attention_ratio:.2f})"
        )


def _assemble(host: HostRows, root: TrieNode, ends: Sequence[TrieNode]) -> TreeLayout:
    levels = levels_of(root)
    nodes = [node for level in levels for node in level]
    number = {id(node): index for index, node in enumerate(nodes)}
    length = np.array([node.length for node in nodes], dtype=np.int64)
    first_slot = np.array([host.begin[node.row] + node.start for node in nodes], dtype=np.int64)
    offset = np.cumsum(length) - length
    source = np.arange(int(length.sum()), dtype=np.int64) + np.repeat(first_slot - offset, length)
    return TreeLayout(
        parent=np.array([number.get(id(node.parent), -1) for node in nodes], dtype=np.int64),
        level=np.repeat(np.arange(len(levels), dtype=np.int64), [len(level) for level in levels]),
        path_start=np.array([node.start for node in nodes], dtype=np.int64),
        length=length,
        row_node=np.array([number.get(id(end.resolve()), -1) for end in ends], dtype=np.int64),
        row_length=host.length,
        row_begin=host.begin,
        shape=host.shape,
        source=source,
        position_ids=host.positions_of(source),
        input_ids=host.ids_of(source),
        device=host.device,
    )
