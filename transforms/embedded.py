"""Calls of a decoder stack whose tokens are vectors: wrappers of images and sound pass ``inputs_embeds``.

Two slots are one token only if everything that the stack gets for them agrees bit for bit: the vector, every one of
its positions (M-RoPE has three or four), every further tensor, and the token id where gradients reach the embedding.
Fingerprints find candidates; the bits themselves are compared for the layout that is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from augtree_fx.fingerprints import equal_to_source, fingerprints
from augtree_fx.layout import TreeLayout
from augtree_fx.rows import HostRows, packed_rows, padded_rows
from augtree_fx.transforms.provenance import UnknownOrigin, gradient_is_a_signal, refuse_repeated, token_ids_of

# Arguments [batch, sequence, ...] that say something about each token alone. Not every tensor of that shape does:
# `token_type_ids` make blocks of tokens see one another, in masks that a packed row does not build.
_BY_SLOT = ("per_layer_inputs", "visual_pos_masks")
# Arguments with a row for each slot that a boolean argument [batch, sequence] marks, in order.
_ROWS_OF_MASK = {"deepstack_visual_embeds": "visual_pos_masks"}


@dataclass(frozen=True)
class TokenInputs:
    """What a stack is given for each slot of a batch.

    Attributes:
        shape: ``(batch, sequence)``.
        by_slot: arguments of shape ``[batch, sequence, ...]``, ``input_ids`` or ``inputs_embeds`` among them.
        by_axis: ``position_ids`` of shape ``[axes, batch, sequence]``, or ``None``.
        by_mask: arguments with a row for every marked slot, and the flat slots that are marked.
        ids: further tensors that must agree, see `token_ids_of`.
    """

    shape: tuple[int, int]
    by_slot: dict[str, Tensor]
    by_axis: Tensor | None
    by_mask: dict[str, tuple[list[Tensor], Tensor]]
    ids: list[Tensor]

    @property
    def num_slots(self) -> int:
        return self.shape[0] * self.shape[1]

    def compared(self) -> list[Tensor]:
        """Everything that must agree, each with a row for every slot when flattened."""
        axes = [] if self.by_axis is None else [self.by_axis.movedim(0, -1)]
        return [*self.by_slot.values(), *axes, *self.ids]

    def rows(self, mask: Tensor | None, positions: Tensor | None, separates: bool) -> HostRows:
        """Rows for the layout: token ids are the numbers of distinct fingerprints.

        Args:
            mask: ``[batch, sequence]`` or ``None``.
            positions: 2-D position ids or ``None``.
            separates: whether position ids without a mask mean packed rows.
        """
        marks = fingerprints(self.compared(), self.num_slots)
        for values, slots in self.by_mask.values():
            for rows in values:
                marks = marks.index_add(0, slots, fingerprints([rows, marks[slots]], len(slots)))
        _, numbers = marks.unique(return_inverse=True)
        ids = numbers.view(self.shape)
        if self.by_axis is not None:  # all axes are in the fingerprints, so any position that counts tokens will do
            if mask is None and separates:
                return packed_rows(ids, self.by_axis[0], None)
            return padded_rows(ids, mask, None if mask is None else ((mask != 0).long().cumsum(1) - 1).clamp(min=0))
        if mask is None and positions is not None:
            return packed_rows(ids, positions, None)
        return padded_rows(ids, mask, positions)

    def collides(self, layout: TreeLayout) -> bool:
        """Whether a slot differs in any bit from the slot that a layout computes in its place."""
        index, source = (torch.from_numpy(x).to(layout.device) for x in (layout.packed_index, layout.source))
        slots = (index >= 0).nonzero()[:, 0]
        stands_in = source[index[slots]]
        shared = slots != stands_in
        slots, stands_in = slots[shared], stands_in[shared]
        for values in self.compared():
            if not equal_to_source(values, slots, stands_in, self.num_slots):
                return True
        for rows, marked in self.by_mask.values():
            place = torch.full((self.num_slots,), -1, dtype=torch.int64, device=layout.device)
            place[marked] = torch.arange(len(marked), device=layout.device)
            mine, theirs = place[slots], place[stands_in]
            if ((mine < 0) != (theirs < 0)).any():
                return True
            both = mine >= 0
            if any(not equal_to_source(x, mine[both], theirs[both], len(marked)) for x in rows):
                return True
        return False

    def packed(self, layout: TreeLayout) -> dict[str, Any]:
        """The arguments for the packed row: every packed token is read from its source slot.

        Sources are distinct, so the backward of the selection adds nothing up: the gradient of a packed token goes to
        its source slot and the slots that it stands for get 0, which is exact for what `token_ids_of` lets pass.
        """
        source = torch.from_numpy(layout.source).to(layout.device)
        arguments: dict[str, Any] = {
            name: values.flatten(0, 1).index_select(0, source)[None] for name, values in self.by_slot.items()
        }
        if self.by_axis is not None:
            arguments["position_ids"] = self.by_axis.flatten(1).index_select(1, source)[:, None]
        for name, (values, marked) in self.by_mask.items():
            place = torch.full((self.num_slots,), -1, dtype=torch.int64, device=layout.device)
            place[marked] = torch.arange(len(marked), device=layout.device)
            rows = place[source]
            arguments[name] = [x.index_select(0, rows[rows >= 0]) for x in values]
        return arguments


def has_axes(position_ids: Any) -> bool:
    """Whether positions have several axes (M-RoPE)."""
    return isinstance(position_ids, Tensor) and position_ids.ndim == 3


def is_embedded(given: Mapping[str, Any]) -> bool:
    """Whether tokens of a call are vectors, or have positions of several axes."""
    return given.get("input_ids") is None or has_axes(given.get("position_ids"))


def read_inputs(given: Mapping[str, Any], known: tuple[str, ...], embedding: nn.Module) -> TokenInputs:
    """Sort the arguments of a call by what they say about slots.

    Args:
        given: arguments by name.
        known: names that say nothing about single tokens, or are read elsewhere.
        embedding: of the stack.

    Raises:
        UnknownOrigin: an argument's meaning for a token, or the origin of its gradient, is not known.
    """
    name = "inputs_embeds" if given.get("input_ids") is None else "input_ids"
    tokens = given.get(name)
    if not isinstance(tokens, Tensor) or tokens.ndim != (3 if name == "inputs_embeds" else 2) or not tokens.numel():
        raise UnknownOrigin("there are neither input_ids [batch, sequence] nor inputs_embeds [batch, sequence, size]")
    shape = (int(tokens.shape[0]), int(tokens.shape[1]))
    by_slot, by_mask = {name: tokens}, {}
    for extra in other_tensors(given, known):
        value = given[extra]
        marks = given.get(_ROWS_OF_MASK.get(extra, ""))
        whole = isinstance(value, Tensor) and tuple(value.shape[:2]) == shape and value.device == tokens.device
        if whole and extra in _BY_SLOT:
            by_slot[extra] = value
        elif isinstance(marks, Tensor) and marks.dtype == torch.bool and tuple(marks.shape) == shape:
            by_mask[extra] = (list(value), marks.flatten().nonzero()[:, 0])
            _check_rows(extra, *by_mask[extra], tokens.device)
            if any(x.requires_grad for x in by_mask[extra][0]):  # the main features tell one image from another
                refuse_repeated(name, tokens, marks, shape)
        else:
            raise UnknownOrigin(f"extra tensors are passed to the decoder: {extra}")
    signal = gradient_is_a_signal(embedding)
    ids = [ids for argument, x in by_slot.items() for ids in token_ids_of(argument, x, shape, is_signal=signal)]
    if any(x.device != tokens.device for x in ids):
        raise UnknownOrigin("token embeddings are on another device than their ids")
    return TokenInputs(shape, by_slot, _axes(given.get("position_ids"), shape), by_mask, ids)


def other_tensors(given: Mapping[str, Any], known: tuple[str, ...]) -> list[str]:
    """Names of arguments that are tensors, or hold some, beyond the known ones."""
    return [
        name
        for name, value in given.items()
        if name not in known and any(isinstance(x, Tensor) and x.ndim for x in pytree.tree_leaves(value))
    ]


def _check_rows(name: str, values: list[Any], slots: Tensor, device: torch.device) -> None:
    for value in values:
        if not isinstance(value, Tensor) or value.ndim < 2 or len(value) != len(slots) or value.device != device:
            raise UnknownOrigin(f"{name} must hold tensors with a row for each of the {len(slots)} marked slots")


def _axes(position_ids: Any, shape: tuple[int, int]) -> Tensor | None:
    if not has_axes(position_ids):
        return None
    if position_ids.shape[1] not in (1, shape[0]) or position_ids.shape[2] != shape[1]:
        raise UnknownOrigin(f"position_ids have shape {tuple(position_ids.shape)} for tokens of shape {shape}")
    expanded: Tensor = position_ids.expand(-1, *shape)
    return expanded
