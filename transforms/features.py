"""Features of a decoder stack that rule sharing out, told before its forward is followed: refusals name them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from augtree_fx.transforms.classes import base_class
from augtree_fx.transforms.mixers import attends, mixers_of
from augtree_fx.transforms.skeleton import named_layers

_RECURRENT = re.compile(r"Mixer$|LSTMLayer$|Rwkv")
# Attributes of attention modules that only such attention has.
_ATTENTION = {
    "rel_attn_core": "its attention has two streams, with scores of relative positions",
    "ngram": "its attention predicts in n-gram streams",
    "num_hashes": "its attention sorts keys into buckets by their hashes (LSH), which all tokens of a row decide",
}


def ruled_out(stack: nn.Module) -> tuple[str, str, str] | None:
    """Name and class of the first module with such a feature, and what it is; ``None`` if no feature is known."""
    return next(_found(stack), None)


def _found(stack: nn.Module) -> Iterator[tuple[str, str, str]]:
    layers, config = named_layers(stack), stack.config
    own: Any = inspect.unwrap(base_class(stack).forward)
    names = [*own.__code__.co_names, *dir(base_class(stack))]
    if any("alibi" in name for name in names) and getattr(config, "alibi", True):
        first, layer = layers[0]
        yield first, base_class(layer).__name__, "its attention has ALiBi biases, which are made for whole rows"
    if hasattr(stack, "num_codebooks"):
        yield "stack", base_class(stack).__name__, "its input_ids are codebooks, several rows of ids for each sequence"
    bias = getattr(stack, "position_bias", None)
    if isinstance(bias, nn.Module):
        said = "it makes a bias of attention from the segments of all pairs of tokens"
        yield "position_bias", base_class(bias).__name__, said
    for layer_name, layer in layers:
        for name, module in layer.named_modules():
            said = next((text for attribute, text in _ATTENTION.items() if hasattr(module, attribute)), "")
            if said:
                yield f"{layer_name}.{name}".rstrip("."), base_class(module).__name__, said
    if not any(attends(module, stack.config) for _, layer in layers for module in layer.modules()):
        yield from _recurrent(layers, config)


def _recurrent(layers: list[tuple[str, nn.Module]], config: Any) -> Iterator[tuple[str, str, str]]:
    for layer_name, layer in layers:
        named = [(name, x) for name, x in layer.named_children() if _RECURRENT.search(base_class(x).__name__)]
        for name, module in mixers_of(layer, config) or named:
            said = f"{name} ({base_class(module).__name__}) has a recurrent state, and no layer has attention"
            yield layer_name, base_class(layer).__name__, said
