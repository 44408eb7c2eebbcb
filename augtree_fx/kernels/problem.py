"""What a kernel needs to know to say whether it can run a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from augtree_fx.reference import AttentionSpec
from augtree_fx.tables import AttentionCall


@dataclass(frozen=True)
class Problem:
    """Device, dtype, head sizes, grouped queries or not, and features of one call."""

    device_type: str
    capability: tuple[int, int]
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    grouped: bool
    causal: bool
    window: int
    softcap: float
    num_segments: int
    num_queries: int
    num_keys: int
    aligned: bool

    @staticmethod
    def of(q: Tensor, v: Tensor, call: AttentionCall, spec: AttentionSpec) -> Problem:
        """Problem of a call on some tensors."""
        return Problem(
            device_type=q.device.type,
            capability=torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else (0, 0),
            dtype=q.dtype,
            head_dim=q.shape[-1],
            v_head_dim=v.shape[-1],
            grouped=q.shape[1] != v.shape[1],
            causal=call.causal,
            window=spec.window,
            softcap=spec.softcap,
            num_segments=len(call.segments),
            num_queries=call.q_range.stop - call.q_range.start,
            num_keys=call.k_range.stop - call.k_range.start,
            aligned=all(segment.num_queries == segment.num_keys for segment in call.segments),
        )

    @property
    def padded_head_dim(self) -> int:
        """One head size for q, k and v, a multiple of 8, as flash kernels want it."""
        return -(-max(self.head_dim, self.v_head_dim) // 8) * 8


def pad_heads(tensors: tuple[Tensor, ...], head_dim: int) -> tuple[Tensor, ...]:
    """Zero-pad the last dim of each tensor to ``head_dim``; zeros change no logit and no output column."""
    return tuple(x if x.shape[-1] == head_dim else pad(x, (0, head_dim - x.shape[-1])) for x in tensors)


def unit_stride(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Make the last dim contiguous, which every stock kernel takes for granted; views that have it stay views."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def bhsd(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Views ``[1, heads, tokens, size]`` of token-major tensors, as dense kernels take them."""
    return tuple(x[None].transpose(1, 2) for x in tensors)
