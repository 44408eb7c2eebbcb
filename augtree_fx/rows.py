"""Rows of a batch on the host: read from padded tensors, packed tensors or declared groups, checked, in one copy.

A row is a run of slots of the caller's flattened tensor. Everything that decides sharing (token ids, positions,
padding) crosses from the device in a single transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from augtree_fx.trie import IntArray, TrieNode

_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1
_PADDING = np.iinfo(np.int64).min
_WIDE_ID, _WRONG_POSITION = _PADDING + 1, _PADDING + 2


@dataclass(frozen=True, eq=False)
class HostRows:
    """Rows of tokens on the host.

    Attributes:
        keys: ``[slots]`` int64 of the flattened batch, ``position << 32 | token id``: what must agree for a token to be
            shared; the smallest int64 at padding.
        begin: ``[rows]`` first slot of each row.
        length: ``[rows]`` tokens of each row.
        shape: the caller's ``(batch, sequence)``.
        device: the caller's device.
    """

    keys: IntArray
    begin: IntArray
    length: IntArray
    shape: tuple[int, int]
    device: torch.device

    @staticmethod
    def none(input_ids: Tensor) -> HostRows:
        """No rows, of ``input_ids [0, sequence]``."""
        keys, begin, length = (np.empty(0, dtype=np.int64) for _ in range(3))
        return HostRows(keys, begin, length, (0, input_ids.shape[1]), input_ids.device)

    def row_keys(self) -> list[IntArray]:
        """Keys of each row's tokens."""
        return [self.keys[begin : begin + length] for begin, length in zip(self.begin, self.length, strict=True)]

    def ids_of(self, slots: IntArray) -> IntArray:
        """Token ids of some slots."""
        return (self.keys[slots] & _ID_MASK).astype(np.int32).astype(np.int64)

    def positions_of(self, slots: IntArray) -> IntArray:
        """Position ids of some slots."""
        return self.keys[slots] >> _ID_BITS


def _keys_on_host(input_ids: Tensor, mask: Tensor | None, positions: Tensor) -> IntArray:
    """Token id, position and padding in one number a slot, copied to the host in one transfer."""
    ids, positions = input_ids.to(torch.int64), positions.to(torch.int64)
    keys = (positions << _ID_BITS) | (ids & _ID_MASK)
    keys = keys.masked_fill(ids != ids.to(torch.int32), int(_WIDE_ID))
    keys = keys.masked_fill((positions < 0) | (positions >= 1 << 31), int(_WRONG_POSITION))
    if mask is not None:
        keys = keys.masked_fill(mask == 0, int(_PADDING))
    host = keys.flatten().cpu().numpy()
    if host.min() < 0:
        _check_range("input_ids must fit 32 bits", host == _WIDE_ID, input_ids)
        _check_range("position_ids must be below 2^31", host == _WRONG_POSITION, positions)
    return host


def _check_range(rule: str, wrong: npt.NDArray[np.bool_], values: Tensor) -> None:
    if wrong.any():
        slot = int(wrong.argmax())
        value = int(values.flatten()[slot % values.numel()])
        rule = rule if value >= 0 else rule.replace("be below 2^31", "not be negative")
        raise ValueError(f"{rule}, got {value} at token {slot} of the flattened batch")


def _check_devices(named: dict[str, Tensor | None]) -> None:
    devices = {name: tensor.device for name, tensor in named.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"all inputs must be on one device, got {listed}; move them with .to(device)")


def _check_ids(input_ids: Tensor) -> None:
    if input_ids.dtype.is_floating_point or input_ids.dtype.is_complex or input_ids.dtype == torch.bool:
        raise TypeError(f"input_ids must be integers, got {input_ids.dtype}")
    if input_ids.ndim != 2:
        raise ValueError(f"input_ids must be [batch, sequence], got shape {tuple(input_ids.shape)}")
    if input_ids.numel() == 0:
        raise ValueError(f"the batch is empty: input_ids has shape {tuple(input_ids.shape)}")


def _check_like(name: str, tensor: Tensor | None, shape: torch.Size, rows: tuple[int, ...]) -> None:
    if tensor is None:
        return
    if tensor.ndim != 2 or tensor.shape[1] != shape[1] or tensor.shape[0] not in rows:
        raise ValueError(f"{name} must have the shape of input_ids {tuple(shape)}, got {tuple(tensor.shape)}")
    if name == "position_ids" and tensor.dtype.is_floating_point:
        raise TypeError(f"position_ids must be integers, got {tensor.dtype}")


def padded_rows(input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> HostRows:
    """Rows of a padded batch; arguments and errors as in `TreeLayout.from_padded`."""
    _check_ids(input_ids)
    _check_like("attention_mask", attention_mask, input_ids.shape, (input_ids.shape[0],))
    _check_like("position_ids", position_ids, input_ids.shape, (1, input_ids.shape[0]))
    _check_devices({"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids})
    batch, sequence = input_ids.shape
    positions = torch.arange(sequence, device=input_ids.device) if position_ids is None else position_ids
    keys = _keys_on_host(input_ids, attention_mask, positions)
    mask = None if attention_mask is None else (keys != _PADDING).reshape(batch, sequence)
    first, length = _token_runs(mask, batch, sequence)
    begin = np.arange(batch, dtype=np.int64) * sequence + first
    rows = HostRows(keys, begin, length, (batch, sequence), input_ids.device)
    if position_ids is not None:
        _check_positions(rows)
    return rows


def _token_runs(mask: npt.NDArray[np.bool_] | None, batch: int, sequence: int) -> tuple[IntArray, IntArray]:
    """First column and number of tokens of each row; a row's tokens must be neighbours."""
    if mask is None:
        return np.zeros(batch, dtype=np.int64), np.full(batch, sequence, dtype=np.int64)
    length = mask.sum(axis=1)
    first = mask.argmax(axis=1)
    last = sequence - mask[:, ::-1].argmax(axis=1)
    holes = np.flatnonzero((length > 0) & (last - first != length))
    if len(holes):
        row = int(holes[0])
        run = mask[row, first[row] : last[row]]
        raise ValueError(
            f"attention_mask must be one run of ones in each row, row {row} has a hole at column "
            f"{int(first[row]) + int(run.argmin())}; remove the masked tokens from the row"
        )
    return first.astype(np.int64), length.astype(np.int64)


def _check_positions(rows: HostRows) -> None:
    for row, keys in enumerate(rows.row_keys()):
        positions = keys >> _ID_BITS
        steps = np.diff(positions)
        if len(steps) and steps.min() < 0:
            token = int(steps.argmin()) + 1
            raise ValueError(
                f"position_ids must not decrease inside a row, row {row} goes from {positions[token - 1]} to "
                f"{positions[token]} at token {token}; pass packed sequences without an attention_mask"
            )


def set_apart(keys: Sequence[IntArray], apart: IntArray) -> list[IntArray]:
    """Keys of rows with a first one that agrees only if the rows' numbers do: a new, negative number for each pair."""
    numbers: dict[tuple[int, int], int] = {}
    changed = []
    for row, number in zip(keys, apart, strict=True):
        row = row.copy()
        if len(row):
            row[0] = numbers.setdefault((int(number), int(row[0])), -1 - len(numbers))
        changed.append(row)
    return changed


def packed_rows(input_ids: Tensor, position_ids: Tensor | None, cu_seq_lens: Tensor | None) -> HostRows:
    """Rows of a padding-free batch; arguments and errors as in `TreeLayout.from_packed`."""
    input_ids = input_ids[None] if input_ids.ndim == 1 else input_ids
    position_ids = position_ids[None] if position_ids is not None and position_ids.ndim == 1 else position_ids
    _check_ids(input_ids)
    _check_like("position_ids", position_ids, input_ids.shape, (1, input_ids.shape[0]))
    if position_ids is None and cu_seq_lens is None:
        raise ValueError("packed rows need position_ids that restart, or cu_seq_lens; got neither")
    _check_devices({"input_ids": input_ids, "position_ids": position_ids})
    total, sequence = input_ids.numel(), input_ids.shape[1]
    bounds = None if cu_seq_lens is None else _sequence_bounds(cu_seq_lens, total, sequence)
    if position_ids is None:
        assert bounds is not None
        counted = np.arange(total, dtype=np.int64) - np.repeat(bounds[:-1], np.diff(bounds))
        position_ids = torch.from_numpy(counted).to(input_ids.device).view(input_ids.shape)
    keys = _keys_on_host(input_ids, None, position_ids.expand(input_ids.shape))
    if bounds is None:
        bounds = np.append(np.flatnonzero(sequence_starts(keys >> _ID_BITS, sequence)), total)
    shape = (input_ids.shape[0], sequence)
    return HostRows(keys, bounds[:-1], np.diff(bounds), shape, input_ids.device)


def _sequence_bounds(cu_seq_lens: Tensor, total: int, sequence: int) -> IntArray:
    if cu_seq_lens.dtype.is_floating_point:
        raise TypeError(f"cu_seq_lens must be integers, got {cu_seq_lens.dtype}")
    bounds = cu_seq_lens.cpu().numpy().astype(np.int64)
    covers = bounds.ndim == 1 and len(bounds) > 1 and bounds[0] == 0 and bounds[-1] == total
    if not covers or (np.diff(bounds) < 0).any():
        raise ValueError(f"cu_seq_lens must grow from 0 to {total} tokens, got {bounds.tolist()}")
    missing = np.setdiff1d(np.arange(0, total, sequence), bounds)
    if len(missing):
        raise ValueError(f"cu_seq_lens must cut at the end of every row of {sequence} tokens, none is at {missing[0]}")
    return bounds


def sequence_starts(positions: IntArray, sequence: int) -> np.ndarray:
    """``[slots]`` bool: where a packed sequence starts. Same rule as transformers: the position does not grow by 1."""
    starts = np.ones(len(positions), dtype=bool)
    starts[1:] = np.diff(positions) != 1
    starts[::sequence] = True
    return starts


def training_rows(input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> HostRows:
    """Rows as a transformers decoder reads its arguments: packed if positions come without a mask, else padded."""
    if attention_mask is not None or position_ids is None:
        return padded_rows(input_ids, attention_mask, position_ids)
    return packed_rows(input_ids, position_ids, None)


Tokens = Sequence[int] | Tensor


def _token_array(name: str, tokens: Tokens) -> IntArray:
    """One prompt or response as int64 on the host."""
    if isinstance(tokens, Tensor) and tokens.device.type == "meta":
        raise ValueError(f"{name} is on the meta device, which holds no token ids")
    array = np.asarray(tokens.cpu() if isinstance(tokens, Tensor) else tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"{name} must be a flat sequence of integers, got shape {array.shape} of {array.dtype}")
    ids = array.astype(np.int64)
    if ids.size and (ids.min() < -(1 << 31) or ids.max() >= 1 << 31):
        raise ValueError(f"{name} must have token ids of 32 bits, got {int(ids[np.abs(ids).argmax()])}")
    return ids


def group_rows(
    prompts: Sequence[Tokens], responses: Sequence[Sequence[Tokens]], device: torch.device
) -> tuple[HostRows, TrieNode, list[TrieNode]]:
    """Rows, tree and row ends of declared groups; arguments and errors as in `TreeLayout.from_groups`."""
    if len(prompts) != len(responses):
        raise ValueError(f"each prompt needs a list of responses, got {len(prompts)} prompts, {len(responses)} lists")
    if not any(len(branches) for branches in responses):
        raise ValueError("there is no group: give at least one prompt with one response (which may be empty)")
    root = TrieNode(0, 0, row=-1)
    ends: list[TrieNode] = []
    ids: list[IntArray] = []
    lengths: list[int] = []
    for index, (prompt, branches) in enumerate(zip(prompts, responses, strict=True)):
        prompt_ids = _token_array(f"prompt {index}", prompt)
        if not len(prompt_ids):
            raise ValueError(f"a prompt must have at least one token, prompt {index} is empty")
        node = TrieNode(0, len(prompt_ids), row=len(ends), parent=root)
        if len(branches):
            root.children.append(node)
        for response in branches:
            response_ids = _token_array(f"a response of prompt {index}", response)
            end = node
            if len(response_ids):
                end = TrieNode(node.end, node.end + len(response_ids), row=len(ends), parent=node)
                node.children.append(end)
            ends.append(end)
            ids += [prompt_ids, response_ids]
            lengths.append(len(prompt_ids) + len(response_ids))
    length = np.array(lengths, dtype=np.int64)
    begin = np.cumsum(length) - length
    total = int(length.sum())
    positions = np.arange(total, dtype=np.int64) - np.repeat(begin, length)
    keys = (positions << _ID_BITS) | (np.concatenate(ids) & _ID_MASK)
    return HostRows(keys, begin, length, (1, total), device), root, ends
