"""cuDNN's dense attention, for calls of one large segment: GQA without repeating KV, token-major views without a copy.

cuDNN plans every new shape (milliseconds), which only large segments pay back; small ones go to `aten_flash`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from augtree_fx.kernels.problem import Problem, bhsd, pad_heads, unit_stride
from augtree_fx.reference import AttentionSpec
from augtree_fx.tables import DENSE_PAIRS, AttentionCall

NAME = "cudnn"


def why_not(problem: Problem, *, explicit: bool) -> str | None:
    """Why this kernel cannot run a call (or, unless asked for explicitly, should not), or ``None``."""
    if problem.device_type != "cuda":
        return f"it runs on CUDA, the tensors are on {problem.device_type}"
    if problem.capability < (9, 0):
        return f"it is used from compute capability 9.0, this device has {'.'.join(map(str, problem.capability))}"
    if not torch.backends.cudnn.is_available():
        return "this torch has no cuDNN"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, got {problem.dtype}"
    if problem.softcap or problem.window:
        return "soft-cap and windows are not supported"
    if problem.padded_head_dim > 128:
        return f"its backward takes head sizes up to 128, got {problem.padded_head_dim}"
    if problem.causal and not problem.aligned:
        return "its causal mask is aligned at the first key"
    if problem.num_segments != 1:
        return f"it takes one dense segment, the call has {problem.num_segments}"
    if not explicit and problem.num_queries * problem.num_keys < DENSE_PAIRS:
        return f"{problem.num_queries} x {problem.num_keys} is too small to pay for a plan"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """See `augtree_fx.kernels.forward`."""
    size = Problem.of(q, v, call, spec).padded_head_dim
    q_p, k_p, v_p = bhsd(*unit_stride(pad_heads((q, k, v), size)))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_p, k_p, v_p, None, True, 0.0, call.causal, False, scale=spec.scale
    )
    return out[0].transpose(0, 1)[..., : v.shape[-1]], lse.reshape(q.shape[1], q.shape[0])


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """See `augtree_fx.kernels.backward`."""
    size = Problem.of(q, v, call, spec).padded_head_dim
    dout_p, q_p, k_p, v_p, out_p = bhsd(*unit_stride(pad_heads((dout, q, k, v, out), size)))
    philox = torch.zeros((), dtype=torch.int64, device=q.device)  # dropout is 0: never read
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout_p,
        q_p,
        k_p,
        v_p,
        out_p,
        lse.contiguous()[None, ..., None],
        philox,
        philox,
        None,
        None,
        None,
        q.shape[0],
        k.shape[0],
        0.0,
        call.causal,
        scale=spec.scale,
    )
    dq, dk, dv = (x[0].transpose(0, 1) for x in (dq, dk, dv))
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]
