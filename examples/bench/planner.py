"""Host time of planning: new batches, even and skewed, cached plans, and a profile that shows where the time goes."""

from __future__ import annotations

import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tabulate import tabulate

from augtree_fx.examples.bench import timing
from augtree_fx.planner import Execution, Planner, ReplayShape, model_shape

BRANCHES = 16


@dataclass(frozen=True)
class Case:
    """A batch to plan.

    Attributes:
        groups: of 16 responses each.
        world_size: ranks.
        limit_ms: milliseconds that planning may take.
        lengths: ``even``: prompts of 1k to 4k tokens, responses of 256 to 2k. ``skewed``: both lognormal, medians 1.8k
            and 1.1k. ``short prompts``: of 50 to 500 tokens, responses lognormal with a median of 3k.
        usable_memory: of `Execution`; little of it asks for rounds and waves.
    """

    groups: int
    world_size: int
    limit_ms: float
    lengths: str = "even"
    usable_memory: float = Execution.usable_memory

    def __str__(self) -> str:
        memory = "" if self.usable_memory == Execution.usable_memory else f", {self.usable_memory:.0%} of memory"
        return f"{self.groups} groups x {BRANCHES} branches, {self.world_size} ranks, {self.lengths}{memory}"

    def batch(self) -> ReplayShape:
        """Its lengths, no two groups alike."""
        random, size = np.random.default_rng(0), (self.groups, BRANCHES)
        if self.lengths == "even":
            lengths = random.integers(1024, 4096, self.groups), random.integers(256, 2048, size)
        elif self.lengths == "skewed":
            lengths = _whole(random.lognormal(7.5, 1.0, self.groups)), _whole(random.lognormal(7.0, 1.2, size))
        else:
            lengths = random.integers(50, 500, self.groups), _whole(random.lognormal(8.0, 1.0, size))
        prompts, responses = lengths
        return ReplayShape.from_groups(prompts.tolist(), responses.tolist())

    def planner(self) -> Planner:
        """A planner that has no plan yet."""
        return Planner("h200", execution=Execution(usable_memory=self.usable_memory))


CASES = (
    Case(64, 64, 10.0),
    Case(64, 64, 10.0, "skewed"),
    Case(64, 64, 10.0, "short prompts"),
    Case(64, 64, 10.0, "short prompts", usable_memory=0.15),
    Case(4096, 1024, 1000.0),
    Case(4096, 1024, 1000.0, "skewed"),
    Case(4096, 1024, 1000.0, "short prompts"),
)
CACHED_LIMIT_US = 20.0
_CACHED_CALLS = 200
_PROFILED_CALLS = 10


@dataclass(frozen=True)
class Row:
    """One timed thing, in ms: of the wall clock, and of the process alone (other processes cannot add to that)."""

    name: str
    median_ms: float
    fastest_ms: float
    median_cpu_ms: float
    limit_ms: float


def _whole(lengths: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    return np.clip(lengths, 1, 32768).astype(np.int64)


def copy(shape: ReplayShape) -> ReplayShape:
    """The same lengths as a new object, as the next step's batch would be: nothing of it is computed yet."""
    return ReplayShape(shape.parent, shape.length, shape.num_rows, shape.scored_tokens)


def run(repeats: int, profiled: int, json_file: str | None) -> int:
    """Time everything and print it.

    Args:
        repeats: timed runs.
        profiled: functions to show of a profile of the first case, slowest first; 0 for no profile.
        json_file: where to write the figures, too.

    Returns:
        0.
    """
    model = model_shape("Qwen/Qwen3-8B")
    rows = []
    for case in CASES:
        shape, planner = case.batch(), case.planner()

        def new(case: Case = case, shape: ReplayShape = shape) -> object:
            return case.planner().plan(copy(shape), model, world_size=case.world_size)

        def cached(case: Case = case, shape: ReplayShape = shape, planner: Planner = planner) -> object:
            return planner.plan(shape, model, world_size=case.world_size)

        def next_step(case: Case = case, shape: ReplayShape = shape, planner: Planner = planner) -> object:
            return planner.plan(copy(shape), model, world_size=case.world_size)

        rows.append(_time(f"new plan: {case}", new, repeats, 1, case.limit_ms))
        if case.lengths == "even":  # what the plan says does not matter
            rows.append(_time(f"cached, same shape: {case}", cached, repeats, _CACHED_CALLS, CACHED_LIMIT_US / 1e3))
            rows.append(_time(f"cached, equal shape: {case}", next_step, repeats, _CACHED_CALLS, CACHED_LIMIT_US / 1e3))
    print(f"{timing.describe(timing.environment(timing.pick_device('cpu')))}\none core, ms, of {repeats}\n")
    table = [
        [row.name, f"{row.median_ms:.4g}", f"{row.fastest_ms:.4g}", f"{row.median_cpu_ms:.4g}", f"{row.limit_ms:g}"]
        for row in rows
    ]
    print(tabulate(table, ["", "median", "fastest", "median, CPU time", "wanted"], disable_numparse=True))
    if profiled:
        _profile(profiled)
    if json_file:
        Path(json_file).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    return 0


def _time(name: str, step: Callable[[], object], repeats: int, calls: int, limit_ms: float) -> Row:
    step()
    walls, processes = [], []
    for _ in range(repeats):
        wall, process = time.perf_counter(), time.process_time()
        for _ in range(calls):
            step()
        walls.append((time.perf_counter() - wall) / calls * 1e3)
        processes.append((time.process_time() - process) / calls * 1e3)
    return Row(name, statistics.median(walls), min(walls), statistics.median(processes), limit_ms)


def _profile(functions: int) -> None:
    case, model = CASES[0], model_shape("Qwen/Qwen3-8B")
    shape = case.batch()
    profile = cProfile.Profile()
    print(f"\nwhere the time of {_PROFILED_CALLS} new plans goes, which the profile makes about twice as long")
    profile.enable()
    for _ in range(_PROFILED_CALLS):
        case.planner().plan(copy(shape), model, world_size=case.world_size)
    profile.disable()
    pstats.Stats(profile, stream=sys.stdout).strip_dirs().sort_stats("tottime").print_stats(functions)
