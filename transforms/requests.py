"""What a forward of a stack asks for: the tree to run it with, or why the original forward runs, or why it cannot."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from augtree_fx.costs import CostModel, attention_heads
from augtree_fx.layout import TreeLayout
from augtree_fx.rows import HostRows
from augtree_fx.transforms.compat import CACHE_NAMES
from augtree_fx.transforms.embedded import TokenInputs, has_axes, is_embedded, other_tensors, read_inputs
from augtree_fx.transforms.layer_masks import OtherMask, check_recurrent, padding_of
from augtree_fx.transforms.live import refuse_noise
from augtree_fx.transforms.mixers import mixers_of
from augtree_fx.transforms.path_rows import columns_agree, padding_before
from augtree_fx.transforms.positions import PositionRule
from augtree_fx.transforms.provenance import UnknownOrigin
from augtree_fx.transforms.skeleton import named_layers, separates_axes
from augtree_fx.transforms.state import StackState

logger = logging.getLogger("augtree_fx")

# Keywords that the packed call replaces, or that say nothing about tokens.
REPLACED = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache", *CACHE_NAMES)
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class Unshared(Exception):
    """Run the original forward; the message is the reason that is logged once, empty when there is nothing to say."""


def token_inputs(
    state: StackState, stack: nn.Module, given: dict[str, Any]
) -> tuple[dict[str, Any], TokenInputs | None]:
    """What the stack is given for each slot, where token ids do not say it all; the mask as ``[batch, sequence]``.

    Raises:
        Unshared: it is not known what an argument says about a token.
    """
    if not is_embedded(given) or has_cache(given):
        return given, None
    try:
        embedding: Any = stack.get_input_embeddings
        mask = given.get("attention_mask")
        tokens = read_inputs(given, (*REPLACED, *PACKING), embedding())
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


def has_cache(given: Mapping[str, Any]) -> bool:
    """Whether a KV cache is passed or wanted."""
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
    host = read_rows(stack, state, given, tokens)
    count(stack, state, host)
    if len(host.length) == 1:
        raise Unshared("")
    layout = layout_of(stack, state, host)
    if not layout.shares:
        if state.mixers and TreeLayout.from_rows(host, costs=costs_of(stack, state, host.device)).shares:
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


def read_rows(
    stack: nn.Module, state: StackState, given: Mapping[str, Any], tokens: TokenInputs | None = None
) -> HostRows:
    """The rows of a batch; arguments and errors as of `decide`."""
    try:
        _decline(state, given, tokens)
        _refuse(stack, state, given)
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        if tokens is None and given.get("input_ids") is None:
            raise NotImplementedError("ranks of a mesh compare token ids, and inputs_embeds have none; pass input_ids")
        if state.lanes is not None and state.lanes.rows == "pooled" and given["input_ids"].shape[:1] == (0,):
            return HostRows.none(given["input_ids"])  # other ranks have some
        if tokens is None:
            return state.positions.rows(given["input_ids"], mask, positions)
        if positions is None and state.positions != PositionRule():
            raise Unshared("this model counts positions by what it is given, and inputs_embeds come without them")
        separates = tokens.by_axis is None or state.axes[len(tokens.by_axis)] is True
        if mask is None and not separates and any(given.get(name) is not None for name in PACKING):
            raise Unshared("rows are packed, and this model's masks do not look at position_ids of several axes")
        return tokens.rows(mask, positions, separates)
    except (ValueError, NotImplementedError) as error:
        if state.strict:
            raise
        raise Unshared(str(error)) from error


def count(stack: nn.Module, state: StackState, host: HostRows) -> None:
    """Count the tokens of a batch, of all ranks that compute it, and look whether its groups are whole."""
    state.counts.add_rows(int(host.length.sum()))
    if not stack.training or not torch.is_grad_enabled():
        return
    trained = next((parameter for parameter in stack.parameters() if parameter.requires_grad), None)
    version = 0 if trained is None else trained._version
    found = state.torn.add(host, version, costs_of(stack, state, host.device))
    if found is not None:
        logger.warning("augtree-fx: %s", found)


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
    return TreeLayout.from_rows(host, costs=costs_of(stack, state, host.device), apart=apart)


def costs_of(stack: nn.Module, state: StackState, device: torch.device) -> CostModel:
    """What a node must save: as asked for, or estimated."""
    return state.costs or estimated_costs(stack, device)


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
    if state.mixers and (restarting or any(given.get(name) is not None for name in PACKING)):
        raise Unshared(
            f"the {state.mixers[0].state} of {state.mixers[0].name} runs through packed rows: pass an attention_mask, "
            "or rows one by one"
        )
    if positions_alone and not all(site.separates for site in state.sites):
        raise Unshared("this model's masks do not look at position_ids: pass an attention_mask, or rows one by one")
    extra = other_tensors(given, (*REPLACED, *PACKING)) if inputs is None else []
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
    ids = given.get("input_ids")
    _refuse_device_and_noise(stack, state, "input_ids are", None if ids is None else ids.device)


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
    refuse_columns(state, layout)
    _refuse_device_and_noise(stack, state, "the layout is", layout.device)


def _refuse_device_and_noise(stack: nn.Module, state: StackState, what: str, found: torch.device | None) -> None:
    embeddings: Any = stack.get_input_embeddings
    device = embeddings().weight.device
    if found is not None and found != device and device.type != "meta":
        raise ValueError(f"{what} on {found}, the model's embedding is on {device}; move them with .to('{device}')")
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


def refuse_columns(state: StackState, layout: TreeLayout) -> None:
    if any(site.counts for site in state.sites) and not columns_agree(layout):
        raise NotImplementedError("a layer counts the columns of tokens, and shared tokens stand in different ones")


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
