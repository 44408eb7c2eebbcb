"""Multi-head latent attention on 1, 3 and 4 gloo ranks: latents travel, each rank expands what it receives, exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import families
import pytest
import torch
from cp_workers import model_errors, pooled_errors, wave_errors
from latent_workers import (
    PLANTED,
    adapted_errors,
    bytes_moved,
    checkpointed_errors,
    elsewhere_errors,
    errors_of_type,
    explained,
    half_precision_errors,
    planted_latent_errors,
    replaced,
    sharded_latent_errors,
    unit_errors,
)
from ranks import Ranks
from test_cp_models import EXACT, Case, assert_exact

from augtree_fx.dtensor_ops.schedules import SCHEDULES
from augtree_fx.transforms import capture_stack, find_stack

CASES: list[Case] = [(model_errors, ("deepseek_v3", 3, "left"), {"schedule": schedule}) for schedule in SCHEDULES]
CASES += [(pooled_errors, ("deepseek_v3", 2, "right", False), {"schedule": "rotate_kv"})]
CASES += [(wave_errors, ("deepseek_v3", 3, 12), {"schedule": schedule}) for schedule in SCHEDULES]
CASES += [(wave_errors, ("deepseek_v3", 3, 12), {"max_prompt_tokens": 5, "activations": "recompute"})]
CASES += [(adapted_errors, (schedule,), {}) for schedule in SCHEDULES[::2]]
CASES += [(worker, (), {}) for worker in (checkpointed_errors, sharded_latent_errors, elsewhere_errors, unit_errors)]


def test_outputs_and_gradients(ranks: Ranks) -> None:
    """Every schedule, pooled rows, waves, adapters on the expansion, checkpointing, FSDP2 over the same ranks."""
    assert_exact(ranks, CASES if ranks.num_ranks == 3 else CASES[ranks.num_ranks % 2 :: 3])


@pytest.mark.parametrize("waves", [False, True])
@pytest.mark.parametrize("schedule", ["rotate_kv", "gather_kv"])
def test_bytes_moved(worlds: Callable[[int], Ranks], schedule: str, waves: bool) -> None:
    """24 elements of a token instead of 144, in forward and in backward, and as many home, in the gradient's dtype."""
    for expanded, found in worlds(3).run(bytes_moved, schedule, waves):
        assert found["keys"] * 144 == expanded["keys"] * 24 > 0
        assert found["gradients"] * 144 == expanded["gradients"] * 24 > 0
        assert found["keys"] == 2 * found["gradients"], "latents travel again in backward"


def test_weights_that_are_replaced_before_backward(worlds: Callable[[int], Ranks]) -> None:
    """What was under way when the error came is not taken for what the next step sends."""
    for text, error in worlds(3).run(replaced):
        assert error <= EXACT
        assert "1 parameters that make keys of latents were replaced between forward and backward; leave them" in text


def test_explain_says_what_travels(worlds: Callable[[int], Ranks]) -> None:
    for text in worlds(3).run(explained):
        assert "DeepseekV3Attention: latents travel, 24 elements of a token and layer for 144 of keys and val" in text


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(worlds: Callable[[int], Ranks], autocast: bool) -> None:
    """bfloat16 on three ranks is no further from float64 than twice what one process with the same weights is."""
    for found, alone in worlds(3).run(half_precision_errors, autocast):
        assert found <= 2 * alone


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", ["deepseek_v2", "minicpm3", "longcat_flash", "glm4_moe_lite", "youtu", "sarvam_mla", "axk1"]
)
def test_other_types_with_latents(worlds: Callable[[int], Ranks], model_type: str) -> None:
    for errors in worlds(3).run(errors_of_type, model_type):
        assert max(errors.values()) <= EXACT, errors


def test_planted_faults_are_far_above_tolerance(worlds: Callable[[int], Ranks]) -> None:
    for rank, found in enumerate(worlds(3).run(planted_latent_errors)):
        assert max(found.pop("none").values()) <= EXACT
        assert found.keys() == PLANTED.keys()
        for name, errors in found.items():
            spoilt = {key for key, error in errors.items() if not error <= 1e6 * EXACT}
            assert any("kv_b_proj" in key or "kv_a" in key for key in spoilt), (rank, name, spoilt)
            assert ("logits" in spoilt) == PLANTED[name][1], (rank, name)


@pytest.mark.parametrize("name", [name for name in families.FAMILIES if name != "deepseek_v3"])
def test_other_families_send_keys_and_values(name: str) -> None:
    sites, _ = capture_stack(find_stack(families.build(name)))
    assert all(site.cut is None for site in sites)


def test_the_cut_is_found_in_the_graph() -> None:
    """Latent after its norm, and the rotary key of one head; behind them only the expansion runs."""
    (site, *_), _ = capture_stack(find_stack(families.build("deepseek_v3")))
    assert site.cut is not None
    assert (site.cut.elements, site.cut.expanded, site.cut.modules) == (16 + 8, 4 * (16 + 8 + 12), ("kv_b_proj",))
    module = find_stack(families.build("deepseek_v3")).get_submodule(site.name)
    scope: dict[str, Any] = {}
    code = site.cut.graph.python_code("self")
    exec(code.src, dict(code.globals), scope)
    latent, rotary = torch.randn(1, 1, 7, 16), torch.randn(1, 1, 7, 8)
    for found, expected in zip(scope["forward"](module, latent, rotary), module.expand_kv(latent, rotary), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
