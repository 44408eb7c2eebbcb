"""Rates of the links between the ranks of `torchrun`: a ring, gather, reduce-scatter, all-to-all, and latency."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from augtree_fx.planner.hardware import Link

_LARGE_BYTES = {"cuda": 1 << 30, "cpu": 1 << 24}
_SMALL_VALUES = 256


def measure_links(device: torch.device, repeats: int) -> Link:
    """One link level, of as many ranks as there are. Every rank calls it; starts and ends its own process group.

    Args:
        device: of this rank.
        repeats: timed runs; the fastest one of the slowest rank counts.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        ranks = dist.get_world_size()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        share = _LARGE_BYTES[device.type] // 4 // ranks
        away = share * 4 * (ranks - 1)  # bytes that one rank sends or receives
        ring = _seconds(_ring(share * ranks, device), device, repeats)
        latency = _seconds(_ring(_SMALL_VALUES, device), device, repeats)
        return Link(
            name="local" if local == ranks else "all",
            num_ranks=ranks,
            latency_us=latency * 1e6,
            ring_bytes_per_s=share * ranks * 4 / ring,
            all_gather_bytes_per_s=away / _seconds(_gather(share, device), device, repeats),
            reduce_scatter_bytes_per_s=away / _seconds(_scatter(share, device), device, repeats),
            all_to_all_bytes_per_s=away / _seconds(_exchange(share, device), device, repeats),
        )
    finally:
        dist.destroy_process_group()


def _ring(values: int, device: torch.device) -> Callable[[], None]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine, theirs = torch.ones(values, device=device), torch.empty(values, device=device)

    def step() -> None:
        sends = [
            dist.P2POp(dist.isend, mine, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, theirs, (rank - 1) % ranks),
        ]
        for request in dist.batch_isend_irecv(sends):
            request.wait()

    return step


def _gather(share: int, device: torch.device) -> Callable[[], None]:
    mine, everything = (torch.ones(share * count, device=device) for count in (1, dist.get_world_size()))
    return lambda: dist.all_gather_into_tensor(everything, mine) and None


def _scatter(share: int, device: torch.device) -> Callable[[], None]:
    mine, everything = (torch.ones(share * count, device=device) for count in (1, dist.get_world_size()))
    return lambda: dist.reduce_scatter_tensor(mine, everything) and None


def _exchange(share: int, device: torch.device) -> Callable[[], None]:
    sent, received = (torch.ones(share * dist.get_world_size(), device=device) for _ in range(2))
    return lambda: dist.all_to_all_single(received, sent) and None


def _seconds(step: Callable[[], None], device: torch.device, repeats: int) -> float:
    """The fastest run after a warm-up, of the rank that took longest."""
    step()
    best = float("inf")
    for _ in range(repeats):
        dist.barrier()
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    slowest = torch.tensor([best], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)
