"""The meta-device skeleton of a decoder stack: what each attention module is called with, and under which mask.

The stack's own forward runs on shapes alone, up to each layer's attention; its mask builders are stand-ins, so that
every mask that arrives is known by its kind.
"""

from __future__ import annotations

import copy
import inspect
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from augtree_fx.transforms.tracer import CaptureError, is_norm, with_globals

CONTEXT = "augtree_context"  # keyword that carries the tree from the stack to its attention modules
# Suffix of a mask's kind when its builder is not given position ids: packed sequences in a row are then not separated.
UNSEEN = ", positions unseen"


def base_class(module: nn.Module) -> type[nn.Module]:
    """The module's class below those that swap classes: FSDP2 (``torch.distributed``) and `install` subclass it."""

    def wraps(cls: type) -> bool:
        wrappers = (cls, *cls.__bases__)
        return "_augtree_base" in cls.__dict__ or any(x.__module__.startswith("torch.distributed") for x in wrappers)

    return next(cls for cls in type(module).__mro__ if not wraps(cls))


def bound_forwards(module: nn.Module) -> list[str]:
    """Attributes of an instance that hold its class's forward, bound: accelerate's device hooks keep it in one."""
    held = ((name, vars(module).get(name)) for name in ("_old_forward", "forward"))
    return [name for name, value in held if getattr(value, "__func__", None) is type(module).forward]


def hides_forward(module: nn.Module) -> bool:
    """Whether an instance has a forward of its own which is not known to call that of its class."""
    return "forward" in vars(module) and not bound_forwards(module)


def is_attention(module: nn.Module) -> bool:
    """Whether a module calls the attention interface of transformers."""
    code = getattr(inspect.unwrap(base_class(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def decoder_layers(stack: nn.Module) -> tuple[str, nn.ModuleList]:
    """The stack's list of decoder layers, with its name."""
    for name, child in stack.named_children():
        if isinstance(child, nn.ModuleList) and len(child):
            return name, child
    inner = _inner_layers(stack)
    if inner is not None:
        return inner
    raise ValueError(f"{type(stack).__name__} has no list of decoder layers; augtree-fx rewrites decoder stacks")


def _inner_layers(stack: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The list of layers of a stack that keeps it in a child (`encoder.layer`): the only one as near to the stack."""
    found = [
        (name, child)
        for name, child in stack.named_modules()
        if isinstance(child, nn.ModuleList) and any("Attention" in type(x).__name__ for x in child.modules())
    ]
    nearest = min((name.count(".") for name, _ in found), default=0)
    near = [(name, child) for name, child in found if name.count(".") == nearest]
    return near[0] if len(near) == 1 else None


@dataclass
class SkeletonCall:
    """What an attention module of the skeleton was called with."""

    module: nn.Module
    arguments: dict[str, Any]
    mask_kind: str


class _SiteReached(Exception):
    pass


def built_skeleton(stack: nn.Module) -> nn.Module:
    """The stack's class on the meta device: shapes without weights."""
    config = copy.deepcopy(stack.config)
    try:
        with torch.device("meta"):
            return base_class(stack)(config)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CaptureError(f"its class cannot be built from its config: {error}") from error


def record_calls(stack: nn.Module, tokens: int) -> dict[str, SkeletonCall]:
    """Run the skeleton's own forward up to each layer's attention; note arguments and kind of mask."""
    skeleton = built_skeleton(stack)
    masks: dict[int, str] = {}
    calls: dict[str, SkeletonCall] = {}
    list_name, layers = decoder_layers(skeleton)
    for index, layer in enumerate(layers):
        sites = {f"{list_name}.{index}.{name}": x for name, x in layer.named_modules() if is_attention(x)}
        for name, module in sites.items():
            module.forward = _recorder(name, module, masks, calls)  # type: ignore[assignment]
            if len(sites) > 1:  # which of them are called: cross-attention is not, without states of an encoder
                module.forward = _passing(module.forward)  # type: ignore[assignment]
        layer.forward = _until_site(layer) if len(sites) < 2 else _past_sites(layer, sites, calls)  # type: ignore[assignment]
    for module in skeleton.modules():
        if is_norm(module) and not any(map(is_attention, module.modules())):  # some are named after all they hold
            module.forward = _same_shape  # type: ignore[assignment]
        if "RotaryEmbedding" in type(module).__name__:  # its decorator reads the longest position, which meta has not
            module.forward = types.MethodType(inspect.unwrap(type(module).forward), module)  # type: ignore[method-assign]
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    forward = stack_function(stack, skeleton, masks)
    marker = object()
    takes = "position_ids" in inspect.signature(forward).parameters
    positions = {"position_ids": ids} if takes else {}
    try:
        forward(skeleton, input_ids=ids, use_cache=False, **positions, **{CONTEXT: marker})
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        raise CaptureError(f"its forward cannot be followed to the attention modules: {error}") from error
    for call in calls.values():
        if call.arguments.pop(CONTEXT, None) is not marker:
            call.mask_kind = "lost"
    return calls


def _same_shape(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


def _recorder(name: str, module: nn.Module, masks: dict[int, str], calls: dict[str, SkeletonCall]) -> Any:
    parameters = list(inspect.signature(inspect.unwrap(base_class(module).forward)).parameters)[1:]

    def record(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(parameters, args, strict=False)) | kwargs
        mask = arguments.pop("attention_mask", None)
        kind = "none" if mask is None else masks.get(id(mask), "changed")
        calls[name] = SkeletonCall(module, arguments, kind)
        raise _SiteReached

    return record


def _until_site(layer: nn.Module) -> Any:
    forward = layer.forward

    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        try:
            forward(hidden_states, *args, **kwargs)
        except _SiteReached:
            pass
        return hidden_states

    return run


def _passing(record: Any) -> Any:
    """A recorder that returns what goes on through the layer: hidden states, and no weights."""

    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        try:
            record(hidden_states, *args, **kwargs)
        except _SiteReached:
            pass
        return hidden_states, None

    return run


def _past_sites(layer: nn.Module, sites: dict[str, nn.Module], calls: dict[str, SkeletonCall]) -> Any:
    """Run a layer of several attention modules to its end; where that fails, all of them count as called."""
    forward = layer.forward

    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        try:
            forward(hidden_states, *args, **kwargs)
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError):
            for name, module in sites.items():
                calls.setdefault(name, SkeletonCall(module, {}, "lost"))
        return hidden_states

    return run


def stack_function(stack: nn.Module, skeleton: nn.Module, masks: dict[int, str]) -> types.FunctionType:
    """The stack's forward, for its skeleton; stand-ins for mask builders, also in methods that it calls."""
    builders = _mask_builders(skeleton, masks)
    forward = inspect.unwrap(base_class(stack).forward)
    for name in forward.__code__.co_names:
        method = inspect.getattr_static(base_class(stack), name, None)
        if inspect.isfunction(method) and builders.keys() & {*inspect.unwrap(method).__code__.co_names}:
            bound = types.MethodType(with_globals(inspect.unwrap(method), builders), skeleton)
            setattr(skeleton, name, bound)
    skeleton.warn_if_padding_and_no_attention_mask = _nothing  # type: ignore[assignment]  # it reads token ids
    return with_globals(forward, builders)


def _nothing(*_: Any) -> None:
    pass


def _mask_builders(skeleton: nn.Module, masks: dict[int, str]) -> dict[str, Any]:
    """Stand-ins for transformers' mask builders; ``masks`` learns which tensor is which kind of mask."""
    kept: list[Tensor] = []

    def builder(kind: str) -> Any:
        def build(*_: Any, **kwargs: Any) -> Tensor:
            mask = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device="meta")
            extras = [
                name
                for name in ("or_mask_function", "and_mask_function", "block_sequence_ids")
                if kwargs.get(name) is not None
            ]
            kept.append(mask)
            unseen = "" if kwargs.get("position_ids") is not None else UNSEEN
            masks[id(mask)] = f"custom ({', '.join(extras)})" if extras else kind + unseen
            return mask

        return build

    window = getattr(skeleton.config, "sliding_window", None)
    return {
        "create_causal_mask": builder("full"),
        "create_sliding_window_causal_mask": builder(f"window {window}"),
        "create_chunked_causal_mask": builder("chunked"),
        "create_bidirectional_mask": builder("bidirectional"),
        "create_recurrent_attention_mask": builder("recurrent"),
    }
