"""A plan as text and as JSON: candidates, lanes, groups, ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from tabulate import tabulate

from augtree_fx.memory import shown
from augtree_fx.planner.plan import Candidate, Lane, Plan

_MAX_ROWS = 24
# Columns of prices, and the fields of `Terms` in each; the last one overlaps with computation and is not in the total.
_COLUMNS = {
    "linear": ("linear_us",),
    "head": ("head_us",),
    "attention": ("prefill_attention_us", "replay_attention_us"),
    "merge": ("merge_us",),
    "exposed": ("prefill_exposed_us", "exposed_us"),
    "host": ("host_us",),
    "weights": ("weights_us",),
    "(transfers)": ("prefill_transfer_us", "transfer_us"),
}


def table(plan: Plan, which: str) -> str:
    """One table of a plan.

    Raises:
        ValueError: there is no such table.
    """
    tables: dict[str, Callable[[Plan], str]] = {
        "candidates": _candidates, "lanes": _lanes, "groups": _groups, "ranks": _ranks,
    }  # fmt: skip
    if which not in tables:
        raise ValueError(f"a plan has the tables {', '.join(tables)}, got {which!r}")
    return tables[which](plan)


def summary(plan: Plan) -> str:
    """What `print(plan)` shows."""
    shape, costs = plan.batch, plan.costs
    passes = f"{plan.num_rounds} round(s) of {plan.num_waves} wave(s)"
    unmeasured = costs.hardware.unmeasured()
    lines = [
        f"{plan.name}: {costs.model.name}, {plan.world_size} ranks of {costs.hardware.name}, "
        f"{'forward only' if costs.execution.forward_only else 'forward and backward'}",
        f"batch: {shape.num_trees} trees, {int(shape.num_rows.sum())} rows, {shape.num_row_tokens} tokens, "
        f"{shape.num_tokens} distinct ({shape.num_row_tokens / shape.num_tokens:.2f}x)",
        f"predicted: {plan.total_us / 1e3:.1f} ms a step, {shown(plan.memory_bytes)} a rank, {passes}",
        f"because: {plan.reason}",
        "",
        table(plan, "candidates"),
        "",
        table(plan, "lanes"),
    ]
    for baseline in plan.baselines if plan.name == "augtree" else ():
        if baseline.plan is not None and baseline.plan.total_us < plan.total_us:
            gain = 1 - baseline.plan.total_us / plan.total_us
            how = (
                "splits heads, which no schedule here does"
                if baseline.name == "ulysses"
                else "cuts what is kept whole here"
            )
            lines += ["", f"{baseline.name} would take {gain:.1%} less: it {how}"]
    if unmeasured:
        lines += ["", f"not measured on {costs.hardware.name}: {', '.join(unmeasured)}"]
    return "\n".join(lines)


def _milliseconds(terms: Any) -> list[str]:
    return [f"{sum(terms[name] for name in names) / 1e3:.1f}" for names in _COLUMNS.values()]


def _candidates(plan: Plan) -> str:
    rows = [_candidate(candidate, plan) for candidate in plan.candidates]
    if plan.name == "augtree":
        for baseline in plan.baselines:
            if baseline.plan is None:
                rows.append(["", f"baseline: {baseline.name}", "-", "-", baseline.note])
                continue
            rows.append(_candidate(baseline.plan.candidates[0], plan, name=f"baseline: {baseline.name}"))
    headers = ["", "plan", "lanes x ranks", "moves", "ms", "of chosen", *_COLUMNS]
    return f"candidates, ms of the slowest lane\n{tabulate(rows, headers, disable_numparse=True)}"


def _candidate(candidate: Candidate, plan: Plan, *, name: str | None = None) -> list[str]:
    ratio = candidate.total_us / plan.total_us
    return [
        "->" if candidate.chosen and name is None else "",
        name or candidate.name,
        candidate.lanes,
        "heads" if name == "baseline: ulysses" else candidate.schedules,
        f"{'' if candidate.exact else '>= '}{candidate.total_us / 1e3:.1f}",
        f"{ratio:.2f}x",
        *_milliseconds(candidate.terms),
    ]


def _lanes(plan: Plan) -> str:
    rows = []
    for number, lane in enumerate(plan.lanes[:_MAX_ROWS]):
        rows.append(
            [
                number,
                _ranks_text(lane),
                _moves(lane),
                len(lane.parts),
                sum(len(part.branches) for part in lane.parts),
                lane.prompt_tokens,
                lane.response_tokens,
                f"{lane.total_us / 1e3:.1f}",
                *_milliseconds(lane.terms),
                shown(lane.memory_bytes),
            ]
        )
    headers = ["lane", "ranks", "moves", "trees", "branches", "prompt", "response", "ms", *_COLUMNS, "memory"]
    return f"lanes\n{tabulate(rows, headers, disable_numparse=True)}{_more(plan.lanes)}"


def _groups(plan: Plan) -> str:
    where: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, lane in enumerate(plan.lanes):
        for part in lane.parts:
            where[part.tree].append((number, len(part.branches)))
    length = plan.shape.length
    rows = []
    for tree in sorted(where)[:_MAX_ROWS]:
        lanes = ", ".join(f"{lane} ({branches})" for lane, branches in where[tree])
        rows.append([tree, int(length[tree]), sum(branches for _, branches in where[tree]), lanes])
    body = tabulate(rows, ["tree", "root tokens", "branches", "lanes (branches in each)"], disable_numparse=True)
    return f"groups\n{body}{_more(list(where))}"


def _ranks(plan: Plan) -> str:
    rows = []
    for number, lane in enumerate(plan.lanes):
        for rank in lane.ranks:
            rows.append(
                [
                    rank,
                    number,
                    f"{lane.prompt_tokens / lane.degree:.0f}",
                    f"{lane.response_tokens / lane.degree:.0f}",
                    f"{lane.total_us / 1e3:.1f}",
                    f"{max(1 - lane.total_us / plan.total_us, 0.0):.1%}",
                    shown(lane.memory_bytes),
                ]
            )
    headers = ["rank", "lane", "prompt tokens", "response tokens", "ms", "idle", "memory"]
    return f"ranks\n{tabulate(rows[:_MAX_ROWS], headers, disable_numparse=True)}{_more(rows)}"


def _moves(lane: Lane) -> str:
    """Who moves in a lane, and whether its branches are cut."""
    if lane.degree == 1:
        return "-"
    return (lane.schedule.value if lane.schedule else "heads") + (", branches cut" if lane.cut else "")


def _ranks_text(lane: Lane) -> str:
    return f"{lane.ranks[0]}" if lane.degree == 1 else f"{lane.ranks[0]}..{lane.ranks[-1]}"


def _more(rows: Sequence[Any]) -> str:
    return f"\n... and {len(rows) - _MAX_ROWS} more" if len(rows) > _MAX_ROWS else ""


def to_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain values; node numbers are those of ``shape``."""
    shape, execution = plan.shape, plan.costs.execution
    return {
        "name": plan.name,
        "model": plan.costs.model.name,
        "hardware": plan.costs.hardware.name,
        "unmeasured": plan.costs.hardware.unmeasured(),
        "world_size": plan.world_size,
        "forward_only": execution.forward_only,
        "checkpointing": execution.checkpointing,
        "reuse": plan.reuse,
        "shape": {"parent": shape.parent.tolist(), "length": shape.length.tolist()},
        "num_rounds": plan.num_rounds,
        "num_waves": plan.num_waves,
        "total_us": plan.total_us,
        "memory_bytes": plan.memory_bytes,
        "reason": plan.reason,
        "lanes": [_lane_json(lane) for lane in plan.lanes],
        "candidates": [vars(candidate) for candidate in plan.candidates],
    }


def _lane_json(lane: Lane) -> dict[str, Any]:
    return {
        "ranks": list(lane.ranks),
        "schedule": lane.schedule and lane.schedule.value,
        "prefill_schedule": lane.prefill_schedule.value,
        "cut": lane.cut,
        "parts": [part._asdict() | {"branches": list(part.branches)} for part in lane.parts],
        "waves": [vars(wave) | {"branches": list(wave.branches)} for wave in lane.waves],
        "total_us": lane.total_us,
        "terms": dict(lane.terms),
        "memory_bytes": lane.memory_bytes,
    }
