"""Rates of one device: attention and matmul by size, copies, the cost of a small call, memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from augtree_fx import kernels
from augtree_fx.examples.bench.timing import measure, sample
from augtree_fx.planner.work import BACKWARD_FLOP
from augtree_fx.reference import AttentionSpec
from augtree_fx.tables import AttentionCall, Segment

_CALL_TOKENS = {"cuda": 32768, "cpu": 1024}  # queries of one timed call: enough small pieces to fill the device
_QUERIES_PER_KEY = 4  # of blocks without a mask: queries of several branches are stacked on one prompt
_MATMUL_SIDE = {"cuda": 8192, "cpu": 1024}
_COPY_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}


@dataclass(frozen=True)
class Heads:
    """Query heads, key heads, and the size of both."""

    query: int
    kv: int
    dim: int


def attention_rates(
    sizes: Sequence[int], heads: Heads, device: torch.device, dtype: torch.dtype, kernel: str, repeats: int
) -> dict[str, list[float]]:
    """FLOP/s of attention in pieces of each size.

    Args:
        sizes: tokens of the shorter side of a piece.
        heads: of the tensors.
        device: where.
        dtype: of the tensors.
        kernel: as `transform` takes it.
        repeats: timed runs; the median counts.

    Returns:
        ``causal_forward``, ``causal_backward``, ``full_forward`` and ``full_backward``, in the order of `sizes`.
    """
    rates: dict[str, list[float]] = {}
    for causal, name in ((True, "causal"), (False, "full")):
        for size in sizes:
            forward, backward = _attention(size, causal, heads, device, dtype, kernel, repeats)
            rates.setdefault(f"{name}_forward", []).append(forward)
            rates.setdefault(f"{name}_backward", []).append(backward)
    return rates


def _attention(
    size: int, causal: bool, heads: Heads, device: torch.device, dtype: torch.dtype, kernel: str, repeats: int
) -> tuple[float, float]:
    queries = size if causal else _QUERIES_PER_KEY * size
    pieces = max(_CALL_TOKENS[device.type] // queries, 1)
    call = _call(pieces, queries, size, causal, device)
    q, k, v, dout = (
        torch.randn(pieces * tokens, count, heads.dim, device=device, dtype=dtype)
        for tokens, count in ((queries, heads.query), (size, heads.kv), (size, heads.kv), (queries, heads.query))
    )
    spec = AttentionSpec(heads.dim**-0.5)
    out, lse = kernels.forward(q, k, v, call, spec, kernel)
    forward = measure(lambda: kernels.forward(q, k, v, call, spec, kernel), repeats, device)
    backward = measure(lambda: kernels.backward(dout, None, q, k, v, out, lse, call, spec, kernel), repeats, device)
    pairs = pieces * (size * (size + 1) // 2 if causal else queries * size)
    flop = 4 * pairs * heads.query * heads.dim
    return flop / forward.median_ms * 1e3, BACKWARD_FLOP * flop / backward.median_ms * 1e3


def _call(pieces: int, queries: int, keys: int, causal: bool, device: torch.device) -> AttentionCall:
    segments = tuple(
        Segment(piece * queries, (piece + 1) * queries, piece * keys, (piece + 1) * keys) for piece in range(pieces)
    )
    steps = torch.arange(pieces + 1, dtype=torch.int32, device=device)
    return AttentionCall(segments, causal, steps * queries, steps * keys)


def matmul_rates(rows: Sequence[int], device: torch.device, dtype: torch.dtype, repeats: int) -> list[float]:
    """FLOP/s of ``[rows, side] @ [side, side]``, side being 8192 on CUDA."""
    side = _MATMUL_SIDE[device.type]
    weight = torch.randn(side, side, device=device).to(dtype)
    rates = []
    for count in rows:
        x = torch.randn(count, side, device=device).to(dtype)
        time = measure(partial(torch.matmul, x, weight), repeats, device)
        rates.append(2 * count * side * side / time.median_ms * 1e3)
    return rates


def copy_rate(device: torch.device, repeats: int) -> float:
    """Bytes/s of a copy, read and write counted."""
    source = torch.empty(_COPY_BYTES[device.type] // 4, dtype=torch.float32, device=device).fill_(1.0)
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure(lambda: target.copy_(source), repeats, device).median_ms * 1e3


def call_us(device: torch.device) -> float:
    """Microseconds of one kernel on almost nothing, in a queue of such kernels: the least of 20 runs.

    It is the host that is timed, which others disturb and nobody speeds up: on one H200 a median of 5 was 10.5 us, and
    prices of steps that launches bound were 26% above those steps.
    """
    x = torch.ones(8, device=device)
    calls = 200

    def many() -> None:
        for _ in range(calls):
            x.mul_(1.0)

    return min(sample(many, 20, device)) * 1e3 / calls


def memory_bytes(device: torch.device) -> int:
    """All memory of the device; on the CPU that of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
