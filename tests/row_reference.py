"""What tests hold the tree against: rows of (token, position) and their prefix trie, in plain Python.

Nothing here imports augtree_fx: the reference is built from the rollouts, never from the library's own layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

Row = list[tuple[int, int]]  # (token id, position id)


@dataclass
class Batch:
    """Rows, the flat slots in which the caller's tensors hold them, and these tensors."""

    rows: list[Row]
    slots: list[list[int]]
    input_ids: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None


def prefix_numbers(rows: Sequence[Row]) -> list[list[int]]:
    """Numbers tokens so that two have one number exactly when token and position agree on their whole prefixes."""
    trie: dict[tuple[int, tuple[int, int]], int] = {}
    numbers = []
    for row in rows:
        node, path = -1, []
        for item in row:
            node = trie.setdefault((node, item), len(trie))
            path.append(node)
        numbers.append(path)
    return numbers


def num_distinct(rows: Sequence[Row]) -> int:
    """Size of the prefix trie in tokens."""
    return len({number for path in prefix_numbers(rows) for number in path})


def padded(tokens: Sequence[Sequence[int]], left: Sequence[int], width: int, positions: str) -> Batch:
    """Rows with padding on both sides.

    Args:
        tokens: token ids of each row.
        left: columns of padding before each row.
        width: columns of the batch.
        positions: "column" (none are passed), "mask" (counted from the first token) or "offset" (from 5, by 1 or 2).
    """
    count = len(tokens)
    ids = torch.arange(count * width).reshape(count, width) % 3  # padding that looks like tokens
    mask = torch.zeros(count, width, dtype=torch.int64)
    position = torch.full((count, width), 7)
    rows, slots = [], []
    for number, (row, begin) in enumerate(zip(tokens, left, strict=True)):
        here = slice(begin, begin + len(row))
        ids[number, here] = torch.tensor(row, dtype=torch.int64)
        mask[number, here] = 1
        first = {"column": begin, "mask": 0, "offset": 5}[positions]
        step = 1 + number % 2 if positions == "offset" else 1
        values = [first + step * i for i in range(len(row))]
        position[number, here] = torch.tensor(values, dtype=torch.int64)
        rows.append(list(zip(row, values, strict=True)))
        slots.append([number * width + column for column in range(begin, begin + len(row))])
    return Batch(rows, slots, ids, mask, None if positions == "column" else position)


def packed(tokens: Sequence[Sequence[int]]) -> Batch:
    """Rows one after another, positions restarting at 0."""
    rows = [[(token, position) for position, token in enumerate(row)] for row in tokens]
    slots, begin = [], 0
    for row in rows:
        slots.append(list(range(begin, begin + len(row))))
        begin += len(row)
    flat = torch.tensor([item for row in rows for item in row], dtype=torch.int64).reshape(-1, 2)
    return Batch(rows, slots, flat[None, :, 0], None, flat[None, :, 1])


def bounds(tokens: Sequence[Sequence[int]]) -> Tensor:
    """cu_seq_lens of packed rows."""
    return torch.tensor([0] + [len(row) for row in tokens], dtype=torch.int32).cumsum(0)


@st.composite
def rollouts(draw: st.DrawFn, min_tokens: int = 0) -> list[list[int]]:
    """Token ids of rows: each is an earlier row, cut anywhere, and a new tail.

    Few token ids, so that rows also meet by chance; duplicates, prefixes of other rows and deep trees all come up.
    """
    tokens = st.lists(st.integers(0, 2), min_size=min_tokens, max_size=6)
    rows = [draw(tokens)]
    for _ in range(draw(st.integers(0, 9))):
        base = draw(st.sampled_from(rows))
        rows.append(base[: draw(st.integers(0, len(base)))] + draw(tokens))
    return draw(st.permutations(rows))


@st.composite
def padded_batches(draw: st.DrawFn) -> Batch:
    """Rollouts in padded tensors: left, right or both sides, positions as trainers pass them."""
    tokens = draw(rollouts())
    width = max(1, *map(len, tokens)) + draw(st.integers(0, 3))
    side = draw(st.sampled_from(["left", "right", "both"]))
    free = [width - len(row) for row in tokens]
    left = {"left": free, "right": [0] * len(free)}.get(side) or [draw(st.integers(0, room)) for room in free]
    return padded(tokens, left, width, draw(st.sampled_from(["column", "mask", "offset"])))
