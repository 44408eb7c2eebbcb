"""Partial softmax in Triton: forward, backward, and the row sums of dout * out, each one pass and one launch.

Legend: T tokens, H query heads, E head size, n partials. A row is one token of one head, E numbers. A program owns a
tile of BLOCK_T tokens x BLOCK_H heads: heads of a token are neighbours in ``out [T, H, E]``, tokens of a head are in
``lse [H, T]``, so both are read in whole sectors. A program reads all of its rows before it writes any of them, which
is what makes merging in place safe. Offsets are 64-bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from augtree_fx.kernels.problem import unit_stride

MAX_PARTIALS = 8  # in one launch: their tiles wait in registers
_TILE_BYTES = 8192  # of one partial in one program of 4 warps: four 16-byte loads a thread
_MAX_ROWS = 128  # of small heads: a thread per row
_TILE_TOKENS = 8  # float32 LSEs of 8 neighbouring tokens fill a 32-byte sector


@triton.jit
def _rows(num_tokens, num_heads, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr):
    """Token and head of each row of this program's tile, and whether they exist."""
    tile = tl.program_id(0)
    head_tiles = tl.cdiv(num_heads, BLOCK_H)
    row = tl.arange(0, BLOCK_T * BLOCK_H)
    token = (tile // head_tiles).to(tl.int64) * BLOCK_T + row // BLOCK_H
    head = (tile % head_tiles).to(tl.int64) * BLOCK_H + row % BLOCK_H
    return token, head, (token < num_tokens) & (head < num_heads)


@triton.jit
def _load_lse(packed, number: tl.constexpr, token, head, valid):
    """LSE ``number`` of a tuple made by `_pack`; -inf for rows that do not exist."""
    base = (packed[3 * number] // 4).to(tl.pointer_type(tl.float32), bitcast=True)
    offset = head * (packed[3 * number + 1] // 16) + token * (packed[3 * number + 2] // 16)
    return tl.load(base + offset, mask=valid, other=float("-inf"))


@triton.jit
def _load_tile(base, token_stride, head_stride, token, head, valid, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """``[rows, BLOCK_E]``, 0 outside."""
    element = tl.arange(0, BLOCK_E)[None, :]
    offset = token[:, None] * token_stride + head[:, None] * head_stride + element
    return tl.load(base + offset, mask=valid[:, None] & (element < E), other=0.0)


@triton.jit
def _load_tiles(parts, part_strides, token, head, valid, NUM: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Tiles of all partials, before anything else is done: what is in flight is what makes a merge fast."""
    tiles = ()
    for number in tl.static_range(NUM):
        token_stride, head_stride = part_strides[2 * number], part_strides[2 * number + 1]
        tile = _load_tile(parts[number], token_stride, head_stride, token, head, valid, E, BLOCK_E)
        tiles = tiles + (tile,)  # type: ignore[assignment]  # Triton unrolls this loop: the tuple's type may grow
    return tiles


@triton.jit
def _store_tile(base, token_stride, head_stride, tile, token, head, valid, E: tl.constexpr, BLOCK_E: tl.constexpr):
    element = tl.arange(0, BLOCK_E)[None, :]
    offset = token[:, None] * token_stride + head[:, None] * head_stride + element
    tl.store(base + offset, tile.to(base.dtype.element_ty), mask=valid[:, None] & (element < E))


@triton.jit
def _unless_empty(lse, tile):
    """A partial that saw no key (LSE -inf) may hold anything, NaN too."""
    return tl.where((lse > float("-inf"))[:, None], tile.to(tl.float32), 0.0)


@triton.jit
def _weight(lse, total):
    """``exp(lse - total)``, 0 where ``lse`` is -inf, also when ``total`` is."""
    return tl.exp(lse - tl.where(total == float("-inf"), 0.0, total))


@triton.jit(
    do_not_specialize=["lse_head_stride", "lse_token_stride", "num_tokens", "num_heads"],
    do_not_specialize_on_alignment=["lse", "sinks"],
)
def _merge_kernel(
    parts,
    part_strides,
    part_lses,
    sinks,
    out,
    out_token_stride,
    out_head_stride,
    lse,
    lse_head_stride: tl.int64,
    lse_token_stride: tl.int64,
    num_tokens: tl.int64,
    num_heads: tl.int32,
    NUM: tl.constexpr,
    E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    token, head, valid = _rows(num_tokens, num_heads, BLOCK_T, BLOCK_H)
    tiles = _load_tiles(parts, part_strides, token, head, valid, NUM, E, BLOCK_E)
    logits = ()
    for number in tl.static_range(NUM):
        logits = logits + (_load_lse(part_lses, number, token, head, valid),)  # type: ignore[assignment]
    if sinks is not None:
        sink = tl.load(sinks + head, mask=valid, other=float("-inf")).to(tl.float32)
        logits = logits + (sink,)  # type: ignore[assignment]
    largest = logits[0]  # type: ignore[misc]
    for number in tl.static_range(1, len(logits)):
        largest = tl.maximum(largest, logits[number])
    total = tl.zeros([BLOCK_T * BLOCK_H], tl.float32)
    for number in tl.static_range(len(logits)):
        total += _weight(logits[number], largest)
    whole = tl.where(largest == float("-inf"), largest, largest + tl.log(tl.where(total == 0.0, 1.0, total)))
    merged = tl.zeros([BLOCK_T * BLOCK_H, BLOCK_E], tl.float32)
    for number in tl.static_range(NUM):
        merged += _weight(logits[number], whole)[:, None] * _unless_empty(logits[number], tiles[number])
    # Several threads hold the same row's LSE: in place, none may write it before all have read it.
    tl.debug_barrier()
    _store_tile(out, out_token_stride, out_head_stride, merged, token, head, valid, E, BLOCK_E)
    tl.store(lse + head * lse_head_stride + token * lse_token_stride, whole, mask=valid)


@triton.jit
def _store_sink_sums(
    partial_dsinks, sinks, through, whole, token, head, valid, num_heads, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Sum over the tile's tokens of ``exp(sink - lse) * through``, to row ``tile`` of ``[tiles, H]``."""
    sink = tl.load(sinks + head, mask=valid, other=float("-inf")).to(tl.float32)
    term = tl.where(whole > float("-inf"), _weight(sink, whole) * through, 0.0)  # no keys: no softmax to join
    term = tl.where(valid, term, 0.0)
    sums = tl.sum(tl.reshape(term, [BLOCK_T, BLOCK_H]), axis=0)
    head_tiles = tl.cdiv(num_heads, BLOCK_H)
    tile = tl.program_id(0)
    column = (tile % head_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
    row = (tile // head_tiles).to(tl.int64)
    tl.store(partial_dsinks + row * num_heads + column, sums, mask=column < num_heads)


@triton.jit(do_not_specialize=["num_tokens", "num_heads"], do_not_specialize_on_alignment=["sinks"])
def _merge_backward_kernel(
    dout,
    dout_token_stride,
    dout_head_stride,
    out,
    out_token_stride,
    out_head_stride,
    lses,  # packed: the merged LSE, those of the partials, and its gradient where HAS_DLSE
    parts,
    part_strides,
    sinks,
    douts,
    dlses,
    partial_dsinks,
    num_tokens: tl.int64,
    num_heads: tl.int32,
    NUM: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    token, head, valid = _rows(num_tokens, num_heads, BLOCK_T, BLOCK_H)
    tiles = _load_tiles(parts, part_strides, token, head, valid, NUM, E, BLOCK_E)
    dout_tile = _load_tile(dout, dout_token_stride, dout_head_stride, token, head, valid, E, BLOCK_E).to(tl.float32)
    out_tile = _load_tile(out, out_token_stride, out_head_stride, token, head, valid, E, BLOCK_E).to(tl.float32)
    whole = _load_lse(lses, 0, token, head, valid)
    through = -tl.sum(dout_tile * out_tile, axis=1)
    if HAS_DLSE:
        through += tl.where(valid, _load_lse(lses, NUM + 1, token, head, valid), 0.0)
    for number in tl.static_range(NUM):
        logit = _load_lse(lses, number + 1, token, head, valid)
        weight = _weight(logit, whole)
        inner = tl.sum(dout_tile * _unless_empty(logit, tiles[number]), axis=1)
        _store_tile(douts[number], num_heads * E, E, weight[:, None] * dout_tile, token, head, valid, E, BLOCK_E)
        tl.store(dlses[number] + head * num_tokens + token, weight * (inner + through), mask=valid)
    if sinks is not None:
        _store_sink_sums(partial_dsinks, sinks, through, whole, token, head, valid, num_heads, BLOCK_T, BLOCK_H)


@triton.jit(do_not_specialize=["num_tokens", "num_heads"], do_not_specialize_on_alignment=["sinks"])
def _sink_kernel(
    dout,
    dout_token_stride,
    dout_head_stride,
    out,
    out_token_stride,
    out_head_stride,
    lses,  # packed: the LSE and its gradient
    sinks,
    partial_dsinks,
    num_tokens: tl.int64,
    num_heads: tl.int32,
    HAS_DLSE: tl.constexpr,
    E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    token, head, valid = _rows(num_tokens, num_heads, BLOCK_T, BLOCK_H)
    dout_tile = _load_tile(dout, dout_token_stride, dout_head_stride, token, head, valid, E, BLOCK_E).to(tl.float32)
    out_tile = _load_tile(out, out_token_stride, out_head_stride, token, head, valid, E, BLOCK_E).to(tl.float32)
    through = -tl.sum(dout_tile * out_tile, axis=1)
    if HAS_DLSE:
        through += tl.where(valid, _load_lse(lses, 1, token, head, valid), 0.0)
    whole = _load_lse(lses, 0, token, head, valid)
    _store_sink_sums(partial_dsinks, sinks, through, whole, token, head, valid, num_heads, BLOCK_T, BLOCK_H)


def _pack(lses: Sequence[Tensor]) -> tuple[int, ...]:
    """Address and strides of float32 LSEs as numbers that are all multiples of 16.

    Triton compiles a variant for every pattern of which pointers and numbers inside a tuple are multiples of 16, and
    has no way to ask it not to. LSEs of query ranges begin anywhere; they are read 4 bytes at a time, so nothing is
    lost: times 4 (addresses, which are multiples of 4) and times 16 (strides), one pattern is left.
    """
    return tuple(n for x in lses for n in (x.data_ptr() * 4, x.stride(0) * 16, x.stride(1) * 16))


def _strides(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(n for x in tensors for n in (x.stride(0), x.stride(1)))


def _tile(like_THE: Tensor, num_read: int) -> tuple[dict[str, int], tuple[int], int]:
    """Block sizes, grid, and number of tiles along the tokens, for programs that hold ``num_read`` tiles at once."""
    num_tokens, num_heads, head_dim = like_THE.shape
    block_e = triton.next_power_of_2(head_dim)
    tile_bytes = _TILE_BYTES if num_read <= 4 else _TILE_BYTES // 2
    rows = min(max(tile_bytes // (block_e * like_THE.element_size()), 1), _MAX_ROWS)
    block_h = min(max(rows // _TILE_TOKENS, 1), triton.next_power_of_2(num_heads))
    block_t = max(rows // block_h, 1)
    token_tiles = triton.cdiv(num_tokens, block_t)
    blocks = {"E": head_dim, "BLOCK_T": block_t, "BLOCK_H": block_h, "BLOCK_E": block_e}
    return blocks, (token_tiles * triton.cdiv(num_heads, block_h),), token_tiles


def _on_device_of(tensor: Tensor) -> torch.cuda.device | nullcontext[None]:
    """Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def partial_softmax(
    outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    """See `augtree_fx.merge.partial_softmax`; more than `MAX_PARTIALS` are merged in turns, the sum in float32.

    Args:
        outs: ``[T, H, E]`` each, float16, bfloat16 or float32.
        lses: ``[H, T]`` each, float32.
        sinks: ``[H]`` or ``None``.
        out, lse: where the results go; may be the memory of one of ``outs`` and of its LSE.
    """
    outs, lses = list(outs), list(lses)
    while len(outs) > MAX_PARTIALS:
        wide_out, wide_lse = torch.empty_like(out, dtype=torch.float32), torch.empty_like(lse)
        _launch_merge(outs[:MAX_PARTIALS], lses[:MAX_PARTIALS], None, wide_out, wide_lse)
        outs, lses = [wide_out, *outs[MAX_PARTIALS:]], [wide_lse, *lses[MAX_PARTIALS:]]
    _launch_merge(outs, lses, sinks, out, lse)


def _launch_merge(outs: list[Tensor], lses: list[Tensor], sinks: Tensor | None, out: Tensor, lse: Tensor) -> None:
    parts = unit_stride(tuple(outs))
    blocks, grid, _ = _tile(out, len(parts))
    with _on_device_of(out):
        _merge_kernel[grid](
            tuple(parts),
            _strides(parts),
            _pack(lses),
            None if sinks is None else sinks.contiguous(),
            out,
            *_strides([out]),
            lse,
            *lse.stride(),
            *out.shape[:2],
            NUM=len(parts),
            **blocks,
        )


def partial_softmax_backward(
    dout: Tensor,
    dlse: Tensor | None,
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """See `augtree_fx.merge.partial_softmax_backward`; LSEs and ``dlse`` float32."""
    parts, (dout, out) = unit_stride(tuple(outs)), unit_stride((dout, out))
    douts = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in outs]
    dlses = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in lses]
    dsinks = None
    for begin in range(0, len(parts), MAX_PARTIALS):
        some = slice(begin, begin + MAX_PARTIALS)
        blocks, grid, token_tiles = _tile(out, 2 + len(parts[some]))
        sums = dsinks is None and sinks is not None
        partial_dsinks = lse.new_empty(token_tiles, out.shape[1]) if sums else None
        with _on_device_of(out):
            _merge_backward_kernel[grid](
                dout,
                *_strides([dout]),
                out,
                *_strides([out]),
                _pack([lse, *lses[some], *([] if dlse is None else [dlse])]),
                tuple(parts[some]),
                _strides(parts[some]),
                sinks.contiguous() if sums and sinks is not None else None,
                tuple(douts[some]),
                tuple(dlses[some]),
                partial_dsinks,
                *out.shape[:2],
                NUM=len(parts[some]),
                HAS_DLSE=dlse is not None,
                **blocks,
            )
        if partial_dsinks is not None and sinks is not None:
            dsinks = partial_dsinks.sum(0).to(sinks.dtype)
    return douts, dlses, dsinks


def sink_gradient(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient of the sinks' logits, ``[H]``, summed over tiles and then over tokens in float32."""
    dout, out = unit_stride((dout, out))
    blocks, grid, token_tiles = _tile(out, 2)
    partial_dsinks = torch.empty(token_tiles, out.shape[1], dtype=torch.float32, device=out.device)
    with _on_device_of(out):
        _sink_kernel[grid](
            dout,
            *_strides([dout]),
            out,
            *_strides([out]),
            _pack([lse] if dlse is None else [lse, dlse]),
            sinks.contiguous(),
            partial_dsinks,
            *out.shape[:2],
            HAS_DLSE=dlse is not None,
            **blocks,
        )
    return partial_dsinks.sum(0).to(sinks.dtype)
