"""The meta-device skeleton of a decoder stack: what each attention module is called with, and under which mask.

The stack's own forward runs on shapes alone, up to each layer's attention; its mask builders are stand-ins, so that
every mask that arrives is known by its kind.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from augtree_fx.transforms.carrier import ContextMask, by_layer_type
from augtree_fx.transforms.classes import base_class, is_attention
from augtree_fx.transforms.mixers import mixers_of, rewritable
from augtree_fx.transforms.row_masks import RECURRENT, BuiltMask, masks_among
from augtree_fx.transforms.tracer import CaptureError, is_norm, with_globals

CONTEXT = "augtree_context"  # keyword that carries the tree from the stack to its attention modules
# Suffix of a mask's kind when its builder is not given position ids: packed sequences in a row are then not separated.
UNSEEN = ", positions unseen"
# What brings the context to a module: a keyword, a mask, or masks by layer type, of which none is built.
KEYWORD, MASK, MAPPING = "keyword", "mask", "masks by layer type"
_CHECKPOINTED = "_checkpoint_wrapped_module."  # torch's checkpoint_wrapper puts it into the names of modules


def plain_name(name: str) -> str:
    """Name of a module as its skeleton has it."""
    return name.replace(_CHECKPOINTED, "")


def _holds_attention(module: nn.Module) -> bool:
    return any(is_attention(child) for child in module.modules())


def decoder_layers(stack: nn.Module) -> tuple[str, nn.ModuleList]:
    """The stack's list of decoder layers, with its name."""
    for name, child in stack.named_children():
        if isinstance(child, nn.ModuleList) and len(child):
            return name, child
    inner = _inner_layers(stack)
    if inner is not None:
        return inner
    raise ValueError(f"{type(stack).__name__} has no list of decoder layers; augtree-fx rewrites decoder stacks")


def named_layers(stack: nn.Module) -> list[tuple[str, nn.Module]]:
    """Decoder layers of a stack with their names: of its own list, or of the lists of several inner stacks.

    Raises:
        ValueError: there are none.
    """
    inner = [(name, child) for name, child in stack.named_children() if _has_attention_layers(child)]
    if any(isinstance(child, nn.ModuleList) and len(child) for child in stack.children()) or len(inner) < 2:
        list_name, layers = decoder_layers(stack)
        return [(f"{list_name}.{index}", layer) for index, layer in enumerate(layers)]
    return [(f"{name}.{layer_name}", layer) for name, child in inner for layer_name, layer in named_layers(child)]


def _has_attention_layers(module: nn.Module) -> bool:
    return any(isinstance(child, nn.ModuleList) and _holds_attention(child) for child in module.children())


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
    """What an attention module of the skeleton was called with.

    Attributes:
        module: of the skeleton.
        arguments: by name, without mask and context.
        mask_kind: kind of the mask.
        tokens: of the example.
        carrier: what brings the context to it, ``KEYWORD``, ``MASK`` or ``MAPPING``, or ``None``.
        again: further calls in the same forward, of inner stacks that run several times.
        masks: arguments that hold masks, with how those are made (`masks_among`).
    """

    module: nn.Module
    arguments: dict[str, Any]
    mask_kind: str
    tokens: int = 0
    carrier: str | None = None
    again: list[SkeletonCall] = field(default_factory=list)
    masks: dict[str, Any] = field(default_factory=dict)


_RETURNED = ("BUILD_TUPLE", "RETURN_VALUE")


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


def record_calls(stack: nn.Module, tokens: int, axes: int = 0) -> dict[str, SkeletonCall]:
    """Run the skeleton's own forward up to each layer's attention; note arguments and kind of mask.

    Args:
        stack: the live module.
        tokens: of the example.
        axes: how many rows of position ids the example has, as in M-RoPE; 0 for plain ones.
    """
    try:
        calls = _recorded(stack, tokens, axes, tuples=False)
    except CaptureError as error:
        try:
            return _recorded(stack, tokens, axes, tuples=True)
        except CaptureError:
            raise error from None
    if all(_of_tokens(call) for call in calls.values()):
        return calls
    return _recorded(stack, tokens, axes, tuples=True)


def _of_tokens(call: SkeletonCall) -> bool:
    """Whether the first tensor that a module is given is of tokens, as hidden states are."""
    leaves = torch.utils._pytree.tree_leaves([call.arguments.get("hidden_states"), call.arguments])
    return next((tuple(x.shape[:2]) == (1, call.tokens) for x in leaves if isinstance(x, Tensor)), True)


def _recorded(stack: nn.Module, tokens: int, axes: int, *, tuples: bool) -> dict[str, SkeletonCall]:
    """See `record_calls`; layers whose code does not say so return a tensor, or ``tuples`` of one."""
    skeleton = built_skeleton(stack)
    masks: dict[int, BuiltMask] = {}
    calls: dict[str, SkeletonCall] = {}
    _record_in(skeleton, masks, calls, tuples)
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    forward = stack_function(stack, skeleton, masks)
    marker = object()
    takes = "position_ids" in inspect.signature(forward).parameters
    positions = {"position_ids": ids.expand(axes, 1, tokens) if axes else ids} if takes else {}
    try:
        forward(skeleton, input_ids=ids, use_cache=False, **positions, **{CONTEXT: marker})
        reached = {name: call.arguments.pop(CONTEXT, None) is marker for name, call in calls.items()}
        unreached = {name for name, arrived in reached.items() if not arrived}
        carrier, by_mask = _reached_otherwise(stack, ids, unreached, tuples) if unreached else (MASK, set())
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
        masks_itself = "finfo" in inspect.unwrap(base_class(stack).forward).__code__.co_names
        what = "makes masks of attention itself, and " if masks_itself else ""
        raise CaptureError(f"its forward {what}cannot be followed to the attention modules: {error}") from error
    for name, call in calls.items():
        call.tokens = tokens
        call.carrier = KEYWORD if reached[name] else carrier if name in by_mask else None
        if any(other.arguments.pop(CONTEXT, None) is not marker for other in call.again) and call.carrier == KEYWORD:
            call.carrier = None
    return calls


def _record_in(skeleton: nn.Module, masks: dict[int, BuiltMask], calls: dict[str, SkeletonCall], tuples: bool) -> None:
    """Prepare a skeleton so that its forward notes the call of every attention module, and computes little else."""
    for layer_name, layer in named_layers(skeleton):
        mixers = mixers_of(layer, skeleton.config)
        sites = [*mixers, *rewritable(layer, skeleton.config)]
        for name, module in sites:
            runs = not any(module is mixer for _, mixer in mixers)
            record = _recorder(f"{layer_name}.{name}", module, masks, calls, last=len(sites) == 1, runs=runs)
            module.forward = record  # type: ignore[assignment]
        if len(sites) != 1:
            _pass_what_fails(layer)
        layer.forward = _until_site(layer, tuples)  # type: ignore[assignment]
    for module in skeleton.modules():
        learned = any(True for _ in module.parameters())  # without weights some return the scale alone
        if is_norm(module) and learned and not _holds_attention(module):
            module.forward = _same_shape  # type: ignore[assignment]
        if "RotaryEmbedding" in type(module).__name__:  # its decorator reads the longest position, which meta has not
            module.forward = types.MethodType(inspect.unwrap(type(module).forward), module)  # type: ignore[method-assign]


def _reached_otherwise(stack: nn.Module, ids: Tensor, wanted: set[str], tuples: bool) -> tuple[str, set[str]]:
    """What else brings the context to modules, and which it reaches; masks by layer type only where one mask fails."""
    by_mask = _reached_by_mask(stack, ids, MASK, tuples)
    if wanted <= by_mask or not any(mixers_of(layer, stack.config) for _, layer in named_layers(stack)):
        return MASK, by_mask
    by_type = _reached_by_mask(stack, ids, MAPPING, tuples)
    return (MAPPING, by_type) if len(wanted & by_type) > len(wanted & by_mask) else (MASK, by_mask)


def _reached_by_mask(stack: nn.Module, ids: Tensor, carrier: str, tuples: bool) -> set[str]:
    """Modules that a `ContextMask` given to the stack reaches, itself, past the real mask builders."""
    skeleton = built_skeleton(stack)
    probe = ContextMask(None)
    masks, calls = {id(probe): BuiltMask("probe")}, dict[str, SkeletonCall]()
    _record_in(skeleton, masks, calls, tuples)
    forward = inspect.unwrap(base_class(stack).forward)
    positions = {"position_ids": ids} if "position_ids" in inspect.signature(forward).parameters else {}
    mask = probe if carrier == MASK else by_layer_type(probe, stack.config)
    forward(skeleton, input_ids=ids, use_cache=False, attention_mask=mask, **positions)
    return {name for name, call in calls.items() if all(_holds_probe(x) for x in (call, *call.again))}


def _holds_probe(call: SkeletonCall) -> bool:
    kinds = (leaf for tree in call.masks.values() for leaf in torch.utils._pytree.tree_leaves(tree))
    return any(isinstance(leaf, BuiltMask) and leaf.kind == "probe" for leaf in kinds)


def separates_axes(stack: nn.Module, axes: int) -> bool | str:
    """Whether masks separate packed rows by position ids of so many axes; or why the stack cannot take such.

    The graphs were captured with plain positions: what attention modules are called with must have the same shapes.
    """
    tokens = 6
    try:
        plain, several = record_calls(stack, tokens), record_calls(stack, tokens, axes)
    except CaptureError as error:
        return str(error)
    for name, call in several.items():
        if name not in plain or call.mask_kind.removesuffix(UNSEEN) != plain[name].mask_kind.removesuffix(UNSEEN):
            return f"{name} is given another mask"
        before, now = plain[name].arguments.get("position_ids"), call.arguments.get("position_ids")
        differ = isinstance(before, Tensor) and isinstance(now, Tensor) and before.shape != now.shape
        if differ or _shapes_beside_positions(call) != _shapes_beside_positions(plain[name]):
            return f"{name} is called with other shapes than for plain positions"
    return all(not call.mask_kind.endswith(UNSEEN) for call in several.values())


def _shapes_beside_positions(call: SkeletonCall) -> list[tuple[str, tuple[int, ...]]]:
    """Shapes of the tensors that an attention module is given, position ids aside: those may come or not."""
    given = sorted((name, value) for name, value in call.arguments.items() if name != "position_ids")
    return [
        (name, tuple(leaf.shape))
        for name, value in given
        for leaf in torch.utils._pytree.tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]


def _same_shape(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


def _recorder(
    name: str,
    module: nn.Module,
    masks: dict[int, BuiltMask],
    calls: dict[str, SkeletonCall],
    *,
    last: bool,
    runs: bool,
) -> Any:
    """Forward that notes its call and, unless this is the ``last`` site of its layer, goes on.

    With the module's own code if it ``runs``, else with hidden states of the right shape.
    """
    original = inspect.unwrap(base_class(module).forward)
    parameters = list(inspect.signature(original).parameters)[1:]
    stand_ins = {"eager_attention_forward": _no_attention, "ALL_ATTENTION_FUNCTIONS": _NoAttention()}
    unmasked = with_globals(original, stand_ins)  # type: ignore[arg-type]

    def record(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(parameters, args, strict=False)) | kwargs
        held = dict(masks_among(arguments, masks))
        mask = arguments.pop("attention_mask", None)
        kind = "none" if mask is None else masks.get(id(mask), BuiltMask("changed")).kind
        if name in calls and not last:
            raise CaptureError(f"{name} is called twice by its layer")
        call = SkeletonCall(module, arguments, kind, masks=held)
        if name in calls:
            calls[name].again.append(call)
        else:
            calls[name] = call
        if last:
            raise _SiteReached
        if runs:
            return unmasked(module, *args, **kwargs)
        hidden_states = next(value for value in arguments.values() if isinstance(value, Tensor))
        return _as_returned(module, hidden_states)  # on the meta device a state would take seconds

    return record


def _no_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Attention by its shapes."""
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


class _NoAttention:
    """Answers every look-up of an attention function."""

    def get_interface(self, *_: Any) -> Any:
        return _no_attention

    def __getitem__(self, _: str) -> Any:
        return _no_attention


def _pass_what_fails(layer: nn.Module) -> None:
    """Children of a layer which the meta device cannot run, such as routed experts, return their input."""

    def tolerant(forward: Any) -> Any:
        def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            try:
                return forward(hidden_states, *args, **kwargs)
            except (RuntimeError, NotImplementedError):
                return hidden_states

        return run

    for child in layer.children():
        if not _holds_attention(child) and not isinstance(child, nn.ModuleList):
            child.forward = tolerant(child.forward)


def _until_site(layer: nn.Module, tuples: bool) -> Any:
    forward = layer.forward

    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            forward(hidden_states, *args, **kwargs)
        except _SiteReached:
            pass
        returned = _as_returned(layer, hidden_states)
        return (returned,) if tuples and isinstance(returned, Tensor) else returned

    return run


def _as_returned(module: nn.Module, hidden_states: Tensor) -> Any:
    """Hidden states as a module returns them: first of a tuple, if its forward writes one out."""
    size = _tuple_size(inspect.unwrap(base_class(module).forward))
    return (hidden_states, *[None] * (size - 1)) if size else hidden_states


@functools.cache
def _tuple_size(forward: Callable[..., Any]) -> int:
    """How many values a forward returns in a tuple; 0 if it writes none out."""
    steps = list(dis.get_instructions(forward))
    sizes = {a.argval for a, b in zip(steps, steps[1:], strict=False) if (a.opname, b.opname) == _RETURNED}
    return sizes.pop() if len(sizes) == 1 else 0


def stack_function(stack: nn.Module, skeleton: nn.Module, masks: dict[int, BuiltMask]) -> types.FunctionType:
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


def _mask_builders(skeleton: nn.Module, masks: dict[int, BuiltMask]) -> dict[str, Any]:
    """Stand-ins for transformers' mask builders; ``masks`` learns which tensor is which kind of mask."""
    kept: list[Tensor] = []

    def builder(function: str, kind: str) -> Any:
        def build(*_: Any, **kwargs: Any) -> Tensor:
            mask = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device="meta")
            extras = [
                name
                for name in ("or_mask_function", "and_mask_function", "block_sequence_ids")
                if kwargs.get(name) is not None
            ]
            kept.append(mask)
            unseen = "" if kwargs.get("position_ids") is not None else UNSEEN
            seen = f"custom ({', '.join(extras)})" if extras else kind + unseen
            masks[id(mask)] = BuiltMask(seen, function, kwargs.get("allow_is_causal_skip") is not False)
            return mask

        return build

    window = getattr(skeleton.config, "sliding_window", None)
    chunk = getattr(skeleton.config, "attention_chunk_size", None)
    kinds = {
        "create_causal_mask": "full",
        "create_sliding_window_causal_mask": f"window {window}",
        "create_chunked_causal_mask": f"chunks of {chunk}",
        "create_bidirectional_mask": "bidirectional",
        "create_recurrent_attention_mask": RECURRENT,
    }
    return {function: builder(function, kind) for function, kind in kinds.items()}
