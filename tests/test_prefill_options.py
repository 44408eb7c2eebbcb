"""`prefill` with prompts in chunks, and with activations that are computed again or kept on the host."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import one_thread, rollout, without_upcasts
from torch import Tensor, nn
from wave_reference import assert_equal, by_rows, deep_rows, groups_case, in_waves, padded_case, run_of, shared

import augtree_fx

OPTIONS = [
    {"activations": "recompute"},
    {"activations": "offload"},
    {"max_prompt_tokens": 4},
    {"max_prompt_tokens": 1, "activations": "offload"},
    {"max_prompt_tokens": 3, "activations": "recompute"},
]


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("budget", [None, 9])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_equals_the_unmodified_model(family: str, budget: int | None, options: dict[str, Any]) -> None:
    plain = without_upcasts(family)
    case = padded_case(deep_rows() if budget else rollout(2))
    assert_equal(in_waves(shared(copy.deepcopy(plain)), case, budget, **options), by_rows(plain, case))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_prompts_in_chunks_are_not_scored(options: dict[str, Any]) -> None:
    plain = without_upcasts("llama")
    case = groups_case([run_of(11, 1), run_of(5, 2)], [[run_of(4, 3), run_of(2, 4)], [run_of(3, 5), run_of(3, 6)]])
    assert_equal(in_waves(shared(copy.deepcopy(plain)), case, 4, **options), by_rows(plain, case))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_with_checkpointed_layers_and_frozen_ones(options: dict[str, Any]) -> None:
    plain = without_upcasts("llama")
    for parameter in plain.model.layers[0].parameters():
        parameter.requires_grad_(False)
    plain.model.embed_tokens.weight.requires_grad_(False)
    model = shared(copy.deepcopy(plain))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    case = padded_case(rollout(2))
    assert_equal(in_waves(model, case, 9, **options), by_rows(plain, case))


def saved_elements(model: nn.Module, **options: Any) -> int:
    """Elements of 32 tokens' MLP activations that autograd holds for a prompt while its branches are computed."""
    case = groups_case([run_of(32, 1)], [[run_of(4, 3), run_of(4, 4)]])
    held: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    width = model.config.intermediate_size
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        augtree_fx.prefill(model, case.layout, on_unused="skip", **options),
    ):
        return sum(x.numel() for x in held if x.shape[-1] == width and x.shape[-2] > 4)


def test_recomputed_prompts_hold_no_activations() -> None:
    model = shared(without_upcasts("llama"))
    assert saved_elements(model) > 0
    assert saved_elements(model, activations="recompute") == 0


def test_chunks_bound_what_is_computed_at_once() -> None:
    model = shared(without_upcasts("llama"))
    longest = 0

    def watch(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        nonlocal longest
        longest = max(longest, given[0].shape[-2])

    model.model.layers[0].mlp.register_forward_pre_hook(watch)
    case = groups_case([run_of(32, 1)], [[run_of(4, 3), run_of(4, 4)]])
    in_waves(model, case, 4, max_prompt_tokens=8, activations="recompute")
    assert longest == 8


def test_what_is_not_an_option() -> None:
    model = shared(without_upcasts("llama"))
    layout = groups_case([run_of(5, 1)], [[run_of(4, 3)]]).layout
    with pytest.raises(ValueError, match="activations must be one of keep, recompute, offload, got 'drop'"):
        augtree_fx.prefill(model, layout, activations="drop")
    with pytest.raises(ValueError, match="max_prompt_tokens must be at least 1, got 0"):
        augtree_fx.prefill(model, layout, max_prompt_tokens=0)
