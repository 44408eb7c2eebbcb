"""The batch of ``verify``: read from JSON or a ``.pt`` file, or drawn; and its rows, together or each alone."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from augtree_fx.examples.bench.shapes import Shape
from augtree_fx.rows import HostRows
from augtree_fx.verify import UsageError

NAMES = ("input_ids", "attention_mask", "position_ids")
_FORMS = (
    "a JSON list of rows of token ids, a JSON object or a .pt file of a dict with input_ids, attention_mask and "
    "position_ids, or a .pt file of input_ids"
)


@dataclass(frozen=True)
class Batch:
    """What a model is called with.

    Attributes:
        input_ids: ``[batch, sequence]`` int64.
        attention_mask: same shape, or ``None``.
        position_ids: same shape or ``[1, sequence]``, or ``None``.
        source: where it comes from, in words.
        notes: what a reader should know about it.
    """

    input_ids: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    source: str = ""
    notes: tuple[str, ...] = field(default=())

    def inputs(self) -> dict[str, Tensor]:
        """Keyword arguments of a model's forward."""
        return {name: value for name in NAMES if (value := getattr(self, name)) is not None}

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        return Batch(
            **{name: value.to(device) for name, value in self.inputs().items()}, source=self.source, notes=self.notes
        )


@dataclass(frozen=True)
class Piece:
    """Rows that go through the model together.

    Attributes:
        inputs: keyword arguments of the forward.
        rows: ``(row of the batch, first slot in the flattened inputs, tokens)`` of each row that has tokens.
    """

    inputs: dict[str, Tensor]
    rows: tuple[tuple[int, int, int], ...]


def together(batch: Batch, host: HostRows) -> Piece:
    """All rows as they were given."""
    found = enumerate(zip(host.begin.tolist(), host.length.tolist(), strict=True))
    return Piece(batch.inputs(), tuple((row, begin, length) for row, (begin, length) in found if length))


def alone(batch: Batch, host: HostRows) -> Iterator[Piece]:
    """Each row without padding and neighbours, at the positions that it has in the batch."""
    device = batch.input_ids.device
    for row, begin, length in together(batch, host).rows:
        ids = batch.input_ids.flatten()[begin : begin + length][None]
        positions = torch.from_numpy(host.positions_of(slice(begin, begin + length)))[None]  # type: ignore[arg-type]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions.to(device)}
        yield Piece(inputs, ((row, 0, length),))


def pad(rows: Sequence[Sequence[int]], side: str, pad_id: int, source: str) -> Batch:
    """Pad rows on one side; left-padded ones get positions that count tokens, without which they would share little."""
    width = max(map(len, rows))
    ragged = any(len(row) != width for row in rows)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        columns = slice(width - len(tokens), width) if side == "left" else slice(0, len(tokens))
        ids[row, columns] = torch.tensor(list(tokens), dtype=torch.int64)
        mask[row, columns] = 1
    if not ragged:
        return Batch(ids, mask, None, source)
    notes = [f"rows padded on the {side}"]
    if side == "left":
        notes.append("position_ids count each row's tokens from 0")
    positions = (mask.cumsum(1) - 1).clamp(min=0) if side == "left" else None
    return Batch(ids, mask, positions, source, (", ".join(notes),))


def draw(shapes: Sequence[Shape], vocabulary: int, side: str, pad_id: int, seed: int) -> Batch:
    """Random groups: the rows of each shape share its prompt."""
    generator = torch.Generator().manual_seed(seed)

    def run(length: int) -> list[int]:
        return torch.randint(vocabulary, (length,), generator=generator).tolist()

    rows = []
    for shape in shapes:
        prompt = run(shape.prompt)
        rows += [prompt + run(shape.response) for _ in range(shape.branches)]
    return pad(rows, side, pad_id, f"random tokens, groups of {', '.join(map(str, shapes))}")


def read(name: str, side: str, pad_id: int) -> Batch:
    """Read a batch from a file.

    Raises:
        UsageError: it cannot be read, or is not a batch; the message names the place.
    """
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"--batch: there is no file {name}; it is {_FORMS}")
    loaded = _load_tensors(path) if path.suffix in (".pt", ".pth", ".bin") else _load_json(path)
    if isinstance(loaded, list):
        return pad(_rows("row", loaded), side, pad_id, name)
    if isinstance(loaded, Tensor):
        loaded = {"input_ids": loaded}
    if not isinstance(loaded, dict) or "input_ids" not in loaded:
        what = (
            f"a dict of {', '.join(map(str, loaded)) or 'nothing'}" if isinstance(loaded, dict) else repr(loaded)[:60]
        )
        raise UsageError(f"--batch: {name} holds {what}; it must be {_FORMS}")
    return _from_dict(loaded, side, pad_id, name)


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--batch: {path} is not JSON: {error}; it must be {_FORMS}") from error


def _load_tensors(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        first = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise UsageError(
            f"--batch: {path} cannot be read: {first}; write it by torch.save(dict(input_ids=..., attention_mask=...), "
            "path), tensors only"
        ) from error


def _rows(what: str, rows: list[Any]) -> list[list[int]]:
    """Rows of whole numbers, or an error that names the place."""
    if not rows:
        raise UsageError("--batch: the list of rows is empty")
    for number, row in enumerate(rows):
        if not isinstance(row, list):
            raise UsageError(f"--batch: {what} {number} must be a list of token ids, got {row!r:.60}")
        for place, token in enumerate(row):
            if not isinstance(token, int) or isinstance(token, bool):
                raise UsageError(f"--batch: token ids are whole numbers, {what} {number} has {token!r:.60} at {place}")
    if not any(rows):
        raise UsageError("--batch: every row is empty")
    return rows


def _from_dict(loaded: dict[str, Any], side: str, pad_id: int, name: str) -> Batch:
    given = {key: loaded[key] for key in NAMES if loaded.get(key) is not None}
    ignored = [str(key) for key in loaded if key not in NAMES]
    notes = (f"of {name}, {', '.join(ignored)} left out: the loss is the same for every batch",) if ignored else ()
    ids = given["input_ids"]
    if isinstance(ids, list) and len({len(row) for row in _rows("row", ids)}) > 1:
        if len(given) > 1:
            raise UsageError("--batch: rows of input_ids differ in length; pad them, or leave the other entries out")
        padded = pad(ids, side, pad_id, name)
        return replace(padded, notes=padded.notes + notes)
    tensors = {key: _tensor(key, value) for key, value in given.items()}
    shape = tuple(tensors["input_ids"].shape)
    for key, tensor in tensors.items():
        allowed = [shape, (1, shape[1])] if key == "position_ids" else [shape]
        if tuple(tensor.shape) not in allowed:
            raise UsageError(f"--batch: {key} must have the shape of input_ids {shape}, got {tuple(tensor.shape)}")
    if not tensors["input_ids"].numel():
        raise UsageError(f"--batch: input_ids is empty, its shape is {shape}")
    return Batch(**tensors, source=name, notes=notes)


def _tensor(key: str, value: Any) -> Tensor:
    if isinstance(value, list):
        rows = _rows(f"row of {key}", value)
        if len({len(row) for row in rows}) > 1:
            raise UsageError(f"--batch: rows of {key} differ in length")
        value = torch.tensor(rows)
    if not isinstance(value, Tensor):
        raise UsageError(f"--batch: {key} must be a list of rows or a tensor, got {type(value).__name__}")
    if value.dtype.is_floating_point and key != "attention_mask" or value.dtype.is_complex:
        raise UsageError(f"--batch: {key} must be whole numbers, got {value.dtype}")
    value = value[None] if value.ndim == 1 else value
    if value.ndim != 2:
        raise UsageError(f"--batch: {key} must be [batch, sequence], got shape {tuple(value.shape)}")
    return value.to(torch.int64)


def check_ids(batch: Batch, vocabulary: int) -> None:
    """Every id must be one that the model embeds, padding included.

    Raises:
        UsageError: with the first id that is not.
    """
    wrong = (batch.input_ids < 0) | (batch.input_ids >= vocabulary)
    if wrong.any():
        row, column = (int(x) for x in wrong.nonzero()[0])
        raise UsageError(
            f"--batch: token ids must be from 0 to {vocabulary - 1}, the model's vocabulary, row {row} has "
            f"{int(batch.input_ids[row, column])} at column {column}; is it a batch of another tokenizer?"
        )
