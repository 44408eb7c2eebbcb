"""Host time of planning: new batches of two sizes, cached plans, and a profile that shows where the time goes."""

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
from tabulate import tabulate

from augtree_fx.examples.bench import timing
from augtree_fx.planner import Planner, ReplayShape, model_shape

# Groups, branches, ranks, and the milliseconds that planning may take.
CASES = ((64, 16, 64, 10.0), (4096, 16, 1024, 1000.0))
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


def batch(groups: int, branches: int) -> ReplayShape:
    """Prompts of 1k to 4k tokens, responses of 256 to 2k, no two groups alike."""
    random = np.random.default_rng(0)
    prompts = random.integers(1024, 4096, groups).tolist()
    return ReplayShape.from_groups(prompts, random.integers(256, 2048, (groups, branches)).tolist())


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
    for groups, branches, world_size, limit_ms in CASES:
        shape = batch(groups, branches)
        planner = Planner("h200")
        name = f"{groups} groups x {branches} branches, {world_size} ranks"

        def new(shape: ReplayShape = shape, world_size: int = world_size) -> object:
            return Planner("h200").plan(copy(shape), model, world_size=world_size)

        def cached(shape: ReplayShape = shape, world_size: int = world_size, planner: Planner = planner) -> object:
            return planner.plan(shape, model, world_size=world_size)

        def next_step(shape: ReplayShape = shape, world_size: int = world_size, planner: Planner = planner) -> object:
            return planner.plan(copy(shape), model, world_size=world_size)

        rows.append(_time(f"new plan: {name}", new, repeats, 1, limit_ms))
        rows.append(_time(f"cached, same shape: {name}", cached, repeats, _CACHED_CALLS, CACHED_LIMIT_US / 1e3))
        rows.append(_time(f"cached, equal shape: {name}", next_step, repeats, _CACHED_CALLS, CACHED_LIMIT_US / 1e3))
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
    groups, branches, world_size, _ = CASES[0]
    shape, model = batch(groups, branches), model_shape("Qwen/Qwen3-8B")
    profile = cProfile.Profile()
    print(f"\nwhere the time of {_PROFILED_CALLS} new plans goes, which the profile makes about twice as long")
    profile.enable()
    for _ in range(_PROFILED_CALLS):
        Planner("h200").plan(copy(shape), model, world_size=world_size)
    profile.disable()
    pstats.Stats(profile, stream=sys.stdout).strip_dirs().sort_stats("tottime").print_stats(functions)
