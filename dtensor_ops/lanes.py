"""Which ranks of a mesh axis work on which rows, and the process groups of such lanes, each made once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np
from torch.distributed import ProcessGroup

from augtree_fx.dtensor_ops.agreement import HostGroup, digest
from augtree_fx.dtensor_ops.schedules import GATHER_KV, MOVE_Q, ROTATE_KV, SCHEDULES
from augtree_fx.dtensor_ops.shards import MIN_CHUNK_TOKENS, Shards
from augtree_fx.layout import TreeLayout
from augtree_fx.trie import IntArray
from augtree_fx.waves import check_max_tokens

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
        schedule: who moves, one of `SCHEDULES`; ``None`` for `one_pass_schedule`, and in waves for `wave_schedule`.
        wave_tokens: packed tokens of branches that the whole lane has alive at a time; ``None`` for what `transform`
            was told, or all.
        prefill_schedule: who moves while prompts are computed that waves follow; ``None`` for ``schedule``.
        cut: cut long responses over its ranks, too, see `Shards.of`; otherwise they lie whole on one.
    """

    ranks: tuple[int, ...]
    rows: tuple[int, ...]
    schedule: str | None
    wave_tokens: int | None = None
    prefill_schedule: str | None = None
    cut: bool = False

    @property
    def described(self) -> str:
        """A line for ranks to compare; all rows would be too many to read."""
        rows = f"{len(self.rows)} rows {digest(np.array(self.rows, dtype=np.int64))}"
        moves = self.schedule if self.prefill_schedule is None else f"{self.schedule} after {self.prefill_schedule}"
        waves = "" if self.wave_tokens is None else f", waves of {self.wave_tokens} tokens"
        return f"ranks {list(self.ranks)}, {rows}, {moves}{waves}{', long responses cut' if self.cut else ''}"


Choose = Callable[[TreeLayout, int], Sequence[LanePlan]]  # of the whole batch's tree, and the number of ranks


def one_lane(layout: TreeLayout, num_ranks: int, *, schedule: str | None = None) -> list[LanePlan]:
    """All ranks in one lane.

    Args:
        layout: the tree of the whole batch.
        num_ranks: ranks of the axis.
        schedule: who moves; ``None`` for what is best.
    """
    return [LanePlan(tuple(range(num_ranks)), tuple(range(layout.num_rows)), schedule)]


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


@dataclass(frozen=True)
class Lane:
    """A lane as one of its ranks knows it.

    Attributes:
        plan: its ranks and schedules.
        rank: this one's number in it.
        group: name of its process group.
    """

    plan: LanePlan
    rank: int
    group: str


@dataclass(frozen=True, eq=False)
class Division:
    """A batch divided among lanes; the same on all ranks but for `lane`.

    Attributes:
        layout: the tree of the whole batch.
        plans: of all lanes.
        trees: ``[lanes]`` the tree of each lane's rows, whose slots are those of the whole batch.
        number: which lane is this rank's.
        lane: this rank's.
        min_chunk_tokens: see `Shards.of`.
    """

    layout: TreeLayout
    plans: tuple[LanePlan, ...]
    trees: tuple[TreeLayout, ...]
    number: int
    lane: Lane
    min_chunk_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all lanes' trees; a group that is torn between lanes counts in each."""
        return sum(tree.num_tokens for tree in self.trees)

    def in_one_pass(self) -> LanePart:
        """What this rank computes if every lane computes its tree at once."""
        parts = [
            Shards.of(tree, len(plan.ranks), min_chunk_tokens=self.min_chunk_tokens, cut=plan.cut)
            for tree, plan in zip(self.trees, self.plans, strict=True)
        ]
        share = max(shards.share for shards in parts)
        parts = [replace(shards, share=share) for shards in parts]
        passes = [[(shards, np.arange(shards.layout.num_tokens))] for shards in parts]
        return LanePart(self.lane, parts[self.number], share, self.index(passes, share))

    def index(self, passes: Sequence[Sequence[Pass]], share: int) -> IntArray:
        """``[slots]`` where each slot of the batch lies in the outputs of all ranks of the axis, -1 for padding.

        Args:
            passes: of each lane, in the order of its outputs.
            share: tokens of every rank's outputs, padding included.
        """
        found = np.full(self.layout.shape[0] * self.layout.shape[1], -1, dtype=np.int64)
        for plan, tree, own in zip(self.plans, self.trees, passes, strict=True):
            place, first = np.full(tree.num_tokens, -1, dtype=np.int64), 0
            for shards, tokens in own:
                for rank, number in enumerate(plan.ranks):
                    local = shards.tokens(rank)
                    here = np.flatnonzero(local >= 0)
                    place[tokens[local[here]]] = number * share + first + here
                first += shards.share
            slots = np.flatnonzero(tree.packed_index >= 0)
            found[slots] = place[tree.packed_index[slots]]
        return found


Pass = tuple[Shards, IntArray]  # of one forward of a lane; ``[tokens]`` which tokens of the lane's tree its layout has


@dataclass(frozen=True, eq=False)
class LanePart:
    """What a rank computes of a batch in one pass.

    Attributes:
        lane: its lane.
        shards: of the lane's tree.
        share: tokens of every rank of the axis, padding included.
        index: see `Division.index`.
    """

    lane: Lane
    shards: Shards
    share: int
    index: IntArray


@dataclass(eq=False)
class Lanes:
    """Ranks of one mesh axis and how batches are given to them.

    Attributes:
        host: the ranks.
        rows: ``"replicated"``, every rank passes the same rows, or ``"pooled"``, each passes its own.
        choose: gives a batch's tree to lanes.
        schedule: who moves in lanes that do not say it; ``None`` for what is best.
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

    @property
    def whole(self) -> Lane:
        """All ranks as one lane."""
        return Lane(LanePlan(tuple(range(self.num_ranks)), (), self.schedule), self.host.rank, self.group)

    @property
    def may_wave(self) -> bool:
        """Whether the choice of lanes may ask for waves."""
        return self._one_lane is None

    def plans(self, layout: TreeLayout) -> tuple[LanePlan, ...]:
        """What was chosen for a batch, with schedules where lanes do not say it, before `check_lanes`.

        Raises:
            ValueError: they are no lanes.
        """
        chosen = self.choose(layout, self.num_ranks)
        if not isinstance(chosen, Sequence) or not all(isinstance(each, LanePlan) for each in chosen):
            raise ValueError(f"lanes must give a list of LanePlan, got {chosen!r}")
        return tuple(replace(plan, schedule=plan.schedule or self.schedule) for plan in chosen)

    def divide(self, layout: TreeLayout, subtree: Callable[[tuple[int, ...]], TreeLayout]) -> Division:
        """A batch that all ranks of the axis know, divided among lanes.

        Args:
            layout: the tree of the whole batch.
            subtree: the tree of some of its rows, whose slots are those of the whole batch.

        Raises:
            ValueError: the lanes that were chosen do not partition ranks and rows.
            RuntimeError: ranks chose other lanes.
        """
        plans = self.plans(layout)
        if self._one_lane is None:  # whatever a caller's function goes by; ours goes by batch and settings
            self.host.agree("lanes of a batch", {f"lane {n}": plan.described for n, plan in enumerate(plans)})
        check_lanes(plans, self.num_ranks, layout.num_rows)
        trees = tuple(layout if len(plans) == 1 else subtree(plan.rows) for plan in plans)
        mine = next(number for number, plan in enumerate(plans) if self.host.rank in plan.ranks)
        ranks = plans[mine].ranks
        self._make_groups([plan.ranks for plan in plans], ranks)
        group = self._groups[ranks]
        assert group is not None, "a rank makes the group of its own lane"
        lane = Lane(plans[mine], ranks.index(self.host.rank), group.group_name)
        return Division(layout, plans, trees, mine, lane, self.min_chunk_tokens)

    def _make_groups(self, lanes: Sequence[tuple[int, ...]], mine: tuple[int, ...]) -> None:
        """Groups of lanes that there were none of before; all ranks know of all of them, and make theirs together."""
        missing = [ranks for ranks in lanes if ranks not in self._groups]
        if not missing:
            return
        whole = len(missing[0]) == self.num_ranks
        found = self.host.group if whole else self.host.new_group(mine if mine in missing else None)
        self._groups |= {ranks: found if ranks == mine else None for ranks in missing}


def check_lanes(plans: Sequence[LanePlan], num_ranks: int, num_rows: int) -> None:
    """Raise ValueError unless lanes partition ranks and rows, and their schedules and waves can be."""
    ranks = sorted(rank for plan in plans for rank in plan.ranks)
    rows = sorted(row for plan in plans for row in plan.rows)
    ascending = all(plan.ranks and list(plan.ranks) == sorted(plan.ranks) for plan in plans)
    if ranks != list(range(num_ranks)) or not ascending:
        raise ValueError(
            f"lanes must partition {num_ranks} ranks, each some in ascending order, got {[p.ranks for p in plans]}"
        )
    if rows != list(range(num_rows)):
        raise ValueError(f"lanes must partition {num_rows} rows, got {[plan.rows for plan in plans]}")
    for plan in plans:
        check_max_tokens("wave_tokens of a lane", plan.wave_tokens)
        for schedule in (plan.schedule, plan.prefill_schedule):
            if schedule is not None and schedule not in SCHEDULES:
                raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
