"""The decoder stack's forward: detect the tree, pack the batch, run the ORIGINAL forward, show the result row by row.

What cannot be shared exactly raises, or runs the original forward and says so once, in the log and in `explain`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from augtree_fx.costs import CostModel, attention_heads
from augtree_fx.layout import TreeLayout
from augtree_fx.transforms.capture import AttentionSite, config_scalars, plain_scalars
from augtree_fx.transforms.compat import CACHE_NAMES
from augtree_fx.transforms.context import ReplayContext
from augtree_fx.transforms.positions import PositionRule, call_packed
from augtree_fx.transforms.skeleton import CONTEXT, decoder_layers

logger = logging.getLogger("augtree_fx")

# Keywords that the packed call replaces, or that say nothing about tokens.
_REPLACED = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache", *CACHE_NAMES)
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass
class StackState:
    """Settings and memory of one transformed stack.

    Attributes:
        sites: captured attention modules.
        kernel: requested kernel.
        strict: raise on input that cannot be shared exactly, instead of running the original forward.
        costs: what a node must save; ``None`` estimates it from the model and device.
        fallbacks: how often the original forward ran, by reason.
        num_shared: how many batches were shared.
        positions: which positions tokens get by default, and how the stack takes others.
    """

    sites: tuple[AttentionSite, ...]
    kernel: str = "auto"
    strict: bool = True
    costs: CostModel | None = None
    fallbacks: dict[str, int] = field(default_factory=dict)
    num_shared: int = 0
    positions: PositionRule = PositionRule()

    def __getstate__(self) -> dict[str, Any]:
        """Graphs hold functions that need not pickle; their generated source travels with the classes."""
        sites = tuple(replace(site, graph=torch.fx.Graph()) for site in self.sites)
        return {**self.__dict__, "sites": sites, "fallbacks": dict(self.fallbacks)}


@dataclass(frozen=True)
class PackedCall:
    """A batch as the stack gets it, packed, and how its outputs go back.

    Attributes:
        arguments: keywords of the stack's original forward, among them the context of the tree.
        index: ``[batch * sequence]`` packed token that each slot of the caller shows, -1 where it is padding.
        shape: the caller's ``(batch, sequence)``.
        num_tokens: packed tokens.
    """

    arguments: dict[str, Any]
    index: Tensor
    shape: tuple[int, int]
    num_tokens: int

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
    return decoder if isinstance(decoder, nn.Module) else model


def run_stack(stack: nn.Module, state: StackState, original: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Forward of a transformed stack.

    Args:
        stack: the module.
        state: its settings.
        original: the forward that it had, of its class.
        given: the caller's arguments by name.
    """
    if given.get(CONTEXT) is not None:  # an explicit layout: the caller packed the batch
        return call_packed(stack, state.positions, original, given)
    packed = pack(stack, state, given)
    if packed is None:
        return original(stack, **given)
    return packed.show(call_packed(stack, state.positions, original, packed.arguments))


@torch.compiler.disable
def pack(stack: nn.Module, state: StackState, given: dict[str, Any]) -> PackedCall | None:
    """The packed call of a batch, or ``None`` for the original forward. The one break of a compiled model."""
    try:
        layout = decide(stack, state, given)
    except Unshared as reason:
        _note(state, str(reason))
        return None
    call = pack_layout(stack, state, layout)
    state.num_shared += 1
    kept = {name: value for name, value in given.items() if name not in (*_REPLACED, *_PACKING)}
    return replace(call, arguments=kept | call.arguments)


def _note(state: StackState, reason: str) -> None:
    if not reason:
        return
    if reason not in state.fallbacks:
        logger.warning("augtree-fx: the original forward runs: %s", reason)
    state.fallbacks[reason] = state.fallbacks.get(reason, 0) + 1


def decide(stack: nn.Module, state: StackState, given: Mapping[str, Any]) -> TreeLayout:
    """The layout to run a batch with.

    Raises:
        Unshared: the original forward is to run.
        ValueError, NotImplementedError: strict, and the batch cannot be shared exactly.
    """
    try:
        _decline(state, given)
        _refuse(stack, state, given)
        host = state.positions.rows(*(given.get(x) for x in ("input_ids", "attention_mask", "position_ids")))
    except (ValueError, NotImplementedError) as error:
        if state.strict:
            raise
        raise Unshared(str(error)) from error
    if len(host.length) == 1:
        raise Unshared("")
    layout = TreeLayout.from_rows(host, costs=state.costs or estimated_costs(stack, host.device))
    if not layout.shares:
        raise Unshared("")
    _check_rope(stack, layout)
    return layout


def _decline(state: StackState, given: Mapping[str, Any]) -> None:
    """Calls that are not a forward of whole rows: generation, custom masks, embeddings."""
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
    if given.get("input_ids") is None:
        raise Unshared("there are no input_ids (inputs_embeds do not say which tokens are equal)")
    mask = given.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        raise Unshared("attention_mask is not a [batch, sequence] tensor")
    if given.get("position_ids") is not None and state.positions.table is not None:
        raise Unshared("this model takes no position_ids")
    positions_alone = mask is None and given.get("position_ids") is not None
    if positions_alone and not all(site.separates for site in state.sites):
        raise Unshared("this model's masks do not look at position_ids: pass an attention_mask, or rows one by one")
    extra = [
        name
        for name, value in given.items()
        if isinstance(value, Tensor) and value.ndim and name not in (*_REPLACED, *_PACKING)
    ]
    if extra:
        raise Unshared(f"extra tensors are passed to the decoder: {', '.join(extra)}")


def _refuse(stack: nn.Module, state: StackState, given: Mapping[str, Any]) -> None:
    """Requests that sharing cannot serve."""
    if given.get("output_attentions") or getattr(stack.config, "output_attentions", False):
        raise NotImplementedError(
            "output_attentions=True needs attention weights, which no tree kernel computes; set it to False"
        )
    embeddings: Any = stack.get_input_embeddings
    device = embeddings().weight.device
    if given["input_ids"].device != device and device.type != "meta":
        raise ValueError(
            f"input_ids are on {given['input_ids'].device}, the model's embedding is on {device}; "
            "move them with .to(model.device)"
        )
    if stack.training:
        dropout = max((current_dropout(stack, site), site.name) for site in state.sites)
        if dropout[0] > 0:
            raise NotImplementedError(
                f"attention dropout must be 0 in training, {dropout[1]} has {dropout[0]}; rows that share a prompt "
                "cannot draw different masks on it: set config.attention_dropout = 0.0 before building the model"
            )
        noise = current_noise(stack)
        if noise is not None:
            raise NotImplementedError(
                f"dropout and router noise must be 0 in training, {noise[0]} has {noise[1]}; rows that share a prompt "
                "cannot draw different values on it: set it to 0, or pass strict=False to run the original forward"
            )


_NOISE = ("dropout", "activation_dropout", "residual_dropout", "resid_pdrop", "router_jitter_noise", "jitter_noise")


def current_noise(stack: nn.Module) -> tuple[str, float] | None:
    """A module of the stack (adapters included) that draws random numbers in training, with its rate."""
    for name, module in stack.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            if module.p > 0:
                return name, module.p
            continue
        for attribute in _NOISE:
            rate = vars(module).get(attribute)
            if isinstance(rate, float) and rate > 0:
                return f"{name}.{attribute}".lstrip("."), rate
    return None


def current_dropout(stack: nn.Module, site: AttentionSite) -> float:
    """Attention dropout of a site now (captured value, unless the module's attribute was changed since)."""
    now = getattr(stack.get_submodule(site.name), "attention_dropout", site.dropout)
    return float(getattr(now, "p", now) or 0.0)


def changed_sites(stack: nn.Module, state: StackState) -> list[str]:
    """Sites whose plain attributes are no longer those that were captured, attention dropout aside."""
    changed = []
    for site in state.sites:
        module = stack.get_submodule(site.name)
        now = plain_scalars(module) + config_scalars(getattr(module, "config", None))  # an adapter may stand there
        if now != site.scalars and dict(now) | _DROPOUT != dict(site.scalars) | _DROPOUT:
            changed.append(site.name)
    return changed


_DROPOUT = {"attention_dropout": None}


def _check_rope(stack: nn.Module, layout: TreeLayout) -> None:
    """Length-dependent RoPE looks at the largest position of the padded batch, which packing may take away."""
    config: Any = stack.config
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = {parameters.get("rope_type")} | {x.get("rope_type") for x in parameters.values() if isinstance(x, dict)}
    limit = getattr(config, "original_max_position_embeddings", None) or parameters.get(
        "original_max_position_embeddings", getattr(config, "max_position_embeddings", layout.shape[1])
    )
    padded, packed = layout.shape[1], int(layout.position_ids.max()) + 1
    if padded <= limit or padded == packed or layout.num_row_tokens == layout.shape[0] * layout.shape[1]:
        return
    if "dynamic" in kinds or ("longrope" in kinds and packed <= limit):
        raise Unshared(f"RoPE is scaled by the padded length, {padded}, the longest row has {packed}; drop the padding")


def estimated_costs(stack: nn.Module, device: torch.device) -> CostModel:
    """Cost model of this stack's layers on a device; routed experts count as far as a token passes through them."""
    _, layers = decoder_layers(stack)
    config: Any = stack.config
    experts = max(
        getattr(config, "num_local_experts", 0) or 0,
        getattr(config, "num_experts", 0) or 0,
        getattr(config, "n_routed_experts", 0) or 0,
    )
    active = (getattr(config, "num_experts_per_tok", None) or 1) / experts if experts else 1.0
    params = sum(
        parameter.numel() * (active if "experts" in name and "shared" not in name else 1.0)
        for name, parameter in layers.named_parameters()
    )
    heads, head_dim = attention_heads(config)
    head_dim = getattr(config, "v_head_dim", None) or head_dim
    dtype = next(layers.parameters()).dtype
    return CostModel.of_layer(params / len(layers), heads * head_dim, device.type, dtype)


def make_context(layout: TreeLayout, state: StackState) -> ReplayContext:
    """Context of a batch: tables for every window that some layer has."""
    windows = {site.window for site in state.sites}
    return ReplayContext({window: layout.tables(window) for window in windows}, layout.num_levels == 1, state.kernel)


def pack_layout(stack: nn.Module, state: StackState, layout: TreeLayout) -> PackedCall:
    """The packed call of a layout.

    Raises:
        RuntimeError: an attention module is no longer what was captured.
    """
    changed = changed_sites(stack, state)
    if changed:
        raise RuntimeError(
            f"attention settings changed since transform at {', '.join(changed[:3])}; call augtree_fx.transform again"
        )
    device = layout.device
    input_ids, position_ids, index = (
        torch.from_numpy(x).to(device, non_blocking=True)
        for x in (layout.input_ids, layout.position_ids, layout.packed_index)
    )
    arguments = {
        "input_ids": input_ids[None],
        "attention_mask": _stand_in(device),
        "position_ids": position_ids[None],
        "use_cache": False,
        CONTEXT: make_context(layout, state),
    }
    return PackedCall(arguments, index, layout.shape, layout.num_tokens)


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
