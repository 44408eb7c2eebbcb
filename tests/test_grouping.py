"""Orders of rows that keep groups in micro-batches: nothing lost, whole groups wherever they fit, limits kept."""

from __future__ import annotations

import random
from dataclasses import dataclass

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
    assert [layout.path_start[node] + layout.length[node] for node in group[:5]] == [2, 2, 2, 4, 2]
    assert len({group[0], group[1], group[2], group[4]}) == 1 != len({group[0], group[3]}) and group[5] == -1
    assert TreeLayout.from_padded(rows[5:], mask[5:]).row_group.tolist() == [-1]


def test_declared_prompts_are_the_groups() -> None:
    prompts = [[1, 2], [1, 2, 3]]
    layout = TreeLayout.from_groups(prompts, [[[4, 5, 6, 7], [4, 5, 6, 8], [9]], [[4]]])
    assert len(set(layout.row_group[:3].tolist())) == 1 and layout.row_group[3] != layout.row_group[0]


def tokens(number: int, seed: int) -> list[int]:
    return torch.randint(3, 50_000, (number,), generator=torch.Generator().manual_seed(seed)).tolist()


def groups_with(
    system: int, prompt: int, openings: list[list[int]], opening: int = 20, response: int = 60
) -> tuple[list[list[int]], list[int]]:
    """Rows, and which group each belongs to.

    Args:
        system, prompt, opening, response: tokens of what all rows have in common, of the rest of a prompt, of what some
            responses begin with, and of what is left of a response.
        openings: of each group, how many responses begin with each opening; there are no others.
    """
    rows, groups = [], []
    for group, sizes in enumerate(openings):
        for kind, size in enumerate(sizes):
            start = tokens(system, 1) + tokens(prompt, 10 + group) + tokens(opening, 100 + kind)
            rows += [start + tokens(response, 1000 + len(rows) + i) for i in range(size)]
            groups += [group] * size
    order = random.Random(0).sample(range(len(rows)), len(rows))
    return [rows[i] for i in order], [groups[i] for i in order]


BY_CHANCE = [[8], [4, 4], [5, 3], [1, 7]]


@pytest.mark.parametrize(
    ("system", "prompt", "openings"),
    [
        (0, 400, [[4, 4]] * 4),  # every opening is a branching node of as many rows as the others
        (30, 400, [[4, 4]] * 4),
        (500, 100, [[4, 4]] * 4),  # the system prompt is longer than questions are
        (500, 60, BY_CHANCE),
        (0, 60, BY_CHANCE),
        (30, 400, BY_CHANCE[:2]),
        (30, 100, [[8], [8]]),
        (500, 60, [[8], [5, 3]]),  # two questions below a system prompt that is longer
        (500, 60, [[8], [5, 3], [7]]),  # groups of which the trainer left some rows out
        (0, 400, [[4, 4]]),  # one group alone: prompt and openings are all there is
        (0, 400, [[1, 7]]),
        (30, 300, [[3], [2, 1], [2], [1]]),  # micro-batches so far, of groups that are torn
        (0, 300, [[3], [2, 1], [2], [1]]),
    ],
)
def test_groups_are_prompts_not_what_responses_begin_with(system: int, prompt: int, openings: list[list[int]]) -> None:
    rows, groups = groups_with(system, prompt, openings)
    lengths = torch.tensor([0, *map(len, rows)]).cumsum(0)
    layout = TreeLayout.from_packed(torch.tensor([token for row in rows for token in row]), cu_seq_lens=lengths)
    found = layout.row_group.tolist()
    numbers = sorted(set(zip(found, groups, strict=True)))
    assert len(numbers) == len(set(found)) == len(openings)


def as_rows(rows: list[list[int]]) -> list[torch.Tensor]:
    return [torch.tensor(row) for row in rows]


# Prompts shorter than what responses begin with: only a trainer that says where prompts end tells these groups.
SHORT = groups_with(0, 20, [[4, 4]] * 3 + [[8, 1]], opening=100)


def verl_batch(padded: bool) -> dict[str, torch.Tensor]:
    """A batch as verl hands it to its engine: prompts padded on the left, or nested."""
    rows = as_rows(SHORT[0])
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    if not padded:
        prompts = torch.nested.as_nested_tensor([row[:20] for row in rows], layout=torch.jagged)
        return {"input_ids": nested, "prompts": prompts}
    width = 25 + max(map(len, rows))
    mask = torch.stack([(torch.arange(width) >= 5) & (torch.arange(width) < 5 + len(row)) for row in rows]).long()
    prompts = torch.stack([torch.cat([torch.zeros(5, dtype=torch.long), row[:20]]) for row in rows])
    return {"input_ids": nested, "prompts": prompts, "attention_mask": mask}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("num_chunks", [2, 4])
def test_verl_s_groups_are_its_prompts(num_chunks: int, padded: bool) -> None:
    from augtree_fx.integrations import verl

    verl.uninstall()
    found = verl._groups(verl_batch(padded))
    assert len(set(zip(found, SHORT[1], strict=True))) == len(set(found)) == 4
    assert_whole(balanced_groups(found, [1] * len(found), num_chunks, 1000), SHORT[1])


def assert_whole(chunks: list[list[int]] | None, groups: list[int]) -> None:
    assert chunks is not None
    held = [{groups[row] for row in chunk} for chunk in chunks]
    assert sum(map(len, held)) == len(set(groups)), "a group is in two micro-batches"


def test_verl_s_batches_without_prompts_are_grouped_by_their_tree() -> None:
    from augtree_fx.integrations import verl

    verl.uninstall()
    rows, groups = groups_with(0, 400, [[4, 4]] * 4)
    found = verl._groups({"input_ids": torch.nested.as_nested_tensor(as_rows(rows), layout=torch.jagged)})
    assert_whole(balanced_groups(found, [1] * 32, 2, 1000), groups)
    assert_whole(balanced_groups(found, [1] * 32, 4, 1000), groups)


@dataclass
class Item:
    """A row of OpenRLHF's replay buffer, as far as groups are read off it."""

    sequences: torch.Tensor
    action_mask: torch.Tensor | None

    @property
    def attention_mask(self) -> torch.Tensor:
        return torch.ones_like(self.sequences)


class Buffer:
    def __init__(self, items: list[Item]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("size", [8, 16])
def test_openrlhf_s_groups_are_its_prompts(size: int, masked: bool) -> None:
    from augtree_fx.integrations.openrlhf import GroupSampler

    rows, groups = groups_with(0, 20, [[4, 4]] * 4, opening=100) if masked else groups_with(0, 400, [[4, 4]] * 4)
    items = [Item(row, torch.arange(1, len(row)) >= 20 if masked else None) for row in as_rows(rows)]
    order = list(GroupSampler(Buffer(items), size))
    assert_whole([order[i : i + size] for i in range(0, len(order), size)], groups)


def test_rows_of_openrlhf_that_were_cut_inside_of_their_prompt() -> None:
    from augtree_fx.integrations.openrlhf import _groups

    rows, groups = groups_with(0, 20, [[4, 4]] * 2, opening=100)
    items = [Item(row, torch.arange(1, len(row)) >= 20) for row in as_rows(rows)]
    cut = Item(torch.tensor(tokens(15, 77)), torch.zeros(14, dtype=torch.bool))
    found = _groups([*items, cut, cut])
    assert len(set(zip(found, [*groups, 2, 2], strict=True))) == len(set(found)) == 3
