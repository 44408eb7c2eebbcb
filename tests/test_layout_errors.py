"""What a layout refuses, and in which words: the rule, the value, the way out."""

import re
from collections.abc import Callable

import pytest
import torch

from augtree_fx import CostModel, TreeLayout

IDS = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]])
ONES = torch.ones_like(IDS)
HOLE = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1]])
DOWN = torch.tensor([[0, 1, 2, 3], [4, 5, 3, 4]])


def padded(*arguments: torch.Tensor | None) -> Callable[[], TreeLayout]:
    return lambda: TreeLayout.from_padded(*arguments)


def packed(*arguments: torch.Tensor | None) -> Callable[[], TreeLayout]:
    return lambda: TreeLayout.from_packed(*arguments)


def groups(prompts: list, responses: list) -> Callable[[], TreeLayout]:
    return lambda: TreeLayout.from_groups(prompts, responses)


def ends(*bounds: float) -> torch.Tensor:
    return torch.tensor(bounds)


@pytest.mark.parametrize(
    ("construct", "error", "text"),
    [
        (padded(IDS[:0]), ValueError, r"the batch is empty: input_ids has shape \(0, 4\)"),
        (padded(IDS[:, :0]), ValueError, r"the batch is empty: input_ids has shape \(2, 0\)"),
        (padded(IDS[0]), ValueError, r"input_ids must be \[batch, sequence\], got shape \(4,\)"),
        (padded(IDS.float()), TypeError, r"input_ids must be integers, got torch\.float32"),
        (padded(IDS.bool()), TypeError, r"input_ids must be integers, got torch\.bool"),
        (
            padded(IDS, HOLE),
            ValueError,
            r"one run of ones in each row, row 1 has a hole at column 2; remove the masked",
        ),
        (padded(IDS, ONES[:1]), ValueError, r"attention_mask must have the shape of input_ids \(2, 4\), got \(1, 4\)"),
        (
            padded(IDS, ONES[:, :3]),
            ValueError,
            r"attention_mask must have the shape of input_ids \(2, 4\), got \(2, 3\)",
        ),
        (padded(IDS, ONES[0]), ValueError, r"attention_mask must have the shape of input_ids \(2, 4\), got \(4,\)"),
        (
            padded(IDS, ONES[None]),
            ValueError,
            r"attention_mask must have the shape of input_ids \(2, 4\), got \(1, 2, 4\)",
        ),
        (padded(IDS, None, ONES[:, :2]), ValueError, r"position_ids must have the shape .* \(2, 4\), got \(2, 2\)"),
        (
            padded(IDS, None, DOWN),
            ValueError,
            r"must not decrease inside a row, row 1 goes from 5 to 3 at token 2; pass",
        ),
        (padded(IDS, None, DOWN - 1), ValueError, r"position_ids must not be negative, got -1"),
        (padded(IDS, ONES.to("meta")), ValueError, r"one device, got input_ids on cpu, attention_mask on meta; move"),
        (
            padded(IDS, None, ONES.to("meta")),
            ValueError,
            r"one device, got input_ids on cpu, position_ids on meta; move",
        ),
        (packed(IDS), ValueError, r"packed rows need position_ids that restart, or cu_seq_lens; got neither"),
        (packed(IDS[:, :0], None, ends(0, 0)), ValueError, r"the batch is empty: input_ids has shape \(2, 0\)"),
        (packed(IDS.double(), None, ends(0, 8)), TypeError, r"input_ids must be integers, got torch\.float64"),
        (packed(IDS[None], None, ends(0, 8)), ValueError, r"\[batch, sequence\], got shape \(1, 2, 4\)"),
        (packed(IDS, IDS[:, :3]), ValueError, r"position_ids must have the shape of input_ids \(2, 4\), got \(2, 3\)"),
        (packed(IDS, IDS.to("meta")), ValueError, r"one device, got input_ids on cpu, position_ids on meta; move"),
        (packed(IDS, None, ends(0, 4)), ValueError, r"cu_seq_lens must grow from 0 to 8 tokens, got \[0, 4\]"),
        (packed(IDS, None, ends(1, 8)), ValueError, r"cu_seq_lens must grow from 0 to 8 tokens, got \[1, 8\]"),
        (
            packed(IDS, None, ends(0, 5, 4, 8)),
            ValueError,
            r"cu_seq_lens must grow from 0 to 8 tokens, got \[0, 5, 4, 8\]",
        ),
        (packed(IDS, None, ends(8)), ValueError, r"cu_seq_lens must grow from 0 to 8 tokens, got \[8\]"),
        (
            packed(IDS, None, ends(0, 8)[None]),
            ValueError,
            r"cu_seq_lens must grow from 0 to 8 tokens, got \[\[0, 8\]\]",
        ),
        (groups([[1]], []), ValueError, r"each prompt needs a list of responses, got 1 prompts, 0 lists"),
        (groups([], []), ValueError, r"there is no group: give at least one prompt with one response"),
        (groups([[1]], [[]]), ValueError, r"there is no group: give at least one prompt with one response"),
        (groups([[1], []], [[[2]], [[3]]]), ValueError, r"a prompt must have at least one token, prompt 1 is empty"),
    ],
)
def test_refusals(construct: Callable[[], TreeLayout], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        construct()


@pytest.mark.parametrize("ids", [[[1], [1 + 2**32]], [[-100], [5]]], ids=["wide", "negative"])
def test_token_ids_are_kept_or_refused(ids: list[list[int]]) -> None:
    try:
        layout = TreeLayout.from_padded(torch.tensor(ids), costs=CostModel.free())
    except ValueError as error:
        assert "input_ids" in str(error)
    else:
        assert sorted(layout.input_ids.tolist()) == sorted(token for row in ids for token in row)


@pytest.mark.parametrize("token", [1 + 2**32, -100], ids=["wide", "negative"])
def test_token_ids_of_groups_are_kept_or_refused(token: int) -> None:
    for prompt, response in ((token, 5), (5, token)):
        try:
            layout = TreeLayout.from_groups([[prompt]], [[[response]]])
        except ValueError as error:
            assert re.search("prompt|response", str(error))
        else:
            assert layout.input_ids.tolist() == [prompt, response]


def test_positions_that_do_not_fit_are_not_called_negative() -> None:
    with pytest.raises(ValueError, match=f"position_ids .*{2**31 + 5}"):
        TreeLayout.from_padded(IDS, None, torch.tensor([[0, 1, 2, 2**31 + 5]]))


@pytest.mark.parametrize(
    "construct",
    [
        groups([[1.5, 2.5]], [[[3.5]]]),
        groups([torch.tensor([1.5])], [[[3]]]),
        groups([[1]], [[torch.tensor([2.5])]]),
        groups([[[1, 2]]], [[[3]]]),
        groups([[1]], [[3]]),
        groups([IDS[0].to("meta")], [[[3]]]),
    ],
    ids=["floats", "float prompt", "float response", "nested prompt", "flat responses", "device without data"],
)
def test_groups_of_something_else_are_refused_by_name(construct: Callable[[], TreeLayout]) -> None:
    with pytest.raises((TypeError, ValueError), match="prompt|response"):
        construct()


@pytest.mark.parametrize(
    "construct",
    [
        packed(IDS, None, ends(0, 3.5, 8)),
        packed(IDS, None, torch.tensor(8)),
        packed(IDS, None, ends(0, 6, 8)),  # the first sequence would start in one long row and end in the next
    ],
    ids=["float", "scalar", "across rows"],
)
def test_cu_seq_lens_that_cannot_be_meant(construct: Callable[[], TreeLayout]) -> None:
    with pytest.raises((TypeError, ValueError), match="cu_seq_lens"):
        construct()


def test_fractional_positions_are_refused() -> None:
    with pytest.raises((TypeError, ValueError), match="position_ids"):
        TreeLayout.from_padded(IDS, None, torch.tensor([[0.0, 0.4, 0.8, 1.2]]))


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_has_at_least_the_token_itself(window: int) -> None:
    with pytest.raises(ValueError, match=f"window .*{window}"):
        TreeLayout.from_padded(IDS).tables(window)
