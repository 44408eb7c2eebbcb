"""Which slots of a batch hold bitwise equal vectors: 64-bit fingerprints, and the check that none collided.

Integers only, so a fingerprint is the same in every run and for every order of summation.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# Odd 64-bit constants of splitmix64 (Steele, Lea, Flood 2014) and of xxHash64, as signed numbers.
_GOLDEN, _MIX, _PRIME = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x3D4D51C2D82B14B1
_CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}  # of an int64 intermediate: a CPU's cache; memory of a GPU
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def bits_of(values: Tensor, num_slots: int) -> Tensor:
    """The bits of each slot as integers as wide as fit: ``[num_slots, words]``, a view where that is possible."""
    flat = values.detach().reshape(num_slots, -1)
    if flat.dtype == torch.bool or not flat.numel():
        return flat.to(torch.uint8)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(num_slots, -1)
    size = flat.element_size()
    flat, offset = flat.contiguous().view(_WORDS[size]), flat.storage_offset() * size
    width = next(width for width in _WORDS if offset % width == 0 and flat.shape[1] * size % width == 0)
    return flat.view(_WORDS[width]) if width > size else flat


def _chunks(words: Tensor) -> int:
    """Rows to look at in one go."""
    return max(1, _CHUNK_BYTES.get(words.device.type, 1 << 20) // (8 * max(words.shape[1], 1)))


def _mixed(x: Tensor) -> Tensor:
    """A bijection of int64 in which upper bits reach lower ones."""
    x = x * _MIX
    return x ^ ((x >> 32) & 0xFFFFFFFF)  # the shift of a signed number fills in its sign


def fingerprints(tensors: Iterable[Tensor], num_slots: int) -> Tensor:
    """One number a slot out of the bits that some tensors hold there.

    Args:
        tensors: each of ``num_slots`` leading slots when flattened, any dtype and shape behind them.
        num_slots: number of slots.

    Returns:
        ``[num_slots]`` int64. Equal bits give equal numbers; different bits give different ones but for coincidence,
        so whoever relies on it checks with `equal_to_source`.
    """
    total: Tensor | None = None
    for values in tensors:
        words = bits_of(values, num_slots)
        columns = torch.arange(1, words.shape[1] + 1, dtype=torch.int64, device=words.device)
        weights = _mixed(columns * _GOLDEN) | 1
        sums = torch.cat(
            [(_mixed(part.to(torch.int64) + columns) * weights).sum(1) for part in words.split(_chunks(words))]
        )
        total = _mixed(sums) if total is None else _mixed(total * _GOLDEN + sums)
    assert total is not None, "there must be a tensor to look at"
    return _mixed(total * _PRIME)


def equal_to_source(values: Tensor, slots: Tensor, source: Tensor, num_slots: int) -> bool:
    """Whether slots hold, bit for bit, what the slots hold that stand for them.

    Args:
        values: a tensor of ``num_slots`` leading slots when flattened.
        slots: ``[n]`` slots to check.
        source: ``[n]`` the slot that is computed in place of each.
        num_slots: number of slots.
    """
    words = bits_of(values, num_slots)
    step = _chunks(words)
    pairs = zip(slots.split(step), source.split(step), strict=True)
    same = [(words.index_select(0, a) == words.index_select(0, b)).all() for a, b in pairs]
    return bool(torch.stack(same).all()) if same else True
