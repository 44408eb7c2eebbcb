"""The paths of a tree as rows: how a module with a recurrent or convolution state runs inside a packed batch.

packed    P1 P2 | a b c d e
rows      P1 a   P1 b   P1 c   P2 d   P2 e          one for each leaf, padded on the right

The module's own code runs on the rows; each packed token takes its output from one row that has it. Shared tokens come
out equal in all of their rows, and the gradient of the gather adds up what every row's recurrence says of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from augtree_fx.layout import TreeLayout
from augtree_fx.trie import IntArray


@dataclass(frozen=True)
class PathRows:
    """Where the tokens of a packed row are in the rows of its tree's paths.

    Attributes:
        index: ``[paths, longest]`` int64 packed token in each slot; 0 at padding, whose output nobody takes.
        source: ``[T]`` int64 slot of the flattened rows from which each packed token takes its output.
        mask: ``[paths, longest]`` int64, 1 at tokens; ``None`` unless rows have padding before their first token.
    """

    index: Tensor
    source: Tensor
    mask: Tensor | None

    @property
    def bucket(self) -> tuple[Hashable, ...]:
        """What a compiled model is specialised on: one path or several, padding in front or none."""
        return self.index.shape[0] == 1, self.mask is not None

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PathRows:
        """The same on another device."""
        moved = [None if x is None else x.to(device, non_blocking=non_blocking) for x in self.leaves()]
        return self if all(a is b for a, b in zip(moved, self.leaves(), strict=True)) else PathRows(*moved)  # type: ignore[arg-type]

    def leaves(self) -> list[Tensor | None]:
        """Tensors, in the order of the constructor."""
        return [self.index, self.source, self.mask]


def path_rows(layout: TreeLayout, *, full_width: bool = False) -> PathRows:
    """The rows of a layout's paths, one for each leaf.

    Args:
        layout: the tree.
        full_width: make them as wide as the caller's rows, if those are padded.

    Raises:
        NotImplementedError: rows have padding in front, and equal tokens stand in different columns.
    """
    leaves = np.setdiff1d(np.arange(layout.num_nodes), layout.parent)
    before = _padding_before(layout, leaves)
    end = before + layout.path_start[leaves] + layout.length[leaves]
    padded = full_width and len(layout.row_begin) == layout.shape[0]
    width = max(int(end.max()), layout.shape[1] if padded else 0)
    index = np.full((len(leaves), width), -1, dtype=np.int64)
    for row, leaf in enumerate(leaves):
        tokens = [np.arange(layout.offset[node], layout.offset[node + 1]) for node in layout.path(int(leaf))]
        index[row, before[row] : end[row]] = np.concatenate(tokens)
    source = np.empty(layout.num_tokens, dtype=np.int64)
    slots = np.flatnonzero(index >= 0)
    source[index.flat[slots]] = slots
    mask = (index >= 0).astype(np.int64) if before.any() else None
    arrays = (index.clip(min=0), source, mask)
    return PathRows(*(None if x is None else torch.from_numpy(x).to(layout.device) for x in arrays))  # type: ignore[arg-type]


def padding_before(begin: IntArray, shape: tuple[int, int]) -> IntArray:
    """``[rows]`` columns before each row's first token; 0 for packed rows, which are no rows of the caller's tensor."""
    columns = begin - np.arange(len(begin)) * shape[1]
    padded = len(begin) == shape[0] and ((columns >= 0) & (columns < shape[1])).all()
    return columns if padded else np.zeros_like(begin)


def _padding_before(layout: TreeLayout, leaves: IntArray) -> IntArray:
    """``[leaves]`` padding in front of each leaf's row: that of the caller's rows, which modules are told of."""
    rows = padding_before(layout.row_begin, layout.shape)
    of_node = np.zeros(layout.num_nodes, dtype=np.int64)
    of_node[layout.row_node[layout.row_node >= 0]] = rows[layout.row_node >= 0]
    if rows.any() and not columns_agree(layout):
        raise NotImplementedError(
            "a layer has a recurrent or convolution state, which padding in front of rows may reach, and shared tokens "
            "stand in different columns; pad on the right"
        )
    return of_node[leaves]


def columns(layout: TreeLayout) -> IntArray:
    """``[T]`` int64 column of each packed token, that of the first row which has it."""
    return np.asarray(layout.source % layout.shape[1], dtype=np.int64)


def columns_agree(layout: TreeLayout) -> bool:
    """Whether equal tokens stand in one column of the caller's rows."""
    slots = np.flatnonzero(layout.packed_index >= 0)
    return bool((columns(layout)[layout.packed_index[slots]] == slots % layout.shape[1]).all())


def run_rows(
    module: nn.Module,
    forward: Callable[..., Any],
    rows: PathRows,
    given: dict[str, Any],
    make_masks: Callable[[PathRows, Tensor], dict[str, Any]] | None = None,
) -> Any:
    """Run a module on the rows of a tree.

    Args:
        module: what runs row by row.
        forward: of its class.
        rows: of the batch.
        given: its arguments by name, of the packed row: tensors ``[1, T, ...]``. An ``attention_mask`` is replaced.
        make_masks: gives the arguments that hold masks, for the rows and the first tensor that they are given.

    Returns:
        What the module returns, of the packed row; a state that is not one of tokens cannot be used.

    Raises:
        NotImplementedError: a tensor that it is given is not one of tokens.
    """
    tokens, shape = rows.source.shape[0], tuple(rows.index.shape)
    index = rows.index.flatten()

    def gathered(x: Tensor) -> Tensor:
        if tuple(x.shape[:2]) != (1, tokens):
            raise NotImplementedError(
                f"{type(module).__name__} must be given tensors of {tokens} tokens to run row by row, got shape "
                f"{tuple(x.shape)}; transform with strict=False"
            )
        if not x.is_floating_point():
            return x[0].index_select(0, index).view(*shape, *x.shape[2:])
        return torch.ops.augtree.show_slots(x[0], index).view(*shape, *x.shape[2:])

    weights = list(module.parameters())

    def taken(x: Tensor) -> Any:
        if any(x is weight for weight in weights):  # a bias that the layer adds; torch.compile cannot take every id()
            return x
        if tuple(x.shape[:2]) != shape:
            return StateOfRows()
        return x.flatten(0, 1).index_select(0, rows.source)[None]

    masked = {"attention_mask": rows.mask} if "attention_mask" in given else {}
    arguments = {name: value for name, value in given.items() if name not in masked}
    if make_masks is not None:
        leaves = pytree.tree_leaves([arguments.get("hidden_states"), arguments])
        hidden = next(x for x in leaves if isinstance(x, Tensor) and x.is_floating_point())
        masked |= make_masks(rows, hidden.new_empty(()).expand(*shape, hidden.shape[-1]))
        arguments = {name: value for name, value in arguments.items() if name not in masked}
    arguments = pytree.tree_map_only(Tensor, gathered, arguments)
    return pytree.tree_map_only(Tensor, taken, forward(module, **arguments | masked))


class StateOfRows:
    """Stands for a state that a module returns beside its output: there is one for each row, not for the packed row."""

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"a state of single rows is used (.{name}), which a packed batch does not have")
