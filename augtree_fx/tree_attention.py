"""Attention of a packed tree out of kernel calls, forward and backward: what the ops run.

Forward merges the partials of each query once. Backward hands the GLOBAL out and LSE to every call, so that the
calls' gradients simply add up; nothing differentiates through the merge (FlashAttention-2 ignores d-lse).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from augtree_fx import kernels, merge
from augtree_fx.reference import AttentionSpec, accumulation_dtype
from augtree_fx.tables import AttentionCall

_LSE_COLUMNS = 8  # columns added when the LSE itself has a gradient; flash kernels want head sizes in eights


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    calls: Sequence[AttentionCall],
    kv_index: Tensor | None,
    sinks: Tensor | None,
    spec: AttentionSpec,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Attention of every query to all keys that some call gives it.

    Args:
        q: ``[T, H, D]``; k: ``[S, K, D]``; v: ``[S, K, E]``, packed.
        calls: together they cover each query at least once; the first ones that reach a query are causal.
        kv_index: keys of the calls as indices into ``k``; ``None`` when calls address ``k`` directly.
        sinks: ``[H]`` or ``None``.

    Returns:
        ``out [T, H, E]``, ``lse [H, T]``.
    """
    k, v = _gather(kv_index, k, v)
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=accumulation_dtype(q.dtype), device=q.device)
    partials = [
        (call.q_range, *kernels.forward(q[call.q_range], k[call.k_range], v[call.k_range], call, spec, kernel))
        for call in calls
    ]
    for queries, members in _merge_plan([part[0] for part in partials], q.shape[0]):
        outs, lses = [], []
        for number in members:
            covered, part_out, part_lse = partials[number]
            local = slice(queries.start - covered.start, queries.stop - covered.start)
            outs.append(part_out[local])
            lses.append(part_lse[:, local])
        if len(outs) == 1 and sinks is None:
            out[queries], lse[:, queries] = outs[0], lses[0]
        else:
            merge.partial_softmax(outs, lses, sinks, out=out[queries], lse=lse[:, queries])
    return out, lse


def _merge_plan(ranges: Sequence[slice], num_queries: int) -> list[tuple[slice, list[int]]]:
    """Query ranges over which the same partials are merged: neighbours cut at every call's bounds."""
    cuts = sorted({0, num_queries} | {bound for item in ranges for bound in (item.start, item.stop)})
    plan = []
    for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
        members = [number for number, item in enumerate(ranges) if item.start <= begin and end <= item.stop]
        if members:
            plan.append((slice(begin, end), members))
    return plan


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    calls: Sequence[AttentionCall],
    kv_index: Tensor | None,
    sinks: Tensor | None,
    spec: AttentionSpec,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of `forward` by q, k, v and the sinks; dq, dk, dv are summed in float32 and rounded once."""
    head_dim, v_head_dim = q.shape[-1], v.shape[-1]
    num_keys = k.shape[0]
    dsinks = None if sinks is None else _sink_gradient(dout, dlse, out, lse, sinks)
    k_called, v_called = _gather(kv_index, k, v)
    if dlse is not None:
        dout, out, q, k_called, v_called = _with_lse_columns(dout, dlse, out, q, k_called, v_called)
    dq, dk, dv = _Sum(q), _Sum(k_called), _Sum(v_called)
    for call in calls:
        queries, keys = call.q_range, call.k_range
        dq_call, dk_call, dv_call = kernels.backward(
            dout[queries],
            q[queries],
            k_called[keys],
            v_called[keys],
            out[queries],
            lse[:, queries],
            call,
            spec,
            kernel,
        )
        dq.add(queries, dq_call)
        dk.add(keys, dk_call)
        dv.add(keys, dv_call)
    return (
        dq.total(None, len(q))[..., :head_dim].contiguous(),
        dk.total(kv_index, num_keys)[..., :head_dim].contiguous(),
        dv.total(kv_index, num_keys)[..., :v_head_dim].contiguous(),
        dsinks,
    )


class _Sum:
    """Sum of contributions to ranges of one gradient, added in the accumulation dtype and rounded once."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._parts: list[tuple[slice, Tensor]] = []

    def add(self, where: slice, contribution: Tensor) -> None:
        self._parts.append((where, contribution))

    def total(self, index: Tensor | None, size: int) -> Tensor:
        """The sum, for all rows of the gradient; with ``index``, summed onto ``size`` rows."""
        wide = accumulation_dtype(self._like.dtype)
        total = torch.zeros(
            self._like.shape, dtype=self._like.dtype if index is None else wide, device=self._like.device
        )
        for where, members in _merge_plan([part[0] for part in self._parts], len(self._like)):
            pieces = [self._piece(number, where) for number in members]
            # Adding two half-precision tensors rounds once already; more than two need a wide sum.
            narrow = len(pieces) <= 2 and all(piece.dtype == total.dtype for piece in pieces)
            first = pieces[0] if narrow else pieces[0].to(wide)
            for piece in pieces[1:]:
                first = first + piece
            total[where] = first
        if index is None:
            return total
        spread = total.new_zeros(size, *total.shape[1:])
        return spread.index_add_(0, index, total).to(self._like.dtype)

    def _piece(self, number: int, where: slice) -> Tensor:
        covered, part = self._parts[number]
        return part[where.start - covered.start : where.stop - covered.start]


def _gather(kv_index: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors if kv_index is None else tuple(x.index_select(0, kv_index) for x in tensors)


def _sink_gradient(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The sink is a key with value 0: its logit's gradient is ``p_sink * (dlse - rowsum(dout * out))``."""
    return merge.sink_gradient(dout, dlse, out, lse, sinks)


def _with_lse_columns(dout: Tensor, dlse: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Let a stock backward honour the LSE's gradient, exactly.

    A kernel computes ``dlogits = p * (dout v - rowsum(dout * out))``. One more value column that is 0, whose output
    is said to be -1 and whose output gradient is ``dlse``, turns that into ``p * (dout v - delta + dlse)``.
    """
    column = dlse.T[..., None].to(dout.dtype)
    dout = torch.cat([dout, column, column.new_zeros(*column.shape[:-1], _LSE_COLUMNS - 1)], dim=-1)
    minus_one = torch.full_like(column, -1.0).to(out.dtype)
    out = torch.cat([out, minus_one, minus_one.new_zeros(*column.shape[:-1], _LSE_COLUMNS - 1)], dim=-1)
    return dout, out, q, k, pad(v, (0, _LSE_COLUMNS))
