"""What ranks run in tests of DTensors: partials that merge, ops whose arguments are sharded, ops as contracts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from cp_workers import relative
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.library import opcheck

from augtree_fx import TreeLayout
from augtree_fx.dtensor_ops.placement import PartialSoftmax, partials_from_local, unpack_partials
from augtree_fx.dtensor_ops.shards import Shards
from augtree_fx.dtensor_ops.tables import LaneCalls, whole_path

HEADS, SIZE = 4, 3


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh(device(), shape, mesh_dim_names=tuple(f"axis{axis}" for axis in range(len(shape))))


def device() -> str:
    """Where this rank's tensors are."""
    return "cuda" if distributed.get_backend() == "nccl" else "cpu"


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(device())


def make_partials(num_tokens: int, num_parts: int) -> tuple[list[Tensor], list[Tensor]]:
    """The same on every rank; a query that a part saw no key for has NaN there, and the first one has none at all."""
    outs = [random(num_tokens, HEADS, SIZE, seed=part) for part in range(num_parts)]
    lses = [3 * random(HEADS, num_tokens, seed=100 + part) for part in range(num_parts)]
    for part, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        for token in {0, num_tokens - 1 - part} & set(range(num_tokens)):
            lse[:, token] = -torch.inf
            out[token] = torch.nan
    return outs, lses


def merged_by_hand(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Each part as one key, whose logit is its LSE and whose value is its output."""
    logits = torch.stack(lses)
    unseen = (logits == -torch.inf).all(0)
    logits = logits.masked_fill(unseen, 0.0)
    weights = torch.softmax(logits, 0).masked_fill(unseen, 0.0)
    seen = [x.masked_fill((lse == -torch.inf).T[..., None], 0.0) for x, lse in zip(outs, lses, strict=True)]
    out = torch.stack([w.T[..., None] * x for w, x in zip(weights, seen, strict=True)]).sum(0)
    return out, torch.logsumexp(logits, 0).masked_fill(unseen, -torch.inf)


def weighed(out: Tensor, lse: Tensor) -> Tensor:
    """A loss of both results; an LSE of -inf is left out."""
    seen = torch.isfinite(lse)
    weigh_out, weigh_lse = random(*out.shape, seed=7), random(*lse.shape, seed=8)
    return (weigh_out * out).sum() + (weigh_lse * torch.where(seen, lse, 0.0)).sum()


def gradients_by_hand(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Results, and gradients of outputs and LSEs, of `weighed`."""
    leaves = [x.clone().requires_grad_() for x in (*outs, *lses)]
    out, lse = merged_by_hand(leaves[: len(outs)], leaves[len(outs) :])
    return out.detach(), lse.detach(), list(torch.autograd.grad(weighed(out, lse), leaves))


def errors_of(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest differences, relative to the largest value of the truth; rows without keys agree exactly."""
    errors = {}
    for name, truth in expected.items():
        empty = truth == -torch.inf
        assert torch.equal(found[name] == -torch.inf, empty), name
        errors[name] = relative(found[name].masked_fill(empty, 0.0), truth.masked_fill(empty, 0.0))
    return errors


def merge_errors(shape: tuple[int, ...], placements: list[Placement], target: list[Placement]) -> dict[str, float]:
    """Partials of the ranks of axes with `PartialSoftmax`, other axes sharded alike, merged to ``target``."""
    mesh, num_tokens = mesh_of(shape), 8 if Shard(0) in placements else 7
    axes = [axis for axis, placement in enumerate(placements) if isinstance(placement, PartialSoftmax)]
    part = 0
    for axis in axes:
        part = part * mesh.size(axis) + mesh.get_local_rank(axis)
    outs, lses = make_partials(num_tokens, torch.Size([mesh.size(axis) for axis in axes]).numel())
    out, lse, gradients = gradients_by_hand(outs, lses)
    rest = [Replicate() if axis in axes else placement for axis, placement in enumerate(placements)]
    own = [
        local_of(x, mesh, rest if tokens == 0 else [swapped(p) for p in rest]).requires_grad_()
        for x, tokens in ((outs[part], 0), (lses[part], 1))
    ]
    packed = partials_from_local(*own, mesh, placements).redistribute(placements=target)
    found_out, found_lse = (x.full_tensor() for x in unpack_partials(packed))
    found = torch.autograd.grad(weighed(found_out, found_lse), own)
    expected = [
        local_of(gradients[part], mesh, rest),
        local_of(gradients[len(outs) + part], mesh, [swapped(p) for p in rest]),
    ]
    return errors_of(
        {"out": found_out, "lse": found_lse, "dout": found[0], "dlse": found[1]},
        {"out": out, "lse": lse, "dout": expected[0], "dlse": expected[1]},
    )


def half_precision_errors() -> dict[str, float]:
    """Outputs in bfloat16 with float32 LSEs, through the placement and through the op; gradients too."""
    group, mesh = distributed.group.WORLD, mesh_of((distributed.get_world_size(),))
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    outs, lses = make_partials(2 * ranks, ranks)
    outs, lses = [x.bfloat16() for x in outs], [x.float() for x in lses]
    out, lse = merged_by_hand([x.double() for x in outs], [x.double() for x in lses])
    own = [outs[rank].requires_grad_(), lses[rank].requires_grad_()]
    merged = partials_from_local(*own, mesh, [PartialSoftmax()]).redistribute(placements=[Shard(0)])
    placed = unpack_partials(merged, torch.bfloat16)
    scattered = torch.ops.augtree.reduce_partials(*own, group.group_name)
    errors = {}
    for name, found in {"placement": [x.to_local() for x in placed], "op": scattered}.items():
        assert [x.dtype for x in found] == [torch.bfloat16, torch.float32]
        share = slice(2 * rank, 2 * rank + 2)
        of_share = errors_of({"out": found[0], "lse": found[1]}, {"out": out[share], "lse": lse[:, share]})
        errors |= {f"{name}, {each}": error for each, error in of_share.items()}
        gradients = torch.autograd.grad([found[0].sum()], own)
        assert [x.dtype for x in gradients] == [torch.bfloat16, torch.float32]
    return errors


def swapped(placement: Placement) -> Placement:
    """Placement of an LSE ``[H, T]`` whose output ``[T, H, E]`` has this one."""
    return Shard(1 - placement.dim) if isinstance(placement, Shard) else placement


def local_of(whole: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> Tensor:
    """This rank's part, cut by `torch.chunk` along one axis after another."""
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            chunks = whole.chunk(mesh.size(axis), placement.dim)
            rank = mesh.get_local_rank(axis)
            whole = chunks[rank] if rank < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole.clone()


def op_errors() -> dict[str, float]:
    """`reduce_partials`, whose results on all ranks have one loss in which each rank's queries count once."""
    group = distributed.group.WORLD
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    outs, lses = make_partials(3 * ranks, ranks)
    out, lse, gradients = gradients_by_hand(outs, lses)
    own = [x[rank].clone().requires_grad_() for x in (outs, lses)]
    found = torch.ops.augtree.reduce_partials(*own, group.group_name)
    share = slice(3 * rank, 3 * rank + 3)
    whole = [torch.ops.augtree.gather_shares(x.contiguous(), group.group_name) for x in (found[0], found[1].T)]
    dout, dlse = torch.autograd.grad(weighed(whole[0], whole[1].T) / ranks, own)
    return errors_of(
        {"out": found[0], "lse": found[1], "dout": dout, "dlse": dlse},
        {"out": out[share], "lse": lse[:, share], "dout": gradients[rank], "dlse": gradients[ranks + rank]},
    )


def rule_errors(
    op: str, shape: tuple[int, ...], placements: list[Placement], sinks: list[Placement] | None | str
) -> dict[str, float]:
    """An attention op on DTensors against the op on whole tensors; ``sinks`` may be plain."""
    mesh = mesh_of(shape)
    layout = TreeLayout.from_groups([[1] * 5, [2, 3]], [[[4], [5, 5]], [[6, 6, 6]]])
    if op == "prefill_attention":
        layout = TreeLayout.from_groups([[1] * 5, [2, 3] * 4], [[[]], [[]]])
    tables = layout.tables()
    found_tables = [tables.segments, tables.cu_seqlens.to(device())]
    found_tables += [tables.kv_index] if op == "replay_attention" else []
    tokens = layout.num_tokens
    whole = {"q": random(tokens, 8, 4, seed=1), "k": random(tokens, 4, 4, seed=2), "v": random(tokens, 4, 3, seed=3)}
    placed = dict.fromkeys("qkv", placements)
    if sinks is not None:
        whole["sinks"], placed["sinks"] = random(8, seed=4), sinks

    def call(leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        tensors = [leaves[name] for name in "qkv"]
        return getattr(torch.ops.augtree, op)(*tensors, *found_tables, leaves.get("sinks"), 0.4, 0, 0.0, "reference")

    return op_on_dtensors(call, whole, placed, mesh)


def merge_rule_errors(shape: tuple[int, ...], placements: list[Placement]) -> dict[str, float]:
    """`partial_softmax` of three sharded partials, with replicated sinks."""
    outs, lses = make_partials(7, 3)
    whole = {f"out{n}": x.nan_to_num(0.0) for n, x in enumerate(outs)} | {f"lse{n}": x for n, x in enumerate(lses)}
    whole["sinks"] = random(HEADS, seed=4)
    alike = [swapped(placement) for placement in placements]
    placed = {name: placements if name.startswith("out") else alike for name in whole}
    placed["sinks"] = [Replicate()] * len(shape)

    def call(leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        parts = [[leaves[f"{name}{n}"] for n in range(3)] for name in ("out", "lse")]
        return torch.ops.augtree.partial_softmax(*parts, leaves["sinks"])

    return op_on_dtensors(call, whole, placed, mesh_of(shape))


def op_on_dtensors(
    call: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]],
    whole: dict[str, Tensor],
    placed: dict[str, Any],
    mesh: DeviceMesh,
) -> dict[str, float]:
    """Errors of results and gradients; results and gradients are placed as what they belong to."""
    leaves = {name: x.clone().requires_grad_() for name, x in whole.items()}
    out, lse = call(leaves)
    truth = dict(zip(leaves, torch.autograd.grad(weighed(out, lse), list(leaves.values())), strict=True))
    sharded = {
        name: (x.clone() if placed[name] == "plain" else distribute_tensor(x, mesh, placed[name])).requires_grad_()
        for name, x in whole.items()
    }
    found_out, found_lse = call(sharded)
    first = next(iter(placed.values()))
    if any(isinstance(placement, Shard) and placement.dim < 2 for placement in first):
        assert list(found_out.placements) == list(first)
        assert list(found_lse.placements) == [swapped(placement) for placement in first]
    loss = weighed(found_out.full_tensor(), found_lse.full_tensor())
    found = dict(zip(sharded, torch.autograd.grad(loss, list(sharded.values())), strict=True))
    for name, gradient in found.items():
        if placed[name] != "plain":
            assert gradient.placements == sharded[name].placements, (name, gradient.placements)
            found[name] = gradient.full_tensor()
    return errors_of(
        {"out": found_out.full_tensor(), "lse": found_lse.full_tensor(), **found}, {"out": out, "lse": lse, **truth}
    )


def check_ops() -> None:
    """`opcheck` of every op with collectives, and of their backward ops; all ranks make the same calls."""
    ops, group = torch.ops.augtree, distributed.group.WORLD.group_name
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    tokens = random(2 * ranks, 3, seed=1).requires_grad_()
    opcheck(ops.gather_shares.default, (tokens, group))
    opcheck(ops.sum_shares.default, (tokens, group))
    counts = torch.full((ranks,), 2)
    counts[rank] = 0
    moved = (torch.arange(2).repeat(ranks - 1), counts, counts)
    opcheck(ops.fetch_tokens.default, (tokens, *moved, group))
    fetched = ops.fetch_tokens(tokens.detach(), *moved, group)
    opcheck(ops.bring_back_tokens.default, (fetched, *moved, len(tokens), group))
    outs, lses = make_partials(2 * ranks, ranks)
    own = [x[rank].clone().requires_grad_() for x in (outs, lses)]
    opcheck(ops.reduce_partials.default, (*own, group))
    opcheck(ops.pack_partials.default, (*own, [group]))
    plain = [x.detach() for x in own]
    merged, total = ops.reduce_partials(*plain, group)
    results = (torch.randn_like(merged), torch.randn_like(total), *plain, merged, total)
    opcheck(ops.reduce_partials_backward.default, (*results, group))
    packed = ops.pack_partials(*plain, [group])
    opcheck(ops.pack_partials_backward.default, (torch.randn_like(packed), packed, [group]))


def check_attention_op(schedule: str) -> None:
    """`opcheck` of attention over the ranks' keys, and of its backward."""
    ops, group = torch.ops.augtree, distributed.group.WORLD.group_name
    layout = TreeLayout.from_groups([[1] * 9, [2, 3]], [[[4], [5, 5]], [[6, 6, 6]]])
    shards = Shards.of(layout, distributed.get_world_size(), min_chunk_tokens=1)
    found = LaneCalls.of(whole_path(shards, distributed.get_rank(), schedule))
    calls = found.tensors
    q, k, v = (random(shards.share, heads, 4, seed=heads).requires_grad_() for heads in (4, 2, 2))
    sinks = random(4, seed=3).requires_grad_()
    rest = (*calls, sinks, 0.4, 0.0, "reference", schedule, group)
    opcheck(ops.context_parallel_attention.default, (q, k, v, *rest))
    plain = [x.detach() for x in (q, k, v)]
    rest = (*calls, sinks.detach(), *rest[5:])
    out, lse = ops.context_parallel_attention(*plain, *rest)
    for dlse in (None, torch.randn_like(lse)):
        arguments = (torch.randn_like(out), dlse, *plain, out, lse, *rest)
        opcheck(ops.context_parallel_attention_backward.default, arguments)
