"""Prices of uneven ranks against the shards that the runtime makes of the same tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from planner_shapes import SMALL

from augtree_fx import CostModel, TreeLayout
from augtree_fx.dtensor_ops.shards import Shards
from augtree_fx.dtensor_ops.tables import whole_path
from augtree_fx.examples.bench.plan_cases import draw, group
from augtree_fx.planner import Execution, Planner, ReplayShape, Schedule
from augtree_fx.planner.alternatives import alternatives
from augtree_fx.planner.host import num_calls
from augtree_fx.planner.rank_work import lane_pass
from augtree_fx.planner.terms import linear_us

BATCHES: dict[str, list[Any]] = {
    "even": [group(4096, 8, 300)],
    "fewer branches than ranks": [group(2048, 3, 700)],
    "a branch longer than a share": [group(1024, [9000, 300, 200])],
    "a short prompt": [group(700, [900, 800, 100, 90, 80])],
    "several trees": [group(4096, 4, 500), group(300, [400, 100]), group(2500, 3, 1000)],
    "three levels": [[4096, [[1024, [512] * 3], [600, [512] * 2], 700]]],
}


@pytest.mark.parametrize("trees", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_prices_deal_as_shards_do(trees: list[Any], ranks: int) -> None:
    """Tokens of the fullest rank, and keys that move from it, to the token; the price of the lane follows the first."""
    rows = draw(trees, 1 << 16)
    layout = TreeLayout.from_padded(rows.input_ids, rows.attention_mask, costs=CostModel.free())
    shards = Shards.of(layout, ranks)
    planner = Planner("h200", execution=Execution(shard_weights=False), bucketed=False)
    costs = planner.costs(SMALL, world_size=ranks)
    plan = alternatives(ReplayShape.from_layout(layout), costs)[f"1 x {ranks}, gather_kv"]
    counted = lane_pass(plan, plan.lanes[0], number=0, wave=0, prefills=True)
    tokens = counted.prompt_tokens + counted.branch_tokens
    held = np.bincount(shards.rank, shards.length, ranks)
    assert sorted(tokens) == pytest.approx(sorted(held), abs=2)  # bounds of chunks are whole tokens there
    assert counted.kv_tokens[0] >= whole_path(shards, 0, "gather_kv").sizes.keys - 2
    fullest_us = float(linear_us(np.array(tokens.max()), 1, costs))
    assert plan.lanes[0].terms["linear_us"] == pytest.approx(fullest_us, rel=0.05)  # rates are those of the mean


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_calls_of_a_rank_are_counted(ranks: int) -> None:
    """Of a group: as many calls as the fullest rank makes, with gathered keys at most as many."""
    for trees, exact in (([group(16384, 8, 1024)], True), ([group(8192, 8, 512)] * 3, False)):
        rows = draw(trees, 1 << 16)
        layout = TreeLayout.from_padded(rows.input_ids, rows.attention_mask, costs=CostModel.free())
        shards = Shards.of(layout, ranks)
        for schedule in (Schedule.ROTATE_KV, Schedule.GATHER_KV):
            found = []
            for rank in range(ranks):
                tables = whole_path(shards, rank, schedule.value)
                found.append(sum(calls.num_calls for keys in (tables.own, *tables.remote) for calls in keys))
            predicted = num_calls(ranks, 2, schedule)
            rotates = schedule is Schedule.ROTATE_KV
            assert max(found) == predicted if exact and rotates else max(found) <= predicted
