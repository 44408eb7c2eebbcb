"""Masks that a wrapper prepared, one for each kind of layer: the padding in them, if they are causal otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from augtree_fx.transforms.capture import AttentionSite
from augtree_fx.transforms.recurrent import MixerSite

RECURRENT_TYPES = {"linear_attention", "conv"}  # keys of masks that say padding alone


class OtherMask(Exception):
    """A mask says more than causal attention, windows and padding; the message says which."""


def padding_of(
    masks: Mapping[str, Any],
    sites: tuple[AttentionSite, ...],
    config: Any,
    shape: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """``[batch, sequence]`` bool, true at tokens, as the masks of all layers have it.

    Every element that a token's query looks at is compared with what the captured layer does: causal, its window, no
    padding. Bidirectional blocks (images), packed rows and custom masks differ from that.

    Args:
        masks: mask by layer type: 4-D and boolean or additive, ``[batch, sequence]``, or ``None``.
        sites: captured attention modules.
        config: of the decoder stack.
        shape: ``(batch, sequence)`` of the call.
        device: of its tokens.

    Raises:
        OtherMask: the masks are not known to be causal masks with padding.
    """
    layer_types = getattr(config, "layer_types", None) or ()
    windows: dict[str, set[int | None]] = {}
    for site in sites:
        layer = next(int(part) for part in site.name.split(".") if part.isdecimal())
        if layer >= len(layer_types) or layer_types[layer] not in masks:
            raise OtherMask("the prepared attention masks do not say which layer takes which")
        windows.setdefault(layer_types[layer], set()).add(site.window)
    kinds = sorted(windows, key=lambda kind: None in windows[kind], reverse=True)
    implementation = getattr(config, "_attn_implementation", None) or ""
    tokens: Tensor | None = None
    for kind in kinds:
        for window in windows[kind]:
            seen = _tokens_of(kind, masks[kind], window, implementation, shape, device)
            if tokens is not None and not torch.equal(seen, tokens):
                raise OtherMask(f"the attention mask of {kind} layers has other padding than that of {kinds[0]} layers")
            tokens = seen
    assert tokens is not None, "a transformed stack has attention sites"
    return tokens


def check_recurrent(masks: Mapping[str, Any], mixers: tuple[MixerSite, ...], tokens: Tensor) -> None:
    """Masks for layers with a recurrent or convolution state must say the padding that those of attention say.

    Args:
        masks: mask by layer type.
        mixers: captured modules with a state.
        tokens: ``[batch, sequence]`` bool, see `padding_of`.

    Raises:
        OtherMask: one says something else.
    """
    if not any(mixer.masked for mixer in mixers):
        return
    for kind in RECURRENT_TYPES & masks.keys():
        mask = masks[kind]
        same = tokens.all() if mask is None else torch.equal(mask.to(tokens.device) != 0, tokens)
        if not same:
            raise OtherMask(f"the attention mask of {kind} layers has other padding than that of attention layers")


def _tokens_of(
    kind: str, mask: Any, window: int | None, implementation: str, shape: tuple[int, int], device: torch.device
) -> Tensor:
    flash = implementation.startswith("flash_attention")
    if mask is None:
        # Flash kernels take the window as an argument; sdpa is causal without a mask; eager attention would see all.
        if flash or (implementation == "sdpa" and (window is None or shape[1] <= window)):
            return torch.ones(shape, dtype=torch.bool, device=device)
        raise OtherMask(f"the attention mask of {kind} layers is None under {implementation!r} attention")
    if not isinstance(mask, Tensor):
        raise OtherMask(f"the attention mask of {kind} layers is a {type(mask).__name__}")
    if flash and tuple(mask.shape) == shape:
        return mask != 0
    batch, sequence = shape
    if (
        mask.ndim != 4
        or mask.shape[0] not in (1, batch)
        or mask.shape[1] != 1
        or mask.shape[2:] != (sequence, sequence)
    ):
        raise OtherMask(f"the attention mask of {kind} layers has shape {tuple(mask.shape)}")
    visible = mask[:, 0].to(device) if mask.dtype == torch.bool else _additive(kind, mask[:, 0].to(device))
    tokens = visible.diagonal(dim1=1, dim2=2)
    distance = torch.arange(sequence, device=device)[:, None] - torch.arange(sequence, device=device)
    causal = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    # One row of the batch at a time: [sequence, sequence] booleans. Queries at padding are nobody's.
    same = [((row == (causal & seen)) | ~seen[:, None]).all() for row, seen in zip(visible, tokens, strict=True)]
    if not torch.stack(same).all():
        raise OtherMask(
            f"the attention mask of {kind} layers is not causal alone: tokens of an image or a block see each other"
        )
    return tokens.expand(shape)


def _additive(kind: str, mask: Tensor) -> Tensor:
    visible = mask == 0
    if not (visible | (mask <= torch.finfo(mask.dtype).min)).all():
        raise OtherMask(f"the attention mask of {kind} layers holds values between 0 and minus infinity")
    return visible
