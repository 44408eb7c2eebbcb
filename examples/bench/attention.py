"""``bench attention``: attention of one group, forward and backward, against what else there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from augtree_fx.examples.bench import timing
from augtree_fx.examples.bench.rivals import Attend, Case, Inputs, Outcome, Rival, copied, rivals
from augtree_fx.examples.bench.shapes import BACKWARD_FLOP, FORWARD_FLOP, Heads, Shape
from augtree_fx.tables import decode_calls

# Largest relative error in norm against the reference in float32 (float64 on the CPU) that passes. Half precision
# rounds the probabilities and the output once each, half a unit in the last place (bf16 2^-9, float16 2^-12 relative):
# 2e-3 to 3.4e-3 in bf16 with every kernel and shape measured (H200, 2026-11). Three times that, and 2^-3 of it in
# float16, whose mantissa has three bits more. float32 keeps 2^-24 and sums up to 1e5 terms.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1.25e-3, torch.float32: 1e-5, torch.float64: 1e-12}
PASSES = ("forward", "backward", "both")
_FLOP = dict(zip(PASSES, (FORWARD_FLOP, BACKWARD_FLOP, FORWARD_FLOP + BACKWARD_FLOP), strict=True))


@dataclass(frozen=True)
class Options:
    """What to measure; see ``--help``."""

    shapes: list[Shape]
    heads: Heads
    dtype: torch.dtype
    device: torch.device
    repeats: int
    kernels: list[str]
    skip: list[str]
    json: str | None


def run(options: Options) -> int:
    """Measure all shapes and print a table for each.

    Returns:
        0, or 1 when a contender failed the parity gate, or ours did not run.
    """
    found = timing.environment(options.device)
    ceiling = timing.matmul_tflops(options.device, options.dtype)
    dtype = str(options.dtype).removeprefix("torch.")
    results = timing.Results(options.json, environment=found, ceiling_tflops=ceiling, dtype=dtype)
    size = timing.CEILING_SIZE[options.device.type]
    print(f"{timing.describe(found)}\n{dtype}, {size}^3 matmul {ceiling:.4g} TFLOP/s, median of {options.repeats}")
    passed = True
    for shape in options.shapes:
        case = Case.of(shape, options.heads, options.dtype, options.device)
        kept = results.case(shape={**vars(shape), **vars(options.heads)}, calls=_calls(case))
        _run_case(case, options, ceiling, kept, results)
        print(
            f"\n{shape} tokens, {options.heads}; calls: {', '.join(kept['calls'])}\n{table(kept['rows'])}", flush=True
        )
        passed &= kept["rows"][0]["passed"] is True and all(row["passed"] is not False for row in kept["rows"])
    if not passed:
        print(f"FAILED: an error above {TOLERANCE[options.dtype]:g} against the reference, or our op did not run")
    return int(not passed)


def _run_case(case: Case, options: Options, ceiling: float, kept: dict[str, Any], results: timing.Results) -> None:
    inputs = case.draw()
    truth = reference(case, inputs)
    for rival in rivals(case, options.kernels):
        if rival.key in options.skip:
            continue
        timing.free_memory(case.device)
        kept["rows"].append(_measure_or_say_why(rival, case, inputs, truth, options.repeats))
        add_rates(kept["rows"], case, ceiling)
        results.save()


def reference(case: Case, inputs: Inputs) -> Outcome:
    """The reference kernel on the same inputs, prompt and branches by themselves, without our tables: float32, or
    float64 on the CPU, in blocks of queries.

    On CUDA its products are in TF32, 10 bits of mantissa: 3e-4 off, a tenth of what bf16 is, and seconds instead of
    minutes at a prompt of 64k.
    """
    dtype = torch.float64 if case.device.type == "cpu" else torch.float32
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return differentiate(copied(case, "reference"), Inputs(*(x.to(dtype) for x in inputs)))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def leaves_of(inputs: Inputs) -> list[Tensor]:
    """q, k and v as leaves."""
    return [x.detach().requires_grad_() for x in inputs[:3]]


def differentiate(attend: Attend, inputs: Inputs) -> Outcome:
    """Output and gradients."""
    leaves = leaves_of(inputs)
    out = attend(*leaves)
    return Outcome(out.detach(), *torch.autograd.grad(out, leaves, inputs.dout))


def relative_errors(outcome: Outcome, truth: Outcome) -> dict[str, float]:
    """Relative error in norm of out, dq, dk, dv."""
    pairs = zip(Outcome._fields, outcome, truth, strict=True)
    return {name: float((x.to(y.dtype) - y).norm() / y.norm()) for name, x, y in pairs}


def _measure_or_say_why(rival: Rival, case: Case, inputs: Inputs, truth: Outcome, repeats: int) -> dict[str, Any]:
    """A row of figures, or of the reason why there are none: a rival is other people's code and may raise anything."""
    row: dict[str, Any] = {"name": rival.name, "key": rival.key, "passed": None, "reason": None}
    try:
        return row | measure_rival(rival, case, inputs, truth, repeats)
    except Exception as error:  # noqa: BLE001
        return row | {"reason": timing.reason_of(error)}


def measure_rival(rival: Rival, case: Case, inputs: Inputs, truth: Outcome, repeats: int) -> dict[str, Any]:
    """Check a rival against the reference, then, if it passed, time it."""
    attend = rival.build()
    own = case.to_rows(inputs) if rival.rows else inputs
    outcome = differentiate(attend, own)
    errors = relative_errors(case.from_rows(outcome) if rival.rows else outcome, truth)
    del outcome
    if not all(error <= TOLERANCE[case.dtype] for error in errors.values()):  # a NaN fails too
        return {"errors": errors, "passed": False, "reason": "parity failed"}
    return {"errors": errors, "passed": True, **_times(attend, own, case, repeats)}


def _times(attend: Attend, inputs: Inputs, case: Case, repeats: int) -> dict[str, timing.Time]:
    """Forward that saves for backward; backward alone on what one forward saved; both."""
    leaves = leaves_of(inputs)
    forward = timing.measure(lambda: attend(*leaves), repeats, case.device)
    both = timing.measure(lambda: torch.autograd.grad(attend(*leaves), leaves, inputs.dout), repeats, case.device)
    out = attend(*leaves)
    backward = timing.measure(
        lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True), repeats, case.device
    )
    return {"forward": forward, "backward": backward, "both": both}


def add_rates(rows: list[dict[str, Any]], case: Case, ceiling: float) -> None:
    """Add what follows from the times: TFLOP/s of the tree's pairs, share of the ceiling, how much faster ours is."""
    work = case.shape.tree_pairs * case.heads.heads * case.heads.head_dim / 1e9  # GFLOP a FLOP of a pair, head and dim
    for row in rows:
        if not row["passed"]:
            continue
        row["tflops"] = {name: _FLOP[name] * work / row[name].median_ms for name in PASSES}
        row["of_ceiling"] = row["tflops"]["both"] / ceiling
        if rows[0]["passed"]:
            row["ratio"] = row["both"].median_ms / rows[0]["both"].median_ms


def table(rows: list[dict[str, Any]]) -> str:
    """The rows of a case as text; without parity there are no times and no ratio."""
    lines = []
    for row in rows:
        errors = " ".join(f"{value:.1e}" for value in row.get("errors", {}).values())
        if row["passed"]:
            rates = " / ".join(f"{row['tflops'][name]:.3g}" for name in PASSES)
            ratio = f"{row['ratio']:.2f}x" if "ratio" in row else "-"
            lines.append(
                [row["name"], *(str(row[name]) for name in PASSES), rates, f"{row['of_ceiling']:.2f}", ratio, errors]
            )
        else:
            state = "did not run" if row["passed"] is None else "parity failed"
            lines.append([row["name"], state, "", "", "", "", "", errors])
    headers = ["ms (spread)", *PASSES, "tree TFLOP/s, f / b / both", "of matmul", "ours faster", "errors out dq dk dv"]
    reasons = [f"{row['name']}: {row['reason']}" for row in rows if row["passed"] is None]
    return "\n".join([tabulate(lines, headers=headers, disable_numparse=True), *reasons])


def _calls(case: Case) -> list[str]:
    """Calls of our op, queries x keys."""
    tables = case.layout.tables()
    return [
        f"{call.q_range.stop - call.q_range.start} x {call.k_range.stop - call.k_range.start}"
        for call in decode_calls(tables.segments, tables.cu_seqlens)
    ]
