"""Sizes of a benchmark: prompts with N responses each, and the FLOPs of one group's attention."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

# FLOP a (query, key) pair, head and head dim, as FlashAttention's papers count: two matmuls forward, five backward.
FORWARD_FLOP, BACKWARD_FLOP = 4, 10


@dataclass(frozen=True)
class Shape:
    """Groups of one size, in tokens.

    Attributes:
        prompt: tokens of each prompt.
        branches: number of responses of a group.
        response: tokens of each response.
        groups: number of groups.
        common: tokens that all prompts begin with: a system prompt, tools, a document.
    """

    prompt: int
    branches: int
    response: int
    groups: int = 1
    common: int = 0

    def __str__(self) -> str:
        group = f"{self.prompt}x{self.branches}x{self.response}"
        return group if self.groups == 1 else f"{self.groups} groups of {group}, {self.common} common,"

    @property
    def num_rows(self) -> int:
        """Responses of all groups."""
        return self.groups * self.branches

    @property
    def row_length(self) -> int:
        """Tokens of one row: prompt and response."""
        return self.prompt + self.response

    @property
    def num_tokens(self) -> int:
        """Tokens when whatever rows share is computed once."""
        return self.common + self.groups * (self.prompt - self.common) + self.num_rows * self.response

    @property
    def num_row_tokens(self) -> int:
        """Tokens when every row is computed on its own."""
        return self.num_rows * self.row_length

    @property
    def tree_pairs(self) -> int:
        """(query, key) pairs of the tree: each token once, on its path."""
        common = causal_pairs(self.common)
        responses = self.num_rows * (causal_pairs(self.row_length) - causal_pairs(self.prompt))
        return common + self.groups * (causal_pairs(self.prompt) - common) + responses

    @property
    def row_pairs(self) -> int:
        """(query, key) pairs of all rows on their own."""
        return self.num_rows * causal_pairs(self.row_length)


@dataclass(frozen=True)
class Heads:
    """Query heads, key heads, head size."""

    heads: int
    kv_heads: int
    head_dim: int


def causal_pairs(length: int) -> int:
    """(query, key) pairs of one causal sequence, the diagonal included."""
    return length * (length + 1) // 2


def parse_shape(text: str) -> Shape:
    """Read ``PxNxR``, or ``N:P:R``.

    Raises:
        argparse.ArgumentTypeError: not three positive whole numbers.
    """
    parts = text.lower().split("x")
    if ":" in text:
        branches, *rest = text.split(":")
        parts = [*rest[:1], branches, *rest[1:]]
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(
            "a shape is PROMPTxBRANCHESxRESPONSE in tokens, three positive numbers such as 32768x16x1024, "
            f"got {text!r}; BRANCHES:PROMPT:RESPONSE is another way to write it"
        )
    return Shape(*map(int, parts))
