"""Modules that run row by row (`path_rows`), told by their classes.

They mix the tokens of a row other than by attention, with a recurrent or convolution state; or they are attention that
has such a state inside, chooses or pools its keys by the tokens before them, or calls no attention interface.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from augtree_fx.transforms.classes import base_class, is_attention

_STATE = re.compile(
    r"Mamba|SSM|Recurrent|Rwkv|DeltaNet|DeltaAttention|ShortConv|LinearAttention|Lightning|RgLru|RGLRU|Retention|Conv1d"
)
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_CHOICE = re.compile(r"Indexer|Compressor")  # they choose or pool keys by the tokens before them
_ATTENTION = re.compile(r"Attention2?$")
_MASK = "attention_mask"
_CHOSEN = "indexer"  # attribute of attention that takes chosen keys from another layer where it has none of its own
_WITHOUT_STATE = ("Norm", "NormGated", "MLP", "Mlp", "RotaryEmbedding")
_OF_ONE_TOKEN = re.compile(r"(Norm|MLP|Mlp|MoE|Experts|Router|Linear|Dropout|Identity|ModuleList)$")


def mixers_of(layer: nn.Module, config: Any) -> list[tuple[str, nn.Module]]:
    """Modules of a layer that run row by row, with their names: those whose forward has a state, or chooses keys.

    Args:
        layer: of a decoder stack.
        config: of the stack; its class says which prefix of class names is that of the family.
    """
    return list(_states("", layer, _family(config))) or list(_own_attention(layer, config))


def attends(module: nn.Module, config: Any) -> bool:
    """Whether a module is attention, through transformers' attention interface or in code of its own.

    Linear attention, whatever it is called, is a state that runs along a row.
    """
    if is_attention(module):
        return True
    named = _ATTENTION.search(base_class(module).__name__) is not None and not _has_state(module, _family(config))
    return named and _MASK in inspect.signature(inspect.unwrap(base_class(module).forward)).parameters


def _own_attention(layer: nn.Module, config: Any) -> Iterator[tuple[str, nn.Module]]:
    """Innermost attention modules of a layer none of whose modules calls transformers' attention interface."""
    if any(is_attention(module) for module in layer.modules()):
        return
    attention = [(name, module) for name, module in layer.named_modules() if name and attends(module, config)]
    for name, module in attention:
        if not any(other is not module and any(x is other for x in module.modules()) for _, other in attention):
            yield name, module


def rewritable(layer: nn.Module, config: Any) -> list[tuple[str, nn.Module]]:
    """Attention modules of a layer that do not run row by row, with their names."""
    own = {id(module) for _, mixer in mixers_of(layer, config) for module in mixer.modules()}
    return [(name, module) for name, module in layer.named_modules() if is_attention(module) and id(module) not in own]


def sees_padding(attention: nn.Module, config: Any) -> bool:
    """Whether what an attention module holds beside attention is not told of padding: no mask among its arguments."""
    family = _family(config)

    def told(module: nn.Module) -> bool:
        return any("mask" in name for name in inspect.signature(inspect.unwrap(base_class(module).forward)).parameters)

    def unseen(module: nn.Module) -> bool:
        """Whether a state or a choice lies below modules that are not told of padding."""
        below = [child for child in module.children() if not told(child)]
        return any(_chooses(child) or _has_state(child, family) or unseen(child) for child in below)

    return unseen(attention)


def chooses_keys(attention: nn.Module) -> bool:
    """Whether an attention module has a part that chooses or pools its keys, or takes the choice of another one."""
    return any(_chooses(module) for module in attention.modules()) or (
        is_attention(attention) and _CHOSEN in inspect.unwrap(base_class(attention).forward).__code__.co_names
    )


def unknown_mixer(layer: nn.Module, config: Any) -> tuple[str, nn.Module] | None:
    """A module that mixes tokens and that `mixers_of` does not cover."""
    family = _family(config)
    covered = [module for _, mixer in mixers_of(layer, config) for module in mixer.modules()]
    for name, module in layer.named_modules():
        if not name or is_attention(module) or any(module is x for x in covered):
            continue
        state = _has_state(module, family) and not isinstance(module, GradientCheckpointingLayer)
        if _chooses(module) or state:
            return name, module
    return None


def mixes_nothing(layer: nn.Module, layers: Iterable[nn.Module], config: Any) -> bool:
    """Whether a layer mixes no tokens: it holds norms, MLPs and experts alone, as their classes are named.

    Its own class is trusted as that of another of the ``layers``, which has attention or a state.
    """
    alike = [other for other in layers if base_class(other) is base_class(layer)]
    mixing = any(mixers_of(other, config) or any(is_attention(x) for x in other.modules()) for other in alike)
    return mixing and all(
        _OF_ONE_TOKEN.search(base_class(module).__name__) or type(module).__module__ in _ACTIVATIONS
        for name, module in layer.named_modules()
        if name
    )


def _states(name: str, module: nn.Module, family: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}".lstrip(".")
        if is_attention(child):
            if chooses_keys(child) or any(_has_state(x, family) for x in child.modules() if x is not child):
                yield full, child
            continue
        if _chooses(child):
            continue
        inner = isinstance(child, GradientCheckpointingLayer)
        if not inner and (_has_state(child, family) or any(_has_state(x, family) for x in child.children())):
            yield full, child
        else:
            yield from _states(full, child, family)


def _family(config: Any) -> str:
    return re.sub(r"(Text)?Config$", "", type(config).__name__)


def _has_state(module: nn.Module, family: str) -> bool:
    name = base_class(module).__name__.removeprefix(family)
    return not name.endswith(_WITHOUT_STATE) and _STATE.search(name) is not None


def _chooses(module: nn.Module) -> bool:
    name = base_class(module).__name__
    return not name.endswith(_WITHOUT_STATE) and _CHOICE.search(name) is not None
