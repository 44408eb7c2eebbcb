"""Prompts' activations on the host until their backward: copied beside the forward, fetched ahead of the backward.

forward     layer 1 | layer 2 | layer 3          backward    layer 3 | layer 2 | layer 1
copies          1 out     2 out    3 out         copies    3 in  2 in      1 in

Copies run on a stream of their own. Memory is handed out and taken back on the stream that computes alone, which waits
for a copy before it lets go of what the copy reads, or reads what the copy wrote: so no copy outlives its memory, and
what a layer leaves is free again while the host runs ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

SMALLEST_BYTES = 1 << 16  # below, a copy costs more in launches than it frees


class Mover(Protocol):
    """Copies between a device and its host, each queued behind what was computed so far."""

    def moves(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on the device."""

    def out(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """A copy on the host, and what says when it is done."""

    def back(self, host: Tensor, like: Tensor) -> tuple[Tensor, Any]:
        """A copy on the device of ``like``, and what says when it is done."""

    def wait(self, copied: Any) -> None:
        """Let what is computed from now on wait for a copy."""


class CudaMover:
    """Pinned memory, one stream of copies for each device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def moves(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cuda"

    def out(self, tensor: Tensor) -> tuple[Tensor, Any]:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return host, self._copy(host, tensor, tensor.device)

    def back(self, host: Tensor, like: Tensor) -> tuple[Tensor, Any]:
        tensor = torch.empty_like(host, device=like.device, pin_memory=False)  # of the stream that computes
        return tensor, self._copy(tensor, host, like.device)

    def wait(self, copied: tuple[torch.cuda.Event, torch.device]) -> None:
        event, device = copied
        torch.cuda.current_stream(device).wait_event(event)

    def _copy(self, target: Tensor, source: Tensor, device: torch.device) -> tuple[torch.cuda.Event, torch.device]:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event(), device


@dataclass(eq=False)
class _Entry:
    """One tensor on the host.

    Attributes:
        host: its values.
        like: an empty tensor on its device.
        place: its number in the order of the forward.
        uses: how often autograd holds it.
        device: its values on the device again, and what says when they are there.
        waits: whether nobody has read these yet.
        taken: how often the backward has read it.
    """

    host: Tensor
    like: Tensor
    place: int
    uses: int = 0
    device: tuple[Tensor, Any] | None = None
    waits: bool = False
    taken: int = 0


@dataclass(eq=False)
class Offload:
    """Hooks for what autograd saves in a forward.

    Attributes:
        mover: makes the copies.
        stays: tensors that stay on the device, weights and what is held there anyway.
        num_layers: of the forward; what one of them saves is under way at a time, in either direction.
    """

    mover: Mover
    stays: Callable[[Tensor], bool]
    num_layers: int
    _entries: list[_Entry] = field(default_factory=list)
    _known: dict[Any, tuple[_Entry, StorageWeakRef]] = field(default_factory=dict)
    _leaving: deque[tuple[Tensor, Any]] = field(default_factory=deque)
    _leaving_bytes: int = 0
    _bytes: int = 0
    _ahead_bytes: int = 0

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """What a forward runs in."""
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield
        self._end_forward()

    def pack(self, tensor: Tensor) -> Any:
        """Queue a tensor's copy to the host; one that several operators save is copied once."""
        tensor = tensor.detach()  # an output that its own node holds would never be freed
        plain = type(tensor) is Tensor and tensor.layout == torch.strided and self.mover.moves(tensor)
        if not plain or tensor.nbytes < SMALLEST_BYTES or self.stays(tensor):
            return tensor
        if tensor.nbytes > tensor.untyped_storage().nbytes():  # expanded: smaller where it is
            return tensor
        storage = StorageWeakRef(tensor.untyped_storage())
        key = (storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key not in self._known or self._known[key][1].expired():
            host, copied = self.mover.out(tensor)
            entry = _Entry(host, tensor.new_empty(0), len(self._entries))
            self._entries.append(entry)
            self._known[key] = (entry, storage)
            self._bytes += tensor.nbytes
            self._leave(tensor, copied)
        entry = self._known[key][0]
        entry.uses += 1
        return entry

    def unpack(self, packed: Any) -> Tensor:
        """The tensor, for the backward; copies of what the backward reads next are queued."""
        if isinstance(packed, Tensor):
            return packed
        entry: _Entry = packed
        self._fetch(entry)
        assert entry.device is not None
        tensor, copied = entry.device
        self.mover.wait(copied)
        if entry.waits:
            self._ahead_bytes -= entry.host.nbytes
        entry.taken, entry.waits = entry.taken + 1, False
        if entry.taken % entry.uses == 0:  # a graph that is kept may be gone through again
            entry.device = None
        self._prefetch(entry.place)
        return tensor

    def close(self) -> None:
        """Wait for copies under way, whose memory is let go of after that."""
        self._end_forward()
        for entry in self._entries:
            if entry.device is not None:
                self.mover.wait(entry.device[1])
                entry.device = None
        self._entries.clear()
        self._known.clear()

    def _leave(self, tensor: Tensor, copied: Any) -> None:
        """Hold what a copy reads until the computation waits for the copy: about a layer later."""
        self._leaving.append((tensor, copied))
        self._leaving_bytes += tensor.nbytes
        while len(self._leaving) > 1 and self._leaving_bytes > self._layer_bytes():
            self._let_go()

    def _let_go(self) -> None:
        tensor, copied = self._leaving.popleft()
        self.mover.wait(copied)
        self._leaving_bytes -= tensor.nbytes

    def _layer_bytes(self) -> int:
        return self._bytes // self.num_layers

    def _end_forward(self) -> None:
        while self._leaving:
            self._let_go()

    def _fetch(self, entry: _Entry) -> None:
        if entry.device is None:
            entry.device, entry.waits = self.mover.back(entry.host, entry.like), True
            self._ahead_bytes += entry.host.nbytes

    def _prefetch(self, place: int) -> None:
        """Queue copies of what was saved before ``place``, latest first, until a layer's bytes wait to be read."""
        for entry in reversed(self._entries[:place]):
            if self._ahead_bytes >= self._layer_bytes():
                return
            if not entry.taken:
                self._fetch(entry)
