"""Attention of a packed tree out of kernel calls, forward and backward: what the ops run.

Forward writes the first partial of each query into the result, where the others are merged into it, once. Backward
hands the GLOBAL out and LSE to every call, so that the calls' gradients simply add up; nothing differentiates through
the merge (FlashAttention-2 ignores d-lse).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from augtree_fx import kernels, merge
from augtree_fx.kernels import whole_tree
from augtree_fx.reference import AttentionSpec, accumulation_dtype
from augtree_fx.streams import Lanes
from augtree_fx.tables import Calls


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    calls: Calls,
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
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
    lse = torch.empty(q.shape[1], q.shape[0], dtype=accumulation_dtype(q.dtype), device=q.device)
    if kernels.why_not_whole_tree(q, v, calls, spec, kernel, whole_tree.FORWARD) is None:
        whole_tree.forward(q, k, v, calls, spec, out=out, lse=lse)
        if sinks is not None:
            merge.partial_softmax([out], [lse], sinks, out=out, lse=lse)
        return out, lse
    plan = _merge_plan([call.q_range for call in calls], q.shape[0])
    partials = []
    for number, call in enumerate(calls):
        rows = call.q_range
        into = (out[rows], lse[:, rows]) if _is_first(number, plan) else (None, None)
        partials.append(kernels.forward(q[rows], k[call.k_range], v[call.k_range], call, spec, kernel, *into))
    for rows, members in plan:
        outs = [_part(partials[number][0], calls[number].q_range, rows) for number in members]
        lses = [_part(partials[number][1].T, calls[number].q_range, rows).T for number in members]
        if not members:
            out[rows], lse[:, rows] = 0, -torch.inf
        elif len(members) > 1 or sinks is not None:
            merge.partial_softmax(outs, lses, sinks, out=out[rows], lse=lse[:, rows])
        elif outs[0].data_ptr() != out[rows].data_ptr():
            out[rows], lse[:, rows] = outs[0], lses[0]
    return out, lse


def _is_first(number: int, plan: Sequence[tuple[slice, list[int]]]) -> bool:
    """Whether part ``number`` is the first of all rows that it covers, and may be written where the result goes."""
    return all(members[0] == number for _, members in plan if number in members)


def _part(part: Tensor, covered: slice, rows: slice) -> Tensor:
    return part[rows.start - covered.start : rows.stop - covered.start]


def _merge_plan(ranges: Sequence[slice], num_rows: int) -> list[tuple[slice, list[int]]]:
    """Row ranges with the parts that cover each: neighbours cut at every part's bounds, in order, without a gap."""
    cuts = sorted({0, num_rows} | {bound for item in ranges for bound in (item.start, item.stop)})
    return [
        (
            slice(begin, end),
            [number for number, item in enumerate(ranges) if item.start <= begin and end <= item.stop],
        )
        for begin, end in zip(cuts[:-1], cuts[1:], strict=True)
    ]


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    calls: Calls,
    kv_index: Tensor | None,
    sinks: Tensor | None,
    spec: AttentionSpec,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of `forward` by q, k, v and the sinks; dq, dk, dv are summed in float32 and rounded once."""
    dsinks = None if sinks is None else merge.sink_gradient(dout, dlse, out, lse, sinks)
    if kernels.why_not_whole_tree(q, v, calls, spec, kernel, whole_tree.BACKWARD) is None:
        return *whole_tree.backward(dout, q, k, v, out, lse, calls, spec, dlse=dlse), dsinks
    k_called, v_called = _gather(kv_index, k, v)
    q_ranges, k_ranges = [call.q_range for call in calls], [call.k_range for call in calls]
    dq, dk, dv = _Sum(q, q_ranges), _Sum(k_called, k_ranges), _Sum(v_called, k_ranges)
    writes = kernels.all_write_into(q, v, calls, spec, kernel)
    # All places before the first call: memory that one call gives back must not be where another lane writes.
    places: list[dict[str, Tensor]] = [
        {"dq": dq.place(number), "dk": dk.place(number), "dv": dv.place(number)} if writes else {}
        for number in range(len(calls))
    ]
    lanes = Lanes(q.device, len(calls) if writes else 1)
    for number, call in enumerate(calls):
        rows, keys = call.q_range, call.k_range
        with lanes.next():
            gradients = kernels.backward(
                dout[rows],
                None if dlse is None else dlse[:, rows],
                q[rows],
                k_called[keys],
                v_called[keys],
                out[rows],
                lse[:, rows],
                call,
                spec,
                kernel,
                **places[number],
            )
        for total, gradient in zip((dq, dk, dv), gradients, strict=True):
            total.put(number, gradient)
    lanes.join()
    return dq.total(None, len(q)), dk.total(kv_index, len(k)), dv.total(kv_index, len(v)), dsinks


class _Sum:
    """Sum of contributions to ranges of one gradient, added in the accumulation dtype and rounded once.

    The first contribution to a range goes where the sum will be; so does its kernel's output, where the kernel can.
    """

    def __init__(self, like: Tensor, ranges: Sequence[slice]) -> None:
        self._result = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        self._ranges = ranges
        self._plan = _merge_plan(ranges, len(like))
        # Adding two half-precision tensors rounds once already; more than two need a wide sum.
        self._narrow = all(len(members) <= 2 for _, members in self._plan)
        self._parts: dict[int, Tensor] = {}

    def place(self, number: int) -> Tensor:
        """Where contribution ``number`` is to be written: in the result, or beside it."""
        where = self._result[self._ranges[number]]
        return where if self._narrow and _is_first(number, self._plan) else torch.empty_like(where)

    def put(self, number: int, contribution: Tensor) -> None:
        """Take contribution ``number``, wherever it was written."""
        self._parts[number] = contribution

    def total(self, index: Tensor | None, size: int) -> Tensor:
        """The sum, for all rows of the gradient; with ``index``, summed onto ``size`` rows."""
        wide = accumulation_dtype(self._result.dtype)
        result = self._result if index is None else self._result.to(wide)
        for rows, members in self._plan:
            pieces = [_part(self._parts[number], self._ranges[number], rows) for number in members]
            there = result[rows]
            if not pieces:
                there.zero_()
            elif len(pieces) == 1:
                if pieces[0].data_ptr() != there.data_ptr():
                    there.copy_(pieces[0])
            elif self._narrow and all(piece.dtype == result.dtype for piece in pieces):
                torch.add(pieces[0], pieces[1], out=there)
            else:
                first = pieces[0].to(wide)
                for piece in pieces[1:]:
                    first = first + piece
                there.copy_(first)
        if index is None:
            return result
        spread = result.new_zeros(size, *result.shape[1:])
        return spread.index_add_(0, index, result).to(self._result.dtype)


def _gather(kv_index: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors if kv_index is None else tuple(x.index_select(0, kv_index) for x in tensors)
