"""What a token takes in a decoder: counted in forwards of a few tokens that nobody sees, on any device.

What autograd keeps is what it saves, layers' inputs alone under checkpointing. What a layer takes while it is computed
again, and while its backward runs, is at most all that its operators make.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from augtree_fx.reference import accumulation_dtype
from augtree_fx.transforms.context import Shelf
from augtree_fx.transforms.skeleton import named_layers
from augtree_fx.transforms.state import StackState

# Two sizes tell what grows with the tokens from what does not: weights that autocast casts, say.
_FEW, _MANY = 32, 64

Forward = Callable[[int, Shelf], Tensor]  # of so many tokens; leaves K and V on the shelf; gives their hidden states


@dataclass(frozen=True)
class Footprint:
    """Bytes a token.

    Attributes:
        kept: what autograd keeps of a forward.
        layer: all that the operators of the largest layer make.
        keys: K and V of all layers.
        key_gradients: the same in the accumulation dtype; 0 without gradients.
        layer_keys: K and V of the layer that has most, twice, and once in the accumulation dtype: what its wave's
            attention holds of prompts for a moment.
        hidden: hidden states.
        constant: bytes whatever the number of tokens is.
    """

    kept: float
    layer: float
    keys: float
    key_gradients: float
    layer_keys: float
    hidden: float
    constant: float

    @property
    def computed(self) -> float:
        """Of a token in a forward and its backward: all layers' kept, one layer's own, hidden states and gradients."""
        return self.kept + self.layer + 2 * self.hidden


def footprint(stack: nn.Module, state: StackState, forward: Forward) -> Footprint:
    """Bytes a token of a stack, as it is called now; counted once for each way of calling it."""
    kind = next(stack.parameters()).device.type
    layers = [layer for _, layer in named_layers(stack)]
    key = (
        torch.is_grad_enabled(),
        stack.training,
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        sum(bool(getattr(layer, "gradient_checkpointing", False)) for layer in layers),
        sum(parameter.requires_grad for parameter in stack.parameters()),
        next(stack.parameters()).dtype,
        tuple({type(layer) for layer in layers}),
    )
    if key not in state.footprints:
        weights = {local(x).untyped_storage()._cdata for x in (*stack.parameters(), *stack.buffers())}
        state.footprints[key] = _measured(layers, forward, weights)
    return state.footprints[key]


def _measured(layers: list[nn.Module], forward: Forward, weights: set[int]) -> Footprint:
    few, many = (_count(layers, forward, number, weights) for number in (_FEW, _MANY))
    kept, layer = ((b - a) / (_MANY - _FEW) for a, b in ((few.kept, many.kept), (few.layer, many.layer)))
    keys = [narrow / _MANY for narrow, _ in many.keys]
    wide = [size / _MANY for _, size in many.keys]
    return Footprint(
        kept=kept,
        layer=layer,
        keys=sum(keys),
        key_gradients=sum(wide) if torch.is_grad_enabled() else 0.0,
        layer_keys=max(2 * x + y for x, y in zip(keys, wide, strict=True)),
        hidden=many.hidden / _MANY,
        constant=max(0.0, few.kept - _FEW * kept) + max(0.0, few.layer - _FEW * layer),
    )


class _Count(NamedTuple):
    """Bytes of one forward: see `Footprint`; of K and V by layer, also in the accumulation dtype."""

    kept: int
    layer: int
    keys: list[tuple[int, int]]
    hidden: int


def _count(layers: list[nn.Module], forward: Forward, num_tokens: int, weights: set[int]) -> _Count:
    saved: dict[int, Tensor] = {}
    made, by_layer, shelf = _Made(), [0], Shelf()

    def save(tensor: Tensor) -> Tensor:
        part = local(tensor)
        number = part.untyped_storage()._cdata
        if number not in weights:
            saved.setdefault(number, part.detach())  # held, so that the number stays its own
        return tensor.detach()  # an output that its own node holds would never be freed

    def begin(*_: Any) -> None:
        made.bytes = 0

    def end(*_: Any) -> None:
        by_layer.append(made.bytes)

    hooks = [hook for x in layers for hook in (x.register_forward_pre_hook(begin), x.register_forward_hook(end))]
    try:
        with made, torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            hidden = forward(num_tokens, shelf)
    finally:
        for hook in hooks:
            hook.remove()
    kept = sum(x.untyped_storage().nbytes() for x in saved.values())
    keys = [
        (sum(x.nbytes for x in pair), sum(x.numel() * accumulation_dtype(x.dtype).itemsize for x in pair))
        for pair in shelf.items.values()
    ]
    return _Count(kept, max(by_layer), keys, hidden.nbytes)


class _Made(TorchDispatchMode):
    """Adds up what operators make: outputs that do not lie in the memory of an input."""

    bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        self.bytes += sum(x.nbytes for x in _tensors(found) if x.untyped_storage()._cdata not in given)
        return found


def _tensors(tree: Any) -> list[Tensor]:
    return [local(x) for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)
