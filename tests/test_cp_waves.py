"""`transform(mesh=, max_wave_tokens=)` on 1, 3 and 4 gloo ranks: waves of all ranks behind one forward, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cp_workers import model_and_truth, model_errors, parallel_model, pooled_errors, sharded_errors, state_of
from fault_workers import said
from ranks import Ranks
from test_cp_models import EXACT, Case, assert_exact
from torch import distributed

from augtree_fx.dtensor_ops.attention import SCHEDULES
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

# Families that up-cast to float32 do so where autograd computes waves again: 2^-24 a term, some hundred terms, divided
# by gradients a hundredth of the largest.
ROUNDED = 2e-5


def test_outputs_and_gradients(ranks: Ranks) -> None:
    """Schedules at depths, windows, pooled rows, FSDP2 over the same ranks, checkpointing."""
    assert_exact(ranks, {1: CASES[::8], 3: CASES[::2], 4: CASES[1::4]}[ranks.num_ranks])


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_cases(worlds: Callable[[int], Ranks], num_ranks: int) -> None:
    assert_exact(worlds(num_ranks), CASES)


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


def refusals() -> list[str]:
    plain, _, _ = model_and_truth("llama", 2, "right")
    found = []
    for options in ({"memory": "1GiB"}, {"max_wave_tokens": 9, "lanes": print}):
        with pytest.raises(NotImplementedError) as error:
            parallel_model(plain, **options)
        found.append(str(error.value))
    return found


def test_what_does_not_go_together(worlds: Callable[[int], Ranks]) -> None:
    ((memory, lanes),) = worlds(1).run(refusals)
    assert "memory= counts on one device; under a mesh pass max_wave_tokens, of all ranks" in memory
    assert "waves run on all ranks of a mesh at once; leave out lanes= and planner=" in lanes
