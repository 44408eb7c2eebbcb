"""`transform` and `restore`: the two verbs most users need."""

from __future__ import annotations

import logging
from functools import partial
from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from augtree_fx import kernels
from augtree_fx.costs import CostModel
from augtree_fx.dtensor_ops.agreement import HostGroup
from augtree_fx.dtensor_ops.lanes import Choose, Lanes, one_lane
from augtree_fx.dtensor_ops.schedules import SCHEDULES
from augtree_fx.layout import TreeLayout
from augtree_fx.memory import Memory, check_memory
from augtree_fx.planned import PlannedLanes
from augtree_fx.planner import Planner
from augtree_fx.transforms import (
    Refusal,
    StackState,
    capture_stack,
    find_stack,
    install,
    is_installed,
    parallel,
    uninstall,
)
from augtree_fx.transforms.install import STATE
from augtree_fx.transforms.packing import PackedCall, pack_layout
from augtree_fx.transforms.parallel import ROWS
from augtree_fx.transforms.positions import position_rule
from augtree_fx.transforms.recurrent import mixer_sites
from augtree_fx.waves import check_max_tokens

logger = logging.getLogger("augtree_fx")

Model = TypeVar("Model", bound=nn.Module)


class RewriteError(NotImplementedError):
    """The model has an attention site that cannot be rewritten; ``refusals`` says which and why."""

    def __init__(self, model: nn.Module, refusals: list[Refusal]) -> None:
        self.refusals = refusals
        shown = "\n".join(f"  {refusal}" for refusal in refusals[:8])
        more = f"\n  and {len(refusals) - 8} more" if len(refusals) > 8 else ""
        super().__init__(
            f"{type(model).__name__} cannot be transformed, {len(refusals)} refusals:\n{shown}{more}\n"
            "Pass strict=False to leave such a model unchanged."
        )


def transform(
    model: Model,
    *,
    kernel: str = "auto",
    costs: CostModel | None = None,
    strict: bool = True,
    max_wave_tokens: int | None = None,
    memory: Memory | None = None,
    mesh: DeviceMesh | None = None,
    rows: str = "replicated",
    schedule: str | None = None,
    lanes: Choose | None = None,
    planner: Planner | None = None,
) -> Model:
    """Rewrite a Hugging Face decoder in place so that what rows of a batch share is computed once, differentiably.

    Call it on the model itself, before `torch.compile`, DDP or FSDP; PEFT adapters may come before or after.
    Losses, heads and trainers stay as they are. Calling it again applies new settings.

    Args:
        model: a causal LM, reward or value model of transformers, or its decoder; also wrapped by PEFT or DDP.
        kernel: ``"auto"``, or one of ``"flash_attn_3"``, ``"cudnn"``, ``"aten_flash"``, ``"flash_attn_2"``,
            ``"cpu_flash"``, ``"reference"``, which then runs or raises.
        costs: what a shared run of tokens must save to be worth an attention piece; by default estimated from the
            size of a layer and the device. `CostModel.free()` shares whatever can be shared.
        strict: raise on a decoder or a batch that cannot be shared exactly. With ``False`` the decoder is left
            unchanged, or the original forward runs, and the log says so once.
        max_wave_tokens: for groups larger than memory: branches go through the layers in waves of so many packed
            tokens, under checkpointing, and come back in one tensor; backward computes one wave after another again.
            ``None`` computes all of them at once. Under a mesh the tokens of all ranks count, each lane has its ranks'
            share of them, and goes through waves of its own. `prefill` gives a loop over waves instead, and computes
            none twice. Under FSDP2 ranks tell one another how many waves they have,
            and run as many forwards as the longest.
        memory: instead of that, what a forward and its backward may allocate in the decoder: a number of bytes, a
            string like ``"40GiB"``, or ``"auto"`` for half of what is free on a CUDA device. The caller's own, logits
            say, has to fit beside it. Branches go through waves only where they do not fit at once. Neither applies to
            a batch that shares nothing: its original forward runs. Under a mesh all ranks give the same, for each of
            them; of what ``"auto"`` finds on the ranks of a lane, the least counts.
        mesh: one axis of a device mesh, for context parallelism: its ranks call forward together, build one tree, and
            each computes a share of its tokens. Every rank transforms its own copy of the model. Gradients of
            parameters are then to be averaged over the axis, as in data parallelism.
        rows: ``"replicated"``, every rank of the axis passes the same rows, or ``"pooled"``, each passes its own and
            gets just those back, what rows of any rank share being computed once; a rank may have none. A pooled
            forward that asks for a KV cache is each rank's own, as ranks generate different numbers of tokens.
        schedule: who moves between ranks: ``"rotate_kv"``, ``"move_q"`` or ``"gather_kv"``, in lanes
            that do not say it; ``None`` for `dtensor_ops.lanes.one_pass_schedule`, and `wave_schedule` in waves.
        lanes: chooses `LanePlan` for a batch's tree and a number of ranks; by default all ranks are one lane. A lane
            may have waves of its own size.
        planner: chooses lanes, schedules and waves instead, a plan for each bucket of batches; without a mesh waves
            alone. `Execution` says what else is in a rank's memory.

    Returns:
        The same object.

    Raises:
        TypeError: not a transformers model, or already compiled.
        ValueError: ``kernel``, ``rows`` or ``schedule`` is unknown, ``max_wave_tokens`` is below 1 or given along with
            ``memory``, which cannot be read, ``mesh`` has several axes, or the model has no list of decoder layers.
        NotImplementedError: an encoder-decoder model, or (`RewriteError`, with ``.refusals``) an attention site that
            cannot be rewritten. The model is left as it was.
    """
    if kernel not in kernels.NAMES:
        raise ValueError(f"kernel must be one of {', '.join(kernels.NAMES)}, got {kernel!r}")
    check_max_tokens("max_wave_tokens", max_wave_tokens)
    check_memory(memory, max_wave_tokens)
    if planner is not None and any(each is not None for each in (lanes, schedule, max_wave_tokens, memory)):
        raise ValueError(
            "a planner chooses lanes, schedules and waves; pass none of lanes=, schedule=, max_wave_tokens= and memory="
        )
    if mesh is None and (rows != "replicated" or schedule is not None or lanes is not None):
        raise ValueError(f"rows={rows!r}, schedule={schedule!r} and lanes={lanes!r} are of ranks; pass mesh= with them")
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise TypeError("the model is compiled already; call augtree_fx.transform(model) first, torch.compile second")
    stack = find_stack(model)
    sites, refusals = capture_stack(stack)
    if refusals:
        error = RewriteError(model, refusals)
        if strict:
            raise error
        logger.warning("augtree-fx: left unchanged: %s", error)
        return model
    planned = None if planner is None else PlannedLanes.of(planner, model)
    state = StackState(
        tuple(sites), kernel, strict, costs, positions=position_rule(stack), mixers=mixer_sites(stack),
        max_wave_tokens=max_wave_tokens, memory=memory,
        lanes=None if mesh is None else _lanes(mesh, rows, schedule, planned or lanes),
        planned=planned if mesh is None else None,
    )  # fmt: skip
    if is_installed(stack):
        uninstall(stack)
    install(stack, sites, state)
    return model


def _lanes(mesh: DeviceMesh, rows: str, schedule: str | None, choose: Choose | None) -> Lanes:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be one axis of a DeviceMesh, got {type(mesh).__name__}; pass mesh['cp']")
    if mesh.ndim != 1:
        raise ValueError(f"mesh must be one axis of a mesh, got {mesh.ndim} axes; pass mesh['cp']")
    if rows not in ROWS:
        raise ValueError(f"rows must be one of {', '.join(ROWS)}, got {rows!r}")
    if schedule is not None and schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    return Lanes(HostGroup(mesh.get_group()), rows, choose or partial(one_lane, schedule=schedule), schedule)


def pack(model: nn.Module, layout: TreeLayout, *, pad_to_multiple_of: int = 1) -> PackedCall:
    """A batch of an explicit layout as a transformed model takes it: detection and packing happen here, not in forward.

    ``out = model(**packed.arguments)`` has ``[1, T, ...]`` logits or hidden states of the T packed tokens, and
    ``packed.show(out)`` is what the model itself would return for the rows. With it a compiled model is one graph:
    ``torch.compile(model, fullgraph=True)``.

    It is one forward, whatever `transform` was told of waves and memory; `prefill` cuts a layout. On a mesh every rank
    passes the same layout and has the tokens of its share; keys and values travel, never what they follow from
    (multi-head latent attention).

    Args:
        model: a transformed model; also wrapped by PEFT, DDP or torch.compile.
        layout: of the batch, on the model's device.
        pad_to_multiple_of: compute tokens that no row shows until T is a multiple of this. With
            ``mode="reduce-overhead"`` a CUDA graph is recorded for each T, so there should be few.

    Raises:
        ValueError: the model is not transformed, the layout is on another device, or ``pad_to_multiple_of`` is below 1.
        RuntimeError: attention settings changed since `transform`, or ranks of a mesh differ in layout or settings.
    """
    stack = find_stack(model)
    if not is_installed(stack):
        raise ValueError(f"{type(model).__name__} is not transformed; augtree_fx.transform(model) does that")
    state, layout = getattr(stack, STATE), layout.padded_to_multiple_of(pad_to_multiple_of)
    if state.lanes is not None:
        return parallel.pack_layout(stack, state, state.lanes, layout)
    return pack_layout(stack, state, layout)


def restore(model: Model) -> Model:
    """Undo `transform`, in place: classes and attributes are what they were.

    Raises:
        ValueError: the model is not transformed.
        RuntimeError: a batch of it is being computed in waves.
    """
    stack = find_stack(model)
    if not is_installed(stack):
        raise ValueError(f"{type(model).__name__} is not transformed; augtree_fx.transform(model) does that")
    if getattr(stack, STATE).in_waves:
        raise RuntimeError("an augtree_fx.prefill of this model is open; leave its block first")
    uninstall(stack)
    return model
