"""Why a plan was chosen, in one sentence: what would have moved the other way, and what the next best takes."""

from __future__ import annotations

from collections.abc import Sequence

from augtree_fx.memory import shown
from augtree_fx.planner.plan import Candidate
from augtree_fx.planner.pricing import Priced
from augtree_fx.planner.schedule import Schedule
from augtree_fx.planner.transfers import kv_bytes, query_bytes
from augtree_fx.planner.work import SCHEDULES, Costs


def reason(best: Priced, rejected: Sequence[Candidate], costs: Costs) -> str:
    """One sentence.

    Args:
        best: what was chosen.
        rejected: the others, in order of preference.
        costs: what they were priced with.
    """
    parts = [_sharing(best), _movement(best, costs)]
    other = next((candidate for candidate in rejected if candidate.total_us > best.total_us), None)
    if other is not None:
        slower = other.total_us / best.total_us - 1
        parts.append(f"the next best ({other.name}) takes {'at least ' * (not other.exact)}{slower:.1%} longer")
    return "; ".join(part for part in parts if part)


def _sharing(best: Priced) -> str:
    return "" if best.reuse else "prompts are too short to pay for a tree, rows run by themselves"


def _movement(best: Priced, costs: Costs) -> str:
    slowest = int(best.lane_us.argmax())
    where = best.lanes.start + slowest
    loads, degree = best.loads, int(best.placement.lane_degrees[slowest])
    inner, leaf = int(loads.inner_tokens[where]), int(loads.leaf_tokens[where])
    if degree == 1:
        return "every lane is one rank, so nothing moves but weights"
    if not leaf:
        return f"rows of {inner} tokens in all are sharded over {degree} ranks"
    waves = best.packing.waves * best.packing.rounds if best.packing else 1
    away = (degree - 1) / degree
    repeats = best.packing.waves if best.packing else 1
    kv = sum(map(float, kv_bytes(float(loads.kv_token_layers[where]) * away * repeats, costs)))
    queries = sum(map(float, query_bytes(leaf * costs.model.num_layers * away, costs)))
    lengths = f"prompt {inner} vs {leaf // waves} response tokens a wave in a lane of {degree}"
    schedule = SCHEDULES[int(best.schedule[slowest])]
    if schedule is Schedule.MOVE_Q:
        return f"{lengths}: queries move {shown(queries)} a rank, KV would move {shown(kv)}"
    word = "rotates" if schedule is Schedule.ROTATE_KV else "is gathered"
    extra = " more, as KV goes around for the prompt itself in the same pass" if repeats == 1 else ""
    return f"{lengths}: KV {word}, {shown(kv)} a rank, queries would move {shown(queries)}{extra}"
