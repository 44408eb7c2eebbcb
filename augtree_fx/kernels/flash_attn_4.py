"""FlashAttention-4 (`flash-attn-4`): the fastest on Hopper and Blackwell; takes views, writes into given tensors.

Its backward is fed the global out and LSE, and honours the LSE's gradient itself. A kernel is compiled at its first
use (seconds); FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 keeps the results on disk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from augtree_fx.kernels import packages
from augtree_fx.kernels.packages import Package
from augtree_fx.kernels.problem import Problem, pad_heads, unit_stride
from augtree_fx.reference import AttentionSpec
from augtree_fx.tables import AttentionCall

NAME = "flash_attn_4"
WRITES_INTO = True
TAKES_DLSE = True
PACKAGE = Package("flash-attn-4", "flash_attn.cute.interface", "4.0.0b36")
_SIZES = (64, 96, 128, 192, 256)
_LATENT = (192, 128)  # multi-head latent attention: the one pair of unequal sizes with a tile
_FORWARD, _BACKWARD = "_flash_attn_fwd", "_flash_attn_bwd"
_VARLEN = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_SPEC = ("softmax_scale", "causal", "softcap", "window_size_left", "window_size_right")
CALLED = {
    _FORWARD: ("q", "k", "v", *_VARLEN, *_SPEC, "pack_gqa", "return_lse", "out", "lse"),
    _BACKWARD: ("q", "k", "v", "out", "dout", "lse", *_VARLEN, *_SPEC, "deterministic", "dq", "dk", "dv", "dlse"),
}


def why_not(problem: Problem, *, explicit: bool) -> str | None:
    """Why this kernel cannot run a call, or ``None``."""
    if problem.device_type != "cuda":
        return f"it runs on CUDA, the tensors are on {problem.device_type}"
    if problem.capability[0] not in (9, 10):
        return f"it is used on compute capability 9 and 10, this device has {'.'.join(map(str, problem.capability))}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, got {problem.dtype}"
    if problem.padded_head_dim > _SIZES[-1]:
        return f"it takes head sizes up to {_SIZES[-1]}, got {problem.padded_head_dim}"
    if problem.capability[0] == 10 and head_dims(problem) in ((192, 192), (256, 256)):  # 256: no soft-cap, no d-lse
        return f"it takes head size {head_dims(problem)[0]} on compute capability 9 alone"
    return packages.first_complaint(PACKAGE, CALLED)


def head_dims(problem: Problem) -> tuple[int, int]:
    """Head sizes of q and k, and of v, as the kernel gets them.

    Only sizes that it has tiles for: at 80, backward returns gradients that are 90% off (4.0.0b36, H200).
    """
    if not problem.grouped and (problem.head_dim, problem.v_head_dim) == _LATENT:
        return _LATENT
    size = next(size for size in _SIZES if problem.padded_head_dim <= size)
    return size, size


def _arguments(call: AttentionCall, spec: AttentionSpec) -> dict[str, Any]:
    """What forward and backward are told alike; a dense call where there is one segment."""
    window = spec.window if call.causal else 0
    arguments: dict[str, Any] = {
        "softmax_scale": spec.scale,
        "causal": call.causal,
        "softcap": spec.softcap,
        "window_size_left": window - 1 if window else None,
        "window_size_right": 0 if window else None,
    }
    if len(call.segments) > 1:
        arguments |= {
            "cu_seqlens_q": call.cu_q,
            "cu_seqlens_k": call.cu_k,
            "max_seqlen_q": call.max_q,
            "max_seqlen_k": call.max_k,
        }
    return arguments


def _batched(call: AttentionCall, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """A batch dim of one where the call is dense."""
    return tensors if len(call.segments) > 1 else tuple(None if x is None else x[None] for x in tensors)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    spec: AttentionSpec,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `augtree_fx.kernels.forward`; a query without keys comes out as 0 and -inf."""
    qk_size, v_size = head_dims(Problem.of(q, v, call, spec))
    (q_p, k_p), (v_p,) = unit_stride(pad_heads((q, k), qk_size)), unit_stride(pad_heads((v,), v_size))
    into = out if out is not None and v_size == v.shape[-1] else None
    q_p, k_p, v_p, into, lse = _batched(call, q_p, k_p, v_p, into, lse)  # type: ignore[assignment]
    result, lse_result, *_ = packages.function(PACKAGE, _FORWARD)(
        q_p,
        k_p,
        v_p,
        **_arguments(call, spec),
        pack_gqa=None if call.causal else False,  # packed queries are 3% slower where nothing is masked (H200)
        return_lse=True,
        out=into,
        lse=lse,
    )
    if len(call.segments) == 1:
        result, lse_result = result[0], lse_result[0]
    return result[..., : v.shape[-1]], lse_result


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: AttentionCall,
    spec: AttentionSpec,
    *,
    dlse: Tensor | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `augtree_fx.kernels.backward`."""
    qk_size, v_size = head_dims(Problem.of(q, v, call, spec))
    if qk_size != q.shape[-1]:
        dq = dk = None
    if v_size != v.shape[-1]:
        dv = None
    q_p, k_p = unit_stride(pad_heads((q, k), qk_size))
    v_p, out_p, dout_p = unit_stride(pad_heads((v, out, dout), v_size))
    tensors = _batched(call, q_p, k_p, v_p, out_p, dout_p, lse)
    given = dict(zip(("dq", "dk", "dv", "dlse"), _batched(call, dq, dk, dv, dlse), strict=True))
    deterministic = torch.are_deterministic_algorithms_enabled()
    gradients = packages.function(PACKAGE, _BACKWARD)(
        *tensors, **_arguments(call, spec), **given, deterministic=deterministic
    )
    if len(call.segments) == 1:
        gradients = tuple(x[0] for x in gradients)
    return tuple(x[..., : like.shape[-1]] for x, like in zip(gradients, (q, k, v), strict=True))  # type: ignore[return-value]
