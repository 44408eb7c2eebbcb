"""Ops of context parallelism as contracts: schema, fake kernel, autograd; the work is in `attention` and `collectives`.

Every op is called by all ranks of ``group`` at once, with the same ``schedule``. T tokens of a rank's share, H query
heads, K key heads, D head size of q and k, E of v; an LSE is ``[H, T]``. ``segments``, ``cu_seqlens``, ``kv_index`` and
``sizes`` are the tensors of `LaneCalls`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from augtree_fx import tree_attention
from augtree_fx.dtensor_ops import attention, collectives
from augtree_fx.dtensor_ops.schedules import GATHER_KV, MOVE_Q, SCHEDULES
from augtree_fx.dtensor_ops.tables import LaneCalls
from augtree_fx.ops import READS_HOST_TABLES, define, differentiable_once
from augtree_fx.reference import AttentionSpec, accumulation_dtype

_SAVED = "Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
_LANE = (
    "Tensor segments, Tensor cu_seqlens, Tensor kv_index, Tensor sizes, Tensor? sinks, float scale, float softcap, "
    "str kernel, str schedule, str group"
)


def lane_of(calls: LaneCalls, schedule: str, group: str) -> attention.Lane:
    """A rank's part of the attention of a lane.

    Raises:
        ValueError: the schedule is unknown, or the calls are of another schedule or number of ranks.
    """
    found = collectives.group_of(group)
    others = distributed.get_world_size(found) - 1
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    sets, sizes = calls.decoded()
    remote = min(others, 1) if schedule == GATHER_KV else others
    expected = 1 + remote + (others if schedule == MOVE_Q else 0)
    if len(sets) != expected:
        raise ValueError(f"{schedule} on {others + 1} ranks takes {expected} sets of calls, got {len(sets)}")
    return attention.Lane(sets[0], sets[1 : 1 + remote], sets[1 + remote :], sizes, schedule, found)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor,
    cu_seqlens: Tensor,
    kv_index: Tensor,
    sizes: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    kernel: str,
    schedule: str,
    group: str,
) -> tuple[Tensor, Tensor]:
    lane = lane_of(LaneCalls(segments, cu_seqlens, kv_index, sizes), schedule, group)
    return attention.forward(q, k, v, lane, sinks, AttentionSpec(scale, 0, softcap), kernel)


def _attend_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return tree_attention.empty_result(q, v)


def _attend_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor,
    cu_seqlens: Tensor,
    kv_index: Tensor,
    sizes: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    kernel: str,
    schedule: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lane = lane_of(LaneCalls(segments, cu_seqlens, kv_index, sizes), schedule, group)
    spec = AttentionSpec(scale, 0, softcap)
    found = attention.backward(dout, dlse, q, k, v, out, lse, lane, sinks, spec, kernel)
    return found.q, found.k, found.v, q.new_empty(0) if found.sinks is None else found.sinks


def _gradients_fake(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _attend_backward_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    segments: Tensor, cu_seqlens: Tensor, kv_index: Tensor, sizes: Tensor, sinks: Tensor | None, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _gradients_fake(q, k, v, sinks)


def _save_attend(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *calls, sinks, ctx.spec = *inputs[:8], inputs[8:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *calls, sinks)


def _attend_grad(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *calls, sinks = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dsinks = torch.ops.augtree.context_parallel_attention_backward(
        dout, dlse, q, k, v, out, lse, *calls, sinks, *ctx.spec
    )
    return dq, dk, dv, *[None] * len(calls), None if sinks is None else dsinks, *[None] * len(ctx.spec)


define(
    "context_parallel_attention",
    f"(Tensor q, Tensor k, Tensor v, {_LANE}) -> (Tensor out, Tensor lse)",
    _attend,
    _attend_fake,
    READS_HOST_TABLES,
)
define(
    "context_parallel_attention_backward",
    f"(Tensor dout, Tensor? dlse, {_SAVED}, {_LANE}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    _attend_backward,
    _attend_backward_fake,
    READS_HOST_TABLES,
)
torch.library.register_autograd("augtree::context_parallel_attention", _attend_grad, setup_context=_save_attend)
differentiable_once("context_parallel_attention_backward")


# Keys that other ranks' queries reach through a window: row ``index[i]`` of the rank's tokens is sent, ``num_sent`` to
# each rank. What comes back in backward is summed with what the rank itself sends to its rows, in float32.
def _fetch(tokens: Tensor, index: Tensor, num_sent: Tensor, num_received: Tensor, group: str) -> Tensor:
    pending = collectives.exchange(
        tokens.index_select(0, index), num_sent.tolist(), num_received.tolist(), collectives.group_of(group)
    )
    return torch.cat([tokens, pending.wait()])


def _fetch_fake(tokens: Tensor, index: Tensor, num_sent: Tensor, num_received: Tensor, group: str) -> Tensor:
    context = torch.library.get_ctx()
    return tokens.new_empty(context.new_dynamic_size(), *tokens.shape[1:])


def _bring_back(fetched: Tensor, index: Tensor, num_sent: Tensor, num_received: Tensor, own: int, group: str) -> Tensor:
    pending = collectives.exchange(
        fetched[own:].contiguous(), num_received.tolist(), num_sent.tolist(), collectives.group_of(group)
    )
    total = fetched[:own].to(accumulation_dtype(fetched.dtype), copy=True)
    return total.index_add_(0, index, pending.wait().to(total.dtype)).to(fetched.dtype)


def _bring_back_fake(
    fetched: Tensor, index: Tensor, num_sent: Tensor, num_received: Tensor, own: int, group: str
) -> Tensor:
    return fetched.new_empty(own, *fetched.shape[1:])


def _save_fetch(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tokens, *tables, ctx.group = inputs
    ctx.own = tokens.shape[0]  # len() would be a constant of a compiled graph
    ctx.save_for_backward(*tables)


def _fetch_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    back = torch.ops.augtree.bring_back_tokens(grad, *ctx.saved_tensors, ctx.own, ctx.group)
    return back, None, None, None, None


_MOVED = "Tensor index, Tensor num_sent, Tensor num_received"
define("fetch_tokens", f"(Tensor tokens, {_MOVED}, str group) -> Tensor", _fetch, _fetch_fake, READS_HOST_TABLES)
define(
    "bring_back_tokens",
    f"(Tensor fetched, {_MOVED}, SymInt own, str group) -> Tensor",
    _bring_back,
    _bring_back_fake,
    READS_HOST_TABLES,
)
torch.library.register_autograd("augtree::fetch_tokens", _fetch_grad, setup_context=_save_fetch)
differentiable_once("bring_back_tokens")


def _gather(local: Tensor, group: str) -> Tensor:
    return collectives.gather_tokens(local, collectives.group_of(group))


def _gather_fake(local: Tensor, group: str) -> Tensor:
    ranks = distributed.get_world_size(collectives.group_of(group))
    return local.new_empty(ranks * local.shape[0], *local.shape[1:])


def _scatter(spread: Tensor, group: str) -> Tensor:
    return collectives.sum_tokens(spread, collectives.group_of(group))


def _scatter_fake(spread: Tensor, group: str) -> Tensor:
    ranks = distributed.get_world_size(collectives.group_of(group))
    return spread.new_empty(spread.shape[0] // ranks, *spread.shape[1:])


def _save_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[1]


# Tokens of all ranks, one share after another. The gradient of a token is the sum over ranks: every rank's loss counts,
# and the mean of the parameters' gradients over ranks is that of the mean of the losses, as in data parallelism.
define("gather_shares", "(Tensor local, str group) -> Tensor", _gather, _gather_fake)
define("sum_shares", "(Tensor spread, str group) -> Tensor", _scatter, _scatter_fake)
torch.library.register_autograd(
    "augtree::gather_shares",
    lambda ctx, grad: (torch.ops.augtree.sum_shares(grad, ctx.group), None),
    setup_context=_save_group,
)
torch.library.register_autograd(
    "augtree::sum_shares",
    lambda ctx, grad: (torch.ops.augtree.gather_shares(grad, ctx.group), None),
    setup_context=_save_group,
)


# Keys of a wave after those of the nodes above, which carry no gradient themselves: their handle does, see `PromptKV`.
def _join(above: Tensor, handle: Tensor, own: Tensor) -> Tensor:
    return torch.cat([above, own])


def _join_fake(above: Tensor, handle: Tensor, own: Tensor) -> Tensor:
    return own.new_empty(above.shape[0] + own.shape[0], *own.shape[1:])


def _save_join(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.num_above = inputs[0].shape[0]


def _join_grad(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
    above = grad[: ctx.num_above].to(accumulation_dtype(grad.dtype), copy=True)  # a view would keep the wave's
    return None, above, grad[ctx.num_above :].clone()


define("join_keys", "(Tensor above, Tensor handle, Tensor own) -> Tensor", _join, _join_fake)
torch.library.register_autograd("augtree::join_keys", _join_grad, setup_context=_save_join)
