"""Long prompts as chains of nodes, so that they are computed a chunk at a time.

prompt of 10, chunks of 4      P  ->  P1 (4) - P2 (4) - P3 (2), the branches below P3
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from augtree_fx.layout import TreeLayout
from augtree_fx.trie import IntArray, TrieNode, levels_of
from augtree_fx.waves import check_max_tokens


def split_prompts(layout: TreeLayout, longest: int) -> tuple[TreeLayout, IntArray]:
    """Cut prompts (nodes at level 0 that have branches) into chunks of at most ``longest`` tokens.

    Returns:
        The same tree with more nodes, and those of its nodes that continue a prompt.

    Raises:
        ValueError: ``longest`` is below 1.
    """
    check_max_tokens("max_prompt_tokens", longest)
    has_branches = np.isin(np.arange(layout.num_nodes), layout.parent)
    long = (layout.level == 0) & has_branches & (layout.length > longest)
    if not long.any():
        return layout, np.empty(0, dtype=np.int64)
    pieces = np.where(long, -(-layout.length // longest), 1)
    old = np.repeat(np.arange(layout.num_nodes), pieces)  # old node of each new one, which are in no final order yet
    last = np.cumsum(pieces) - 1
    place = np.arange(len(old)) - np.repeat(last - pieces + 1, pieces)  # of a chunk in its node
    begin = place * longest
    length = np.where(long[old], np.minimum(longest, layout.length[old] - begin), layout.length[old])
    above = layout.parent[old]
    parent = np.where(place > 0, np.arange(len(old)) - 1, np.where(above >= 0, last[above], -1))
    order = _level_major(parent)
    number = np.empty(len(order) + 1, dtype=np.int64)
    number[order], number[-1] = np.arange(len(order)), -1
    level = np.zeros(len(order), dtype=np.int64)
    new_parent = number[parent[order]]
    for node in range(len(order)):
        level[node] = level[new_parent[node]] + 1 if new_parent[node] >= 0 else 0
    first = layout.offset[old] + begin
    tokens = np.concatenate([np.arange(first[node], first[node] + length[node]) for node in order])
    ends = layout.row_node
    split = replace(
        layout,
        parent=new_parent,
        level=level,
        path_start=(layout.path_start[old] + begin)[order],
        length=length[order],
        row_node=np.where(ends >= 0, number[last[ends]], -1),
        source=layout.source[tokens],
        position_ids=layout.position_ids[tokens],
        input_ids=layout.input_ids[tokens],
    )
    return split, np.flatnonzero(place[order] > 0)


def _level_major(parent: IntArray) -> list[int]:
    """Nodes in the order of a layout, by their parents."""
    root = TrieNode(0, 0, row=-1)
    nodes = [TrieNode(0, 0, row=number) for number in range(len(parent))]
    for node, above in zip(nodes, parent.tolist(), strict=True):
        (nodes[above] if above >= 0 else root).children.append(node)
    return [node.row for level in levels_of(root) for node in level]
