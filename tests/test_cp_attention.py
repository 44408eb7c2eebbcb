"""Attention under context parallelism on 1 to 4 gloo ranks: every schedule against every row on its own, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attention_reference import Site
from cp_workers import attention_errors
from ranks import Ranks
from row_reference import Batch, padded
from test_attention_parity import deep_batch

from augtree_fx.dtensor_ops.attention import SCHEDULES

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


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_all_cases_on_all_numbers_of_ranks(worlds: Callable[[int], Ranks], num_ranks: int) -> None:
    assert_exact(worlds(num_ranks), CASES)
