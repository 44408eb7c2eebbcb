"""Merging partial attentions (partial softmax), its gradients, and sums of dout * out: semantics here, speed below.

CUDA tensors in float16, bfloat16 and float32 take one Triton launch where Triton is installed. Everything else is the
reference, on the CPU compiled when large. Nothing here records gradients: it runs inside the ops.

Legend: T tokens, H query heads, E head size of v. An LSE is natural, ``[H, T]``, float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from augtree_fx import compiled, reference

_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def partial_softmax(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    sinks: Tensor | None,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge partials over disjoint key sets: ``lse = logsumexp(lse_i)``, ``out = sum exp(lse_i - lse) out_i``.

    Args:
        outs: partial outputs, each ``[T, H, E]``, one dtype, any strides; what they hold where no key was seen (LSE
            -inf) does not matter, it may be NaN.
        lses: their LSEs, each ``[H, T]``, any strides; -inf where a partial saw no key, never +inf.
        sinks: ``[H]`` logit of one more key whose value is 0, which joins the sum once, or ``None``.
        out: where to write the result, ``[T, H, E]`` in the dtype of ``outs``, last dim contiguous. May be exactly the
            memory of one of ``outs`` (merging in place), but must not overlap them otherwise. ``None``: a new tensor.
        lse: the same for the LSE, ``[H, T]``, any strides.

    Returns:
        ``out`` and ``lse``; a row that no partial saw a key for is 0 and, without sinks, -inf.

    Raises:
        ValueError: the partials, or a destination, do not fit together.
    """
    _check_partials(outs, lses, sinks)
    _check_destinations(outs[0], lses[0], out, lse)
    kernels = _triton_kernels([*outs], [*lses], sinks)
    if kernels is not None:
        out = torch.empty_like(outs[0], memory_format=torch.contiguous_format) if out is None else out
        lse = torch.empty_like(lses[0], memory_format=torch.contiguous_format) if lse is None else lse
        kernels.partial_softmax(outs, lses, sinks, out, lse)
        return out, lse
    merged, total = compiled.run(_merge, list(outs), list(lses), sinks)
    return merged if out is None else out.copy_(merged), total if lse is None else lse.copy_(total)


def partial_softmax_backward(
    dout: Tensor,
    dlse: Tensor | None,
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Gradients of `partial_softmax` by its ``outs``, ``lses`` and ``sinks``; ``out`` and ``lse`` are its results.

    Args:
        dout: ``[T, H, E]``, gradient of ``out``.
        dlse: ``[H, T]``, gradient of ``lse``, or ``None`` for zeros.

    Returns:
        Lists of gradients of ``outs`` and ``lses``, contiguous or laid out like these, and the sinks' ``[H]`` or
        ``None``, summed in the dtype of ``lse`` in an order that does not vary.

    Raises:
        ValueError: the partials do not fit together.
    """
    _check_partials(outs, lses, sinks)
    kernels = _triton_kernels([*outs, dout, out], [*lses, lse, *([] if dlse is None else [dlse])], sinks)
    if kernels is not None:
        return kernels.partial_softmax_backward(dout, dlse, outs, lses, sinks, out, lse)
    return compiled.run(_merge_backward, dout, dlse, list(outs), list(lses), sinks, out, lse)


def sink_gradient(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient of the sinks' logits, whose softmax has the results ``out [T, H, E]`` and ``lse [H, T]``.

    A sink is a key with value 0, hence ``p_sink * (dlse - rowsum(dout * out))``, summed over tokens. A token whose LSE
    is -inf has no softmax for a sink to join, and counts nothing.

    Returns:
        ``[H]`` in the dtype of ``sinks``.
    """
    kernels = _triton_kernels([dout, out], [lse, *([] if dlse is None else [dlse])], sinks)
    if kernels is not None:
        return kernels.sink_gradient(dout, dlse, out, lse, sinks)
    return compiled.run(_sink_gradient, dout, dlse, out, lse, sinks)


def _check_partials(outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"partials must be pairs of an output and an LSE, one or more, got {len(outs)} outputs and {len(lses)} "
            "LSEs; pass lists of equal length"
        )
    shape, dtype = outs[0].shape, outs[0].dtype
    if len(shape) != 3 or any(x.shape != shape or x.dtype != dtype for x in outs):
        found = ", ".join(f"{list(x.shape)} {x.dtype}" for x in outs)
        raise ValueError(f"outputs of partials must be [T, H, E] of one shape and dtype, got {found}; slice them alike")
    for name, tensor, expected in [*(("LSEs", x, (shape[1], shape[0])) for x in lses), ("sinks", sinks, shape[1:2])]:
        if tensor is not None and tensor.shape != expected:
            raise ValueError(
                f"{name} must be {'[H]' if name == 'sinks' else '[H, T]'}, got {list(tensor.shape)} for outputs "
                f"{list(shape)}; pass {list(expected)}"
            )


def _check_destinations(like_out: Tensor, like_lse: Tensor, out: Tensor | None, lse: Tensor | None) -> None:
    for name, tensor, like in (("out", out, like_out), ("lse", lse, like_lse)):
        if tensor is not None and (tensor.shape != like.shape or tensor.dtype != like.dtype):
            raise ValueError(
                f"destination {name} must be like the partials, {list(like.shape)} {like.dtype}, got "
                f"{list(tensor.shape)} {tensor.dtype}; make it with torch.empty_like"
            )
    if out is not None and out.shape[-1] > 1 and out.stride(-1) != 1:
        raise ValueError(
            f"destination out must have a contiguous last dim, got strides {out.stride()}; leave out=None and copy"
        )


def _triton_kernels(wide: list[Tensor], lses: list[Tensor], sinks: Tensor | None) -> ModuleType | None:
    """The Triton kernels if they can run these ``[T, H, E]`` and LSEs, else ``None``."""
    first = wide[0]
    tensors = [*wide, *lses, *([] if sinks is None else [sinks])]
    if not first.is_cuda or not first.numel() or torch.compiler.is_compiling():
        return None
    if any(x.dtype not in _TRITON_DTYPES for x in wide) or any(x.dtype != torch.float32 for x in lses):
        return None
    if any(x.device != first.device for x in tensors) or torch.cuda.get_device_capability(first.device) < (8, 0):
        return None
    return _import_triton_kernels()


@functools.cache
def _import_triton_kernels() -> ModuleType | None:
    try:
        from augtree_fx.kernels import merge_triton
    except ImportError:  # Triton is optional
        return None
    return merge_triton


def _cleared(outs: list[Tensor], lses: list[Tensor]) -> list[Tensor]:
    """Outputs with 0 where a partial saw no key: the reference multiplies by the weight 0, which keeps NaN."""
    empty = [lse == -torch.inf for lse in lses]
    if not torch.compiler.is_compiling() and type(lses[0]) is Tensor and lses[0].device.type == "cpu":
        if not any(mask.any() for mask in empty):  # usually so, and much cheaper than clearing
            return outs
    return [out.masked_fill(mask.T[..., None], 0.0) for out, mask in zip(outs, empty, strict=True)]


def _merge(outs: list[Tensor], lses: list[Tensor], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    return reference.partial_softmax(_cleared(outs, lses), lses, sinks)


def _merge_backward(
    dout: Tensor,
    dlse: Tensor | None,
    outs: list[Tensor],
    lses: list[Tensor],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    return reference.partial_softmax_backward(dout, dlse, _cleared(outs, lses), lses, sinks, out, lse)


def _sink_gradient(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).T
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - reference.finite(lse)).masked_fill(lse == -torch.inf, 0.0)
    return (weight * (-delta if dlse is None else dlse - delta)).sum(1).to(sinks.dtype)
