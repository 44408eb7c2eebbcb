"""Sizes of a benchmark: one prompt with N responses, and the FLOPs of its attention."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

# FLOP a (query, key) pair, head and head dim, as FlashAttention's papers count: two matmuls forward, five backward.
FORWARD_FLOP, BACKWARD_FLOP = 4, 10


@dataclass(frozen=True)
class Shape:
    """A group in tokens.

    Attributes:
        prompt: tokens of the prompt.
        branches: number of responses.
        response: tokens of each response.
    """

    prompt: int
    branches: int
    response: int

    def __str__(self) -> str:
        return f"{self.prompt}x{self.branches}x{self.response}"

    @property
    def row_length(self) -> int:
        """Tokens of one row: prompt and response."""
        return self.prompt + self.response

    @property
    def num_tokens(self) -> int:
        """Tokens when the prompt is computed once."""
        return self.prompt + self.branches * self.response

    @property
    def num_row_tokens(self) -> int:
        """Tokens when every row is computed on its own."""
        return self.branches * self.row_length

    @property
    def tree_pairs(self) -> int:
        """(query, key) pairs of the tree: the prompt once, every response on the prompt and on itself."""
        return causal_pairs(self.prompt) + self.branches * (self.response * self.prompt + causal_pairs(self.response))

    @property
    def row_pairs(self) -> int:
        """(query, key) pairs of all rows on their own."""
        return self.branches * causal_pairs(self.row_length)


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
