"""Data and tensor parallelism around a transformed model, and transform inside them: two and three ranks, gloo, CPU.

Every rank has a batch of its own, so the gradient is the mean over ranks of what the unmodified, unwrapped model gives
for each batch, row by row. (Tensor-parallel ranks have one batch, and its gradient.) Every rank builds all of these.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from families import Batch, Result, build, errors, objective, padded, reference, rollout
from ranks import Ranks
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import augtree_fx
from augtree_fx import CostModel

FLOAT32 = 1e-5  # a float64 model with float32 up-casts, see test_models.py; TP alone is in float32, measured 2e-6

EVEN = 98  # transformers 5.17 shards a head over ranks in equal parts alone


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    group = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    yield group
    group.stop()


@dataclass
class Outcome:
    """What one rank found: errors by name, and how its batch ran."""

    errors: dict[str, float]
    num_shared: int
    fallbacks: dict[str, int]

    @staticmethod
    def of(model: nn.Module, got: Result, expected: Result) -> Outcome:
        said = augtree_fx.explain(model)
        return Outcome(errors(got, expected), said.num_shared, said.fallbacks)


def assert_shared_and_equal(outcomes: list[Outcome], num_shared: list[int] | None = None) -> None:
    wrong = [{name: value for name, value in each.errors.items() if not value <= FLOAT32} for each in outcomes]
    assert wrong == [{}] * len(outcomes)
    assert [each.num_shared for each in outcomes] == (num_shared or [1] * len(outcomes))
    assert [each.fallbacks for each in outcomes] == [{}] * len(outcomes)


def shared(model: nn.Module) -> nn.Module:
    return augtree_fx.transform(model, costs=CostModel.free())


def whole(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    (placement,) = tensor.placements
    if not isinstance(placement, _StridedShard):
        return tensor.full_tensor()
    # Fused projections of experts, each of which is sharded: torch 2.11 has no `full_tensor` of those.
    local = tensor.to_local().contiguous()
    shards = [torch.empty_like(local) for _ in range(distributed.get_world_size())]
    distributed.all_gather(shards, local)
    parts = zip(*(shard.chunk(placement.split_factor, placement.dim) for shard in shards), strict=True)
    return torch.cat([each for part in parts for each in part], placement.dim)


def step(model: nn.Module, batch: Batch, names: list[str]) -> Result:
    """Logits and gradients, gathered, under the names of the unwrapped model."""
    logits = batch.rows_of(model(**batch.inputs(), use_cache=False).logits)
    objective(logits, batch.tokens).backward()
    parameters = {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}
    return Result([whole(row).detach() for row in logits], {name: whole(parameters[name].grad) for name in names})


def batch_of(rank: int, lonely_rank: int | None) -> Batch:
    """Another rollout, hence another tree, on each rank; the rows of a lonely rank share nothing."""
    rows = [[torch.arange(3, 15) + 20 * row] for row in range(4)] if rank == lonely_rank else rollout(3, seed=rank)
    return padded(rows, "right")


@functools.cache
def expected_on(rank: int, lonely_rank: int | None = None, adapters: bool = False) -> Result:
    """Logits of a rank's batch, and the mean gradient over all ranks' batches."""
    model = build("llama", torch.float64)
    model = with_lora(model) if adapters else model
    results = [reference(model, batch_of(each, lonely_rank)) for each in range(distributed.get_world_size())]
    means = {
        name: torch.stack([result.gradients[name] for result in results]).mean(0) for name in results[rank].gradients
    }
    return Result(results[rank].logits, means)


def root_mean_square_error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


def with_lora(model: nn.Module) -> nn.Module:
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, config)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module, **options: object) -> nn.Module:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp2_attention(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer.self_attn, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model.model, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def accelerated(model: nn.Module) -> nn.Module:
    from accelerate import Accelerator

    prepared = Accelerator(cpu=True).prepare(model)
    assert isinstance(prepared, DistributedDataParallel)
    return prepared


def data_parallel(
    wrap: Callable[[nn.Module], nn.Module],
    transform_first: bool,
    checkpointing: bool = False,
    lonely_rank: int | None = None,
) -> Outcome:
    rank = distributed.get_rank()
    expected = expected_on(rank, lonely_rank)
    model = build("llama", torch.float64).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped = wrap(shared(model)) if transform_first else shared(wrap(model))
    got = step(wrapped, batch_of(rank, lonely_rank), list(expected.gradients))
    return Outcome.of(wrapped, got, expected)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("transform_first", [True, False], ids=["transform first", "wrapper first"])
@pytest.mark.parametrize("wrap", [ddp, fsdp2, fsdp2_attention])
def test_data_parallel(
    ranks: Ranks, wrap: Callable[[nn.Module], nn.Module], transform_first: bool, checkpointing: bool
) -> None:
    assert_shared_and_equal(ranks.run(data_parallel, wrap, transform_first, checkpointing))


@pytest.mark.parametrize("transform_first", [True, False], ids=["transform first", "wrapper first"])
def test_accelerate_prepare(ranks: Ranks, transform_first: bool) -> None:
    pytest.importorskip("accelerate")
    assert_shared_and_equal(ranks.run(data_parallel, accelerated, transform_first))


@pytest.mark.parametrize("wrap", [ddp, fsdp2])
def test_a_rank_that_shares_nothing_keeps_step_with_the_others(
    ranks: Ranks, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    num_shared = [1] * ranks.num_ranks
    num_shared[1] = 0
    assert_shared_and_equal(ranks.run(data_parallel, wrap, True, False, 1), num_shared)


def adapted_and_sharded(transform_first: bool) -> Outcome:
    rank = distributed.get_rank()
    expected = expected_on(rank, None, True)
    model = build("llama", torch.float64)
    model = fsdp2(with_lora(shared(model))) if transform_first else shared(fsdp2(with_lora(model)))
    return Outcome.of(model, step(model, batch_of(rank, None), list(expected.gradients)), expected)


@pytest.mark.parametrize("transform_first", [True, False], ids=["transform first", "wrappers first"])
def test_fsdp2_of_adapters(ranks: Ranks, transform_first: bool) -> None:
    pytest.importorskip("peft")
    assert_shared_and_equal(ranks.run(adapted_and_sharded, transform_first))


def in_bfloat16(transform_first: bool) -> dict[str, tuple[float, float]]:
    """Errors of the transformed and of the unmodified sharded model, both of which compute in bfloat16."""
    rank = distributed.get_rank()
    truth = expected_on(rank)
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    plain = fsdp2(build("llama").train(), **options)
    model = build("llama").train()
    model = fsdp2(shared(model), **options) if transform_first else shared(fsdp2(model, **options))
    unmodified, got = (
        errors(step(each, batch_of(rank, None), list(truth.gradients)), truth, root_mean_square_error)
        for each in (plain, model)
    )
    assert augtree_fx.explain(model).num_shared == 1
    return {name: (got[name], unmodified[name]) for name in got}


@pytest.mark.parametrize("transform_first", [True, False], ids=["transform first", "wrapper first"])
def test_fsdp2_in_bfloat16_errs_at_most_twice_as_much_as_unmodified(ranks: Ranks, transform_first: bool) -> None:
    for found in ranks.run(in_bfloat16, transform_first):
        assert {name: pair for name, pair in found.items() if not pair[0] <= 2 * pair[1]} == {}


def tensor_parallel(family: str, folder: Path) -> Outcome:
    """The plan of a family: all projections in most, routed experts alone in some."""
    batch = batch_of(0, None)
    expected = reference(build(family, seed=3, vocab_size=EVEN), batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the keyword is going to be replaced by another
        model = AutoModelForCausalLM.from_pretrained(
            folder, tp_plan="auto", tp_size=distributed.get_world_size(), attn_implementation="eager"
        )
    assert any(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in model.model.layers.parameters())
    return Outcome.of(model, step(shared(model), batch, list(expected.gradients)), expected)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "deepseek_v3"])
def test_tensor_parallel_plan_of_transformers(ranks: Ranks, family: str, tmp_path: Path) -> None:
    if ranks.num_ranks != 2:
        pytest.skip("the models have 2 key-value heads")
    build(family, seed=3, vocab_size=EVEN).save_pretrained(tmp_path)
    assert_shared_and_equal(ranks.run(tensor_parallel, family, tmp_path))


def parallelized(transform_first: bool) -> Outcome:
    """torch's own tensor parallelism, on the attention of a model that is otherwise replicated."""
    batch = batch_of(0, None)
    expected = reference(build("llama", torch.float64), batch)
    model = build("llama", torch.float64)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    if transform_first:
        shared(model)
    for layer in model.model.layers:
        plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"o_proj": RowwiseParallel()}
        parallelize_module(layer.self_attn, mesh, plan)
    if not transform_first:
        shared(model)
    return Outcome.of(model, step(model, batch, list(expected.gradients)), expected)


@pytest.mark.parametrize("transform_first", [True, False], ids=["transform first", "wrapper first"])
def test_parallelize_module(ranks: Ranks, transform_first: bool) -> None:
    if ranks.num_ranks != 2:
        pytest.skip("the model has 2 key-value heads")
    assert_shared_and_equal(ranks.run(parallelized, transform_first))
