"""Orders of rows that keep groups in micro-batches: nothing lost, whole groups wherever they fit, limits kept."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from augtree_fx import CostModel, TreeLayout
from augtree_fx.integrations.grouping import balanced_groups, group_order


def cut(order: list[int], groups: list[int], num_chunks: int) -> list[list[int]]:
    size = len(order) // num_chunks
    return [[groups[row] for row in order[i * size : (i + 1) * size]] for i in range(num_chunks)]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.data())
def test_rows_are_permuted(groups: list[int], data: st.DataObject) -> None:
    num_chunks = data.draw(st.integers(1, len(groups)))
    order = group_order(groups, num_chunks)
    assert sorted(order) == list(range(len(groups)))
    for chunk in cut(order, groups, num_chunks):
        runs = 1 + sum(a != b for a, b in zip(chunk, chunk[1:], strict=False))
        assert runs == len(set(chunk)), "members of a group must be adjacent in a micro-batch"


@pytest.mark.parametrize(("size", "rows"), [(8, 8), (8, 16), (8, 32), (4, 12), (8, 4), (8, 2), (6, 3)])
def test_whole_groups_or_micro_batches_of_one_group(size: int, rows: int) -> None:
    """64 rows of 8 groups of 8: TRL's shuffle leaves 1.5 rows of a group in a micro-batch of 8."""
    num_groups = 12
    groups = [row % num_groups for row in range(size * num_groups)]
    random.Random(0).shuffle(groups)
    num_chunks = len(groups) // rows
    chunks = cut(group_order(groups, num_chunks), groups, num_chunks)
    assert {len(set(chunk)) for chunk in chunks} == {max(rows // size, 1)}
    first = [chunk[0] for chunk in chunks]
    assert list(dict.fromkeys(first)) == [x for i, x in enumerate(first) if x not in first[:i]]
    changes = sum(a != b for a, b in zip(first, first[1:], strict=False))
    assert rows > size or changes == num_groups - 1, "micro-batches of one group must be neighbours"


def test_groups_come_in_the_order_of_their_first_rows() -> None:
    assert group_order([7, 3, 7, 3, 5, 5], 3) == [0, 2, 1, 3, 4, 5]
    assert group_order([0] * 4 + [1] * 8 + [2] * 4, 2) == [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11]


def test_the_number_of_micro_batches_is_checked() -> None:
    with pytest.raises(ValueError, match="num_chunks must be between 1 and the number of rows 3, got 4"):
        group_order([0, 0, 1], 4)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=30), st.data())
def test_balanced_groups_keep_the_limit(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    groups, tokens = [group for group, _ in rows], [number for _, number in rows]
    num_chunks, limit = data.draw(st.integers(1, len(rows))), data.draw(st.integers(9, 300))
    chunks = balanced_groups(groups, tokens, num_chunks, limit)
    if chunks is None:
        return
    assert sorted(row for chunk in chunks for row in chunk) == list(range(len(rows)))
    assert len(chunks) == num_chunks and all(chunks)
    assert max(sum(tokens[row] for row in chunk) for chunk in chunks) <= limit


def test_balanced_groups_are_whole_where_they_fit_and_halved_where_not() -> None:
    groups, tokens = [0, 1, 2, 3] * 4, [10] * 16
    whole = balanced_groups(groups, tokens, 4, 40)
    assert whole is not None and [[groups[row] for row in chunk] for chunk in whole] == [[i] * 4 for i in range(4)]
    halves = balanced_groups(groups, tokens, 8, 20)
    assert halves is not None and all(len({groups[row] for row in chunk}) == 1 for chunk in halves)
    assert balanced_groups(groups, tokens, 4, 39) is None


def test_groups_of_a_layout() -> None:
    rows = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4], [6, 7, 8, 9], [1, 2, 7, 0], [0, 0, 0, 0]])
    mask = torch.ones_like(rows)
    mask[4, 3:] = mask[5] = 0
    layout = TreeLayout.from_padded(rows, mask, costs=CostModel.free())
    group = layout.row_group.tolist()
    assert [layout.path_start[node] + layout.length[node] for node in group[:5]] == [3, 3, 3, 4, 2]
    assert group[0] == group[1] == group[2] and len({group[0], group[3], group[4]}) == 3 and group[5] == -1
    assert TreeLayout.from_padded(rows[5:], mask[5:]).row_group.tolist() == [-1]
