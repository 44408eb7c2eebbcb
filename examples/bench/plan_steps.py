"""``bench planner --steps``: steps measured under every plan that a planner can choose from, beside their prices.

A step is forward, log-probs and backward of each rank's share of a packed batch; a time is that of the slowest rank.
Weights are whole on every rank and gradients are not summed over ranks, in the steps as in the prices.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import augtree_fx
from augtree_fx import CostModel, TreeLayout
from augtree_fx.dtensor_ops.lanes import LanePlan
from augtree_fx.examples.bench import grpo, models, plan_report, timing
from augtree_fx.examples.bench.cp import turns
from augtree_fx.examples.bench.cp.world import World
from augtree_fx.examples.bench.plan_cases import PlanCase, Rows, draw
from augtree_fx.planned import lanes_of
from augtree_fx.planner import Execution, Lane, ModelShape, Plan, Planner, ReplayShape
from augtree_fx.planner.alternatives import alternatives, kind_of
from augtree_fx.timings import TERMS
from augtree_fx.transforms import find_stack, parallel
from augtree_fx.transforms.install import STATE

# Losses of two schedules are the same number in other roundings: a mean of log-probs over at least 1024 tokens.
LOSS_TOLERANCE = {torch.bfloat16: 1e-3, torch.float16: 1e-3, torch.float32: 1e-5, torch.float64: 1e-9}

_MEASURED = ("step_ms", "spread_ms", "loss", "parts_ms", "reason")  # of a row; the rest is predicted


@dataclass(frozen=True)
class Options:
    """What to measure; see ``--help``.

    Attributes:
        hardware: profile of the prices; empty for `again` with that of the run.
        seconds: no batch is begun after so many.
    """

    cases: list[PlanCase]
    hardware: str
    dtype: torch.dtype
    repeats: int
    kernel: str
    checkpointing: bool
    seconds: float
    json: str | None

    @property
    def execution(self) -> Execution:
        """How steps run, to a planner."""
        return Execution(
            checkpointing=self.checkpointing, shard_weights=False, state_bytes_per_weight=2.0, usable_memory=1.0
        )


@dataclass
class Chosen:
    """The lanes that `transform` is to run a batch with."""

    plan: Plan | None = None

    def __call__(self, layout: TreeLayout, num_ranks: int) -> list[LanePlan]:
        assert self.plan is not None and self.plan.world_size == num_ranks
        return lanes_of(self.plan, layout)


@dataclass(frozen=True)
class Share:
    """What a rank has of a packed batch.

    Attributes:
        arguments: of the decoder.
        predictor: ``[scored here]`` local token that predicts each label; target: ``[scored here]`` the label.
    """

    arguments: dict[str, Any]
    predictor: Tensor
    target: Tensor


def predict(case: PlanCase, shape: ReplayShape, world_size: int, planner: Planner) -> dict[str, Any]:
    """Plans of every kind, and the kind that the planner takes for the batch itself, its bucket aside."""
    size = models.SIZES[case.model]
    model = ModelShape.from_config(vars(replace(size, num_hidden_layers=case.layers)), name=f"Qwen3-{case.model}")
    chosen = planner.plan(shape, model, world_size=world_size)
    found = alternatives(shape, planner.costs(model, world_size=world_size))
    return {"plans": found | {kind_of(chosen): chosen}, "chosen": kind_of(chosen)}


def run(world: World, options: Options) -> int:
    """Measure all batches, a line each, and print the summary.

    Returns:
        0, or 1 when a loss differed or nothing ran.
    """
    start = time.monotonic()
    found, dtype = timing.environment(world.device), str(options.dtype).removeprefix("torch.")
    results = timing.Results(
        options.json if world.rank == 0 else None, environment=found, ranks=world.size, dtype=dtype,
        hardware=options.hardware, checkpointing=options.checkpointing, turns=world.turns,
    )  # fmt: skip
    world.introduce(found, dtype, options.repeats)
    planner = Planner(options.hardware, execution=options.execution, bucketed=False)
    for (name, layers), cases in itertools.groupby(options.cases, key=lambda case: (case.model, case.layers)):
        if _is_late(world, start, options):
            break
        model = models.build(name, layers, world.device, options.dtype)
        models.set_checkpointing(model, options.checkpointing)
        choose = Chosen()
        lanes: dict[str, Any] = {}
        if world.size > 1:
            mesh = DeviceMesh.from_group(world.group, "cpu" if world.turns else world.device.type)
            lanes = {"mesh": mesh, "lanes": choose}
        augtree_fx.transform(model, kernel=options.kernel, costs=CostModel.free(), **lanes)
        for case in cases:
            if _is_late(world, start, options):
                break
            kept = results.case(**vars(case))
            _measure(world, options, model, choose, case, planner, kept, results)
            world.say(f"{time.monotonic() - start:5.0f} s  {case}\n{plan_report.lines(kept)}")
        del model
        timing.free_memory(world.device)
    summary, passed = plan_report.summary(results.figures["cases"], len(options.cases))
    note = "\nranks took turns on one device, without transfers; prices are without them, too" if world.turns else ""
    world.say(f"\n{summary}{note}")
    return int(not passed)


def again(file: str, options: Options, say: Callable[[str], None] = print) -> int:
    """The times of an earlier run beside what the planner says today; measures nothing.

    Returns:
        As `run`.

    Raises:
        ValueError: the file is not one of an earlier run.
    """
    try:
        earlier = json.loads(Path(file).read_text(encoding="utf-8"))
        machine = options.hardware or earlier["hardware"]
        options = replace(options, checkpointing=earlier["checkpointing"], hardware=machine)
        world_size, cases = earlier["ranks"], earlier["cases"]
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"--again must be the JSON of an earlier --steps, got {file!r} ({error!r})") from error
    about = {k: v for k, v in earlier.items() if k not in ("command", "cases")} | {"hardware": machine}
    results = timing.Results(options.json, **about)
    planner = Planner(options.hardware, execution=options.execution, bucketed=False)
    for old in cases:
        case = PlanCase(old["model"], old["layers"], old["trees"])
        kept = results.case(**vars(case))
        prices = predict(case, _shape(draw(case.trees, 1 << 16)), world_size, planner)
        seen = {row["kind"]: row for row in old["rows"]}
        kept["chosen"] = prices["chosen"]
        for kind, plan in prices["plans"].items():
            measured = {name: seen.get(kind, {}).get(name) for name in _MEASURED}
            kept["rows"].append(_priced(kind, plan, transfers=not earlier.get("turns")) | measured)
        results.save()
        say(f"{case}\n{plan_report.lines(kept)}")
    summary, passed = plan_report.summary(results.figures["cases"], len(cases))
    say(f"\n{summary}")
    return int(not passed)


def _is_late(world: World, start: float, options: Options) -> bool:
    """Whether the first rank has no time left: all ranks must say the same."""
    return bool(world.all_of(time.monotonic() - start > options.seconds)[0])


def _shape(rows: Rows) -> ReplayShape:
    return ReplayShape.from_layout(TreeLayout.from_padded(rows.input_ids, rows.attention_mask, costs=CostModel.free()))


def _priced(kind: str, plan: Plan, *, transfers: bool = True) -> dict[str, Any]:
    """The price of a plan, of its slowest lane; without what of its transfers is exposed."""

    def price(lane: Lane) -> float:
        return lane.total_us - (0.0 if transfers else sum(lane.terms[name] for name in TERMS["communication"]))

    slowest = max(plan.lanes, key=price)
    return {"kind": kind, "predicted_ms": price(slowest) / 1e3, "terms_us": dict(slowest.terms)}


def _measure(
    world: World, options: Options, model: Any, choose: Chosen, case: PlanCase, planner: Planner,
    kept: dict[str, Any], results: timing.Results,
) -> None:  # fmt: skip
    rows = draw(case.trees, model.config.vocab_size)
    prices = predict(case, _shape(rows), world.size, planner)
    kept["chosen"] = prices["chosen"]
    tolerance = LOSS_TOLERANCE[options.dtype]
    for kind, plan in prices["plans"].items():
        choose.plan = plan

        def in_turns() -> dict[str, Any]:
            share = _share(world, model, rows)
            with turns.without_transfers():
                found = turns.timed(world, lambda: _step(model, share, 1), model, options.repeats)
            return {"step_ms": found.step.median_ms, "spread_ms": found.step.spread_ms, "by_rank_ms": found.by_rank}

        def work() -> dict[str, Any]:
            share = _share(world, model, rows)
            loss = world.sum(_step(model, share, int(rows.scored.sum())))  # compiles kernels, fills pools
            times = world.measure(lambda: _step(model, share, int(rows.scored.sum())), options.repeats, warmups=1)
            with augtree_fx.measure(model):
                _step(model, share, int(rows.scored.sum()))
            parts = augtree_fx.explain(model).timings
            seen = {part.name: part.measured_ms for part in parts.rows} if parts else {}
            return {
                "step_ms": times.median_ms, "spread_ms": times.spread_ms, "loss": float(loss),
                "parts_ms": world.all_of(seen),
            }  # fmt: skip

        row = _priced(kind, plan, transfers=not world.turns)
        row |= {"step_ms": None, "spread_ms": None, "loss": None, "parts_ms": None, "reason": None}
        row |= world.attempt(in_turns if world.turns else work)
        model.zero_grad(set_to_none=True)
        first = next((other["loss"] for other in kept["rows"] if other["loss"] is not None), row["loss"])
        if row["loss"] is not None and not abs(row["loss"] - first) <= tolerance * abs(first):
            row |= {"step_ms": None, "reason": f"loss {row['loss']:.7g} differs from {first:.7g}"}
        kept["rows"].append(row)
        results.save()
    timing.free_memory(world.device)


def _share(world: World, model: Any, rows: Rows) -> Share:
    stack = find_stack(model)
    state = getattr(stack, STATE)
    ids, mask = rows.input_ids.to(world.device), rows.attention_mask.to(world.device)
    if state.lanes is None:
        call = augtree_fx.pack(model, TreeLayout.from_padded(ids, mask, costs=CostModel.free()))
    else:
        call = parallel.pack_rows(stack, state, state.lanes, {"input_ids": ids, "attention_mask": mask})
    label = rows.scored.flatten().nonzero()[:, 0]
    owner = call.index.cpu()[label - 1]  # a branch is never at the start of a row
    here = owner.div(call.num_tokens, rounding_mode="floor") == (0 if state.lanes is None else world.rank)
    predictor, target = owner[here] % call.num_tokens, rows.input_ids.flatten()[label[here]]
    return Share(call.arguments, predictor.to(world.device), target.to(world.device))


def _step(model: Any, share: Share, num_scored: int) -> Tensor:
    """This rank's part of the mean negative log-prob, and fresh gradients of it."""
    model.zero_grad(set_to_none=True)
    hidden = model.model(**share.arguments).last_hidden_state[0]
    log_probs = grpo.token_log_probs(hidden[share.predictor], model.lm_head.weight, share.target)
    loss = -log_probs.sum() / num_scored
    loss.backward()
    return loss.detach()
