"""Which token predicts which: every scored token of every row, and where its prediction comes from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from augtree_fx.layout import TreeLayout
from augtree_fx.trie import IntArray
from augtree_fx.waves import token_index


def scored_slots(layout: TreeLayout, scored: Tensor | None, prompts: IntArray) -> NDArray[np.bool_]:
    """``[batch * sequence]``, whether the token of a slot is scored.

    Args:
        layout: the tree.
        scored: ``layout.shape``, non-zero where a token is scored; ``None`` for all tokens outside of prompts.
        prompts: nodes that are prompts.

    Raises:
        ValueError: ``scored`` has another shape than the batch.
    """
    if scored is not None:
        if tuple(scored.shape) != tuple(layout.shape):
            raise ValueError(f"scored must have the batch's shape, {tuple(layout.shape)}, got {tuple(scored.shape)}")
        return scored.reshape(-1).to("cpu", torch.bool).numpy()
    outside = np.ones(layout.num_tokens + 1, dtype=bool)  # the last entry is for padding, -1
    outside[token_index(layout, prompts)] = outside[-1] = False
    return outside[layout.packed_index]


@dataclass(frozen=True, eq=False)
class Predictions:
    """Scored tokens of rows, in row order; a token that several rows share is scored for each.

    Attributes:
        row: ``[n]`` row of the token.
        index: ``[n]`` its place in its row, at least 1.
        slot: ``[n]`` its flat place in the caller's ``[batch, sequence]``.
        source: ``[n]`` packed token whose hidden state predicts it: the one before it in its row.
        target: ``[n]`` packed token that it is.
    """

    row: IntArray
    index: IntArray
    slot: IntArray
    source: IntArray
    target: IntArray

    @staticmethod
    def of(layout: TreeLayout, scored: NDArray[np.bool_]) -> Predictions:
        """Scored tokens of a layout.

        Args:
            layout: the tree.
            scored: ``[batch * sequence]``, whether the token of a slot is scored; first tokens of rows never are.
        """
        length = np.maximum(layout.row_length - 1, 0)
        row = np.repeat(np.arange(layout.num_rows), length)
        index = np.arange(len(row)) - np.repeat(np.cumsum(length) - length, length) + 1
        slot = layout.row_begin[row] + index
        target, source = layout.packed_index[slot], layout.packed_index[slot - 1]
        chosen = scored[slot]
        return Predictions(*(x[chosen] for x in (row, index, slot, source, target)))

    def take(self, chosen: IntArray) -> Predictions:
        """Some of them."""
        return Predictions(*(x[chosen] for x in (self.row, self.index, self.slot, self.source, self.target)))

    def inside(self, tokens: IntArray) -> IntArray:
        """Numbers of those whose token is one of some packed tokens."""
        return np.flatnonzero(np.isin(self.target, tokens))

    def sources_among(self, tokens: IntArray) -> IntArray:
        """Packed tokens, ascending, that predict something and are among some packed tokens."""
        return np.intersect1d(self.source, tokens)

    def scored_nodes(self, layout: TreeLayout) -> NDArray[np.bool_]:
        """``[nodes]``, whether a token of a node or of its descendants is scored."""
        found = np.zeros(layout.num_nodes + 1, dtype=bool)  # the last entry is for "no parent", -1
        found[np.searchsorted(layout.offset, self.target, side="right") - 1] = True
        for node in range(layout.num_nodes - 1, -1, -1):  # children have larger numbers than their parent
            found[layout.parent[node]] |= found[node]
        return found[:-1]
