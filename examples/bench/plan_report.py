"""What ``bench planner --steps`` prints: measured beside predicted for each batch, and how good both the prices and the
choice were."""

from __future__ import annotations

import statistics
from typing import Any

from tabulate import tabulate

NEAR = 1.05  # a plan within 5% of the best one measured is as good a choice
# Columns, and the terms of a plan in each; transfers count as far as they are exposed.
COLUMNS = {
    "linear": ("linear_us",),
    "head": ("head_us",),
    "attention": ("prefill_attention_us", "replay_attention_us"),
    "merge": ("merge_us",),
    "exposed": ("prefill_exposed_us", "exposed_us"),
}


def lines(case: dict[str, Any]) -> str:
    """The plans of a batch, ms; terms are predicted ones of the slowest lane."""
    best = min((row["step_ms"] for row in case["rows"] if row["step_ms"]), default=None)
    table = []
    for row in case["rows"]:
        step = row["step_ms"]
        seen = [f"{step:.2f} ({row['spread_ms']:.2f})", f"{step / best:.3f}"] if step else [row["reason"] or "-", ""]
        error = f"{row['predicted_ms'] / step - 1:+.1%}" if step else ""
        terms = [f"{sum(row['terms_us'][name] for name in names) / 1e3:.1f}" for names in COLUMNS.values()]
        mark = "->" if row["kind"] == case["chosen"] else ""
        table.append([mark, row["kind"], *seen, f"{row['predicted_ms']:.2f}", error, *terms])
    headers = ["", "plan", "measured (spread)", "of best", "predicted", "error", *COLUMNS]
    return tabulate(table, headers=headers, disable_numparse=True)


def summary(cases: list[dict[str, Any]], planned: int) -> tuple[str, bool]:
    """Errors of prices and quality of choices.

    Args:
        cases: those measured, see `plan_steps.run`.
        planned: how many there were to be.

    Returns:
        Text, and whether something was measured and no loss differed.
    """
    seen = [case for case in cases if any(row["step_ms"] for row in case["rows"])]
    if not seen:
        return "nothing was measured", False
    errors = {
        "all plans": [_error(row) for case in seen for row in case["rows"] if row["step_ms"]],
        "chosen plans": [_error(row) for case in seen if (row := _chosen(case))],
    }
    table = [
        [name, len(found), f"{statistics.median(map(abs, found)):.1%}", f"{max(found, key=abs):+.1%}",
         f"{statistics.fmean(found):+.1%}"]
        for name, found in errors.items() if found
    ]  # fmt: skip
    text = [tabulate(table, ["predicted against measured", "steps", "median", "worst", "mean, signed"])]
    worth = [_chosen(case)["step_ms"] / min(_times(case)) for case in seen if _chosen(case) and len(_times(case)) > 1]
    if worth:
        text.append(
            f"chosen plan: the best measured in {sum(ratio == 1 for ratio in worth)} of {len(worth)} batches, within "
            f"{NEAR - 1:.0%} of it in {sum(ratio <= NEAR for ratio in worth)}; at worst {max(worth) - 1:.1%} behind"
        )
    failed = [f"{row['kind']}: {row['reason']}" for case in cases for row in case["rows"] if row["reason"]]
    text += [f"{len(seen)} of {planned} batches measured", *failed]
    return "\n".join(text), not any("differs" in line for line in failed)


def _error(row: dict[str, Any]) -> float:
    return row["predicted_ms"] / row["step_ms"] - 1


def _chosen(case: dict[str, Any]) -> Any:
    return next((row for row in case["rows"] if row["kind"] == case["chosen"] and row["step_ms"]), None)


def _times(case: dict[str, Any]) -> list[float]:
    return [row["step_ms"] for row in case["rows"] if row["step_ms"]]
