"""Attention under context parallelism whose keys follow from latents: these travel, and ranks expand what arrives.

No op: it runs modules of the model in forward and in backward, and their parameters get gradients through it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from augtree_fx.dtensor_ops import attention
from augtree_fx.dtensor_ops.attention import Lane, Latents
from augtree_fx.reference import AttentionSpec


class _Attention(torch.autograd.Function):
    """See `attend`; ``parameters`` are those of the expansion."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        rows: Tensor,
        call: tuple[Latents, Lane, AttentionSpec, str],
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        latents, lane, spec, kernel = call
        out, lse = attention.forward(q, k, v, lane, sinks, spec, kernel, latents)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, sinks, rows)
        ctx.call = (latents.expand, lane, spec, kernel)
        ctx.parameters = parameters
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, rows = ctx.saved_tensors
        expand, lane, spec, kernel = ctx.call
        dout = torch.zeros_like(out) if dout is None else dout
        latents = Latents(rows, expand, ctx.parameters)
        found = attention.backward(dout, dlse, q, k, v, out, lse, lane, sinks, spec, kernel, latents)
        parameters = (
            None if each is None else each.to(like.dtype)
            for each, like in zip(found.parameters, ctx.parameters, strict=True)
        )
        return found.q, found.k, found.v, found.sinks, found.latents, None, *parameters


@torch.compiler.disable(reason="latents are expanded by modules of the model, which no op of a graph holds")
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    latents: Latents,
    lane: Lane,
    sinks: Tensor | None,
    spec: AttentionSpec,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """As the op `augtree::context_parallel_attention`, what travels being ``latents``.

    Own keys and values get their gradients from this rank's queries alone (and from queries that visit it); what other
    ranks' queries give to them comes back to ``latents.rows``, summed in float32. Parameters of the expansion get those
    of all that this rank expanded, in one sum.

    Args:
        q: ``[share, H, D]``; k: ``[keys, K, D]``; v: ``[keys, K, E]``, local.
        sinks: ``[H]`` or ``None``.

    Returns:
        ``out [share, H, E]``, ``lse [H, share]``, local.
    """
    call = (latents, lane, spec, kernel)
    found: tuple[Tensor, Tensor] = _Attention.apply(q, k, v, sinks, latents.rows, call, *latents.parameters)
    return found
