"""Capture of modules with a recurrent or convolution state: what they are called with, and what brings the tree.

They keep their own code, so nothing of it is traced; it is to be certain only that every argument is understood.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from augtree_fx.transforms.classes import base_class, hides_forward
from augtree_fx.transforms.mixers import mixers_of
from augtree_fx.transforms.skeleton import KEYWORD, UNSEEN, SkeletonCall, named_layers, plain_name, record_calls
from augtree_fx.transforms.tracer import CaptureError

_MASK = "attention_mask"


@dataclass(frozen=True)
class MixerSite:
    """A module with a state that runs along a row; it runs once for each row.

    Attributes:
        name: module name inside the stack.
        class_name: its class.
        masked: whether it is told of padding, by a ``[batch, sequence]`` mask.
        carrier: what brings the tree's context to it, as for attention.
    """

    name: str
    class_name: str
    masked: bool
    carrier: str = KEYWORD


def mixer_sites(stack: nn.Module, calls: dict[str, SkeletonCall] | None = None) -> tuple[MixerSite, ...]:
    """Modules of a stack that run row by row.

    Args:
        stack: the live module.
        calls: what the modules of its skeleton are called with; recorded anew if ``None``.

    Raises:
        CaptureError: one is not called, the context does not reach it, or it is given what may not be of tokens.
    """
    found = [
        (f"{layer_name}.{name}", module)
        for layer_name, layer in named_layers(stack)
        for name, module in mixers_of(layer, stack.config)
    ]
    if not found:
        return ()
    calls = record_calls(stack, 6) if calls is None else calls
    return tuple(_site(name, module, calls.get(plain_name(name))) for name, module in found)


def _site(name: str, module: nn.Module, call: SkeletonCall | None) -> MixerSite:
    cls = base_class(module)
    known = f"{name} ({cls.__name__})"
    if call is None:
        raise CaptureError(f"the layer does not call {known}, which has a recurrent or convolution state")
    if hides_forward(module):
        raise CaptureError(f"{known} has a forward of its own, which hides that of its class")
    if call.carrier is None:
        raise CaptureError(f"neither extra keywords nor a mask given to the model reach {known}")
    if call.again:
        raise CaptureError(f"{known}, which has a recurrent or convolution state, is called several times")
    for argument, value in call.arguments.items():
        shapes = [tuple(x.shape) for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
        if any(shape[:2] != (1, call.tokens) for shape in shapes):
            raise CaptureError(f"{known} is given {argument}, which is not known to be of tokens")
    kind = call.mask_kind.removesuffix(UNSEEN)
    masked = _reads(inspect.unwrap(cls.forward), _MASK)
    if masked and kind not in ("recurrent", "none"):
        raise CaptureError(f"{known}, which has a recurrent or convolution state, is given a mask of kind {kind!r}")
    return MixerSite(name, cls.__name__, masked and kind == "recurrent", call.carrier)


@functools.cache
def _reads(forward: Callable[..., Any], argument: str) -> bool:
    """Whether a forward uses an argument."""
    return any(
        step.opname.startswith("LOAD") and argument in str(step.argval) for step in dis.get_instructions(forward)
    )
