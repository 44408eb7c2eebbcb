"""Attention of a packed tree out of kernel calls, forward and backward: what the ops run.

Forward writes the first partial of each query into the result, where the others are merged into it, once. Backward
hands the GLOBAL out and LSE to every call, so that the calls' gradients simply add up; nothing differentiates through
the merge (FlashAttention-2 ignores d-lse).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from augtree_fx import kernels, merge
from augtree_fx.kernels import whole_tree
from augtree_fx.reference import AttentionSpec, accumulation_dtype
from augtree_fx.streams import Lanes
from augtree_fx.tables import AttentionCall, Calls


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
    if kernels.why_not_whole_tree(q, v, calls, spec, kernel, whole_tree.FORWARD) is None:
        out, lse = empty_result(q, v)
        whole_tree.forward(q, k, v, calls, spec, out=out, lse=lse)
        if sinks is not None:
            merge.partial_softmax([out], [lse], sinks, out=out, lse=lse)
        return out, lse
    partials = Partials(q, v, [call.q_range for call in calls])
    partials.add_calls(q, k, v, calls, spec, kernel)
    return partials.merged(sinks)


def empty_result(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for ``out [T, H, E]`` and ``lse [H, T]`` of queries ``[T, H, D]`` and values ``[S, K, E]``."""
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
    return out, torch.empty(q.shape[1], q.shape[0], dtype=accumulation_dtype(q.dtype), device=q.device)


class Partials:
    """Partial attentions of ranges of queries, which are put in one after another and merged at the end.

    The first partial of a range is written where its result goes, by the kernel itself where that can.

    Args:
        q: ``[T, H, D]`` the queries; v: ``[S, K, E]`` some values; only their shapes and dtypes count.
        ranges: queries of each partial, in the order in which they will be put in.
    """

    def __init__(self, q: Tensor, v: Tensor, ranges: Sequence[slice]) -> None:
        self.out, self.lse = empty_result(q, v)
        self._ranges = ranges
        self._plan = _merge_plan(ranges, len(q))
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add_calls(
        self, q: Tensor, k: Tensor, v: Tensor, calls: Iterable[AttentionCall], spec: AttentionSpec, kernel: str
    ) -> None:
        """Run kernel calls, and put in what they give."""
        for call in calls:
            rows = call.q_range
            into = (self.out[rows], self.lse[:, rows]) if _is_first(len(self._parts), self._plan) else (None, None)
            self.add(*kernels.forward(q[rows], k[call.k_range], v[call.k_range], call, spec, kernel, *into))

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Put in the next partial, ``[t, H, E]`` and ``[H, t]``."""
        self._parts.append((out, lse))

    def merged(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """``out [T, H, E]`` and ``lse [H, T]``: 0 and -inf where no partial was."""
        assert len(self._parts) == len(self._ranges), "every partial must be put in before the merge"
        for rows, members in self._plan:
            outs = [_part(self._parts[number][0], self._ranges[number], rows) for number in members]
            lses = [_part(self._parts[number][1].T, self._ranges[number], rows).T for number in members]
            out, lse = self.out[rows], self.lse[:, rows]
            if not members:
                out.zero_(), lse.fill_(-torch.inf)
            elif len(members) > 1 or sinks is not None:
                merge.partial_softmax(outs, lses, sinks, out=out, lse=lse)
            elif outs[0].data_ptr() != out.data_ptr():
                out.copy_(outs[0]), lse.copy_(lses[0])
        return self.out, self.lse


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


@dataclass(frozen=True)
class Results:
    """Queries with their results, and the gradients of those.

    Attributes:
        dout: ``[T, H, E]``; dlse: ``[H, T]`` or ``None``; q: ``[T, H, D]``; out: ``[T, H, E]``; lse: ``[H, T]``.
    """

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    out: Tensor
    lse: Tensor


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
    *,
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of `forward` by q, k, v and the sinks; dq, dk, dv are summed in float32 and rounded once.

    Args:
        wide: leave dk and dv in float32 (float64 of float64), for sums that go on elsewhere.
    """
    dsinks = None if sinks is None else merge.sink_gradient(dout, dlse, out, lse, sinks)
    if not wide and kernels.why_not_whole_tree(q, v, calls, spec, kernel, whole_tree.BACKWARD) is None:
        return *whole_tree.backward(dout, q, k, v, out, lse, calls, spec, dlse=dlse), dsinks
    results = Results(dout, dlse, q, out, lse)
    k_called, v_called = _gather(kv_index, k, v)
    dq = Sum(q, [call.q_range for call in calls])
    dk, dv = backward_calls(results, k_called, v_called, calls, dq, spec, kernel, wide=wide)
    return dq.total(), dk.total(kv_index, len(k)), dv.total(kv_index, len(v)), dsinks


def backward_calls(
    results: Results,
    k: Tensor,
    v: Tensor,
    calls: Sequence[AttentionCall],
    dq: Sum,
    spec: AttentionSpec,
    kernel: str,
    *,
    wide: bool = False,
) -> tuple[Sum, Sum]:
    """Run the backward of kernel calls on one set of keys.

    Args:
        results: of all queries; out and LSE are the global ones.
        dq: gets the next contributions to the gradient of the queries.
        wide: keep dk and dv in the accumulation dtype.

    Returns:
        dk and dv of these keys, as sums.
    """
    k_ranges = [call.k_range for call in calls]
    dk, dv = Sum(k, k_ranges, wide=wide), Sum(v, k_ranges, wide=wide)
    writes = kernels.all_write_into(results.q, v, calls, spec, kernel)
    # All places before the first call: memory that one call gives back must not be where another lane writes.
    places: list[dict[str, Tensor]] = [
        {"dq": dq.place(number), "dk": dk.place(number), "dv": dv.place(number)} if writes else {}
        for number in range(len(calls))
    ]
    lanes = Lanes(results.q.device, len(calls) if writes else 1)
    for number, call in enumerate(calls):
        rows, keys = call.q_range, call.k_range
        with lanes.next():
            gradients = kernels.backward(
                results.dout[rows],
                None if results.dlse is None else results.dlse[:, rows],
                results.q[rows],
                k[keys],
                v[keys],
                results.out[rows],
                results.lse[:, rows],
                call,
                spec,
                kernel,
                **places[number],
            )
        for total, gradient in zip((dq, dk, dv), gradients, strict=True):
            total.add(gradient)
    lanes.join()
    return dk, dv


class Sum:
    """Sum of contributions to ranges of one gradient, added in the accumulation dtype and rounded once.

    The first contribution to a range goes where the sum will be; so does its kernel's output, where the kernel can.

    Args:
        like: the tensor whose gradient it is.
        ranges: rows of each contribution, in the order in which they will be added.
        wide: do not round the sum.
    """

    def __init__(self, like: Tensor, ranges: Sequence[slice], *, wide: bool = False) -> None:
        dtype = accumulation_dtype(like.dtype) if wide else like.dtype
        self._result = torch.empty(like.shape, dtype=dtype, device=like.device)
        self._dtype = like.dtype
        self._ranges = ranges
        self._plan = _merge_plan(ranges, len(like))
        # Adding two half-precision tensors rounds once already; more than two need a wide sum.
        self._narrow = dtype == like.dtype and all(len(members) <= 2 for _, members in self._plan)
        self._parts: list[Tensor] = []

    def place(self, ahead: int) -> Tensor:
        """Where the contribution after ``ahead`` more is to be written: in the result, or beside it."""
        number = len(self._parts) + ahead
        where = self._result[self._ranges[number]]
        if self._narrow and _is_first(number, self._plan):
            return where
        return torch.empty(where.shape, dtype=self._dtype, device=where.device)

    def add(self, contribution: Tensor) -> None:
        """Take the next contribution, wherever it was written."""
        self._parts.append(contribution)

    def total(self, index: Tensor | None = None, size: int = 0) -> Tensor:
        """The sum, for all rows of the gradient; with ``index``, summed onto ``size`` rows."""
        assert len(self._parts) == len(self._ranges), "every contribution must be added before the sum is taken"
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
