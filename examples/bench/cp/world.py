"""The ranks of a race: how they meet, and what they agree on. A figure is that of the slowest or fullest rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from augtree_fx.examples.bench import timing


class NoRanks(ValueError):
    """There is one process, and nothing says where others are."""


@dataclass(frozen=True)
class World:
    """One context-parallel axis over all processes.

    Attributes:
        group: of the axis; NCCL on CUDA, else gloo.
        host: the same ranks on gloo, for verdicts.
        device: of this rank.
        turns: whether all ranks are on one device, which they use one after another.
    """

    group: distributed.ProcessGroup
    host: distributed.ProcessGroup
    device: torch.device
    turns: bool = False

    @property
    def rank(self) -> int:
        return distributed.get_rank(self.group)

    @property
    def size(self) -> int:
        return distributed.get_world_size(self.group)

    def say(self, text: str) -> None:
        """Print on the first rank."""
        if self.rank == 0:
            print(text, flush=True)

    def introduce(self, environment: dict[str, str | None], dtype: str, repeats: int) -> None:
        """Print what runs where, and what a figure of the tables below is."""
        where = "on one" if self.turns else "of"
        self.say(
            f"{self.size} ranks {where} {timing.describe(environment)}\n{dtype}, median of {repeats}, slowest rank"
        )

    def all_of(self, value: Any) -> list[Any]:
        """What each rank passes."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value, group=self.host)
        return found

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        distributed.all_reduce(tensor, group=self.group)
        return tensor

    def measure(self, step: Callable[[], object], repeats: int, warmups: int = 2) -> timing.Time:
        """Time a step that all ranks take together; a repeat takes as long as on its slowest rank."""
        distributed.barrier(self.host)
        times = self.all_of(timing.sample(step, repeats, self.device, warmups))
        return timing.summary([max(repeat) for repeat in zip(*times, strict=True)])

    def peak_gib(self, others: float = 0.0) -> float | None:
        """`timing.peak_gib` of the fullest rank, without the GiB that ``others`` hold on this one."""
        peak = timing.peak_gib(self.device)
        peaks = self.all_of(None if peak is None else peak - others)
        return None if None in peaks else max(peaks)

    def attempt(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Figures of some work that all ranks do, or the first rank's reason why there are none.

        A contender may raise anything. Where it does so on some ranks alone, the others wait in a collective until the
        time-out of the process group ends the run.
        """
        try:
            figures, reason = work(), None
        except Exception as error:  # noqa: BLE001
            figures, reason = {}, timing.reason_of(error)
        failed = [(rank, found) for rank, found in enumerate(self.all_of(reason)) if found is not None]
        if not failed:
            return figures
        rank, first = failed[0]
        return {"passed": None, "reason": first if len(failed) == self.size else f"rank {rank}: {first}"}


class Alone(World):
    """One process, without a process group."""

    def __init__(self, device: torch.device) -> None:
        object.__setattr__(self, "device", device)

    rank = 0
    size = 1

    def all_of(self, value: Any) -> list[Any]:
        return [value]


@contextmanager
def joined(device_type: str, seconds: int, *, alone: bool = False, turns: bool = False) -> Iterator[World]:
    """Meet the other processes, through torchrun unless a process group is there already.

    Args:
        device_type: ``"cuda"``, a device for each local rank, or ``"cpu"``.
        seconds: after which a collective that some rank does not join is an error.
        alone: without torchrun this process is the only one.
        turns: see `World`.

    Raises:
        NoRanks: there is neither torchrun nor a process group, and one process is not enough.
    """
    here, launched = distributed.is_initialized(), "RANK" in os.environ
    if not here and not launched and not alone:
        raise NoRanks(
            "context parallelism needs several processes, got one without RANK in its environment; run it as "
            "torchrun --nproc-per-node 2 -m augtree_fx bench cp ..."
        )
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", 0 if turns else int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    wait = timedelta(seconds=seconds)
    if not here:
        store: dict[str, Any] = {} if launched else {"store": distributed.HashStore(), "rank": 0, "world_size": 1}
        backend = "nccl" if device_type == "cuda" and not turns else "gloo"
        distributed.init_process_group(backend, timeout=wait, **store)
    try:
        group = distributed.group.WORLD
        assert group is not None
        # Verdicts are waited for while some other rank computes the reference: no short time-out here.
        host = distributed.new_group(backend="gloo", timeout=timedelta(hours=1))
        yield World(group, host, device, turns)
        distributed.destroy_process_group(host)
    finally:
        if not here:
            distributed.destroy_process_group()
