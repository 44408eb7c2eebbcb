"""Reference attention in plain PyTorch: the specification that every kernel is tested against.

Legend: T tokens, H query heads, K key heads (H is a multiple of K), D head size of q and k, E head size of v.
The log-sum-exp (LSE) is natural, ``[H, T]``, in float32, or float64 when the inputs are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """What an attention site does besides softmax(q k^T) v.

    Attributes:
        scale: factor of the logits.
        window: number of keys that a query sees, itself included; 0 means all. Causal calls only.
        softcap: logits become ``softcap * tanh(logits / softcap)``; 0 means none.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays, everything else accumulates in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def visible(num_queries: int, num_keys: int, causal: bool, window: int, device: torch.device) -> Tensor | None:
    """``[queries, keys]`` bool, which keys a query sees, aligned at the last key; ``None`` when all."""
    if not causal:
        return None
    query = torch.arange(num_queries, device=device)[:, None] + (num_keys - num_queries)
    key = torch.arange(num_keys, device=device)[None, :]
    mask = key <= query
    return mask & (key > query - window) if window else mask


def _logits(q_THD: Tensor, k_SKD: Tensor, mask: Tensor | None, spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
    """Logits ``[H, T, S]`` in the accumulation dtype and, with a soft-cap, their derivative by the raw logits."""
    group = q_THD.shape[1] // k_SKD.shape[1]
    k_SHD = k_SKD.repeat_interleave(group, dim=1)
    logits = torch.einsum("thd,shd->hts", q_THD, k_SHD) * spec.scale
    slope = None
    if spec.softcap:
        capped = torch.tanh(logits / spec.softcap)
        logits, slope = capped * spec.softcap, 1 - capped * capped
    return (logits if mask is None else logits.masked_fill(~mask, -torch.inf)), slope


def attend(
    q_THD: Tensor, k_SKD: Tensor, v_SKE: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Attention of one segment.

    Args:
        q_THD, k_SKD, v_SKE: one dtype.
        mask: ``[T, S]`` bool, ``None`` for all keys.

    Returns:
        ``out_THE`` in the dtype of ``q`` and ``lse_HT``; a query without keys gives 0 and -inf.
    """
    dtype = accumulation_dtype(q_THD.dtype)
    logits, _ = _logits(q_THD.to(dtype), k_SKD.to(dtype), mask, spec)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - finite(lse)[..., None])
    v_SHE = v_SKE.to(dtype).repeat_interleave(q_THD.shape[1] // v_SKE.shape[1], dim=1)
    return torch.einsum("hts,she->the", weights, v_SHE).to(q_THD.dtype), lse


def attend_backward(
    dout_THE: Tensor,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKE: Tensor,
    out_THE: Tensor,
    lse_HT: Tensor,
    mask: Tensor | None,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """This segment's share of dq, dk, dv, given the GLOBAL ``out`` and ``lse`` (FlashAttention's backward)."""
    dtype = accumulation_dtype(q_THD.dtype)
    q, k, v, out, dout = (x.to(dtype) for x in (q_THD, k_SKD, v_SKE, out_THE, dout_THE))
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    logits, slope = _logits(q, k, mask, spec)
    weights = torch.exp(logits - finite(lse_HT.to(dtype))[..., None])
    delta = (dout * out).sum(-1).T
    v_SHE = v.repeat_interleave(num_heads // num_kv_heads, dim=1)
    dlogits = weights * (torch.einsum("the,she->hts", dout, v_SHE) - delta[..., None])
    dlogits = (dlogits if slope is None else dlogits * slope) * spec.scale
    k_SHD = k.repeat_interleave(num_heads // num_kv_heads, dim=1)
    dq = torch.einsum("hts,shd->thd", dlogits, k_SHD)
    dk = torch.einsum("hts,thd->shd", dlogits, q)
    dv = torch.einsum("hts,the->she", weights, dout)
    dk, dv = (x.unflatten(1, (num_kv_heads, -1)).sum(2) for x in (dk, dv))
    return dq.to(q_THD.dtype), dk.to(k_SKD.dtype), dv.to(v_SKE.dtype)


def finite(lse: Tensor) -> Tensor:
    """LSE with -inf (no keys) replaced by 0, a shift under which ``exp(-inf - shift)`` is 0 and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def partial_softmax(outs: list[Tensor], lses: list[Tensor], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge partials over disjoint key sets: ``lse = logsumexp(lse_i)``, ``out = sum exp(lse_i - lse) out_i``.

    Args:
        outs: partial outputs, each ``[T, H, E]``.
        lses: their LSEs, each ``[H, T]``; -inf where a partial saw no key.
        sinks: ``[H]`` logit of one more key whose value is 0, which joins the sum once, or ``None``.

    Returns:
        ``out [T, H, E]`` in the dtype of ``outs``, ``lse [H, T]``; empty partials stay empty (0, -inf).
    """
    stacked = torch.stack(lses)
    if sinks is not None:
        sink_row = sinks.to(stacked.dtype)[:, None].expand(stacked.shape[1:])
        lse = torch.logsumexp(torch.cat([stacked, sink_row[None]]), dim=0)
    else:
        lse = torch.logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - finite(lse)).transpose(1, 2)[..., None]
    merged = sum(weight * out.to(weight.dtype) for weight, out in zip(weights, outs, strict=True))
    assert isinstance(merged, Tensor)
    return merged.to(outs[0].dtype), lse


def partial_softmax_backward(
    dout: Tensor,
    dlse: Tensor | None,
    outs: list[Tensor],
    lses: list[Tensor],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Gradients of `partial_softmax` by its ``outs``, ``lses`` and ``sinks``; ``out`` and ``lse`` are its results."""
    dtype = lse.dtype
    wide_dout = dout.to(dtype)
    delta = (wide_dout * out.to(dtype)).sum(-1).T
    shift = finite(lse)
    douts, dlses = [], []
    for part_out, part_lse in zip(outs, lses, strict=True):
        weight = torch.exp(part_lse.to(dtype) - shift)
        inner = (wide_dout * part_out.to(dtype)).sum(-1).T - delta
        douts.append((weight.T[..., None] * wide_dout).to(part_out.dtype))
        dlses.append((weight * (inner if dlse is None else inner + dlse)).to(part_lse.dtype))
    dsinks = None
    if sinks is not None:
        weight = torch.exp(sinks.to(dtype)[:, None] - shift)
        dsinks = (weight * (-delta if dlse is None else dlse - delta)).sum(1).to(sinks.dtype)
    return douts, dlses, dsinks
