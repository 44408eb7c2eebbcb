"""``bench step``: an update step of Qwen3 without the optimizer, transformed against the same model without reuse."""

from __future__ import annotations

from typing import Any

from tabulate import tabulate

from augtree_fx.examples.bench import contenders, models, timing
from augtree_fx.examples.bench.contenders import MOST, OURS, TOLERANCE, Case, Options
from augtree_fx.examples.bench.grpo import Outcome
from augtree_fx.examples.bench.shapes import Shape


def run(options: Options) -> int:
    """Measure all models, settings and shapes, a table for each.

    Returns:
        0, or 1 when the parity gate failed, or a transformed model did not run for a reason other than memory.
    """
    found = timing.environment(options.device)
    ceiling = timing.matmul_tflops(options.device, options.dtype)
    dtype = str(options.dtype).removeprefix("torch.")
    results = timing.Results(options.json, environment=found, ceiling_tflops=ceiling, dtype=dtype)
    size = timing.CEILING_SIZE[options.device.type]
    print(f"{timing.describe(found)}\n{dtype}, {size}^3 matmul {ceiling:.4g} TFLOP/s, median of {options.repeats}")
    passed = True
    for name in options.models:
        timing.free_memory(options.device)  # of the model before
        model = models.build(name, options.layers, options.device, options.dtype)
        for checkpointing in options.checkpointing:
            models.set_checkpointing(model, checkpointing)
            for shape in options.shapes:
                kept = results.case(**_header(name, model, checkpointing, shape))
                _race(model, shape, checkpointing, options, kept, results)
                print(f"\n{table(kept)}", flush=True)
                ours_ran = kept["rows"][0]["reason"] in (None, timing.OUT_OF_MEMORY)
                passed &= ours_ran and all(row["passed"] is not False for row in kept["rows"])
        del model
    if not passed:
        print(
            f"FAILED: a difference above {TOLERANCE[options.dtype]} and above twice that of rounding alone, or above "
            f"{MOST[options.dtype]}; or the transformed model did not run"
        )
    return int(not passed)


def _header(name: str, model: Any, checkpointing: bool, shape: Shape) -> dict[str, Any]:
    layers, all_layers = model.config.num_hidden_layers, models.SIZES[name].num_hidden_layers
    return {
        "model": name, "layers": layers, "all_layers": all_layers, "checkpointing": checkpointing, "shape": vars(shape)
    }  # fmt: skip


def _race(
    model: Any, shape: Shape, checkpointing: bool, options: Options, kept: dict[str, Any], results: timing.Results
) -> None:
    """Measure the contenders of a case one after another, ours first; figures are kept after each."""
    case: Case | None = None
    ours: Outcome | None = None
    bounds = dict(TOLERANCE[options.dtype])
    for contender in contenders.of(options, shape):
        model.zero_grad(set_to_none=True)
        timing.free_memory(options.device)
        row: dict[str, Any] = {"name": contender.name, "transformed": contender.transformed, **vars(contender)}
        row |= {"passed": None, "reason": None}
        kept["rows"].append(row)
        try:
            case = case or Case(model, contenders.draw_batch(model, shape, options), shape, checkpointing, options)
            if ours is not None and "rounding" not in kept:
                bounds = _bounds(case, kept)
            with contenders.prepared(model, contender):
                figures, outcome = contenders.measure(case, contender, ours, bounds)
            row.update(figures)
            ours = ours or outcome
        except Exception as error:  # noqa: BLE001  (out of memory, or whatever somebody else's kernel raises)
            row["reason"] = timing.reason_of(error)
        if case is not None and ours is not None:
            conclude(kept, case, results.figures["ceiling_tflops"])
        results.save()
        if ours is None and not (contender.key == OURS and options.wave_tokens):
            break  # there is nothing to compare with


def _bounds(case: Case, kept: dict[str, Any]) -> dict[str, float]:
    """What passes the gate of a case; the fixed tolerances alone where rounding cannot be measured."""
    try:
        kept["rounding"] = contenders.rounding(case)
    except Exception as error:  # noqa: BLE001  (as a contender)
        kept["rounding"] = {"reason": timing.reason_of(error)}
        return dict(TOLERANCE[case.options.dtype])
    return contenders.bounds_of(case, kept["rounding"]["differences"])


def conclude(kept: dict[str, Any], case: Case, ceiling: float) -> None:
    """Add what follows from the rows so far: MFU, how much faster ours is, and its share of what the FLOPs allow."""
    ours = next(row for row in kept["rows"] if "work" in row)
    others = [row for row in kept["rows"] if not row["transformed"]]
    verdicts = {row["passed"] for row in others} - {None}
    ours["passed"] = True if True in verdicts else (False if verdicts else None)
    executed = [work.executed_flop(case.model, case.checkpointing) for work in (case.row_work, ours["work"])]
    kept["flop_ceiling"] = executed[0] / executed[1]
    for row in kept["rows"]:
        if "time" not in row:
            continue
        row["mfu"] = row["work"].model_flop(case.model) / 1e9 / row["time"].median_ms / ceiling
        if row is not ours and ours["passed"]:
            row["ratio"] = row["time"].median_ms / ours["time"].median_ms
            row["of_flop_ceiling"] = None if row["transformed"] else row["ratio"] / kept["flop_ceiling"]
    # The same kernel, all rows in one forward; one row at a time where that is out of memory.
    first = [row for row in others if row["kernel"] == case.options.baseline_kernels[0] and "ratio" in row]
    if first:
        best = first[0]
        kept["speedup"] = {"over": best["name"], "ratio": best["ratio"], "of_flop_ceiling": best["of_flop_ceiling"]}


def table(kept: dict[str, Any]) -> str:
    """A case as text; without parity there are no times and no ratio."""
    shape = Shape(**kept["shape"])
    head = (
        f"Qwen3 {kept['model']}, {kept['layers']} of {kept['all_layers']} layers, gradient checkpointing "
        f"{'on' if kept['checkpointing'] else 'off'}, {shape} tokens"
    )
    if "flop_ceiling" in kept:
        head += f"; no reuse has {kept['flop_ceiling']:.2f}x the FLOPs (recomputation, attention and head included)"
    headers = ["ms (spread)", "step", "peak GiB", "MFU", "tokens", "ours faster", "of FLOP ceiling"]
    headers.append("differences log-probs, grad norm, gradients")
    reasons = [f"{row['name']}: {row['reason']}" for row in kept["rows"] if row["passed"] is None and row["reason"]]
    if "speedup" in kept:
        best = kept["speedup"]
        reasons.append(
            f"{best['ratio']:.2f}x the speed of {best['over']}: {best['of_flop_ceiling']:.0%} of what the FLOPs allow"
        )
    if "differences" in kept.get("rounding", {}):
        differences = " ".join(f"{value:.1e}" for value in kept["rounding"]["differences"].values())
        reasons.append(f"no reuse, {' against '.join(kept['rounding']['kernels'])}, rounding alone: {differences}")
    reasons += [f"{row['name']}: {row['memory']}" for row in kept["rows"] if row.get("memory") and row["passed"]]
    lines = [_line(row) for row in kept["rows"]]
    return "\n".join([head, tabulate(lines, headers=headers, disable_numparse=True), *reasons])


def _line(row: dict[str, Any]) -> list[str]:
    differences = " ".join(f"{value:.1e}" for value in row.get("differences", {}).values())
    if row["passed"] is False or "time" not in row:
        state = "did not run" if row["passed"] is None else "parity failed"
        return [row["name"], state, "", "", "", "", "", differences]
    peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    faster = f"{row['ratio']:.2f}x" if "ratio" in row else "-"
    share = f"{row['of_flop_ceiling']:.2f}" if row.get("of_flop_ceiling") else "-"
    if row["transformed"] and row["passed"] is None:
        differences = "not checked: nothing ran without reuse"
    return [
        row["name"],
        str(row["time"]),
        peak,
        f"{row['mfu']:.2f}",
        f"{row['work'].tokens}",
        faster,
        share,
        differences,
    ]
