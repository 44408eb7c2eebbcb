"""What ``bench planner --steps`` prints: measured beside predicted for each batch, and how good both the prices and the
choice were."""

from __future__ import annotations

import statistics
from typing import Any

from tabulate import tabulate

from augtree_fx.timings import TERMS

NEAR = 1.05  # a plan within 5% of the best one measured is as good a choice


def lines(case: dict[str, Any]) -> str:
    """The plans of a batch, ms; terms are predicted ones of the slowest lane, and those of one step of rank 0."""
    best = min((row["step_ms"] for row in case["rows"] if row["step_ms"]), default=None)
    table = []
    for row in case["rows"]:
        step = row["step_ms"]
        seen = [f"{step:.2f} ({row['spread_ms']:.2f})", f"{step / best:.3f}"] if step else [row["reason"] or "-", ""]
        error = f"{row['predicted_ms'] / step - 1:+.1%}" if step else ""
        parts = row["parts_ms"][0] if row.get("parts_ms") else {}
        terms = [_both(row["terms_us"], names, parts.get(name)) for name, names in TERMS.items()]
        mark = "->" if row["kind"] == case["chosen"] else ""
        table.append([mark, row["kind"], *seen, f"{row['predicted_ms']:.2f}", error, *terms])
    headers = ["", "plan", "measured (spread)", "of best", "predicted", "error", *(f"{name} (seen)" for name in TERMS)]
    return tabulate(table, headers=headers, disable_numparse=True)


def _both(terms_us: dict[str, float], names: tuple[str, ...], measured_ms: float | None) -> str:
    predicted = f"{sum(terms_us[name] for name in names) / 1e3:.1f}"
    return predicted if measured_ms is None else f"{predicted} ({measured_ms:.1f})"


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
