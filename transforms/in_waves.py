"""One forward of a stack in parts: prompts once, then waves of branches under checkpointing, in one graph.

The outputs of all parts come back as one; backward computes one wave after another again, so that one is alive at a
time. What the waves send back to the prompts' K and V is added up in the accumulation dtype, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from augtree_fx.reference import accumulation_dtype
from augtree_fx.transforms.context import Place, PromptKV, Shelf, continued
from augtree_fx.trie import IntArray
from augtree_fx.waves import Stage


class Forward(Protocol):
    """Runs the stack on some nodes.

    Args:
        nodes: node numbers, ascending.
        above: nodes that they continue, computed before, ascending.
        prompts: K and V of these.
        kept: gets K and V of the nodes' own tokens.
    """

    def __call__(self, nodes: IntArray, above: IntArray, prompts: Shelf | None, kept: Shelf | None) -> Any: ...


Idle = Callable[[], Tensor]  # a forward of one token that nobody sees, ``[1, 1, hidden size]``


class _Handle(torch.autograd.Function):
    """Stands for K or V of prompts in the accumulation dtype, and holds no memory; its gradient is theirs.

    Args:
        outer: handle of the stages above, or ``None``.
        own: ``[tokens, heads, size]`` K or V of a stage's own tokens, in their graph.

    Returns:
        ``[outer + own tokens, heads, size]``, all on one element.
    """

    @staticmethod
    def forward(ctx: Any, outer: Tensor | None, own: Tensor) -> Tensor:
        ctx.before, ctx.dtype = 0 if outer is None else len(outer), own.dtype
        zero = torch.zeros((), dtype=accumulation_dtype(own.dtype), device=own.device)
        return zero.expand(ctx.before + len(own), *own.shape[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor]:
        (gradient,) = gradients
        return gradient[: ctx.before] if ctx.before else None, gradient[ctx.before :].to(ctx.dtype)


@dataclass
class _Run:
    """Outputs of the parts so far, and which nodes they are of."""

    forward: Forward
    idle: Idle
    outputs: list[Any] = field(default_factory=list)
    nodes: list[IntArray] = field(default_factory=list)
    unseen: list[Tensor] = field(default_factory=list)

    def all(self, plan: Stage) -> None:
        """Run the stages of a plan, depth first, each followed by its waves."""
        frontier: list[tuple[Stage, IntArray, Shelf | None]] = [(plan, plan.nodes[:0], None)]
        while frontier:
            stage, above, prompts = frontier.pop()
            if len(stage.nodes):
                followed = bool(stage.inner) or any(len(nodes) for nodes in stage.waves)
                prompts = self._stage(stage.nodes, above, prompts, followed=followed)
                above = np.concatenate([above, stage.nodes])
            elif stage.idle:
                self.unseen.append(self.idle())
            for nodes in stage.waves:
                if len(nodes):
                    self._add(nodes, _checkpointed(partial(self.forward, nodes, above, prompts, None)))
                else:
                    self.unseen.append(_checkpointed(self.idle))
            frontier += [(inner, above, prompts) for inner in reversed(stage.inner)]

    def _stage(self, nodes: IntArray, above: IntArray, prompts: Shelf | None, *, followed: bool) -> Shelf:
        kept = Shelf() if followed else None
        outputs = self.forward(nodes, above, prompts, kept)
        self._add(nodes, outputs)
        if kept is None:
            return Shelf()
        refuse_cut_off(kept.items, outputs[0])
        kept.full = True
        outer = {} if prompts is None else prompts.items
        return Shelf({place: _prompt_kv(own, outer.get(place)) for place, own in kept.items.items()})

    def _add(self, nodes: IntArray, outputs: Any) -> None:
        self.nodes.append(nodes)
        self.outputs.append(outputs)


def run_in_waves(plan: Stage, forward: Forward, idle: Idle) -> tuple[Any, IntArray]:
    """Run all parts of a plan.

    Returns:
        The outputs as of one forward, and the node numbers in the order of its tokens.
    """
    run = _Run(forward, idle)
    run.all(plan)
    return _tied(joined(run.outputs), run.unseen), np.concatenate(run.nodes)


def run_beside(outputs: Any, plan: Stage, idle: Idle) -> Any:
    """What other ranks run in waves, after a forward of this rank that stands for the plan's root."""
    run = _Run(lambda *_: outputs, idle)
    run.all(replace(plan, nodes=plan.nodes[:0], idle=False))
    return _tied(outputs, run.unseen)


def _tied(outputs: Any, unseen: list[Tensor]) -> Any:
    """Outputs whose backward also runs through tokens that nobody sees: none of them is joined on."""
    if not unseen:
        return outputs
    hidden = outputs[0]
    tied = torch.cat([hidden.flatten(0, -2), *(x[0, :0].to(hidden.device) for x in unseen)]).view_as(hidden)
    if isinstance(outputs, tuple):
        return tied, *outputs[1:]
    outputs[next(iter(outputs))] = tied
    return outputs


def refuse_cut_off(kept: Mapping[Place, tuple[Tensor, ...]], hidden: Tensor) -> None:
    """Refuse K and V without a graph where only the way of checkpointing took it from them.

    Raises:
        NotImplementedError: layers are checkpointed reentrantly.
    """
    if any(not k.requires_grad for k, *_ in kept.values()) and _checkpoints_reentrantly(hidden):
        raise NotImplementedError(
            "keys of checkpointed layers are not part of the graph; checkpoint with "
            "gradient_checkpointing_kwargs={'use_reentrant': False}"
        )


def _checkpoints_reentrantly(hidden: Tensor) -> bool:
    """Whether layers' forwards ran without a graph, as reentrant checkpointing does."""
    seen, frontier = set(), [hidden.grad_fn]
    while frontier:
        node = frontier.pop()
        if node is None or node in seen:
            continue
        if node.name().startswith("CheckpointFunctionBackward"):
            return True
        seen.add(node)
        frontier += [parent for parent, _ in node.next_functions]
    return False


def _checkpointed(function: Callable[[], Any]) -> Any:
    return checkpoint(function, use_reentrant=False) if torch.is_grad_enabled() else function()


def _prompt_kv(own: tuple[Tensor, ...], outer: PromptKV | None) -> PromptKV:
    outer_handles = [None] * len(own) if outer is None else outer.handles
    handles = (_Handle.apply(*pair) for pair in zip(outer_handles, own, strict=True))
    return PromptKV(continued(own, outer), tuple(handles))


def lengthened(outputs: Any, num_tokens: int, wanted: int) -> Any:
    """Outputs of a forward with zeros after their tokens: as many as those of a rank that has most."""
    if num_tokens == wanted:
        return outputs
    if isinstance(outputs, Tensor):
        dim = 1 if outputs.ndim >= 3 and outputs.shape[0] == 1 else 0
        if outputs.ndim == 0 or outputs.shape[dim] != num_tokens:
            return outputs
        missing = list(outputs.shape)
        missing[dim] = wanted - num_tokens
        return torch.cat([outputs, outputs.new_zeros(missing)], dim)
    if isinstance(outputs, tuple):
        return tuple(lengthened(item, num_tokens, wanted) for item in outputs)
    if isinstance(outputs, dict):
        for name in list(outputs):
            outputs[name] = lengthened(outputs[name], num_tokens, wanted)
    return outputs


def joined(parts: Sequence[Any]) -> Any:
    """Outputs of several forwards as those of one: ``[1, T, ...]`` and ``[T, ...]`` tensors in a row, the rest mapped.

    Raises:
        NotImplementedError: an output that has no token dim, and is not the same in all parts.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts), dim=1 if first.ndim >= 3 and first.shape[0] == 1 else 0)
    if isinstance(first, tuple):
        return tuple(joined(items) for items in zip(*parts, strict=True))
    if isinstance(first, dict):
        for name in list(first):
            first[name] = joined([part[name] for part in parts])
        return first
    if any(part is not first and part != first for part in parts):
        raise NotImplementedError(f"an output of type {type(first).__name__} cannot be put together from waves")
    return first
