"""Kernels for attention calls, and the rule that picks among them.

A kernel module offers ``NAME``, ``why_not(problem, explicit=)`` (a reason, or ``None`` when it can run), ``forward``
and ``backward``; ``WRITES_INTO`` says that these fill tensors they are given, ``TAKES_DLSE`` that the backward honours
the LSE's gradient. Order of preference: FlashAttention-4 and -3 where they are installed, dense cuDNN for large
segments, FlashAttention-2, the CPU's flash, and the reference, which runs everywhere and does everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from augtree_fx.kernels import (
    aten_flash,
    cpu_flash,
    cudnn,
    flash_attn_2,
    flash_attn_3,
    flash_attn_4,
    reference,
    whole_tree,
)
from augtree_fx.kernels.problem import Problem
from augtree_fx.reference import AttentionSpec
from augtree_fx.tables import AttentionCall, Calls

# In order of preference. torch's FlashAttention is FlashAttention-2, built for the torch that runs it: flash-attn comes
# after it, for the soft-cap, which torch's copy leaves out.
_MODULES = (flash_attn_4, flash_attn_3, cudnn, aten_flash, flash_attn_2, cpu_flash, reference)
KERNELS: dict[str, ModuleType] = {module.NAME: module for module in _MODULES}
NAMES = ("auto", whole_tree.NAME, *KERNELS)
_LSE_COLUMNS = 8  # columns added when the LSE itself has a gradient; flash kernels want head sizes in eights


@dataclass(frozen=True)
class Choice:
    """The kernel for a call, and why the preferred ones were passed over."""

    name: str
    passed_over: tuple[tuple[str, str], ...]


def choose(problem: Problem, requested: str = "auto") -> Choice:
    """Pick the kernel for a call.

    Raises:
        ValueError: ``requested`` is not a kernel.
        NotImplementedError: ``requested`` is a kernel that cannot run this call; the message says why.
    """
    if requested not in NAMES:
        raise ValueError(f"kernel must be one of {', '.join(NAMES)}, got {requested!r}")
    if requested == whole_tree.NAME:
        raise NotImplementedError(f"kernel {requested!r} runs whole trees, not a single call; use kernel='auto'")
    if requested != "auto":
        reason = KERNELS[requested].why_not(problem, explicit=True)
        if reason is not None:
            raise NotImplementedError(f"kernel {requested!r} cannot run this attention: {reason}; use kernel='auto'")
        return Choice(requested, ())
    passed_over: list[tuple[str, str]] = []
    for name, module in KERNELS.items():
        reason = module.why_not(problem, explicit=False)
        if reason is None:
            return Choice(name, tuple(passed_over))
        passed_over.append((name, reason))
    raise AssertionError("the reference kernel takes every call")


def why_not_whole_tree(
    q: Tensor, v: Tensor, calls: Calls, spec: AttentionSpec, requested: str, speed: whole_tree.Speed
) -> str | None:
    """Why the calls of a tree are not one block-sparse launch, or ``None`` when they are.

    Args:
        q, v: the tree's queries ``[T, H, D]`` and values ``[S, K, E]``.
        speed: `whole_tree.FORWARD` or `whole_tree.BACKWARD`.

    Raises:
        NotImplementedError: one launch is ``requested`` and cannot be.
    """
    if requested not in ("auto", whole_tree.NAME):
        return f"kernel {requested!r} is asked for"
    problem = Problem.of(q, v, calls[0], spec) if calls else None
    if problem is None:
        return "there are no calls"
    explicit = requested == whole_tree.NAME
    reason = flash_attn_4.why_not(problem, explicit=explicit)
    if reason is None:
        reason = whole_tree.why_not(problem, calls, len(q), speed, q.shape[1] * q.shape[2], explicit=explicit)
    if explicit and reason is not None:
        raise NotImplementedError(f"kernel {requested!r} cannot run this attention: {reason}; use kernel='auto'")
    return reason


def all_write_into(q: Tensor, v: Tensor, calls: Sequence[AttentionCall], spec: AttentionSpec, requested: str) -> bool:
    """Whether every call runs on a kernel that fills tensors it is given, and so makes none of its own."""
    chosen = (choose(Problem.of(q, v, call, spec), requested).name for call in calls)
    return all(getattr(KERNELS[name], "WRITES_INTO", False) for name in chosen)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    spec: AttentionSpec,
    requested: str,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one call; ``q [T, H, D]``, ``k [S, K, D]``, ``v [S, K, E]`` are the call's own ranges.

    Args:
        out, lse: where the results may be written; a kernel that cannot returns tensors of its own.

    Returns:
        ``out [T, H, E]`` and ``lse [H, T]``, a query without keys being 0 and -inf whatever the kernel says.
    """
    kernel = KERNELS[choose(Problem.of(q, v, call, spec), requested).name]
    into = {"out": out, "lse": lse} if getattr(kernel, "WRITES_INTO", False) else {}
    return kernel.forward(q, k, v, call, spec, **into)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: AttentionCall,
    spec: AttentionSpec,
    requested: str,
    **into: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """This call's share of dq, dk, dv, given the global ``out`` and ``lse`` of its queries.

    Args:
        dlse: gradient of the LSE, ``[H, T]``, or ``None``.
        into: ``dq``, ``dk``, ``dv``, where the results may be written; a kernel that cannot returns its own.
    """
    kernel = KERNELS[choose(Problem.of(q, v, call, spec), requested).name]
    if dlse is None or getattr(kernel, "TAKES_DLSE", False):
        extra: dict[str, Tensor | None] = {**into, "dlse": dlse} if getattr(kernel, "WRITES_INTO", False) else {}
        return kernel.backward(dout, q, k, v, out, lse, call, spec, **extra)
    dout, out, v_wide = _with_lse_columns(dout, dlse, out, v)
    kernel = KERNELS[choose(Problem.of(q, v_wide, call, spec), requested).name]
    dq, dk, dv = kernel.backward(dout, q, k, v_wide, out, lse, call, spec)
    return dq, dk, dv[..., : v.shape[-1]]


def _with_lse_columns(dout: Tensor, dlse: Tensor, out: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Let a stock backward honour the LSE's gradient, exactly.

    A kernel computes ``dlogits = p * (dout v - rowsum(dout * out))``. One more value column that is 0, whose output
    is said to be -1 and whose output gradient is ``dlse``, turns that into ``p * (dout v - delta + dlse)``.
    """
    column = dlse.T[..., None].to(dout.dtype)
    zeros = column.new_zeros(*column.shape[:-1], _LSE_COLUMNS - 1)
    dout = torch.cat([dout, column, zeros], dim=-1)
    out = torch.cat([out, torch.full_like(column, -1.0), zeros], dim=-1)
    return dout, out, pad(v, (0, _LSE_COLUMNS))
