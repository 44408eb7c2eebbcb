"""Ops that merge partials of several ranks: the softmax-weighted reduce-scatter, and partials packed into one tensor.

Each rank has attended to its own keys: ``out [T, H, E]`` and ``lse [H, T]`` of all T queries. The merged result needs
only three numbers of a query and head in backward, ``dout . out``, the LSE and its gradient, so no partial moves again.
All ranks of ``group`` call an op at once, with tensors of one shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from augtree_fx import merge
from augtree_fx.dtensor_ops import collectives
from augtree_fx.ops import define, differentiable_once
from augtree_fx.reference import finite


def _gradients(dout: Tensor, delta: Tensor, total: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients by one partial of a merge.

    Args:
        dout: ``[T, H, E]`` by the merged output, in the accumulation dtype.
        delta: ``[T, H]`` ``dout . merged out`` less the gradient by the merged LSE.
        total: ``[T, H]`` merged LSE.
        out: ``[T, H, E]``, lse: ``[T, H]``, the partial.
    """
    weight = torch.exp(lse - finite(total))
    inner = _inner(dout, out, lse)
    return weight[..., None] * dout, weight * (inner - delta)


def _inner(dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """``dout . out``, 0 where a partial saw no key, whatever its output holds there."""
    return (dout * out.to(dout.dtype)).sum(-1).masked_fill(lse == -torch.inf, 0.0)


def _reduce(out: Tensor, lse: Tensor, group: str) -> tuple[Tensor, Tensor]:
    found = collectives.group_of(group)
    rank, ranks = distributed.get_rank(found), distributed.get_world_size(found)
    if len(out) % ranks or lse.shape != (out.shape[1], out.shape[0]):
        raise ValueError(
            f"partials must be [T, H, E] and [H, T] with T a multiple of the {ranks} ranks, got {list(out.shape)} and "
            f"{list(lse.shape)}; pad tokens, with an LSE of -inf"
        )
    spread = [x.contiguous().view(ranks, -1, *x.shape[1:]) for x in (out, lse.T)]
    pending = [collectives.exchange_equal(x, found) for x in spread]
    outs, lses = ([*x.wait()] for x in pending)
    outs[rank], lses[rank] = (x[rank] for x in spread)
    merged, total = merge.partial_softmax(outs, [x.T for x in lses], None)
    return merged.contiguous(), total.contiguous()


def _reduce_fake(out: Tensor, lse: Tensor, group: str) -> tuple[Tensor, Tensor]:
    share = out.shape[0] // distributed.get_world_size(collectives.group_of(group))
    return out.new_empty(share, *out.shape[1:]), lse.new_empty(lse.shape[0], share)


def _reduce_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, merged: Tensor, total: Tensor, group: str
) -> tuple[Tensor, Tensor]:
    found = collectives.group_of(group)
    pending = collectives.gather(dout.contiguous(), found)
    delta = (dout.to(lse.dtype) * merged.to(lse.dtype)).sum(-1)
    delta = delta if dlse is None else delta - dlse.T
    small = collectives.gather(torch.stack([total.T, delta], -1), found).wait().flatten(0, 1)
    wide = pending.wait().flatten(0, 1).to(lse.dtype)
    dout_part, dlse_part = _gradients(wide, small[..., 1], small[..., 0], out, lse.T)
    return dout_part.to(out.dtype).contiguous(), dlse_part.T.contiguous()


def _reduce_backward_fake(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out, memory_format=torch.contiguous_format), lse.new_empty(lse.shape)


def _save_reduce(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, lse, ctx.group = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(out, lse, *output)


def _reduce_grad(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, Tensor, None]:
    out, lse, merged, total = ctx.saved_tensors
    dout = torch.zeros_like(merged) if dout is None else dout
    return *torch.ops.augtree.reduce_partials_backward(dout, dlse, out, lse, merged, total, ctx.group), None


# Reduce-scatter: rank i gets the merged result of the i-th share of the queries. A partial's gradient counts what every
# rank's loss sends to its queries' results.
define("reduce_partials", "(Tensor out, Tensor lse, str group) -> (Tensor out, Tensor lse)", _reduce, _reduce_fake)
define(
    "reduce_partials_backward",
    "(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor merged, Tensor total, str group) "
    "-> (Tensor dout, Tensor dlse)",
    _reduce_backward,
    _reduce_backward_fake,
)
torch.library.register_autograd("augtree::reduce_partials", _reduce_grad, setup_context=_save_reduce)
differentiable_once("reduce_partials_backward")


def _pack(out: Tensor, lse: Tensor, groups: list[str]) -> Tensor:
    unseen = (lse.T == -torch.inf)[..., None]  # an axis of one rank merges nothing, and so would clear nothing
    return torch.cat([out.to(lse.dtype).masked_fill(unseen, 0.0), lse.T[..., None]], -1)


def _pack_fake(out: Tensor, lse: Tensor, groups: list[str]) -> Tensor:
    return lse.new_empty(*out.shape[:2], out.shape[2] + 1)


def _pack_backward(grad: Tensor, packed: Tensor, groups: list[str]) -> tuple[Tensor, Tensor]:
    dout, dlse, out, lse = grad[..., :-1], grad[..., -1], packed[..., :-1], packed[..., -1]
    found = [collectives.group_of(name) for name in groups]
    total = lse.contiguous()
    for group in found:
        total = torch.logsumexp(collectives.gather(total, group).wait(), 0)
    inner = torch.exp(lse - finite(total)) * _inner(dout, out, lse)
    for group in found:
        inner = collectives.gather(inner, group).wait().sum(0)
    dout_part, dlse_part = _gradients(dout, inner - dlse, total, out, lse)
    return dout_part.contiguous(), dlse_part.T.contiguous()


def _pack_backward_fake(grad: Tensor, packed: Tensor, groups: list[str]) -> tuple[Tensor, Tensor]:
    tokens, heads, size = packed.shape
    return packed.new_empty(tokens, heads, size - 1), packed.new_empty(heads, tokens)


def _save_pack(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    out, _, ctx.groups = inputs
    ctx.dtype = out.dtype
    ctx.save_for_backward(output)


def _pack_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    dout, dlse = torch.ops.augtree.pack_partials_backward(grad, *ctx.saved_tensors, ctx.groups)
    return dout.to(ctx.dtype), dlse, None


# A partial as one tensor [T, H, E + 1], the LSE behind the output, in the LSE's dtype. Its gradient is taken to be that
# of the MERGED tensor, equal on all ranks: as a DTensor's gradient is that of its value, whatever its placement.
define("pack_partials", "(Tensor out, Tensor lse, str[] groups) -> Tensor", _pack, _pack_fake)
define(
    "pack_partials_backward",
    "(Tensor grad, Tensor packed, str[] groups) -> (Tensor dout, Tensor dlse)",
    _pack_backward,
    _pack_backward_fake,
)
torch.library.register_autograd("augtree::pack_partials", _pack_grad, setup_context=_save_pack)
differentiable_once("pack_partials_backward")
