"""A planner's plan for a batch, in the words of the runtime: rows, ranks and who moves there; waves on one rank."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from augtree_fx.dtensor_ops.lanes import LanePlan, one_pass_schedule
from augtree_fx.layout import TreeLayout
from augtree_fx.planner import ModelShape, Plan, Planner, ReplayShape
from augtree_fx.planner.memory import MemoryModel
from augtree_fx.trie import IntArray

logger = logging.getLogger("augtree_fx")


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
    _said: set[str] = field(default_factory=set)

    @staticmethod
    def of(planner: Planner, config: Any) -> PlannedLanes:
        """For the decoder of a config.

        Raises:
            ValueError: the config lacks a size that planning needs.
        """
        return PlannedLanes(planner, ModelShape.from_config(config))

    def __call__(self, layout: TreeLayout, num_ranks: int) -> list[LanePlan]:
        """Lanes of a batch; a plan of several waves runs in one pass, and that is said once."""
        plan = self.plan(layout, num_ranks)
        if plan.num_waves > 1 or plan.num_rounds > 1:
            self._say_once(
                f"the plan has {plan.num_rounds} rounds of {plan.num_waves} waves, which one forward runs in one "
                "pass; if memory runs out, pass fewer rows, or take more ranks"
            )
        return lanes_of(plan, layout)

    def wave_tokens(self, layout: TreeLayout) -> int | None:
        """Packed tokens of branches that one rank should have alive at a time; ``None`` for all of them.

        A plan that takes trees one after another, or rows by themselves, is not what one forward does: where its tree
        does not fit at once, waves are then as large as memory leaves them beside all prompts.
        """
        plan = self.plan(layout, 1)
        if plan.reuse and plan.num_rounds == 1:
            return None if plan.num_waves == 1 else max(1, *(wave.tokens for wave in plan.lanes[0].waves))
        shape, memory = ReplayShape.from_layout(layout), MemoryModel.of(plan.costs)
        leaf = int(shape.length[shape.is_leaf].sum())
        inner = shape.num_tokens - leaf
        if float(memory.peak_bytes(inner, leaf, 1, waved=False)) <= memory.limit_bytes:
            return None
        found = memory.wave_tokens(inner, 1)
        if not found:
            self._say_once(
                f"a batch has {inner} prompt tokens, which one forward keeps and which leave no memory for a response; "
                "pass fewer groups, or take more ranks"
            )
        return max(found, 1)

    def plan(self, layout: TreeLayout, num_ranks: int) -> Plan:
        """The plan of a batch, of a pass without gradients where none are recorded."""
        forward_only = not torch.is_grad_enabled()
        shape = ReplayShape.from_layout(layout)
        self.last = self.planner.plan(shape, self.model, world_size=num_ranks, forward_only=forward_only)
        return self.last

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning("augtree-fx: %s", message)


def lanes_of(plan: Plan, layout: TreeLayout) -> list[LanePlan]:
    """A plan's lanes with the rows of the batch that was planned."""
    fallback = one_pass_schedule(layout)
    return [
        LanePlan(lane.ranks, tuple(mine.tolist()), lane.schedule.value if lane.schedule else fallback)
        for lane, mine in zip(plan.lanes, rows_of(plan, layout), strict=True)
    ]


def rows_of(plan: Plan, layout: TreeLayout) -> list[IntArray]:
    """``[lanes]`` rows of a batch that each lane of its plan computes, ascending; each row is in one of them."""
    lane_of = np.full(layout.num_nodes, -1, dtype=np.int64)  # of a node's rows
    order = np.argsort(layout.row_node, kind="stable")
    if not plan.reuse:  # trees of the plan are rows, in the order of their nodes
        lane_of_row = np.zeros(layout.num_rows, dtype=np.int64)
        for number, lane in enumerate(plan.lanes):
            ended = order[np.count_nonzero(layout.row_node < 0) :]
            lane_of_row[ended[[part.tree for part in lane.parts]]] = number
        return [np.flatnonzero(lane_of_row == number) for number in range(len(plan.lanes))]
    for number, lane in enumerate(plan.lanes):
        for part in lane.parts:
            lane_of[part.tree] = number
            lane_of[list(part.branches)] = number
    for node in range(layout.num_nodes):  # rows that end above the branches: with their tree
        if lane_of[node] < 0:
            lane_of[node] = lane_of[layout.parent[node]]
    lane_of_row = np.where(layout.row_node >= 0, lane_of[layout.row_node], 0)
    return [np.flatnonzero(lane_of_row == number) for number in range(len(plan.lanes))]
