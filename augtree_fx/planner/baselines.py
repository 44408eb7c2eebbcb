"""What others do with the same batch, as plans priced by the same model.

Rings share tokens evenly, in equal runs of branches, and pairs as these leave them.

ring              rows without reuse, each sharded over all ranks (ring attention, arXiv 2310.01889)
ring with reuse   prompts once, prompts and responses sharded over all ranks
dynamic           rows without reuse, each with a power-of-two number of ranks of its own (FlexSP, arXiv 2412.01523)
ulysses           rows without reuse, heads split by all-to-all (DeepSpeed Ulysses, arXiv 2309.14509)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from augtree_fx.memory import shown
from augtree_fx.planner.assemble import plan_of
from augtree_fx.planner.memory import MemoryModel
from augtree_fx.planner.packing import pack
from augtree_fx.planner.placement import Placement, even_placement, placements
from augtree_fx.planner.plan import Plan
from augtree_fx.planner.pricing import Priced, best_of, bounds, exchanged
from augtree_fx.planner.replay_shape import ReplayShape
from augtree_fx.planner.schedule import Schedule
from augtree_fx.planner.units import branches_of
from augtree_fx.planner.work import Costs

NAMES = ("ring", "ring with reuse", "dynamic", "ulysses")
_RING = (Schedule.ROTATE_KV,)


@dataclass(frozen=True)
class Baseline:
    """A baseline's plan, or why there is none.

    Attributes:
        name: one of `NAMES`.
        plan: its plan; ``None`` if it does not fit in memory.
        note: why not.
    """

    name: str
    plan: Plan | None
    note: str = ""


def baselines(shape: ReplayShape, costs: Costs) -> tuple[Baseline, ...]:
    """All baselines of a batch, in the order of `NAMES`."""
    rows = shape.flat()
    whole = costs.world_size
    tried = {
        "ring": _ring(rows, [even_placement(rows, branches_of(rows), whole, costs)], costs, reuse=False),
        "ring with reuse": _ring(shape, [even_placement(shape, branches_of(shape), whole, costs)], costs, reuse=True),
        "dynamic": _ring(rows, list(placements(rows, branches_of(rows), costs)), costs, reuse=False),
        "ulysses": _ulysses(rows, costs),
    }
    return tuple(_baseline(name, shape, found, costs) for name, found in tried.items())


def _baseline(name: str, shape: ReplayShape, found: tuple[Priced | None, list[Priced]], costs: Costs) -> Baseline:
    best, others = found
    if best is None:
        return Baseline(name, None, f"does not fit in {shown(costs.hardware.memory_bytes)} a rank")
    plan = plan_of(name, shape, best, others, costs)
    if name == "ulysses":
        plan = replace(plan, lanes=tuple(replace(lane, schedule=None) for lane in plan.lanes))
    return Baseline(name, plan)


def _ring(
    shape: ReplayShape, tried: Sequence[Placement | None], costs: Costs, *, reuse: bool
) -> tuple[Priced | None, list[Priced]]:
    usable = [placement for placement in tried if placement is not None]
    if not usable:
        return None, []
    return best_of(bounds(usable, costs, reuse=reuse, schedules=_RING, cuts=True), costs)


def _ulysses(rows: ReplayShape, costs: Costs) -> tuple[Priced | None, list[Priced]]:
    """The best degree that divides the query heads."""
    branches, memory = branches_of(rows), MemoryModel.of(costs)
    found = []
    degree = 1
    while degree <= costs.world_size and costs.model.num_heads % degree == 0:
        placement = even_placement(rows, branches, degree, costs)
        packing = None if placement is None else pack(placement, memory)
        if placement is not None and packing is not None:
            found.append(exchanged(placement, packing, costs))
        degree *= 2
    found.sort(key=lambda priced: priced.rank)
    return (found[0], found[1:]) if found else (None, [])
