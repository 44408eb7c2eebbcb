"""torch's own FlashAttention-2 for CUDA, variable-length, all segments of a call in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from augtree_fx.kernels.problem import Problem, pad_heads, unit_stride
from augtree_fx.reference import AttentionSpec
from augtree_fx.tables import AttentionCall

NAME = "aten_flash"


def why_not(problem: Problem, *, explicit: bool) -> str | None:
    """Why this kernel cannot run a call, or ``None``."""
    if problem.device_type != "cuda":
        return f"it runs on CUDA, the tensors are on {problem.device_type}"
    if problem.capability < (8, 0):
        return f"it needs compute capability 8.0, this device has {'.'.join(map(str, problem.capability))}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, got {problem.dtype}"
    if problem.softcap:
        return "torch's FlashAttention has no soft-cap"
    if problem.padded_head_dim > 256:
        return f"it takes head sizes up to 256, got {problem.padded_head_dim}"
    return None


def _window(call: AttentionCall, spec: AttentionSpec) -> dict[str, int]:
    """Window arguments: keys to the left of the diagonal; to the right none when causal."""
    return {"window_size_left": spec.window - 1, "window_size_right": 0} if spec.window and call.causal else {}


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """See `augtree_fx.kernels.forward`."""
    size = Problem.of(q, v, call, spec).padded_head_dim
    q_p, k_p, v_p = unit_stride(pad_heads((q, k, v), size))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q_p,
        k_p,
        v_p,
        call.cu_q,
        call.cu_k,
        call.max_q,
        call.max_k,
        0.0,
        call.causal,
        False,
        scale=spec.scale,
        **_window(call, spec),
    )
    return out[..., : v.shape[-1]], lse.masked_fill_(lse == torch.inf, -torch.inf)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """See `augtree_fx.kernels.backward`."""
    size = Problem.of(q, v, call, spec).padded_head_dim
    q_p, k_p, v_p, out_p, dout_p = unit_stride(pad_heads((q, k, v, out, dout), size))
    philox = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout is 0: never read
    unused = torch.empty(0, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dout_p.contiguous(),
        q_p,
        k_p,
        v_p,
        out_p.contiguous(),
        lse.contiguous(),
        call.cu_q,
        call.cu_k,
        call.max_q,
        call.max_k,
        0.0,
        call.causal,
        philox,
        unused,
        scale=spec.scale,
        **_window(call, spec),
    )
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]
