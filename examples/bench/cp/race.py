"""``bench cp``: attention of one group, or an update step of Qwen3, under each kind of context parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

from augtree_fx.examples.bench import attention as one_device
from augtree_fx.examples.bench import models, timing, varlen
from augtree_fx.examples.bench.cp import attention, contenders, step, turns
from augtree_fx.examples.bench.cp.contender import Contender
from augtree_fx.examples.bench.cp.contenders import Entry
from augtree_fx.examples.bench.cp.world import World
from augtree_fx.examples.bench.rivals import Case
from augtree_fx.examples.bench.shapes import BACKWARD_FLOP, FORWARD_FLOP, Heads, Shape

Measure = Callable[[Contender], dict[str, Any]]


@dataclass(frozen=True)
class Options:
    """What to measure; see ``--help``.

    Attributes:
        keys: contenders that take part.
        model: size of the model, or ``None`` for attention alone.
        rows: rows of a forward without reuse, one run of each; 0 means all.
    """

    shapes: list[Shape]
    keys: list[str]
    heads: Heads
    dtype: torch.dtype
    repeats: int
    kernel: str
    json: str | None
    model: str | None
    layers: int | None
    checkpointing: bool
    rows: list[int]
    check_rows: int | None


def run(world: World, options: Options) -> int:
    """Race all contenders at all shapes, a table for each.

    Returns:
        0, or 1 when one failed the parity gate or none passed it.
    """
    found, dtype = timing.environment(world.device), str(options.dtype).removeprefix("torch.")
    ceiling = timing.matmul_tflops(world.device, options.dtype)
    header = {"environment": found, "ranks": world.size, "ceiling_tflops": ceiling, "dtype": dtype}
    results = timing.Results(options.json if world.rank == 0 else None, **header)
    world.introduce(found, dtype, options.repeats)
    model = options.model and models.build(options.model, options.layers, world.device, options.dtype)
    built: dict[str, Contender] = {}
    passed = True
    for shape in options.shapes:
        kept = results.case(shape=vars(shape), level="step" if model else "attention", against=None)
        if model:
            _race_steps(world, options, model, shape, built, kept, results)
        else:
            _race_attention(world, options, shape, ceiling, built, kept, results)
        world.say(f"\n{_title(options, shape)}\n{table(kept)}")
        verdicts = [row["passed"] for row in kept["rows"]]
        passed &= True in verdicts and False not in verdicts
    if not passed:
        world.say("FAILED: an error above the bound, or nothing ran")
    return int(not passed)


def _title(options: Options, shape: Shape) -> str:
    if options.model is None:
        return f"attention, {shape} tokens, {options.heads}"
    layers = options.layers or models.SIZES[options.model].num_hidden_layers
    checkpointing = "on" if options.checkpointing else "off"
    return f"step of Qwen3 {options.model}, {layers} layers, gradient checkpointing {checkpointing}, {shape} tokens"


def _race_attention(
    world: World, options: Options, shape: Shape, ceiling: float, built: dict[str, Contender], kept: dict[str, Any],
    results: timing.Results,
) -> None:  # fmt: skip
    case = Case.of(shape, options.heads, options.dtype, world.device)
    inputs = case.draw()
    truth = one_device.reference(case, inputs)
    work = shape.tree_pairs * options.heads.heads * options.heads.head_dim * (FORWARD_FLOP + BACKWARD_FLOP) / 1e9

    def measure(contender: Contender) -> dict[str, Any]:
        row = attention.measure(world, contender, case, inputs, truth, options.kernel, options.repeats)
        if row["passed"]:
            row["tflops_a_rank"] = work / row["both"].median_ms / world.size
            row["of_ceiling"] = row["tflops_a_rank"] / ceiling
        return row

    for entry in _chosen(options):
        _add_row(world, entry, entry.name, measure, built, kept, results)


def _race_steps(
    world: World, options: Options, model: Any, shape: Shape, built: dict[str, Contender], kept: dict[str, Any],
    results: timing.Results,
) -> None:  # fmt: skip
    check = min(options.check_rows or shape.num_rows, shape.num_rows)
    example = torch.empty(2, 2, 128, dtype=options.dtype, device=world.device)
    rows_kernel = varlen.best_kernel(example, example[:, :1])
    with turns.through_host() if world.turns else contextlib.nullcontext():
        case = step.prepare(world, model, shape, check, rows_kernel, options.checkpointing)
    kept |= {"bounds": case.bounds, "turns": world.turns}
    for entry in _chosen(options):
        ways = [0] if entry.reuse else options.rows
        for rows in dict.fromkeys(min(rows or shape.num_rows, shape.num_rows) for rows in ways):

            def measure(contender: Contender, rows: int = rows) -> dict[str, Any]:
                timed = turns.measure if world.turns else step.measure
                return timed(world, contender, case, rows, options.kernel, options.repeats)

            name = entry.name if rows == shape.num_rows else f"{entry.name}, {rows} rows at a time"
            model.zero_grad(set_to_none=True)
            _add_row(world, entry, name, measure, built, kept, results)


def _chosen(options: Options) -> list[Entry]:
    return [entry for entry in contenders.ENTRIES if entry.key in options.keys]


def _add_row(
    world: World, entry: Entry, name: str, measure: Measure, built: dict[str, Contender], kept: dict[str, Any],
    results: timing.Results,
) -> None:  # fmt: skip
    """Measure one contender, which is made at its first race and kept, with its process groups, for the others."""

    def work() -> dict[str, Any]:
        if entry.key not in built:
            built[entry.key] = entry.build(world.group)
        return measure(built[entry.key])

    timing.free_memory(world.device)
    row = {"name": name, "key": entry.key, "passed": None, "reason": None}
    kept["rows"].append(row | world.attempt(work))
    add_ratios(kept)
    results.save()


def add_ratios(kept: dict[str, Any]) -> None:
    """How many times the first contender's time each one takes, of those that passed the gate."""
    ran = [row for row in kept["rows"] if row["passed"]]
    if ran:
        kept["against"] = ran[0]["name"]
    for row in ran:
        row["ratio"] = _time(row).median_ms / _time(ran[0]).median_ms


def _time(row: dict[str, Any]) -> timing.Time:
    return row["both"] if "both" in row else row["step"]


def table(kept: dict[str, Any]) -> str:
    """The rows of a case as text; without parity there are no times and no ratio."""
    attention_level = kept["level"] == "attention"
    times = ["forward", "backward", "both"] if attention_level else ["step"]
    rates = ["tree TFLOP/s a rank", "of matmul"] if attention_level else []
    peaks = ["peak GiB"] if attention_level else ["peak GiB", "activations"]
    errors = "errors out dq dk dv" if attention_level else "differences log-probs, grad norm, gradients"
    ratio = f"time / {kept['against']}" if kept["against"] else "ratio"
    headers = ["ms (spread)", *times, *rates, *peaks, "tokens, most and least", ratio, errors]
    lines = [_line(row, times, bool(rates), len(headers)) for row in kept["rows"]]
    reasons = [f"{row['name']}: {row['reason']}" for row in kept["rows"] if row["passed"] is None]
    reasons += [_parts(row) for row in kept["rows"] if "compute" in row]
    if kept.get("turns"):
        ran = [row for row in kept["rows"] if row["passed"]]
        reasons += [f"{row['name']}: ranks take {_listed(row['step_by_rank'])} ms" for row in ran]
        reasons.append("Ranks took turns on one device, without transfers: what each has to compute.")
    return "\n".join([tabulate(lines, headers=headers, disable_numparse=True), *reasons])


def _listed(times: list[float]) -> str:
    return ", ".join(f"{each:.4g}" for each in times)


def _parts(row: dict[str, Any]) -> str:
    """A schedule's time beside those of its parts."""
    compute, transfer = row["compute"].median_ms, row["transfer"].median_ms
    share = row["both"].median_ms / max(compute, transfer)
    return (
        f"{row['name']}: without transfers {compute:.4g} ms, without arithmetic {transfer:.4g} ms; together "
        f"{share:.2f} of the larger"
    )


def _line(row: dict[str, Any], times: list[str], rates: bool, width: int) -> list[str]:
    found = row.get("errors", row.get("differences", {}))
    errors = " ".join(f"{value:.1e}" for value in found.values())
    if not row["passed"]:
        state = "did not run" if row["passed"] is None else "parity failed"
        return [row["name"], state, *[""] * (width - 3), errors]
    shown = [f"{row['tflops_a_rank']:.3g}", f"{row['of_ceiling']:.2f}"] if rates else []
    kept = (row[name] for name in ("peak_gib", "activations_gib") if name in row)
    peaks = ["-" if peak is None else f"{peak:.1f}" for peak in kept]
    tokens = f"{max(row['tokens'])} {min(row['tokens'])}"
    return [row["name"], *(str(row[name]) for name in times), *shown, *peaks, tokens, f"{row['ratio']:.2f}x", errors]
