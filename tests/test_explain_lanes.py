"""What `explain` prints of lanes: ranks that are no neighbours, who moves for prompts, budgets, pooled rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from cp_workers import model_and_truth, parallel_model
from ranks import Ranks

import augtree_fx
from augtree_fx import TreeLayout
from augtree_fx.dtensor_ops.lanes import LanePlan
from augtree_fx.explain import _span


def odd_and_even(layout: TreeLayout, num_ranks: int, *, wave_tokens: int | None = None) -> list[LanePlan]:
    """Every second rank in one lane, the others in another, which says little."""
    rows = range(layout.num_rows)
    return [
        LanePlan(tuple(range(0, num_ranks, 2)), tuple(rows[::2]), "move_q", wave_tokens, "gather_kv"),
        LanePlan(tuple(range(1, num_ranks, 2)), tuple(rows[1::2]), None),
    ]


def explained(wave_tokens: int | None, options: dict[str, str]) -> str:
    plain, batch, _ = model_and_truth("llama", 2, "right")
    model = parallel_model(plain, lanes=partial(odd_and_even, wave_tokens=wave_tokens), **options)
    with torch.no_grad():
        return str(augtree_fx.explain(model, **batch.inputs()))


@pytest.mark.parametrize(
    ("ranks", "said"), [((3,), "3"), ((0, 1, 2), "0 to 2"), ((0, 2), "0, 2"), ((0, 1, 2, 5, 7, 8), "0 to 2, 5, 7 to 8")]
)
def test_ranks_of_a_lane(ranks: tuple[int, ...], said: str) -> None:
    assert _span(ranks) == said


def test_what_is_said_of_lanes(worlds: Callable[[int], Ranks]) -> None:
    ours = "of this rank's own rows: lanes are chosen in forward, for those of all ranks"
    for shown in worlds(3).run(explained, 7, {}):
        first, second = lines_of(shown)
        assert first.startswith("0, 2 ") and first.endswith("7 tokens")
        assert "move_q" in first and "gather_kv" in first and "of prompts before waves" in shown
        assert second.startswith("1 ") and "by size" in second and "the same" in second and second.endswith("all")
        assert ours not in shown
    for shown in worlds(3).run(explained, 7, {"memory": "2MiB", "rows": "pooled"}):
        first, second = lines_of(shown)
        assert first.endswith("7 tokens, or what memory='2MiB' holds")
        assert second.endswith("all, or what memory='2MiB' holds") and ours in shown


def lines_of(shown: str) -> list[str]:
    """Of the two lanes, without the padding of numbers in front."""
    table = shown[shown.index("context parallelism") :].splitlines()
    return [line.strip() for line in table[3:5]]
