"""What a planner returns: lanes, with who computes what and when, what that should take, and what was rejected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from augtree_fx.planner.replay_shape import IntArray, ReplayShape
from augtree_fx.planner.schedule import Schedule
from augtree_fx.planner.work import Costs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from augtree_fx.planner.baselines import Baseline


class Part(NamedTuple):
    """What a lane has of one tree. A tuple, since a batch has tens of thousands.

    Attributes:
        tree: index of the tree's root in the plan's shape.
        branches: nodes of the shape that are replayed; all of their ancestors are prefilled in the same lane.
        whole: whether no other lane has any of the tree.
        round: the round in which it runs.
    """

    tree: int
    branches: tuple[int, ...]
    whole: bool
    round: int


@dataclass(frozen=True)
class Wave:
    """One pass over branches of a lane; over prompts, too, if the plan has one wave a round.

    Attributes:
        round: the round it belongs to.
        index: of the wave within its round.
        branches: nodes of the shape; empty where other lanes have more waves.
        tokens: of these branches.
    """

    round: int
    index: int
    branches: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class Lane:
    """Ranks that work on the same trees.

    Attributes:
        ranks: of the axis, neighbours.
        schedule: who moves in the replay; ``None`` in the Ulysses baseline, where heads are split instead.
        prefill_schedule: `ROTATE_KV` or `GATHER_KV`.
        parts: trees, or parts of them.
        waves: passes over branches, as many in every lane.
        prompt_tokens: prefilled tokens.
        response_tokens: replayed tokens.
        terms: predicted microseconds by term, fields of `terms.Terms`.
        total_us: their sum, transfers counted only as far as they are exposed.
        memory_bytes: peak of one rank.
        cut: whether long branches are cut over its ranks as prompts are; otherwise only those longer than a share.
    """

    ranks: tuple[int, ...]
    schedule: Schedule | None
    prefill_schedule: Schedule
    parts: tuple[Part, ...]
    waves: tuple[Wave, ...]
    prompt_tokens: int
    response_tokens: int
    terms: Mapping[str, float]
    total_us: float
    memory_bytes: float
    cut: bool = False

    @property
    def degree(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Candidate:
    """A way to run the batch that was priced.

    Attributes:
        name: how it was made.
        lanes: lanes by degree, as in ``2 x 16 + 8 x 4``.
        schedules: those of its lanes.
        total_us: predicted time of the step.
        exact: whether memory was looked at; otherwise the time is a lower bound, which was enough to reject it.
        terms: of its slowest lane.
        chosen: whether this is the plan.
        reuse: whether shared tokens are computed once.
    """

    name: str
    lanes: str
    schedules: str
    total_us: float
    exact: bool
    terms: Mapping[str, float]
    chosen: bool
    reuse: bool


@dataclass(frozen=True, eq=False)
class Plan:
    """Where and when every token of a batch is computed, and what that should take. Equal if the decisions are.

    Attributes:
        name: ``augtree``, or the baseline that this is.
        shape: what was planned: the bucket's shape, or its rows if `reuse` is off.
        batch: the shape that was asked for; differs from `shape` if `reuse` is off.
        costs: what the plan was priced with.
        reuse: whether shared tokens are computed once.
        num_rounds: rounds, one after another.
        num_waves: passes over branches in each round; with 1, prompts run in the same pass, with more in one before.
        total_us: predicted time of the step: the slowest lane's.
        lanes: they partition the ranks.
        candidates: the chosen one first, then the rejected ones in order of preference.
        reason: why, in one sentence.
    """

    name: str
    shape: ReplayShape
    batch: ReplayShape
    costs: Costs
    reuse: bool
    num_rounds: int
    num_waves: int
    total_us: float
    lanes: tuple[Lane, ...]
    candidates: tuple[Candidate, ...]
    reason: str

    @property
    def world_size(self) -> int:
        return self.costs.world_size

    @property
    def memory_bytes(self) -> float:
        """Peak of the fullest rank."""
        return max(lane.memory_bytes for lane in self.lanes)

    @cached_property
    def lane_of_node(self) -> IntArray:
        """``[nodes]`` lane of rows of `shape` that end in each node; above the branches, of the tree's last part."""
        parts = [(number, part) for number, lane in enumerate(self.lanes) for part in lane.parts]
        found = np.full(self.shape.num_nodes, -1, dtype=np.int64)
        found[[part.tree for _, part in parts]] = [number for number, _ in parts]
        count = [len(part.branches) for _, part in parts]
        branches = np.fromiter((node for _, part in parts for node in part.branches), np.int64, sum(count))
        found[branches] = np.repeat([number for number, _ in parts], count)
        begins = self.shape.level_begin.tolist()
        for first, last in zip(begins[1:-1], begins[2:], strict=True):
            above = found[self.shape.parent[first:last]]
            found[first:last] = np.where(found[first:last] < 0, above, found[first:last])
        return found

    @property
    def decisions(self) -> tuple[Any, ...]:
        """What the runtime obeys, without prices."""
        lanes = (
            (lane.ranks, lane.schedule, lane.prefill_schedule, lane.parts, lane.waves, lane.cut) for lane in self.lanes
        )
        return self.reuse, self.num_rounds, self.num_waves, *lanes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.decisions == other.decisions and self.shape == other.shape

    def __hash__(self) -> int:
        return hash((self.num_rounds, self.num_waves, self.shape))

    @cached_property
    def baselines(self) -> tuple[Baseline, ...]:
        """Other ways to run the same batch, priced by the same model."""
        from augtree_fx.planner.baselines import baselines

        return baselines(self.batch, self.costs)

    def table(self, which: str = "candidates") -> str:
        """One of the plan's tables: ``candidates``, ``lanes``, ``groups`` or ``ranks``.

        Raises:
            ValueError: there is no such table.
        """
        from augtree_fx.planner.tables import table

        return table(self, which)

    def __str__(self) -> str:
        from augtree_fx.planner.tables import summary

        return summary(self)

    def to_json(self) -> dict[str, Any]:
        """A mapping for `json.dumps`: decisions, prices, candidates, reason."""
        from augtree_fx.planner.tables import to_json

        return to_json(self)

    def figure(self) -> Figure:
        """A timeline of every rank, as a matplotlib figure with `savefig`.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from augtree_fx.planner.figure import figure

        return figure(self)
