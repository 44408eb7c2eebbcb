"""Variable-length causal attention for the rivals: FlashAttention-4 where it is installed, else one of our kernels.

A segment is one row. Rivals without reuse use it on whole rows, PrefixGrouper's scheme on copies of the prompt's KV.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from augtree_fx import kernels
from augtree_fx.reference import AttentionSpec
from augtree_fx.tables import AttentionCall, Segment

FA4 = "fa4"


def load_fa4() -> Any:
    """FlashAttention-4's interface.

    Raises:
        ImportError: the package flash-attn-4 is not installed, or does not load here.
    """
    try:
        return importlib.import_module("flash_attn.cute.interface")
    except ModuleNotFoundError as error:
        raise ImportError(f"flash-attn-4 is not installed ({error}); pip install flash-attn-4") from error
    except (OSError, RuntimeError, AttributeError) as error:  # a build for another torch or CUDA
        raise ImportError(f"flash-attn-4 does not load: {error}") from error


def best_kernel(device: torch.device, dtype: torch.dtype) -> str:
    """The fastest kernel for rows that is installed: FlashAttention-4, else what our own rule picks."""
    if device.type != "cuda":
        return "cpu_flash"
    if dtype not in (torch.float16, torch.bfloat16):
        return "reference"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "aten_flash"
    try:
        load_fa4()
    except ImportError:
        return "aten_flash"
    return FA4


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
        kernel: ``"fa4"`` or one of `augtree_fx.kernels.NAMES`.

    Returns:
        ``[queries, heads, head size]``.
    """
    return _Attend.apply(q, k, v, call, AttentionSpec(scale), kernel)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, spec: AttentionSpec, kernel: str
    ) -> Tensor:
        run = _fa4_forward if kernel == FA4 else kernels.forward
        out, lse = run(q, k, v, call, spec, kernel)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = (call, spec, kernel)
        return out

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        call, spec, kernel = ctx.rest
        run = _fa4_backward if kernel == FA4 else kernels.backward
        dq, dk, dv = run(douts[0].contiguous(), q, k, v, out, lse, call, spec, kernel)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _fa4_arguments(call: AttentionCall, spec: AttentionSpec) -> dict[str, Any]:
    return {
        "cu_seqlens_q": call.cu_q,
        "cu_seqlens_k": call.cu_k,
        "max_seqlen_q": call.max_q,
        "max_seqlen_k": call.max_k,
        "softmax_scale": spec.scale,
        "causal": call.causal,
    }


def _fa4_forward(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, spec: AttentionSpec, _: str
) -> tuple[Tensor, Tensor]:
    out, lse, *_rest = load_fa4()._flash_attn_fwd(q, k, v, return_lse=True, **_fa4_arguments(call, spec))
    return out, lse


def _fa4_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: AttentionCall,
    spec: AttentionSpec,
    _: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv, *_rest = load_fa4()._flash_attn_bwd(q, k, v, out, dout, lse, **_fa4_arguments(call, spec))
    return dq, dk, dv
