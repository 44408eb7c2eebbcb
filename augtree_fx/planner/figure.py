"""A plan as a timeline: one bar a lane, as tall as its ranks, with what each stretch is written in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from augtree_fx.planner.plan import Lane, Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"prefill": "#1b7f5c", "replay": "#4c78a8", "transfer": "#d98c21", "host": "#b8566b",
           "weights": "#9c6ade", "idle": "#e8ebee"}  # fmt: skip
_MAX_LANES = 64
_MIN_LABEL = 0.055  # narrower stretches, as a fraction of the step, carry no text


def stretches(lane: Lane, total_us: float) -> list[tuple[str, float]]:
    """What a lane does one after another, in microseconds; waits only where nothing hides them."""
    terms = lane.terms
    tokens = lane.prompt_tokens + lane.response_tokens
    share = lane.prompt_tokens / tokens if tokens else 0.0
    prefill = terms["linear_us"] * share + terms["prefill_attention_us"]
    replay = terms["linear_us"] * (1 - share) + terms["replay_attention_us"] + terms["merge_us"] + terms["head_us"]
    waits = terms["prefill_exposed_us"] + terms["exposed_us"]
    spans = [("prefill", prefill), ("replay", replay), ("transfer", waits), ("host", terms["host_us"])]
    return [*spans, ("weights", terms["weights_us"]), ("idle", max(total_us - lane.total_us, 0.0))]


def figure(plan: Plan) -> Figure:
    """The timeline of a plan.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plan.figure() needs matplotlib, which is not installed; pip install matplotlib") from error

    lanes = plan.lanes[:_MAX_LANES]
    ranks = sum(lane.degree for lane in lanes)
    drawn = Figure(figsize=(10, min(max(2.2, 1.2 + 0.12 * ranks), 12)), layout="constrained")
    axes = drawn.add_subplot()
    for lane in lanes:
        _draw_lane(axes, lane, plan.total_us, ranks)
    axes.set_xlim(0, plan.total_us / 1e3)
    axes.set_ylim(ranks, 0)
    axes.set_yticks([lane.ranks[0] + lane.degree / 2 for lane in lanes], [_label(lane) for lane in lanes])
    axes.tick_params(axis="y", length=0, labelsize=7 if len(lanes) <= 32 else 5)
    axes.set_xlabel("ms, in the order of kinds, not of layers; transfers only as far as nothing hides them")
    left_out = len(plan.lanes) - len(lanes)
    axes.set_title(
        f"{plan.costs.model.name} on {plan.world_size} x {plan.costs.hardware.name}: {plan.total_us / 1e3:.1f} ms, "
        f"{plan.candidates[0].lanes} lanes x ranks{f', first {len(lanes)} lanes' if left_out else ''}",
        fontsize=10, loc="left",
    )  # fmt: skip
    axes.spines[["top", "right", "left"]].set_visible(False)
    return drawn


def _draw_lane(axes: Axes, lane: Lane, total_us: float, ranks: int) -> None:
    left = 0.0
    middle, height = lane.ranks[0] + lane.degree / 2, 0.86 * lane.degree
    for kind, span in stretches(lane, total_us):
        if span <= 0:
            continue
        axes.barh(middle, span / 1e3, height, left / 1e3, color=_COLORS[kind], edgecolor="white", linewidth=0.5)
        if span >= _MIN_LABEL * total_us and lane.degree * 72 >= ranks:
            dark = kind == "idle"
            axes.text(
                (left + span / 2) / 1e3, middle, f"{kind} {span / 1e3:.0f}", ha="center", va="center", fontsize=7,
                color="#5b6570" if dark else "white", clip_on=True,
            )  # fmt: skip
        left += span


def _label(lane: Lane) -> str:
    ranks = f"rank {lane.ranks[0]}" if lane.degree == 1 else f"ranks {lane.ranks[0]}-{lane.ranks[-1]}"
    moves = "" if lane.degree == 1 or lane.schedule is None else f", {lane.schedule.value}"
    return f"{ranks}{moves}"
