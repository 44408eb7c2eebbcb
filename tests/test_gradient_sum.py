"""Sums of what calls give to ranges of a gradient, against float64, and calls side by side on CUDA streams.

Every torch.empty is NaN (deterministic mode fills it), so a row that nobody wrote shows.
"""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from augtree_fx import streams as streams_module
from augtree_fx.streams import Lanes
from augtree_fx.tree_attention import Sum

ROWS, WIDTH = 12, (2, 4)


@pytest.fixture(autouse=True)
def poison_empty_tensors() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


RANGES = {
    "nothing": [],
    "one piece": [(0, 12)],
    "one piece, rows left over": [(3, 7)],
    "neighbours": [(0, 5), (5, 12)],
    "two pieces": [(0, 12), (4, 9)],
    "two pieces, the wide one last": [(4, 9), (0, 12)],
    "two pieces that overlap": [(0, 8), (5, 12)],
    "three pieces, two at most in a row": [(0, 6), (2, 9), (6, 11)],
    "three pieces": [(0, 12), (0, 6), (3, 9)],
    "four pieces": [(0, 12), (0, 6), (3, 9), (5, 6)],
    "six pieces of the same rows": [(2, 5)] * 6,
    "an empty piece": [(0, 12), (4, 4), (4, 9)],
}


def numbers(rows: int) -> Tensor:
    """Eight significant bits at exponents nine apart: bfloat16 holds them, float32 holds sums of dozens exactly."""
    shape = (rows, *WIDTH)
    return torch.randint(-255, 256, shape) * 2.0 ** torch.randint(-9, 1, shape)


Summed = tuple[Tensor, Tensor, list[bool]]  # the sum, the same in float64, and which pieces were written in place


def summed(
    ranges: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    *,
    in_place: Callable[[int], bool] = lambda number: True,
    given_dtype: torch.dtype | None = None,
    index: Tensor | None = None,
    size: int = ROWS,
) -> Summed:
    """Sum of random pieces; those for which ``in_place`` says so are written where the sum wants them."""
    torch.manual_seed(len(ranges))
    total = Sum(torch.empty(ROWS, *WIDTH, dtype=dtype), [slice(*bounds) for bounds in ranges])
    truth, there = torch.zeros(ROWS, *WIDTH, dtype=torch.float64), []
    for number, (begin, end) in enumerate(ranges):
        piece = numbers(end - begin).to(dtype).to(given_dtype or dtype)
        truth[begin:end] += piece.double()
        place = total.place(0)
        assert place.shape == piece.shape and place.dtype == dtype
        there.append(place.untyped_storage().data_ptr() == total._result.untyped_storage().data_ptr())
        total.add(place.copy_(piece) if in_place(number) else piece)
    result = total.total(index, size)
    if index is not None:
        truth = torch.zeros(size, *WIDTH, dtype=torch.float64).index_add_(0, index, truth)
    assert result.dtype == dtype and result.shape == truth.shape and result.is_contiguous()
    return result, truth, there


def assert_rounded_once(result: Tensor, truth: Tensor) -> None:
    """The sum is exact (see `numbers`) but for one rounding to its dtype."""
    assert torch.equal(result, truth.to(result.dtype))


IN_PLACE = {"in place": lambda number: True, "beside": lambda number: False, "mixed": lambda number: number % 2 == 0}


@pytest.mark.parametrize("where", IN_PLACE)
@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_sum_of_pieces(ranges: str, where: str, dtype: torch.dtype) -> None:
    result, truth, _ = summed(RANGES[ranges], dtype, in_place=IN_PLACE[where])
    assert_rounded_once(result, truth)
    covered = {row for bounds in RANGES[ranges] for row in range(*bounds)}
    assert not result[[row for row in range(ROWS) if row not in covered]].any()


@pytest.mark.parametrize("where", IN_PLACE)
@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sum_onto_indexed_rows(ranges: str, where: str, dtype: torch.dtype) -> None:
    """Gathered keys: several rows of the sum belong to one, some to none; rounded once, after all is added."""
    index = torch.tensor([0, 3, 3, 1, 1, 1, 6, 0, 5, 3, 6, 6])
    result, truth, _ = summed(RANGES[ranges], dtype, in_place=IN_PLACE[where], index=index, size=8)
    assert_rounded_once(result, truth)
    assert not result[[2, 4, 7]].any()


@pytest.mark.parametrize("ranges", ["one piece", "two pieces", "three pieces", "six pieces of the same rows"])
def test_pieces_in_a_wider_dtype(ranges: str) -> None:
    """A kernel may give float32 for bfloat16."""
    result, truth, _ = summed(RANGES[ranges], torch.bfloat16, in_place=lambda number: False, given_dtype=torch.float32)
    assert_rounded_once(result, truth)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(sorted).map(tuple), max_size=6),
    st.integers(0, 63),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.booleans(),
)
def test_sum_of_any_pieces(ranges: list[tuple[int, int]], chosen: int, dtype: torch.dtype, gathered: bool) -> None:
    index = torch.arange(ROWS) % 5 if gathered else None
    size = 6 if gathered else ROWS
    result, truth, _ = summed(ranges, dtype, in_place=lambda number: bool(chosen >> number & 1), index=index, size=size)
    assert_rounded_once(result, truth)


@pytest.mark.parametrize(
    ("ranges", "there"),
    [
        ("one piece", [True]),
        ("neighbours", [True, True]),
        ("two pieces", [True, False]),
        ("two pieces, the wide one last", [True, False]),
        ("two pieces that overlap", [True, False]),
        ("three pieces, two at most in a row", [True, False, False]),
        ("three pieces", [False] * 3),  # a wide sum rounds them once
    ],
)
def test_which_pieces_are_written_into_the_sum(ranges: str, there: list[bool]) -> None:
    assert summed(RANGES[ranges], torch.bfloat16)[2] == there


def test_two_narrow_pieces_round_once() -> None:
    """1 + 2^-8 is halfway between two numbers of bfloat16, of which it takes the even one; a third piece decides."""
    half = 2.0**-8
    for values, expected in (((1.0, half), 1.0), ((1.0, half * 1.5), 1 + 2 * half), ((1.0, half, half), 1 + 2 * half)):
        total = Sum(torch.empty(1, dtype=torch.bfloat16), [slice(0, 1)] * len(values))
        for value in values:
            total.add(total.place(0).fill_(value))
        assert total.total().item() == expected


def test_lanes_on_the_cpu_do_nothing() -> None:
    lanes, ran = Lanes(torch.device("cpu"), 5), []
    for number in range(5):
        with lanes.next():
            ran.append(number)
    lanes.join()
    assert ran == list(range(5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_lanes_are_ordered_around_what_runs_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow writes before, in and after the lanes: each lane sees what came before, and the sum sees all lanes."""
    monkeypatch.setattr(streams_module, "_MOST", 3)
    lanes_used, repeated = 7, 20
    slow = torch.randn(2048, 2048, device="cuda")
    for attempt in range(repeated):
        source = torch.zeros(1 << 20, device="cuda")
        parts = [torch.empty_like(source).fill_(torch.nan) for _ in range(lanes_used)]
        for _ in range(4):
            slow @ slow
        source += attempt + 1
        lanes, streams = Lanes(source.device, lanes_used), set()
        for number, part in enumerate(parts):
            with lanes.next():
                streams.add(torch.cuda.current_stream().cuda_stream)
                for _ in range(3):
                    slow @ slow
                part.copy_(source).mul_(number)
        lanes.join()
        total = torch.stack(parts).sum(0)
        source.fill_(torch.nan)  # after the lanes' reads
        assert len(streams) == 3 and torch.cuda.current_stream().cuda_stream in streams
        assert bool((total == (attempt + 1) * sum(range(lanes_used))).all())
