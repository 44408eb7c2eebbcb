"""How many tokens went through a stack, with and without sharing: what trainers log."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np

from augtree_fx.trie import IntArray


@dataclass
class Counts:
    """Batches of whole rows since `transform`; generation with a KV cache is not among them.

    Attributes:
        batches: forwards.
        shared: those that computed what their rows share once.
        row_tokens: tokens of all rows, padding excluded: what is computed without sharing.
        computed_tokens: tokens that were computed.
        waves: waves that branches went through; 0 where every batch was one forward.
        rows: rows of shared batches that are not empty.
        groups: groups among them, rows that share nothing being groups of one.

    Under context parallelism they are those of the batch of all ranks of an axis, also where each rank passes its own.
    """

    batches: int = 0
    shared: int = 0
    row_tokens: int = 0
    computed_tokens: int = 0
    waves: int = 0
    rows: int = 0
    groups: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def add_rows(self, num_tokens: int) -> None:
        """A batch whose rows have so many tokens; computed row by row until `add_shared` says otherwise."""
        self.batches += 1
        self.row_tokens += num_tokens
        self.computed_tokens += num_tokens

    def add_shared(self, num_row_tokens: int, num_tokens: int, num_waves: int, row_group: IntArray) -> None:
        """The last batch computes ``num_tokens`` for its ``num_row_tokens``; ``row_group`` as of `TreeLayout`."""
        groups = row_group[row_group >= 0]
        self.rows += len(groups)
        self.groups += len(np.unique(groups))
        self.shared += 1
        self.computed_tokens += num_tokens - num_row_tokens
        self.waves += num_waves
