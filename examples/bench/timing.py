"""What every benchmark needs: a clock, the matmul ceiling of the device, versions, memory, results kept at once."""

from __future__ import annotations

import gc
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

CEILING_SIZE = {"cuda": 8192, "cpu": 512}  # of the square matmul whose rate counts as the device's ceiling
OUT_OF_MEMORY = "out of memory"
PACKAGES = ("torch", "transformers", "triton", "flash-attn-4", "prefix-grouper")


@dataclass(frozen=True)
class Time:
    """Milliseconds over repeats: the median, and the spread (largest - smallest)."""

    median_ms: float
    spread_ms: float

    def times(self, factor: float) -> Time:
        """The time of ``factor`` as much of the same work."""
        return Time(self.median_ms * factor, self.spread_ms * factor)

    def __str__(self) -> str:
        digits = 1 if self.median_ms >= 100 else 2
        return f"{self.median_ms:.{digits}f} ({self.spread_ms:.{digits}f})"


def measure(step: Callable[[], object], repeats: int, device: torch.device, warmups: int = 2) -> Time:
    """Time a step that is called ``warmups`` times untimed first; what it returns is dropped.

    On CUDA the repeats are queued without a wait in between, as a training step is: the host is ahead of the device.
    """
    return summary(sample(step, repeats, device, warmups))


def sample(step: Callable[[], object], repeats: int, device: torch.device, warmups: int = 2) -> list[float]:
    """The milliseconds of each repeat of `measure`."""
    for _ in range(warmups):
        step()
    return (_on_device if device.type == "cuda" else _on_host)(step, repeats)


def summary(times: list[float]) -> Time:
    """Median and spread of some milliseconds."""
    return Time(statistics.median(times), max(times) - min(times))


def _on_host(step: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _on_device(step: Callable[[], object], repeats: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)]


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """The ceiling in TFLOP/s: a square matmul (8192^3 on CUDA) of random data, median of 10."""
    size = CEILING_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / 1e9 / measure(lambda: a @ b, 10, device).median_ms


def environment(device: torch.device) -> dict[str, str | None]:
    """Device, Python and package versions; ``None`` where a package is not installed.

    The version of torch is its own, which names the build (``+cu130``), as metadata of an installed package may not.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    found: dict[str, str | None] = {"device": name, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = torch.__version__ if package == "torch" else importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def describe(found: dict[str, str | None]) -> str:
    """One line of `environment`."""
    rest = (f"{name} {version or 'not installed'}" for name, version in found.items() if name != "device")
    return f"{found['device']}, {', '.join(rest)}"


def pick_device(name: str | None) -> torch.device:
    """The device to run on; CUDA unless the CPU is named.

    Raises:
        ValueError: there is no CUDA device.
    """
    device = torch.device(name or "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"the default shapes need a CUDA device with the memory of an H200, torch {torch.__version__} finds none; "
            "--device cpu runs the same comparison on small shapes"
        )
    return device


def free_memory(device: torch.device) -> None:
    """Give a GPU's cached memory back, so that the next contender starts with all of it."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> None:
    """Start a new count for `peak_gib`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """Peak of allocated memory since `reset_peak`, in GiB; ``None`` on the CPU, which keeps no such count."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def allocated_gib(device: torch.device) -> float:
    """Memory that tensors hold now, in GiB; 0 on the CPU."""
    return torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def reason_of(error: Exception) -> str:
    """Why something did not run, in one line; the whole traceback goes to stderr unless memory simply ran out."""
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    if not isinstance(error, (ImportError, NotImplementedError)):
        traceback.print_exception(error, file=sys.stderr)
    first = (str(error).strip() or "no message").splitlines()[0][:200]
    return first if isinstance(error, (ImportError, NotImplementedError)) else f"{type(error).__name__}: {first}"


class Results:
    """Figures of a run, written to a JSON file after every change, since a long run may be cut."""

    def __init__(self, path: str | None, **header: Any) -> None:
        self._path = None if path is None else Path(path)
        self.figures: dict[str, Any] = {"command": sys.argv[1:], **header, "cases": []}
        self.save()

    def case(self, **header: Any) -> dict[str, Any]:
        """A new case, to which rows are added; call `save` after that."""
        self.figures["cases"].append({**header, "rows": []})
        self.save()
        return self.figures["cases"][-1]

    def save(self) -> None:
        """Write all figures; the file is whole at every moment."""
        if self._path is None:
            return
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(self.figures, indent=1, default=_plain) + "\n", encoding="utf-8")
        os.replace(part, self._path)


def _plain(value: Any) -> Any:
    return asdict(value) if hasattr(value, "__dataclass_fields__") else str(value)
