"""Ranks that several test files share: starting them costs more than most of what they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """So many ranks, started when first asked for and kept up until the session ends."""
    started: dict[int, Ranks] = {}

    def world(num_ranks: int) -> Ranks:
        if num_ranks not in started:
            started[num_ranks] = Ranks(num_ranks, tmp_path_factory.mktemp("ranks"))
        return started[num_ranks]

    yield world
    for group in started.values():
        group.stop()


@pytest.fixture(params=[1, 3, 4])
def ranks(request: pytest.FixtureRequest, worlds: Callable[[int], Ranks]) -> Ranks:
    """A ring of two hides faults of order (the next rank is the one before), so nothing runs on two ranks alone."""
    return worlds(request.param)
