"""Where embeddings come from, read off their autograd graph: equal vectors of unequal graphs must not be shared.

The packed row holds one slot of each set of equal ones, and its gradient is the sum over all of them. That is exact if
they are one function of one input: then the sum of gradients goes the way that each would have gone. It would not hold
for two token ids that happen to have equal rows in the table (new tokens that start from a mean), or for features of
different images behind a projector that is still 0: equal values, other parameters or other inputs. So token ids are
read from the embedding's own node and become part of what must agree. The pixels of two rows' images are not looked
at: features that are equal bit for bit and are not constant over the image come from equal pixels, and the gradients
of the two computations are added up in the tower's parameters all the same. Without gradients equal values are enough.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from augtree_fx.fingerprints import fingerprints

# Nodes of one input that treat every slot alike.
_ALIKE = (
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "UnsqueezeBackward0",
    "SqueezeBackward1",
    "ToCopyBackward0",
    "CloneBackward0",
    "AliasBackward0",
    "AddBackward0",
    "RegisterPostBackwardFunctionBackward",  # FSDP2 around a module's inputs
)
_EMBEDDING, _SCATTER, _SCALE = "EmbeddingBackward0", "MaskedScatterBackward0", "MulBackward0"
_LEAF = "torch::autograd::AccumulateGrad"


class UnknownOrigin(Exception):
    """Gradients of equal vectors may belong to different computations; the message says why."""


def gradient_is_a_signal(embedding: nn.Module) -> bool:
    """Whether the output of a frozen embedding takes a gradient only so that reentrant checkpointing has one.

    Transformers and PEFT do that with a forward hook; nobody reads this gradient.
    """
    names = (getattr(hook, "__name__", "") for hook in embedding._forward_hooks.values())
    frozen = not any(parameter.requires_grad for parameter in embedding.parameters())
    return frozen and any(name.startswith("make_inputs_require_grad") for name in names)


def token_ids_of(name: str, values: Tensor, shape: tuple[int, int], *, is_signal: bool = False) -> list[Tensor]:
    """Integer tensors that must agree, besides the values, for two slots to be one computation.

    Args:
        name: of the argument, for messages.
        values: ``[batch, sequence, ...]``.
        shape: ``(batch, sequence)``.
        is_signal: whether gradients of leaves are read by nobody, see `gradient_is_a_signal`.

    Raises:
        UnknownOrigin: the values take gradients by a way that is not known to treat equal slots alike.
    """
    if not (torch.is_grad_enabled() and values.requires_grad):
        return []
    if values.retains_grad and not values.is_leaf:
        raise UnknownOrigin(f"{name} retains a gradient, which sharing would change slot by slot")
    node: Any = values.grad_fn
    if node is None:
        _refuse_leaf(name, is_signal)
    while node is not None:
        kind = node.name().rsplit(".", 1)[-1]
        if kind == _LEAF:
            _refuse_leaf(name, is_signal)
            break
        if kind == _EMBEDDING:
            ids = node._saved_indices
            if tuple(ids.shape) != shape:
                raise UnknownOrigin(f"{name} are looked up by ids of shape {tuple(ids.shape)}, not {shape}")
            return [ids]
        if kind == _SCATTER:
            if node.next_functions[1][0] is not None:
                refuse_repeated(name, values, node._saved_mask, shape)
            node = node.next_functions[0][0]
            continue
        inputs = [function for function, _ in node.next_functions if function is not None]
        scales = kind == _SCALE and node._saved_other is not None and node._saved_other.numel() == 1
        if len(inputs) != 1 or not (scales or kind in _ALIKE):
            raise UnknownOrigin(f"{name} take gradients through {kind}: which of their slots are one is not known")
        node = inputs[0]
    return []


def _refuse_leaf(name: str, is_signal: bool) -> None:
    if not is_signal:
        raise UnknownOrigin(f"{name} come from a leaf that takes a gradient of its own at every slot")


def refuse_repeated(name: str, values: Tensor, mask: Tensor, shape: tuple[int, int]) -> None:
    """Features that repeat inside a row may be a constant that says nothing about the image they come from."""
    if mask.ndim < 2 or tuple(mask.shape[:2]) != shape:
        raise UnknownOrigin(f"{name} hold features behind a mask of shape {tuple(mask.shape)}")
    where = mask.reshape(*shape, -1).any(-1).flatten().nonzero()[:, 0]
    slots = values.detach().flatten(0, 1).index_select(0, where)
    rows = where // shape[1]
    if len(fingerprints([slots, rows], len(where)).unique()) < len(where):
        raise UnknownOrigin(f"{name} hold features that repeat inside a row and take gradients")
