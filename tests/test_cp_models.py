"""Models under context parallelism on 1, 3 and 4 gloo ranks against the unmodified model, row by row, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from cp_workers import halves, in_pieces, layout_errors, model_errors, pooled_errors, sharded_errors, wave_errors
from ranks import Ranks
from test_cp_attention import covering

from augtree_fx.dtensor_ops.schedules import SCHEDULES

EXACT = 1e-10  # float64 throughout, sums in another order

Case = tuple[Callable[..., dict[str, float]], tuple[Any, ...], dict[str, Any]]

CASES: list[Case] = [
    (model_errors, ("llama", depth, "right"), {"schedule": schedule}) for depth in (2, 3) for schedule in SCHEDULES
]
CASES += [
    (model_errors, (name, 3, "left"), {}) for name in ("mistral", "gpt_oss", "deepseek_v3", "gemma3_text", "qwen3_moe")
]
CASES += [(layout_errors, (schedule,), {}) for schedule in SCHEDULES]
CASES += [
    (model_errors, ("llama", depth, "right"), {"lanes": partial(in_pieces, schedule)})
    for depth, schedule in ((2, "rotate_kv"), (3, "gather_kv"), (3, "move_q"))
]
CASES += [
    (model_errors, (name, 3, "left"), {"lanes": partial(in_pieces, "gather_kv")})
    for name in ("mistral", "gpt_oss", "deepseek_v3")
]
CASES += [(pooled_errors, ("llama", 2, "right", lonely), {}) for lonely in (False, True)]
CASES += [(sharded_errors, (rows,), {}) for rows in ("replicated", "pooled")]
CASES += [(model_errors, ("llama", 2, "right"), {"checkpointing": True, "schedule": "move_q"})]
WAVES: list[Case] = [
    (wave_errors, ("llama", depth, most), {"schedule": schedule})
    for depth, most in ((2, 9), (3, 12), (3, 1000))
    for schedule in (*SCHEDULES, None)
]
WAVES += [(wave_errors, (name, 3, 12), {}) for name in ("mistral", "gpt_oss", "deepseek_v3")]
WAVES += [(wave_errors, ("llama", 3, 12), {"max_prompt_tokens": 4})]
WAVES += [(wave_errors, ("llama", 3, 12), {"max_prompt_tokens": 5, "activations": "recompute"})]
LANES: list[Case] = [(model_errors, ("llama", depth, "trl"), {"lanes": halves}) for depth in (2, 3)]


def errors_of(cases: list[Case]) -> list[dict[str, float]]:
    return [worker(*args, **options) for worker, args, options in cases]


def assert_exact(ranks: Ranks, cases: list[Case]) -> None:
    """One call for all: ranks keep models and truths that several cases need."""
    for rank, found in enumerate(ranks.run(errors_of, cases, seconds=240)):
        for case, errors in zip(cases, found, strict=True):
            wrong = {name: error for name, error in errors.items() if not error <= EXACT}
            assert not wrong, f"rank {rank}, {case}: {wrong}"


def test_outputs_and_gradients(ranks: Ranks) -> None:
    """Schedules at depths, families, explicit layouts, pooled rows, FSDP2 over the same ranks, checkpointing."""
    assert_exact(ranks, covering(CASES, ranks.num_ranks))


def test_lanes_of_unequal_sizes(worlds: Callable[[int], Ranks]) -> None:
    assert_exact(worlds(4), LANES[:1])
    assert_exact(worlds(3), LANES[1:])


def test_waves(ranks: Ranks) -> None:
    assert_exact(ranks, {1: WAVES[:1], 3: WAVES[::2], 4: WAVES[1::4]}[ranks.num_ranks])


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_all_cases_on_all_numbers_of_ranks(worlds: Callable[[int], Ranks], num_ranks: int) -> None:
    assert_exact(worlds(num_ranks), CASES + WAVES + (LANES if num_ranks > 1 else []))
