"""Which ranks of a mesh axis work on which rows, and the process groups of such lanes, each made once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np
from torch.distributed import ProcessGroup

from augtree_fx.dtensor_ops.agreement import HostGroup, digest
from augtree_fx.dtensor_ops.attention import GATHER_KV, MOVE_Q, ROTATE_KV, SCHEDULES
from augtree_fx.dtensor_ops.shards import MIN_CHUNK_TOKENS, Shards
from augtree_fx.layout import TreeLayout
from augtree_fx.trie import IntArray

# Moving queries sends fewer bytes when response tokens are fewer than this, times key heads over query heads, times
# prompt tokens: bfloat16 payload, float32 gradients of keys, to first order, without what overlaps with arithmetic.
BREAK_EVEN = 1.14
# Prompt tokens up to which all keys are gathered at once: one transfer instead of a step for each rank, 12% faster at
# 16k tokens on two H200 (2026-11-30), the same from 32k on, where only memory is left to tell them apart.
GATHER_TOKENS = 32_768


@dataclass(frozen=True)
class LanePlan:
    """A lane: ranks that work on the same rows.

    Attributes:
        ranks: of the mesh axis, ascending.
        rows: numbers of rows of the batch.
        schedule: who moves, one of `SCHEDULES`.
    """

    ranks: tuple[int, ...]
    rows: tuple[int, ...]
    schedule: str

    @property
    def described(self) -> str:
        """A line for ranks to compare; all rows would be too many to read."""
        rows = f"{len(self.rows)} rows {digest(np.array(self.rows, dtype=np.int64))}"
        return f"ranks {list(self.ranks)}, {rows}, {self.schedule}"


Choose = Callable[[TreeLayout, int], Sequence[LanePlan]]  # of the whole batch's tree, and the number of ranks


def one_lane(layout: TreeLayout, num_ranks: int, *, schedule: str | None = None) -> list[LanePlan]:
    """All ranks in one lane.

    Args:
        layout: the tree of the whole batch.
        num_ranks: ranks of the axis.
        schedule: who moves; ``None`` for what is best where prompts and responses are computed in one pass.
    """
    found = schedule or one_pass_schedule(layout)
    return [LanePlan(tuple(range(num_ranks)), tuple(range(layout.num_rows)), found)]


def one_pass_schedule(layout: TreeLayout) -> str:
    """Who moves where prompts and responses are computed in one pass: always keys.

    Keys of prompts visit every rank for the prompts' own queries; responses attend to them as they come by. Queries
    that move come on top of that, and pay only where prompts were computed before.
    """
    read = np.isin(np.arange(layout.num_nodes), layout.parent)
    return GATHER_KV if int(layout.length[read].sum()) <= GATHER_TOKENS else ROTATE_KV


def wave_schedule(num_keys: int, num_queries: int, kv_share: float) -> str:
    """Who moves for a wave of responses on prompts that were computed before: whichever sends fewer bytes.

    Args:
        num_keys: tokens of the prompts.
        num_queries: tokens of the wave.
        kv_share: key heads over query heads.
    """
    return MOVE_Q if num_queries < BREAK_EVEN * kv_share * num_keys else ROTATE_KV


@dataclass(frozen=True, eq=False)
class LanePart:
    """What a rank computes of a batch.

    Attributes:
        shards: of its lane's tree.
        rank: its number in the lane.
        group: name of the lane's process group.
        schedule: of the lane.
        share: tokens of every rank of the axis, padding included.
        index: ``[slots]`` where each slot of the batch lies in the shares of all ranks of the axis, -1 for padding.
        num_tokens: tokens of all lanes' trees; a group that is torn between lanes counts in each.
    """

    shards: Shards
    rank: int
    group: str
    schedule: str
    share: int
    index: IntArray
    num_tokens: int

    @property
    def layout(self) -> TreeLayout:
        return self.shards.layout

    def tokens(self) -> IntArray:
        """``[share]`` packed token of the lane's tree at each place of this rank, -1 for padding."""
        return self.shards.tokens(self.rank)


@dataclass(eq=False)
class Lanes:
    """Ranks of one mesh axis and how batches are given to them.

    Attributes:
        host: the ranks.
        rows: ``"replicated"``, every rank passes the same rows, or ``"pooled"``, each passes its own.
        choose: gives a batch's tree to lanes.
        schedule: who moves in waves; ``None`` for `wave_schedule`.
        min_chunk_tokens: see `Shards.of`.
    """

    host: HostGroup
    rows: str
    choose: Choose
    schedule: str | None = None
    min_chunk_tokens: int = MIN_CHUNK_TOKENS
    _groups: dict[tuple[int, ...], ProcessGroup | None] = field(default_factory=dict)  # None where others are

    def __deepcopy__(self, memo: object) -> Lanes:
        """A copy of a model runs on the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a model on a device mesh does not pickle; augtree_fx.restore(model) first, or save its state")

    @property
    def group(self) -> str:
        """Name of the axis's process group."""
        return self.host.group.group_name

    @property
    def num_ranks(self) -> int:
        return len(self.host.ranks)

    @property
    def choice(self) -> str:
        """How rows are given to lanes, in words that are the same on all ranks for the same settings."""
        if self._one_lane is not None:
            return f"all ranks in one lane, schedule {self._one_lane.keywords.get('schedule')}"
        return str(getattr(self.choose, "__qualname__", type(self.choose).__qualname__))

    @property
    def _one_lane(self) -> functools.partial[list[LanePlan]] | None:
        """`one_lane` with its settings, if that chooses."""
        found = self.choose
        return found if isinstance(found, functools.partial) and found.func is one_lane else None

    def part(self, layout: TreeLayout, subtree: Callable[[tuple[int, ...]], TreeLayout]) -> LanePart:
        """What this rank computes of a batch that all ranks of the axis know.

        Args:
            layout: the tree of the whole batch.
            subtree: the tree of some of its rows, whose slots are those of the whole batch.

        Raises:
            ValueError: the lanes that were chosen do not partition ranks and rows.
            RuntimeError: ranks chose other lanes.
        """
        chosen = self.choose(layout, self.num_ranks)
        if not isinstance(chosen, Sequence) or not all(isinstance(each, LanePlan) for each in chosen):
            raise ValueError(f"lanes must give a list of LanePlan, got {chosen!r}")
        plans = list(chosen)
        if self._one_lane is None:  # whatever a caller's function goes by; ours goes by batch and settings
            self.host.agree("lanes of a batch", {f"lane {n}": plan.described for n, plan in enumerate(plans)})
        check_lanes(plans, self.num_ranks, layout.num_rows)
        trees = [layout if len(plans) == 1 else subtree(plan.rows) for plan in plans]
        parts = [
            Shards.of(tree, len(plan.ranks), min_chunk_tokens=self.min_chunk_tokens)
            for tree, plan in zip(trees, plans, strict=True)
        ]
        share = max(shards.share for shards in parts)
        parts = [replace(shards, share=share) for shards in parts]
        index = np.full(layout.shape[0] * layout.shape[1], -1, dtype=np.int64)
        for plan, shards in zip(plans, parts, strict=True):
            packed = shards.layout.packed_index
            here = np.flatnonzero(packed >= 0)
            lane_rank, place = np.divmod(shards.slot[packed[here]], share)
            index[here] = np.array(plan.ranks)[lane_rank] * share + place
        mine = next(number for number, plan in enumerate(plans) if self.host.rank in plan.ranks)
        ranks = plans[mine].ranks
        self._make_groups([plan.ranks for plan in plans], ranks)
        group = self._groups[ranks]
        assert group is not None, "a rank makes the group of its own lane"
        return LanePart(
            parts[mine], ranks.index(self.host.rank), group.group_name, plans[mine].schedule, share, index,
            sum(tree.num_tokens for tree in trees),
        )  # fmt: skip

    def _make_groups(self, lanes: Sequence[tuple[int, ...]], mine: tuple[int, ...]) -> None:
        """Groups of lanes that there were none of before; all ranks know of all of them, and make theirs together."""
        missing = [ranks for ranks in lanes if ranks not in self._groups]
        if not missing:
            return
        whole = len(missing[0]) == self.num_ranks
        found = self.host.group if whole else self.host.new_group(mine if mine in missing else None)
        self._groups |= {ranks: found if ranks == mine else None for ranks in missing}


def check_lanes(plans: Sequence[LanePlan], num_ranks: int, num_rows: int) -> None:
    """Raise ValueError unless lanes partition ranks and rows, and their schedules exist."""
    ranks = sorted(rank for plan in plans for rank in plan.ranks)
    rows = sorted(row for plan in plans for row in plan.rows)
    if ranks != list(range(num_ranks)) or any(list(plan.ranks) != sorted(plan.ranks) for plan in plans):
        raise ValueError(
            f"lanes must partition {num_ranks} ranks, each in ascending order, got {[p.ranks for p in plans]}"
        )
    if rows != list(range(num_rows)):
        raise ValueError(f"lanes must partition {num_rows} rows, got {[plan.rows for plan in plans]}")
    unknown = [plan.schedule for plan in plans if plan.schedule not in SCHEDULES]
    if unknown:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {unknown[0]!r}")
