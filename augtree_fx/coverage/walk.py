"""Walk over types in worker processes: each type runs under a time limit, and a crash ends that type only.

A worker imports everything once and then takes one type after another; one that crashed or ran out of time is replaced.
"""

from __future__ import annotations

import logging
import multiprocessing
import queue
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from augtree_fx.coverage import tiny
from augtree_fx.coverage.check import ERROR, Outcome, check

_START_S = 300.0  # imports of torch and transformers on a busy machine
_STOP_S = 5.0


class Worker:
    """A process that checks types, one at a time.

    Args:
        function: what it runs; a module-level function, since it is sent to the process.
    """

    def __init__(self, function: Callable[[str], Outcome]) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy the threads of torch
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, function), daemon=True)
        self._process.start()
        theirs.close()
        self._is_ready = False

    def run(self, model_type: str, timeout_s: float) -> Outcome:
        """The outcome of a type; of one that crashes or takes too long, an error. The worker is of no use after that.

        Args:
            model_type: what to check.
            timeout_s: seconds that it may take, imports aside.
        """
        try:
            if not self._is_ready:
                self._receive(_START_S)
                self._is_ready = True
            self._connection.send(model_type)
            return self._receive(timeout_s)
        except TimeoutError:
            reason = f"it took more than {timeout_s:g} s"
        except (EOFError, ConnectionError):
            self._process.join(_STOP_S)
            reason = f"its process ended with exit code {self._process.exitcode}"
        return Outcome(model_type, tiny.class_name(model_type), ERROR, reason)

    def is_alive(self) -> bool:
        """Whether it can take another type."""
        return self._process.is_alive()

    def stop(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.kill()
        self._process.join()

    def _receive(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            self.stop()
            raise TimeoutError
        return self._connection.recv()


def _serve(connection: Connection, function: Callable[[str], Outcome]) -> None:
    torch.set_num_threads(1)  # tiny matmuls; more threads only wait for each other
    logging.getLogger("augtree_fx").setLevel(logging.ERROR)  # what it warns of is the outcome's reason
    transformers_logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    try:
        connection.send(None)
        while True:
            connection.send(function(connection.recv()))
    except (EOFError, ConnectionError):
        return


def walk(
    model_types: Sequence[str], *, jobs: int, timeout_s: float, function: Callable[[str], Outcome] = check
) -> Iterator[Outcome]:
    """Check types in worker processes.

    Args:
        model_types: what to check.
        jobs: number of worker processes.
        timeout_s: seconds for one type.
        function: what checks a type; a module-level function.

    Yields:
        Outcomes, as they come.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    for model_type in model_types:
        waiting.put(model_type)
    for _ in range(min(jobs, len(model_types))):
        threading.Thread(target=_drain, args=(waiting, done, timeout_s, function), daemon=True).start()
    for _ in model_types:
        yield done.get()


def _drain(
    waiting: queue.SimpleQueue[str],
    done: queue.SimpleQueue[Outcome],
    timeout_s: float,
    function: Callable[[str], Outcome],
) -> None:
    """Feed one worker until nothing is waiting."""
    worker: Worker | None = None
    while True:
        try:
            model_type = waiting.get_nowait()
        except queue.Empty:
            break
        if worker is None or not worker.is_alive():
            worker = Worker(function)
        done.put(worker.run(model_type, timeout_s))
    if worker is not None:
        worker.stop()
