"""Forwards of parts of a tree: hidden states of some nodes, on K and V of their ancestors that were computed before."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from augtree_fx.computed_stage import ComputedStage, leaves_of, watched
from augtree_fx.dtensor_ops.agreement import digest
from augtree_fx.dtensor_ops.shards import Shards
from augtree_fx.gradient_watch import GradientWatch
from augtree_fx.layout import TreeLayout
from augtree_fx.lockstep import groups_of, smallest
from augtree_fx.memory import Memory, budget_bytes
from augtree_fx.offload import CudaMover, Offload
from augtree_fx.planned import PlannedLanes
from augtree_fx.predictions import Predictions
from augtree_fx.reference import accumulation_dtype
from augtree_fx.transforms.context import GivenHidden, HiddenStates, Place, Shelf
from augtree_fx.transforms.footprint import footprint, local
from augtree_fx.transforms.in_waves import refuse_cut_off
from augtree_fx.transforms.lane_arguments import wave_arguments
from augtree_fx.transforms.lane_budget import agreed_limits, lane_extent, may_move_queries
from augtree_fx.transforms.packing import make_context, packed_arguments
from augtree_fx.transforms.parallel import described
from augtree_fx.transforms.requests import refuse_waves
from augtree_fx.transforms.skeleton import CONTEXT, named_layers
from augtree_fx.transforms.state import StackState
from augtree_fx.transforms.wave_budget import (
    PREFILL_SHARE,
    Extent,
    Surroundings,
    WaveBudget,
    choose_waves,
    gathered_parameters,
    missing_gradients,
    moving_token,
)
from augtree_fx.trie import IntArray
from augtree_fx.waves import idle_layout, part_of, token_index

HEAD_TOKENS = 2048  # tokens of one chunk of the LM head: 1.2 GB of float32 logits with a vocabulary of 152k
# Logits of a chunk in the accumulation dtype that live at once in its backward, beside two in the model's dtype: cast,
# divided by the temperature, exponentials of log-sum-exp, and gradients of two of them.
HEAD_COPIES = 5

# What becomes of a stage's activations until its backward: kept, computed again, or in pinned memory of the host.
DORMANT = ("keep", "recompute", "offload")


@dataclass(frozen=True, eq=False)
class Part:
    """Hidden states of some tokens: all of some nodes', or this rank's of them under a mesh.

    Attributes:
        tokens: ``[n]`` packed tokens, in any order.
        hidden: ``[n, hidden size]``.
        shards: which rank has which of them.
    """

    tokens: IntArray
    hidden: Tensor
    shards: Shards | None = None

    def pick(self, tokens: IntArray) -> Tensor:
        """Hidden states of some of the tokens."""
        order = np.argsort(self.tokens, kind="stable")
        index = order[np.searchsorted(self.tokens, tokens, sorter=order)]
        return self.hidden[torch.from_numpy(index).to(self.hidden.device)]


@dataclass(eq=False)
class StageRunner:
    """Runs parts of a tree through a model, and looks after the parameters' gradients meanwhile.

    Attributes:
        model: as the caller has it, wrappers included: its forward is called, so that their hooks run.
        stack: its decoder stack.
        state: of the stack.
        layout: the tree.
        with_grad: whether gradients are wanted.
        outputs: class of the stack's outputs.
        dormant: what becomes of a stage's activations until its backward, one of `DORMANT`.
        groups: over which FSDP2 shards the model; from `begin` on.
    """

    model: nn.Module
    stack: nn.Module
    state: StackState
    layout: TreeLayout
    with_grad: bool = False
    outputs: type = BaseModelOutput
    dormant: str = "keep"
    groups: list[Any] = field(default_factory=list)
    _saved: list[tuple[nn.Parameter, int, Tensor | None]] = field(default_factory=list)
    _entered: tuple[str, bool, torch.dtype] | None = None
    _with_gradient: int = 0
    _sharded: list[nn.Module] = field(default_factory=list)
    _where: list[tuple[int, int]] = field(default_factory=list)
    _watch: GradientWatch | None = None
    _offloads: list[Offload] = field(default_factory=list)
    _lengths: tuple[int, ...] = ()  # tokens of the forward that runs, and those with the keys that it is given

    def begin(self) -> None:
        """Put the parameters' gradients aside.

        Raises:
            RuntimeError: another prefill of this model is not left yet.
            NotImplementedError: the model's layers cannot run in parts.
        """
        if self.state.in_waves:
            raise RuntimeError(
                "another augtree_fx.prefill of this model is open; leave its block first, or put both batches into one "
                "layout"
            )
        refuse_waves(self.stack, self.state, self.layout)
        self.state.in_waves, self.with_grad = True, torch.is_grad_enabled()
        self._sharded, self.groups = _sharded_around(self.model, self.stack), groups_of(self.model)
        self._saved = [(p, p._version, p.grad) for p in self.model.parameters() if p.requires_grad]
        for parameter, _, _ in self._saved:
            parameter.grad = None
        self._where = [(id(p), p.data_ptr()) for p in self._own_parameters()]
        self._watch = GradientWatch([] if self.groups else [parameter for parameter, _, _ in self._saved])

    def _own_parameters(self) -> list[nn.Parameter]:
        """Parameters that stay what they are: FSDP2 puts others in their place for a while."""
        return [] if self.groups else list(self.model.parameters())

    def end(self, *, keep: bool) -> None:
        """Give the gradients back, those of the waves added to them if they are to be kept."""
        for parameter, _, before in self._saved:
            if not keep:
                parameter.grad = before
            elif before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self._saved = []
        if self._watch is not None:
            self._watch.remove()
        for offload in self._offloads:
            offload.close()
        self._offloads = []
        self.state.in_waves = False

    def check_parameters(self, backward_ran: bool = False) -> None:
        """Raise RuntimeError if a parameter changed since `begin`, or gradients of waves were cleared.

        Args:
            backward_ran: of a wave, so that some parameter must have a gradient.
        """
        changed = sum(parameter._version != version for parameter, version, _ in self._saved)
        now = [(id(p), p.data_ptr()) for p in self._own_parameters()]
        changed = max(changed, sum(a != b for a, b in zip(now, self._where, strict=True)))
        if changed:
            raise RuntimeError(
                f"{changed} parameters changed since prefill; step the optimizer after the block, not between waves"
            )
        with_gradient = sum(parameter.grad is not None for parameter, _, _ in self._saved)
        touched = 0 if self._watch is None else self._watch.num_touched()
        if touched or with_gradient < max(self._with_gradient, int(backward_ran)):
            raise RuntimeError(
                f"gradients were cleared or changed between waves, those of {touched or 'all'} parameters; call "
                "zero_grad() before augtree_fx.prefill, clip and unscale after the block"
            )
        self._with_gradient = with_gradient

    def wave_tokens(self, memory: Memory) -> int:
        """Packed tokens of a wave in a budget of memory, the same on all ranks that shard the model.

        Raises:
            ValueError: the budget does not hold the prompts and a wave, or cannot be known.
        """
        seen = footprint(self.stack, self.state, self.idle)
        wide, narrow = accumulation_dtype(self.dtype).itemsize, self.dtype.itemsize
        config: Any = self.stack.config
        around = Surroundings(
            gradients=missing_gradients(self.model) if self.with_grad else 0,
            gathered=gathered_parameters(self.stack, self.groups),
            head_token=config.vocab_size * (2 * narrow + HEAD_COPIES * wide),
            head_tokens=HEAD_TOKENS,
        )

        def chosen(extent: Extent) -> WaveBudget:
            there = budget_bytes(memory, self.layout.device, PREFILL_SHARE)
            return choose_waves(there, seen, extent, around, kept=self.dormant == "keep")

        lanes = self.state.lanes
        try:
            if lanes is None:
                self.state.budget = chosen(Extent.of(self.layout))
                most = self.state.budget.max_tokens
            else:
                whole = lanes.whole.plan
                if may_move_queries(whole):
                    around = replace(around, moving_token=moving_token(config, self.dtype))
                extent = lane_extent(whole, self.layout, lanes.min_chunk_tokens)
                (most,), self.state.budget = agreed_limits([whole], lanes.host, lambda: chosen(extent))
        except ValueError:
            smallest(0, self.groups)  # or the others would wait
            raise
        assert most is not None, "only a drop-in forward runs everything at once"
        fewest = smallest(most, self.groups)
        if not fewest:
            raise ValueError(f"memory={memory!r} does not hold the prompts and a wave of another rank; give more")
        return fewest

    def planned_tokens(self) -> int | None:
        """The same by the planner that `transform` was given; ``None`` without one, or where all fit at once."""
        lanes, planned = self.state.lanes, self.state.planned
        if lanes is None:
            return None if planned is None else planned.wave_tokens(self.layout)
        if not isinstance(lanes.choose, PlannedLanes):
            return None
        return lanes.choose.wave_tokens_of_all(self.layout, lanes.num_ranks)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.stack.parameters()).dtype

    def tokens_of(self, nodes: IntArray) -> IntArray:
        """Packed tokens of nodes."""
        return token_index(self.layout, nodes)

    def forward(self, nodes: IntArray, stage: ComputedStage | None, kept: Shelf | None = None) -> Part:
        """Compute nodes below a stage; K and V of their tokens, of this rank's under a mesh, go on a shelf."""
        if stage is None:
            self._entered = self._autocast()
        elif len(stage.nodes) and self._autocast() != self._entered and stage.again is None:
            raise RuntimeError("prompts and branches must run under one autocast; enter it before augtree_fx.prefill")
        above = stage.nodes if stage is not None else np.empty(0, dtype=np.int64)
        part = part_of(self.layout, np.concatenate([above, nodes]))
        prompts = Shelf(stage.prompts) if stage is not None and len(above) else None
        lanes = self.state.lanes
        if lanes is None:
            return Part(self.tokens_of(nodes), self._run(part, len(above), prompts, kept))
        path = () if stage is None else tuple(each.shards for each in stage.path()[::-1] if each.shards is not None)
        shards = Shards.of(part, lanes.num_ranks, min_chunk_tokens=lanes.min_chunk_tokens, above=path)
        self._lengths = (shards.share, shards.base + shards.share)
        arguments = wave_arguments(self.stack, self.state, lanes.whole, shards, prompts, kept)
        hidden = self._call(arguments, kept)
        tokens = shards.tokens(lanes.host.rank)
        number = int((tokens >= 0).sum())  # padding is at the end
        everywhere = np.concatenate([self.tokens_of(above), self.tokens_of(nodes)])
        return Part(everywhere[tokens[:number]], hidden[:number], shards)

    def idle(self, num_tokens: int = 1, kept: Shelf | None = None) -> Tensor:
        """Hidden states ``[num_tokens, hidden size]`` of tokens that nobody sees."""
        return self._run(idle_layout(num_tokens, self.layout.device), 0, None, kept)

    def _run(self, part: TreeLayout, first_node: int, prompts: Shelf | None, kept: Shelf | None) -> Tensor:
        context = replace(make_context(part, self.state, first_node), prompts=prompts, kept=kept)
        self._lengths = (part.num_tokens - int(part.offset[first_node]),)
        return self._call(packed_arguments(self.stack, self.state, part, context, first_node), kept)

    def _call(self, arguments: dict[str, Any], kept: Shelf | None) -> Tensor:
        hidden = HiddenStates(arguments[CONTEXT])
        self.model(**{**arguments, CONTEXT: hidden})
        if kept is not None:
            kept.full = True
        (self.outputs,) = hidden.outputs
        found = hidden.found[0]
        if self._sharded and found.requires_grad:
            found.register_hook(lambda _: _gather_parameters(self._sharded))
        return found[0]

    def agree_on_batch(self, predictions: Predictions, *, memory: Memory | None) -> None:
        """Under a mesh: raise RuntimeError unless all ranks run one layout, scored alike, with the same settings."""
        if self.state.lanes is not None:
            batch = described(self.stack, self.state, self.state.lanes, self.layout)
            scored = digest(predictions.row, predictions.index)
            waves = "tokens" if memory is None else f"memory={memory!r}"
            self.agree(
                "a prefill",
                {**batch, "scored tokens": scored, "activations": self.dormant, "waves are sized by": waves},
            )

    def agree(self, what: str, described: dict[str, Any]) -> None:
        """Under a mesh: raise RuntimeError unless all ranks say the same."""
        if self.state.lanes is not None:
            self.state.lanes.host.agree(what, described)

    def compute(
        self, nodes: IntArray, above: ComputedStage | None, predictions: Predictions, *, idle: bool = False
    ) -> ComputedStage:
        """Compute nodes and keep their graph; without nodes, a stage of no token.

        Args:
            nodes: node numbers.
            above: the stage that they continue.
            predictions: of the batch.
            idle: run a forward, and later a backward, without nodes too.

        Raises:
            NotImplementedError: a layer's K and V are cut off from the graph (reentrant checkpointing).
        """
        outer = above.nodes if above is not None else nodes[:0]
        tokens = self.tokens_of(nodes)
        if not len(nodes) and not idle:
            nothing = torch.empty(0)
            return ComputedStage(nodes, tokens, above, {}, {}, tokens, nothing, nothing)
        computed: list[Part] = []  # the same ones when it is computed again

        def run(kept: Shelf) -> tuple[Tensor, dict[Place, tuple[Tensor, ...]]]:
            if idle:
                return self.idle()[:0], {}
            part = self.forward(nodes, above, kept)
            refuse_cut_off(kept.items, part.hidden)
            computed[:] = [replace(part, hidden=part.hidden[:0])]
            return part.pick(predictions.sources_among(part.tokens)), kept.items

        recompute = self.dormant == "recompute" and self.with_grad
        shelf = Shelf()
        offload = self._offload(shelf) if self.dormant == "offload" and self.with_grad else None
        with torch.no_grad() if recompute else nullcontext() if offload is None else offload.hooks():
            picked, kept = run(shelf)
        leaf = picked.detach().to(accumulation_dtype(picked.dtype)).requires_grad_(recompute or picked.requires_grad)
        outer_prompts = {} if above is None else above.prompts
        prompts = {place: leaves_of(x, outer_prompts.get(place), always=recompute) for place, x in kept.items()}
        if above is not None and not idle:
            above.lie_in(prompts)
        arrivals = watched([leaf, *(handle for each in prompts.values() for handle in each.handles)])
        own = {} if recompute else kept
        sources = predictions.sources_among(computed[0].tokens if computed else tokens[:0])
        stage = ComputedStage(
            np.concatenate([outer, nodes]), tokens, above, prompts, own, sources, picked, leaf, arrivals,
            in_step=bool(self.groups) or self.state.lanes is not None, offload=offload,
            shards=computed[0].shards if computed else None,
        )  # fmt: skip
        if recompute:
            autocast = self._autocast()

            def again() -> tuple[Tensor, dict[Place, tuple[Tensor, ...]]]:
                with torch.enable_grad(), torch.autocast(autocast[0], dtype=autocast[2], enabled=autocast[1]):
                    return run(Shelf())

            stage.again = again
        return stage

    def _autocast(self) -> tuple[str, bool, torch.dtype]:
        kind = self.layout.device.type
        return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def _offload(self, shelf: Shelf) -> Offload:
        """Keeps what autograd saves on the host: not weights, nor K and V, which stay on the device anyway."""

        def weights() -> set[int]:
            return {x.untyped_storage()._cdata for x in map(local, (*self.model.parameters(), *self.model.buffers()))}

        always = weights()

        def stays(tensor: Tensor) -> bool:
            number = tensor.untyped_storage()._cdata
            if number in always or number in (x.untyped_storage()._cdata for kv in shelf.items.values() for x in kv):
                return True
            # FSDP2 frees gathered weights without asking: what has no dim of tokens, and what is a parameter now.
            of_tokens = any(length in tensor.shape for length in self._lengths)
            return bool(self.groups) and (not of_tokens or number in weights())

        offload = Offload(CudaMover(), stays, len(named_layers(self.stack)))
        self._offloads.append(offload)
        return offload

    def head(self, hidden: Tensor) -> Any:
        """What the model makes of hidden states ``[n, hidden size]``: its outputs for a row of n tokens."""
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        return self.model(input_ids=ids, use_cache=False, **{CONTEXT: GivenHidden(hidden[None], self.outputs)})


def _sharded_around(model: nn.Module, stack: nn.Module) -> list[nn.Module]:
    """Modules around the stack, itself included, whose parameters FSDP2 shards.

    It gathers them again when a module's outputs get a gradient; those of a part's forward get none, its hidden states
    do.
    """
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [
        module
        for module in model.modules()
        if isinstance(module, FSDPModule) and any(inner is stack for inner in module.modules())
    ]


def _gather_parameters(modules: list[Any]) -> None:
    for module in modules:
        module.unshard()
