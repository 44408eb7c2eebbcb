"""The CPU's flash attention that ships with torch, one segment (or block of a windowed segment) at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from augtree_fx.kernels.problem import Problem, bhsd, pad_heads, unit_stride
from augtree_fx.reference import AttentionSpec, accumulation_dtype, visible
from augtree_fx.tables import AttentionCall

NAME = "cpu_flash"
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_BLOCK = 256  # queries of a masked block: the mask of a window of 4k keys then takes 4 MB


def why_not(problem: Problem, *, explicit: bool) -> str | None:
    """Why this kernel cannot run a call, or ``None``."""
    if problem.device_type != "cpu":
        return f"it runs on the CPU, the tensors are on {problem.device_type}"
    if problem.softcap:
        return "torch's CPU kernel has no soft-cap"
    return None


def _pieces(
    call: AttentionCall, spec: AttentionSpec, like: Tensor
) -> Iterator[tuple[slice, slice, bool, Tensor | None]]:
    """Query range, key range, causal flag and additive mask of every kernel launch; ranges local to the call."""
    q_base, k_base = call.q_range.start, call.k_range.start
    for segment in call.segments:
        if not segment.num_queries or not segment.num_keys:
            continue  # the kernel divides by the number of queries
        begin, first = segment.q_begin - q_base, segment.k_begin - k_base
        if not call.causal or (segment.num_queries == segment.num_keys and not _bites(segment.num_keys, spec)):
            yield (
                slice(begin, begin + segment.num_queries),
                slice(first, first + segment.num_keys),
                call.causal,
                None,
            )
            continue
        offset = segment.num_keys - segment.num_queries
        for start in range(0, segment.num_queries, _BLOCK):
            stop = min(start + _BLOCK, segment.num_queries)
            low = max(start + offset - spec.window + 1, 0) if spec.window else 0
            seen = visible(stop - start, stop + offset - low, True, spec.window, like.device)
            assert seen is not None
            mask = torch.zeros(seen.shape, dtype=like.dtype).masked_fill_(~seen, -torch.inf)[None, None]
            yield slice(begin + start, begin + stop), slice(first + low, first + stop + offset), False, mask


def _bites(num_keys: int, spec: AttentionSpec) -> bool:
    return bool(spec.window) and spec.window < num_keys


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """See `augtree_fx.kernels.forward`."""
    size = max(q.shape[-1], v.shape[-1])
    padded = unit_stride(pad_heads((q, k, v), size))
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=accumulation_dtype(q.dtype))
    for queries, keys, causal, mask in _pieces(call, spec, q):
        q_i, k_i, v_i = bhsd(padded[0][queries], padded[1][keys], padded[2][keys])
        out_i, lse_i = _FORWARD(q_i, k_i, v_i, 0.0, causal, attn_mask=mask, scale=spec.scale)
        out[queries] = out_i[0].transpose(0, 1)[..., : v.shape[-1]]
        lse[:, queries] = lse_i[0]
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """See `augtree_fx.kernels.backward`; dk and dv come back in the accumulation dtype."""
    size = max(q.shape[-1], v.shape[-1])
    q_p, k_p, v_p, out_p, dout_p = unit_stride(pad_heads((q, k, v, out, dout), size))
    dq = torch.zeros_like(q)
    dk, dv = (x.new_zeros(x.shape, dtype=accumulation_dtype(x.dtype)) for x in (k, v))
    for queries, keys, causal, mask in _pieces(call, spec, q):
        dout_i, q_i, k_i, v_i, out_i = bhsd(dout_p[queries], q_p[queries], k_p[keys], v_p[keys], out_p[queries])
        dq_i, dk_i, dv_i = _BACKWARD(
            dout_i, q_i, k_i, v_i, out_i, lse[None, :, queries], 0.0, causal, attn_mask=mask, scale=spec.scale
        )
        dq[queries] = dq_i[0].transpose(0, 1)[..., : q.shape[-1]]
        dk[keys] += dk_i[0].transpose(0, 1)[..., : k.shape[-1]]
        dv[keys] += dv_i[0].transpose(0, 1)[..., : v.shape[-1]]
    return dq, dk, dv
