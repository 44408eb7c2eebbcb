"""A planner's plan for a batch, in the words of the runtime: rows, ranks and who moves there; waves on one rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from augtree_fx.dtensor_ops.lanes import LanePlan
from augtree_fx.layout import TreeLayout
from augtree_fx.planner import ModelShape, Plan, Planner, ReplayShape
from augtree_fx.planner.memory import MemoryModel
from augtree_fx.trie import IntArray

logger = logging.getLogger("augtree_fx")


@dataclass(frozen=True, eq=False)
class _Made:
    """The last lanes, for the next batch whose rows lie as in this one."""

    plan: Plan
    row_node: IntArray
    wave_tokens: list[int | None]
    lanes: list[LanePlan]


@dataclass(eq=False)
class PlannedLanes:
    """Chooses as a planner says: lanes, which is what `transform` takes as ``lanes``, and on one rank waves.

    Attributes:
        planner: asked for every batch; it keeps plans by bucket.
        model: sizes of the decoder.
        last: the plan of the last batch.
    """

    planner: Planner
    model: ModelShape
    last: Plan | None = None
    _said: set[int] = field(default_factory=set)
    _made: dict[bool, _Made] = field(default_factory=dict)  # with gradients, and without

    @staticmethod
    def of(planner: Planner, model: nn.Module) -> PlannedLanes:
        """For a model, whose weights are counted now: what PEFT adds later is not.

        Raises:
            ValueError: its config lacks a size that planning needs.
        """
        return PlannedLanes(planner, ModelShape.from_model(model))

    def __call__(self, layout: TreeLayout, num_ranks: int) -> list[LanePlan]:
        """Lanes of a batch, and how many tokens of branches each has alive at a time."""
        plan = self.plan(layout, num_ranks)
        wave_tokens = self._wave_tokens(plan, layout)
        forward_only = plan.costs.execution.forward_only
        made = self._made.get(forward_only)
        if (
            made is None
            or made.plan is not plan
            or made.wave_tokens != wave_tokens
            or not np.array_equal(made.row_node, layout.row_node)
        ):
            lanes = lanes_of(plan, layout, wave_tokens)
            made = self._made[forward_only] = _Made(plan, layout.row_node.copy(), wave_tokens, lanes)
        return list(made.lanes)

    def wave_tokens(self, layout: TreeLayout) -> int | None:
        """Packed tokens of branches that one rank should have alive at a time; ``None`` for all of them."""
        return self._wave_tokens(self.plan(layout, 1), layout)[0]

    def _wave_tokens(self, plan: Plan, layout: TreeLayout) -> list[int | None]:
        """The same of every lane.

        A plan that takes trees one after another, or rows by themselves, is not what one forward does: where its trees
        do not fit at once, waves are then as large as memory leaves them beside all prompts.
        """
        if not plan.reuse or plan.num_rounds > 1:
            return self._that_fit(plan, [lane.degree for lane in plan.lanes], layout, _lane_of_row(plan, layout))
        if plan.num_waves == 1:
            return [None] * len(plan.lanes)
        return [max(1, *(wave.tokens for wave in lane.waves)) for lane in plan.lanes]

    def wave_tokens_of_all(self, layout: TreeLayout, num_ranks: int) -> int | None:
        """The same where all ranks are one lane, as in `prefill` on a mesh."""
        plan = self.plan(layout, num_ranks)
        return self._that_fit(plan, [num_ranks], layout, np.zeros(layout.num_rows, dtype=np.int64))[0]

    def _that_fit(
        self, plan: Plan, degrees: Sequence[int], layout: TreeLayout, lane_of_row: IntArray
    ) -> list[int | None]:
        """Branch tokens that fit beside the prompts of each lane; ``None`` for all of them."""
        memory = MemoryModel.of(plan.costs)
        inner, leaf = _tokens_of(layout, lane_of_row, len(degrees))
        found: list[int | None] = [None] * len(degrees)
        fits = memory.peak_bytes(inner, leaf, degrees, waved=False) <= memory.limit_bytes
        for lane in np.flatnonzero(~fits).tolist():
            tokens = memory.wave_tokens(int(inner[lane]), degrees[lane])
            found[lane] = max(tokens, 1)
            if not tokens:
                self._say_once(
                    degrees[lane],
                    f"a lane of {degrees[lane]} ranks has {int(inner[lane])} prompt tokens, which one forward keeps "
                    "and which leave no memory for a response; pass fewer groups, or take more ranks",
                )
        return found

    def plan(self, layout: TreeLayout, num_ranks: int) -> Plan:
        """The plan of a batch, of a pass without gradients where none are recorded."""
        forward_only = not torch.is_grad_enabled()
        shape = ReplayShape.from_layout(layout)
        self.last = self.planner.plan(shape, self.model, world_size=num_ranks, forward_only=forward_only)
        return self.last

    def _say_once(self, degree: int, message: str) -> None:
        if degree not in self._said:  # lengths differ from batch to batch
            self._said.add(degree)
            logger.warning("augtree-fx: %s", message)


def lanes_of(plan: Plan, layout: TreeLayout, wave_tokens: Sequence[int | None] | None = None) -> list[LanePlan]:
    """A plan's lanes with the rows of the batch that was planned; ``wave_tokens``: of branches alive in each."""
    alive = wave_tokens or [None] * len(plan.lanes)
    return [
        LanePlan(
            lane.ranks, tuple(mine.tolist()), lane.schedule.value if lane.schedule else None, tokens,
            prefill_schedule=lane.prefill_schedule.value, cut=lane.cut,
        )
        for lane, mine, tokens in zip(plan.lanes, rows_of(plan, layout), alive, strict=True)
    ]  # fmt: skip


def rows_of(plan: Plan, layout: TreeLayout) -> list[IntArray]:
    """``[lanes]`` rows of a batch that each lane of its plan computes, ascending; each row is in one of them."""
    lane_of_row = _lane_of_row(plan, layout)
    edges = np.cumsum(np.bincount(lane_of_row, minlength=len(plan.lanes)))
    return np.split(np.argsort(lane_of_row, kind="stable"), edges[:-1])


def _lane_of_row(plan: Plan, layout: TreeLayout) -> IntArray:
    """``[rows]`` lane of each row; empty rows are in the first one."""
    ended = np.flatnonzero(layout.row_node >= 0)
    found = np.zeros(layout.num_rows, dtype=np.int64)
    if plan.reuse:
        found[ended] = plan.lane_of_node[layout.row_node[ended]]
    else:  # nodes of the plan are rows, in the order of their nodes
        found[ended[np.argsort(layout.row_node[ended], kind="stable")]] = plan.lane_of_node
    return found


def _tokens_of(layout: TreeLayout, lane_of_row: IntArray, num_lanes: int) -> tuple[IntArray, IntArray]:
    """``[lanes]`` tokens of each lane's trees: of nodes that others continue, and of those that none does."""
    ended = np.flatnonzero(layout.row_node >= 0)
    lane, node = lane_of_row[ended], layout.row_node[ended]
    ends, above = lane * layout.num_nodes + node, []
    while len(lane):  # a level up
        node = layout.parent[node]
        lane, node = lane[node >= 0], node[node >= 0]
        used = np.unique(lane * layout.num_nodes + node)
        lane, node = used // layout.num_nodes, used % layout.num_nodes
        above.append(used)
    inner = np.unique(np.concatenate([*above, ends[:0]]))
    leaf = np.setdiff1d(ends, inner)
    counted = (
        np.bincount(used // layout.num_nodes, layout.length[used % layout.num_nodes], num_lanes).astype(np.int64)
        for used in (inner, leaf)
    )
    return next(counted), next(counted)
