"""Predictions against what was measured, against each other, and against the simulation, which counts on its own."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_shapes import BIG, SMALL, forests

from augtree_fx.planner import Execution, ModelShape, Plan, Planner, ReplayShape
from augtree_fx.planner.alternatives import alternatives
from augtree_fx.planner.known_models import CONFIGS
from augtree_fx.planner.loads import loads_of
from augtree_fx.planner.memory import MemoryModel
from augtree_fx.planner.placement import placements
from augtree_fx.planner.pricing import bounds, refine
from augtree_fx.planner.profiles import profile
from augtree_fx.planner.rank_work import lane_pass
from augtree_fx.planner.simulate import simulate
from augtree_fx.planner.units import branches_of
from augtree_fx.planner.work import SUMS, causal_pairs

RESULTS = Path(__file__).resolve().parents[1] / "examples" / "results" / "2026-11-29-step-h200.md"
ROW = re.compile(
    r"\| ([\d.]+B)(?: \((\d+) of 36 layers\))? \| (on|off) \| (\d+) \+ (\d+) x (\d+) \| ([\d,]+) ms, ([\d.]+)"
)


def measured() -> Iterator[tuple[float, float, float, float]]:
    """Predicted and measured ms and GiB of every update step in the table: one H200, Qwen3, bf16, no optimizer."""
    for line in RESULTS.read_text().splitlines():
        found = ROW.match(line)
        if not found:
            continue
        name, layers, checkpointing, prompt, branches, response, ms, gib = found.groups()
        config = CONFIGS[f"Qwen/Qwen3-{name}"] | ({"num_hidden_layers": int(layers)} if layers else {})
        execution = Execution(checkpointing=checkpointing == "on", state_bytes_per_weight=2.0, usable_memory=1.0)
        shape = ReplayShape.from_groups([int(prompt)], [[int(response)] * int(branches)])
        plan = Planner("h200", execution=execution).plan(shape, ModelShape.from_config(config), world_size=1)
        yield plan.total_us / 1e3, float(ms.replace(",", "")), _single(plan), float(gib)


def _single(plan: Plan) -> float:
    """Predicted GiB, nan where the plan has waves: the table's steps ran in one pass."""
    return plan.memory_bytes / 2**30 if plan.num_waves == 1 else float("nan")


def test_steps_of_one_h200_are_predicted() -> None:
    """28 shapes, to which one constant was fitted: median error under 2%, worst under 6%."""
    errors = [abs(predicted / seen - 1) for predicted, seen, _, _ in measured()]
    assert len(errors) == 28
    assert statistics.median(errors) < 0.02 and max(errors) < 0.06


def test_memory_of_one_h200_is_not_underestimated() -> None:
    """A plan that fits must fit: at most 10% below the measured peak, which `usable_memory` leaves free."""
    compared = [(predicted, seen) for _, _, predicted, seen in measured() if not math.isnan(predicted)]
    assert len(compared) >= 25
    for predicted, seen in compared:
        assert 0.9 * seen < predicted < max(1.3 * seen, seen + 5)


@given(st.integers(0, 300), st.one_of(st.none(), st.integers(1, 200)))
def test_causal_pairs(length: int, window: int | None) -> None:
    pairs = sum(min(position + 1, window or length) for position in range(length))
    assert causal_pairs(np.array(float(length)), window) == pairs


@settings(max_examples=30, deadline=None)
@given(forests(2000), st.sampled_from([1, 2, 4, 8]))
def test_simulation_is_near_the_closed_form(shape: ReplayShape, world: int) -> None:
    """Same kernel rates, other arithmetic: queues, transfers and uneven ranks may not change a step by half."""
    plan = Planner(bucketed=False, execution=Execution(shard_weights=False)).plan(shape, SMALL, world_size=world)
    simulated = simulate(plan)
    assert 0.5 * plan.total_us < simulated.total_us < 1.5 * plan.total_us
    assert 0 < simulated.busy <= 1 + 1e-9


def test_simulation_of_one_rank_is_the_closed_form() -> None:
    """Nothing moves and nothing waits: the two may differ by the merge alone."""
    shape = ReplayShape.from_groups([8192], [[1024] * 8])
    execution = Execution(state_bytes_per_weight=2.0)
    plan = Planner(bucketed=False, execution=execution).plan(shape, BIG, world_size=1)
    assert simulate(plan).total_us == pytest.approx(plan.total_us, rel=0.01)
    assert simulate(plan).busy == pytest.approx(1.0)


def test_ranks_have_all_the_pairs_of_a_lane() -> None:
    """Attention that is counted rank by rank adds up to the lane's; a long branch is cut, short ones are whole, or cut
    as well."""
    shape = ReplayShape.from_groups([40960], [[40000, 1000, 900]])
    plan = Planner(bucketed=False).plan(shape, BIG, world_size=4)
    (lane,) = plan.lanes
    assert lane.cut
    even = lane_pass(plan, lane, number=0, wave=0, prefills=True)
    assert even.branch_tokens.tolist() == [10475] * 4 and np.ptp(even.attention[0].own[0]) < 1e-6
    share = lane_pass(plan, replace(lane, cut=False), number=0, wave=0, prefills=True)
    assert sorted(share.branch_tokens) == [10000, 10000, 10900, 11000]
    assert share.prompt_tokens.tolist() == [10240] * 4 and share.kv_tokens == (20240,)
    own = share.attention[0].own[0]
    assert own[2] == own[3] < own[1] < own[0] < 1.01 * own[2]


@settings(max_examples=30, deadline=None)
@given(forests(4000), st.sampled_from([1, 3, 8]))
def test_loads_of_lanes_are_sums_over_their_units(shape: ReplayShape, world: int) -> None:
    """All placements, whatever they were cut into, unit by unit."""
    costs = Planner().costs(SMALL, world_size=world)
    tried = list(placements(shape, branches_of(shape), costs))
    loads, first = loads_of(tried), 0
    assert len(loads.degree) == sum(len(placement.lane_degrees) for placement in tried)
    for placement in tried:
        work = placement.family.work
        for lane, degree in enumerate(placement.lane_degrees.tolist(), first):
            units = np.flatnonzero(placement.lane_of_unit == lane - first)
            column = work.degrees.index(degree)
            for name in SUMS:
                share = degree if name == "own_us" else 1
                expected = sum(getattr(work, name)[units].tolist()) / share
                assert getattr(loads, name)[lane] == pytest.approx(expected, rel=1e-12)
            assert loads.longest_leaf[lane] == max([0.0, *work.longest_leaf[units].tolist()])
            assert loads.prefill_us[lane] == pytest.approx(work.prefill_us[units, column].sum(), rel=1e-12)
            assert loads.cross_us[:, lane] == pytest.approx(work.cross_us[:, units, column].sum(axis=1), rel=1e-12)
        first += len(placement.lane_degrees)


@settings(max_examples=30, deadline=None)
@given(forests(4000), st.sampled_from([2, 3, 8]), st.booleans())
def test_bounds_are_below_prices(shape: ReplayShape, world: int, cuts: bool) -> None:
    """Rounds, waves and uneven ranks only add time, or placements would be rejected that are the best."""
    costs = Planner(execution=Execution(shard_weights=False)).costs(SMALL, world_size=world)
    for bound in bounds(list(placements(shape, branches_of(shape), costs)), costs, reuse=True, cuts=cuts):
        refined = refine(bound, costs)
        assert refined is None or refined.total_us >= bound.total_us - 1e-3


def test_uneven_branches_are_priced() -> None:
    """A lane whose ranks hold one branch each, and one with fewer branches than ranks, too short to be cut."""
    planner = Planner(replace(profile("h200"), call_us=0.0), bucketed=False)  # no rank waits for its host
    even = planner.plan(ReplayShape.from_groups([4096], [[500] * 8]), BIG, world_size=8)
    uneven = planner.plan(ReplayShape.from_groups([4096], [[500] * 9]), BIG, world_size=8)
    assert uneven.total_us > 1.02 * even.total_us * 9 / 8


def test_windows_cut_attention_and_transfers() -> None:
    sizes = {**CONFIGS["Qwen/Qwen3-8B"], "sliding_window": 1024, "use_sliding_window": True}
    windowed = ModelShape.from_config(sizes)
    shape = ReplayShape.from_groups([131072], [[8192] * 8])
    full, cut = (
        alternatives(shape, Planner().costs(model, world_size=8))["1 x 8, gather_kv"] for model in (BIG, windowed)
    )
    full_terms, cut_terms = full.lanes[0].terms, cut.lanes[0].terms
    assert cut_terms["prefill_attention_us"] < full_terms["prefill_attention_us"] / 4
    assert cut_terms["linear_us"] == full_terms["linear_us"]
    assert simulate(cut).total_us < simulate(full).total_us


def test_experts_read_fewer_rows_each() -> None:
    """A token passes through 8 of 128 experts: less work than a dense model as large, more than its active weights."""
    sparse = ModelShape.from_config(CONFIGS["Qwen/Qwen3-30B-A3B"])
    shape = ReplayShape.from_groups([65536], [[8192] * 8])
    dense = ModelShape.from_config(CONFIGS["Qwen/Qwen3-32B"])
    times = [Planner().plan(shape, model, world_size=8).lanes[0].terms["linear_us"] for model in (sparse, dense)]
    assert times[0] < times[1] / 3
    assert sparse.expert_weights * sparse.num_layers < sparse.total_weights / 10


@given(st.integers(0, 1 << 30), st.integers(0, 1 << 30), st.sampled_from([1, 2, 3, 64]), st.booleans(), st.booleans())
def test_peaks_of_one_lane_are_those_of_many(inner: int, leaf: int, degree: int, waved: bool, forward: bool) -> None:
    memory = MemoryModel.of(Planner().costs(BIG, world_size=64, forward_only=forward))
    expected = float(memory.peak_bytes(inner, leaf, degree, waved=waved))
    assert memory.peak_of_lane(float(inner), float(leaf), degree, waved=waved) == expected
