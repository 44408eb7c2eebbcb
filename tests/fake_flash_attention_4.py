"""A stand-in for FlashAttention-4 on the CPU, as flash-attn-4 4.0.0b36 behaves on Hopper: parameters, checks, layouts
and oddities of its private functions, and the few names of its language that the tree's mask is written in.

It shares no arithmetic with augtree_fx. Whatever it does not write is NaN: results of its own start as NaN, and so do
those it is given. float32 stands for bfloat16, so that faults show that half precision would cover up.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from augtree_fx import kernels

TILES = (64, 96, 128, 192, 256)  # head sizes whose backward is right
Index = int | slice | tuple[slice, slice]


class BlockSparseTensorsTorch(NamedTuple):
    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_block_idx_offsets: Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: Tensor | None = None
    dq_write_order_full: Tensor | None = None
    spt: bool | None = None


class Vector:
    """What a mask is called with: element 0 is an index into the auxiliary tensors. Here of a whole block at once."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __getitem__(self, element: int) -> Tensor:
        assert element == 0
        return self.values

    def __le__(self, other: Vector) -> Vector:
        return Vector(self.values <= other.values)

    def __lt__(self, other: Vector) -> Vector:
        return Vector(self.values < other.values)

    def __and__(self, other: Vector) -> Vector:
        return Vector(self.values & other.values)


def _aligned(x: Tensor) -> bool:
    """Pointer and strides in multiples of 16 bytes of half precision, the last dim contiguous."""
    return x.storage_offset() % 8 == 0 and x.stride(-1) == 1 and all(step % 8 == 0 for step in x.stride()[:-1])


def _destination(given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, *, layout: str = "") -> Tensor:
    """The tensor to write to, all NaN; ``layout`` is "aligned", "dense in its last dim" or not checked."""
    if given is None:
        return torch.full(shape, torch.nan, dtype=dtype)
    assert given.shape == shape and given.dtype == dtype, (given.shape, shape, given.dtype, dtype)
    if layout:
        assert 0 not in given.stride() and given.stride(-1) == 1
        assert layout != "aligned" or given.is_contiguous() or _aligned(given)
    return given.fill_(torch.nan)


def _check(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int | None, max_k: int | None
) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16, torch.float32) and q.dtype == k.dtype == v.dtype
    (heads, size), (kv_heads, v_size) = q.shape[-2:], v.shape[-2:]
    assert heads % kv_heads == 0
    assert all(8 <= x <= 256 and x % 8 == 0 for x in (size, v_size)), (size, v_size)
    for x, cu, longest in ((q, cu_q, max_q), (k, cu_k, max_k), (v, cu_k, max_k)):
        assert x.ndim == (4 if cu is None else 3)
        if cu is not None:
            assert cu.dtype == torch.int32 and cu.is_contiguous() and int(cu[0]) == 0 and int(cu[-1]) == len(x)
            assert longest == int(cu.diff().max())
    assert (cu_q is None) == (cu_k is None)
    assert k.shape == (*v.shape[:-1], size) and (cu_q is not None or len(q) == len(k))


def _pieces(q: Tensor, cu_q: Tensor | None, cu_k: Tensor | None) -> Iterator[tuple[Index, Index, Index]]:
    """Where each sequence is in the queries, in the keys and in the LSE."""
    if cu_q is None or cu_k is None:
        yield from ((number, number, number) for number in range(len(q)))
        return
    bounds = torch.stack([cu_q, cu_k])
    for q0, k0, q1, k1 in torch.cat([bounds[:, :-1], bounds[:, 1:]]).T.tolist():
        yield slice(q0, q1), slice(k0, k1), (slice(None), slice(q0, q1))


def _banded(num_queries: int, num_keys: int, causal: bool, left: int | None, right: int | None) -> Tensor:
    """Which keys a query sees, aligned at the last key; ``None`` is no bound."""
    right = 0 if causal else right
    distance = torch.arange(num_queries)[:, None] + (num_keys - num_queries) - torch.arange(num_keys)
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen &= distance <= left if left is not None else True
    return seen & (distance >= -right if right is not None else True)


def _listed(
    sparse: BlockSparseTensorsTorch, mask: Callable[..., Vector], aux: list[Tensor], sizes: tuple[int, int], major: int
) -> Tensor:
    """Which of ``sizes`` queries and keys meet: only in listed blocks, in partial ones where the mask says so.

    ``major`` is the dim whose blocks have lists, 0 for queries (forward) and 1 for keys (backward).
    """
    assert sparse.block_size == (128, 128), "on Hopper the tiles are 64 or 128 queries, 128 keys at sizes up to 128"
    assert all(x.dtype == torch.int32 and x.ndim == 1 and x.stride(0) == 1 for x in aux)
    blocks = [-(-size // 128) for size in sizes]
    seen, taken = torch.zeros(sizes, dtype=torch.bool), set()
    lists = (
        (sparse.mask_block_cnt, sparse.mask_block_idx, False),
        (sparse.full_block_cnt, sparse.full_block_idx, True),
    )
    for count, index, full in lists:
        assert count is not None and index is not None and count.dtype == index.dtype == torch.int32
        assert count.shape == (1, 1, blocks[major]) and index.shape[:3] == count.shape, "one list for all heads"
        assert 1 <= index.shape[3] <= blocks[1 - major]
        for number, (many, row) in enumerate(zip(count[0, 0].tolist(), index[0, 0].tolist(), strict=True)):
            assert row[:many] == sorted(set(row[:many])), (
                "ascending, for a last block is masked only when it comes last"
            )
            for other in row[:many]:
                at = (number, other) if major == 0 else (other, number)
                assert at not in taken, "a block is listed once"
                taken.add(at)
                rows, columns = (
                    torch.arange(start * 128, min(start * 128 + 128, size))
                    for start, size in zip(at, sizes, strict=True)
                )
                zero = torch.zeros(1, 1, dtype=torch.int64)
                here = (slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))
                seen[here] = (
                    True
                    if full
                    else mask(Vector(zero), Vector(zero), Vector(rows[:, None]), Vector(columns), None, aux).values
                )
    return seen


def _logits(
    q: Tensor, k: Tensor, seen: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits ``[H, T, S]``, the repeated keys, and the derivative by the raw logits."""
    k = k.float().repeat_interleave(q.shape[-2] // k.shape[-2], dim=-2)
    logits, slope = torch.einsum("thd,shd->hts", q.float(), k) * scale, None
    if softcap:
        capped = torch.tanh(logits / softcap)
        logits, slope = capped * softcap, 1 - capped.square()
    return logits.masked_fill(~seen, -torch.inf), k, slope


def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: Tensor | None = None,
    tile_mn: tuple[int, int] | None = None,
    mma_pv_is_rs: bool | None = None,
    intra_wg_overlap: bool | None = None,
    num_threads: int = 384,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    _arch: int | None = None,
    score_mod: Callable | None = None,
    mask_mod: Callable[..., Vector] | None = None,
    block_sparse_tensors: BlockSparseTensorsTorch | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
) -> tuple[Tensor, Tensor | None, None, None, None]:
    """A query without keys comes out as 0 and -inf. With a mask_mod, causal is ignored."""
    assert softmax_scale is not None and score_mod is None and learnable_sink is None
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    heads, tokens = q.shape[-2], q.shape[-3]
    out = _destination(out, (*q.shape[:-1], v.shape[-1]), q.dtype, layout="aligned")
    lse_shape = (heads, tokens) if cu_seqlens_q is not None else (len(q), heads, tokens)
    if lse is not None or return_lse:
        lse = _destination(lse, lse_shape, torch.float32, layout="dense in its last dim")
    for at, keys, at_lse in _pieces(q, cu_seqlens_q, cu_seqlens_k):
        sizes = (q[at].shape[0], k[keys].shape[0])
        if block_sparse_tensors is not None:
            assert cu_seqlens_q is None and mask_mod is not None and aux_tensors is not None
            seen = _listed(block_sparse_tensors, mask_mod, aux_tensors, sizes, 0)
        else:
            seen = _banded(*sizes, causal, window_size_left, window_size_right)
        logits, _, _ = _logits(q[at], k[keys], seen, softmax_scale, softcap)
        total = logits.logsumexp(-1)
        weights = torch.exp(logits - total.masked_fill(total == -torch.inf, 0)[..., None])
        wide_v = v[keys].float().repeat_interleave(heads // v.shape[-2], dim=-2)
        out[at] = torch.einsum("hts,she->the", weights, wide_v).to(q.dtype)
        if lse is not None:
            lse[at_lse] = total
    return out, lse, None, None, None


def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    m_block_size: int = 64,
    n_block_size: int = 128,
    num_threads: int = 256,
    pack_gqa: bool = False,
    num_stages_Q: int = 2,
    num_stages_dO: int = 2,
    SdP_swapAB: bool = False,
    dKV_swapAB: bool = False,
    dQ_swapAB: bool = False,
    AtomLayoutMSdP: int = 2,
    AtomLayoutNdKV: int = 2,
    AtomLayoutMdQ: int = 2,
    V_in_regs: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    score_mod: Callable | None = None,
    score_mod_bwd: Callable | None = None,
    mask_mod: Callable[..., Vector] | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple | None = None,
    block_sparse_tensors: BlockSparseTensorsTorch | None = None,
    dlse: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """An LSE of -inf counts as 0. Head sizes without a tile of their own give gradients that are wrong, here NaN."""
    assert softmax_scale is not None and score_mod is None and learnable_sink is None
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    heads, kv_heads, tokens = q.shape[-2], k.shape[-2], q.shape[-3]
    assert out.shape == dout.shape == (*q.shape[:-1], v.shape[-1]) and out.dtype == dout.dtype == q.dtype
    assert lse.shape == ((heads, tokens) if cu_seqlens_q is not None else (len(q), heads, tokens))
    assert lse.dtype == torch.float32 and (dlse is None or dlse.shape == lse.shape)
    dq, dk, dv = (_destination(x, y.shape, q.dtype) for x, y in ((dq, q), (dk, k), (dv, v)))
    sizes = (q.shape[-1], v.shape[-1])
    if not (sizes[0] == sizes[1] in TILES or (sizes == (192, 128) and heads == kv_heads)):
        return dq, dk, dv
    for at, keys, at_lse in _pieces(q, cu_seqlens_q, cu_seqlens_k):
        lengths = (q[at].shape[0], k[keys].shape[0])
        if block_sparse_tensors is not None:
            assert cu_seqlens_q is None and mask_mod is not None and aux_tensors is not None
            assert not deterministic, "needs dq_write_order, and is not implemented on Hopper"
            seen = _listed(block_sparse_tensors, mask_mod, aux_tensors, lengths, 1)
        else:
            seen = _banded(*lengths, causal, window_size_left, window_size_right)
        logits, wide_k, slope = _logits(q[at], k[keys], seen, softmax_scale, softcap)
        known = lse[at_lse]
        weights = torch.exp(logits - known.masked_fill(known == -torch.inf, 0)[..., None])
        wide_dout, wide_v = dout[at].float(), v[keys].float().repeat_interleave(heads // kv_heads, dim=-2)
        delta = (wide_dout * out[at].float()).sum(-1).T - (0 if dlse is None else dlse[at_lse])
        dlogits = weights * (torch.einsum("the,she->hts", wide_dout, wide_v) - delta[..., None])
        dlogits = dlogits * softmax_scale * (1 if slope is None else slope)
        dq[at] = torch.einsum("hts,shd->thd", dlogits, wide_k).to(q.dtype)
        repeated_dk = torch.einsum("hts,thd->shd", dlogits, q[at].float())
        repeated_dv = torch.einsum("hts,the->she", weights, wide_dout)
        for total, repeated in ((dk, repeated_dk), (dv, repeated_dv)):
            total[keys] = repeated.unflatten(1, (kv_heads, -1)).sum(2).to(q.dtype)
    return dq, dk, dv


def _module(name: str, **contents: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


def interface() -> ModuleType:
    return _module("flash_attn.cute.interface", _flash_attn_fwd=_flash_attn_fwd, _flash_attn_bwd=_flash_attn_bwd)


def block_sparsity() -> ModuleType:
    return _module("flash_attn.cute.block_sparsity", BlockSparseTensorsTorch=BlockSparseTensorsTorch)


def language(scalar_to_ssa: Callable[[Any, object], Any]) -> list[ModuleType]:
    """The modules that `augtree_fx.kernels.tree_mask` imports; a jitted function stays as it is."""
    cute = _module("cutlass.cute", jit=lambda function: function)
    return [
        _module("cutlass", cute=cute, Int32="Int32"),
        cute,
        _module("flash_attn.cute.utils", scalar_to_ssa=scalar_to_ssa),
    ]


def vector_of(scalar: Tensor, dtype: object) -> Vector:
    assert dtype == "Int32"
    return Vector(scalar)


def tree_mask() -> ModuleType:
    """The library's own mask, imported anew from what stands in `sys.modules`, where it is not put."""
    path = Path(kernels.__file__).with_name("tree_mask.py")
    spec = importlib.util.spec_from_file_location("augtree_fx.kernels.tree_mask", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
