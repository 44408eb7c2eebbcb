"""Hooks that read or change what passes, and the device hooks of accelerate, before and after transform.

Each test compares with the unmodified model under the same hooks, row by row, logits and every gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from families import (
    Batch,
    build,
    computed,
    error,
    one_thread,
    padded,
    reference,
    rollout,
)
from torch import Tensor, nn
from treated import FLOAT32, assert_equal, check, in_either_order, num_shared, shared

import augtree_fx
from augtree_fx.transforms.packing import make_context, show_rows


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def batch() -> Batch:
    return padded(rollout(3), "right")


def hooked(model: nn.Module) -> nn.Module:
    """Hooks that change what passes: before and after attention and layers, with and without keywords."""

    def before(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> tuple[object, object]:
        if args:
            return (args[0] + 0.25, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + 0.25}

    def after(_: nn.Module, __: object, output: object) -> object:
        return (output[0] * 0.75, *output[1:]) if isinstance(output, tuple) else output * 0.75

    for layer in model.model.layers:
        for module in (layer, layer.self_attn):
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after)
        layer.self_attn.q_proj.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
        layer.mlp.register_full_backward_hook(lambda _, grad_input, __: (grad_input[0] * 0.5,))
    return model


@in_either_order
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_hooks_that_change_activations_and_gradients(family: str, transform_first: bool, batch: Batch) -> None:
    check(hooked, batch, transform_first, family)


def test_hooks_see_one_packed_row_inside_and_the_callers_shape_outside(batch: Batch) -> None:
    model = shared(build("llama"))
    seen: dict[str, list[tuple[int, ...]]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: object) -> None:
            first = args[0] if args else kwargs.get("hidden_states", kwargs.get("input_ids"))
            result = output[0] if isinstance(output, tuple) else output
            result = getattr(result, "last_hidden_state", result)
            seen.setdefault(name, []).append((tuple(first.shape), tuple(result.shape)))

        return hook

    for name in ("", ".layers.1", ".layers.1.self_attn", ".layers.1.self_attn.q_proj", ".norm"):
        model.get_submodule("model" + name).register_forward_hook(note(name), with_kwargs=True)
    model(**batch.inputs(), use_cache=False)
    distinct = {(tuple(row[: end + 1].tolist())) for row in batch.tokens for end in range(len(row))}
    packed, rows = (1, len(distinct), 64), tuple(batch.input_ids.shape)
    inside = [(packed, packed)]
    assert seen == {
        "": [(rows, (*rows, 64))],
        ".layers.1": inside,
        ".layers.1.self_attn": inside,
        ".layers.1.self_attn.q_proj": inside,
        ".norm": inside,
    }
    assert num_shared(model) == 1


def test_restore_keeps_what_came_after_transform(batch: Batch) -> None:
    model = shared(build("llama", torch.float64))
    removable = model.model.layers[0].self_attn.register_forward_hook(lambda *_: None)
    model.model.layers[0].self_attn.note = "mine"
    augtree_fx.restore(model)
    assert model.model.layers[0].self_attn.note == "mine"
    assert list(model.model.layers[0].self_attn._forward_hooks) == [removable.id]
    assert not any(name.startswith("_augtree") for module in model.modules() for name in vars(module))


def device_hooked(model: nn.Module) -> nn.Module:
    """What `device_map` does when a model lies on several devices: accelerate gives instances forwards of their own."""
    hooks = pytest.importorskip("accelerate.hooks")
    parts = [model, model.model, *model.model.layers, *(layer.self_attn for layer in model.model.layers)]
    for module in parts:
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu", io_same_device=True))
    return model


@in_either_order
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_device_hooks(family: str, transform_first: bool, batch: Batch) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = check(device_hooked, batch, transform_first, family)
    expected = reference(build(family, torch.float64), batch)
    twin = copy.deepcopy(model)
    assert_equal(computed(twin, batch), expected)
    assert (num_shared(twin), num_shared(model)) == (2, 1)
    hooks.remove_hook_from_module(model, recurse=True)
    assert_equal(computed(model, batch), expected)
    assert num_shared(model) == 2
    augtree_fx.restore(model)
    assert_equal(computed(model, batch), expected)
    shared(model)
    assert_equal(computed(model, batch), expected)
    assert num_shared(model) == 1


def test_layers_on_several_devices_get_their_tables_there(batch: Batch) -> None:
    """The meta device stands for another one; a layer's hook moves what the layer is called with."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = shared(build("mistral"))
    layout = augtree_fx.explain(model, **batch.inputs()).layout
    context = make_context(layout, model.model._augtree_state)
    assert context.to("cpu") is context
    for device in ("meta", torch.device("meta")):
        hook = hooks.AlignDevicesHook(device)
        _, kwargs = hook.pre_forward(nn.Identity(), torch.zeros(1), augtree_context=context)
        for window, tables in kwargs["augtree_context"].tables.items():
            assert tables.cu_seqlens.is_meta
            assert tables.segments is context.tables[window].segments
            assert (tables.kv_index is None) == (window is None) and (window is None or tables.kv_index.is_meta)
    packed = torch.empty(1, layout.num_tokens, 4, device="meta")
    rows = show_rows(packed, torch.from_numpy(layout.packed_index), layout.shape, layout.num_tokens)
    assert rows.is_meta and rows.shape == (*batch.input_ids.shape, 4)


def test_restore_below_device_hooks_leaves_no_trace(batch: Batch) -> None:
    plain, model = device_hooked(build("llama")), device_hooked(build("llama"))
    augtree_fx.restore(shared(model))
    for before, after in zip(plain.modules(), model.modules(), strict=True):
        assert type(before) is type(after)
        assert list(vars(before)) == list(vars(after))
        for name in ("_old_forward", "forward"):
            functions = [getattr(vars(module).get(name), "__func__", None) for module in (before, after)]
            assert functions[0] is functions[1]
    assert torch.equal(model(**batch.inputs()).logits, plain(**batch.inputs()).logits)


@in_either_order
def test_offloaded_weights(transform_first: bool, batch: Batch) -> None:
    """Weights are on the meta device between forwards; no gradients, here as without transform."""
    accelerate = pytest.importorskip("accelerate")
    expected = reference(build("llama", torch.float64), batch)
    model = build("llama", torch.float64)
    if transform_first:
        shared(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[0].self_attn.q_proj.weight.is_meta
    if not transform_first:
        shared(model)
    with torch.no_grad():
        logits = batch.rows_of(model(**batch.inputs(), use_cache=False).logits)
    assert error(torch.cat(logits), torch.cat(expected.logits)) < FLOAT32
    assert num_shared(model) == 1


@pytest.mark.parametrize("part", ["stack", "attention"])
def test_restore_below_a_forward_of_an_instance_is_refused(part: str, batch: Batch) -> None:
    """It holds the transformed forward, which would be left without its state."""
    model = shared(build("llama"))
    module = model.model if part == "stack" else model.model.layers[1].self_attn
    inner = module.forward
    module.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    with pytest.raises(NotImplementedError, match=f"{type(module).__name__} was given a forward of its own"):
        augtree_fx.restore(model)
    model(**batch.inputs(), use_cache=False)
    assert num_shared(model) == 1
    del module.forward
    augtree_fx.restore(model)
