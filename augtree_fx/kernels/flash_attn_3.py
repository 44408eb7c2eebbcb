"""FlashAttention-3, built from the folder hopper of the FlashAttention repository: Hopper GPUs, windows and soft-cap.

Two signatures are in use, that of the betas (``3.0.0.b1``, in the releases 2.7 and 2.8 of the repository) and that of
its main branch; the names of the parameters say which one is installed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from augtree_fx.kernels import packages
from augtree_fx.kernels.packages import Package
from augtree_fx.kernels.problem import Problem, pad_heads, unit_stride
from augtree_fx.reference import AttentionSpec
from augtree_fx.tables import AttentionCall

NAME = "flash_attn_3"
PACKAGE = Package("flash-attn-3", "flash_attn_interface", written_for="3.0.0")
_CONFIG = Package("flash-attn-3", "flash_attn_config", written_for="3.0.0")  # absent in the betas
_FORWARD, _BACKWARD = "_flash_attn_forward", "_flash_attn_backward"
_COMMON = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "softcap")
_GRADIENTS = ("dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic")
_HEAD_DIMS = (64, 96, 128, 192, 256)


@dataclass(frozen=True)
class _Signature:
    """How a release names what is passed.

    Attributes:
        window: one parameter for a pair, or one for each side.
        backward_causal: name of the causal flag in the backward; ``causal`` in the forward of all.
        forward_unused, backward_unused: parameters without a default for which ``None`` is passed.
    """

    window: tuple[str, ...]
    backward_causal: str
    forward_unused: tuple[str, ...] = ()
    backward_unused: tuple[str, ...] = ()

    @property
    def calls(self) -> dict[str, tuple[str, ...]]:
        """The functions that are called, with the parameters that are passed."""
        return {
            _FORWARD: (*_COMMON, *self.window, "causal", *self.forward_unused),
            _BACKWARD: (*_COMMON, *self.window, self.backward_causal, *_GRADIENTS, *self.backward_unused),
        }


MAIN = _Signature(("window_size_left", "window_size_right"), "is_causal")
BETA = _Signature(
    ("window_size",),
    "causal",
    ("k_new", "v_new", "qv", "out", "cu_seqlens_k_new", "seqused_q", "seqused_k", "page_table", "kv_batch_idx")
    + ("leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale"),
    ("sequed_q", "sequed_k"),
)


def why_not(problem: Problem, *, explicit: bool) -> str | None:
    """Why this kernel cannot run a call, or ``None``."""
    if problem.device_type != "cuda":
        return f"it runs on CUDA, the tensors are on {problem.device_type}"
    if problem.capability != (9, 0):  # other devices have no such kernels, or slower ones than FlashAttention-2's
        return f"it is used on compute capability 9.0, this device has {'.'.join(map(str, problem.capability))}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, got {problem.dtype}"
    if _signature() is None:
        return packages.first_complaint(PACKAGE, MAIN.calls)
    return _left_out(problem)


def _left_out(problem: Problem) -> str | None:
    """What this build of the package cannot do of a call; a build that does not say is taken for a full one."""
    flags = (packages.constant(_CONFIG, "CONFIG") or {}).get("build_flags", {})
    needed = {
        "BACKWARD": True,
        "VARLEN": True,
        "LOCAL": bool(problem.window),
        "SOFTCAP": bool(problem.softcap),
        "FP16": problem.dtype == torch.float16,
    }
    for feature, used in needed.items():
        if used and flags.get(f"FLASHATTENTION_DISABLE_{feature}"):
            return f"{PACKAGE.named} was built without {feature}"
    largest = max((size for size in _HEAD_DIMS if not flags.get(f"FLASHATTENTION_DISABLE_HDIM{size}")), default=0)
    if problem.padded_head_dim > largest:
        return f"it takes head sizes up to {largest}, got {problem.padded_head_dim}"
    if problem.padded_head_dim > 192 and torch.are_deterministic_algorithms_enabled():
        return f"its deterministic backward takes head sizes up to 192, got {problem.padded_head_dim}"
    return None


def _signature() -> _Signature | None:
    """Which signature is installed, or ``None``."""
    fitting = (known for known in (MAIN, BETA) if packages.first_complaint(PACKAGE, known.calls) is None)
    return next(fitting, None)


def _arguments(call: AttentionCall, spec: AttentionSpec, signature: _Signature) -> dict[str, object]:
    """What forward and backward are both told. A window of -1 is none; a causal one is aligned at the last key."""
    window = (spec.window - 1, 0) if spec.window and call.causal else (-1, -1)
    return {
        "cu_seqlens_q": call.cu_q,
        "cu_seqlens_k": call.cu_k,
        "max_seqlen_q": call.max_q,
        "max_seqlen_k": call.max_k,
        "softmax_scale": spec.scale,
        "softcap": spec.softcap,
        **dict(zip(signature.window, (window,) if len(signature.window) == 1 else window, strict=True)),
    }


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """See `augtree_fx.kernels.forward`."""
    signature = _signature()
    assert signature is not None, "why_not lets no call through without one"
    size = Problem.of(q, v, call, spec).padded_head_dim  # unequal sizes have a forward, but no backward in the betas
    q_p, k_p, v_p = unit_stride(pad_heads((q, k, v), size))
    out, lse, *_ = packages.function(PACKAGE, _FORWARD)(
        q=q_p,
        k=k_p,
        v=v_p,
        causal=call.causal,
        **dict.fromkeys(signature.forward_unused),
        **_arguments(call, spec, signature),
    )
    # A query without keys is -inf; +inf only where a call has no key at all.
    return out[..., : v.shape[-1]], lse.masked_fill_(lse == torch.inf, -torch.inf)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """See `augtree_fx.kernels.backward`."""
    signature = _signature()
    assert signature is not None, "why_not lets no call through without one"
    size = Problem.of(q, v, call, spec).padded_head_dim
    q_p, k_p, v_p, out_p, dout_p = unit_stride(pad_heads((q, k, v, out, dout), size))
    dq, dk, dv = (x.new_empty(x.shape) for x in (q_p, k_p, v_p))
    packages.function(PACKAGE, _BACKWARD)(
        dout=dout_p,
        q=q_p,
        k=k_p,
        v=v_p,
        out=out_p,
        softmax_lse=lse.contiguous(),  # its strides are not looked at
        dq=dq,
        dk=dk,
        dv=dv,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **{signature.backward_causal: call.causal},
        **dict.fromkeys(signature.backward_unused),
        **_arguments(call, spec, signature),
    )
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]
