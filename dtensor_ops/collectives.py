"""Transfers between the ranks of a lane, each queued at once and waited for later; every rank makes the same calls.

NCCL runs them on streams of its own, beside what is computed meanwhile; `Pending.wait` makes the current stream wait.
Tensors travel as bytes: gloo knows few dtypes. Nothing here records gradients: it runs inside of ops.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import P2POp, ProcessGroup

from augtree_fx.recorder import Phase, Recorder
from augtree_fx.reference import accumulation_dtype

logger = logging.getLogger("augtree_fx")


@dataclass
class Pending:
    """A transfer under way.

    Attributes:
        result: where it arrives.
        works: what to wait for.
        held: what must not be freed before.
        group: ranks that take part.
        peers: numbers in the group of those that this rank waits for.
    """

    result: Tensor
    works: list[Any]
    held: tuple[Tensor, ...]
    group: ProcessGroup
    peers: Sequence[int]

    def __post_init__(self) -> None:
        if self.works:
            _UNDER_WAY[id(self)] = self

    def wait(self) -> Tensor:
        """What has arrived.

        Raises:
            RuntimeError: a rank is gone or too late; the message names those that were waited for.
        """
        _UNDER_WAY.pop(id(self), None)
        recorder = _WATCHED.get(self.group.group_name) if _WATCHED and self.works else None
        with (
            _named(self.group, self.peers),
            recorder.span(Phase.COMMUNICATION) if recorder else contextlib.nullcontext(),
        ):
            for work in self.works:
                work.wait()
        self.works, self.held = [], ()
        return self.result


_UNDER_WAY: dict[int, Pending] = {}  # what nobody waited for yet


@contextlib.contextmanager
def settled(group: ProcessGroup) -> Iterator[None]:
    """After an error inside, what is under way in a group arrives: the next call's would be taken for it, and hang."""
    try:
        yield
    except Exception as error:
        logger.warning("augtree-fx: rank %d ends its part of a step: %s", distributed.get_rank(), error)
        for pending in [each for each in _UNDER_WAY.values() if each.group.group_name == group.group_name]:
            try:
                pending.wait()
            except RuntimeError:  # its sender is gone, and the error that is under way says more
                continue
        raise


# Recorders by name of the group whose transfers they time: all that an op knows of its caller is that name.
_WATCHED: dict[str, Recorder] = {}


def watch(group: str, recorder: Recorder) -> None:
    """Time what is waited for in a group, until `unwatch`."""
    _WATCHED[group] = recorder


def unwatch(recorder: Recorder) -> None:
    """Forget a recorder, in whatever groups it is."""
    for group in [group for group, found in _WATCHED.items() if found is recorder]:
        del _WATCHED[group]


@contextlib.contextmanager
def _named(group: ProcessGroup, peers: Sequence[int]) -> Iterator[None]:
    """Errors of a transfer say between which ranks it was; gloo's own show a port."""
    try:
        yield
    except RuntimeError as error:
        ranks = distributed.get_process_group_ranks(group)
        raise RuntimeError(
            f"all ranks of {ranks} must go through the same forward and backward; rank "
            f"{ranks[distributed.get_rank(group)]} was left by rank {' or '.join(str(ranks[peer]) for peer in peers)}; "
            f"look for its own error. {error}"
        ) from error


def _others(group: ProcessGroup) -> list[int]:
    return [peer for peer in range(distributed.get_world_size(group)) if peer != distributed.get_rank(group)]


def group_of(name: str) -> ProcessGroup:
    """The process group of a name, which is what an op is given."""
    known: Any = name  # torch has a type of its own for names
    return torch._C._distributed_c10d._resolve_process_group(known)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def pass_on(tensor: Tensor, group: ProcessGroup) -> Pending:
    """Send a contiguous tensor to the next rank of a ring, receive one of its shape from the rank before."""
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    received = torch.empty_like(tensor)
    after, before = (distributed.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
    operations = [
        P2POp(distributed.isend, _bytes(tensor), after, group),
        P2POp(distributed.irecv, _bytes(received), before, group),
    ]
    peers = [(rank - 1) % ranks, (rank + 1) % ranks]
    with _named(group, peers):
        works = distributed.batch_isend_irecv(operations)
    return Pending(received, works, (tensor,), group, peers)


def gather(tensor: Tensor, group: ProcessGroup) -> Pending:
    """``[ranks, *shape]``: a contiguous tensor of every rank, all of one shape."""
    found = tensor.new_empty(distributed.get_world_size(group), *tensor.shape)
    with _named(group, _others(group)):
        work = distributed.all_gather_into_tensor(_bytes(found), _bytes(tensor), group, async_op=True)
    return Pending(found, [work], (tensor,), group, _others(group))


def exchange(tensor: Tensor, num_sent: Sequence[int], num_received: Sequence[int], group: ProcessGroup) -> Pending:
    """Rows of a contiguous tensor to each rank, in the order of ranks; the rows that each rank sends here."""
    found = tensor.new_empty(sum(num_received), *tensor.shape[1:])
    width = tensor[:1].nbytes if len(tensor) else tensor.new_empty(1, *tensor.shape[1:]).nbytes
    sizes = ([n * width for n in num_received], [n * width for n in num_sent])
    with _named(group, _others(group)):
        work = distributed.all_to_all_single(_bytes(found), _bytes(tensor), *sizes, group, async_op=True)
    return Pending(found, [work], (tensor,), group, _others(group))


def exchange_equal(tensor: Tensor, group: ProcessGroup) -> Pending:
    """``[ranks, ...]``: row i goes to rank i, row i of the result comes from it; a rank's own row stays where it is.

    What the result holds in a rank's own row is undefined.
    """
    rank, ranks = distributed.get_rank(group), len(tensor)
    found = torch.empty_like(tensor)
    peers = [(rank + step) % ranks for step in range(1, ranks)]
    operations = []
    for peer in peers:
        there = distributed.get_global_rank(group, peer)
        operations.append(P2POp(distributed.isend, _bytes(tensor[peer]), there, group))
        operations.append(P2POp(distributed.irecv, _bytes(found[peer]), there, group))
    with _named(group, peers):
        works = distributed.batch_isend_irecv(operations) if operations else []
    return Pending(found, works, (tensor,), group, peers)


def gather_tokens(local: Tensor, group: ProcessGroup) -> Tensor:
    """``[ranks * share, ...]``: tokens ``[share, ...]`` of all ranks, one after another."""
    return gather(local.contiguous(), group).wait().flatten(0, 1)


def sum_tokens(spread: Tensor, group: ProcessGroup) -> Tensor:
    """``[share, ...]``: this rank's tokens of ``[ranks * share, ...]``, summed over ranks in float32, rounded once."""
    ranks = distributed.get_world_size(group)
    parts = exchange_equal(spread.contiguous().view(ranks, -1, *spread.shape[1:]), group)
    own = spread.view(ranks, -1, *spread.shape[1:])[distributed.get_rank(group)]
    return add_up(own, parts.wait(), distributed.get_rank(group))


def add_up(own: Tensor, parts: Tensor, rank: int) -> Tensor:
    """Sum of ``parts [ranks, ...]`` with ``own`` in place of this rank's, in the order of ranks, rounded once."""
    total = torch.zeros(own.shape, dtype=accumulation_dtype(own.dtype), device=own.device)
    for peer in range(len(parts)):
        total += own if peer == rank else parts[peer]
    return total.to(own.dtype)
