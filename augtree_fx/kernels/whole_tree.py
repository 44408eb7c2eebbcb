"""A whole tree in one block-sparse launch of FlashAttention-4, and the rule that says when that beats calls.

One launch has nothing to merge and reads the output once, but walks its blocks in an order that does not suit a few
large ones, and masks partial blocks element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from augtree_fx.blocks import BLOCK, BlockLists, TreeBlocks, tree_blocks, why_not_a_tree
from augtree_fx.kernels import flash_attn_4, packages
from augtree_fx.kernels.packages import Package
from augtree_fx.kernels.problem import Problem, unit_stride
from augtree_fx.reference import AttentionSpec
from augtree_fx.tables import Calls, Run, decode_segments

NAME = "flash_attn_4_tree"
_HEAD_DIMS = (64, 96, 128)
_SPARSITY = Package("flash-attn-4", "flash_attn.cute.block_sparsity", flash_attn_4.PACKAGE.written_for)
_LISTS = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx", "block_size")
_MASKED = ("mask_mod", "block_sparse_tensors", "aux_tensors")
_CALLED = {
    "_flash_attn_fwd": (*flash_attn_4.CALLED["_flash_attn_fwd"], *_MASKED),
    "_flash_attn_bwd": (*flash_attn_4.CALLED["_flash_attn_bwd"], *_MASKED),
}


@dataclass(frozen=True)
class Speed:
    """How fast FlashAttention-4 is, by the size of what it is given.

    Fitted to 14 shapes from 16 x 1k to 64k tokens on one H200 (bf16, 32:8 heads, head size 128, torch 2.11,
    4.0.0b36, 2026-11-29); ratios between shapes are what counts, so other devices use it too.

    Attributes:
        flops: FLOP/s of a very large segment.
        causal_half, full_half: size of a segment at which half of that is reached, with and without a causal mask.
        tree_flops: FLOP/s of full blocks in a block-sparse launch.
        partial_cost: time of a partial block over that of a full one.
        call_seconds: launches and gaps of one call.
        flop_factor: FLOP a pair, head and dim.
    """

    flops: float
    causal_half: float
    full_half: float
    tree_flops: float
    partial_cost: float
    call_seconds: float
    flop_factor: int


FORWARD = Speed(6.8e14, 900, 300, 6.5e14, 3.5, 5e-5, 4)
BACKWARD = Speed(6.25e14, 950, 400, 5.85e14, 6.5, 1.5e-4, 10)
_MEMORY_BYTES_PER_S = 4.2e12  # H200 copy


def why_not(problem: Problem, calls: Calls, num_tokens: int, speed: Speed, width: int, *, explicit: bool) -> str | None:
    """Why not one launch for all calls of a tree (unless asked for explicitly, also that it is slower), or ``None``.

    Args:
        problem: of any of the calls.
        calls: all calls of the tree.
        num_tokens: packed tokens.
        speed: `FORWARD` or `BACKWARD`.
        width: query heads x head size.
    """
    if problem.capability[0] != 9:
        return "it was tried on compute capability 9 only"
    if problem.window:
        return "it has no windows"
    if problem.head_dim != problem.v_head_dim or problem.head_dim not in _HEAD_DIMS:
        return f"it takes head sizes {', '.join(map(str, _HEAD_DIMS))}, got {problem.head_dim} and {problem.v_head_dim}"
    if speed is BACKWARD and torch.are_deterministic_algorithms_enabled():
        return "its backward adds up the queries' gradients in no fixed order"
    complaint = packages.first_complaint(flash_attn_4.PACKAGE, _CALLED)
    complaint = complaint or packages.missing_or_changed(_SPARSITY, "BlockSparseTensorsTorch", _LISTS)
    if complaint is None:
        complaint = _not_a_tree(calls.key, num_tokens)
    return complaint if complaint is not None or explicit else _slower(calls.key, num_tokens, speed, width)


@lru_cache(maxsize=64)
def _not_a_tree(key: bytes, num_tokens: int) -> str | None:
    return why_not_a_tree(decode_segments(key), num_tokens)


@lru_cache(maxsize=64)
def _slower(key: bytes, num_tokens: int, speed: Speed, width: int) -> str | None:
    runs = decode_segments(key)
    apart = seconds_of_calls(runs, num_tokens, speed, width)
    together = seconds_of_tree(tree_blocks(key, num_tokens, torch.device("cpu")), speed, width)
    return None if together < apart else f"{_ms(together)} in one launch, {_ms(apart)} in calls"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds * 1e3:.0f} ms"


def seconds_of_calls(runs: Sequence[Run], num_tokens: int, speed: Speed, width: int) -> float:
    """Estimated time of calls and of merging (or summing) what they give, in seconds."""
    seconds, covered = 0.0, 0
    for causal, segments in runs:
        seconds += speed.call_seconds
        half = speed.causal_half if causal else speed.full_half
        for segment in segments:
            covered += segment.num_queries
            product, total = segment.num_queries * segment.num_keys, segment.num_queries + segment.num_keys
            pairs, size = product / (2 if causal else 1), 2 * product / max(total, 1)
            seconds += speed.flop_factor * pairs * width * (size + half) / max(size, 1) / speed.flops
    extra = max(covered - num_tokens, 0)  # rows that more than one call gives: two reads and a write of two bytes
    return seconds + 3 * 2 * extra * width / _MEMORY_BYTES_PER_S


def seconds_of_tree(blocks: TreeBlocks, speed: Speed, width: int) -> float:
    """Estimated time of one block-sparse launch, in seconds."""
    partial = int(blocks.by_query.partial_count.sum())
    weighted = blocks.num_blocks + (speed.partial_cost - 1) * partial
    return speed.call_seconds + speed.flop_factor * weighted * BLOCK**2 * width / speed.tree_flops


def _arguments(blocks: TreeBlocks, lists: BlockLists, spec: AttentionSpec) -> dict[str, Any]:
    from augtree_fx.kernels.tree_mask import tree_mask

    sparse = packages.function(_SPARSITY, "BlockSparseTensorsTorch")
    entries = (lists.partial_count, lists.partial, lists.full_count, lists.full)
    return {
        "softmax_scale": spec.scale,
        "softcap": spec.softcap,
        "mask_mod": tree_mask,
        "block_sparse_tensors": sparse(*(x[None, None] for x in entries), block_size=(BLOCK, BLOCK)),
        "aux_tensors": [blocks.first, blocks.last],
    }


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    calls: Calls,
    spec: AttentionSpec,
    *,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attention of every token of a tree to its path, written into ``out [T, H, E]`` and ``lse [H, T]``."""
    blocks = tree_blocks(calls.key, q.shape[0], q.device)
    packages.function(flash_attn_4.PACKAGE, "_flash_attn_fwd")(
        *(x[None] for x in unit_stride((q, k, v))),
        **_arguments(blocks, blocks.by_query, spec),
        pack_gqa=False,
        return_lse=True,
        out=out[None],
        lse=lse[None],
    )


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    calls: Calls,
    spec: AttentionSpec,
    *,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `forward` by q, k and v, given the global out and LSE."""
    blocks = tree_blocks(calls.key, q.shape[0], q.device)
    given = [torch.empty_like(x, memory_format=torch.contiguous_format)[None] for x in (q, k, v)]
    gradients = packages.function(flash_attn_4.PACKAGE, "_flash_attn_bwd")(
        *(x[None] for x in unit_stride((q, k, v, out, dout))),
        lse[None],
        **_arguments(blocks, blocks.by_key, spec),
        dlse=None if dlse is None else dlse[None],
        **dict(zip(("dq", "dk", "dv"), given, strict=True)),
    )
    return tuple(x[0] for x in gradients)  # type: ignore[return-value]
