"""Capture of modules that run row by row: what they are called with, and what brings the tree.

They keep their own code, so nothing of it is traced; it is to be certain only that every argument is understood.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from augtree_fx.transforms.classes import base_class, hides_forward
from augtree_fx.transforms.mixers import attends, chooses_keys, mixers_of, sees_padding
from augtree_fx.transforms.row_masks import RECURRENT, BuiltMask
from augtree_fx.transforms.skeleton import KEYWORD, UNSEEN, SkeletonCall, named_layers, plain_name, record_calls
from augtree_fx.transforms.tracer import CaptureError

_MASK = "attention_mask"
_CAUSAL = re.compile(r"full$|window \d+$|chunks of \d+$")  # kinds of masks in which no query sees a later key


@dataclass(frozen=True)
class MixerSite:
    """A module that runs once for each row: it has a state, or is attention which cannot be rewritten.

    Attributes:
        name: module name inside the stack.
        class_name: its class.
        masked: whether it is told of padding, by a ``[batch, sequence]`` mask.
        carrier: what brings the tree's context to it, as for attention.
        masks: arguments that hold masks, with how those are made.
        attention: whether it is attention.
        full_width: whether its rows are as wide as the caller's. Where keys are chosen, the choice among equal scores
            may depend on how many there are.
    """

    name: str
    class_name: str
    masked: bool
    carrier: str = KEYWORD
    masks: tuple[tuple[str, Any], ...] = ()
    attention: bool = False
    full_width: bool = False

    @property
    def state(self) -> str:
        """What runs along a row, in words."""
        return "attention" if self.attention else "state"


def mixer_sites(stack: nn.Module, calls: dict[str, SkeletonCall] | None = None) -> tuple[MixerSite, ...]:
    """Modules of a stack that run row by row.

    Args:
        stack: the live module.
        calls: what the modules of its skeleton are called with; recorded anew if ``None``.

    Raises:
        CaptureError: one is not called, the context does not reach it, or it is given what may not be of tokens.
    """
    by_layer = [(name, layer, mixers_of(layer, stack.config)) for name, layer in named_layers(stack)]
    if not any(mixers for _, _, mixers in by_layer):
        return ()
    calls = record_calls(stack, 6) if calls is None else calls
    found: list[tuple[str, nn.Module]] = []
    for layer_name, layer, mixers in by_layer:
        named = [(f"{layer_name}.{name}", module) for name, module in mixers]
        called = [(name, module) for name, module in named if plain_name(name) in calls]
        crosses = "encoder_hidden_states" in inspect.signature(inspect.unwrap(base_class(layer).forward)).parameters
        found += called if called and crosses else named  # cross-attention is not called where there are no such states
    return tuple(_site(name, module, calls.get(plain_name(name)), stack.config) for name, module in found)


def _site(name: str, module: nn.Module, call: SkeletonCall | None, config: Any) -> MixerSite:
    cls = base_class(module)
    known = f"{name} ({cls.__name__})"
    if call is None:
        raise CaptureError(f"the layer does not call {known}, which runs row by row")
    if hides_forward(module):
        raise CaptureError(f"{known} has a forward of its own, which hides that of its class")
    if call.carrier is None:
        raise CaptureError(f"neither extra keywords nor a mask given to the model reach {known}")
    if call.again:
        raise CaptureError(f"{known}, which runs row by row, is called several times")
    for argument, value in call.arguments.items():
        if argument in call.masks:
            continue
        shapes = [tuple(x.shape) for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
        if any(shape[:2] != (1, call.tokens) for shape in shapes):
            raise CaptureError(f"{known} is given {argument}, which is not known to be of tokens")
    if attends(module, config):
        return _attention_site(name, module, call, config)
    kind = call.mask_kind.removesuffix(UNSEEN)
    masked = _reads(inspect.unwrap(cls.forward), _MASK)
    if masked and kind not in ("recurrent", "none"):
        raise CaptureError(f"{known}, which has a recurrent or convolution state, is given a mask of kind {kind!r}")
    held = {argument: tree for argument, tree in call.masks.items() if argument != _MASK}
    if any(not isinstance(x, BuiltMask) or x.kind != RECURRENT for x in pytree.tree_leaves(held)):
        raise CaptureError(f"{known}, which has a recurrent or convolution state, is given a mask of attention")
    masked = (masked and kind == RECURRENT) or bool(held)
    return MixerSite(name, cls.__name__, masked, call.carrier, tuple(held.items()))


def _attention_site(name: str, module: nn.Module, call: SkeletonCall, config: Any) -> MixerSite:
    """Attention in its own code; every mask that it is given must be one that can be made for single rows."""
    cls = base_class(module)
    known = f"{name} ({cls.__name__})"
    held = [leaf for tree in call.masks.values() for leaf in pytree.tree_leaves(tree)]
    kinds = [leaf.kind.removesuffix(UNSEEN) if isinstance(leaf, BuiltMask) else "" for leaf in held]
    causal = [kind for kind in kinds if _CAUSAL.match(kind)]
    if call.mask_kind == "changed" and not held:
        raise CaptureError(f"{known} runs in its own code, and is given a mask that the stack makes itself")
    if not causal or any(kind not in causal and kind != RECURRENT for kind in kinds):
        said = ", ".join(kind or "unknown" for kind in kinds) or "none"
        raise CaptureError(f"{known} runs in its own code, and the kind of its mask is {said}")
    masked = not sees_padding(module, config)
    masks = tuple(call.masks.items())
    return MixerSite(name, cls.__name__, masked, call.carrier or KEYWORD, masks, True, chooses_keys(module))


@functools.cache
def _reads(forward: Callable[..., Any], argument: str) -> bool:
    """Whether a forward uses an argument."""
    return any(
        step.opname.startswith("LOAD") and argument in str(step.argval) for step in dis.get_instructions(forward)
    )
