"""Which rows of a prefix tree are the responses to one prompt, where nobody says where prompts end.

    system prompt - question 1 - "<think> Okay" - a b      the two questions make the groups: a b c d and e f g h,
                  |            - "To find"      - c d      not what all rows begin with, and not what some responses
                  - question 2 - e f g h                   to one question begin with

Groups of a trainer are equally large, which openings of responses are by chance only. Where that does not decide,
openings are short: all that two halves of a batch differ in is then a question if it is long, and an opening otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from augtree_fx.trie import IntArray

QUESTION_TOKENS = 32  # with what a chat template adds; "<think> Okay, so I need to" and its like have fewer
MIN_EQUAL = 3  # parts of one size under a common start that are no chance: 8 responses fall into halves every 4th time


def prompt_nodes(parent: IntArray, length: IntArray, row_node: IntArray) -> IntArray:
    """``[rows]`` node whose rows are the group of each row, its own one where it shares none; -1 for an empty row.

    Args:
        parent: ``[nodes]`` index of the parent node, which comes before; -1 at level 0.
        length: ``[nodes]`` tokens of the node.
        row_node: ``[rows]`` node in which each row ends, -1 for an empty row.
    """
    tree = _Tree.of(parent, length, row_node)
    group = np.full(len(parent) + 1, -1, dtype=np.int64)  # of nodes; the last entry stands for empty rows
    group[tree.cut()] = tree.cut()
    for node, above in enumerate(parent.tolist()):
        if group[node] < 0:
            group[node] = group[above] if above >= 0 and group[above] >= 0 else -1
    ends = group[row_node]
    return np.where(ends < 0, row_node, ends)


@dataclass(frozen=True)
class _Tree:
    """A tree by node: rows below or in it, tokens of it, tokens up to its end."""

    parent: IntArray
    rows: IntArray
    length: IntArray
    end: IntArray
    children: list[list[int]]

    @staticmethod
    def of(parent: IntArray, length: IntArray, row_node: IntArray) -> _Tree:
        rows = np.bincount(row_node[row_node >= 0], minlength=len(parent)).astype(np.int64)
        end = length.copy()
        children: list[list[int]] = [[] for _ in parent]
        for node, above in enumerate(parent.tolist()):
            if above >= 0:
                end[node] += end[above]
                children[above].append(node)
        for node in range(len(parent) - 1, -1, -1):
            if parent[node] >= 0:
                rows[parent[node]] += rows[node]
        return _Tree(parent, rows, length, end, children)

    def cut(self) -> IntArray:
        """Nodes of the groups, none below another. Rows below none of them are alone."""
        found = np.flatnonzero((self.parent < 0) & (self.rows > 0))
        if len(set(self.rows[found].tolist())) != 1:
            equal = self._equal_parts(int(self.rows.max(initial=0)))
            if equal is None:
                return self._by_length(found)
            found = equal
        while (parts := self._equal_parts(int(self.rows[found[0]]))) is not None:
            alone = len(found) == 1
            questions = min(np.median(self.end[found]), QUESTION_TOKENS if alone else np.inf)
            if np.median(self._tokens_below(found, parts)) < questions and not (alone and len(parts) >= MIN_EQUAL):
                return found
            found = parts
        return found if len(found) > 1 else self._by_length(found)

    def _equal_parts(self, below: int) -> IntArray | None:
        """The largest nodes with less than so many rows that have equally many each, two at least, and all rows."""
        total = int(self.rows[self.parent < 0].sum())
        for size in sorted({int(number) for number in self.rows if 2 <= number < below}, reverse=True):
            nodes = np.flatnonzero(self.rows == size)
            if len(nodes) * size == total:
                return nodes
        return None

    def _tokens_below(self, above: IntArray, parts: IntArray) -> list[int]:
        """Tokens between the end of the one of ``above`` that a part lies below, and the part's own end."""
        found, wanted = [], set(above.tolist())
        for part in parts.tolist():
            node = part
            while node not in wanted:
                node = int(self.parent[node])
            found.append(int(self.end[part] - self.end[node]))
        return found

    def _by_length(self, nodes: IntArray) -> IntArray:
        """These nodes, or what branches below them, where that is long enough to be questions."""
        found, waiting = [], nodes.tolist()
        while waiting:
            node = waiting.pop()
            inner = [child for child in self.children[node] if self.children[child]]
            most = 2 * sum(self.rows[child] for child in inner) >= self.rows[node]
            if inner and most and np.median(self.length[inner]) >= min(self.end[node], QUESTION_TOKENS):
                waiting += inner
            else:
                found.append(node)
        return np.array(sorted(found), dtype=np.int64)
