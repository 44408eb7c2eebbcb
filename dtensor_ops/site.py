"""Attention of one layer under context parallelism, whatever its queries see: what the FX pass calls."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from augtree_fx.dtensor_ops import latents as latent_attention
from augtree_fx.dtensor_ops import ops, tables
from augtree_fx.dtensor_ops.attention import Latents
from augtree_fx.dtensor_ops.shards import Shards
from augtree_fx.dtensor_ops.tables import LaneCalls, Reached
from augtree_fx.reference import AttentionSpec
from augtree_fx.tables import Span


@dataclass(frozen=True, eq=False)
class LaneTables:
    """Tables of a rank for every span that some layer has, and how its lane moves keys or queries.

    Attributes:
        by_span: of layers that see their whole path (``None``), a window or chunks of it.
        schedule: for whole paths, one of `schedules.SCHEDULES`; windows are always sent what they reach.
        group: name of the lane's process group.
        latents: whether layers may send what keys follow from, see `Latents`; the same on all ranks.
    """

    by_span: Mapping[Span, LaneCalls | Reached]
    schedule: str
    group: str
    latents: bool = False

    @property
    def bucket(self) -> tuple[Hashable, ...]:
        """What a compiled model is specialised on."""
        windows = frozenset(span for span, found in self.by_span.items() if isinstance(found, Reached))
        return windows, self.schedule, self.group, self.latents

    @staticmethod
    def of(
        shards: Shards, rank: int, spans: set[Span], schedule: str, group: str, *, latents: bool = False
    ) -> LaneTables:
        """Tables of a rank of a lane."""
        whole: LaneCalls | None = None
        longest = int((shards.layout.path_start + shards.layout.length).max(initial=0))
        found: dict[Span, LaneCalls | Reached] = {}
        for span in spans:
            sees_all = span is None or (span.size if isinstance(span, tables.Chunks) else span) >= longest
            if sees_all:
                if whole is None:
                    whole = LaneCalls.of(tables.whole_path(shards, rank, schedule))
                found[span] = whole
            else:
                found[span] = tables.reached(shards, rank, span)
        return LaneTables(found, schedule, group, latents)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lane: LaneTables,
    span: Span,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    kernel: str,
    latents: Latents | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a rank's queries to their paths, wherever these lie.

    Args:
        q: ``[share, H, D]``; k: ``[share, K, D]``; v: ``[share, K, E]``, local.
        span: what a query sees of its path.
        sinks: ``[H]`` or ``None``.
        latents: what may travel in place of k and v; it does where queries see their whole path.

    Returns:
        ``out [share, H, E]``, ``lse [H, share]``, local.
    """
    found = lane.by_span[span]
    if isinstance(found, LaneCalls):
        if latents is not None:
            whole = ops.lane_of(found, lane.schedule, lane.group)
            return latent_attention.attend(q, k, v, latents, whole, sinks, AttentionSpec(scale, 0, softcap), kernel)
        return torch.ops.augtree.context_parallel_attention(
            q,
            k,
            v,
            *found.tensors,
            sinks,
            scale,
            softcap,
            kernel,
            lane.schedule,
            lane.group,
        )
    moved = (found.sent, found.num_sent, found.num_received)
    k, v = (torch.ops.augtree.fetch_tokens(x, *moved, lane.group) for x in (k, v))
    window = span if isinstance(span, int) else 0
    own = found.tables
    return torch.ops.augtree.replay_attention(
        q, k, v, own.segments, own.cu_seqlens, own.kv_index, sinks, scale, window, softcap, kernel
    )
