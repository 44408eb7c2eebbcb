"""DDP and FSDP2 around a transformed model, and transform inside them: one rank, gloo, CPU.

One rank shards nothing, but the wrappers swap classes, register hooks and look at signatures as they do on many.
"""

from collections.abc import Iterator

import pytest
import torch
from families import Batch, build, error, objective, one_thread, padded, reference, rollout
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import augtree_fx
from augtree_fx import CostModel

FLOAT32 = 1e-5  # a float64 model with float32 up-casts, see test_models.py


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    with one_thread():
        yield
    distributed.destroy_process_group()


def shared(model: nn.Module) -> nn.Module:
    return augtree_fx.transform(model, costs=CostModel.free())


def sharded(model: nn.Module, *parts: str) -> nn.Module:
    """FSDP2 on the named parts of every layer, on every layer, and on the model."""
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        for part in parts:
            fully_shard(layer.get_submodule(part), mesh=mesh)
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, distributed.tensor.DTensor) else gradient


def assert_equals_the_rows(wrapped: nn.Module, batch: Batch) -> None:
    expected = reference(build("llama", torch.float64), batch)
    logits = batch.rows_of(wrapped(**batch.inputs(), use_cache=False).logits)
    objective(logits, batch.tokens).backward()
    assert error(torch.cat(logits), torch.cat(expected.logits)) < FLOAT32
    for name, parameter in wrapped.named_parameters():
        assert error(whole(parameter.grad), expected.gradients[name.removeprefix("module.")]) < FLOAT32
    assert augtree_fx.explain(wrapped).num_shared == 1
    assert augtree_fx.explain(wrapped).fallbacks == {}


@pytest.mark.parametrize("transform_first", [True, False])
def test_ddp(transform_first: bool) -> None:
    model = build("llama", torch.float64)
    wrapped = DistributedDataParallel(shared(model)) if transform_first else shared(DistributedDataParallel(model))
    assert isinstance(wrapped, DistributedDataParallel)
    assert_equals_the_rows(wrapped, padded(rollout(3), "right"))


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
@pytest.mark.parametrize("parts", [(), ("self_attn",)], ids=["layers", "attention"])
@pytest.mark.parametrize("transform_first", [True, False])
def test_fsdp2(transform_first: bool, parts: tuple[str, ...]) -> None:
    model = build("llama", torch.float64)
    wrapped = sharded(shared(model), *parts) if transform_first else shared(sharded(model, *parts))
    assert wrapped is model
    assert_equals_the_rows(wrapped, padded(rollout(3), "right"))


def test_restore_below_a_later_wrapper_is_refused_and_changes_nothing() -> None:
    model = sharded(shared(build("llama", torch.float64)), "self_attn")
    classes = [type(module) for module in model.modules()]
    with pytest.raises(NotImplementedError, match="FSDPLlamaAttention was wrapped after transform.*undo that first"):
        augtree_fx.restore(model)
    assert [type(module) for module in model.modules()] == classes
    assert_equals_the_rows(model, padded(rollout(3), "right"))
