"""Attention under context parallelism on 1 to 4 gloo ranks: every schedule against every row on its own, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from attention_reference import Site
from cp_workers import attention_errors
from ranks import Ranks
from row_reference import Batch, padded
from test_attention_parity import deep_batch

from augtree_fx import CostModel, TreeLayout, tables
from augtree_fx.dtensor_ops import tables as lane_tables
from augtree_fx.dtensor_ops.schedules import GATHER_KV, MOVE_Q, ROTATE_KV, SCHEDULES
from augtree_fx.dtensor_ops.shards import Shards

EXACT = 1e-10  # sums of some hundred terms in another order


def groups(*, long_branch: bool = False) -> Batch:
    """Two groups on prompts of unequal length, one row that shares nothing; one branch may be longer than a share."""
    first, second = [7] * 13, [8, 9] * 10
    rows = [first + [number] * length for number, length in enumerate((4, 5, 1, 3), start=1)]
    rows += [second + [number] * length for number, length in enumerate((6, 2, 60 if long_branch else 9), start=1)]
    rows += [[6] * 11]
    width = max(map(len, rows)) + 1
    return padded(rows, [0] * len(rows), width, "column")


BATCHES = {"groups": groups, "long branch": lambda: groups(long_branch=True), "deep": deep_batch}


def covering(cases: list[Any], num_ranks: int) -> list[Any]:
    """Every other case on three ranks, the others on four, some on one."""
    return {1: cases[::5], 3: cases[::2], 4: cases[1::2]}[num_ranks]


def attention_cases(cases: list[tuple[Site, str, str, int, int | None]]) -> list[dict[str, float]]:
    return [attention_errors(at, BATCHES[batch](), *rest) for at, batch, *rest in cases]


def assert_exact(ranks: Ranks, cases: list[tuple[Site, str, str, int, int | None]]) -> None:
    for rank, found in enumerate(ranks.run(attention_cases, cases, seconds=120)):
        for case, errors in zip(cases, found, strict=True):
            assert {"out", "lse", "q", "k", "v"} <= set(errors)
            assert max(errors.values()) <= EXACT, f"rank {rank}, {case}: {errors}"


SINKS = Site(sinks=True, softcap=3.0, v_head_dim=6)
CASES: list[Any] = [(SINKS, batch, schedule, 1, None) for batch in BATCHES for schedule in SCHEDULES]
# Short nodes lie on one rank whole, so some ranks have no key that others read.
CASES += [(Site(), "deep", schedule, 4, None) for schedule in SCHEDULES]
CASES += [
    (Site(sinks=True, window=window), batch, SCHEDULES[0], 1, window) for batch in BATCHES for window in (1, 6, 1000)
]


def test_every_schedule_and_window(ranks: Ranks) -> None:
    assert_exact(ranks, covering(CASES, ranks.num_ranks))


def gathered_cases(
    cases: list[tuple[Site, str, str, int, int | None]], dense: int, most: float
) -> list[dict[str, float]]:
    """As `attention_cases`, where keys are gathered whenever there are any, but for large segments and too many."""
    with (
        mock.patch.object(lane_tables, "MOST_APART", 0),
        mock.patch.object(lane_tables, "MOST_COPIED", most),
        mock.patch.object(tables, "DENSE_PAIRS", dense),
    ):
        return attention_cases(cases)


@pytest.mark.parametrize(("dense", "most"), [(50, 3), (1 << 40, 3), (1 << 40, 0.3), (1 << 40, 0)])
def test_gathered_keys(ranks: Ranks, dense: int, most: float) -> None:
    cases = covering([case for case in CASES if case[4] is None], ranks.num_ranks)
    for rank, found in enumerate(ranks.run(gathered_cases, cases, dense, most, seconds=120)):
        for case, errors in zip(cases, found, strict=True):
            assert max(errors.values()) <= EXACT, f"rank {rank}, {case}: {errors}"


def test_a_tree_of_many_levels_takes_few_calls() -> None:
    """They cost the host more than anything else there; 32 chains of three nodes on a prompt, and their branches."""
    rows = [
        [1] * 40 + [2 + group] * 9 + [40 + inner] * 8 + [50 + leaf] * 4
        for group in range(8)
        for inner in range(4)
        for leaf in range(3)
    ]
    batch = padded(rows, [0] * len(rows), max(map(len, rows)), "column")
    layout = TreeLayout.from_padded(batch.input_ids, batch.attention_mask, costs=CostModel.free())
    assert layout.num_levels == 4
    for schedule in SCHEDULES:
        for keys in sets_of_keys(layout, 3, schedule):
            assert keys.direct.num_calls + keys.gathered.num_calls <= 5
            assert keys.gathered.num_calls >= 1 or schedule == MOVE_Q, "this tree is to gather"


def test_what_many_share_is_not_copied_for_each() -> None:
    """A document with 40 questions of some responses each: copies of it would be 40 times as many keys as there are."""
    rows = [[1] * 600 + [2 + group] * 5 + [50 + leaf] * 4 for group in range(40) for leaf in range(3)]
    batch = padded(rows, [0] * len(rows), max(map(len, rows)), "column")
    layout = TreeLayout.from_padded(batch.input_ids, batch.attention_mask, costs=CostModel.free())
    for keys in sets_of_keys(layout, 2, ROTATE_KV):
        assert keys.gathered.kv_index is not None
        assert len(keys.gathered.kv_index) <= lane_tables.MOST_COPIED * Shards.of(layout, 2, min_chunk_tokens=1).share
        assert keys.direct.num_calls + keys.gathered.num_calls <= 10, "nor is there a call for each"


def test_a_tree_of_very_many_levels() -> None:
    """Every row leaves another one a token later."""
    rows = [torch.cat([torch.arange(length), torch.tensor([2000])]) for length in range(1, 1100)]
    starts = torch.tensor([0, *np.cumsum([len(row) for row in rows])])
    layout = TreeLayout.from_packed(torch.cat(rows)[None], cu_seq_lens=starts, costs=CostModel.free())
    assert layout.num_levels > 1050
    for schedule in SCHEDULES:
        sets_of_keys(layout, 2, schedule)


@pytest.mark.parametrize("num_ranks", [3, 4, 8])
def test_gathered_keys_take_as_few_calls_on_any_number_of_ranks(num_ranks: int) -> None:
    """One group, and three: three calls on own keys of each, and three in all on those of the other ranks."""
    for groups in ([(4096, [256] * 8)], [(1024, [64] * 8)] * 3):
        prompts = [[number + 1] * length for number, (length, _) in enumerate(groups)]
        responses = [[[number + 10] * length for length in branches] for number, (_, branches) in enumerate(groups)]
        layout = TreeLayout.from_groups(prompts, responses)
        shards = Shards.of(layout, num_ranks, min_chunk_tokens=16)
        for rank in range(num_ranks):
            found = lane_tables.whole_path(shards, rank, GATHER_KV)
            (remote,) = found.remote
            assert found.own.direct.num_calls <= 1 + 2 * len(groups)
            assert remote.direct.num_calls + remote.gathered.num_calls <= 3
            copied = 0 if remote.gathered.kv_index is None else len(remote.gathered.kv_index)
            assert copied <= 2 * num_ranks * found.sizes.keys
        sets_of_keys(layout, num_ranks, GATHER_KV)


def sets_of_keys(layout: TreeLayout, num_ranks: int, schedule: str) -> list[lane_tables.KeyTables]:
    """Tables of all ranks; on own and on other ranks' keys every (query, key) pair of the tree is there once."""
    shards = Shards.of(layout, num_ranks, min_chunk_tokens=1)
    found = [lane_tables.whole_path(shards, rank, schedule) for rank in range(num_ranks)]
    every = [keys for each in found for keys in (each.own, *each.remote, *each.visiting)]
    segments = torch.cat([part.segments for keys in every for part in keys])
    causal, queries, keys = segments[:, 1], segments[:, 3] - segments[:, 2], segments[:, 5] - segments[:, 4]
    pairs = torch.where(causal > 0, queries * (queries + 1) // 2, queries * keys).sum()
    assert pairs == (layout.length * layout.path_start + layout.length * (layout.length + 1) // 2).sum()
    return every


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_all_cases_on_all_numbers_of_ranks(worlds: Callable[[int], Ranks], num_ranks: int) -> None:
    assert_exact(worlds(num_ranks), CASES)
