"""Our schedules without their transfers, and without their arithmetic: what a schedule could take at best.

Results mean nothing then; a time of both together near the larger of the two says that they overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed

from augtree_fx import kernels
from augtree_fx.dtensor_ops import collectives
from augtree_fx.dtensor_ops.collectives import Pending


@contextmanager
def without_transfers() -> Iterator[None]:
    """Every transfer gives what this rank has itself, at once."""

    def at_once(tensor: Tensor, group: distributed.ProcessGroup) -> Pending:
        return Pending(tensor, [], (), group, ())

    def repeated(tensor: Tensor, group: distributed.ProcessGroup) -> Pending:
        return Pending(tensor.expand(distributed.get_world_size(group), *tensor.shape), [], (), group, ())

    with ExitStack() as patched:
        for name, made in (("pass_on", at_once), ("exchange_equal", at_once), ("gather", repeated)):
            patched.enter_context(mock.patch.object(collectives, name, made))
        yield


@contextmanager
def without_arithmetic() -> Iterator[None]:
    """No kernel runs; merges and sums of what would have come out of them do."""

    def forward(
        q: Tensor, k: Tensor, v: Tensor, call: Any, spec: Any, kernel: str,
        out: Tensor | None = None, lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if out is None or lse is None:
            out = q.new_empty(*q.shape[:2], v.shape[-1])
            lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        return out, lse

    def backward(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any, **into: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(into.get(name, like) for name, like in (("dq", q), ("dk", k), ("dv", v)))

    with mock.patch.object(kernels, "forward", forward), mock.patch.object(kernels, "backward", backward):
        yield


PARTS = {"compute": without_transfers, "transfer": without_arithmetic}
