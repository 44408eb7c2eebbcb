"""Processes that stay up for several tests and run functions on every rank: gloo, file rendezvous, watchdog.

A rank that fails, dies or hangs ends all of them, and the error carries its traceback; the next call starts afresh.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

_START_SECONDS = 120  # importing torch and transformers on every rank, on cores that others use
_PRELOADED = ["torch", "transformers", "augtree_fx"]
_GRACE_SECONDS = 2  # for others to report too, once one rank has failed


class Ranks:
    """A process group of spawned workers.

    Args:
        num_ranks: how many.
        folder: where the rendezvous file lies.
        backend: of the group; ``"nccl"`` gives each rank a GPU.
    """

    def __init__(self, num_ranks: int, folder: Path, backend: str = "gloo") -> None:
        self.num_ranks, self.folder, self.backend = num_ranks, folder, backend
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._num_starts = 0

    def run(self, worker: Callable[..., Any], *args: Any, seconds: float = 60) -> list[Any]:
        """``worker(*args)`` on every rank.

        Args:
            worker: a function of a module; arguments and results must pickle.
            seconds: after which a call that is not done is a hang.

        Returns:
            What each rank returned.

        Raises:
            AssertionError: a rank raised, died or hung.
        """
        if not self._processes:
            self._start()
            seconds += _START_SECONDS
        for pipe in self._pipes:
            pipe.send((worker, args))
        return self._collect(worker.__name__, time.monotonic() + seconds)

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")  # it imports once what takes every rank seconds
        context.set_forkserver_preload(_PRELOADED)
        self._num_starts += 1
        rendezvous = f"file://{self.folder}/rendezvous{self._num_starts}"
        for rank in range(self.num_ranks):
            here, there = context.Pipe()
            arguments = (there, rendezvous, rank, self.num_ranks, self.backend)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def _collect(self, name: str, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(results) + len(failures) < self.num_ranks:
            waiting = [rank for rank in range(self.num_ranks) if rank not in results and rank not in failures]
            ready = wait([self._pipes[rank] for rank in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                failures |= {rank: "did not answer in time" for rank in waiting if not failures}
                break
            for rank in waiting:
                if self._pipes[rank] in ready:
                    try:
                        failure, result = self._pipes[rank].recv()
                    except EOFError:
                        failure, result = "died", None
                    if failure is None:
                        results[rank] = result
                    else:
                        failures[rank] = failure
                        deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if failures:
            self.stop()
            shown = "\n".join(f"rank {rank} of {self.num_ranks}: {failures[rank]}" for rank in sorted(failures))
            raise AssertionError(f"{name}: {shown}")
        return [results[rank] for rank in range(self.num_ranks)]


def _serve(pipe: Connection, rendezvous: str, rank: int, num_ranks: int, backend: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "localhost"}
    if backend == "nccl":
        torch.cuda.set_device(rank)
    distributed.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=num_ranks)
    while True:
        try:
            worker, args = pipe.recv()
        except EOFError:  # the tests are over
            return
        try:
            answer = (None, worker(*args))
        except Exception:  # noqa: BLE001  (the traceback goes to the test, which fails with it)
            answer = (traceback.format_exc(), None)
        pipe.send(answer)
