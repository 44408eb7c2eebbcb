"""Times of a step, taken where it runs and read afterwards: CUDA events on the current stream, or the host's clock.

    packing | forward: ... attention ... attention | head and loss | backward: ... attention ... attention |
                            waits (communication)                     what checkpointing recomputes, too

Nothing here waits for the device: `Record.read` does, after the step. Backward is seen through identity functions on
what goes into attention and what comes out of it, and through a hook on the stack's output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor


class Phase(StrEnum):
    """What a span is of.

    Attributes:
        PACKING: the tree is detected and the batch packed, on the host.
        FORWARD: the stack's forward after that; BACKWARD: from its output's gradient to the end of backward.
        ATTENTION: one attention call, or its backward.
        COMMUNICATION: a wait for other ranks; what is transferred beside computation is not waited for.
    """

    PACKING = "packing"
    FORWARD = "forward"
    BACKWARD = "backward"
    ATTENTION = "attention"
    COMMUNICATION = "communication"


Stamp = Any  # a CUDA event, or seconds
Span = tuple[Stamp, Stamp]


@dataclass(frozen=True)
class Clock:
    """How time is taken.

    Attributes:
        now: a stamp; on CUDA an event that the current stream will reach.
        ms: milliseconds from one stamp to another, once both were reached.
        wait: until all stamps were.
    """

    now: Callable[[], Stamp]
    ms: Callable[[Stamp, Stamp], float]
    wait: Callable[[], None]

    @staticmethod
    def of(device: torch.device) -> Clock:
        """The clock of a device."""
        if device.type == "cuda":
            return Clock(_event, lambda begin, end: begin.elapsed_time(end), lambda: torch.cuda.synchronize(device))
        return Clock(time.perf_counter, lambda begin, end: (end - begin) * 1e3, lambda: None)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass
class Record:
    """Spans of one forward of the stack and, where there was one, its backward.

    Attributes:
        spans: by phase, in the order in which they ended.
        layout: the batch's tree, where the stack built it.
        schedule: who moved between ranks, where something did.
        gradients: whether the forward recorded any.
        checkpointing: whether layers run forward again in backward.
        waves: that this rank's branches went through, 0 in one pass; ``None`` unless a batch of rows was shared.
    """

    spans: dict[Phase, list[Span]] = field(default_factory=lambda: {phase: [] for phase in Phase})
    layout: Any = None
    schedule: str | None = None
    gradients: bool = False
    checkpointing: bool = False
    waves: int | None = None

    def read(self, clock: Clock) -> dict[Phase, list[tuple[float, float]]]:
        """Begin and end of every span in ms since the first stamp; waits for the device."""
        clock.wait()
        stamps = [stamp for phase in (Phase.PACKING, Phase.FORWARD) for stamp, _ in self.spans[phase]]
        if not stamps:
            return {phase: [] for phase in Phase}
        first = stamps[0]
        return {
            phase: [(clock.ms(first, begin), clock.ms(first, end)) for begin, end in spans]
            for phase, spans in self.spans.items()
        }


class Recorder:
    """Takes the times of a model's steps; the last one is kept. No dataclass: FSDP2 rebuilds those in arguments.

    Args:
        clock: of the model's device.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.last = Record()
        self.block: Span | None = None

    def __deepcopy__(self, memo: object) -> Recorder:
        """Of a model's copy the times are not known."""
        return Recorder(self.clock)

    def begin(self, *, checkpointing: bool) -> None:
        """A forward of the stack begins: forget the one before."""
        self.last = Record(gradients=torch.is_grad_enabled(), checkpointing=checkpointing)

    @contextmanager
    def span(self, phase: Phase) -> Iterator[None]:
        """Record what runs inside."""
        record, begin = self.last, self.clock.now()
        yield
        record.spans[phase].append((begin, self.clock.now()))

    def watch_backward(self, output: Tensor) -> None:
        """Record backward, from the moment at which the gradient of the stack's output is there."""
        if not output.requires_grad:
            return
        record = self.last

        def begins(gradient: Tensor) -> None:
            begin = self.clock.now()

            def ends() -> None:
                record.spans[Phase.BACKWARD].append((begin, self.clock.now()))

            torch.autograd.Variable._execution_engine.queue_callback(ends)

        output.register_hook(begins)

    def attention(self, call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Record an attention call on tensors that may take gradients, forward and backward."""
        backward = _Backward(self)
        with self.span(Phase.ATTENTION):
            out = call(*_Enter.apply(backward, *inputs))
        return _Leave.apply(backward, out)


class _Backward:
    """Backward of one attention call: it begins where the output's gradient arrives, ends where the inputs' do."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.record = recorder, recorder.last
        self.begin: Stamp = None

    def end(self) -> None:
        self.record.spans[Phase.ATTENTION].append((self.begin, self.recorder.clock.now()))


class _Enter(torch.autograd.Function):
    """Identity of the inputs of an attention call."""

    @staticmethod
    def forward(ctx: Any, backward: _Backward, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.of = backward
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.of.end()
        return None, *gradients


class _Leave(torch.autograd.Function):
    """Identity of its output."""

    @staticmethod
    def forward(ctx: Any, backward: _Backward, out: Tensor) -> Tensor:
        ctx.of = backward
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.of.begin = ctx.of.recorder.clock.now()
        return None, gradient
