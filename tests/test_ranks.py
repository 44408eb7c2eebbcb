"""The watchdog of distributed tests: a rank that raises, dies or hangs ends the call, and the next call works."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from ranks import Ranks
from torch import distributed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    group = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield group
    group.stop()


def rank_sum() -> float:
    total = torch.tensor(distributed.get_rank() + 1.0)
    distributed.all_reduce(total)
    return total.item()


def fail_on_rank_1(how: str) -> None:
    if distributed.get_rank() == 1:
        if how == "raise":
            raise RuntimeError("told to")
        if how == "exit":
            raise SystemExit
        time.sleep(60)
    distributed.barrier()


@pytest.mark.parametrize(
    ("how", "seconds", "said"),
    [("raise", 30, "RuntimeError: told to"), ("exit", 30, "died"), ("hang", 0.5, "did not answer in time")],
)
def test_a_rank_that_fails_ends_the_call(ranks: Ranks, how: str, seconds: float, said: str) -> None:
    assert ranks.run(rank_sum) == [3.0, 3.0]
    with pytest.raises(AssertionError, match=f"(?s)fail_on_rank_1: .*rank 1 of 2: .*{said}"):
        ranks.run(fail_on_rank_1, how, seconds=seconds)
