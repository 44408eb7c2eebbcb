"""A budget of memory as users write it, in bytes."""

from __future__ import annotations

import re

import torch

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
Memory = int | str  # bytes, a string like "40GiB", or "auto"


def check_memory(memory: Memory | None, max_wave_tokens: int | None) -> None:
    """Raise ValueError if a budget cannot be read, or the size of waves is given as well."""
    if memory is None:
        return
    if max_wave_tokens is not None:
        raise ValueError(
            f"waves are sized by max_wave_tokens or by memory, got max_wave_tokens={max_wave_tokens} and "
            f"memory={memory!r}; leave one out"
        )
    if memory != "auto":
        _read(memory)


def budget_bytes(memory: Memory, device: torch.device, share: float) -> int:
    """Bytes that may be allocated on a device beyond what is allocated now.

    Args:
        memory: a number of bytes or a string like ``"40GiB"``, taken as it is; or ``"auto"``, a share of what is free.
        device: of the model.
        share: of free memory; the rest is for what is not foreseen, and for gaps between allocations.

    Raises:
        ValueError: ``"auto"`` on a device whose free memory is not known.
    """
    if memory != "auto":
        return _read(memory)
    if device.type != "cuda":
        raise ValueError(
            f"memory='auto' reads the free memory of a CUDA device, and the model is on {device}; pass a number of "
            "bytes, a string like '40GiB', or max_wave_tokens"
        )
    free, _ = torch.cuda.mem_get_info(device)
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(share * (free + reusable))


def _read(memory: Memory) -> int:
    if isinstance(memory, int) and not isinstance(memory, bool) and memory > 0:
        return memory
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]iB)", memory) if isinstance(memory, str) else None
    if found is None or not float(found[1]):
        raise ValueError(f"memory must be 'auto', a number of bytes, or a string like '40GiB', got {memory!r}")
    return int(float(found[1]) * UNITS[found[2]])


def shown(number: float) -> str:
    """A number of bytes for people."""
    unit = next((name for name in reversed(UNITS) if abs(number) >= UNITS[name]), "KiB")
    return f"{number / UNITS[unit]:.1f} {unit}"
