"""``bench cp --step --turns``: the ranks of an axis take turns on one device, and no transfer happens.

What comes out is what each rank has to compute, for any number of ranks: how evenly a way of context parallelism
shares the work of a batch, and what of it is done more than once. Times of steps are at least that; how much transfers
add takes as many devices. Results mean nothing, and are not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor, distributed, nn

from augtree_fx.examples.bench import timing
from augtree_fx.examples.bench.cp.contender import Contender
from augtree_fx.examples.bench.cp.step import Case, make_shards, update
from augtree_fx.examples.bench.cp.world import World


class _Done:
    """The handle of a transfer that there is not."""

    def wait(self) -> None:
        """Nothing is under way."""


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

    made = {
        "batch_isend_irecv": receive, "all_gather_into_tensor": gather, "all_to_all_single": exchange,
        "all_reduce": stay, "broadcast": stay,
    }  # fmt: skip
    with ExitStack() as patched:
        for name, function in made.items():
            patched.enter_context(mock.patch.object(distributed, name, function))
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
    """As `step.measure`, without its gate."""
    with without_transfers(), contender.prepared(case.model):
        shards = make_shards(contender, case, rows_at_a_time)

        def step() -> object:
            return update(case.model, case.batch, contender, shards, rows_at_a_time, kernel)

        step()  # all ranks at once: what they tell each other on the host, they do here
        found = timed(world, step, case.model, repeats)
    tokens = world.all_of(sum(shard.num_tokens for shard in shards))
    return {
        "tokens": tokens, "differences": {}, "passed": True, "step": found.step, "step_by_rank": found.by_rank,
        "peak_gib": found.peak_gib, "activations_gib": found.activations_gib,
    }  # fmt: skip
