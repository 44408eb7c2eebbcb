"""Event-level simulation of a step: a host, a compute queue and a link queue on every rank, layer by layer.

It knows nothing of the closed-form costs. A transfer starts when its data is there and the link is free; a kernel
starts when its operands are there and the rank is free; a collective starts when the last rank of its lane is ready.
A layer is not over before its host has launched it; hosts run ahead.
The first layer of each kind is simulated cold, the second one stands for all further ones of that kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from augtree_fx.planner.host import layer_us
from augtree_fx.planner.memory import FLOAT32_BYTES
from augtree_fx.planner.plan import Lane, Plan
from augtree_fx.planner.rank_work import LanePass, lane_pass
from augtree_fx.planner.schedule import Schedule
from augtree_fx.planner.terms import MERGE_BYTES, head_us, linear_us
from augtree_fx.planner.units import FloatArray

LEFT_OUT = (
    "contention between lanes and with FSDP on the same network, stragglers and clock drift, the allocator, "
    "the optimizer, data loading, generation, uneven experts"
)
_SIMULATED_LAYERS = 2


@dataclass(frozen=True)
class Simulation:
    """Outcome of a simulated step.

    Attributes:
        total_us: time of the step.
        busy: fraction of rank time in which kernels run.
        lane_us: time at which each lane is done, before it waits for others.
    """

    total_us: float
    busy: float
    lane_us: tuple[float, ...]


@dataclass
class _Clock:
    """Times at which each rank of a lane is free: to compute, and to send. `busy` is the time its kernels ran, `host`
    when what is launched so far was."""

    compute: FloatArray
    link: FloatArray
    busy: FloatArray
    host: float = 0.0

    @staticmethod
    def of(degree: int) -> _Clock:
        """At the start of a step."""
        return _Clock(np.zeros(degree), np.zeros(degree), np.zeros(degree))

    def run(self, duration: FloatArray | float, ready: FloatArray | float = 0.0) -> None:
        """A kernel on every rank, not before its operands are there."""
        self.compute = np.maximum(self.compute, ready) + duration
        self.busy = self.busy + duration

    def collective(self, duration: float, ready: FloatArray) -> float:
        """A collective of the lane; returns when it ends."""
        end = float(np.maximum(self.link, ready).max()) + duration
        self.link = np.full_like(self.link, end)
        return end

    def ring(self, first: FloatArray, work: FloatArray, shown_us: float, home_us: float) -> None:
        """A ring: at each step a d-th of the work, while the next shard comes from the neighbour.

        Args:
            first: work of the first step alone.
            work: of all steps.
            shown_us: one step of what all ranks have to see.
            home_us: one step of what goes home, one step behind.
        """
        degree = len(work)
        held = self.compute.copy()  # when each rank holds the shard of the step
        for step in range(degree):
            if step < degree - 1:
                took = shown_us + home_us * (step > 0)
                arrived = np.maximum(np.roll(np.maximum(held, self.link), 1), self.link) + took
            self.run(work / degree + first * (step == 0), held)
            if step < degree - 1:
                self.link, held = arrived, arrived
        if home_us and degree > 1:
            self.link = np.maximum(np.roll(np.maximum(self.compute, self.link), 1), self.link) + home_us
            self.run(0.0, self.link)

    def launched(self, took_us: float) -> None:
        """A layer that took its host so long."""
        self.host += took_us
        self.run(0.0, self.host)


def simulate(plan: Plan) -> Simulation:
    """Run one step of a plan. Ranks that share weights (FSDP) meet at the end of every pass.

    Args:
        plan: ours, or a baseline's.
    """
    clocks = [_Clock.of(lane.degree) for lane in plan.lanes]
    collective_us = _weights_us(plan)
    started = 0.0
    lane_us = np.zeros(len(plan.lanes))
    for number in range(plan.num_rounds):
        for one in _passes(plan):
            for lane, clock in zip(plan.lanes, clocks, strict=True):
                share = lane_pass(plan, lane, number=number, wave=one.wave, prefills=one.prefills)
                _LaneRun(plan, lane, share, clock).run(one)
            ends = np.array([max(clock.compute.max(), clock.link.max()) for clock in clocks])
            lane_us += ends - started
            if collective_us:
                started = max(float(ends.max()), started + collective_us * (one.forward + 2 * one.backward))
                for clock in clocks:
                    clock.compute = np.full_like(clock.compute, started)
                    clock.link = np.full_like(clock.link, started)
            else:
                lane_us, started = ends, 0.0
    total = max(started, float(lane_us.max()), 1e-9)
    busy = sum(float(clock.busy.sum()) for clock in clocks) / (total * plan.world_size)
    return Simulation(total, busy, tuple(lane_us.tolist()))


@dataclass(frozen=True)
class _Pass:
    """A pass: the wave that it replays, whether prompts run in it, and its directions."""

    wave: int | None
    prefills: bool
    forward: bool
    backward: bool


def _passes(plan: Plan) -> list[_Pass]:
    trains = not plan.costs.execution.forward_only
    if plan.num_waves == 1:
        return [_Pass(0, True, True, trains)]
    waves = [_Pass(wave, False, True, trains) for wave in range(plan.num_waves)]
    return [_Pass(None, True, True, False), *waves, *([_Pass(None, True, False, True)] if trains else [])]


def _weights_us(plan: Plan) -> float:
    """Time of FSDP's collectives of all layers in one direction."""
    costs = plan.costs
    if plan.world_size == 1 or not costs.execution.shard_weights:
        return 0.0
    link = costs.hardware.link(plan.world_size)
    moved = costs.model.total_weights * costs.model.dtype_bytes * (plan.world_size - 1) / plan.world_size
    return moved / link.all_gather_bytes_per_s * 1e6 + costs.model.num_layers * link.latency_us


@dataclass(frozen=True)
class _LaneRun:
    """One lane in one pass: its kernels and transfers, in the order in which the runtime issues them."""

    plan: Plan
    lane: Lane
    share: LanePass
    clock: _Clock

    def run(self, one: _Pass) -> None:
        costs = self.plan.costs
        if one.forward:
            self._layers(self._forward, one)
            self.clock.run(head_us(self.share.scored_tokens, costs))
        if one.backward:
            self._layers(self._backward, one)

    def _layers(self, layer: Callable[[int], None], one: _Pass) -> None:
        """All layers, kind by kind: two are simulated, the others repeat the second."""
        clock, host_us = self.clock, self._host_us(one, backward=layer == self._backward)
        for kind, (_, count) in enumerate(self.plan.costs.model.windows):
            for index in range(min(count, _SIMULATED_LAYERS)):
                before, busy = float(clock.compute.max()), clock.busy
                layer(kind)
                if index == _SIMULATED_LAYERS - 1:
                    repeats = count - _SIMULATED_LAYERS
                    gained = (float(clock.compute.max()) - before) * repeats
                    clock.compute, clock.link = clock.compute + gained, clock.link + gained
                    clock.busy = clock.busy + (clock.busy - busy) * repeats
                    clock.launched(host_us * repeats)
                clock.launched(host_us)

    def _host_us(self, one: _Pass, *, backward: bool) -> float:
        """A layer's time on the host, in backward with the forward that runs again."""
        plan = self.plan
        if not (self.share.prompt_tokens.any() or self.share.branch_tokens.any()):
            return 0.0
        schedule = self.lane.schedule or Schedule.GATHER_KV
        args = (self.lane.degree, plan.shape.num_levels, schedule, plan.costs)
        forward_us = layer_us(*args, backward=False, keys=one.prefills)
        again = forward_us * plan.costs.execution.checkpointing
        return layer_us(*args, backward=True, keys=one.prefills) + again if backward else forward_us

    def _forward(self, kind: int) -> None:
        self._dense(1)
        self._attend(kind, backward=False)

    def _backward(self, kind: int) -> None:
        if self.plan.costs.execution.checkpointing:
            self._forward(kind)
        self._dense(2)
        self._attend(kind, backward=True)

    def _dense(self, products: int) -> None:
        costs = self.plan.costs
        tokens = self.share.prompt_tokens + self.share.branch_tokens
        whole = costs.model.num_layers * (costs.execution.forwards + 2 * costs.execution.backwards)
        self.clock.run(linear_us(tokens, 1, costs) * products / whole)

    def _attend(self, kind: int, *, backward: bool) -> None:
        work, row = self.share.attention[kind], int(backward)
        clock, lane, schedule = self.clock, self.lane, self.lane.schedule
        prompts, branches = self.share.prompt_tokens.any(), self.share.branch_tokens.any()
        if schedule is None:
            self._exchange_heads(work.prefill[row])
            return
        own, cross, prefill = work.own[row], work.cross[row], work.prefill[row]
        if lane.degree == 1:
            clock.run(own + cross + prefill + self._merge_us())
            return
        if not branches:
            schedule = lane.prefill_schedule
        shown, home = self._kv_us(kind, gathers=schedule is Schedule.GATHER_KV, backward=backward)
        if schedule is Schedule.GATHER_KV:
            end = clock.collective(shown, clock.compute)
            clock.run(own + (prefill + cross) / lane.degree)
            clock.run((prefill + cross) * (1 - 1 / lane.degree) + self._merge_us() * branches, end)
            if backward:
                clock.run(0.0, clock.collective(home, clock.compute))
        elif schedule is Schedule.ROTATE_KV:
            clock.ring(own, prefill + cross, shown, home)
            clock.run(self._merge_us() * lane.degree)
        else:
            sent, returned = self._query_us(backward)
            if prompts:  # keys of prompts go around for their own queries
                clock.ring(own * 0, prefill, shown, home)
            end = clock.collective(sent, clock.compute)
            clock.run(own)
            clock.run(cross, end)
            clock.run(self._merge_us() * lane.degree, clock.collective(returned, clock.compute))

    def _kv_us(self, kind: int, *, gathers: bool, backward: bool) -> tuple[float, float]:
        """One step of the ring, or one gather and the reduce-scatter of gradients: what is shown, what goes home."""
        model, degree = self.plan.costs.model, self.lane.degree
        link = self.plan.costs.hardware.link(degree)
        values = self.share.kv_tokens[kind] * model.kv_values_per_token * 1e6
        shown, home = values * model.dtype_bytes, values * FLOAT32_BYTES
        if not gathers:
            back = link.latency_us + home / link.ring_bytes_per_s
            return link.latency_us + shown / link.ring_bytes_per_s, back * backward
        back = link.latency_us + home / link.reduce_scatter_bytes_per_s * (degree - 1)
        return link.latency_us + shown / link.all_gather_bytes_per_s * (degree - 1), back * backward

    def _query_us(self, backward: bool) -> tuple[float, float]:
        model, degree = self.plan.costs.model, self.lane.degree
        link = self.plan.costs.hardware.link(degree)
        away = float(self.share.branch_tokens.sum()) * (degree - 1) / degree
        queries, outputs = model.query_values_per_token, model.output_values_per_token
        sent = away * (queries + outputs * backward) * model.dtype_bytes
        returned = away * (queries if backward else outputs) * FLOAT32_BYTES
        return (
            link.latency_us + sent / link.all_gather_bytes_per_s * 1e6,
            link.latency_us + returned / link.all_to_all_bytes_per_s * 1e6,
        )

    def _merge_us(self) -> FloatArray:
        """Merge of one partial of every branch token of each rank."""
        costs = self.plan.costs
        moved = self.share.branch_tokens * costs.model.output_values_per_token * MERGE_BYTES
        return moved / costs.hardware.memory_bytes_per_s * 1e6

    def _exchange_heads(self, attention: FloatArray) -> None:
        """Ulysses: all-to-all of queries, keys and values, attention of some heads, all-to-all of outputs."""
        model, degree = self.plan.costs.model, self.lane.degree
        if degree == 1:
            self.clock.run(attention)
            return
        link = self.plan.costs.hardware.link(degree)
        kv_values = max(degree, model.num_kv_heads) * (model.head_dim + model.value_head_dim)
        sides = ((model.query_values_per_token + kv_values, attention), (model.output_values_per_token, 0.0))
        for values, then in sides:
            moved = float(self.share.prompt_tokens.max()) * values * model.dtype_bytes * (degree - 1) / degree
            took = link.latency_us + moved / link.all_to_all_bytes_per_s * 1e6
            self.clock.run(then, self.clock.collective(took, self.clock.compute))
