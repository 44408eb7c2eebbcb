"""The reference as a kernel: any device, dtype and feature, in blocks of queries so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from augtree_fx import reference
from augtree_fx.kernels.problem import Problem
from augtree_fx.reference import AttentionSpec
from augtree_fx.tables import AttentionCall

NAME = "reference"
_BLOCK_LOGITS = 1 << 22  # logits a head and block: 16 MB in float32


def why_not(problem: Problem, *, explicit: bool) -> str | None:
    """The reference runs everything."""
    return None


def blocks(call: AttentionCall, window: int) -> Iterator[tuple[slice, slice, int]]:
    """Query ranges, the keys they can see, and the number of keys a causal mask counts from; local to the call."""
    q_base, k_base = call.q_range.start, call.k_range.start
    for segment in call.segments:
        step = max(_BLOCK_LOGITS // max(segment.num_keys, 1), 16)
        for begin in range(0, segment.num_queries, step):
            end = min(begin + step, segment.num_queries)
            first, last = 0, segment.num_keys
            if call.causal:
                last = segment.num_keys - segment.num_queries + end
                first = max(last - (end - begin) - window + 1, 0) if window else 0
            queries = slice(segment.q_begin - q_base + begin, segment.q_begin - q_base + end)
            keys = slice(segment.k_begin - k_base + first, segment.k_begin - k_base + last)
            yield queries, keys, last - first


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """See `augtree_fx.kernels.forward`."""
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=reference.accumulation_dtype(q.dtype), device=q.device)
    for queries, keys, num_keys in blocks(call, spec.window):
        mask = reference.visible(queries.stop - queries.start, num_keys, call.causal, spec.window, q.device)
        out[queries], lse[:, queries] = reference.attend(q[queries], k[keys], v[keys], mask, spec)
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """See `augtree_fx.kernels.backward`; dk and dv are summed over query blocks in the accumulation dtype."""
    dtype = reference.accumulation_dtype(q.dtype)
    dq = torch.zeros_like(q)
    dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
    for queries, keys, num_keys in blocks(call, spec.window):
        mask = reference.visible(queries.stop - queries.start, num_keys, call.causal, spec.window, q.device)
        dq[queries], dk_block, dv_block = reference.attend_backward(
            dout[queries], q[queries], k[keys], v[keys], out[queries], lse[:, queries], mask, spec
        )
        dk[keys] += dk_block
        dv[keys] += dv_block
    return dq, dk, dv
