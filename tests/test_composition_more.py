"""What people do to models, before and after transform: adapters, quantisation, fused kernels, hooks, device placement.

Each test compares with the unmodified model under the same treatment, row by row, logits and every gradient.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from families import (
    Batch,
    KeepFloat64,
    Result,
    build,
    computed,
    error,
    errors,
    one_thread,
    padded,
    reference,
    result_of,
    rollout,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

import augtree_fx
from augtree_fx import CostModel
from augtree_fx.face import RewriteError
from augtree_fx.transforms.stack import make_context, show_rows

FLOAT32 = 1e-5  # a float64 model with float32 up-casts, see test_models.py

Treatment = Callable[[nn.Module], nn.Module]
in_either_order = pytest.mark.parametrize("transform_first", [True, False], ids=["transform first", "transform last"])


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def batch() -> Batch:
    return padded(rollout(3), "right")


def shared(model: nn.Module) -> nn.Module:
    return augtree_fx.transform(model, costs=CostModel.free())


def num_shared(model: nn.Module) -> int:
    said = augtree_fx.explain(model)
    assert said.fallbacks == {}
    return said.num_shared


def assert_equal(got: Result, expected: Result) -> None:
    assert {name: value for name, value in errors(got, expected).items() if not value <= FLOAT32} == {}


def check(treat: Treatment, batch: Batch, transform_first: bool, family: str = "llama", **changes: object) -> nn.Module:
    """The treated model, transformed before or after, against the treated model; returns the former."""
    expected = reference(treat(build(family, torch.float64, **changes)), batch)
    model = build(family, torch.float64, **changes)
    model = treat(shared(model)) if transform_first else shared(treat(model))
    assert_equal(computed(model, batch), expected)
    assert num_shared(model) == 1
    return model


# PEFT


PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
ADAPTERS: dict[str, tuple[str, dict[str, object]]] = {
    "DoRA": ("LoraConfig", {"use_dora": True, "target_modules": PROJECTIONS, "init_lora_weights": False}),
    "LoRA, everywhere": ("LoraConfig", {"target_modules": "all-linear", "init_lora_weights": False}),
    "LoRA, embeddings too": (
        "LoraConfig",
        {"target_modules": [*PROJECTIONS, "embed_tokens", "lm_head"], "init_lora_weights": False},
    ),
    "LoRA, whole embeddings": (
        "LoraConfig",
        {"target_modules": PROJECTIONS, "modules_to_save": ["embed_tokens", "lm_head"], "init_lora_weights": False},
    ),
    "IA3": (
        "IA3Config",
        {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "OFT": ("OFTConfig", {"target_modules": PROJECTIONS, "oft_block_size": 8, "init_weights": False}),
    "norms": ("LNTuningConfig", {"target_modules": ["input_layernorm", "norm"]}),
    "token embeddings": ("TrainableTokensConfig", {"token_indices": [3, 4, 5]}),
}


def adapted(name: str) -> Treatment:
    peft = pytest.importorskip("peft")
    class_name, options = ADAPTERS[name]

    def treat(model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return peft.get_peft_model(model, getattr(peft, class_name)(**options)).double()

    return treat


@in_either_order
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name: str, transform_first: bool, batch: Batch) -> None:
    treat = adapted(name)
    model = check(treat, batch, transform_first)
    expected = torch.cat(reference(treat(build("llama", torch.float64)), batch).logits)
    with torch.no_grad():
        merged = batch.rows_of(model.merge_and_unload()(**batch.inputs(), use_cache=False).logits)
    assert error(torch.cat(merged), expected) < FLOAT32


@in_either_order
def test_adapters_that_are_switched(transform_first: bool, batch: Batch) -> None:
    """A policy and a reference adapter on one model, and the model without any: TRL and verl use them so."""
    peft = pytest.importorskip("peft")

    def treat(model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=PROJECTIONS, init_lora_weights=False)
        model = peft.get_peft_model(model, config)
        model.add_adapter("ref", config)
        return model.double()

    plain = treat(build("llama", torch.float64))
    model = build("llama", torch.float64)
    model = treat(shared(model)) if transform_first else shared(treat(model))
    for adapter in ("ref", "default"):
        plain.set_adapter(adapter)
        model.set_adapter(adapter)
        assert_equal(computed(model, batch), reference(plain, batch))
    with plain.disable_adapter(), model.disable_adapter(), torch.no_grad():
        logits = [batch.rows_of(each(**batch.inputs(), use_cache=False).logits) for each in (plain, model)]
    rows = build("llama", torch.float64)
    assert error(torch.cat(logits[1]), torch.cat(reference(rows, batch).logits)) < FLOAT32
    assert num_shared(model) == 3


@in_either_order
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_prompt_tuning_runs_the_original_forward_and_says_so(kind: str, transform_first: bool, batch: Batch) -> None:
    """Virtual tokens come as embeddings, which do not say what is equal."""
    peft = pytest.importorskip("peft")

    def treat(model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return peft.get_peft_model(model, getattr(peft, kind)(num_virtual_tokens=4, task_type="CAUSAL_LM"))

    model = treat(shared(build("llama"))) if transform_first else shared(treat(build("llama")))
    logits = [m(**batch.inputs(), use_cache=False).logits for m in (treat(build("llama")), model)]
    assert torch.equal(*logits)
    (reason,) = augtree_fx.explain(model).fallbacks
    assert reason.startswith("there are no input_ids")


@in_either_order
def test_prefix_tuning_is_refused_with_gradients(transform_first: bool, batch: Batch) -> None:
    peft = pytest.importorskip("peft")

    def treat(model: nn.Module) -> nn.Module:
        return peft.get_peft_model(model, peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))

    model = treat(shared(build("llama"))) if transform_first else shared(treat(build("llama")))
    with pytest.raises(NotImplementedError, match="KV cache of 4 tokens.*prefix tuning.*strict=False"):
        model(**batch.inputs(), use_cache=False)


def test_an_adapter_that_replaces_attention_is_refused(batch: Batch) -> None:
    """LLaMA-Adapter puts a module of its own in the place of the attention module."""
    peft = pytest.importorskip("peft")
    config = {"adapter_len": 4, "adapter_layers": 2, "task_type": "CAUSAL_LM"}
    with pytest.raises(RewriteError, match=r"layers.1 .*does not call its attention module"):
        shared(peft.get_peft_model(build("llama"), peft.AdaptionPromptConfig(**config)))
    model = peft.get_peft_model(shared(build("llama")), peft.AdaptionPromptConfig(**config))
    with pytest.raises(RuntimeError, match=r"changed since transform at layers.1.self_attn.*transform again"):
        model(**batch.inputs(), use_cache=False)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")  # see test_composition.py
@in_either_order
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_adapters(reentrant: bool, transform_first: bool, batch: Batch) -> None:
    def treat(model: nn.Module) -> nn.Module:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return adapted("LoRA, everywhere")(model).train()

    model = check(treat, batch, transform_first)
    assert model.get_base_model().model.layers[0].gradient_checkpointing


# Weights


@in_either_order
def test_tied_embeddings(transform_first: bool, batch: Batch) -> None:
    model = check(lambda model: model, batch, transform_first, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.state_dict()["lm_head.weight"].data_ptr() == model.model.embed_tokens.weight.data_ptr()


class Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, size, dtype=torch.float64))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale


def scaled(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        parametrize.register_parametrization(layer.self_attn.q_proj, "weight", Scale(64))
    return model


def weight_normed(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        parametrizations.weight_norm(layer.self_attn.k_proj)
    return model


@in_either_order
@pytest.mark.parametrize("treat", [scaled, weight_normed])
def test_parametrized_projections(treat: Treatment, transform_first: bool, batch: Batch) -> None:
    model = check(treat, batch, transform_first)
    assert any("parametrizations" in name for name, _ in model.named_parameters())


class Multiply(torch.autograd.Function):
    """Product with a weight that exists only as codes, as the linears of bitsandbytes do it."""

    @staticmethod
    def forward(ctx, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(codes, scale)
        return x @ (codes * scale).T

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        codes, scale = ctx.saved_tensors
        return grad @ (codes * scale), None, None


class QuantisedLinear(nn.Linear):
    """A linear layer of 8-bit codes; its parameter is frozen, and no float weight exists."""

    @staticmethod
    def of(linear: nn.Linear) -> QuantisedLinear:
        new = QuantisedLinear(linear.in_features, linear.out_features, bias=False, device="meta")
        new.register_buffer("scale", linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        codes = (linear.weight.detach() / new.scale).round().to(torch.int8)
        new.weight = nn.Parameter(codes, requires_grad=False)
        return new

    def forward(self, x: Tensor) -> Tensor:
        return Multiply.apply(x, self.weight, self.scale)


def replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """Another linear in the place of each one of the layers."""
    parents = [parent for layer in model.model.layers for parent in (layer.self_attn, layer.mlp)]
    for parent in parents:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, make(child))
    return model


@in_either_order
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "deepseek_v3"])
def test_quantised_linears(family: str, transform_first: bool, batch: Batch) -> None:
    model = check(lambda model: replace_linears(model, QuantisedLinear.of), batch, transform_first, family)
    assert isinstance(model.model.layers[0].self_attn.o_proj, QuantisedLinear)


def bitsandbytes_linears(bits: int) -> Treatment:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bnb = pytest.importorskip("bitsandbytes")

    def make(linear: nn.Linear) -> nn.Module:
        sizes, weight = (linear.in_features, linear.out_features), linear.weight.detach().float()
        if bits == 4:
            new = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32)
            new.weight = bnb.nn.Params4bit(weight, requires_grad=False)
        else:
            new = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
            new.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        return new.to("cpu")

    return lambda model: replace_linears(model.float(), make)


def torchao_linears() -> Treatment:
    quantization = pytest.importorskip("torchao.quantization")

    def treat(model: nn.Module) -> nn.Module:
        quantization.quantize_(model.float().model.layers, quantization.Int8WeightOnlyConfig())
        return model

    return treat


@in_either_order
@pytest.mark.parametrize("package", ["bitsandbytes 4", "bitsandbytes 8", "torchao"])
def test_quantised_linears_of_packages_under_adapters(package: str, transform_first: bool, batch: Batch) -> None:
    """In float32: the packages take no float64. The errors are those of float32 gradients, measured 3e-6."""
    peft = pytest.importorskip("peft")
    quantise = torchao_linears() if package == "torchao" else bitsandbytes_linears(int(package[-1]))

    def adapt(model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, config)

    expected = reference(adapt(quantise(build("llama"))), batch)
    model = quantise(build("llama"))
    model = adapt(shared(model)) if transform_first else shared(adapt(model))
    assert_equal(computed(model, batch), expected)
    assert num_shared(model) == 1


# Precision


def test_autocast_float16_error_is_at_most_twice_the_unmodified_models(batch: Batch) -> None:
    """As for bfloat16 in test_composition.py: both round at the same places, per tensor, root mean square."""

    def compare(got: Tensor, expected: Tensor) -> float:
        return ((got.double() - expected).norm() / expected.norm()).item()

    with KeepFloat64():
        truth = reference(build("llama", torch.float64), batch)
    found = []
    for model in (build("llama").train(), shared(build("llama").train())):
        with torch.autocast("cpu", torch.float16):
            logits = batch.rows_of(model(**batch.inputs(), use_cache=False).logits)
        assert logits[0].dtype == torch.float16
        found.append(errors(result_of(model, [row.float() for row in logits], batch), truth, compare))
    unmodified, got = found
    assert {key: (got[key], unmodified[key]) for key in got if not got[key] <= 2 * unmodified[key]} == {}
    assert num_shared(model) == 1


@in_either_order
def test_accelerate_prepare_under_mixed_precision(transform_first: bool, batch: Batch) -> None:
    """accelerate gives the model, not its decoder, a forward of its own, which autocasts and returns float32."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    try:
        truth = reference(build("llama", torch.float64), batch)
        models = [build("llama").train(), build("llama").train()]
        plain, model = accelerator.prepare(*(models if not transform_first else (models[0], shared(models[1]))))
        if not transform_first:
            shared(model)
        found = []
        for each in (plain, model):
            logits = batch.rows_of(each(**batch.inputs(), use_cache=False).logits)
            assert logits[0].dtype == torch.float32
            found.append(errors(result_of(each, logits, batch), truth, lambda a, b: ((a - b).norm() / b.norm()).item()))
        unmodified, got = found
        assert {key: (got[key], unmodified[key]) for key in got if not got[key] <= 2 * unmodified[key]} == {}
        assert num_shared(model) == 1
        assert num_shared(accelerator.unwrap_model(model)) == 1
    finally:
        accelerate.state.AcceleratorState._reset_state(True)


# Hooks


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


# Fused kernels, as Liger installs them


class FusedRotation(torch.autograd.Function):
    """Rotates in a kernel of its own, whose pointers must exist: meta tensors have none."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        assert not q.is_meta, "a kernel was launched on a tensor without memory"
        ctx.save_for_backward(cos, sin)
        return rotated(q, cos, sin), rotated(k, cos, sin)

    @staticmethod
    def backward(ctx, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[no-untyped-def]
        cos, sin = ctx.saved_tensors
        return rotated(dq, cos, -sin), rotated(dk, cos, -sin), None, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def fused_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    return FusedRotation.apply(q, k, cos, sin)


class FusedRMSNorm(nn.Module):
    """Only its class's name says what it is."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, x: Tensor) -> Tensor:
        assert not x.is_meta, "a kernel was launched on a tensor without memory"
        return self.weight * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


@pytest.mark.parametrize("when", ["before the model", "after the model", "after transform"])
@pytest.mark.parametrize(("family", "modeling"), [("llama", modeling_llama), ("qwen3", modeling_qwen3)])
def test_fused_rotary_embedding_and_norm(
    family: str, modeling: object, when: str, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capture launches neither, and the rotary embedding keeps its own backward."""
    expected = reference(build(family, torch.float64), batch)

    def fuse() -> None:
        monkeypatch.setattr(modeling, "apply_rotary_pos_emb", fused_rotary)
        monkeypatch.setattr(modeling, f"{family.capitalize()}RMSNorm", FusedRMSNorm)

    if when == "before the model":
        fuse()
    model = build(family, torch.float64)
    if when == "after the model":
        fuse()
    shared(model)
    if when == "after transform":
        fuse()
    assert_equal(computed(model, batch), expected)
    assert_equal(computed(copy.deepcopy(model), batch), expected)
    source = model.model.layers[0].self_attn._augtree_forward.source
    assert ("fused_rotary(" in source) == (when != "after transform")
    assert num_shared(model) == 1


# Device placement


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
