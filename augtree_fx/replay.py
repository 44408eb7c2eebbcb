"""Prompts once, then their branches wave by wave: one wave is alive at a time, whatever the size of the group.

with augtree_fx.prefill(model, layout) as tree:     prompts forward, their graph is kept
    for wave in tree.waves(max_tokens=16_384):      branches forward, on K and V of the prompts as leaves
        loss_of(wave).backward()                    frees the wave; dK and dV of the prompts add up
                                                    leaving: one backward through the prompts' graph
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from types import TracebackType

import numpy as np
import torch
from torch import Tensor, nn

from augtree_fx.computed_stage import ComputedStage
from augtree_fx.layout import TreeLayout
from augtree_fx.lockstep import pad_to_all
from augtree_fx.memory import Memory, check_memory
from augtree_fx.predictions import Predictions, scored_slots
from augtree_fx.prompt_chunks import split_prompts
from augtree_fx.stages import DORMANT, StageRunner
from augtree_fx.transforms import find_stack, is_installed
from augtree_fx.transforms.install import STATE
from augtree_fx.trie import IntArray
from augtree_fx.wave import Wave
from augtree_fx.waves import Stage, check_max_tokens, plan_waves

ON_UNUSED = ("error", "skip")


def _prompts_of(layout: TreeLayout) -> IntArray:
    """Nodes that are prompts: of level 0 with branches, or all of level 0 where prompts were declared."""
    return np.flatnonzero(layout.level == 0) if layout.declared else plan_waves(layout, None).nodes


def prefill(
    model: nn.Module,
    layout: TreeLayout,
    *,
    max_wave_tokens: int | None = None,
    memory: Memory | None = None,
    max_prompt_tokens: int | None = None,
    activations: str = "keep",
    scored: Tensor | None = None,
    on_unused: str = "error",
) -> Tree:
    """Compute the prompts of a batch now, and its branches in waves that are alive one at a time.

    Memory is that of the prompts' activations, their K and V with gradients in float32, and one wave; it does not grow
    with the number of branches. Gradients are those of the whole batch in one forward, for any cut into waves. Those
    that parameters have on entering are added on leaving: clear them before the block. Under FSDP2 each wave is a
    forward and a backward of all ranks: a rank that has fewer gets empty ones, ``len(wave) == 0``, to be used alike.
    Routers' auxiliary losses are not part of waves. On a mesh (`transform` with ``mesh``) all ranks of the axis pass
    the same layout, a wave is that of all of them, and each has the scored tokens that its own tokens predict: the sum
    of losses over waves and ranks is the batch's, and so is the sum of parameters' gradients over ranks. Where those
    are averaged (DDP, FSDP2), multiply each loss by the number of ranks.

    Args:
        model: a transformed model; also wrapped by PEFT, FSDP2 or torch.compile.
        layout: the batch, on the model's device; `TreeLayout.from_groups`, `.from_padded` or `.from_packed`.
        max_wave_tokens: packed tokens of a wave (under a mesh of all ranks), unless `Tree.waves` says otherwise;
            ``None`` for what the ``planner`` of `transform` says, or one wave.
        memory: choose that from what prompts and waves may allocate: a number of bytes, a string like ``"40GiB"``, or
            ``"auto"`` for most of what is free on a CUDA device. What the loss itself takes, `Wave.logits` say, has to
            fit beside it; the head's chunks of `Wave.logprobs` are in it. ``explain`` says what was chosen, and why.
            Under a mesh all ranks give the same, for each of them; of what ``"auto"`` finds on them, the least counts.
        max_prompt_tokens: compute longer prompts in chunks of so many tokens, one after another.
        activations: of prompts, until their backward: ``"keep"`` them; ``"recompute"`` them then, one chunk at a time,
            so that besides K and V only one chunk of a prompt is ever alive; ``"offload"`` them to pinned host memory.
        scored: ``layout.shape``, non-zero at tokens whose log-probs are wanted. By default all tokens but the first of
            each row and those of prompts: of nodes at level 0 that have branches, all of them in `from_groups`.
        on_unused: what to do about a wave without a backward, or waves that are left over: ``"error"``, or ``"skip"``,
            then they count as waves without a loss.

    Returns:
        A context manager; prompts are computed on entering it. Leaving it runs the backward through the prompts. After
        an exception nothing is left: the parameters' gradients are what they were before.

    Raises:
        TypeError: ``layout`` is no layout, or ``scored`` no tensor.
        ValueError: the model is not transformed, ``scored`` has another shape, ``on_unused`` or ``activations`` is
            unknown, a number of tokens is below 1, or ``memory`` cannot be read, is given with ``max_wave_tokens``, or
            (on entering) does not hold the prompts and a wave.
        NotImplementedError: what the model's layers or wrappers do cannot be cut into waves.
    """
    if not isinstance(layout, TreeLayout):
        raise TypeError(f"layout must be a TreeLayout, got {type(layout).__name__}; TreeLayout.from_padded makes one")
    if scored is not None and not isinstance(scored, Tensor):
        raise TypeError(f"scored must be a tensor of the batch's shape, got {type(scored).__name__}")
    stack = find_stack(model)
    if not is_installed(stack):
        raise ValueError(f"{type(model).__name__} is not transformed; augtree_fx.transform(model) does that")
    if on_unused not in ON_UNUSED:
        raise ValueError(f"on_unused must be one of {', '.join(ON_UNUSED)}, got {on_unused!r}")
    if activations not in DORMANT:
        raise ValueError(f"activations must be one of {', '.join(DORMANT)}, got {activations!r}")
    check_max_tokens("max_wave_tokens", max_wave_tokens)
    check_memory(memory, max_wave_tokens)
    check_max_tokens("max_prompt_tokens", max_prompt_tokens)
    if any(type(module).__name__.endswith("ForSequenceClassification") for module in model.modules()):
        raise NotImplementedError(
            f"{type(model).__name__} reads one token of each row; pass its decoder, model.base_model, and apply the "
            "head to wave.hidden_states()"
        )
    if isinstance(getattr(model, "_orig_mod", model), nn.parallel.DistributedDataParallel):
        raise NotImplementedError(
            "DistributedDataParallel expects one backward a forward; pass model.module and average the gradients after "
            "the block, or use FSDP2"
        )
    slots = scored_slots(layout, scored, _prompts_of(layout))
    split, chunks = split_prompts(layout, max_prompt_tokens or max(layout.num_tokens, 1))
    runner = StageRunner(model, stack, getattr(stack, STATE), split, dormant=activations)
    return Tree(runner, chunks, max_wave_tokens, memory, Predictions.of(split, slots), on_unused)


class Tree:
    """A batch whose prompts are computed; made by `prefill`, and entered once."""

    def __init__(
        self,
        runner: StageRunner,
        chunks: IntArray,
        max_wave_tokens: int | None,
        memory: Memory | None,
        predictions: Predictions,
        on_unused: str,
    ) -> None:
        self.layout = runner.layout
        self._runner, self._on_unused = runner, on_unused
        self._max_wave_tokens, self._memory = max_wave_tokens, memory
        self._prompts = plan_waves(runner.layout, None).nodes
        self._chunks, self._predictions = chunks, predictions
        self._root: ComputedStage | None = None
        self._open: list[ComputedStage] = []
        self._wave: Wave | None = None
        self._running: Generator[Wave, None, None] | None = None
        self._state = "new"  # then "entered", "started", "finished", "closed"

    def __enter__(self) -> Tree:
        if self._state != "new":
            raise RuntimeError("a tree is entered once; call augtree_fx.prefill again for another forward")
        self._runner.begin()
        try:
            self._runner.agree_on_batch(self._predictions, memory=self._memory)
            if self._memory is not None:
                self._max_wave_tokens = self._runner.wave_tokens(self._memory)
            elif self._max_wave_tokens is None:
                self._max_wave_tokens = self._runner.planned_tokens()
            plan = Stage(self._prompts)
            pad_to_all(plan, self._runner.groups)
            self._root = self._runner.compute(plan.nodes, None, self._predictions, idle=plan.idle)
        except BaseException:
            self._runner.end(keep=False)
            raise
        self._open.append(self._root)
        self._state = "entered"
        return self

    def waves(self, max_tokens: int | None = None) -> Iterator[Wave]:
        """Waves of branches, longest branches first; a wave is to be used up before the next one is asked for.

        Args:
            max_tokens: packed tokens of a wave; by default what `prefill` was told, or chose.

        Raises:
            RuntimeError: outside of the block, or a second time; a wave had no backward; parameters changed.
            ValueError: ``max_tokens`` is below 1, or `prefill` was given a budget of memory.
        """
        check_memory(self._memory, max_tokens)
        check_max_tokens("max_tokens", max_tokens)
        if self._state != "entered":
            raise RuntimeError(
                "waves are taken once, inside the block: `with augtree_fx.prefill(model, layout) as tree`"
                if self._state not in ("started", "finished")
                else "tree.waves() was called already; waves of one tree are taken once"
            )
        plan = plan_waves(self.layout, self._max_wave_tokens if max_tokens is None else max_tokens, self._chunks)
        sizes = [len(self._runner.tokens_of(nodes)) for nodes in plan.walk()]
        self._runner.agree("the cut into waves", {"waves": len(sizes), "tokens of waves": sizes[:8]})
        self._state = "started"
        self._leave_out_what_is_not_scored(plan)
        pad_to_all(plan, self._runner.groups)
        self._running = self._run(plan)
        return self._until_left(self._running)

    def _until_left(self, running: Iterator[Wave]) -> Iterator[Wave]:
        yield from running
        if self._state == "closed":
            raise RuntimeError("the block of these waves was left; take all of tree.waves() inside of it")

    def _run(self, plan: Stage) -> Generator[Wave, None, None]:
        """The waves of a plan whose root is open; without recursion, as chains of chunks are deep."""
        yield from self._waves_of(plan)
        unfinished = [iter(plan.inner)]
        while unfinished:
            inner = next(unfinished[-1], None)
            if inner is None:
                unfinished.pop()
                if unfinished:  # the root goes when the block is left
                    self._open.pop().backward()
            else:
                self._runner.check_parameters()
                computed = self._runner.compute(inner.nodes, self._open[-1], self._predictions, idle=inner.idle)
                self._open.append(computed)
                yield from self._waves_of(inner)
                unfinished.append(iter(inner.inner))
        self._state = "finished"

    def _leave_out_what_is_not_scored(self, plan: Stage) -> None:
        wanted = self._predictions.scored_nodes(self.layout)
        for stage in plan.stages():
            stage.scored = len(self._predictions.inside(self._runner.tokens_of(stage.nodes))) > 0
            stage.waves = [nodes for nodes in stage.waves if wanted[nodes].any()]
            stage.inner = [inner for inner in stage.inner if wanted[inner.nodes].any()]

    def _waves_of(self, plan: Stage) -> Iterator[Wave]:
        stage = self._open[-1]
        if plan.scored:
            yield from self._hand_out(self._own_wave(stage))
        for nodes in plan.waves:
            self._runner.check_parameters()
            if self._runner.with_grad and not torch.is_grad_enabled() and self._on_unused == "error":
                raise RuntimeError(
                    "a wave was asked for under torch.no_grad(), in a block that was entered with gradients; leave "
                    "no_grad, or pass on_unused='skip' for waves without a loss"
                )
            yield from self._hand_out(self._branches(stage, nodes) if len(nodes) else self._empty(self._runner.idle()))

    def _own_wave(self, stage: ComputedStage) -> Wave:
        """What is scored inside of a stage itself."""
        predictions = self._here(stage.tokens, stage, stage.tokens[:0])
        if not len(predictions.row):
            return self._empty(torch.zeros_like(stage.hidden[:0], requires_grad=self._runner.with_grad))
        return Wave(self._runner, predictions, stage.path(), None)

    def _branches(self, stage: ComputedStage, nodes: IntArray) -> Wave:
        part = self._runner.forward(nodes, stage)
        predictions = self._here(self._runner.tokens_of(nodes), stage, part.tokens)
        return Wave(self._runner, predictions, stage.path(), (part.tokens, part.hidden))

    def _here(self, targets: IntArray, stage: ComputedStage, computed: IntArray) -> Predictions:
        """Predictions of some tokens that this rank makes: without a mesh, all of them."""
        held = np.concatenate([computed, *(each.sources for each in stage.path())])
        chosen = self._predictions.inside(targets)
        return self._predictions.take(chosen[np.isin(self._predictions.source[chosen], held)])

    def _empty(self, hidden: Tensor) -> Wave:
        """A wave of no token, whose backward runs through some hidden states as those of other ranks do."""
        nothing = self._prompts[:0]
        return Wave(self._runner, self._predictions.take(nothing), [], (nothing, hidden[:0]))

    def _hand_out(self, wave: Wave) -> Iterator[Wave]:
        self._wave = wave
        yield wave
        self._settle(wave)

    def _settle(self, wave: Wave) -> None:
        self._wave = None
        if self._on_unused == "error" and wave.wants_backward:
            raise RuntimeError(
                "a wave had no backward: call loss.backward() inside the loop over tree.waves(), or pass "
                "on_unused='skip' for waves without a loss"
            )
        if wave.misses_prompts:
            raise RuntimeError(
                "a wave's gradient did not reach the prompts: call loss.backward() without inputs, not "
                "torch.autograd.grad"
            )
        self._runner.check_parameters(wave.ran_backward and wave.num_tokens > 0)
        wave.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        completed = False
        try:
            if kind is None:
                self._finish()
                completed = True
        finally:
            self._state = "closed"
            if self._running is not None:
                self._running.close()  # its frames hold stages, and the caller may hold it
                self._running = None
            self._open.clear()
            self._root = None
            if self._wave is not None:
                self._wave.close()
            self._runner.end(keep=completed)

    def _finish(self) -> None:
        if self._wave is not None:
            self._settle(self._wave)
        grad = self._runner.with_grad
        if self._state != "finished" and self._on_unused == "error" and grad:
            raise RuntimeError(
                "waves are left over: take all of tree.waves(), or pass on_unused='skip' for branches without a loss"
            )
        self._runner.check_parameters()
        while self._open:
            self._open.pop().backward()
