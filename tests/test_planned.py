"""A planner's lanes in the words of the runtime: every row in one lane, every rank too, as the plan says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from augtree_fx import Planner, ReplayShape, TreeLayout
from augtree_fx.dtensor_ops.lanes import check_lanes
from augtree_fx.planned import PlannedLanes, rows_of
from augtree_fx.planner import model_shape

LENGTHS = st.tuples(st.integers(1, 5000), st.lists(st.integers(0, 3000), max_size=5))


def layout_of(groups: list[tuple[int, list[int]]]) -> TreeLayout:
    prompts = [[number] * prompt for number, (prompt, _) in enumerate(groups)]
    responses = [[[100 + place] * length for place, length in enumerate(group)] for _, group in groups]
    return TreeLayout.from_groups(prompts, responses)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(LENGTHS, min_size=1, max_size=5), st.sampled_from([1, 2, 3, 4, 8]))
def test_every_row_is_in_the_lane_that_has_its_branch(groups: list[tuple[int, list[int]]], ranks: int) -> None:
    layout = layout_of([*groups, (7, [3])])  # a batch has a row
    chosen = PlannedLanes(Planner("h200"), model_shape("Qwen3-0.6B"))
    lanes = chosen(layout, ranks)
    check_lanes(lanes, ranks, layout.num_rows)
    plan = chosen.last
    assert plan is not None and [lane.ranks for lane in plan.lanes] == [lane.ranks for lane in lanes]
    if plan.reuse:
        for lane, rows in zip(plan.lanes, rows_of(plan, layout), strict=True):
            replayed = {node for part in lane.parts for node in part.branches}
            ends = {int(layout.row_node[row]) for row in rows if layout.row_node[row] >= 0}
            assert ends & {node for node in range(layout.num_nodes) if layout.level[node]} <= replayed


def test_equal_batches_have_one_plan_and_passes_without_gradients_their_own() -> None:
    layout = layout_of([(4000, [1000, 900, 1100])])
    chosen = PlannedLanes(Planner("h200"), model_shape("Qwen3-8B"))
    first = chosen.plan(layout, 8)
    assert chosen.plan(layout, 8) is first
    with torch.no_grad():
        assert chosen.plan(layout, 8) is not first
    assert first.batch == ReplayShape.from_layout(layout).bucketed() or not first.reuse


def test_waves_of_a_plan_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    layout = layout_of([(60_000, [60_000] * 24)])
    chosen = PlannedLanes(Planner("h200"), model_shape("Qwen3-8B"))
    for _ in range(2):
        chosen(layout, 4)
    said = [record for record in caplog.records if "waves, which one forward runs in one pass" in record.message]
    assert chosen.last is not None and (chosen.last.num_waves > 1 or chosen.last.num_rounds > 1) and len(said) == 1
