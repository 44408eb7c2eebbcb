"""A batch as the stack gets it, packed, and its outputs in the caller's shape again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from augtree_fx.layout import TreeLayout
from augtree_fx.transforms.carrier import ContextMask, by_layer_type
from augtree_fx.transforms.context import ReplayContext, Shelf
from augtree_fx.transforms.embedded import TokenInputs
from augtree_fx.transforms.in_waves import run_in_waves
from augtree_fx.transforms.live import changed_sites
from augtree_fx.transforms.path_rows import columns, path_rows
from augtree_fx.transforms.positions import call_packed
from augtree_fx.transforms.requests import refuse_columns
from augtree_fx.transforms.skeleton import CONTEXT, MAPPING, MASK
from augtree_fx.transforms.state import StackState
from augtree_fx.trie import IntArray
from augtree_fx.waves import Stage, idle_layout, part_of, token_index

if TYPE_CHECKING:  # it takes what is here
    from augtree_fx.transforms.lane_waves import LaneParts


@dataclass(frozen=True)
class PackedCall:
    """A batch as the stack gets it, packed, and how its outputs go back.

    Attributes:
        arguments: keywords of the stack's original forward, among them the context of the tree.
        index: ``[batch * sequence]`` packed token that each slot of the caller shows, -1 where it is padding.
        shape: the caller's ``(batch, sequence)``.
        num_tokens: packed tokens.
        parts: what its parts are called with, where they are to run one after another.
        group: name of the process group whose ranks each have ``num_tokens`` of them; ``index`` then counts through the
            tokens of all ranks.
    """

    arguments: dict[str, Any]
    index: Tensor
    shape: tuple[int, int]
    num_tokens: int
    parts: Parts | LaneParts | None = None
    group: str | None = None

    def show(self, outputs: Any) -> Any:
        """Outputs in the caller's shape, see `show_rows`."""
        return show_rows(outputs, self.index, self.shape, self.num_tokens, self.group)


@dataclass(frozen=True)
class Parts:
    """A batch that goes through the stack in parts.

    Attributes:
        plan: the parts.
        layout: the tree.
        tokens: what it is given for each slot, where token ids do not say it all.
        extras: further keywords of the stack's forward.
    """

    plan: Stage
    layout: TreeLayout
    tokens: TokenInputs | None
    extras: dict[str, Any]

    def run(self, stack: nn.Module, state: StackState, original: Callable[..., Any]) -> tuple[Any, Tensor, int]:
        """Outputs of all parts as of one forward, which of its tokens each slot shows, and how many it has."""

        def forward(nodes: IntArray, above: IntArray, prompts: Any, kept: Any) -> Any:
            part = part_of(self.layout, np.concatenate([above, nodes]))
            context = replace(make_context(part, state, len(above)), prompts=prompts, kept=kept)
            arguments = packed_arguments(stack, state, part, context, len(above))
            if self.tokens is not None:
                arguments = embedded_arguments(arguments, self.tokens, part_of(self.layout, nodes))
            return call_packed(stack, state.positions, original, self.extras | arguments)

        outputs, nodes = run_in_waves(self.plan, forward, idle_forward(stack, state, original, self.layout.device))
        place = np.full(self.layout.num_tokens + 1, -1, dtype=np.int64)  # the last entry is for padding, -1
        place[token_index(self.layout, nodes)] = np.arange(self.layout.num_tokens)
        index = torch.from_numpy(place[self.layout.packed_index]).to(self.layout.device)
        return outputs, index, self.layout.num_tokens


def idle_forward(
    stack: nn.Module, state: StackState, original: Callable[..., Any], device: torch.device
) -> Callable[..., Tensor]:
    """A forward of tokens that nobody sees, one by default: hidden states ``[1, tokens, hidden size]``."""

    def forward(num_tokens: int = 1, kept: Shelf | None = None) -> Tensor:
        layout = idle_layout(num_tokens, device)
        context = replace(make_context(layout, state), kept=kept)
        return call_packed(stack, state.positions, original, packed_arguments(stack, state, layout, context))[0]

    return forward


def make_context(layout: TreeLayout, state: StackState, first_node: int = 0) -> ReplayContext:
    """Context of a batch: tables for every window or chunk size that some layer has.

    Args:
        layout: the tree.
        state: of the stack.
        first_node: queries are the tokens of this node and the ones after it.
    """
    tables = {span: layout.tables(span, first_node) for span in {site.span for site in state.sites}}
    counted = None
    if any(site.counts for site in state.sites):
        refuse_columns(state, layout)
        counted = torch.from_numpy(columns(layout)[layout.offset[first_node] :]).to(layout.device)
    full_width = any(mixer.full_width for mixer in state.mixers)
    rows = path_rows(layout, full_width=full_width) if state.mixers else None
    return ReplayContext(tables, layout.num_levels == 1, state.kernel, counted, rows, recorder=state.recorder)


def pack_layout(stack: nn.Module, state: StackState, layout: TreeLayout) -> PackedCall:
    """The packed call of a layout.

    Raises:
        RuntimeError: an attention module is no longer what was captured.
    """
    index = torch.from_numpy(layout.packed_index).to(layout.device, non_blocking=True)
    return PackedCall(
        packed_arguments(stack, state, layout, make_context(layout, state)), index, layout.shape, layout.num_tokens
    )


def packed_arguments(
    stack: nn.Module, state: StackState, layout: TreeLayout, context: ReplayContext, first_node: int = 0
) -> dict[str, Any]:
    """Keywords of the stack's forward for the tokens of a layout, from a node on.

    Raises:
        RuntimeError: an attention module is no longer what was captured.
    """
    check_sites(stack, state)
    device = layout.device
    input_ids, position_ids = (
        torch.from_numpy(x[layout.offset[first_node] :]).to(device, non_blocking=True)
        for x in (layout.input_ids, layout.position_ids)
    )
    return {
        "input_ids": input_ids[None],
        "attention_mask": carrying_mask(stack, state, context, device),
        "position_ids": position_ids[None],
        "use_cache": False,
        CONTEXT: context,
    }


def check_sites(stack: nn.Module, state: StackState) -> None:
    """Raise RuntimeError if an attention module is no longer what was captured."""
    changed = changed_sites(stack, state.sites)
    if changed:
        raise RuntimeError(
            f"attention settings changed since transform at {', '.join(changed[:3])}; call augtree_fx.transform again"
        )


def embedded_arguments(arguments: dict[str, Any], tokens: TokenInputs, layout: TreeLayout) -> dict[str, Any]:
    return {"inputs_embeds": None, **arguments, "input_ids": None, **tokens.packed(layout)}


def carrying_mask(stack: nn.Module, state: StackState, context: ReplayContext, device: torch.device) -> Any:
    """What stands in the place of the mask: it carries the context where keywords do not arrive."""
    carriers = {site.carrier for site in state.sites} | {mixer.carrier for mixer in state.mixers}
    if MAPPING in carriers:
        return by_layer_type(ContextMask(context), stack.config)
    return ContextMask(context) if MASK in carriers else _stand_in(device)


def _stand_in(device: torch.device) -> Tensor:
    """A 4-D mask passes through the mask builders untouched; this shape breaks any attention that would use it."""
    return torch.zeros(1, 1, 0, 0, dtype=torch.int32, device=device)


def show_rows(outputs: Any, index: Tensor, shape: tuple[int, int], tokens: int, group: str | None = None) -> Any:
    """Outputs of the packed row in the caller's shape; slots of padding are 0.

    ``[1, T, ...]`` becomes ``[batch, sequence, ...]`` (hidden states), ``[T, ...]`` becomes ``[batch * sequence, ...]``
    (router logits); tuples and model outputs are mapped over, everything else is left alone. With a process group T
    tokens are on each of its ranks.
    """
    if isinstance(outputs, Tensor):
        index = index.to(outputs.device)  # layers may lie on several

        def shown(packed: Tensor) -> Tensor:
            packed = packed if group is None else torch.ops.augtree.gather_shares(packed.contiguous(), group)
            return torch.ops.augtree.show_slots(packed, index)

        if outputs.ndim >= 2 and outputs.shape[:2] == (1, tokens):
            return shown(outputs[0]).view(*shape, *outputs.shape[2:])
        if outputs.ndim >= 1 and outputs.shape[0] == tokens:
            return shown(outputs)
        return outputs
    if isinstance(outputs, tuple):
        return tuple(show_rows(item, index, shape, tokens, group) for item in outputs)
    if isinstance(outputs, dict):
        for name in list(outputs.keys()):
            outputs[name] = show_rows(outputs[name], index, shape, tokens, group)
    return outputs
