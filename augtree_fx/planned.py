"""A planner's plan for a batch, in the words of the runtime: rows, ranks and who moves there; waves on one rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from augtree_fx.dtensor_ops.lanes import LanePlan
from augtree_fx.layout import TreeLayout
from augtree_fx.planner import Lane, ModelShape, Plan, Planner, ReplayShape
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
    _said: set[int] = field(default_factory=set)

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
        return [
            replace(found, wave_tokens=self._wave_tokens(plan, lane, layout, found.rows))
            for lane, found in zip(plan.lanes, lanes_of(plan, layout), strict=True)
        ]

    def wave_tokens(self, layout: TreeLayout) -> int | None:
        """Packed tokens of branches that one rank should have alive at a time; ``None`` for all of them."""
        plan = self.plan(layout, 1)
        return self._wave_tokens(plan, plan.lanes[0], layout, range(layout.num_rows))

    def _wave_tokens(self, plan: Plan, lane: Lane, layout: TreeLayout, rows: Sequence[int]) -> int | None:
        """The same of a lane that has some rows.

        A plan that takes trees one after another, or rows by themselves, is not what one forward does: where its trees
        do not fit at once, waves are then as large as memory leaves them beside all prompts.
        """
        if plan.reuse and plan.num_rounds == 1:
            return None if plan.num_waves == 1 else max(1, *(wave.tokens for wave in lane.waves))
        return self._that_fit(plan, lane.degree, *_tokens_of(layout, rows))

    def wave_tokens_of_all(self, layout: TreeLayout, num_ranks: int) -> int | None:
        """The same where all ranks are one lane, as in `prefill` on a mesh."""
        plan = self.plan(layout, num_ranks)
        return self._that_fit(plan, num_ranks, *_tokens_of(layout, range(layout.num_rows)))

    def _that_fit(self, plan: Plan, degree: int, inner: int, leaf: int) -> int | None:
        """Branch tokens that fit beside so many of prompts on some ranks; ``None`` for all of them."""
        memory = MemoryModel.of(plan.costs)
        if float(memory.peak_bytes(inner, leaf, degree, waved=False)) <= memory.limit_bytes:
            return None
        found = memory.wave_tokens(inner, degree)
        if not found:
            self._say_once(
                degree,
                f"a lane of {degree} ranks has {inner} prompt tokens, which one forward keeps and which leave no "
                "memory for a response; pass fewer groups, or take more ranks",
            )
        return max(found, 1)

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


def lanes_of(plan: Plan, layout: TreeLayout) -> list[LanePlan]:
    """A plan's lanes with the rows of the batch that was planned, without its waves."""
    return [
        LanePlan(
            lane.ranks, tuple(mine.tolist()), lane.schedule.value if lane.schedule else None,
            prefill_schedule=lane.prefill_schedule.value, cut=lane.cut,
        )
        for lane, mine in zip(plan.lanes, rows_of(plan, layout), strict=True)
    ]  # fmt: skip


def _tokens_of(layout: TreeLayout, rows: Sequence[int]) -> tuple[int, int]:
    """Tokens of some rows' trees: of nodes that others continue, and of those that none does."""
    found = np.zeros(layout.num_nodes, dtype=bool)
    ends = layout.row_node[np.asarray(rows, dtype=np.int64)]
    found[ends[ends >= 0]] = True
    for node in range(layout.num_nodes - 1, -1, -1):  # children have larger numbers than their parent
        if found[node] and layout.parent[node] >= 0:
            found[layout.parent[node]] = True
    continued = np.isin(np.arange(layout.num_nodes), layout.parent[found])
    return int(layout.length[found & continued].sum()), int(layout.length[found & ~continued].sum())


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
