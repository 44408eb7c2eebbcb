"""Attention under context parallelism on 1 to 4 gloo ranks: every schedule against every row on its own, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from attention_reference import Site
from cp_workers import attention_errors
from ranks import Ranks
from row_reference import Batch, padded
from test_attention_parity import deep_batch

from augtree_fx import CostModel, TreeLayout, tables
from augtree_fx.dtensor_ops import tables as lane_tables
from augtree_fx.dtensor_ops.attention import SCHEDULES
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


def gathered_cases(cases: list[tuple[Site, str, str, int, int | None]], dense: int) -> list[dict[str, float]]:
    """As `attention_cases`, where keys are gathered whenever there are any, but those of large segments."""
    with mock.patch.object(lane_tables, "MOST_APART", 0), mock.patch.object(tables, "DENSE_PAIRS", dense):
        return attention_cases(cases)


@pytest.mark.parametrize("dense", [50, 1 << 40])
def test_gathered_keys(ranks: Ranks, dense: int) -> None:
    cases = covering([case for case in CASES if case[4] is None], ranks.num_ranks)
    for rank, found in enumerate(ranks.run(gathered_cases, cases, dense, seconds=120)):
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
    for rank in range(3):
        found = lane_tables.whole_path(Shards.of(layout, 3, min_chunk_tokens=1), rank)
        for keys in (found.own, *found.remote, *found.visiting):
            assert keys.direct.num_calls + keys.gathered.num_calls <= 2
            assert keys.gathered.num_calls == 1, "this tree is to gather"


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_all_cases_on_all_numbers_of_ranks(worlds: Callable[[int], Ranks], num_ranks: int) -> None:
    assert_exact(worlds(num_ranks), CASES)
