"""A stand-in mask that carries the tree to attention modules whose layers pass no further keywords on.

transformers' mask builders return a 4-D `BlockMask` untouched, and it is no tensor: gradient checkpointing, reentrant
or not, keeps the object itself, and device hooks move it by its ``to``. Attention that would use it as a mask fails.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree


class ContextMask(BlockMask):
    """A mask of no element, with the context of a batch.

    Attributes:
        context: what attention modules get otherwise as a keyword (`ReplayContext`).
    """

    def __init__(self, context: Any) -> None:
        self.context = context

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Four dimensions, by which the builders know a finished mask."""
        return (1, 1, 0, 0)

    @property
    def ndim(self) -> int:
        """As `shape` has it."""
        return len(self.shape)

    def __repr__(self) -> str:
        return f"ContextMask({self.context!r})"

    __str__ = __repr__

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> ContextMask:  # type: ignore[override]
        """For layers on another device."""
        moved = self.context.to(device, non_blocking)
        return self if moved is self.context else ContextMask(moved)


_LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention", "conv")


def by_layer_type(mask: ContextMask, config: Any) -> dict[str, ContextMask]:
    """One mask for layers of every type, as wrappers prepare masks: a stack then builds none, and passes these on."""
    types = getattr(config, "layer_types", None) or ()
    return dict.fromkeys((*_LAYER_TYPES, *types), mask)


pytree.register_pytree_node(
    ContextMask,
    lambda mask: ([mask.context], None),
    lambda leaves, _: ContextMask(*leaves),
    serialized_type_name="augtree_fx.ContextMask",
    flatten_with_keys_fn=lambda mask: ([(pytree.GetAttrKey("context"), mask.context)], None),
)
torch.serialization.add_safe_globals([ContextMask])
