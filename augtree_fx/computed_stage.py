"""A part of a tree whose graph is kept while its descendants are computed, and what comes back to it from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from augtree_fx.dtensor_ops.shards import Shards
from augtree_fx.offload import Offload
from augtree_fx.reference import accumulation_dtype
from augtree_fx.transforms.context import Place, PromptKV, continued
from augtree_fx.trie import IntArray


@dataclass(eq=False, repr=False)
class ComputedStage:
    """Nodes whose graph is kept while their descendants are computed.

    Attributes:
        nodes: node numbers, those of the stages above included.
        tokens: packed tokens of its own nodes.
        above: the stage that it continues.
        prompts: K and V (and latents, see `PromptKV`) of all its nodes, as leaves.
        kept: the same of its own tokens in its graph.
        sources: packed tokens of its own whose hidden states predict something, ascending.
        hidden: ``[sources, hidden size]`` in its graph.
        leaf: the same as a leaf in the accumulation dtype.
        arrivals: gets an entry whenever a wave's gradient arrives here; ``None`` where none can.
        again: computes ``hidden`` and ``kept`` anew, in a graph, where none was kept.
        in_step: whether its backward also runs where nothing came back, as those of other ranks do.
        offload: what keeps its activations on the host.
        shards: which rank has which of its tokens, under context parallelism.
    """

    nodes: IntArray
    tokens: IntArray
    above: ComputedStage | None
    prompts: dict[Place, PromptKV]
    kept: dict[Place, tuple[Tensor, ...]]
    sources: IntArray
    hidden: Tensor
    leaf: Tensor
    arrivals: list[None] | None = None
    again: Callable[[], tuple[Tensor, dict[Place, tuple[Tensor, ...]]]] | None = None
    in_step: bool = False
    offload: Offload | None = None
    shards: Shards | None = None

    @property
    def has_handles(self) -> bool:
        """Whether every wave's gradient arrives at K or V."""
        return any(handle.requires_grad for each in self.prompts.values() for handle in each.handles)

    def path(self) -> list[ComputedStage]:
        """This stage and those above it."""
        stages = [self]
        while stages[-1].above is not None:
            stages.append(stages[-1].above)
        return stages

    def lie_in(self, longer: dict[Place, PromptKV]) -> None:
        """Let K and V lie in those of a stage that continues this one, instead of in memory of their own."""
        for place, own in self.prompts.items():
            length = len(own.tensors[0])
            self.prompts[place] = own._replace(tensors=tuple(x[:length] for x in longer[place].tensors))

    def backward(self) -> None:
        """Send what has come back to its leaves through its graph, once, and to the stage above."""
        handles = [handle for each in self.prompts.values() for handle in each.handles]
        if not self.in_step and all(leaf.grad is None for leaf in (self.leaf, *handles)):
            self.prompts, self.kept = {}, {}
            return
        if self.again is not None:
            self.hidden, self.kept = self.again()
        roots, gradients = [], []

        def send(root: Tensor, gradient: Tensor | None) -> None:
            if root.requires_grad and gradient is not None:
                roots.append(root)
                gradients.append(gradient.to(root.dtype))

        # Also where nothing came back: FSDP2 gathers a layer's parameters when its output gets a gradient.
        send(self.hidden, torch.zeros_like(self.leaf) if self.leaf.grad is None else self.leaf.grad)
        for place, own in self.kept.items():
            for number, tensor in enumerate(own):
                gradient = self.prompts[place].handles[number].grad
                if gradient is None:
                    continue
                before = len(gradient) - len(tensor)
                send(tensor, gradient[before:])
                if before:
                    assert self.above is not None
                    _add_to(self.above.prompts[place].handles[number], gradient[:before])
        self.prompts = {}
        if roots:
            torch.autograd.backward(roots, gradients)
        self.kept = {}
        if self.offload is not None:
            self.offload.close()


def _add_to(leaf: Tensor, gradient: Tensor) -> None:
    if leaf.requires_grad:
        leaf.grad = gradient.clone() if leaf.grad is None else leaf.grad.add_(gradient)


def leaves_of(own: tuple[Tensor, ...], outer: PromptKV | None, *, always: bool) -> PromptKV:
    """K and V of a stage's tokens, after those of the stages above, with handles that hold no memory."""
    tensors = continued(own, outer)
    needs = [always or x.requires_grad for x in own]
    if outer is not None:
        needs = [need or handle.requires_grad for need, handle in zip(needs, outer.handles, strict=True)]
    handles = tuple(
        torch.zeros((), dtype=accumulation_dtype(x.dtype), device=x.device).expand(x.shape).requires_grad_(need)
        for x, need in zip(tensors, needs, strict=True)
    )
    return PromptKV(tensors, handles)


def watched(leaves: list[Tensor]) -> list[None] | None:
    """A list that grows when gradients arrive at the first leaf, and the first handle, that can get any."""
    first = [leaf for leaf in (leaves[0], next((x for x in leaves[1:] if x.requires_grad), None)) if leaf is not None]
    arrivals: list[None] = []
    for leaf in first:
        if leaf.requires_grad:
            leaf.register_post_accumulate_grad_hook(lambda _: arrivals.append(None))
    return arrivals if any(leaf.requires_grad for leaf in first) else None
