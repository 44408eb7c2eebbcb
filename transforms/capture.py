"""Capture: trace every attention module of a decoder stack, alone, on a meta-device skeleton of its class.

The live module is never traced, so sharded, adapted or quantised weights do not matter. The skeleton of the whole
stack says what each attention module is called with and which mask its layer was given.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from augtree_fx.tables import Chunks, Span
from augtree_fx.transforms.classes import base_class, hides_forward
from augtree_fx.transforms.compat import CACHE_NAMES
from augtree_fx.transforms.features import ruled_out
from augtree_fx.transforms.latents import Cut, find_cut
from augtree_fx.transforms.mixers import attends, mixers_of, mixes_nothing, rewritable, unknown_mixer
from augtree_fx.transforms.positions import position_rule
from augtree_fx.transforms.recurrent import mixer_sites
from augtree_fx.transforms.rewrite import token_columns
from augtree_fx.transforms.skeleton import (
    CONTEXT,
    KEYWORD,
    UNSEEN,
    SkeletonCall,
    named_layers,
    plain_name,
    record_calls,
)
from augtree_fx.transforms.tracer import AttentionTracer, CaptureError, attention_leaf, traceable

_EXAMPLE_TOKENS = (6, 10)


@dataclass(frozen=True)
class Refusal:
    """Why an attention site, or the model, is not rewritten."""

    name: str
    class_name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.class_name}): {self.reason}"


@dataclass(frozen=True)
class AttentionSite:
    """One captured attention module.

    Attributes:
        name: module name inside the stack.
        class_name: its class.
        graph: captured graph of its forward, with an `attention_leaf` for each attention call.
        arguments: names of the forward's arguments that the graph takes, context first.
        scale: factor of the logits.
        window: keys that a query sees, itself included, or ``None``.
        softcap: soft-cap of the logits, or 0.
        sinks: whether a learned sink joins the softmax.
        dropout: attention dropout in training.
        separates: whether the layer's mask separates packed sequences by their positions.
        carrier: what brings the tree's context to it, ``"keyword"`` or ``"mask"``.
        chunk: tokens after which its mask cuts a row, or ``None``; a query sees keys of its own chunk.
        counts: whether its forward uses the columns of tokens, by counting them.
        cut: smaller tensors that its keys and values follow from, which ranks send one another instead.
        noise: rate of dropout other than that of attention in its forward, in training.
        scalars: plain attributes of the module when it was captured; a change means capturing anew.
    """

    name: str
    class_name: str
    graph: fx.Graph = field(repr=False)
    arguments: tuple[str, ...]
    scale: float
    window: int | None
    softcap: float
    sinks: bool
    dropout: float
    separates: bool
    scalars: tuple[tuple[str, Any], ...] = field(repr=False)
    carrier: str = KEYWORD
    noise: float = 0.0
    chunk: int | None = None
    counts: bool = False
    cut: Cut | None = field(default=None, repr=False)

    @property
    def span(self) -> Span:
        """Which keys a query sees, as tables are built by."""
        return self.window if self.chunk is None else Chunks(self.chunk)


def plain_scalars(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Attributes that a forward may branch on; the layer's number and its mode are not part of them."""
    kinds = (int, float, str, bool, type(None))
    return tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, kinds) and name not in ("layer_idx", "training") and not name.startswith("_")
    )


def config_scalars(config: Any) -> tuple[tuple[str, Any], ...]:
    """Plain values of a config that attention forwards read when they run."""
    names = ("sliding_window", "attention_chunk_size", "attention_dropout", "attn_logit_softcapping", "rope_interleave")
    return tuple((name, getattr(config, name, None)) for name in names)


def capture_stack(stack: nn.Module) -> tuple[list[AttentionSite], list[Refusal]]:
    """Capture every attention module of a decoder stack; those with a recurrent state are `recurrent.mixer_sites`.

    Returns:
        The sites and the refusals. The stack can be transformed only if there is no refusal.
    """
    layers = named_layers(stack)
    sites: list[AttentionSite] = []
    feature = ruled_out(stack)
    if feature is not None:
        return sites, [Refusal(*feature)]
    refusals = _refuse_stack(stack) or _unknown_mixers(stack, layers)
    if refusals:
        return sites, refusals
    try:
        calls = [record_calls(stack, tokens) for tokens in _EXAMPLE_TOKENS]
        for call in calls:
            mixer_sites(stack, call)
    except CaptureError as error:
        if any(attends(module, stack.config) for _, layer in layers for module in layer.modules()):
            return sites, [Refusal("stack", type(stack).__name__, str(error))]
        calls = []  # what each layer lacks says more
    cache: dict[Any, AttentionSite] = {}
    for layer_name, layer in layers:
        try:
            for name, module in _sites_of(layer_name, layer, calls, stack):
                inner = plain_name(name)
                recorded = [call[inner] for call in calls if inner in call]
                if len(recorded) != len(calls) and "cross" in name:
                    raise CaptureError(f"{name} is cross-attention, to states that are no tokens of the row")
                if len(recorded) != len(calls):
                    raise CaptureError(f"the layer does not call its attention module {name}")
                sites.append(_capture_site(name, module, recorded, cache))
        except CaptureError as error:
            refusals.append(Refusal(layer_name, type(layer).__name__, str(error)))
    own = [
        module for _, layer in layers for _, module in mixers_of(layer, stack.config) if attends(module, stack.config)
    ]
    if not sites and not refusals and not own:
        refusals.append(
            Refusal("stack", type(stack).__name__, "no layer has attention, so a tree has nothing to share")
        )
    return sites, refusals


def _refuse_stack(stack: nn.Module) -> list[Refusal]:
    config, name = stack.config, type(stack).__name__
    reasons = []
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("encoder-decoder models are not decoders of one stack")
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", False):
        reasons.append("its attention is bidirectional")
    if hides_forward(stack):
        reasons.append("an instance has a forward of its own, which hides that of its class")
    if getattr(stack, "pooler", None) is not None:
        reasons.append("its pooler reads one token of each row (pooler)")
    try:
        position_rule(stack)
    except CaptureError as error:
        reasons.append(str(error))
    return [Refusal("stack", name, reason) for reason in reasons]


def _unknown_mixers(stack: nn.Module, layers: list[tuple[str, nn.Module]]) -> list[Refusal]:
    """Layers that mix tokens in other ways, said before the skeleton's forward stumbles over them."""
    refusals = []
    for layer_name, layer in layers:
        found = unknown_mixer(layer, stack.config)
        if found is not None:
            reason = f"{found[0]} ({type(found[1]).__name__}) mixes tokens other than by attention"
            refusals.append(Refusal(layer_name, type(layer).__name__, reason))
    return refusals


def _sites_of(
    layer_name: str, layer: nn.Module, calls: list[dict[str, SkeletonCall]], stack: nn.Module
) -> list[tuple[str, nn.Module]]:
    found = [(f"{layer_name}.{name}", child) for name, child in rewritable(layer, stack.config)]
    takes = inspect.signature(inspect.unwrap(base_class(layer).forward)).parameters
    if len(found) > 1 and "encoder_hidden_states" in takes:  # cross-attention is not called where there are none
        called = [(name, x) for name, x in found if any(plain_name(name) in call for call in calls)]
        found = called or found
    others = [other for _, other in named_layers(stack)]
    if not found and not mixers_of(layer, stack.config) and not mixes_nothing(layer, others, stack.config):
        raise CaptureError("it has no attention module that calls transformers' attention interface")
    for name, child in found:
        if hides_forward(child):
            raise CaptureError(f"{name} has a forward of its own, which hides that of its class")
    return found


def _capture_site(
    name: str, module: nn.Module, calls: list[SkeletonCall], cache: dict[Any, AttentionSite]
) -> AttentionSite:
    scalars = plain_scalars(module) + config_scalars(module.config)
    carrier = calls[0].carrier
    if carrier is None or carrier != calls[-1].carrier:
        raise CaptureError("neither extra keywords nor a mask given to the model reach its attention module")
    if any(other.mask_kind != call.mask_kind for call in calls for other in call.again):
        raise CaptureError("it is called several times, under masks of different kinds")
    again = [_as_live(other, module) for call in calls for other in _others(call)]
    calls = [_as_live(call, module) for call in calls]
    key = (base_class(module), scalars, calls[0].mask_kind, _shapes([call.arguments for call in (calls[0], *again)]))
    if key not in cache:
        traced = [_trace(call, module, training) for call in (*calls, *again) for training in (True, False)]
        cache[key] = _agree(name, module, traced, calls[0].mask_kind, scalars)
    return replace(cache[key], name=name, carrier=carrier)


def _as_live(call: SkeletonCall, live: nn.Module) -> SkeletonCall:
    """The call with a skeleton of the live module's class, which may not be the one that the config builds."""
    cls = base_class(live)
    if cls is base_class(call.module):
        return call
    try:
        with torch.device("meta"):
            replacement = cls(copy.deepcopy(live.config), getattr(live, "layer_idx", None))
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CaptureError(f"it was replaced by {cls.__name__}, which cannot be built: {error}") from error
    return SkeletonCall(replacement, call.arguments, call.mask_kind)


def _others(call: SkeletonCall) -> list[SkeletonCall]:
    """Further calls of a module in one forward, those that are not like an earlier one."""
    by_shapes = {_shapes(other.arguments): other for other in (call, *call.again)}
    return list(by_shapes.values())[1:]


def _shapes(arguments: Any) -> str:
    leaves, _ = torch.utils._pytree.tree_flatten(arguments)
    return str([tuple(x.shape) if isinstance(x, Tensor) else x for x in leaves])


@dataclass
class _Trace:
    graph: fx.Graph
    code: str
    arguments: tuple[str, ...]
    leaf: dict[str, Any]
    head_dim: int
    noise: float
    counts: bool


def _trace(call: SkeletonCall, live: nn.Module, training: bool) -> _Trace:
    """Trace the skeleton's attention module with the live module's scalars."""
    skeleton = call.module
    vars(skeleton).pop("forward", None)
    for attribute, value in plain_scalars(live):
        setattr(skeleton, attribute, value)
    skeleton.train(training)
    parameters = inspect.signature(inspect.unwrap(base_class(skeleton).forward)).parameters
    given = {name: value for name, value in call.arguments.items() if name in parameters}
    examples = {name: x for name, x in given.items() if _has_tensor(x) or isinstance(x, MutableMapping)}
    fixed = {name: value for name, value in given.items() if name not in examples}
    fixed |= {name: None for name in ("attention_mask", *CACHE_NAMES) if name in parameters}
    missing = [
        name
        for name, parameter in list(parameters.items())[1:]
        if parameter.default is parameter.empty
        and name not in {**examples, **fixed}
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    if missing:
        raise CaptureError(f"its attention needs arguments that the layer does not give: {', '.join(missing)}")
    arguments = (CONTEXT, *examples)
    tracer = AttentionTracer({CONTEXT: None, **examples})
    body = traceable(tracer, base_class(skeleton).forward)
    root = _traced_root(skeleton, body, arguments, fixed)
    try:
        graph = tracer.trace(root)
        graph.lint()  # a node of another layer's trace: keys and values shared across layers
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        if "finfo" in str(error):
            raise CaptureError("it makes a mask of its own inside its attention module") from error
        raise CaptureError(f"its forward cannot be traced: {error}") from error
    leaf, head_dim = _common_call(tracer, [node for node in graph.nodes if node.target is attention_leaf])
    noise = _without_dropout(graph)
    counts = _counts_tokens(graph, skeleton)
    return _Trace(graph, graph.python_code("self").src, arguments, leaf, head_dim, noise, counts)


def _common_call(tracer: AttentionTracer, leaves: list[fx.Node]) -> tuple[dict[str, Any], int]:
    """Plain keywords and head size of the attention calls, which must be the same in all of them."""
    if not leaves:
        raise CaptureError("it does not call attention")
    sizes = {leaf.args[0].meta["example"].shape[-1] for leaf in leaves}  # type: ignore[union-attr]
    if len(sizes) > 1 or any(keywords != tracer.leaf_kwargs[0] for keywords in tracer.leaf_kwargs):
        raise CaptureError(f"it calls attention {len(leaves)} times, not always with the same keywords and head size")
    return tracer.leaf_kwargs[0], sizes.pop()


def _without_dropout(graph: fx.Graph) -> float:
    """Take functional dropout out of a graph; its largest rate in training, which the batch is refused for."""
    rates = [0.0]
    for node in list(graph.nodes):
        if node.target is nn.functional.dropout:
            given = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | node.kwargs
            rate, training = given.get("p", 0.5), given.get("training", True)
            if isinstance(rate, fx.Node) or isinstance(training, fx.Node):
                raise CaptureError("the rate of a dropout in its forward is computed")
            rates.append(float(rate) if training else 0.0)
            node.replace_all_uses_with(given["input"])
            graph.erase_node(node)
    return max(rates)


def _counts_tokens(graph: fx.Graph, skeleton: nn.Module) -> bool:
    """Put the columns of tokens where a graph counts its tokens, which are packed; whether it does."""
    context = next(iter(graph.nodes))
    tokens = next(node for node in graph.nodes if node.target is attention_leaf).args[0].meta["example"].shape[2]
    counting = [node for node in graph.nodes if _makes_positions(node, skeleton)]
    for node in counting:
        plain = node.target is torch.arange and len(node.args) == 1 and set(node.kwargs) <= {"device"}
        if not plain or tuple(node.meta["example"].shape) != (tokens,):
            raise CaptureError(f"its forward counts tokens in a way that is not understood ({node.name})")
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.call_function(token_columns, (context,)))
        graph.erase_node(node)
    return bool(counting)


def _makes_positions(node: fx.Node, skeleton: nn.Module) -> bool:
    """Whether a node numbers tokens by their place: packing changes that."""
    counters = ("arange", "cumsum")
    function: Any = node.target
    if node.op == "call_module":
        function = base_class(skeleton.get_submodule(str(node.target))).forward
    if node.op == "call_method" or getattr(torch, getattr(function, "__name__", ""), None) is function:
        return (node.target if node.op == "call_method" else function.__name__) in counters
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return code is not None and any(name in counters for name in code.co_names)


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in torch.utils._pytree.tree_flatten(value)[0])


def _traced_root(skeleton: nn.Module, body: Any, arguments: tuple[str, ...], fixed: dict[str, Any]) -> nn.Module:
    """The skeleton under a subclass whose forward takes exactly the arguments of the graph."""
    names = ", ".join(arguments)
    passed = ", ".join(f"{name}={name}" for name in arguments if name != CONTEXT)
    scope: dict[str, Any] = {"body": body, "fixed": fixed}
    exec(f"def forward(self, {names}):\n    return body(self, {passed}, **fixed)", scope)
    root = copy.copy(skeleton)
    root.__class__ = type(type(skeleton).__name__, (base_class(skeleton),), {"forward": scope["forward"]})
    return root


def _agree(
    name: str, module: nn.Module, traced: list[_Trace], mask_kind: str, scalars: tuple[tuple[str, Any], ...]
) -> AttentionSite:
    """One site out of its traces at two lengths, in training and evaluation, which must be the same graph."""
    first = traced[0]
    if any(other.code != first.code for other in traced[1:]):
        raise CaptureError("its forward depends on the number of tokens, or on training mode, beyond attention dropout")
    leaf = dict(first.leaf)
    dropout = float(leaf.pop("dropout", 0.0) or 0.0)
    scale = leaf.pop("scaling", None)
    window = leaf.pop("sliding_window", None)
    softcap = leaf.pop("softcap", None) or 0.0
    is_causal = leaf.pop("is_causal", None)
    if not leaf.get("output_attentions", True):
        del leaf["output_attentions"]
    leaf = {name: value for name, value in leaf.items() if value is not None}  # not used
    tensors = {name for node in first.graph.nodes if node.target is attention_leaf for name in node.kwargs}
    unknown = sorted(set(leaf) | (tensors - {"s_aux"}))
    if unknown:
        raise CaptureError(f"unknown keyword of the attention call: {', '.join(unknown)}")
    if mask_kind.removesuffix(UNSEEN) == "bidirectional":
        raise CaptureError("its attention is bidirectional")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise CaptureError("its attention is not causal (is_causal=False)")
    separates, mask_kind = not mask_kind.endswith(UNSEEN), mask_kind.removesuffix(UNSEEN)
    size = mask_kind.removeprefix("chunks of ")
    chunk = int(size) if size.isdecimal() and window is None else None
    expected = {"full": None, f"window {window}": window, f"chunks of {chunk}": None}
    if mask_kind not in expected or expected[mask_kind] != window:
        said = "no window" if window is None else f"a window of {window}"
        raise CaptureError(f"the attention call says {said}, the layer's mask is of kind {mask_kind!r}")
    return AttentionSite(
        name=name,
        class_name=base_class(module).__name__,
        graph=first.graph,
        arguments=first.arguments,
        scale=float(scale) if scale is not None else first.head_dim**-0.5,
        window=window,
        softcap=float(softcap),
        sinks="s_aux" in tensors,
        dropout=dropout,
        separates=separates,
        scalars=scalars,
        noise=max(trace.noise for trace in traced),
        chunk=chunk,
        counts=first.counts,
        cut=_cut_of(traced),
    )


def _cut_of(traced: list[_Trace]) -> Cut | None:
    """Latents of a module with one attention call, by its traces at two lengths."""
    first, longer = traced[0].graph, traced[2].graph  # each length in training and in evaluation
    leaves = [node for node in first.nodes if node.target is attention_leaf]
    return find_cut(first, longer, leaves[0]) if len(leaves) == 1 else None
