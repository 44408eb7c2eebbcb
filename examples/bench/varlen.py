"""Variable-length causal attention for the rivals, through the same kernels as ours, the fastest one that is installed.

A segment is one row. Rivals without reuse use it on whole rows, PrefixGrouper's scheme on copies of the prompt's KV.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from augtree_fx import kernels
from augtree_fx.kernels.problem import Problem
from augtree_fx.reference import AttentionSpec
from augtree_fx.tables import AttentionCall, Segment


def best_kernel(q: Tensor, v: Tensor) -> str:
    """The kernel that our own rule picks for variable-length rows of such tensors."""
    call = rows_call(2, 1, 1, q.device)
    return kernels.choose(Problem.of(q, v, call, AttentionSpec(1.0))).name


def rows_call(num_rows: int, num_queries: int, num_keys: int, device: torch.device) -> AttentionCall:
    """A causal call of equal rows: in each, the queries are the last of the keys."""
    segments = [
        Segment(row * num_queries, (row + 1) * num_queries, row * num_keys, (row + 1) * num_keys)
        for row in range(num_rows)
    ]
    steps = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    return AttentionCall(tuple(segments), True, steps * num_queries, steps * num_keys)


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, scale: float, kernel: str) -> Tensor:
    """Differentiable attention of a call.

    Args:
        q: ``[queries, heads, head size]``; k, v: ``[keys, key heads, head size]``; one dtype.
        call: the rows.
        scale: factor of the logits.
        kernel: one of `augtree_fx.kernels.NAMES`.

    Returns:
        ``[queries, heads, head size]``.
    """
    return _Attend.apply(q, k, v, call, AttentionSpec(scale), kernel)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, spec: AttentionSpec, kernel: str
    ) -> Tensor:
        out, lse = kernels.forward(q, k, v, call, spec, kernel)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = (call, spec, kernel)
        return out

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        call, spec, kernel = ctx.rest
        dq, dk, dv = kernels.backward(douts[0].contiguous(), None, q, k, v, out, lse, call, spec, kernel)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None
