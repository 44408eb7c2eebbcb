"""An order of rows in which groups stay together and, where micro-batches allow it, in one micro-batch.

rows           A1 B1 A2 C1 C2 B2 A3 C3 B3        shuffled, groups read off equal prompts
micro-batches  A1 A2 A3 | B1 B2 B3 | C1 C2 C3
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from augtree_fx.layout import TreeLayout


def groups_of_rows(rows: Sequence[Tensor], prompts: Sequence[Tensor | None]) -> list[Hashable]:
    """What tells the group of each row: its prompt, or what the rows' tree shows where a prompt is not known.

    Args:
        rows: token ids of each row, padding excluded.
        prompts: token ids of its prompt.
    """
    if all(prompt is not None for prompt in prompts):
        return [prompt.cpu().numpy().tobytes() for prompt in prompts if prompt is not None]
    offsets = torch.tensor([0, *itertools.accumulate(map(len, rows))])
    groups: list[Hashable] = []
    groups += TreeLayout.from_packed(torch.cat(list(rows)).cpu(), cu_seq_lens=offsets).row_group.tolist()
    return groups


def group_order(groups: Sequence[Hashable], num_chunks: int) -> list[int]:
    """An order of rows for equal micro-batches; only what tears a group is changed about the order given.

    Groups come in the order of their first rows, so that a shuffle of rows becomes a shuffle of groups, and members
    keep their order. A group that is larger than a micro-batch fills whole ones; one that fits nowhere whole is torn,
    into micro-batches that are neighbours where possible.

    Args:
        groups: what tells the group of each row, equal inside of a group.
        num_chunks: how many micro-batches the rows are cut into, all of ``len(groups) // num_chunks`` rows.

    Returns:
        Row numbers, micro-batch after micro-batch. Rows that are left over come last.

    Raises:
        ValueError: ``num_chunks`` is not between 1 and the number of rows.
    """
    if not 1 <= num_chunks <= max(len(groups), 1):
        raise ValueError(f"num_chunks must be between 1 and the number of rows {len(groups)}, got {num_chunks}")
    size = len(groups) // num_chunks if groups else 0
    rows_of: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        rows_of.setdefault(group, []).append(row)
    chunks: list[list[int]] = [[] for _ in range(num_chunks)]
    # Longest first leaves the short ones to fill gaps; equal ones stay in their order, because the sort is stable.
    for rows in sorted(rows_of.values(), key=len, reverse=True):
        _place(rows, chunks, size)
    order = [row for chunk in sorted(chunks, key=lambda chunk: _rank(chunk, groups, rows_of)) for row in chunk]
    return order + sorted(set(range(len(groups))) - set(order))


def _place(rows: list[int], chunks: list[list[int]], size: int) -> None:
    """Put a group where it leaves the least room, in pieces only where it fits nowhere whole."""
    room = [size - len(chunk) for chunk in chunks]
    while rows and max(room) > 0:
        fitting = [free for free in room if free >= min(len(rows), size)]
        index = room.index(min(fitting, default=max(room)))
        piece, rows = rows[: room[index]], rows[room[index] :]
        chunks[index] += piece
        room[index] -= len(piece)


def _rank(chunk: list[int], groups: Sequence[Hashable], rows_of: dict[Hashable, list[int]]) -> tuple[int, int]:
    """Micro-batches in the order of their groups, pieces of one group side by side."""
    return min((rows_of[groups[row]][0], row) for row in chunk) if chunk else (0, 0)


def balanced_groups(
    groups: Sequence[Hashable], tokens: Sequence[int], num_chunks: int, max_tokens: int
) -> list[list[int]] | None:
    """Rows of micro-batches of about as many tokens, groups whole where the limit allows it.

    The most expensive group goes to the emptiest micro-batch first; one that does not fit is halved until it does.

    Args:
        groups: what tells the group of each row.
        tokens: of each row.
        num_chunks: micro-batches, none of which may be empty.
        max_tokens: of a micro-batch.

    Returns:
        Row numbers of each micro-batch, or ``None`` if rows do not fit that way.
    """
    rows_of: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        rows_of.setdefault(group, []).append(row)
    waiting = list(rows_of.values())
    while len(waiting) < num_chunks and max(map(len, waiting)) > 1:
        waiting += _halves(waiting.pop(max(range(len(waiting)), key=lambda i: len(waiting[i]))))
    chunks: list[list[int]] = [[] for _ in range(num_chunks)]
    filled = [0] * num_chunks
    while waiting:
        cost = [sum(tokens[row] for row in rows) for rows in waiting]
        rows = waiting.pop(cost.index(max(cost)))
        emptiest = filled.index(min(filled))
        if filled[emptiest] + max(cost) <= max_tokens:
            chunks[emptiest] += rows
            filled[emptiest] += max(cost)
        elif len(rows) > 1:
            waiting += _halves(rows)
        else:
            return None
    return chunks if all(chunks) else None


def _halves(rows: list[int]) -> list[list[int]]:
    return [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
