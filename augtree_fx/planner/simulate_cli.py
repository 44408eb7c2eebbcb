"""Command line of ``simulate``: steps of a workload, ours against four baselines, simulated event by event."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from augtree_fx.planner.baselines import NAMES
from augtree_fx.planner.cli import add_machine, execution_of, whole_number
from augtree_fx.planner.known_models import model_shape
from augtree_fx.planner.model_shape import ModelShape
from augtree_fx.planner.planner import Planner
from augtree_fx.planner.replay_shape import ReplayShape
from augtree_fx.planner.simulate import LEFT_OUT, simulate
from augtree_fx.planner.workloads import batches, read_groups

# What a published system of this kind gained over three of the baselines; its model, machine and workloads are others.
PUBLISHED = {"dynamic": "1.18x average, 2.23x best", "ring with reuse": "2.63x", "ring": "7.08x", "ulysses": "-"}


@dataclass(frozen=True)
class Outcome:
    """Simulated and predicted milliseconds of all steps of a workload.

    Attributes:
        name: ``augtree``, or a baseline.
        simulated_ms: sum over steps.
        predicted_ms: by the closed form.
        busy: fraction of rank time in which kernels run, averaged over steps.
        best: largest ratio of this one's time to ours over steps.
        note: why it did not run.
    """

    name: str
    simulated_ms: float
    predicted_ms: float
    busy: float
    best: float
    note: str = ""


def main(arguments: Sequence[str], prog: str = "python -m augtree_fx simulate") -> int:
    """Simulate a workload.

    Returns:
        0. A usage error, or a batch that does not fit in memory, ends in ``SystemExit(2)``.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Plan and simulate the steps of a workload, and the same steps by four baselines.",
        epilog=f"left out of the simulation: {LEFT_OUT}",
    )
    add_machine(parser)
    parser.add_argument("--workload", required=True, metavar="FILE", action="append", help="JSON lines; several times")
    parser.add_argument("--world", type=whole_number, required=True, action="append", help="ranks; may be given often")
    parser.add_argument("--groups-per-step", type=whole_number, default=64, help="default %(default)s")
    parser.add_argument("--steps", type=whole_number, default=4, help="steps of each workload; default %(default)s")
    parser.add_argument("--json", metavar="FILE", help="also write all figures to FILE")
    given = parser.parse_args(arguments)
    results = []
    try:
        planner = Planner(given.hardware, execution=execution_of(given), bucketed=False)
        model = model_shape(given.model)
        for file in given.workload:
            steps = batches(read_groups(file), given.groups_per_step)[: given.steps]
            for world_size in given.world:
                outcomes = compare(planner, model, steps, world_size)
                print(_table(Path(file).stem, planner, model, steps, world_size, outcomes))
                results.append({"workload": file, "world": world_size, "outcomes": [_json(one) for one in outcomes]})
        print(f"not simulated: {LEFT_OUT}.")
        print("The published figures are those of another system on its own model, machine and workloads.")
        if given.json:
            Path(given.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


def _json(outcome: Outcome) -> dict[str, Any]:
    """For `json.dumps`: what did not run has no times, and JSON no infinity."""
    return {name: None if value == math.inf else value for name, value in vars(outcome).items()}


def compare(planner: Planner, model: ModelShape, steps: Sequence[ReplayShape], world_size: int) -> list[Outcome]:
    """Ours and all baselines on the same steps.

    Args:
        planner: the machine.
        model: the decoder.
        steps: one shape a step.
        world_size: ranks.
    """
    plans = [planner.plan(step, model, world_size=world_size) for step in steps]
    ours = [simulate(plan) for plan in plans]
    total = sum(one.total_us for one in ours) / 1e3
    predicted = sum(plan.total_us for plan in plans) / 1e3
    outcomes = [Outcome("augtree", total, predicted, sum(one.busy for one in ours) / len(ours), 1.0)]
    for index, name in enumerate(NAMES):
        theirs = [plan.baselines[index] for plan in plans]
        notes = [one.note for one in theirs if one.plan is None]
        if notes:
            outcomes.append(Outcome(name, float("inf"), float("inf"), 0.0, float("inf"), notes[0]))
            continue
        chosen = [one.plan for one in theirs if one.plan is not None]
        runs = [simulate(plan) for plan in chosen]
        outcomes.append(
            Outcome(
                name,
                sum(run.total_us for run in runs) / 1e3,
                sum(plan.total_us for plan in chosen) / 1e3,
                sum(run.busy for run in runs) / len(runs),
                max(run.total_us / own.total_us for run, own in zip(runs, ours, strict=True)),
            )
        )
    return outcomes


def _table(
    name: str, planner: Planner, model: ModelShape, steps: Sequence[ReplayShape], world_size: int,
    outcomes: Sequence[Outcome],
) -> str:  # fmt: skip
    tokens, distinct = sum(step.num_row_tokens for step in steps), sum(step.num_tokens for step in steps)
    rows = []
    for one in outcomes:
        ratio = one.simulated_ms / outcomes[0].simulated_ms
        rows.append(
            [one.name, one.note, "", "", "", "", PUBLISHED.get(one.name, "")]
            if one.note
            else [
                one.name,
                f"{one.simulated_ms:.1f}",
                f"{one.predicted_ms:.1f}",
                f"{one.busy:.0%}",
                f"{ratio:.2f}x" if one is not outcomes[0] else "",
                f"{one.best:.2f}x" if one is not outcomes[0] else "",
                PUBLISHED.get(one.name, ""),
            ]
        )
    headers = ["", "simulated ms", "predicted ms", "busy", "ours faster", "best step", "published"]
    return (
        f"{name}: {model.name}, {world_size} x {planner.hardware.name}, {len(steps)} steps, {tokens} tokens, "
        f"{distinct} distinct ({tokens / distinct:.2f}x)\n{tabulate(rows, headers, disable_numparse=True)}\n"
    )
