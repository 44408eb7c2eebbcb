"""What ranks run in tests of context parallelism: attention and models, compared with rows on their own."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import families
import numpy as np
import torch
from attention_reference import Site, by_rows, leaves_of, make_inputs, packed_prefixes
from row_reference import Batch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

import augtree_fx
from augtree_fx import CostModel, TreeLayout
from augtree_fx.dtensor_ops.lanes import Choose, LanePlan
from augtree_fx.dtensor_ops.schedules import MOVE_Q, ROTATE_KV
from augtree_fx.dtensor_ops.shards import Shards
from augtree_fx.dtensor_ops.site import LaneTables, attend
from augtree_fx.tables import Span
from augtree_fx.transforms import find_stack

Wrap = Callable[[nn.Module], nn.Module]


def attention_errors(
    at: Site, batch: Batch, schedule: str, min_chunk: int = 1, span: Span = None, kernel: str = "reference"
) -> dict[str, float]:
    """Largest differences from the truth, relative to its largest value, of results and gradients summed over ranks."""
    rank, ranks, group = distributed.get_rank(), distributed.get_world_size(), distributed.group.WORLD.group_name
    inputs = make_inputs(at, batch)
    truth = by_rows(at, batch, inputs)
    layout = TreeLayout.from_padded(batch.input_ids, batch.attention_mask, batch.position_ids, costs=CostModel.free())
    shards = Shards.of(layout, ranks, min_chunk_tokens=min_chunk)
    lane = LaneTables.of(shards, rank, {span}, schedule, group)
    leaves, order = leaves_of(inputs), packed_prefixes(batch, layout)
    tokens = torch.from_numpy(shards.tokens(rank))
    own: list[Tensor] = []
    for name in "qkv":
        local = leaves[name][order][tokens.clamp(min=0)]
        own.append(torch.where((tokens < 0)[:, None, None], torch.nan, local))  # padding must reach no result
    out, lse = attend(*own, lane, span, leaves.get("sinks"), at.scale, at.softcap, kernel)
    assert torch.isfinite(out).all() and (out[tokens < 0] == 0).all()
    slots = np.concatenate([slots for slots in batch.slots if slots])
    owner, place = shards.keys
    index = torch.from_numpy((owner * shards.share + place)[layout.packed_index[slots]])
    whole, whole_lse = (torch.ops.augtree.gather_shares(x.contiguous(), group)[index] for x in (out, lse.T))
    loss = (whole * inputs["weigh_out"]).sum() + (whole_lse * inputs["weigh_lse"]).sum()
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))
    errors = {"out": relative(whole, truth.out), "lse": relative(whole_lse, truth.lse)}
    for name, expected in truth.gradients.items():
        found = gradients[name]
        found = torch.zeros_like(expected) if found is None else found.contiguous()
        distributed.all_reduce(found)
        errors[name] = relative(found / ranks, expected)
    return errors


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest value of the truth."""
    return float((found.detach() - expected).abs().max() / expected.abs().max())


@functools.cache
def model_and_truth(
    name: str, depth: int, style: str, seed: int = 0
) -> tuple[nn.Module, families.Batch, families.Result]:
    """A tiny model, a batch, and what the unmodified model computes for each row alone."""
    model = families.without_upcasts(name) if name in ("llama", "mistral") else families.build(name, torch.float64)
    model = model.train()
    batch = families.padded(families.rollout(depth), style)
    with families.KeepFloat64():
        return model, batch, families.reference(model, batch)


def halves(layout: TreeLayout, num_ranks: int) -> list[LanePlan]:
    """Every third row in a lane of the last rank, the others in one of the rest; a group is torn between them."""
    rows = range(layout.num_rows)
    small = tuple(row for row in rows if row % 3 == 0)
    large = tuple(row for row in rows if row % 3)
    return [LanePlan((num_ranks - 1,), small, MOVE_Q), LanePlan(tuple(range(num_ranks - 1)), large, ROTATE_KV)]


def in_pieces(schedule: str, layout: TreeLayout, num_ranks: int) -> list[LanePlan]:
    """All ranks in one lane, responses cut over them as prompts are."""
    return [LanePlan(tuple(range(num_ranks)), tuple(range(layout.num_rows)), schedule, cut=True)]


def parallel_model(
    model: nn.Module, lanes: Choose | None = None, wrap: Wrap | None = None, **options: Any
) -> nn.Module:
    """A transformed copy, every rank of the world in one axis, chunks of one token and more."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    model = copy.deepcopy(model)
    augtree_fx.transform(model, mesh=mesh, lanes=lanes, **{"costs": CostModel.free(), **options})
    state_of(model).lanes.min_chunk_tokens = 1
    return model if wrap is None else wrap(model)


def state_of(model: nn.Module) -> Any:
    return find_stack(model)._augtree_state


def model_errors(
    name: str, depth: int, style: str, *, lanes: Choose | None = None, checkpointing: bool = False, **options: Any
) -> dict[str, float]:
    """A model on replicated rows; gradients are averaged over ranks, as data parallelism does."""
    plain, batch, truth = model_and_truth(name, depth, style)
    model = parallel_model(plain, lanes, **options)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with families.KeepFloat64() if not checkpointing else contextlib.nullcontext():
        logits = batch.rows_of(model(**batch.inputs(), use_cache=False).logits)
        got = families.result_of(model, logits, batch)
    assert state_of(model).num_shared == 1 and not state_of(model).fallbacks
    return families.errors(averaged(got), truth)


def averaged(got: families.Result) -> families.Result:
    for gradient in got.gradients.values():
        distributed.all_reduce(gradient)
        gradient /= distributed.get_world_size()
    return got


def own_rows(batch: families.Batch, rank: int, ranks: int, lonely: bool) -> families.Batch:
    """A rank's rows: every so many-th, so that each group is on all ranks; one rank may have none but one."""
    mine = [row for row in range(len(batch.tokens)) if row % ranks == rank]
    mine = mine[:1] if lonely else mine
    return rows_of(batch, mine)


def rows_of(batch: families.Batch, some: list[int]) -> families.Batch:
    """Some rows of a batch."""
    index = torch.tensor(some)
    return families.Batch(
        batch.input_ids[index], batch.attention_mask[index],
        None if batch.position_ids is None else batch.position_ids[index],
        *([values[row] for row in some] for values in (batch.tokens, batch.column, batch.position)),
    )  # fmt: skip


def pooled_errors(name: str, depth: int, style: str, lonely: bool, **options: Any) -> dict[str, float]:
    """Each rank has its own rows and its own loss; the mean gradient is that of the mean of the losses."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    plain, batch, _ = model_and_truth(name, depth, style)
    parts = [own_rows(batch, each, ranks, lonely and each == ranks - 1) for each in range(ranks)]
    with families.KeepFloat64():
        results = [families.reference(plain, part) for part in parts]
        means = {key: sum(each.gradients[key] for each in results) / ranks for key in results[0].gradients}
        model = parallel_model(plain, rows="pooled", **options)
        got = averaged(families.computed(model, parts[rank]))
    assert state_of(model).num_shared == 1
    return families.errors(got, families.Result(results[rank].logits, means))


def sharded_errors(rows: str, **options: Any) -> dict[str, float]:
    """FSDP2 over the same ranks: it averages gradients, and nothing needs a factor."""
    from test_parallel_wrappers import fsdp2, step

    plain, batch, truth = model_and_truth("llama", 2, "right")
    model = parallel_model(plain, rows=rows, wrap=fsdp2, **options)
    return families.errors(step(model, batch, list(truth.gradients)), truth)


def layout_errors(schedule: str) -> dict[str, float]:
    """An explicit layout; a rank has the hidden states of its share, and shows those of all."""
    plain, batch, truth = model_and_truth("llama", 3, "right")
    model = parallel_model(plain, schedule=schedule)
    layout = TreeLayout.from_padded(batch.input_ids, batch.attention_mask, costs=CostModel.free())
    packed = augtree_fx.pack(model, layout)
    outputs = model(**packed.arguments)
    assert outputs.logits.shape[1] < layout.num_tokens or distributed.get_world_size() == 1
    logits = batch.rows_of(packed.show(outputs).logits)
    return families.errors(averaged(families.result_of(model, logits, batch)), truth)


def wave_errors(
    name: str, depth: int, max_tokens: int, schedule: str | None = None, wrap: Wrap | None = None, **options: Any
) -> dict[str, float]:
    """Waves of all ranks together: every rank has the loss of what its tokens predict, so gradients are summed."""
    plain, batch, truth = model_and_truth(name, depth, "right")
    model = parallel_model(plain, schedule=schedule, wrap=wrap)
    layout = TreeLayout.from_padded(batch.input_ids, batch.attention_mask, costs=CostModel.free())
    generator = torch.Generator().manual_seed(7)  # as `families.objective` draws
    advantages = torch.zeros(batch.input_ids.shape, dtype=torch.float64)
    for row, tokens in enumerate(batch.tokens):
        advantages[row, 1 : len(tokens)] = torch.randn(len(tokens) - 1, generator=generator, dtype=torch.float64)
    seen = torch.zeros(batch.input_ids.shape)
    with (
        families.KeepFloat64(),
        augtree_fx.prefill(
            model, layout, max_wave_tokens=max_tokens, scored=torch.ones_like(batch.input_ids), **options
        ) as tree,
    ):
        for wave in tree.waves():
            (-(advantages[wave.row, wave.index] * wave.logprobs()).sum()).backward()
            seen[wave.row, wave.index] += 1
    distributed.all_reduce(seen)
    expected = batch.attention_mask.clone()
    expected[:, 0] = 0
    assert torch.equal(seen.long(), expected), "every token is scored on one rank"
    gradients = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.requires_grad}
    if wrap is not None:  # FSDP2 averages them
        whole = {key: gradient.full_tensor() * distributed.get_world_size() for key, gradient in gradients.items()}
        return families.errors(families.Result(truth.logits, whole), truth)
    for gradient in gradients.values():
        distributed.all_reduce(gradient)
    return families.errors(families.Result(truth.logits, gradients), truth)
