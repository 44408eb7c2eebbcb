"""Which nodes of a tree are computed together when it does not fit: prompts first, then their branches wave by wave.

    prompts   P1 P2                 one forward; K and V of every layer stay
    wave 1    a d                   branches, longest first, as many tokens as fit
    wave 2    b c e

A branch that has branches of its own and does not fit with all of them is a prompt again, for those: its K and V stay
until the last of them is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from augtree_fx.layout import TreeLayout
from augtree_fx.trie import IntArray


@dataclass
class Stage:
    """Nodes that are computed together and kept, and what is computed after them.

    Attributes:
        nodes: ``[n]`` node numbers in ascending order; empty where nothing is shared.
        waves: node numbers of each wave, ascending; whole subtrees below ``nodes``.
        inner: stages below this one, each a branch that is too large to go through a wave with all of its own.
        scored: whether tokens of its own nodes are a wave before the others.
        idle: whether other ranks compute something where this one has no nodes, see `lockstep`.
    """

    nodes: IntArray
    waves: list[IntArray] = field(default_factory=list)
    inner: list[Stage] = field(default_factory=list)
    scored: bool = False
    idle: bool = False

    @property
    def computes(self) -> bool:
        """Whether it is a forward."""
        return self.idle or len(self.nodes) > 0

    def stages(self) -> Iterator[Stage]:
        """This stage and all below it, in the order in which they run. Chains of chunks are deep: no recursion."""
        frontier = [self]
        while frontier:
            stage = frontier.pop()
            yield stage
            frontier += reversed(stage.inner)

    def passes(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Nodes above each forward, and its own, in the order in which they run; idle ones left out."""
        frontier = [(self, self.nodes[:0])]
        while frontier:
            stage, above = frontier.pop()
            if len(stage.nodes):
                yield above, stage.nodes
                above = np.concatenate([above, stage.nodes])
            yield from ((above, nodes) for nodes in stage.waves if len(nodes))
            frontier += [(inner, above) for inner in reversed(stage.inner)]

    def walk(self) -> Iterator[IntArray]:
        """All waves, in the order in which they run."""
        return (wave for stage in self.stages() for wave in stage.waves)


def check_max_tokens(name: str, value: int | None) -> None:
    """Raise ValueError if a number of tokens is not a whole number of at least 1, or ``None``."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1):
        raise ValueError(f"{name} must be at least 1, a whole number, got {value!r}")


def plan_waves(layout: TreeLayout, max_tokens: int | None, kept: IntArray | None = None) -> Stage:
    """Cut a tree into stages and waves.

    Args:
        layout: the tree.
        kept: nodes with branches that are stages of their own, however small.
        max_tokens: packed tokens of a wave; ``None`` for one wave. A response that is longer is a wave of its own.

    Raises:
        ValueError: ``max_tokens`` is below 1.
    """
    check_max_tokens("max_wave_tokens", max_tokens)
    children: list[list[int]] = [[] for _ in range(layout.num_nodes)]
    subtree = layout.length.copy()
    for node in range(layout.num_nodes - 1, -1, -1):  # children have larger numbers than their parent
        parent = int(layout.parent[node])
        if parent >= 0:
            children[parent].insert(0, node)
            subtree[parent] += subtree[node]
    roots = [node for node in range(layout.num_nodes) if layout.level[node] == 0]
    prompts = [node for node in roots if children[node]]
    units = [child for node in prompts for child in children[node]] + [node for node in roots if not children[node]]
    if max_tokens is None:
        max_tokens = max(layout.num_tokens, 1)
    for node in () if kept is None else kept.tolist():
        subtree[node] = max(subtree[node], max_tokens + 1)
    root = Stage(np.array(prompts, dtype=np.int64))
    frontier = [(root, units)]
    while frontier:
        stage, units = frontier.pop()
        large = [unit for unit in units if children[unit] and subtree[unit] > max_tokens]
        apart = set(large)
        for members in _fill([unit for unit in units if unit not in apart], subtree, max_tokens):
            stage.waves.append(np.array(sorted(_with_descendants(members, children)), dtype=np.int64))
        stage.inner = [Stage(np.array([unit], dtype=np.int64)) for unit in large]
        frontier += zip(stage.inner, (children[unit] for unit in large), strict=True)
    return root


def _fill(units: list[int], tokens: IntArray, limit: int) -> list[list[int]]:
    """Longest first into the emptiest of as few waves as could hold all, one more where none has room."""
    total = int(tokens[units].sum()) if units else 0
    waves: list[list[int]] = [[] for _ in range(-(-total // limit))]
    filled = [0] * len(waves)
    for unit in sorted(units, key=lambda unit: (-int(tokens[unit]), unit)):
        emptiest = min(range(len(waves)), key=lambda wave: filled[wave])
        if filled[emptiest] and filled[emptiest] + tokens[unit] > limit:
            emptiest = len(waves)
            waves.append([])
            filled.append(0)
        waves[emptiest].append(unit)
        filled[emptiest] += int(tokens[unit])
    return [wave for wave in waves if wave]


def _with_descendants(units: list[int], children: list[list[int]]) -> Iterator[int]:
    frontier = list(units)
    while frontier:
        node = frontier.pop()
        yield node
        frontier += children[node]


def token_index(layout: TreeLayout, nodes: IntArray) -> IntArray:
    """``[tokens]`` packed tokens of some nodes, in their order."""
    if not len(nodes):
        return np.empty(0, dtype=np.int64)
    length = layout.length[nodes]
    return np.arange(int(length.sum())) + np.repeat(layout.offset[nodes] - np.cumsum(length) + length, length)


def idle_layout(num_tokens: int, device: torch.device) -> TreeLayout:
    """Tokens that nobody sees: one node, no rows."""
    zero, empty = np.zeros(1, dtype=np.int64), np.empty(0, dtype=np.int64)
    tokens = np.zeros(num_tokens, dtype=np.int64)
    return TreeLayout(
        parent=zero - 1, level=zero, path_start=zero, length=zero + num_tokens, row_node=empty, row_length=empty,
        row_begin=empty, shape=(0, num_tokens), source=tokens, position_ids=np.arange(num_tokens), input_ids=tokens,
        device=device,
    )  # fmt: skip


def part_of(layout: TreeLayout, nodes: IntArray) -> TreeLayout:
    """The tree of some nodes, ascending, with all of their ancestors among them; it has no rows."""
    number = np.full(layout.num_nodes + 1, -1, dtype=np.int64)  # the last entry is for "no parent", -1
    number[nodes] = np.arange(len(nodes))
    tokens = token_index(layout, nodes)
    empty = np.empty(0, dtype=np.int64)
    return replace(
        layout,
        parent=number[layout.parent[nodes]],
        level=layout.level[nodes],
        path_start=layout.path_start[nodes],
        length=layout.length[nodes],
        row_node=empty,
        row_length=empty,
        row_begin=empty,
        shape=(0, layout.shape[1]),
        source=layout.source[tokens],
        position_ids=layout.position_ids[tokens],
        input_ids=layout.input_ids[tokens],
    )


def branch_tokens(layout: TreeLayout) -> int:
    """Tokens of the nodes that go through waves: all but prompts, which are roots with branches."""
    childless = ~np.isin(np.arange(layout.num_nodes), layout.parent)
    return int(layout.length[(layout.parent >= 0) | childless].sum())
