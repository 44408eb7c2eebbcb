"""Budgets of memory on a mesh: `transform(memory=)` and `prefill(memory=)` on gloo ranks, in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import families
import pytest
import torch
from cp_workers import (
    halves,
    model_and_truth,
    model_errors,
    parallel_model,
    pooled_errors,
    sharded_errors,
    state_of,
    wave_errors,
)
from fault_workers import said
from ranks import Ranks
from test_cp_models import Case, assert_exact
from test_cp_waves import one_without_rows, waves_of_one
from test_memory_budget import Live
from torch import distributed
from wave_reference import FREE, run_of

import augtree_fx
from augtree_fx import stages
from augtree_fx.dtensor_ops.schedules import SCHEDULES
from augtree_fx.memory import shown
from augtree_fx.transforms import stack


def cases(more: float = 1.0) -> list[Case]:
    """Budgets in which some waves fit on 3 ranks, times ``more``."""
    few, most = (f"{more * mebibytes:.2f}MiB" for mebibytes in (1.7, 2.2))
    found: list[Case] = [(model_errors, ("llama", 3, "left"), {"memory": most, "schedule": each}) for each in SCHEDULES]
    found += [(model_errors, ("llama", 2, "right"), {"memory": few, "lanes": each}) for each in (halves, waves_of_one)]
    found += [(pooled_errors, ("llama", 3, "right", lonely), {"memory": most}) for lonely in (False, True)]
    found += [(sharded_errors, (rows,), {"memory": most}) for rows in ("replicated", "pooled")]
    found += [(sharded_errors, ("pooled",), {"memory": most, "lanes": one_without_rows})]
    return found + [(wave_errors, ("llama", 3, None, each), {"memory": few}) for each in (*SCHEDULES, None)]


def test_outputs_and_gradients(worlds: Callable[[int], Ranks]) -> None:
    """In one forward and in `prefill`, with lanes, pooled rows, FSDP2."""
    assert_exact(worlds(3), cases())


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "more"), [(2, 1.3), (4, 1.0)])
def test_more_ranks(worlds: Callable[[int], Ranks], num_ranks: int, more: float) -> None:
    """Of two, each has more of the parameters and of the tokens."""
    assert_exact(worlds(num_ranks), cases(more))


def large_model(checkpointing: bool, **options: Any) -> torch.nn.Module:
    """A model whose activations are much larger than what is not counted: tables, indices, single numbers."""
    plain = families.build("llama", hidden_size=64, intermediate_size=256, num_hidden_layers=6).train()
    model = parallel_model(plain, **options)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def lived(checkpointing: bool, schedule: str | None) -> list[tuple[int, int, int | None, str]]:
    """Peak of one forward and backward, the budget, tokens of a wave, and how the budget was spent."""
    rows = torch.cat([run_of(120, 0).expand(24, -1), torch.stack([run_of(24, n) for n in range(24)])], dim=1)
    found = []
    for mebibytes in (4.6, 5.2, 64) if checkpointing else (5.7, 8, 64):
        model = large_model(checkpointing, memory=f"{mebibytes}MiB", schedule=schedule).model
        with Live() as live:
            model(rows, use_cache=False).last_hidden_state.square().sum().backward()
        budget = state_of(model).budget
        found.append((live.peak, budget.memory, budget.max_tokens, str(budget)))
    return found


@pytest.mark.parametrize("schedule", [None, "move_q"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_what_lives_on_a_rank_stays_in_the_budget(
    worlds: Callable[[int], Ranks], checkpointing: bool, schedule: str | None
) -> None:
    for found in worlds(3).run(lived, checkpointing, schedule):
        for peak, memory, tokens, text in found:
            assert peak <= memory, (shown(peak), text)
            assert tokens is None or peak > 0.4 * memory, (shown(peak), text)  # and it is made use of
        few, more, all_tokens = (tokens for _, _, tokens, _ in found)
        assert few is not None and more is not None and few < more and all_tokens is None


def lived_in_waves(activations: str) -> list[tuple[int, int, int]]:
    """The same of `prefill`: peak, budget, number of waves."""
    layout = augtree_fx.TreeLayout.from_groups([run_of(120, 0)], [[run_of(24, n) for n in range(24)]])
    model, found = large_model(True), []
    with augtree_fx.prefill(model, layout, memory="64MiB", on_unused="skip", activations=activations) as tree:
        list(tree.waves())  # what happens once: bytes a token are counted
    for mebibytes in (2.4, 3.2):
        model.zero_grad()
        number = 0
        budget = f"{mebibytes}MiB"
        with Live() as live, augtree_fx.prefill(model, layout, memory=budget, activations=activations) as tree:
            for wave in tree.waves():
                number += 1
                wave.logprobs().sum().backward()
                del wave
        found.append((live.peak, state_of(model).budget.memory, number))
    return found


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_what_lives_in_prefill_stays_in_the_budget(worlds: Callable[[int], Ranks], activations: str) -> None:
    for found in worlds(3).run(lived_in_waves, activations):
        for peak, memory, number in found:
            assert peak <= memory and number > 1, (shown(peak), shown(memory), number)
        assert found[0][2] > found[1][2]


@contextlib.contextmanager
def poor(rank: int, share: float):
    """One rank has less memory than it is told, as ``"auto"`` finds it."""
    right = {module: module.budget_bytes for module in (stack, stages)}
    for module, function in right.items():
        if distributed.get_rank() == rank:
            module.budget_bytes = lambda *given, function=function: int(share * function(*given))
    try:
        yield
    finally:
        for module, function in right.items():
            module.budget_bytes = function


def with_a_poor_rank() -> tuple[int, int, str, str]:
    """Waves if all ranks have as much, and if one has less; errors if that holds nothing."""
    plain, batch, _ = model_and_truth("llama", 3, "right")
    model = parallel_model(plain, memory="2.6MiB")
    waves = []
    for share in (1.0, 0.85):
        with poor(1, share):
            model(**batch.inputs(), use_cache=False)
        waves.append(state_of(model).trained.waves)
    layout = augtree_fx.TreeLayout.from_padded(batch.input_ids, batch.attention_mask, costs=FREE)
    with poor(2, 0.01):
        with pytest.raises(ValueError) as text:
            model(**batch.inputs(), use_cache=False)
        with pytest.raises(ValueError) as other, augtree_fx.prefill(model, layout, memory="2MiB"):
            pass
    model(**batch.inputs(), use_cache=False)  # ranks are in step afterwards
    return waves[0], waves[1] - waves[0], str(text.value), str(other.value)


def test_the_least_of_all_ranks_counts(worlds: Callable[[int], Ranks]) -> None:
    for rank, (even, uneven, text, other) in enumerate(worlds(3).run(with_a_poor_rank)):
        assert 1 <= even < uneven
        for each in (text, other):
            assert "memory must hold prompts and a wave of at least 1 token" in each
            assert ("on rank 2: " in each) == (rank != 2), each


def differing() -> str:
    plain, batch, _ = model_and_truth("llama", 2, "right")
    model = parallel_model(plain, memory=f"{1 + distributed.get_rank()}GiB")
    return said(lambda: model(**batch.inputs(), use_cache=False))


def prefill_in_budgets(budgets: list[int | str | None]) -> str:
    plain, batch, _ = model_and_truth("llama", 2, "right")
    layout = augtree_fx.TreeLayout.from_padded(batch.input_ids, batch.attention_mask, costs=FREE)
    prefill = augtree_fx.prefill(parallel_model(plain), layout, memory=budgets[distributed.get_rank()])
    return said(prefill.__enter__)


def test_a_budget_on_one_rank_alone_is_an_error(worlds: Callable[[int], Ranks]) -> None:
    for text in worlds(3).run(prefill_in_budgets, [None, "1GiB", None]):
        assert "rank 1 differs from rank 0 in waves are sized by (memory='1GiB', not tokens)" in text


def test_another_budget_is_an_error(worlds: Callable[[int], Ranks]) -> None:
    for text in worlds(3).run(differing):
        assert "rank 1 differs from rank 0 in memory (2GiB, not 1GiB)" in text
    for text in worlds(3).run(prefill_in_budgets, ["1GiB", "1GiB", 2**20]):
        assert "rank 2 differs from rank 0 in waves are sized by (memory=1048576, not memory='1GiB')" in text
