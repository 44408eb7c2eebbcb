"""The planner: a pure function from shapes to a plan, cached by bucket. No GPU, no process group, no clock."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

from augtree_fx.planner.assemble import plan_of
from augtree_fx.planner.execution import Execution
from augtree_fx.planner.hardware import Hardware
from augtree_fx.planner.model_shape import ModelShape
from augtree_fx.planner.plan import Plan
from augtree_fx.planner.profiles import profile
from augtree_fx.planner.replay_shape import ReplayShape
from augtree_fx.planner.search import search
from augtree_fx.planner.work import Costs


class Planner:
    """Plans batches on one machine. Equal arguments give equal plans, on every rank and in every process."""

    def __init__(
        self,
        hardware: str | Path | Hardware = "h200",
        *,
        execution: Execution | None = None,
        bucketed: bool = True,
        max_cached: int = 256,
    ) -> None:
        """Choose the machine and how steps run on it.

        Args:
            hardware: a profile, its name, or the JSON file that ``calibrate`` wrote.
            execution: checkpointing, sharding and memory; by default `Execution()`. Each plan has its own
                ``forward_only``.
            bucketed: plan for the bucket's lengths, at most 9% above the batch's own, so that similar batches share a
                plan. Otherwise every batch has its own.
            max_cached: plans that are kept, the least recently used one leaves first.

        Raises:
            ValueError: there is no such profile, `execution` is ``forward_only``, or `max_cached` is below 1.
        """
        if max_cached < 1:
            raise ValueError(f"a planner must keep at least 1 plan, got max_cached={max_cached}; leave it out for 256")
        self._hardware = hardware if isinstance(hardware, Hardware) else profile(str(hardware))
        self._execution = _checked(execution or Execution())
        self.bucketed = bucketed
        self._max_cached = max_cached
        self._plans: OrderedDict[Any, Plan] = OrderedDict()
        self._latest: Plan | None = None  # at the end of `_plans`

    @property
    def hardware(self) -> Hardware:
        """The machine; a new one makes new plans."""
        return self._hardware

    @hardware.setter
    def hardware(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._plans.clear()

    @property
    def execution(self) -> Execution:
        """How steps run; a new one makes new plans."""
        return self._execution

    @execution.setter
    def execution(self, execution: Execution) -> None:
        self._execution = _checked(execution)
        self._plans.clear()

    def plan(self, shape: ReplayShape, model: ModelShape, *, world_size: int, forward_only: bool = False) -> Plan:
        """The plan of a batch.

        Args:
            shape: lengths of the batch's trees.
            model: sizes of the decoder.
            world_size: ranks of the axis that the batch is spread over.
            forward_only: plan a pass without backward: old and reference log-probs.

        Raises:
            ValueError: no rank, or no plan fits in memory.
        """
        key = (shape.bucket_key if self.bucketed else shape.key, model, world_size, forward_only)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = self._make(shape, model, world_size, forward_only)
            if len(self._plans) > self._max_cached:
                self._plans.popitem(last=False)
        elif found is not self._latest:
            self._plans.move_to_end(key)
        self._latest = found
        return found

    def costs(self, model: ModelShape, *, world_size: int, forward_only: bool = False) -> Costs:
        """What prices depend on, for one kind of pass.

        Raises:
            ValueError: no rank.
        """
        if world_size < 1:
            raise ValueError(f"a plan needs at least 1 rank, got world_size={world_size}; pass the size of the axis")
        return Costs(self.hardware, model, replace(self.execution, forward_only=forward_only), world_size)

    def _make(self, shape: ReplayShape, model: ModelShape, world_size: int, forward_only: bool) -> Plan:
        costs = self.costs(model, world_size=world_size, forward_only=forward_only)
        batch = shape.bucketed() if self.bucketed else shape
        best, others = search(batch, costs)
        return plan_of("augtree", batch, best, others, costs)


def _checked(execution: Execution) -> Execution:
    if execution.forward_only:
        raise ValueError(
            "a planner plans passes of both kinds, got Execution(forward_only=True); pass forward_only=True to plan()"
        )
    return execution
