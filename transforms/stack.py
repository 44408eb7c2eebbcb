"""The decoder stack's forward: detect the tree, pack the batch, run the ORIGINAL forward, show the result row by row.

What cannot be shared exactly raises, or runs the original forward and says so once, in the log and in `explain`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from augtree_fx.costs import CostModel, attention_heads
from augtree_fx.layout import TreeLayout
from augtree_fx.rows import HostRows
from augtree_fx.transforms.capture import AttentionSite
from augtree_fx.transforms.carrier import ContextMask, by_layer_type
from augtree_fx.transforms.compat import CACHE_NAMES
from augtree_fx.transforms.context import GivenHidden, HiddenStates, ReplayContext
from augtree_fx.transforms.embedded import TokenInputs, has_axes, is_embedded, other_tensors, read_inputs
from augtree_fx.transforms.in_waves import run_in_waves
from augtree_fx.transforms.layer_masks import OtherMask, check_recurrent, padding_of
from augtree_fx.transforms.live import changed_sites, refuse_noise
from augtree_fx.transforms.mixers import mixers_of
from augtree_fx.transforms.path_rows import columns, columns_agree, padding_before, path_rows
from augtree_fx.transforms.positions import PositionRule, call_packed
from augtree_fx.transforms.provenance import UnknownOrigin
from augtree_fx.transforms.recurrent import MixerSite
from augtree_fx.transforms.skeleton import CONTEXT, MAPPING, MASK, named_layers, separates_axes
from augtree_fx.trie import IntArray
from augtree_fx.waves import Stage, part_of, plan_waves, token_index

logger = logging.getLogger("augtree_fx")

# Keywords that the packed call replaces, or that say nothing about tokens.
_REPLACED = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache", *CACHE_NAMES)
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass
class StackState:
    """Settings and memory of one transformed stack.

    Attributes:
        sites: captured attention modules.
        mixers: modules with a recurrent or convolution state, and attention in its own code, which run row by row.
        kernel: requested kernel.
        strict: raise on input that cannot be shared exactly, instead of running the original forward.
        costs: what a node must save; ``None`` estimates it from the model and device.
        fallbacks: how often the original forward ran, by reason.
        num_shared: how many batches were shared.
        axes: whether masks look at ``position_ids`` of so many axes, or why the stack cannot take them.
        positions: which positions tokens get by default, and how the stack takes others.
        in_waves: whether a batch is being computed in parts (`augtree_fx.prefill`).
        max_wave_tokens: packed tokens of branches that are alive at a time; ``None`` for all.
    """

    sites: tuple[AttentionSite, ...]
    kernel: str = "auto"
    strict: bool = True
    costs: CostModel | None = None
    fallbacks: dict[str, int] = field(default_factory=dict)
    num_shared: int = 0
    axes: dict[int, bool | str] = field(default_factory=dict)
    positions: PositionRule = PositionRule()
    in_waves: bool = False
    max_wave_tokens: int | None = None
    mixers: tuple[MixerSite, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Graphs hold functions that need not pickle; their generated source travels with the classes."""
        sites = tuple(replace(site, graph=torch.fx.Graph()) for site in self.sites)
        copied = {"sites": sites, "fallbacks": dict(self.fallbacks), "axes": dict(self.axes), "in_waves": False}
        return {**self.__dict__, **copied}


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

    def run(self, stack: nn.Module, state: StackState, original: Callable[..., Any]) -> tuple[Any, Tensor]:
        """Outputs of all parts as of one forward, and which of its tokens each slot shows."""

        def forward(nodes: IntArray, above: IntArray, prompts: Any, kept: Any) -> Any:
            part = part_of(self.layout, np.concatenate([above, nodes]))
            context = replace(make_context(part, state, len(above)), prompts=prompts, kept=kept)
            arguments = packed_arguments(stack, state, part, context, len(above))
            if self.tokens is not None:
                arguments = _embedded(arguments, self.tokens, part_of(self.layout, nodes))
            return call_packed(stack, state.positions, original, self.extras | arguments)

        outputs, nodes = run_in_waves(self.plan, forward)
        place = np.full(self.layout.num_tokens + 1, -1, dtype=np.int64)  # the last entry is for padding, -1
        place[token_index(self.layout, nodes)] = np.arange(self.layout.num_tokens)
        return outputs, torch.from_numpy(place[self.layout.packed_index]).to(self.layout.device)


@dataclass(frozen=True)
class PackedCall:
    """A batch as the stack gets it, packed, and how its outputs go back.

    Attributes:
        arguments: keywords of the stack's original forward, among them the context of the tree.
        index: ``[batch * sequence]`` packed token that each slot of the caller shows, -1 where it is padding.
        shape: the caller's ``(batch, sequence)``.
        num_tokens: packed tokens.
        parts: what its parts are called with, where they are to run one after another.
    """

    arguments: dict[str, Any]
    index: Tensor
    shape: tuple[int, int]
    num_tokens: int
    parts: Parts | None = None

    def show(self, outputs: Any) -> Any:
        """Outputs in the caller's shape, see `show_rows`."""
        return show_rows(outputs, self.index, self.shape, self.num_tokens)


class Unshared(Exception):
    """Run the original forward; the message is the reason that is logged once, empty when there is nothing to say."""


def find_stack(model: Any) -> nn.Module:
    """The decoder stack of a causal LM, a wrapper of one (PEFT, DDP, torch.compile), a text model, or the stack itself.

    Raises:
        TypeError: not a transformers model.
        NotImplementedError: an encoder-decoder model.
    """
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    if callable(getattr(model, "get_base_model", None)):
        model = model.get_base_model()
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise TypeError(f"expected a transformers model, got {type(model).__name__} without a config")
    if getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError(
            f"{type(model).__name__} is an encoder-decoder model; augtree-fx shares prompts in decoder-only models"
        )
    decoder = model.get_decoder() if callable(getattr(model, "get_decoder", None)) else None
    found = decoder if isinstance(decoder, nn.Module) else model
    return found if _has_layers(found) else _inner_stack(model) or found


def _has_layers(module: nn.Module) -> bool:
    return any(isinstance(child, nn.ModuleList) and len(child) for child in module.children())


def _inner_stack(model: nn.Module) -> nn.Module | None:
    """The one child that is a text model with decoder layers, if ``get_decoder`` gives something else (a head, say)."""
    embeddings = getattr(model, "get_input_embeddings", lambda: None)
    children = [child for child in model.children() if isinstance(child, PreTrainedModel) and _has_layers(child)]
    return children[0] if len(children) == 1 and children[0].get_input_embeddings() is embeddings() else None


def run_stack(stack: nn.Module, state: StackState, original: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Forward of a transformed stack.

    Args:
        stack: the module.
        state: its settings.
        original: the forward that it had, of its class.
        given: the caller's arguments by name.
    """
    context = given.get(CONTEXT)
    if context is not None and given.get("output_router_logits"):
        raise NotImplementedError(
            "an auxiliary loss of routers counts the tokens of rows, and an explicit layout or a wave has packed ones; "
            "set output_router_logits=False, or call the model with rows"
        )
    if isinstance(context, GivenHidden):
        return context.outputs(last_hidden_state=context.hidden)
    if isinstance(context, HiddenStates):
        outputs = call_packed(stack, state.positions, original, {**given, CONTEXT: context.shared})
        context.found.append(outputs.last_hidden_state)
        context.outputs.append(type(outputs))
        outputs.last_hidden_state = outputs.last_hidden_state[:, :1]
        return outputs
    if context is not None:  # an explicit layout: the caller packed the batch
        return call_packed(stack, state.positions, original, given)
    packed = pack(stack, state, given)
    if packed is None:
        return original(stack, **given)
    if packed.parts is not None:
        return _run_parts(stack, state, original, packed)
    return packed.show(call_packed(stack, state.positions, original, packed.arguments))


@torch.compiler.disable(recursive=False)
def _run_parts(stack: nn.Module, state: StackState, original: Callable[..., Any], packed: PackedCall) -> Any:
    assert packed.parts is not None
    outputs, index = packed.parts.run(stack, state, original)
    return show_rows(outputs, index, packed.shape, packed.num_tokens)


@torch.compiler.disable
def pack(stack: nn.Module, state: StackState, given: dict[str, Any]) -> PackedCall | None:
    """The packed call of a batch, or ``None`` for the original forward. The one break of a compiled model."""
    try:
        given, tokens = _token_inputs(state, stack, given)
        layout = decide(stack, state, given, tokens)
    except Unshared as reason:
        _note(state, str(reason))
        return None
    waves = state.max_wave_tokens is not None and _branch_tokens(layout) > state.max_wave_tokens
    if waves:
        try:
            refuse_waves(stack, state, layout)
        except NotImplementedError as error:
            if state.strict:
                raise
            _note(state, str(error))
            return None
    state.num_shared += 1
    extras = {name: value for name, value in given.items() if name not in (*_REPLACED, *_PACKING)}
    if waves:
        index = torch.from_numpy(layout.packed_index)
        parts = Parts(plan_waves(layout, state.max_wave_tokens), layout, tokens, extras)
        return PackedCall({}, index, layout.shape, layout.num_tokens, parts)
    call = pack_layout(stack, state, layout)
    arguments = call.arguments if tokens is None else _embedded(call.arguments, tokens, layout)
    return replace(call, arguments=extras | arguments)


def _branch_tokens(layout: TreeLayout) -> int:
    """Tokens of the nodes that go through waves: all but prompts."""
    return int(layout.length[layout.parent >= 0].sum())


def _embedded(arguments: dict[str, Any], tokens: TokenInputs, layout: TreeLayout) -> dict[str, Any]:
    return {"inputs_embeds": None, **arguments, "input_ids": None, **tokens.packed(layout)}


def _note(state: StackState, reason: str) -> None:
    if not reason:
        return
    if reason not in state.fallbacks:
        logger.warning("augtree-fx: the original forward runs: %s", reason)
    state.fallbacks[reason] = state.fallbacks.get(reason, 0) + 1


def _token_inputs(
    state: StackState, stack: nn.Module, given: dict[str, Any]
) -> tuple[dict[str, Any], TokenInputs | None]:
    """What the stack is given for each slot, where token ids do not say it all; the mask as ``[batch, sequence]``.

    Raises:
        Unshared: it is not known what an argument says about a token.
    """
    if not is_embedded(given) or _has_cache(given):
        return given, None
    try:
        embedding: Any = stack.get_input_embeddings
        mask = given.get("attention_mask")
        tokens = read_inputs(given, (*_REPLACED, *_PACKING), embedding())
        if tokens.shape[0] == 1 and mask is not None:
            raise Unshared("")
        if isinstance(mask, Mapping):
            own = next((mixer for mixer in state.mixers if mixer.attention), None)
            if own is not None:
                raise Unshared(f"{own.name} runs once a row, and masks were prepared for its layer")
            device = next(iter(tokens.by_slot.values())).device
            padding = padding_of(mask, state.sites, stack.config, tokens.shape, device)
            check_recurrent(mask, state.mixers, padding)
            given = {**given, "attention_mask": padding}
    except (UnknownOrigin, OtherMask) as error:
        raise Unshared(str(error)) from error
    if tokens.by_axis is not None:
        axes = len(tokens.by_axis)
        if axes not in state.axes:
            state.axes[axes] = separates_axes(stack, axes)
        if isinstance(state.axes[axes], str):
            raise Unshared(f"position_ids have {axes} axes: {state.axes[axes]}")
    return given, tokens


def _has_cache(given: Mapping[str, Any]) -> bool:
    return bool(given.get("use_cache")) or any(given.get(name) is not None for name in CACHE_NAMES)


def decide(
    stack: nn.Module, state: StackState, given: Mapping[str, Any], tokens: TokenInputs | None = None
) -> TreeLayout:
    """The layout to run a batch with.

    Args:
        stack: the module.
        state: its settings.
        given: the caller's arguments by name.
        tokens: what they say about each slot, where that is more than token ids.

    Raises:
        Unshared: the original forward is to run.
        ValueError, NotImplementedError: strict, and the batch cannot be shared exactly.
    """
    try:
        _decline(state, given, tokens)
        _refuse(stack, state, given)
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        if tokens is not None:
            if positions is None and state.positions != PositionRule():
                raise Unshared("this model counts positions by what it is given, and inputs_embeds come without them")
            separates = tokens.by_axis is None or state.axes[len(tokens.by_axis)] is True
            if mask is None and not separates and any(given.get(name) is not None for name in _PACKING):
                raise Unshared("rows are packed, and this model's masks do not look at position_ids of several axes")
            host = tokens.rows(mask, positions, separates)
        else:
            host = state.positions.rows(given["input_ids"], mask, positions)
    except (ValueError, NotImplementedError) as error:
        if state.strict:
            raise
        raise Unshared(str(error)) from error
    if len(host.length) == 1:
        raise Unshared("")
    layout = layout_of(stack, state, host)
    if not layout.shares:
        if state.mixers and TreeLayout.from_rows(host, costs=state.costs or estimated_costs(stack, host.device)).shares:
            raise Unshared(
                f"rows have different padding in front, which may reach the state of {state.mixers[0].name}; pad on "
                "the right, so that their prompt can be shared"
            )
        raise Unshared("")
    _check_rope(stack, layout)
    _check_columns(state, layout, given)
    if tokens is not None:
        if tokens.by_axis is not None and _rope_kinds(stack) & {"dynamic", "longrope"}:
            raise Unshared("RoPE is scaled by the longest position, and position_ids have several axes")
        if tokens.collides(layout):
            raise Unshared("two different tokens have one fingerprint")
    return layout


def _check_columns(state: StackState, layout: TreeLayout, given: Mapping[str, Any]) -> None:
    """Layers that go by columns: shared tokens must stand in one column, and chunks are those of padded rows."""
    packed = given.get("attention_mask") is None and given.get("position_ids") is not None
    unmasked = next((mixer for mixer in state.mixers if not mixer.masked), None)
    if unmasked is not None and padding_before(layout.row_begin, layout.shape).any():
        raise Unshared(f"padding in front of rows reaches the {unmasked.state} of {unmasked.name}; pad on the right")
    chunked = next((site for site in state.sites if site.chunk is not None), None)
    if packed and chunked is not None:
        raise Unshared(f"{chunked.name} attends in chunks of the packed row; pad the rows, with an attention_mask")
    counting = next((site for site in state.sites if site.counts), None)
    if counting is not None and not columns_agree(layout):
        raise Unshared(
            f"{counting.name} counts the columns of tokens, and equal tokens stand in different ones; pad on the right"
        )


def layout_of(stack: nn.Module, state: StackState, host: HostRows) -> TreeLayout:
    """The tree of a batch. Rows with different padding in front share nothing where it may reach a recurrent state."""
    apart = padding_before(host.begin, host.shape) if state.mixers else None
    return TreeLayout.from_rows(host, costs=state.costs or estimated_costs(stack, host.device), apart=apart)


def _decline(state: StackState, given: Mapping[str, Any], inputs: TokenInputs | None) -> None:
    """Calls that are not a forward of whole rows: generation, custom masks, tensors of unknown meaning."""
    caches = [given[name] for name in CACHE_NAMES if given.get(name) is not None]
    if caches and torch.is_grad_enabled() and caches[0].get_seq_length() > 0:
        tokens = given.get("input_ids", given.get("inputs_embeds"))
        if tokens is not None and tokens.shape[1] > 1:
            raise NotImplementedError(
                f"a forward with gradients got a KV cache of {caches[0].get_seq_length()} tokens and "
                f"{tokens.shape[1]} new tokens; pass whole rows without a cache (prefix "
                "tuning makes one), use torch.no_grad(), or transform with strict=False"
            )
    if caches or given.get("use_cache"):
        raise Unshared("")
    mask = given.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        raise Unshared("attention_mask is not a [batch, sequence] tensor")
    if given.get("position_ids") is not None and state.positions.table is not None:
        raise Unshared("this model takes no position_ids")
    positions_alone = mask is None and given.get("position_ids") is not None and not has_axes(given["position_ids"])
    restarting = mask is None and given.get("position_ids") is not None
    if state.mixers and (restarting or any(given.get(name) is not None for name in _PACKING)):
        raise Unshared(
            f"the {state.mixers[0].state} of {state.mixers[0].name} runs through packed rows: pass an attention_mask, "
            "or rows one by one"
        )
    if positions_alone and not all(site.separates for site in state.sites):
        raise Unshared("this model's masks do not look at position_ids: pass an attention_mask, or rows one by one")
    extra = other_tensors(given, (*_REPLACED, *_PACKING)) if inputs is None else []
    if extra:
        raise Unshared(f"extra tensors are passed to the decoder: {', '.join(extra)}")


def _refuse(stack: nn.Module, state: StackState, given: Mapping[str, Any]) -> None:
    """Requests that sharing cannot serve."""
    if given.get("output_attentions") or getattr(stack.config, "output_attentions", False):
        raise NotImplementedError(
            "output_attentions=True needs attention weights, which no tree kernel computes; set it to False"
        )
    capped = [site.name for site in state.sites if site.softcap]
    if capped and getattr(stack.config, "_attn_implementation", None) == "sdpa":
        raise NotImplementedError(
            f"the unmodified model leaves out the soft-cap of {capped[0]} under sdpa (transformers before 5.24); "
            "load it with attn_implementation='eager'"
        )
    embeddings: Any = stack.get_input_embeddings
    device = embeddings().weight.device
    ids = given.get("input_ids")
    if ids is not None and ids.device != device and device.type != "meta":
        raise ValueError(
            f"input_ids are on {ids.device}, the model's embedding is on {device}; move them with .to(model.device)"
        )
    if stack.training:
        refuse_noise(stack, state.sites, state.mixers)


def refuse_waves(stack: nn.Module, state: StackState, layout: TreeLayout) -> None:
    """Refuse to compute a batch in parts where that changes what is computed.

    Raises:
        NotImplementedError: a layer has a recurrent state, RoPE is scaled by the longest position of a forward, rows
            draw random numbers, or a layer counts columns and shared tokens stand in different ones.
        ValueError: the layout is on another device than the model.
    """
    if state.mixers:
        first = state.mixers[0]
        what = "runs once a row, in its own code" if first.attention else "has a recurrent state"
        raise NotImplementedError(f"{first.name} {what}, which waves are not handed; run the batch in one forward")
    kinds = _rope_kinds(stack) & {"dynamic", "longrope"}
    if kinds and int(layout.position_ids.max(initial=0)) + 1 > _rope_limit(stack, 0):
        raise NotImplementedError(
            f"RoPE of kind {', '.join(sorted(map(str, kinds)))} is scaled by the longest position of each forward, and "
            "prompts and branches would be scaled apart; run the batch in one forward"
        )
    _refuse_columns(state, layout)
    embeddings: Any = stack.get_input_embeddings
    device = embeddings().weight.device
    if layout.device != device and device.type != "meta":
        raise ValueError(f"the layout is on {layout.device}, the model's embedding is on {device}")
    if stack.training:
        refuse_noise(stack, state.sites, state.mixers)


def _rope_limit(stack: nn.Module, default: int) -> int:
    config: Any = stack.config
    parameters = getattr(config, "rope_parameters", None) or {}
    return getattr(config, "original_max_position_embeddings", None) or parameters.get(
        "original_max_position_embeddings", getattr(config, "max_position_embeddings", default)
    )


def _check_rope(stack: nn.Module, layout: TreeLayout) -> None:
    """Length-dependent RoPE looks at the largest position of the padded batch, which packing may take away."""
    kinds, limit = _rope_kinds(stack), _rope_limit(stack, layout.shape[1])
    padded, packed = layout.shape[1], int(layout.position_ids.max()) + 1
    if padded <= limit or padded == packed or layout.num_row_tokens == layout.shape[0] * layout.shape[1]:
        return
    if "dynamic" in kinds or ("longrope" in kinds and packed <= limit):
        raise Unshared(f"RoPE is scaled by the padded length, {padded}, the longest row has {packed}; drop the padding")


def _rope_kinds(stack: nn.Module) -> set[str | None]:
    config: Any = stack.config
    parameters = getattr(config, "rope_parameters", None) or {}
    return {parameters.get("rope_type")} | {x.get("rope_type") for x in parameters.values() if isinstance(x, dict)}


def estimated_costs(stack: nn.Module, device: torch.device) -> CostModel:
    """Cost model of this stack's layers on a device; routed experts count as far as a token passes through them."""
    layers = [layer for _, layer in named_layers(stack)]
    config: Any = stack.config
    experts = max(
        getattr(config, "num_local_experts", 0) or 0,
        getattr(config, "num_experts", 0) or 0,
        getattr(config, "n_routed_experts", 0) or 0,
    )
    active = (getattr(config, "num_experts_per_tok", None) or 1) / experts if experts else 1.0
    unshared = {id(x) for layer in layers for _, mixer in mixers_of(layer, config) for x in mixer.parameters()}
    params = sum(
        parameter.numel() * (active if "experts" in name and "shared" not in name else 1.0)
        for layer in layers
        for name, parameter in layer.named_parameters()
        if id(parameter) not in unshared
    )
    heads, head_dim = attention_heads(config)
    head_dim = getattr(config, "v_head_dim", None) or head_dim
    dtype = next(layers[0].parameters()).dtype
    return CostModel.of_layer(params / len(layers), heads * head_dim, device.type, dtype)


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
        _refuse_columns(state, layout)
        counted = torch.from_numpy(columns(layout)[layout.offset[first_node] :]).to(layout.device)
    full_width = any(mixer.full_width for mixer in state.mixers)
    rows = path_rows(layout, full_width=full_width) if state.mixers else None
    return ReplayContext(tables, layout.num_levels == 1, state.kernel, counted, rows)


def _refuse_columns(state: StackState, layout: TreeLayout) -> None:
    if any(site.counts for site in state.sites) and not columns_agree(layout):
        raise NotImplementedError("a layer counts the columns of tokens, and shared tokens stand in different ones")


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
    changed = changed_sites(stack, state.sites)
    if changed:
        raise RuntimeError(
            f"attention settings changed since transform at {', '.join(changed[:3])}; call augtree_fx.transform again"
        )
    device = layout.device
    input_ids, position_ids = (
        torch.from_numpy(x[layout.offset[first_node] :]).to(device, non_blocking=True)
        for x in (layout.input_ids, layout.position_ids)
    )
    return {
        "input_ids": input_ids[None],
        "attention_mask": _carrying_mask(stack, state, context, device),
        "position_ids": position_ids[None],
        "use_cache": False,
        CONTEXT: context,
    }


def _carrying_mask(stack: nn.Module, state: StackState, context: ReplayContext, device: torch.device) -> Any:
    """What stands in the place of the mask: it carries the context where keywords do not arrive."""
    carriers = {site.carrier for site in state.sites} | {mixer.carrier for mixer in state.mixers}
    if MAPPING in carriers:
        return by_layer_type(ContextMask(context), stack.config)
    return ContextMask(context) if MASK in carriers else _stand_in(device)


def _stand_in(device: torch.device) -> Tensor:
    """A 4-D mask passes through the mask builders untouched; this shape breaks any attention that would use it."""
    return torch.zeros(1, 1, 0, 0, dtype=torch.int32, device=device)


def show_rows(outputs: Any, index: Tensor, shape: tuple[int, int], tokens: int) -> Any:
    """Outputs of the packed row in the caller's shape; slots of padding are 0.

    ``[1, T, ...]`` becomes ``[batch, sequence, ...]`` (hidden states), ``[T, ...]`` becomes ``[batch * sequence, ...]``
    (router logits); tuples and model outputs are mapped over, everything else is left alone.
    """
    if isinstance(outputs, Tensor):
        index = index.to(outputs.device)  # layers may lie on several
        if outputs.ndim >= 2 and outputs.shape[:2] == (1, tokens):
            return torch.ops.augtree.show_slots(outputs[0], index).view(*shape, *outputs.shape[2:])
        if outputs.ndim >= 1 and outputs.shape[0] == tokens:
            return torch.ops.augtree.show_slots(outputs, index)
        return outputs
    if isinstance(outputs, tuple):
        return tuple(show_rows(item, index, shape, tokens) for item in outputs)
    if isinstance(outputs, dict):
        for name in list(outputs.keys()):
            outputs[name] = show_rows(outputs[name], index, shape, tokens)
    return outputs
