"""Plain torch functions through `torch.compile` on the CPU, where that is safe and pays.

It is used inside the implementation of ops, that is below autograd, maybe at run time of a user's own compiled model.
Each function is compiled once for all sizes. A machine that cannot compile (no C++ compiler, say) stays eager.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

logger = logging.getLogger("augtree_fx")

# Numbers in a [T, H, E] from which compiling pays. There, a merge of two takes 0.8 ms instead of 3.0 in float32 and
# 0.5 instead of 8.4 in bfloat16; with a quarter of the numbers a quarter of a millisecond is left to gain. Compiling
# takes 2 s, the first time in a process up to 14. Two cores, torch 2.13, 2026-11-29.
COMPILE_FROM = 1 << 21

P = ParamSpec("P")
R = TypeVar("R")


def run(function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
    """``function(*arguments)``, compiled if `why_eager` has no objection.

    Args:
        function: a module-level function of tensors, pure, whose first tensor is its largest. Must have no gradient to
            record: it runs without grad mode, on detached tensors made contiguous.
        arguments: tensors, ``None``, and lists of tensors.
    """
    tensors = [x for x in pytree.tree_leaves((arguments, keywords)) if isinstance(x, Tensor)]
    if why_eager(tensors) is not None:
        return function(*arguments, **keywords)
    with torch.no_grad():  # detached and contiguous: one set of guards for any layout and any requires_grad
        plain = pytree.tree_map_only(Tensor, lambda x: x.detach().contiguous(), (arguments, keywords))
        return _compiled(function)(*plain[0], **plain[1])


def why_eager(tensors: list[Tensor]) -> str | None:
    """Why a function of these tensors should not be compiled here, or ``None``."""
    if torch.compiler.is_compiling():
        return "it is being compiled already"
    if max((x.numel() for x in tensors), default=0) < COMPILE_FROM:
        return "it is too small to pay"
    if any(x.device.type != "cpu" for x in tensors):
        return "it is not on the CPU"
    if any(x.dtype == torch.float64 for x in tensors):
        return "float64 is for exact comparisons: it runs as it is written"
    if is_in_torch_dispatch_mode() or any(type(x.detach()) is not Tensor for x in tensors):
        return "something watches or stands in for the tensors"
    return _why_never()


@functools.cache
def _why_never() -> str | None:
    """Why this process cannot compile for the CPU, or ``None``; found out by compiling something small, once."""
    number = os.getpid()  # makes it a function that no cache on disk knows

    def probe(x: Tensor) -> Tensor:
        return x + number

    try:
        with torch.compiler.set_stance("default"):
            torch.compile(probe)(torch.zeros(2))
    except (RuntimeError, OSError) as error:  # no compiler, no headers, no cache folder, a Python torch cannot compile
        reason = f"torch.compile does not work here: {str(error).strip().splitlines()[0]}"
        logger.warning("merging partial attentions on the CPU stays eager, which is slower: %s", reason)
        return reason
    return None


@functools.cache
def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    return torch.compile(function, dynamic=True)
