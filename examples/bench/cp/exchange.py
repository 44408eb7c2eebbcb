"""One hop around a ring: every rank sends to the next and receives from the one before, while it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed


@dataclass(frozen=True)
class Hop:
    """A message each way, in flight.

    Attributes:
        arriving: where the message of the rank before is put; not to be read before `wait`.
        leaving: what the next rank gets; kept, and not to be written, until `wait`.
        works: handles of both.
        tag: of the messages.
    """

    arriving: Tensor
    leaving: Tensor
    works: list[Any]
    tag: int

    def wait(self) -> Tensor:
        """What arrived. On CUDA the current stream waits for it, not the host."""
        for work in self.works:
            work.wait()
        return self.arriving


def start_hop(leaving: Tensor, num_arriving: int, group: distributed.ProcessGroup, tag: int) -> Hop:
    """Start a hop; all ranks of the group call it, in the same order.

    Send and receive are one batch, so that no rank waits for another one's receive. On CUDA they run on the
    communicator's own stream, behind what is queued on the current one.

    Args:
        leaving: contiguous, one dim.
        num_arriving: elements of what the rank before sends.
        group: the ring, of at least 2 ranks.
        tag: tells messages between the same ranks apart that are in flight at a time (gloo; NCCL keeps the order).
    """
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    arriving = torch.empty(num_arriving, dtype=leaving.dtype, device=leaving.device)
    works = distributed.batch_isend_irecv(
        [
            distributed.P2POp(distributed.isend, leaving, group=group, tag=tag, group_peer=(rank + 1) % size),
            distributed.P2POp(distributed.irecv, arriving, group=group, tag=tag, group_peer=(rank - 1) % size),
        ]
    )
    return Hop(arriving, leaving, works, tag)
