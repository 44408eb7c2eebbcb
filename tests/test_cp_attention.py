"""Attention under context parallelism on 1 to 4 gloo ranks: every schedule against every row on its own, in float64.

A ring of two hides faults of order (the next rank is the one before), so nothing runs on two ranks alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from attention_reference import Site
from cp_workers import attention_errors
from ranks import Ranks
from row_reference import Batch, padded
from test_attention_parity import deep_batch

from augtree_fx.dtensor_ops.attention import SCHEDULES

EXACT = 1e-10  # sums of some hundred terms in another order


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    group = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    yield group
    group.stop()


def groups(*, long_branch: bool = False) -> Batch:
    """Two groups on prompts of unequal length, one row that shares nothing; one branch may be longer than a share."""
    first, second = [7] * 13, [8, 9] * 10
    rows = [first + [number] * length for number, length in enumerate((4, 5, 1, 3), start=1)]
    rows += [second + [number] * length for number, length in enumerate((6, 2, 60 if long_branch else 9), start=1)]
    rows += [[6] * 11]
    width = max(map(len, rows)) + 1
    return padded(rows, [0] * len(rows), width, "column")


BATCHES = {"groups": groups, "long branch": lambda: groups(long_branch=True), "deep": deep_batch}


def assert_exact(found: list[dict[str, float]]) -> None:
    for rank, errors in enumerate(found):
        assert {"out", "lse", "q", "k", "v"} <= set(errors)
        assert max(errors.values()) <= EXACT, f"rank {rank}: {errors}"


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_whole_paths(ranks: Ranks, batch: str, schedule: str) -> None:
    at = Site(sinks=True, softcap=3.0, v_head_dim=6)
    assert_exact(ranks.run(attention_errors, at, BATCHES[batch](), schedule))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_chunks_that_are_not_cut_off(ranks: Ranks, schedule: str) -> None:
    """Short nodes lie on one rank whole, so some ranks have no key that others read."""
    assert_exact(ranks.run(attention_errors, Site(), deep_batch(), schedule, 4))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("window", [1, 6, 1000])
def test_windows(ranks: Ranks, batch: str, window: int) -> None:
    at = Site(sinks=True, window=window)
    assert_exact(ranks.run(attention_errors, at, BATCHES[batch](), SCHEDULES[0], 1, window))
