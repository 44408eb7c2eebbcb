"""Block lists of a tree against which keys each query sees, counted pair by pair from the rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from attention_reference import packed_prefixes
from hypothesis import given, settings
from hypothesis import strategies as st
from row_reference import Batch, num_distinct, packed, padded_batches, prefix_numbers
from torch import Tensor

from augtree_fx import CostModel, TreeLayout, blocks
from augtree_fx.blocks import BlockLists, TreeBlocks
from augtree_fx.tables import Calls, Run, Segment, decode_calls, decode_segments

ABSENT, PARTIAL, FULL = range(3)
CPU = torch.device("cpu")


@contextmanager
def block_size(size: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", size)
        blocks.tree_blocks.cache_clear()
        yield
    blocks.tree_blocks.cache_clear()


def layout_of(batch: Batch) -> TreeLayout:
    """A tree that shares whatever rows share, so that each distinct prefix is packed once."""
    layout = (
        TreeLayout.from_padded(batch.input_ids, batch.attention_mask, batch.position_ids, costs=CostModel.free())
        if batch.attention_mask is not None
        else TreeLayout.from_packed(batch.input_ids, batch.position_ids, costs=CostModel.free())
    )
    assert layout.num_tokens == num_distinct(batch.rows)
    return layout


def calls_of(layout: TreeLayout, window: int | None = None) -> Calls:
    tables = layout.tables(window)
    return decode_calls(tables.segments, tables.cu_seqlens)


def visibility(batch: Batch, layout: TreeLayout) -> Tensor:
    """``[T, T]`` bool over packed tokens: a query sees the prefixes of its own prefix."""
    numbers = prefix_numbers(batch.rows)
    seen = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.bool)
    for path in numbers:
        for length, number in enumerate(path, 1):
            seen[number, path[:length]] = True
    order = packed_prefixes(batch, layout)
    return seen[order][:, order]


def assert_lists(lists: BlockLists, kinds: Tensor) -> None:
    """Lists of ``kinds``, ``[rows, columns]``: which columns of each row are partial and which full."""
    for count, entries, kind in ((lists.partial_count, lists.partial, PARTIAL), (lists.full_count, lists.full, FULL)):
        expected = [(row == kind).nonzero().flatten().tolist() for row in kinds]
        assert count.dtype == entries.dtype == torch.int32 and entries.is_contiguous()
        assert count.tolist() == [len(row) for row in expected]
        assert entries.shape == (len(kinds), max(1, *map(len, expected)))
        assert [row[:many] for row, many in zip(entries.tolist(), count.tolist(), strict=True)] == expected
        assert 0 <= int(entries.min()) and int(entries.max()) < kinds.shape[1]


def mask_of(found: TreeBlocks) -> Tensor:
    token = torch.arange(len(found.first))
    inside = (found.first <= found.first[:, None]) & (found.first[:, None] < found.last)
    return inside & (token <= token[:, None])


def assert_blocks(batch: Batch, size: int) -> Tensor:
    """Lists and mask of a batch's tree are those of its rows; returns what kind each block is."""
    layout = layout_of(batch)
    seen, calls, tokens = visibility(batch, layout), calls_of(layout), layout.num_tokens
    with block_size(size):
        assert blocks.why_not_a_tree(decode_segments(calls.key), tokens) is None
        found = blocks.tree_blocks(calls.key, tokens, CPU)
    kinds = torch.tensor(
        [
            [
                PARTIAL if block.any() and not block.all() else FULL if block.any() else ABSENT
                for block in row.split(size, 1)
            ]
            for row in seen.split(size)
        ]
    )
    assert_lists(found.by_query, kinds)
    assert_lists(found.by_key, kinds.T)
    assert found.num_blocks == int((kinds != ABSENT).sum())
    assert found.first.dtype == found.last.dtype == torch.int32
    assert torch.equal(mask_of(found), seen)
    return kinds


def deep_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Two trees of ``len(lengths)`` levels with two branches a node, ``lengths`` tokens of a node by level."""
    rows: list[list[int]] = [[]]
    for level, length in enumerate(lengths):
        rows = [[*row, *[2 * level + branch] * (length + branch)] for row in rows for branch in range(2)]
    return rows


@pytest.mark.parametrize("size", [1, 2, 3, 8, 16, 128])
@pytest.mark.parametrize(
    "rows",
    [
        deep_rows([7]),
        deep_rows([20, 3]),
        deep_rows([5, 9, 2]),
        deep_rows([4, 1, 6, 3]),
        [*deep_rows([9, 2, 4]), [], [9] * 30, []],
        [[1]],
        [[5] * 16 + [6] * 16, [5] * 16 + [7] * 16],
    ],
    ids=["depth 1", "depth 2", "depth 3", "depth 4", "more roots and empty rows", "one token", "whole blocks"],
)
def test_every_block_is_what_the_rows_say(rows: list[list[int]], size: int) -> None:
    batch = packed(rows)
    kinds = assert_blocks(batch, size)
    if size == 1:  # a block is a pair
        assert not (kinds == PARTIAL).any() and torch.equal(kinds == FULL, visibility(batch, layout_of(batch)))


def test_nodes_as_long_as_blocks() -> None:
    """Branches of 16 under a root of 16: diagonals are partial, the root is a full block of each branch."""
    batch = packed([[5] * 16 + [6] * 16, [5] * 16 + [7] * 16])
    expected = [[PARTIAL, ABSENT, ABSENT], [FULL, PARTIAL, ABSENT], [FULL, ABSENT, PARTIAL]]
    assert assert_blocks(batch, 16).tolist() == expected


@settings(max_examples=150, deadline=None)
@given(padded_batches().filter(lambda batch: any(batch.rows)), st.integers(1, 9))
def test_any_batch(batch: Batch, size: int) -> None:
    assert_blocks(batch, size)


def test_of_one_size_and_device() -> None:
    """The default block is FlashAttention-4's tile; what was made once is given again."""
    calls = calls_of(layout_of(packed(deep_rows([150, 140]))))
    found = blocks.tree_blocks(calls.key, 875, CPU)
    assert blocks.BLOCK == 128 and len(found.by_query.full_count) == 7
    assert blocks.tree_blocks(calls.key, 875, CPU) is found


def test_calls_that_are_not_a_tree() -> None:
    layout = layout_of(packed(deep_rows([4, 5, 6])))
    runs, tokens = decode_segments(calls_of(layout).key), layout.num_tokens
    assert blocks.why_not_a_tree(runs, tokens) is None
    windowed = decode_segments(calls_of(layout, window=3).key)
    assert blocks.why_not_a_tree(windowed, tokens) == "a window gathers the keys of its calls"
    part = "its calls are not those of a whole tree"
    assert blocks.why_not_a_tree([run for run in runs if not run[0]], tokens) == part
    assert blocks.why_not_a_tree([], tokens) == part
    assert blocks.why_not_a_tree(runs, tokens + 1) == part
    causal, segments = runs[0]
    assert causal and blocks.why_not_a_tree([(True, (*segments[:2], *segments[3:])), *runs[1:]], tokens) == part
    assert blocks.why_not_a_tree([*runs, runs[0]], tokens) == part


def test_calls_that_leave_gaps_in_paths() -> None:
    """A level cut off its grandparents, a call twice, a token of a sibling; cut off its parents, it is another tree."""
    layout = layout_of(packed(deep_rows([4, 5, 6])))
    runs, tokens = decode_segments(calls_of(layout).key), layout.num_tokens
    own, first_under_root, second_under_root, second_under_first = runs
    gaps = "its calls are not those of whole paths"
    assert blocks.why_not_a_tree([own, second_under_root, second_under_first], tokens) == gaps
    assert blocks.why_not_a_tree([own, first_under_root, second_under_first], tokens) == gaps
    assert blocks.why_not_a_tree([own, first_under_root, second_under_root], tokens) is None
    assert blocks.why_not_a_tree([*runs, second_under_first], tokens) == gaps
    first, *rest = second_under_first[1]
    leak = Segment(first.q_begin, first.q_end, first.k_begin, first.k_end + 1)
    assert blocks.why_not_a_tree([*runs[:-1], (False, (leak, *rest))], tokens) == gaps


def test_too_many_blocks() -> None:
    length = 1 << 20
    runs: list[Run] = [(True, (Segment(0, length, 0, length),))]
    assert blocks.why_not_a_tree(runs, length) == f"its {length * length // 128**2} blocks are more than 2097152"
