"""``bench cp --step --turns``: the ranks of an axis share one device; they are timed in turns, without transfers.

What comes out is what each rank has to compute, for any number of ranks: how evenly a way of context parallelism
shares the work of a batch, and what of it is done more than once. Times of steps are at least that; how much transfers
add takes as many devices. The parity gate is passed before, by all ranks at once and with transfers through the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn

from augtree_fx.examples.bench import timing
from augtree_fx.examples.bench.cp.contender import Contender
from augtree_fx.examples.bench.cp.step import Case, checked, update
from augtree_fx.examples.bench.cp.world import World


class _Done:
    """The handle of a transfer that there is not."""

    def wait(self) -> None:
        """Nothing is under way."""


@dataclass
class _ThroughHost:
    """The handle of transfers between copies on the host, which are copied to where they are awaited."""

    works: list[Any]
    arriving: list[tuple[Tensor, Tensor]]

    def wait(self) -> None:
        """On the host."""
        for work in self.works:
            work.wait()
        for target, arrived in self.arriving:
            target.copy_(arrived)
        self.works, self.arriving = [], []


@contextmanager
def through_host() -> Iterator[None]:
    """Tensors of any device travel by gloo, by way of copies on the host."""
    right = {name: getattr(distributed, name) for name in _TRANSFERS}

    def receive(operations: list[Any]) -> list[_ThroughHost]:
        copies = [each.tensor.cpu() if each.op is distributed.isend else _like(each.tensor) for each in operations]
        staged = [
            distributed.P2POp(each.op, copy, each.peer, each.group, each.tag)
            for each, copy in zip(operations, copies, strict=True)
        ]
        arriving = [
            (each.tensor, copy) for each, copy in zip(operations, copies, strict=True) if each.op is distributed.irecv
        ]
        return [_ThroughHost(right["batch_isend_irecv"](staged), arriving)]

    def collective(name: str) -> Callable[..., _ThroughHost | None]:
        def run(found: Tensor, *given: Any, async_op: bool = False, **options: Any) -> _ThroughHost | None:
            in_place = name in ("all_reduce", "broadcast")
            copy = found.cpu() if in_place else _like(found)
            given = tuple(each.cpu() if isinstance(each, Tensor) else each for each in given)
            work = _ThroughHost([right[name](copy, *given, async_op=True, **options)], [(found, copy)])
            if async_op:
                return work
            work.wait()
            return None

        return run

    made = {name: collective(name) for name in _TRANSFERS if name != "batch_isend_irecv"}
    with _patched({"batch_isend_irecv": receive, **made}):
        yield


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu")


_TRANSFERS = ("batch_isend_irecv", "all_gather_into_tensor", "all_to_all_single", "all_reduce", "broadcast")


@contextmanager
def _patched(made: dict[str, Callable[..., Any]]) -> Iterator[None]:
    with ExitStack() as patched:
        for name, function in made.items():
            patched.enter_context(mock.patch.object(distributed, name, function))
        yield


@contextmanager
def without_transfers() -> Iterator[None]:
    """What a rank receives is what it sends itself, copied on its device; sums over ranks are its own part."""

    def receive(operations: list[Any]) -> list[_Done]:
        sent = [each.tensor for each in operations if each.op is distributed.isend]
        received = [each.tensor for each in operations if each.op is distributed.irecv]
        for target, source in zip(received, sent, strict=True):
            _fill(target, source)
        return [_Done()]

    def gather(found: Tensor, own: Tensor, *_: Any, **__: Any) -> _Done:
        found.view(-1, *own.shape).copy_(own.expand(found.numel() // own.numel(), *own.shape))
        return _Done()

    def exchange(found: Tensor, own: Tensor, *_: Any, **__: Any) -> _Done:
        _fill(found, own)
        return _Done()

    def stay(*_: Any, **__: Any) -> _Done:
        return _Done()

    with _patched(dict(zip(_TRANSFERS, (receive, gather, exchange, stay, stay), strict=True))):
        yield


def _fill(target: Tensor, source: Tensor) -> None:
    """Values of one tensor for another of other length, repeated as often as needed: no zeros, which cost less."""
    target, source = target.view(-1), source.reshape(-1)
    if not len(source):
        target.fill_(1)
        return
    for first in range(0, len(target), len(source)):
        part = target[first : first + len(source)]
        part.copy_(source[: len(part)])


@dataclass(frozen=True)
class Turns:
    """What ranks took, one after another.

    Attributes:
        step: of the slowest rank in each repeat.
        by_rank: ``[ranks]`` median ms.
        peak_gib, activations_gib: of the fullest rank, all of it and beyond weights and gradients; ``None`` on the CPU.
    """

    step: timing.Time
    by_rank: list[float]
    peak_gib: float | None
    activations_gib: float | None


def timed(world: World, step: Callable[[], object], model: nn.Module, repeats: int) -> Turns:
    """Time a step that computes fresh gradients of a model, on one rank after another.

    A rank whose turn it is not holds weights alone.
    """
    times: list[float] = []
    peaks: tuple[float | None, float | None] = None, None
    for rank in range(world.size):
        model.zero_grad(set_to_none=True)
        timing.free_memory(world.device)
        distributed.barrier(world.host)
        if rank == world.rank:
            step()
            held = timing.allocated_gib(world.device)
            timing.reset_peak(world.device)
            times = timing.sample(step, repeats, world.device, warmups=0)
            peak = timing.peak_gib(world.device)
            peaks = peak, None if peak is None else peak - held
    found = world.all_of((times, *peaks))
    slowest = timing.summary([max(repeat) for repeat in zip(*(each for each, _, _ in found), strict=True)])
    most = [max((each[part] for each in found if each[part] is not None), default=None) for part in (1, 2)]
    return Turns(slowest, [timing.summary(each).median_ms for each, _, _ in found], *most)


def measure(
    world: World, contender: Contender, case: Case, rows_at_a_time: int, kernel: str, repeats: int
) -> dict[str, Any]:
    """As `step.measure`."""
    with contender.prepared(case.model):
        with through_host():
            shards, figures = checked(world, contender, case, rows_at_a_time, kernel)
        if not figures["passed"]:
            return figures

        def step() -> object:
            return update(case.model, case.batch, contender, shards, rows_at_a_time, kernel)

        with without_transfers():
            found = timed(world, step, case.model, repeats)
    return figures | {
        "step": found.step, "step_by_rank": found.by_rank, "peak_gib": found.peak_gib,
        "activations_gib": found.activations_gib,
    }  # fmt: skip
