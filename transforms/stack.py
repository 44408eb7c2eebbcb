"""The decoder stack's forward: detect the tree, pack the batch, run the ORIGINAL forward, show the result row by row.

What cannot be shared exactly raises, or runs the original forward and says so once, in the log and in `explain`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import get_process_group_ranks
from transformers import PreTrainedModel

from augtree_fx.dtensor_ops.lanes import Division, Lanes
from augtree_fx.layout import TreeLayout
from augtree_fx.lockstep import give_up, groups_of, pad_to_all
from augtree_fx.memory import budget_bytes
from augtree_fx.recorder import Phase, Recorder
from augtree_fx.transforms import parallel
from augtree_fx.transforms.context import GivenHidden, HiddenStates, ReplayContext
from augtree_fx.transforms.counts import num_tokens_of, prompt_tokens_of
from augtree_fx.transforms.footprint import Footprint, footprint
from augtree_fx.transforms.in_waves import run_beside
from augtree_fx.transforms.lane_budget import agreed_limits, lane_extent, may_move_queries
from augtree_fx.transforms.packing import PackedCall, Parts, embedded_arguments, idle_forward, pack_layout, show_rows
from augtree_fx.transforms.positions import call_packed
from augtree_fx.transforms.requests import PACKING, REPLACED, Unshared, decide, has_cache, refuse_waves, token_inputs
from augtree_fx.transforms.skeleton import CONTEXT
from augtree_fx.transforms.state import StackState
from augtree_fx.transforms.wave_budget import (
    FORWARD_SHARE,
    Extent,
    Surroundings,
    WaveBudget,
    choose_waves,
    gathered_parameters,
    missing_gradients,
    moving_token,
)
from augtree_fx.waves import Stage, branch_tokens, plan_waves

logger = logging.getLogger("augtree_fx")


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
    if state.recorder is not None and not torch.compiler.is_compiling():
        return _run_timed(stack, state, state.recorder, original, given)
    return _run(stack, state, original, given)


def _run_timed(
    stack: nn.Module, state: StackState, recorder: Recorder, original: Callable[..., Any], given: dict[str, Any]
) -> Any:
    context = given.get(CONTEXT)
    if isinstance(context, GivenHidden):
        return _run(stack, state, original, given)
    recorder.begin(checkpointing=stack.training and getattr(stack, "is_gradient_checkpointing", False))
    if isinstance(context, ReplayContext):  # packed before
        given = {**given, CONTEXT: replace(context, recorder=recorder)}
        recorder.last.schedule = None if context.lane is None else context.lane.schedule
    before = recorder.last.spans[Phase.PACKING]
    with recorder.span(Phase.FORWARD):
        outputs = _run(stack, state, original, given)
    if before:  # packing came first, and is no part of forward
        forward = recorder.last.spans[Phase.FORWARD]
        forward[-1] = (before[-1][1], forward[-1][1])
    recorder.watch_backward(context.found[-1] if isinstance(context, HiddenStates) else outputs[0])
    return outputs


def _run(stack: nn.Module, state: StackState, original: Callable[..., Any], given: dict[str, Any]) -> Any:
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
    packed, beside = pack(stack, state, original, given, compiled=torch.compiler.is_compiling())
    if packed is not None and packed.parts is not None:
        return _run_parts(stack, state, original, packed)
    if packed is None:
        outputs = original(stack, **given)
    else:
        outputs = packed.show(call_packed(stack, state.positions, original, packed.arguments))
    return outputs if beside is None else _run_beside(stack, state, original, outputs, beside)


@torch.compiler.disable(recursive=False)
def _run_parts(stack: nn.Module, state: StackState, original: Callable[..., Any], packed: PackedCall) -> Any:
    assert packed.parts is not None
    outputs, index, num_tokens = packed.parts.run(stack, state, original)
    return show_rows(outputs, index, packed.shape, num_tokens, packed.group)


@torch.compiler.disable(recursive=False)
def _run_beside(stack: nn.Module, state: StackState, original: Callable[..., Any], outputs: Any, plan: Stage) -> Any:
    return run_beside(outputs, plan, idle_forward(stack, state, original, outputs[0].device))


@torch.compiler.disable
def pack(
    stack: nn.Module, state: StackState, original: Callable[..., Any], given: dict[str, Any], *, compiled: bool
) -> tuple[PackedCall | None, Stage | None]:
    """The packed call of a batch, or ``None`` for the original forward. The one break of a compiled model.

    Also what other ranks run in waves meanwhile, where that is more than this rank does.
    """
    if state.recorder is None:
        return _pack_now(stack, state, original, given, compiled)
    with state.recorder.span(Phase.PACKING):
        packed = _pack_now(stack, state, original, given, compiled)
    if packed[0] is None:
        return packed
    parts, context = packed[0].parts, packed[0].arguments.get(CONTEXT)
    state.recorder.last.waves = 0 if parts is None else sum(len(nodes) > 0 for nodes in parts.plan.walk())
    if context is not None and context.lane is not None:
        state.recorder.last.schedule = context.lane.schedule
    return packed


def _pack_now(
    stack: nn.Module, state: StackState, original: Callable[..., Any], given: dict[str, Any], compiled: bool
) -> tuple[PackedCall | None, Stage | None]:
    in_waves = _may_wave(state) and not has_cache(given)
    groups = groups_of(stack) if in_waves else []
    in_step = bool(groups)
    if groups and state.memory is not None:
        _footprint(stack, state, original)  # on all ranks at once, also those whose batch asks for none
    if state.lanes is not None:  # ranks of the axis know each other's plans
        groups = [group for group in groups if not set(get_process_group_ranks(group)) <= set(state.lanes.host.ranks)]
    num_counted = state.counts.batches
    try:
        if state.lanes is not None:
            packed = _pack_for_lanes(stack, state, original, state.lanes, given, compiled, in_step)
        else:
            packed = _pack(stack, state, original, given, groups)
        if packed is None and state.counts.batches == num_counted and not has_cache(given):
            state.counts.add_rows(num_tokens_of(given))  # refused before its rows were read
    except Exception:  # also what a caller's function raises that chooses lanes
        give_up(groups)
        raise
    if not in_waves:
        return packed, None
    plan = Stage(np.zeros(1, dtype=np.int64)) if packed is None or packed.parts is None else packed.parts.plan
    pad_to_all(plan, groups)
    return packed, plan if plan.waves or plan.inner else None


def _may_wave(state: StackState) -> bool:
    """Whether some batch goes through waves, whatever the one at hand does."""
    if state.lanes is not None and state.lanes.may_wave:
        return True
    return (state.max_wave_tokens or state.memory or state.planned) is not None


def _pack(
    stack: nn.Module, state: StackState, original: Callable[..., Any], given: dict[str, Any], groups: list[Any]
) -> PackedCall | None:
    try:
        given, tokens = token_inputs(state, stack, given)
        layout = decide(stack, state, given, tokens)
        if state.recorder is not None:
            state.recorder.last.layout = layout
    except Unshared as reason:
        _note(state, str(reason))
        return None
    max_tokens = state.max_wave_tokens
    if state.memory is not None:
        max_tokens = _chosen(stack, state, original, layout, groups)
    elif state.planned is not None:
        max_tokens = state.planned.wave_tokens(layout)
    waves = max_tokens is not None and branch_tokens(layout) > max_tokens
    if waves:
        try:
            refuse_waves(stack, state, layout)
        except NotImplementedError as error:
            if state.strict:
                raise
            _note(state, str(error))
            return None
    state.num_shared += 1
    prompts = prompt_tokens_of(layout, state.prompt_columns)
    extras = {name: value for name, value in given.items() if name not in (*REPLACED, *PACKING)}
    if waves:
        index = torch.from_numpy(layout.packed_index)
        plan = plan_waves(layout, max_tokens)
        state.counts.add_shared(layout, layout.num_tokens, len(list(plan.walk())), prompts)
        parts = Parts(plan, layout, tokens, extras)
        return PackedCall({}, index, layout.shape, layout.num_tokens, parts)
    state.counts.add_shared(layout, layout.num_tokens, 0, prompts)
    call = pack_layout(stack, state, layout)
    arguments = call.arguments if tokens is None else embedded_arguments(call.arguments, tokens, layout)
    return replace(call, arguments=extras | arguments)


def _pack_for_lanes(
    stack: nn.Module, state: StackState, original: Callable[..., Any], lanes: Lanes, given: dict[str, Any],
    compiled: bool, in_step: bool,
) -> PackedCall | None:  # fmt: skip
    def limits(division: Division, num_slots: int) -> list[int | None]:
        return _lane_limits(stack, state, original, lanes, division, num_slots)

    limits_of = None if state.memory is None else limits
    try:
        call = parallel.pack_rows(stack, state, lanes, given, compiled=compiled, in_step=in_step, limits_of=limits_of)
    except Unshared as reason:
        _note(state, str(reason))
        return None
    state.num_shared += 1
    extras = {name: value for name, value in given.items() if name not in (*REPLACED, *PACKING)}
    if call.parts is not None:
        return replace(call, parts=replace(call.parts, extras=extras))
    return replace(call, arguments=extras | call.arguments)


def _chosen(
    stack: nn.Module, state: StackState, original: Callable[..., Any], layout: TreeLayout, groups: list[Any]
) -> int | None:
    """Packed tokens of a wave in the budget of memory; ``None`` where all of them fit into one forward."""
    num_outputs = layout.num_tokens + len(layout.packed_index)  # packed, and in rows
    state.budget = _budget(stack, state, original, layout, Extent.of(layout), num_outputs, groups)
    return state.budget.max_tokens


def _lane_limits(
    stack: nn.Module, state: StackState, original: Callable[..., Any], lanes: Lanes, division: Division, num_slots: int
) -> list[int | None]:
    """``[lanes]`` packed tokens of a wave in the budgets of their ranks; ``None`` where all fit into one forward."""
    plan, tree = division.lane.plan, division.trees[division.number]

    def choose() -> WaveBudget:
        extent = lane_extent(plan, tree, division.min_chunk_tokens)
        num_outputs = extent.computed * (1 + lanes.num_ranks) + num_slots  # own, gathered, and in rows
        return _budget(
            stack, state, original, tree, extent, num_outputs, groups_of(stack), moves=may_move_queries(plan)
        )

    limits, state.budget = agreed_limits(division.plans, lanes.host, choose)
    return limits


def _budget(
    stack: nn.Module, state: StackState, original: Callable[..., Any], layout: TreeLayout, extent: Extent,
    num_outputs: int, groups: list[Any], *, moves: bool = False,
) -> WaveBudget:  # fmt: skip
    assert state.memory is not None
    memory = budget_bytes(state.memory, layout.device, FORWARD_SHARE)
    seen = _footprint(stack, state, original)
    around = Surroundings(
        missing_gradients(stack),
        gathered_parameters(stack, groups),
        int(2 * seen.hidden * num_outputs),  # with gradients
        moving_token=moving_token(stack.config, next(stack.parameters()).dtype) if moves else 0.0,
    )
    return choose_waves(memory, seen, extent, around, whole=True)


def _footprint(stack: nn.Module, state: StackState, original: Callable[..., Any]) -> Footprint:
    embeddings: Any = stack.get_input_embeddings
    return footprint(stack, state, idle_forward(stack, state, original, embeddings().weight.device))


def _note(state: StackState, reason: str) -> None:
    if not reason:
        return
    if reason not in state.fallbacks:
        logger.warning("augtree-fx: the original forward runs: %s", reason)
    state.fallbacks[reason] = state.fallbacks.get(reason, 0) + 1
