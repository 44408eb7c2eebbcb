"""What ranks tell each other on the host before a forward, so that none waits for a call that never comes.

It goes over gloo, whatever moves tensors: no copy to a device, and a rank that does not answer is named.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

TIMEOUT = timedelta(minutes=5)  # a rank may still be busy with its reward model, or compile a kernel

_TOLD = timedelta(seconds=3)  # until others hear from the first rank who did not come; it says so at once

# A number for each `HostGroup` of a process group, by its name. They are made in the same order on all ranks of it.
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


class HostGroup:
    """Ranks of a mesh axis, and their gloo group.

    Args:
        group: the axis's process group; every rank of it makes a `HostGroup` at the same time.
        timeout: how long a rank may keep the others waiting; the first one, which tells the others, twice as long.
    """

    def __init__(self, group: ProcessGroup, timeout: timedelta = TIMEOUT) -> None:
        self.group, self.timeout = group, timeout
        self.ranks = distributed.get_process_group_ranks(group)
        self.rank = distributed.get_rank(group)
        # Only the first rank counts the time of the barrier; others wait for it as long as the group lets them.
        self._name = f"{group.group_name}/{next(_numbers[group.group_name])}"
        self._largest = 0
        store = distributed.PrefixStore(f"augtree_fx/{self._name}", distributed.distributed_c10d._get_default_store())
        self._host: Any = distributed.ProcessGroupGloo(store, self.rank, len(self.ranks), 2 * timeout)

    def new_group(self, ranks: Sequence[int] | None) -> ProcessGroup | None:
        """A process group of some ranks of the axis, for tensors; every rank of the axis calls this at the same time.

        torch names a group that only its members make after their ranks and the number of groups that each knows of.
        That differs between ranks which were in different groups before, and they would wait for each other for ever;
        and a name that a group had which is gone finds that one's addresses. So all bring their numbers to a new one.

        Args:
            ranks: of the axis, ascending, this one among them, the same on all of these; ``None`` if it needs none.
        """
        known = distributed.distributed_c10d._world.pg_names
        number = max(self.exchange(max(len(known), self._largest)))
        while len(known) < number:
            distributed.new_group([self.ranks[self.rank]], backend="gloo", use_local_synchronization=True)
        self._largest = number + 1
        if ranks is None:
            return None
        found = distributed.new_group(
            [self.ranks[rank] for rank in ranks], self.timeout, backend=distributed.get_backend(self.group),
            use_local_synchronization=True,
        )  # fmt: skip
        assert isinstance(found, ProcessGroup)
        return found

    def exchange(self, value: Any) -> list[Any]:
        """What every rank has to say, in the order of ranks; values must pickle.

        Raises:
            RuntimeError: a rank did not answer in time, or is gone; the message names it.
        """
        try:
            self._host.monitored_barrier(self.timeout, wait_all_ranks=True)
            return self._exchanged(value)
        except RuntimeError as error:
            raise RuntimeError(
                f"ranks {self.ranks} share a batch and call forward together, each within "
                f"{self.timeout.total_seconds():g} s of the others; rank {self.ranks[self.rank]} was left waiting by "
                f"{self._missing(error)}; look for its own error. {error}"
            ) from error

    def _exchanged(self, value: Any) -> list[Any]:
        """Pickled, padded to the longest."""
        said = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = self._gathered(torch.tensor([len(said)])).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(said)] = said
        found = self._gathered(padded).numpy()
        return [pickle.loads(row[:length].tobytes()) for row, length in zip(found, lengths, strict=True)]

    def _gathered(self, tensor: Tensor) -> Tensor:
        found = tensor.new_empty(len(self.ranks), *tensor.shape)
        self._host.allgather([list(found)], [tensor]).wait()
        return found

    def _missing(self, error: RuntimeError) -> str:
        """Who did not come. Only the first rank is told, and tells the others, which hear that it gave up."""
        store, key = distributed.distributed_c10d._get_default_store(), f"augtree_fx/late/{self._name}"
        late = re.search(r"Ranks? ([\d, ]+) failed to pass", str(error))
        if self.rank == 0 and late:
            store.set(key, ", ".join(str(self.ranks[int(number)]) for number in late[1].split(",")))
        try:
            store.wait([key], _TOLD)
            return f"rank {store.get(key).decode()}"
        except RuntimeError:
            return f"rank {self.ranks[0]}" if self.rank else "another rank"

    def agree(self, what: str, described: dict[str, Any]) -> None:
        """Raise RuntimeError unless every rank describes the same; the message names the first rank that differs.

        Args:
            what: that they must agree on, for the message.
            described: by name.
        """
        self.check(what, self.exchange(described))

    def check(self, what: str, found: list[dict[str, Any]]) -> None:
        """As `agree`, of descriptions that were exchanged."""
        for number, other in enumerate(found[1:], start=1):
            names = [name for name in {**found[0], **other} if other.get(name) != found[0].get(name)]
            if names:
                shown = "; ".join(f"{name} ({other.get(name)}, not {found[0].get(name)})" for name in names)
                raise RuntimeError(
                    f"{what} must be the same on ranks {self.ranks}: rank {self.ranks[number]} differs from rank "
                    f"{self.ranks[0]} in {shown}; pass and set the same on all of them"
                )


def digest(*arrays: np.ndarray) -> str:
    """Short hash of arrays, the same on every rank and for every hash seed."""
    found = hashlib.blake2b(digest_size=8)
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()
