"""How many tokens went through a stack, with and without sharing: what trainers log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from augtree_fx.layout import TreeLayout
from augtree_fx.rows import HostRows
from augtree_fx.trie import IntArray


@dataclass
class Counts:
    """Batches of whole rows since `transform`; generation with a KV cache is not among them.

    Attributes:
        batches: forwards.
        shared: those that computed what their rows share once; the others ran the original forward.
        row_tokens: tokens of all rows, padding excluded: what is computed without sharing.
        computed_tokens: tokens that were computed.
        waves: waves that branches went through; 0 where every batch was one forward.
        rows: rows of shared batches that are not empty.
        groups: prompts of these, in each batch.

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

    def add_shared(
        self, layout: TreeLayout, num_tokens: int, num_waves: int = 0, prompt_tokens: IntArray | None = None
    ) -> None:
        """The last batch, of this tree, computes so many tokens.

        Args:
            layout: of all its rows.
            num_tokens: that are computed.
            num_waves: waves that branches go through.
            prompt_tokens: ``[rows]`` of each row; ``None`` where nobody says it, and the tree shows it.
        """
        groups = layout.row_group if prompt_tokens is None else _by_prompt(layout, prompt_tokens)
        groups = groups[layout.row_length > 0]
        self.rows += len(groups)
        self.groups += len(np.unique(groups))
        self.shared += 1
        self.computed_tokens += num_tokens - layout.num_row_tokens
        self.waves += num_waves


def num_tokens_of(given: Mapping[str, Any]) -> int:
    """Tokens of a call that was not understood: slots, without padding where a plain mask says which that is."""
    mask, tokens = given.get("attention_mask"), given.get("input_ids")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return int((mask != 0).sum())
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    return tokens.shape[0] * tokens.shape[1] if isinstance(tokens, Tensor) else 0


def prompt_tokens_of(rows: HostRows | TreeLayout, prompt_columns: int | None) -> IntArray | None:
    """``[rows]`` tokens of each row's prompt, where prompts fill the first columns of padded rows."""
    begin, length = (rows.begin, rows.length) if isinstance(rows, HostRows) else (rows.row_begin, rows.row_length)
    if prompt_columns is None or rows.shape[0] != len(length):
        return None  # not said, or packed rows
    return np.clip(prompt_columns - begin % rows.shape[1], 0, length)


def _by_prompt(layout: TreeLayout, prompt_tokens: IntArray) -> IntArray:
    """``[rows]`` number of each row's prompt."""
    numbers: dict[bytes, int] = {}
    ends = layout.row_begin + prompt_tokens
    prompts = [
        layout.input_ids[layout.packed_index[begin:end]].tobytes()
        for begin, end in zip(layout.row_begin, ends, strict=True)
    ]
    return np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], dtype=np.int64)
