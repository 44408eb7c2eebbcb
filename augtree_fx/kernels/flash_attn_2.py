"""FlashAttention-2 of the package flash-attn: the kernel that torch has a copy of, with the soft-cap that it lacks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from augtree_fx.kernels import aten_flash, packages
from augtree_fx.kernels.packages import Package
from augtree_fx.kernels.problem import Problem, pad_heads, unit_stride
from augtree_fx.reference import AttentionSpec
from augtree_fx.tables import AttentionCall

NAME = "flash_attn_2"
PACKAGE = Package("flash-attn", "flash_attn.flash_attn_interface", written_for="2.8")
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_MASK = ("causal", "window_size_left", "window_size_right")
_COMMON = ("q", "k", "v", *_LENGTHS, *_MASK, "dropout_p", "softmax_scale", "softcap", "alibi_slopes")
# The functions that are called, with the parameters that are passed. The public one takes no LSE into its backward.
CALLS = {
    "_flash_attn_varlen_forward": _COMMON,
    "_flash_attn_varlen_backward": (*_COMMON, "dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic"),
}


def why_not(problem: Problem, *, explicit: bool) -> str | None:
    """Why this kernel cannot run a call, or ``None``."""
    same_kernel = aten_flash.why_not(replace(problem, softcap=0.0), explicit=explicit)
    return same_kernel or packages.first_complaint(PACKAGE, CALLS)


def _arguments(call: AttentionCall, spec: AttentionSpec) -> dict[str, object]:
    """What forward and backward are both told. A window of -1 is none; a causal one is aligned at the last key."""
    windowed = bool(spec.window) and call.causal
    return {
        "cu_seqlens_q": call.cu_q,
        "cu_seqlens_k": call.cu_k,
        "max_seqlen_q": call.max_q,
        "max_seqlen_k": call.max_k,
        "dropout_p": 0.0,
        "softmax_scale": spec.scale,
        "causal": call.causal,
        "window_size_left": spec.window - 1 if windowed else -1,
        "window_size_right": 0 if windowed else -1,
        "softcap": spec.softcap,
        "alibi_slopes": None,
    }


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """See `augtree_fx.kernels.forward`."""
    size = Problem.of(q, v, call, spec).padded_head_dim
    q_p, k_p, v_p = unit_stride(pad_heads((q, k, v), size))
    attend = packages.function(PACKAGE, "_flash_attn_varlen_forward")
    out, lse, *_ = attend(q=q_p, k=k_p, v=v_p, **_arguments(call, spec))
    return out[..., : v.shape[-1]], lse.masked_fill_(lse == torch.inf, -torch.inf)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """See `augtree_fx.kernels.backward`."""
    size = Problem.of(q, v, call, spec).padded_head_dim
    q_p, k_p, v_p, out_p, dout_p = unit_stride(pad_heads((q, k, v, out, dout), size))
    dq, dk, dv = (x.new_empty(x.shape) for x in (q_p, k_p, v_p))
    differentiate = packages.function(PACKAGE, "_flash_attn_varlen_backward")
    differentiate(
        dout=dout_p,
        q=q_p,
        k=k_p,
        v=v_p,
        out=out_p,
        # Read without strides; a query without keys is +inf there, and exp(logit + inf) would not be 0.
        softmax_lse=lse.masked_fill(lse == -torch.inf, torch.inf).contiguous(),
        dq=dq,
        dk=dk,
        dv=dv,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_arguments(call, spec),
    )
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]
