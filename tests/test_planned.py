"""A planner's lanes in the words of the runtime: every row in one lane, every rank too, as the plan says."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

import augtree_fx
from augtree_fx import CostModel, ModelShape, Planner, ReplayShape, TreeLayout
from augtree_fx.dtensor_ops.lanes import check_lanes
from augtree_fx.planned import PlannedLanes, _tokens_of, rows_of
from augtree_fx.planner import Execution, model_shape
from augtree_fx.planner.memory import MemoryModel
from augtree_fx.transforms import find_stack
from augtree_fx.transforms.install import STATE

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


def test_lanes_have_the_waves_of_the_plan() -> None:
    layout = layout_of([(60_000, [60_000] * 24)])
    chosen = PlannedLanes(Planner("h200"), model_shape("Qwen3-8B"))
    lanes = chosen(layout, 4)
    plan = chosen.last
    assert plan is not None and (plan.num_waves > 1 or plan.num_rounds > 1)
    memory = MemoryModel.of(plan.costs)
    for lane in lanes:
        assert lane.wave_tokens is not None
        rows = list(lane.rows)
        prompts = 60_000 * len({int(layout.parent[layout.row_node[row]]) for row in rows})
        peak = memory.peak_bytes(prompts, max(lane.wave_tokens, 60_000), len(lane.ranks), waved=True)
        assert peak <= memory.limit_bytes or lane.wave_tokens == 1, lane


@pytest.mark.parametrize("prompt", [8, 600])
def test_one_rank_runs_in_waves_that_fit(prompt: int) -> None:
    """Memory for the prompt and some branches: waves of so many, and the gradients of the plain model.

    With the long prompt that is what the plan does; with the short one it takes rows by themselves, one after another,
    which one forward does not.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64,
        num_hidden_layers=2,
    )  # fmt: skip
    plain = Qwen3ForCausalLM(config)
    rows = torch.cat([torch.randint(64, (1, prompt)).expand(8, -1), torch.randint(64, (8, 32))], 1)
    rows[:, prompt] = torch.arange(8)
    execution = Execution(checkpointing=False, state_bytes_per_weight=2.0, usable_memory=1.0)
    planner = Planner("cpu", execution=execution, bucketed=False)
    memory = MemoryModel.of(planner.costs(ModelShape.from_model(plain), world_size=1))
    limit = memory.peak_bytes(prompt, 128, 1, waved=True)
    planner.hardware = replace(planner.hardware, memory_bytes=int(limit))
    model = augtree_fx.transform(copy.deepcopy(plain), planner=planner, costs=CostModel.free())
    for each in (plain, model):
        each(rows, labels=rows).loss.backward()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6)
    explained = augtree_fx.explain(model, rows)
    assert explained.planned is not None and "predicted:" in str(explained)
    assert (explained.planned.num_waves > 1) == explained.planned.reuse == (prompt == 600)
    state = getattr(find_stack(model), STATE)
    branches = state.planned.wave_tokens(explained.layout) // 32
    assert 1 <= branches < 8 and state.trained.waves == -(-8 // branches)
    with augtree_fx.prefill(model, explained.layout, on_unused="skip") as tree:
        assert len(list(tree.waves())) == -(-8 // branches)
    augtree_fx.transform(model, planner=Planner("h200"), costs=CostModel.free())
    model(rows, labels=rows)
    assert getattr(find_stack(model), STATE).trained.waves == 0


def small_machine(inner: int, leaf: int) -> PlannedLanes:
    """A planner of a machine on which so many prompt and branch tokens fit beside the model."""
    planner, model = Planner("h200", bucketed=False), model_shape("Qwen3-0.6B")
    memory = MemoryModel.of(planner.costs(model, world_size=1))
    limit = float(memory.peak_bytes(inner, leaf, 1, waved=True))
    planner.hardware = replace(planner.hardware, memory_bytes=int(limit / planner.execution.usable_memory) + 1)
    return PlannedLanes(planner, model)


def test_waves_fit_beside_the_prompts() -> None:
    chosen = small_machine(800, 3000)
    found = chosen.wave_tokens(layout_of([(800, [300] * 32)]))
    assert chosen.last is not None and found is not None and 300 <= found < 3200
    memory = MemoryModel.of(chosen.last.costs)
    assert memory.peak_bytes(800, found, 1, waved=True) <= memory.limit_bytes
    assert chosen.wave_tokens(layout_of([(800, [30] * 4)])) is None


def test_prompts_without_room_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    chosen, layout = small_machine(800, 0), layout_of([(800, [5, 6])] * 8)
    assert [chosen.wave_tokens(layout) for _ in range(2)] == [1, 1]
    assert chosen.wave_tokens(layout_of([(800, [5, 6])] * 9)) == 1  # longer, and no news
    said = [record for record in caplog.records if "leave no memory for a response" in record.message]
    assert chosen.last is not None and len(said) == 1 and "6400 prompt tokens" in said[0].message


def test_a_planner_leaves_nothing_else_to_choose() -> None:
    with pytest.raises(ValueError, match="pass none of lanes=, schedule=, max_wave_tokens= and memory="):
        augtree_fx.transform(torch.nn.Linear(1, 1), planner=Planner(), max_wave_tokens=5)


def test_lanes_follow_rows_that_lie_elsewhere() -> None:
    """Equal trees have one plan; its lanes are kept for batches whose rows lie alike, and no others."""
    responses = [[100 + place] * length for place, length in enumerate([900, 20, 700, 310])]
    rows = [[number] * 400 + response for number in range(3) for response in responses]
    chosen = PlannedLanes(Planner("h200"), model_shape("Qwen3-8B"))
    together, plans = list(range(12)), []
    apart = [group * 4 + place for place in range(4) for group in range(3)]
    for order in (together, apart, together):
        tokens = [torch.tensor(rows[row]) for row in order]
        padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=-1)
        layout = TreeLayout.from_padded(padded.clamp(min=0), (padded >= 0).long(), costs=CostModel.free())
        lanes = chosen(layout, 4)
        check_lanes(lanes, 4, 12)
        plans.append((chosen.last, lanes, [sorted(order[row] for row in lane.rows) for lane in lanes]))
    assert plans[0][0] is plans[1][0] is plans[2][0]
    assert plans[0][1] == plans[2][1] != plans[1][1]
    assert plans[0][2] == plans[1][2]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(LENGTHS, min_size=1, max_size=5), st.lists(st.integers(0, 2), min_size=26, max_size=26))
def test_tokens_of_a_lane_are_those_of_its_paths(groups: list[tuple[int, list[int]]], lanes: list[int]) -> None:
    layout = layout_of([*groups, (7, [3])])
    lane_of_row = np.array(lanes[: layout.num_rows])
    inner, leaf = _tokens_of(layout, lane_of_row, 3)
    for lane in range(3):
        ends = {int(node) for node in layout.row_node[lane_of_row == lane]} - {-1}
        above = {int(layout.parent[node]) for node in ends} - {-1}  # in two levels
        assert inner[lane] == layout.length[sorted(above)].sum()
        assert leaf[lane] == layout.length[sorted(ends - above)].sum()
