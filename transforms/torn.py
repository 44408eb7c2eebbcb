"""Groups that a trainer tears: rows of one prompt in different micro-batches cannot be shared, and nobody would notice.

The first training batches are remembered, and a prefix tree over all of them says which rows belong together:

    micro-batch 1   A1 B1 C1 A2          1.3 rows a group in a micro-batch,
    micro-batch 2   B2 C2 A3 B3          4 rows a group in all
    ...
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from augtree_fx.costs import CostModel
from augtree_fx.layout import TreeLayout
from augtree_fx.rows import HostRows
from augtree_fx.trie import IntArray

ADVICE = (
    "call augtree_fx.integrations.trl.enable(trainer) if it is TRL's, or order rows by prompt and make the micro-batch "
    "a multiple of the group"
)
NUM_BATCHES = 64  # then nothing is looked at any more
LOOK_AT = (2, 4, 8, 16)  # batches in the window; the last look ends it
MIN_TOKENS = 16.0  # that a prompt must save
MAX_WINDOW_TOKENS = 1 << 20  # 8 MiB of keys


@dataclass
class TornGroups:
    """Looks at the first training batches of a stack.

    Attributes:
        advice: what to do about torn groups, for the message.
        message: what was found, once.
    """

    advice: str = ADVICE
    message: str | None = None
    _num_batches: int = 0
    _window: list[tuple[int, HostRows]] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)
    _group_size: float = 0.0

    def fresh(self) -> TornGroups:
        """One that has seen nothing."""
        return TornGroups(self.advice)

    def add(self, host: HostRows, version: int, costs: CostModel) -> str | None:
        """Remember a batch; returns the message when torn groups are found first.

        Args:
            host: its rows.
            version: grows when parameters are updated.
            costs: what a group must save to be one.
        """
        if self.message is not None or self._num_batches >= NUM_BATCHES:
            return None
        self._num_batches += 1
        versions = {earlier for earlier, _ in self._window}
        if len(self._window) > 1 and len(versions) == 1 and version not in versions:
            self.message = self._look(costs, all_seen=True)  # the update is over: no more of its groups come
        rows = {hash(keys.tobytes()) for keys in host.row_keys() if len(keys)}
        tokens = sum(int(each.length.sum()) for _, each in self._window) + int(host.length.sum())
        if rows & self._seen or tokens > MAX_WINDOW_TOKENS or len(self._window) == LOOK_AT[-1]:
            self._forget()  # a second epoch or iteration over the same rows is no part of their group
        self._seen |= rows
        self._window.append((version, host))
        if self.message is None and len(self._window) in LOOK_AT:
            self.message = self._look(costs, all_seen=len(self._window) == LOOK_AT[-1])
        if self.message is not None or self._num_batches == NUM_BATCHES:
            self._forget()
        return self.message

    def _forget(self) -> None:
        self._window, self._seen, self._group_size = [], set(), 0.0

    def _look(self, costs: CostModel, all_seen: bool) -> str | None:
        group = _row_groups([host for _, host in self._window], costs)
        batch = np.repeat(np.arange(len(self._window)), [len(host.length) for _, host in self._window])
        group, batch = group[group >= 0], batch[group >= 0]  # rows that are not empty
        together = np.bincount(group, minlength=1)[group] > 1
        if not together.any():
            return None
        in_all = float(together.sum() / len(np.unique(group[together])))
        in_batch = together.sum() / len(np.unique(np.stack([batch, group])[:, together], axis=1).T)
        one_update = len({version for version, _ in self._window}) == 1
        # Between updates the same prompt may come again, in whole groups: only rows that are alone are torn then.
        if in_batch > in_all / 2 or (in_batch >= 2 and not one_update):
            return None
        grows, self._group_size = in_all > 1.1 * self._group_size, in_all
        if grows and not all_seen:
            return None  # more of these groups may come
        return (
            f"rows of one prompt arrive in different micro-batches: {in_batch:.1f} rows a group of {round(in_all)}; "
            f"{self.advice}"
        )


def _row_groups(batches: list[HostRows], costs: CostModel) -> IntArray:
    """``[rows]`` number of each row's prompt, as far as the rows' tree shows it; see `augtree_fx.groups`.

    A few tokens that responses have in common make no group, whatever the model shares.
    """
    costs = CostModel(max(costs.node_tokens, MIN_TOKENS), max(costs.merge_fraction, 0.01))
    length = np.concatenate([host.length for host in batches])
    rows = [keys for host in batches for keys in host.row_keys()]
    begin = np.cumsum(length) - length
    joined = HostRows(np.concatenate(rows), begin, length, (1, int(length.sum())), batches[0].device)
    return TreeLayout.from_rows(joined, costs=costs).row_group
