"""Ring attention: keys and values travel from rank to rank, queries stay, the next shard is in flight meanwhile.

    step 0    own keys            step i    keys of rank r - i            then the partials are merged, once

Backward lets keys and values travel again. Their gradients follow one hop behind, in float32, each rank adding its
share, and the last hop brings them home; each piece gets the global output and log-sum-exp, so that shares add up.

All partials of a forward live until the merge (as in TransformerEngine), which rounds once and reads each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from augtree_fx import kernels, merge
from augtree_fx.examples.bench.cp.exchange import Hop, start_hop
from augtree_fx.reference import AttentionSpec, accumulation_dtype
from augtree_fx.tables import AttentionCall

_KV, _GRADIENTS = 0, 1  # tags: both are in flight at a time


@dataclass(frozen=True, eq=False)
class Ring:
    """The attention of one ring for one rank.

    Attributes:
        tokens: slice of the rank's local tokens that takes part; ``calls`` count from its start.
        num_tokens: ``[ranks]`` how many tokens of this ring each rank holds, at least 1.
        calls: ``[steps]`` calls of this rank's queries with the keys of rank ``(rank - step) % ranks``. Each query is
            in a call of step 0.
        group: the ranks, in order; ``None`` for a single one, which talks to nobody.
    """

    tokens: slice
    num_tokens: tuple[int, ...]
    calls: tuple[tuple[AttentionCall, ...], ...]
    group: distributed.ProcessGroup | None

    def __post_init__(self) -> None:
        if min(self.num_tokens) < 1:
            raise ValueError(
                f"every rank of a ring must hold a token, got {list(self.num_tokens)} tokens by rank; use fewer ranks, "
                "or longer sequences"
            )

    @property
    def size(self) -> int:
        return len(self.num_tokens)

    def visiting(self, step: int) -> int:
        """Tokens whose keys are here at a step."""
        rank = 0 if self.group is None else distributed.get_rank(self.group)
        return self.num_tokens[(rank - step) % self.size]


def ring_attention(q: Tensor, k: Tensor, v: Tensor, rings: Sequence[Ring], spec: AttentionSpec, kernel: str) -> Tensor:
    """Differentiable attention of local tokens.

    Args:
        q: ``[tokens, heads, head size]``, local; k, v: ``[tokens, key heads, head size]``; one dtype.
        rings: together they cover the local tokens, each once; ranks that share several have them in one order.
        spec: what the attention does.
        kernel: one of `augtree_fx.kernels.NAMES`.

    Returns:
        ``[tokens, heads, head size]``, local.
    """
    return _RingAttention.apply(q, k, v, tuple(rings), spec, kernel)


class _RingAttention(torch.autograd.Function):
    """All rings in one node: their messages have one order on all ranks, in backward too."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rings: tuple[Ring, ...], spec: AttentionSpec, kernel: str
    ) -> Tensor:
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        lse = torch.empty(q.shape[1], len(q), dtype=accumulation_dtype(q.dtype), device=q.device)
        for ring in rings:
            here = ring.tokens
            _forward(q[here], k[here], v[here], ring, spec, kernel, out[here], lse[:, here])
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = (rings, spec, kernel)
        return out

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rings, spec, kernel = ctx.rest
        dout = douts[0].contiguous()
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for ring in rings:
            here = ring.tokens
            saved = (q[here], k[here], v[here], out[here], lse[:, here])
            for total, gradient in zip((dq, dk, dv), _backward(dout[here], *saved, ring, spec, kernel), strict=True):
                total[here] = gradient
        return dq, dk, dv, None, None, None


def _pack(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpack(packed: Tensor, num_tokens: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a packed shard of ``num_tokens`` keys and values shaped like these."""
    split = num_tokens * k[0].numel()
    return packed[:split].view(num_tokens, *k.shape[1:]), packed[split:].view(num_tokens, *v.shape[1:])


def _hop(packed: Tensor, ring: Ring, step: int, width: int, tag: int) -> Hop | None:
    """Start to receive what is here at a step; nothing moves in a ring of one."""
    return None if ring.group is None else start_hop(packed, ring.visiting(step) * width, ring.group, tag)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, ring: Ring, spec: AttentionSpec, kernel: str, out: Tensor, lse: Tensor
) -> None:
    """Attention of one ring into ``out`` and ``lse``."""
    packed, width = _pack(k, v), k[0].numel() + v[0].numel()
    partials: list[tuple[slice, Tensor, Tensor]] = []
    for step, calls in enumerate(ring.calls):
        coming = _hop(packed, ring, step + 1, width, _KV) if step + 1 < ring.size else None
        keys, values = _unpack(packed, ring.visiting(step), k, v)
        for call in calls:
            rows, seen = call.q_range, call.k_range
            # A query is in one causal call, whose partial may be written where the result goes: the merge is in place.
            into = (out[rows], lse[:, rows]) if call.causal else (None, None)
            partials.append((rows, *kernels.forward(q[rows], keys[seen], values[seen], call, spec, kernel, *into)))
        if coming is not None:
            packed = coming.wait()
    _merge_into(out, lse, partials)


def _merge_into(out: Tensor, lse: Tensor, partials: Sequence[tuple[slice, Tensor, Tensor]]) -> None:
    """Merge partials, each of a slice of queries, wherever they overlap."""
    cuts = sorted({bound for rows, *_ in partials for bound in (rows.start, rows.stop)})
    for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
        inside = [
            (part_out[begin - rows.start : end - rows.start], part_lse[:, begin - rows.start : end - rows.start])
            for rows, part_out, part_lse in partials
            if rows.start <= begin and end <= rows.stop
        ]
        if len(inside) == 1:
            if inside[0][0].data_ptr() != out[begin:end].data_ptr():
                out[begin:end], lse[:, begin:end] = inside[0]
        else:
            outs, lses = zip(*inside, strict=True)
            merge.partial_softmax(outs, lses, None, out=out[begin:end], lse=lse[:, begin:end])


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ring: Ring,
    spec: AttentionSpec,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one ring by this rank's q, k and v, summed in the accumulation dtype."""
    if ring.size == 1 and len(ring.calls[0]) == 1:  # nothing to add up
        return kernels.backward(dout, None, q, k, v, out, lse, ring.calls[0][0], spec, kernel)
    wide = accumulation_dtype(q.dtype)
    packed, width = _pack(k, v), k[0].numel() + v[0].numel()
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    carried: Hop | None = None  # gradients of the visiting keys, with the shares of the ranks they came by
    for step, calls in enumerate(ring.calls):
        coming = _hop(packed, ring, step + 1, width, _KV) if step + 1 < ring.size else None
        num_keys = ring.visiting(step)
        keys, values = _unpack(packed, num_keys, k, v)
        gradients = torch.zeros(num_keys * width, dtype=wide, device=q.device)
        dk, dv = _unpack(gradients, num_keys, k, v)
        for call in calls:
            rows, seen = call.q_range, call.k_range
            found = kernels.backward(
                dout[rows], None, q[rows], keys[seen], values[seen], out[rows], lse[:, rows], call, spec, kernel
            )
            for total, share in zip((dq[rows], dk[seen], dv[seen]), found, strict=True):
                total += share
        if carried is not None:
            gradients += carried.wait()
        carried = _hop(gradients, ring, step + 1, width, _GRADIENTS)
        if coming is not None:
            packed = coming.wait()
    return dq, *_unpack(gradients if carried is None else carried.wait(), len(k), k, v)
