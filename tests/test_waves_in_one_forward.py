"""`transform(max_wave_tokens=)`: branches in waves behind one forward and one backward, as the unmodified model.

Tolerance 1e-10 for models that compute in float64 throughout, sums of some hundred terms in another order. Families
that up-cast to float32 (the test that keeps them from it is suspended where autograd computes layers again) agree to
its rounding: 2^-24 a term, some hundred terms, divided by gradients a hundredth of the largest: 2e-5.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import families
import pytest
import torch
from families import KeepFloat64, padded, rollout
from torch import Tensor, nn

import augtree_fx
from augtree_fx import CostModel
from augtree_fx.transforms import in_waves

FREE = CostModel.free()
EXACT, ROUNDED = 1e-10, 2e-5
MODELS = ("llama", "mistral", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_moe")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with families.one_thread():
        yield


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Plans that were run."""
    found: list[Any] = []
    right = in_waves.run_in_waves

    def noted(plan: Any, *forwards: Any) -> Any:
        found.append(plan)
        return right(plan, *forwards)

    monkeypatch.setattr("augtree_fx.transforms.packing.run_in_waves", noted)
    return found


def in_parts(model: nn.Module, tokens: int) -> nn.Module:
    return augtree_fx.transform(copy.deepcopy(model), costs=FREE, max_wave_tokens=tokens)


@pytest.mark.parametrize("family", [name for name in MODELS if name in families.FAMILIES])
@pytest.mark.parametrize(
    ("depth", "tokens"),
    [pytest.param(2, 1, marks=pytest.mark.slow), (2, 16), pytest.param(3, 1, marks=pytest.mark.slow), (3, 20)],
)
def test_equals_the_unmodified_model(family: str, depth: int, tokens: int, parts: list[Any]) -> None:
    exact = family in ("llama", "mistral")
    plain = families.without_upcasts(family) if exact else families.build(family, torch.float64)
    batch = padded(rollout(depth), "left")
    expected = families.reference(plain, batch)
    found = families.computed(in_parts(plain, tokens), batch)
    assert max(families.errors(found, expected).values()) < (EXACT if exact else ROUNDED)
    (plan,) = parts
    assert len(list(plan.walk())) > 2 and len(plan.nodes)
    assert bool(plan.inner) == (depth == 3)


@pytest.mark.parametrize("style", families.STYLES)
def test_every_padding(style: str, parts: list[Any]) -> None:
    plain = families.without_upcasts("llama")
    batch = padded(rollout(2), style)
    found = families.computed(in_parts(plain, 12), batch)
    assert max(families.errors(found, families.reference(plain, batch)).values()) < EXACT
    assert parts


def test_with_gradient_checkpointing_of_layers(parts: list[Any]) -> None:
    plain = families.without_upcasts("llama")
    model = in_parts(plain, 12).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = padded(rollout(3), "left")
    assert max(families.errors(families.computed(model, batch), families.reference(plain, batch)).values()) < EXACT
    assert parts


def test_what_fits_runs_in_one_part(parts: list[Any]) -> None:
    plain = families.without_upcasts("llama")
    batch = padded(rollout(2), "left")
    families.computed(in_parts(plain, 10_000), batch)
    assert not parts


def test_all_outputs_come_back_in_the_callers_shape(parts: list[Any]) -> None:
    plain = families.build("qwen3_moe", torch.float64)
    batch = padded(rollout(2), "right")
    asked = {"output_hidden_states": True, "output_router_logits": True, "use_cache": False}
    with KeepFloat64(), torch.no_grad():
        expected, found = (model(**batch.inputs(), **asked) for model in (plain, in_parts(plain, 12)))
    mask = batch.attention_mask.bool()
    assert len(found.hidden_states) == len(expected.hidden_states)
    for mine, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(mine[mask], theirs[mask], rtol=EXACT, atol=EXACT)
    for mine, theirs in zip(found.router_logits, expected.router_logits, strict=True):
        torch.testing.assert_close(mine[mask.flatten()], theirs[mask.flatten()], rtol=EXACT, atol=EXACT)
    assert parts


def test_embedded_prompts_go_through_waves_too(parts: list[Any]) -> None:
    plain = families.without_upcasts("llama")
    batch = padded(rollout(2), "left")
    results = []
    for model in (plain, in_parts(plain, 12)):
        vectors = model.get_input_embeddings()(batch.input_ids)
        given = {**batch.inputs(), "input_ids": None, "inputs_embeds": vectors, "use_cache": False}
        results.append(families.result_of(model, batch.rows_of(model(**given).logits), batch))
    assert max(families.errors(results[1], results[0]).values()) < EXACT
    assert parts


def test_adapters_alone_take_gradients(parts: list[Any]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    plain = peft.get_peft_model(families.without_upcasts("llama"), config).double()
    model = copy.deepcopy(plain)
    augtree_fx.transform(model, costs=FREE, max_wave_tokens=12)
    batch = padded(rollout(3), "left")
    found, expected = (families.computed(each, batch) for each in (model, plain))
    assert max(families.errors(found, expected).values()) < EXACT
    assert parts and all("lora" in name for name in found.gradients)


def test_prompt_gradients_are_added_up_in_float32(parts: list[Any]) -> None:
    """Many waves in bf16 are no farther from float64 than one part is, twice at most."""
    truth = families.build("llama", torch.float64)
    generator = torch.Generator().manual_seed(0)

    def run(length: int) -> Tensor:
        return torch.randint(3, families.VOCABULARY, (length,), generator=generator)

    prompt = run(40)
    batch = padded([[prompt, run(6)] for _ in range(48)], "right")
    plain = copy.deepcopy(truth).bfloat16()
    expected = families.computed(truth, batch).gradients

    def far(model: nn.Module) -> float:
        found = families.computed(model, batch).gradients
        wanted = [name for name in expected if "k_proj" in name or "v_proj" in name]
        return max(float((found[name].double() - expected[name]).norm() / expected[name].norm()) for name in wanted)

    once = far(augtree_fx.transform(copy.deepcopy(plain), costs=FREE))
    assert far(in_parts(plain, 6)) <= 2 * max(once, far(plain))
    assert len(list(parts[-1].walk())) == 48


@pytest.mark.parametrize("gradients", [True, False])
def test_one_wave_is_alive_at_a_time(gradients: bool) -> None:
    """Tensors of the size of a wave's MLP that live at once: as many for 16 branches as for 4."""

    def most_alive(branches: int) -> int:
        model = families.without_upcasts("llama")
        width = model.config.intermediate_size
        augtree_fx.transform(model, costs=FREE, max_wave_tokens=8)
        seen: list[weakref.ref[Tensor]] = []  # they live as long as a graph has saved them
        most = 0

        def watch(module: nn.Module, arguments: tuple[Tensor]) -> None:
            nonlocal most
            if arguments[0].shape[-2:] == (8, width):
                seen.append(weakref.ref(arguments[0]))
            most = max(most, sum(reference() is not None for reference in seen))

        for layer in model.model.layers:
            layer.mlp.down_proj.register_forward_pre_hook(watch)
        prompt = torch.arange(3, 20)
        rows = [[prompt, torch.full((8,), 20 + number)] for number in range(branches)]
        batch = padded(rows, "right")
        with torch.set_grad_enabled(gradients):
            logits = model(**batch.inputs(), use_cache=False).logits
        if gradients:
            logits.sum().backward()
        return most

    few, many = most_alive(4), most_alive(16)
    assert 0 < many <= few


def test_restore_and_new_settings(parts: list[Any]) -> None:
    plain = families.without_upcasts("llama")
    batch = padded(rollout(2), "left")
    model = in_parts(plain, 12)
    families.computed(augtree_fx.transform(model, costs=FREE), batch)
    assert not parts
    augtree_fx.restore(model)
    assert type(model.model) is type(plain.model)


def test_a_planted_fault_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what the waves send back to the prompts, gradients are wrong by far."""
    monkeypatch.setattr(
        in_waves._Handle, "backward", staticmethod(lambda ctx, gradient: (None, torch.zeros(gradient.shape).double()))
    )
    plain = families.without_upcasts("llama")
    batch = padded(rollout(2), "left")
    found = families.errors(families.computed(in_parts(plain, 12), batch), families.reference(plain, batch))
    assert found["logits"] < EXACT and found["model.layers.0.self_attn.v_proj.weight"] > 0.1


def test_scaled_rope_cannot_be_cut() -> None:
    scaled = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = families.build("llama", rope_parameters=scaled, max_position_embeddings=8)
    augtree_fx.transform(model, costs=FREE, max_wave_tokens=4)
    rows = torch.cat([torch.arange(3, 15).expand(4, -1), torch.arange(20).view(4, 5)], dim=1)
    with pytest.raises(NotImplementedError, match="dynamic is scaled by the longest position of each forward"):
        model(rows, use_cache=False)


def test_a_wave_needs_a_token() -> None:
    with pytest.raises(ValueError, match="max_wave_tokens must be at least 1, a whole number, got 0"):
        augtree_fx.transform(families.build("llama"), max_wave_tokens=0)


def test_outputs_without_tokens_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="an output of type int cannot be put together from waves"):
        in_waves.joined([(torch.zeros(1, 2, 3), 1), (torch.zeros(1, 1, 3), 2)])


def test_a_layer_that_runs_twice_is_refused() -> None:
    model = families.without_upcasts("llama")
    model.model.layers.append(model.model.layers[0])
    model.config.num_hidden_layers += 1
    augtree_fx.transform(model, costs=FREE, max_wave_tokens=4)
    with pytest.raises(
        NotImplementedError, match="self_attn runs more than once in a forward, each time with other keys"
    ):
        model(**padded(rollout(2), "right").inputs(), use_cache=False)


def test_reentrant_checkpointing_is_refused(parts: list[Any]) -> None:
    """Its layers have no graph in forward, and what waves send to the prompt's K and V would be lost."""
    model = in_parts(families.without_upcasts("llama"), 12).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(NotImplementedError, match="keys of checkpointed layers are not part of the graph"):
        model(**padded(rollout(2), "right").inputs(), use_cache=False)


def test_what_waves_refuse_runs_the_original_forward_where_that_is_wanted(parts: list[Any]) -> None:
    scaled = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    plain = families.build("llama", rope_parameters=scaled, max_position_embeddings=8)
    model = augtree_fx.transform(copy.deepcopy(plain), costs=FREE, max_wave_tokens=4, strict=False)
    rows = torch.cat([torch.arange(3, 15).expand(4, -1), torch.arange(20).view(4, 5)], dim=1)
    assert torch.equal(model(rows, use_cache=False).logits, plain(rows, use_cache=False).logits)
    assert not parts and model.model._augtree_state.num_shared == 0
    assert "dynamic is scaled" in next(iter(model.model._augtree_state.fallbacks))


def test_rows_that_share_nothing_go_through_waves_beside_those_that_do(parts: list[Any]) -> None:
    """What counts is all that is no prompt, unrelated rows too."""
    plain = families.without_upcasts("llama")
    prompt = torch.arange(3, 15)
    rows = [[prompt, torch.tensor([20, 21])], [prompt, torch.tensor([30, 31])]]
    rows += [[torch.arange(40 + number, 50 + number)] for number in range(6)]
    batch = padded(rows, "right")
    found = families.computed(in_parts(plain, 20), batch)
    assert parts and len(list(parts[-1].walk())) >= 3
    assert max(families.errors(found, families.reference(plain, batch)).values()) <= EXACT
