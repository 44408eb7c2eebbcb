"""Rows of a batch on the host: read from padded tensors, packed tensors or declared groups, checked, in one copy.

A row is a run of slots of the caller's flattened tensor. Everything that decides sharing (token ids, positions,
padding) crosses from the device in a single transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .trie import IntArray, TrieNode


@dataclass(frozen=True, eq=False)
class HostRows:
    """Rows of token ids on the host.

    Attributes:
        ids: ``[slots]`` token ids of the flattened batch.
        positions: ``[slots]`` position ids, or ``None`` when a token's position is its column.
        begin: ``[rows]`` first slot of each row.
        length: ``[rows]`` tokens of each row.
        shape: the caller's ``(batch, sequence)``.
        device: the caller's device.
    """

    ids: IntArray
    positions: IntArray | None
    begin: IntArray
    length: IntArray
    shape: tuple[int, int]
    device: torch.device

    def positions_of(self, slots: IntArray) -> IntArray:
        """Position ids of some slots."""
        return slots % self.shape[1] if self.positions is None else self.positions[slots]

    def keys(self) -> list[IntArray]:
        """Per row an array ``[tokens, 2]`` of (token id, position id): what must agree for a token to be shared."""
        slots = np.arange(len(self.ids), dtype=np.int64)
        both = np.stack([self.ids, self.positions_of(slots)], axis=1)
        return [both[begin : begin + length] for begin, length in zip(self.begin, self.length, strict=True)]


def _to_host(named: dict[str, Tensor | None]) -> dict[str, IntArray]:
    """Copy integer tensors of one shape to the host in one transfer, as int64."""
    given = {name: tensor for name, tensor in named.items() if tensor is not None}
    devices = {name: tensor.device for name, tensor in given.items()}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"all inputs must be on one device, got {listed}; move them with .to(device)")
    shape = given["input_ids"].shape
    stacked = torch.stack([tensor.expand(shape).to(torch.int64) for tensor in given.values()])
    return dict(zip(given, stacked.cpu().numpy().reshape(len(given), -1), strict=True))


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


def padded_rows(input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> HostRows:
    """Rows of a padded batch; arguments and errors as in `TreeLayout.from_padded`."""
    _check_ids(input_ids)
    _check_like("attention_mask", attention_mask, input_ids.shape, (input_ids.shape[0],))
    _check_like("position_ids", position_ids, input_ids.shape, (1, input_ids.shape[0]))
    mask = None if attention_mask is None else attention_mask != 0
    host = _to_host({"input_ids": input_ids, "attention_mask": mask, "position_ids": position_ids})
    batch, sequence = input_ids.shape
    first, length = _token_runs(host.get("attention_mask"), batch, sequence)
    rows = HostRows(
        ids=host["input_ids"],
        positions=host.get("position_ids"),
        begin=np.arange(batch, dtype=np.int64) * sequence + first,
        length=length,
        shape=(batch, sequence),
        device=input_ids.device,
    )
    _check_positions(rows)
    return rows


def _token_runs(mask: IntArray | None, batch: int, sequence: int) -> tuple[IntArray, IntArray]:
    """First column and number of tokens of each row; a row's tokens must be neighbours."""
    if mask is None:
        return np.zeros(batch, dtype=np.int64), np.full(batch, sequence, dtype=np.int64)
    mask = mask.reshape(batch, sequence)
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
    if rows.positions is None:
        return
    for row, (begin, length) in enumerate(zip(rows.begin, rows.length, strict=True)):
        steps = np.diff(rows.positions[begin : begin + length])
        if len(steps) and steps.min() < 0:
            column = int(steps.argmin()) + 1
            raise ValueError(
                f"position_ids must not decrease inside a row, row {row} goes from "
                f"{rows.positions[begin + column - 1]} to {rows.positions[begin + column]} at token {column}; "
                "pass packed sequences without an attention_mask"
            )


def packed_rows(input_ids: Tensor, position_ids: Tensor | None, cu_seq_lens: Tensor | None) -> HostRows:
    """Rows of a padding-free batch; arguments and errors as in `TreeLayout.from_packed`."""
    input_ids = input_ids[None] if input_ids.ndim == 1 else input_ids
    position_ids = position_ids[None] if position_ids is not None and position_ids.ndim == 1 else position_ids
    _check_ids(input_ids)
    _check_like("position_ids", position_ids, input_ids.shape, (1, input_ids.shape[0]))
    if position_ids is None and cu_seq_lens is None:
        raise ValueError("packed rows need position_ids that restart, or cu_seq_lens; got neither")
    host = _to_host({"input_ids": input_ids, "position_ids": position_ids})
    positions = host.get("position_ids")
    if cu_seq_lens is not None:
        bounds = cu_seq_lens.cpu().numpy().astype(np.int64)
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != input_ids.numel() or (np.diff(bounds) < 0).any():
            raise ValueError(f"cu_seq_lens must grow from 0 to {input_ids.numel()} tokens, got {bounds.tolist()}")
    else:
        assert positions is not None
        starts = np.flatnonzero(sequence_starts(positions, input_ids.shape[1]))
        bounds = np.append(starts, input_ids.numel())
    begin, length = bounds[:-1], np.diff(bounds)
    if positions is None:
        positions = np.arange(input_ids.numel(), dtype=np.int64) - np.repeat(begin, length)
    shape = (input_ids.shape[0], input_ids.shape[1])
    return HostRows(host["input_ids"], positions, begin, length, shape, input_ids.device)


def sequence_starts(positions: IntArray, sequence: int) -> np.ndarray:
    """``[slots]`` bool: where a packed sequence starts. Same rule as transformers: the position does not grow by 1."""
    starts = np.ones(len(positions), dtype=bool)
    starts[1:] = np.diff(positions) != 1
    starts[::sequence] = True
    return starts


def training_rows(input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> HostRows:
    """Rows as a transformers decoder reads its arguments: packed if only restarting positions are given, else padded."""
    if attention_mask is not None or position_ids is None:
        return padded_rows(input_ids, attention_mask, position_ids)
    return packed_rows(input_ids, position_ids, None)


Tokens = Sequence[int] | Tensor


def group_rows(
    prompts: Sequence[Tokens], responses: Sequence[Sequence[Tokens]], device: torch.device
) -> tuple[HostRows, TrieNode, list[TrieNode]]:
    """Rows, tree and row ends of declared groups; arguments and errors as in `TreeLayout.from_groups`."""
    if len(prompts) != len(responses):
        raise ValueError(f"one list of responses a prompt is needed, got {len(prompts)} prompts, {len(responses)} lists")
    if not any(len(branches) for branches in responses):
        raise ValueError("there is no group: give at least one prompt with one response (which may be empty)")
    root, ends, ids, lengths = TrieNode(0, 0, row=-1), [], [], []
    for index, (prompt, branches) in enumerate(zip(prompts, responses, strict=True)):
        prompt_ids = np.asarray(prompt, dtype=np.int64)
        if not len(prompt_ids):
            raise ValueError(f"a prompt must have at least one token, prompt {index} is empty")
        node = TrieNode(0, len(prompt_ids), row=len(ends), parent=root)
        if len(branches):
            root.children.append(node)
        for response in branches:
            response_ids = np.asarray(response, dtype=np.int64)
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
    return HostRows(np.concatenate(ids), positions, begin, length, (1, total), device), root, ends
