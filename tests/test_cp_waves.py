"""`transform(mesh=, max_wave_tokens=)` on 1, 3 and 4 gloo ranks: waves of all ranks behind one forward, in float64."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import families
import numpy as np
import pytest
import torch
from cp_workers import (
    averaged,
    halves,
    in_pieces,
    model_and_truth,
    model_errors,
    parallel_model,
    pooled_errors,
    rows_of,
    sharded_errors,
    state_of,
)
from fault_workers import said
from ranks import Ranks
from test_cp_models import EXACT, Case, assert_exact
from test_parallel_wrappers import fsdp2, step, whole
from torch import distributed

import augtree_fx
from augtree_fx import CostModel, Planner, TreeLayout
from augtree_fx.dtensor_ops.lanes import LanePlan
from augtree_fx.dtensor_ops.schedules import GATHER_KV, SCHEDULES
from augtree_fx.planner import Execution
from augtree_fx.planner.memory import MemoryModel
from augtree_fx.transforms import in_waves

CASES: list[Case] = [
    (model_errors, ("llama", depth, style), {"max_wave_tokens": most, "schedule": schedule})
    for depth, style, most in ((2, "right", 9), (3, "left", 12), (3, "trl", 1))
    for schedule in SCHEDULES
]
CASES += [(model_errors, ("llama", 3, "right"), {"max_wave_tokens": 12, "checkpointing": True})]
CASES += [(model_errors, ("mistral", 3, "right"), {"max_wave_tokens": 12})]
CASES += [(pooled_errors, ("llama", 3, "right", lonely), {"max_wave_tokens": 12}) for lonely in (False, True)]
CASES += [(sharded_errors, (rows,), {"max_wave_tokens": 9}) for rows in ("replicated", "pooled")]


def uneven_waves(layout: TreeLayout, num_ranks: int) -> list[LanePlan]:
    """`halves`: the last rank takes all of its branches at once, the others few at a time, prompts another way."""
    lonely, rest = halves(layout, num_ranks)
    return [lonely, replace(rest, wave_tokens=7, prefill_schedule=GATHER_KV)]


def waves_of_one(layout: TreeLayout, num_ranks: int) -> list[LanePlan]:
    """Each rank a lane, waves of another size in each."""
    rows = np.arange(layout.num_rows) % num_ranks
    return [
        LanePlan((rank,), tuple(np.flatnonzero(rows == rank).tolist()), None, wave_tokens=3 + 4 * rank)
        for rank in range(num_ranks)
    ]


def one_without_rows(layout: TreeLayout, num_ranks: int) -> list[LanePlan]:
    """The first rank has no rows."""
    everything = tuple(range(layout.num_rows))
    return [LanePlan((0,), (), None), LanePlan(tuple(range(1, num_ranks)), everything, None, wave_tokens=9)]


LANE_CASES: list[Case] = [
    (model_errors, ("llama", depth, style), {"lanes": lanes, **options})
    for depth, style, options in (
        (2, "right", {}), (3, "left", {}), (3, "right", {"max_wave_tokens": 12}), (3, "trl", {"checkpointing": True})
    )
    for lanes in (uneven_waves, waves_of_one)
]  # fmt: skip
LANE_CASES += [(model_errors, ("llama", 3, "right"), {"lanes": halves, "max_wave_tokens": 12})]
LANE_CASES += [(model_errors, ("llama", 2, "right"), {"lanes": waves_of_one, "schedule": "move_q"})]
LANE_CASES += [(model_errors, ("llama", 3, "right"), {"lanes": partial(in_pieces, "move_q"), "max_wave_tokens": 12})]
LANE_CASES += [(model_errors, ("mistral", 3, "right"), {"lanes": uneven_waves})]
LANE_CASES += [
    (pooled_errors, ("llama", 3, "right", lonely), {"lanes": lanes})
    for lonely, lanes in ((False, uneven_waves), (True, waves_of_one), (True, one_without_rows))
]
LANE_CASES += [
    (sharded_errors, (rows,), {"lanes": lanes})
    for rows in ("replicated", "pooled")
    for lanes in (uneven_waves, waves_of_one, one_without_rows)
]


def lonely_rows() -> dict[str, float]:
    """FSDP2 over a lane without rows and one whose rows share nothing, so that no prompt comes before its waves."""
    plain, batch, _ = model_and_truth("llama", 2, "right")
    first = {tokens[0].item(): row for row, tokens in enumerate(batch.tokens)}
    apart = rows_of(batch, list(first.values()))
    truth = families.reference(plain, apart)
    model = parallel_model(plain, one_without_rows, fsdp2)
    assert len(first) > 2
    return families.errors(step(model, apart, list(truth.gradients)), truth)


def gathered() -> tuple[dict[str, float], int]:
    """FSDP2 that leaves all parameters gathered after a forward; another forward follows, then one backward."""
    plain, batch, truth = model_and_truth("llama", 2, "right")
    model = parallel_model(plain, uneven_waves, functools.partial(fsdp2, reshard_after_forward=False))
    with torch.no_grad():
        model(**batch.inputs(), use_cache=False)
    before = state_of(model).trained.waves
    mean = sum(model(**batch.inputs(), use_cache=False).logits for _ in range(2)) / 2
    families.objective(batch.rows_of(mean), batch.tokens).backward()
    found = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    logits = [row.detach() for row in batch.rows_of(mean)]
    return families.errors(families.Result(logits, found), truth), state_of(model).trained.waves - before


# Families that up-cast to float32 do so where autograd computes waves again: 2^-24 a term, some hundred terms, divided
# by gradients a hundredth of the largest.
ROUNDED = 2e-5


def test_outputs_and_gradients(ranks: Ranks) -> None:
    """Schedules at depths, windows, pooled rows, FSDP2 over the same ranks, checkpointing."""
    assert_exact(ranks, {1: CASES[::8], 3: CASES[::2], 4: CASES[1::4]}[ranks.num_ranks])


def test_lanes_go_through_waves_of_their_own(worlds: Callable[[int], Ranks]) -> None:
    """Lanes with and without waves beside each other, also where FSDP2 shards the model over all of them."""
    assert_exact(worlds(3), LANE_CASES)


def test_lanes_under_fsdp2_run_as_many_forwards(worlds: Callable[[int], Ranks]) -> None:
    """Where one has no rows and no other has a prompt, and where FSDP2 keeps parameters gathered."""
    for errors in worlds(3).run(lonely_rows):
        assert max(errors.values()) <= EXACT, errors
    for rank, (errors, waves) in enumerate(worlds(3).run(gathered)):
        assert max(errors.values()) <= EXACT, errors
        assert (waves > 0) == (rank != 2)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_cases(worlds: Callable[[int], Ranks], num_ranks: int) -> None:
    assert_exact(worlds(num_ranks), CASES + LANE_CASES)


def planned(checkpointing: bool) -> tuple[dict[str, float], str, int, int]:
    """A planner whose machine has room for a few branches beside the prompts; what `explain` says; waves."""
    plain, batch, truth = model_and_truth("llama", 2, "right")
    planner = Planner("cpu", execution=Execution(checkpointing=False, shard_weights=False), bucketed=False)
    shape = augtree_fx.ReplayShape.from_layout(
        TreeLayout.from_padded(batch.input_ids, batch.attention_mask, costs=CostModel.free())
    )
    sizes = augtree_fx.ModelShape.from_model(plain)
    memory = MemoryModel.of(planner.costs(sizes, world_size=distributed.get_world_size()))
    leaf = int(shape.length[shape.is_leaf].sum())
    room = memory.peak_bytes(shape.num_tokens - leaf, leaf // 3, distributed.get_world_size(), waved=True)
    planner.hardware = replace(planner.hardware, memory_bytes=float(room) / planner.execution.usable_memory + 1)
    model = parallel_model(plain, planner=planner)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with families.KeepFloat64() if not checkpointing else contextlib.nullcontext():
        logits = batch.rows_of(model(**batch.inputs(), use_cache=False).logits)
        got = families.result_of(model, logits, batch)
    plan = state_of(model).lanes.choose.last
    shown, waves = str(augtree_fx.explain(model, **batch.inputs())), state_of(model).trained.waves
    layout = TreeLayout.from_padded(batch.input_ids, batch.attention_mask, costs=CostModel.free())
    with augtree_fx.prefill(model, layout, on_unused="skip") as tree:
        in_prefill = len(list(tree.waves()))
    return families.errors(averaged(got), truth), shown, waves, min(in_prefill, plan.num_waves * plan.num_rounds)


def test_a_plan_in_waves_is_obeyed(worlds: Callable[[int], Ranks]) -> None:
    for errors, shown, waves, passes in worlds(3).run(planned, False):
        assert max(errors.values()) <= EXACT, errors
        assert passes > 1 and waves > 1 and "branches at a time" in shown and " tokens" in shown


def test_latents_travel_in_waves(worlds: Callable[[int], Ranks]) -> None:
    for errors in worlds(3).run(latent_errors):
        assert max(errors.values()) <= ROUNDED, errors


def latent_errors() -> dict[str, float]:
    return model_errors("deepseek_v3", 3, "right", max_wave_tokens=12, checkpointing=True)


def counted() -> tuple[int, int, str]:
    """Waves of a batch; without gradients; what is said of another number of tokens on one rank."""
    plain, batch, _ = model_and_truth("llama", 2, "right")
    model = parallel_model(plain, max_wave_tokens=9)
    model(**batch.inputs(), use_cache=False)
    with torch.no_grad():
        model(**batch.inputs(), use_cache=False)
    other = parallel_model(plain, max_wave_tokens=12 if distributed.get_rank() == 1 else 9)
    text = said(lambda: other(**batch.inputs(), use_cache=False))
    return state_of(model).trained.waves, state_of(model).scored.waves, text


def test_waves_are_counted_and_agreed_on(worlds: Callable[[int], Ranks]) -> None:
    for trained, scored, text in worlds(3).run(counted):
        assert trained == scored >= 4
        assert "rank 1 differs from rank 0 in max_wave_tokens (12, not 9)" in text


def faulty() -> dict[str, float]:
    """What waves send back to prompts is lost on the last rank."""
    right = in_waves._Handle.backward
    last = distributed.get_rank() == distributed.get_world_size() - 1

    def backward(ctx, *gradients):
        return right(ctx, *(torch.zeros_like(x) if last else x for x in gradients))

    in_waves._Handle.backward = staticmethod(backward)
    try:
        return model_errors("llama", 2, "right", max_wave_tokens=9)
    finally:
        in_waves._Handle.backward = staticmethod(right)


def test_a_planted_fault_is_noticed(worlds: Callable[[int], Ranks]) -> None:
    for errors in worlds(3).run(faulty):
        assert errors["logits"] <= EXACT
        assert errors["model.layers.0.self_attn.k_proj.weight"] >= 1e6 * EXACT
