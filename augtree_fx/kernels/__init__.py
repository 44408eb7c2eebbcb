"""Kernels for one attention call, and the rule that picks among them.

A kernel module offers ``NAME``, ``why_not(problem)`` (a reason, or ``None`` when it can run), ``forward`` and
``backward``. Order of preference: FlashAttention-3 where it is installed, dense cuDNN for large segments,
FlashAttention-2, the CPU's flash, and the reference, which runs everywhere and does everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from augtree_fx.kernels import aten_flash, cpu_flash, cudnn, flash_attn_2, flash_attn_3, reference
from augtree_fx.kernels.problem import Problem
from augtree_fx.reference import AttentionSpec
from augtree_fx.tables import AttentionCall

# In order of preference. torch's FlashAttention is FlashAttention-2, built for the torch that runs it: flash-attn comes
# after it, for the soft-cap, which torch's copy leaves out.
_MODULES = (flash_attn_3, cudnn, aten_flash, flash_attn_2, cpu_flash, reference)
KERNELS: dict[str, ModuleType] = {module.NAME: module for module in _MODULES}
NAMES = ("auto", *KERNELS)


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


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, spec: AttentionSpec, requested: str
) -> tuple[Tensor, Tensor]:
    """Attention of one call; ``q [T, H, D]``, ``k [S, K, D]``, ``v [S, K, E]`` are the call's own ranges.

    Returns:
        ``out [T, H, E]`` and ``lse [H, T]``, a query without keys being 0 and -inf whatever the kernel says.
    """
    kernel = KERNELS[choose(Problem.of(q, v, call, spec), requested).name]
    return kernel.forward(q, k, v, call, spec)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: AttentionCall,
    spec: AttentionSpec,
    requested: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """This call's share of dq, dk, dv, given the global ``out`` and ``lse`` of its queries."""
    kernel = KERNELS[choose(Problem.of(q, v, call, spec), requested).name]
    return kernel.backward(dout, q, k, v, out, lse, call, spec)
