"""Hybrids: layers with a recurrent or convolution state run row by row, the rest once, against the same batch."""

import copy
from collections.abc import Iterator

import pytest
import torch
from families import Batch, Result, errors, objective, one_thread, padded, rollout
from torch import Tensor, nn

import augtree_fx
from augtree_fx import CostModel
from augtree_fx.coverage import tiny
from augtree_fx.coverage.precision import KeepFloat64
from augtree_fx.transforms import find_stack
from augtree_fx.transforms.install import STATE

# Float64 throughout; measured 1e-13. The state of another row, or none of the prompt, shows at 1e-2.
TOLERANCE = 1e-10
TYPES = (
    "bailing_hybrid",  # delta attention
    "bamba",  # Mamba 2; layers return tuples
    "falcon_h1",  # Mamba 2 beside attention in every layer
    "granitemoehybrid",
    "jamba",  # Mamba 1; layers pass no keywords on to it
    "kimi_linear",
    "lara_mini",
    "lfm2",  # short convolutions
    "lfm2_moe",
    "lfm3",
    "minimax",  # lightning attention, which returns its state
    "nemotron_h",  # layers of an MLP or experts alone
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",  # gated delta net
    "recurrent_gemma",  # RG-LRU, told of positions and of no padding
    "zamba",  # attention shared by layers, Mamba in each
    "zamba2",
)
UNMASKED = "recurrent_gemma"


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


def build(model_type: str) -> nn.Module:
    if model_type not in tiny.model_types():
        pytest.skip("this transformers does not have it")
    return tiny.build(model_type, "eager").double()


def shared(model: nn.Module) -> nn.Module:
    return augtree_fx.transform(model, costs=CostModel.free())


def state_of(model: nn.Module) -> object:
    return getattr(find_stack(model), STATE)


def with_gradients(model: nn.Module, batch: Batch) -> Result:
    """Logits at tokens and the gradient of every parameter; 0 of an expert that no token chose."""
    model.zero_grad()
    logits = batch.rows_of(model(**batch.inputs(), use_cache=False).logits)
    objective(logits, batch.tokens).backward()
    gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in model.named_parameters()}
    model.zero_grad()
    return Result([row.detach() for row in logits], gradients)


def result(model: nn.Module, batch: Batch) -> Result:
    with KeepFloat64():
        return with_gradients(model, batch)


def relative(got: Tensor, expected: Tensor) -> float:
    """Largest difference by the largest value expected; gradients that are rounding alone are measured by 1e-6."""
    return ((got - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()


def assert_equal(got: Result, expected: Result) -> None:
    assert {name: x for name, x in errors(got, expected, relative).items() if not x <= TOLERANCE} == {}


def assert_shared(model: nn.Module, plain: nn.Module, batch: Batch, times: int = 1) -> None:
    assert_equal(result(model, batch), result(plain, batch))
    assert (state_of(model).num_shared, state_of(model).fallbacks) == (times, {})


@pytest.mark.parametrize("style", ["right", "left", "trl"])
@pytest.mark.parametrize("model_type", TYPES)
def test_padding(model_type: str, style: str) -> None:
    """Depth 3, ragged, every padding; a type that is not told of padding shares only what is padded on the right."""
    batch = padded(rollout(depth=3), style)
    plain = build(model_type)
    model = shared(copy.deepcopy(plain))
    if model_type == UNMASKED and style != "right":
        assert_equal(result(model, batch), result(plain, batch))
        (reason,) = state_of(model).fallbacks
        assert reason == "padding in front of rows reaches the state of layers.0.temporal_block; pad on the right"
    else:
        assert_shared(model, plain, batch)


@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("model_type", TYPES)
def test_checkpointing_changes_no_bit(model_type: str, reentrant: bool) -> None:
    """No mode keeps float64 where backward computes anew; equal to the last bit is more than equal to rounding."""
    batch = padded(rollout(depth=2), "trl" if model_type != UNMASKED else "right")
    model = shared(build(model_type))
    if not model.supports_gradient_checkpointing:
        pytest.skip("it has none")
    expected = with_gradients(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    got = with_gradients(model, batch)
    assert {name: x for name, x in errors(got, expected, relative).items() if x != 0} == {}
    assert (state_of(model).num_shared, state_of(model).fallbacks) == (2, {})
