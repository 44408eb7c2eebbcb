"""What ranks tell each other on the host before a forward, so that none waits for a call that never comes.

It goes over gloo, whatever moves tensors: no copy to a device, and a rank that does not answer is named.
"""

from __future__ import annotations

import hashlib
import re
from datetime import timedelta
from typing import Any

import numpy as np
from torch import distributed
from torch.distributed import ProcessGroup

TIMEOUT = timedelta(minutes=5)  # a rank may still be busy with its reward model, or compile a kernel


_TOLD = timedelta(seconds=3)  # until others hear from the first rank who did not come; it says so at once


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
        self._host = distributed.new_group(self.ranks, 2 * timeout, backend="gloo", use_local_synchronization=True)

    def exchange(self, value: Any) -> list[Any]:
        """What every rank has to say, in the order of ranks; values must pickle.

        Raises:
            RuntimeError: a rank did not answer in time, or is gone; the message names it.
        """
        found: list[Any] = [None] * len(self.ranks)
        try:
            distributed.monitored_barrier(self._host, self.timeout, wait_all_ranks=True)
            distributed.all_gather_object(found, value, self._host)
        except RuntimeError as error:
            raise RuntimeError(
                f"ranks {self.ranks} share a batch and call forward together, each within "
                f"{self.timeout.total_seconds():g} s of the others; rank {self.ranks[self.rank]} was left waiting by "
                f"{self._missing(error)}; look for its own error. {error}"
            ) from error
        return found

    def _missing(self, error: RuntimeError) -> str:
        """Who did not come. Only the first rank is told, and tells the others, which hear that it gave up."""
        store, key = distributed.distributed_c10d._get_default_store(), f"augtree_fx/late/{self._host.group_name}"
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
