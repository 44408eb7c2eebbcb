"""`measure`: how long the parts of a step took, beside what the planner predicts for the same batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tabulate import tabulate
from torch import nn

from augtree_fx.dtensor_ops import collectives
from augtree_fx.planned import PlannedLanes
from augtree_fx.planner import Lane, ModelShape, Plan, Planner, ReplayShape
from augtree_fx.planner.alternatives import alternatives, kind_of
from augtree_fx.recorder import Clock, Phase, Record, Recorder
from augtree_fx.transforms import StackState, find_stack, is_installed
from augtree_fx.transforms.install import STATE

# Rows, and the terms of a plan in each; what overlaps with computation is no time of its own.
TERMS = {
    "attention": ("prefill_attention_us", "replay_attention_us", "merge_us"),
    "communication": ("prefill_exposed_us", "exposed_us"),
    "other layers": ("linear_us", "host_us", "weights_us"),
    "head and loss": ("head_us",),
}


@dataclass(frozen=True)
class Timing:
    """One part of a step.

    Attributes:
        name: of the part.
        measured_ms: milliseconds on this rank; ``None`` if it was not seen.
        predicted_ms: by the plan; ``None`` if it has no such term, or there is no plan.
    """

    name: str
    measured_ms: float | None
    predicted_ms: float | None

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1."""
        if not self.measured_ms or self.predicted_ms is None:
            return None
        return self.predicted_ms / self.measured_ms - 1


@dataclass(frozen=True)
class Timings:
    """The last step inside of `measure`; ``print`` it.

    Attributes:
        rows: parts of the step (``attention``, ``communication``: waits alone, ``other layers``, ``head and loss``),
            then their sum as ``forward``, ``backward`` and ``step``, and the whole ``block`` with all else in it.
        note: what was compared with what, or why something is missing.
    """

    rows: tuple[Timing, ...]
    note: str

    def __getitem__(self, name: str) -> Timing:
        """A row by its name.

        Raises:
            KeyError: there is no such row.
        """
        return next((row for row in self.rows if row.name == name), None) or _no_row(name, self.rows)

    def __str__(self) -> str:
        rows = [
            (
                row.name,
                "-" if row.measured_ms is None else f"{row.measured_ms:.3f}",
                "-" if row.predicted_ms is None else f"{row.predicted_ms:.3f}",
                "" if row.error is None else f"{row.error:+.1%}",
            )
            for row in self.rows
        ]
        table = tabulate(rows, headers=("last step, ms", "measured", "predicted", "error"), disable_numparse=True)
        return f"{table}\n{self.note}"


def _no_row(name: str, rows: tuple[Timing, ...]) -> Timing:
    raise KeyError(f"timings have the rows {', '.join(row.name for row in rows)}, got {name!r}")


@contextmanager
def measure(model: nn.Module, planner: Planner | None = None) -> Iterator[None]:
    """Time the steps of a transformed model; ``explain(model).timings`` has the last one afterwards.

    Nothing waits for the device meanwhile: CUDA events are recorded, four for each attention call and two for each wait
    for other ranks. Off outside of the block. Of a compiled model only the whole block is timed. In waves of `prefill`
    the last step is the last wave. Where launches bound a step, a part takes as long as the host needs to queue it; a
    plan has all of that time in ``other layers``. ::

        with augtree_fx.measure(model, planner=augtree_fx.Planner("h200")):
            trainer_loss(model(input_ids, attention_mask)).backward()
        print(augtree_fx.explain(model).timings)

    Args:
        model: transformed; also wrapped by PEFT, DDP or torch.compile.
        planner: predicts the step; by default the one that `transform` was given, or none.

    Raises:
        ValueError: the model is not transformed, its decoder lies on several devices, it is measured already, or it has
            a planner of its own.
    """
    stack = find_stack(model)
    if not is_installed(stack):
        raise ValueError(f"{type(model).__name__} is not transformed; augtree_fx.transform(model) does that")
    state: StackState = getattr(stack, STATE)
    devices = {parameter.device for parameter in stack.parameters()}
    if len(devices) > 1:
        raise ValueError(f"one clock times a decoder on one device, got {sorted(map(str, devices))}; move it to one")
    if state.recorder is not None:
        raise ValueError(f"{type(model).__name__} is measured already; leave that block first")
    if planner is not None and _planned(state) is not None:
        raise ValueError("the model was transformed with a planner, which predicts its steps; leave out planner=")
    state.measured = recorder = Recorder(Clock.of(devices.pop()))
    state.predicts = planner
    compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
    state.recorder = None if compiled else recorder
    if state.lanes is not None and not compiled:
        collectives.watch(state.lanes.group, recorder)
    begin = recorder.clock.now()
    try:
        yield
    finally:
        recorder.block = (begin, recorder.clock.now())
        state.recorder = None
        collectives.unwatch(recorder)


def timings_of(model: nn.Module, state: StackState) -> Timings | None:
    """What `measure` saw last; ``None`` if it was never used. Waits for the device."""
    recorder = state.measured
    if recorder is None:
        return None
    record = recorder.last
    parts = measured_parts(record, recorder.clock)
    plan, note = _prediction(model, state, record)
    lane = None if plan is None else _own_lane(plan, state)
    terms = {} if lane is None else {name: sum(lane.terms[term] for term in of) / 1e3 for name, of in TERMS.items()}
    if plan is not None and plan.costs.execution.checkpointing != record.checkpointing and record.gradients:
        ran, made = ("with", "without") if record.checkpointing else ("without", "with")
        note += f"; the step ran {ran} gradient checkpointing, the plan was made {made} it"
    names = ("packing", *TERMS, "forward", "backward", "step")
    whole = {} if lane is None else {"step": lane.total_us / 1e3}
    rows = [Timing(name, parts.get(name), (terms | whole).get(name)) for name in names if parts]
    block = None if recorder.block is None else recorder.clock.ms(*recorder.block)
    if not parts:
        note = "no forward of the decoder was seen: torch.compile hides it, or none ran; only the block was timed"
    return Timings((*rows, Timing("block", block, None)), note)


def measured_parts(record: Record, clock: Clock) -> dict[str, float]:
    """Milliseconds by part of a step; parts that did not run are left out, all of them if no forward did."""
    spans = record.read(clock)
    if not spans[Phase.FORWARD]:
        return {}
    total = {phase: sum(end - begin for begin, end in found) for phase, found in spans.items()}
    attention = spans[Phase.ATTENTION]
    inside = sum(
        end - begin
        for begin, end in spans[Phase.COMMUNICATION]
        if any(first <= begin and end <= last for first, last in attention)
    )
    layers = (
        total[Phase.FORWARD] + total[Phase.BACKWARD] - total[Phase.ATTENTION] - (total[Phase.COMMUNICATION] - inside)
    )
    parts = {
        "packing": total[Phase.PACKING],
        "attention": total[Phase.ATTENTION] - inside,
        "communication": total[Phase.COMMUNICATION],
        "other layers": layers,
        "forward": total[Phase.FORWARD],
    }
    if not attention:  # the original forward ran, whose attention nobody marked
        del parts["attention"]
    if spans[Phase.BACKWARD]:
        parts["head and loss"] = spans[Phase.BACKWARD][0][0] - spans[Phase.FORWARD][-1][1]
        parts["backward"] = total[Phase.BACKWARD]
    parts["step"] = sum(parts.get(name, 0.0) for name in ("packing", "forward", "head and loss", "backward"))
    return parts


def _planned(state: StackState) -> PlannedLanes | None:
    choose = state.planned if state.lanes is None else state.lanes.choose
    return choose if isinstance(choose, PlannedLanes) else None


def _own_lane(plan: Plan, state: StackState) -> Lane:
    rank = 0 if state.lanes is None else state.lanes.host.rank
    return next(lane for lane in plan.lanes if rank in lane.ranks)


def _ran_otherwise(plan: Plan, lane: Lane, record: Record) -> str | None:
    """What one forward did in place of what a plan says; ``None`` if it did that."""
    if record.waves is None:
        return "no batch of rows was shared: the original forward ran, a packed call, or a part of `prefill`"
    ran = f"ran in {record.waves} waves beside all prompts" if record.waves else "ran in one pass"
    rounds = f" in {plan.num_rounds} rounds" if plan.num_rounds > 1 else ""
    if not plan.reuse:
        return f"it takes rows by themselves{rounds}; their tree {ran}"
    if rounds:
        return f"it takes trees{rounds}; all of them {ran}"
    waves = sum(bool(wave.branches) for wave in lane.waves)
    if max(record.waves, 1) == max(waves, 1):
        return None
    return f"it takes {f'{waves} waves' if waves > 1 else 'one pass'}; branches {ran}"


def _prediction(model: nn.Module, state: StackState, record: Record) -> tuple[Plan | None, str]:
    """The plan of what ran, and what it is."""
    chosen, planner = _planned(state), state.predicts
    if chosen is not None:
        if chosen.last is None:
            return None, "nothing was predicted: no batch was planned"
        what = _ran_otherwise(chosen.last, _own_lane(chosen.last, state), record)
        said = "the plan that ran" if what is None else f"a plan that was not obeyed ({what})"
        return chosen.last, f"predicted by {said}, for the lengths of its bucket"
    if planner is None:
        return None, "nothing was predicted; augtree_fx.measure(model, planner=augtree_fx.Planner(...)) does that"
    if record.layout is None:
        return None, "nothing was predicted: the tree was not built in the forward"
    exact = Planner(
        planner.hardware, execution=replace(planner.execution, checkpointing=record.checkpointing), bucketed=False
    )
    world_size = 1 if state.lanes is None else state.lanes.num_ranks
    costs = exact.costs(ModelShape.from_model(model), world_size=world_size, forward_only=not record.gradients)
    found = alternatives(ReplayShape.from_layout(record.layout), costs)
    kind = f"1 x {world_size}" + (f", {record.schedule}" if world_size > 1 else "")
    note = f"predicted for {kind} of {planner.hardware.name}"
    if kind not in found:
        return None, f"nothing was predicted: {kind} is not among {', '.join(map(kind_of, found.values())) or 'plans'}"
    return found[kind], note
