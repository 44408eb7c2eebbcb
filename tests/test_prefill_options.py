"""`prefill` with prompts in chunks, and with activations that are computed again or kept on the host."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import families
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


def test_hundreds_of_chunks() -> None:
    plain = without_upcasts("llama")
    del plain.model.layers[1:]
    case = groups_case([run_of(200, 1)], [[run_of(4, 3), run_of(2, 4)]])
    found = in_waves(shared(copy.deepcopy(plain)), case, max_prompt_tokens=1)
    assert_equal(found, by_rows(plain, case))


def test_what_is_not_an_option() -> None:
    model = shared(without_upcasts("llama"))
    layout = groups_case([run_of(5, 1)], [[run_of(4, 3)]]).layout
    with pytest.raises(ValueError, match="activations must be one of keep, recompute, offload, got 'drop'"):
        augtree_fx.prefill(model, layout, activations="drop")
    with pytest.raises(ValueError, match="max_prompt_tokens must be at least 1, a whole number, got 0"):
        augtree_fx.prefill(model, layout, max_prompt_tokens=0)


def two_responses() -> augtree_fx.TreeLayout:
    return groups_case([run_of(6, 1)], [[run_of(4, 3), run_of(4, 4)]]).layout


def test_recomputed_under_the_modes_of_the_first_forward() -> None:
    """Left without gradients, and out of autocast: the prompt is computed again as it was."""
    plain = families.build("llama")
    found = []
    for activations, mode in (("keep", torch.enable_grad), ("recompute", torch.no_grad)):
        model = shared(copy.deepcopy(plain))
        tree = augtree_fx.prefill(model, two_responses(), activations=activations)
        with torch.autocast("cpu", torch.bfloat16):
            tree.__enter__()
            for wave in tree.waves():
                wave.logprobs().sum().backward()
        with mode():
            tree.__exit__(None, None, None)
        found.append([p.grad for p in model.parameters()])
    for kept, recomputed in zip(*found, strict=True):
        assert torch.equal(kept, recomputed)


def test_one_autocast_for_prompts_and_branches() -> None:
    model = shared(families.build("llama"))
    with (
        pytest.raises(RuntimeError, match="enter it before augtree_fx.prefill"),
        augtree_fx.prefill(model, two_responses()) as tree,
        torch.autocast("cpu", torch.bfloat16),
    ):
        next(iter(tree.waves()))


def test_gradients_that_are_cleared_between_waves() -> None:
    model = shared(without_upcasts("llama"))
    with (
        pytest.raises(RuntimeError, match="gradients were cleared or changed between waves"),
        augtree_fx.prefill(model, two_responses()) as tree,
    ):
        for wave in tree.waves(4):
            wave.logprobs().sum().backward()
            model.zero_grad()


def test_prompts_that_only_their_hidden_states_need() -> None:
    """The last MLP alone is trained, and no branch point is scored: no gradient is due at the prompt."""
    plain = without_upcasts("llama")
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name.startswith(f"model.layers.{len(plain.model.layers) - 1}.mlp"))
    rows = [[run_of(6, 1), run_of(4, 3)], [run_of(6, 1), run_of(4, 4)]]
    case = padded_case(rows, "right", lambda row, index: index > 6)
    for options in ({}, {"activations": "recompute"}):
        assert_equal(in_waves(shared(copy.deepcopy(plain)), case, 4, **options), by_rows(plain, case))


def test_entropies_where_tokens_are_impossible() -> None:
    model = shared(without_upcasts("llama"))
    forbid = torch.zeros(model.config.vocab_size, dtype=torch.float64)
    forbid[:3] = -torch.inf
    model.lm_head.register_forward_hook(lambda module, given, logits: logits + forbid)
    with augtree_fx.prefill(model, two_responses()) as tree:
        for wave in tree.waves():
            logprobs, entropies = wave.logprobs_and_entropies()
            expected = torch.distributions.Categorical(logits=wave.logits()[:, 3:]).entropy()
            torch.testing.assert_close(entropies, expected)
            (logprobs + entropies).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_router_losses_and_restore_are_refused_inside() -> None:
    model = shared(families.build("qwen3_moe"))
    model.config.output_router_logits = True
    with (
        pytest.raises(NotImplementedError, match="auxiliary loss of routers counts the tokens of rows"),
        augtree_fx.prefill(model, two_responses()),
    ):
        pass
    with pytest.raises(NotImplementedError, match="auxiliary loss of routers"):
        model(**augtree_fx.pack(model, two_responses()).arguments)
    model.config.output_router_logits = False
    with augtree_fx.prefill(model, two_responses(), on_unused="skip"):
        with pytest.raises(RuntimeError, match="an augtree_fx.prefill of this model is open; leave its block first"):
            augtree_fx.restore(model)
    augtree_fx.restore(model)
