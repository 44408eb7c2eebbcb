"""Masks of the rows of a tree's paths, for modules that run row by row: made by the builders that the stack calls.

A packed batch has a stand-in for the mask of each layer; a module that runs in its own code needs the real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import masking_utils

from augtree_fx.transforms.carrier import ContextMask
from augtree_fx.transforms.path_rows import PathRows

RECURRENT = "recurrent"  # kind of a [batch, sequence] mask that says padding alone


@dataclass(frozen=True)
class BuiltMask:
    """How a stack makes a mask.

    Attributes:
        kind: which keys it lets a query see; ``"probe"`` and the like where no builder made it.
        builder: function of `transformers.masking_utils` that makes it, empty if none is known.
        may_skip: whether the builder may return ``None`` where attention is causal without a mask.
    """

    kind: str
    builder: str = ""
    may_skip: bool = True

    def of_rows(self, rows: PathRows, config: Any, hidden: Tensor) -> Any:
        """The mask of the rows.

        Without padding in front there is none to tell of: padding on the right is behind every token, and masks here
        are causal. Position ids are not given, since builders look for packed rows in them.

        Args:
            rows: of the batch.
            config: of the stack.
            hidden: ``[paths, longest, ...]`` what the module is given; sets dtype and device.
        """
        if self.kind == RECURRENT:
            return rows.mask
        builder = getattr(masking_utils, self.builder)
        skip = {} if self.may_skip else {"allow_is_causal_skip": False}
        # By place, as the cache goes by another name in each version: config, embeddings, attention mask, cache.
        return builder(config, hidden, rows.mask, None, **skip)


@dataclass(frozen=True)
class RowMasks:
    """Masks among the arguments of a module that runs row by row.

    Attributes:
        by_argument: arguments that hold masks, each with the tree of its `BuiltMask`s.
        config: of the stack.
    """

    by_argument: tuple[tuple[str, Any], ...]
    config: Any

    def of_rows(self, rows: PathRows, hidden: Tensor) -> dict[str, Any]:
        """The arguments that hold masks, for the rows."""

        def build(mask: BuiltMask) -> Any:
            return mask.of_rows(rows, self.config, hidden)

        return {name: pytree.tree_map_only(BuiltMask, build, tree) for name, tree in self.by_argument}


def masks_among(arguments: dict[str, Any], known: dict[int, BuiltMask]) -> Iterator[tuple[str, Any]]:
    """Arguments that hold masks which a builder made, with those in the place of the masks."""

    def is_mask(value: Any) -> bool:
        return isinstance(value, Tensor | ContextMask)

    for name, value in arguments.items():
        leaves = pytree.tree_leaves(value, is_leaf=is_mask)
        if any(id(leaf) in known for leaf in leaves):
            yield name, pytree.tree_map(lambda leaf: known.get(id(leaf), leaf), value, is_leaf=is_mask)
