"""Tied, parametrised and quantised weights, mixed precision, and fused kernels as Liger installs them.

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
    build,
    computed,
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
from treated import Treatment, assert_equal, check, in_either_order, num_shared, shared


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def batch() -> Batch:
    return padded(rollout(3), "right")


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
