"""The library's own context parallelism as a contender: one schedule, or whichever it takes for a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

import augtree_fx
from augtree_fx import TreeLayout
from augtree_fx.dtensor_ops.lanes import one_pass_schedule
from augtree_fx.dtensor_ops.shards import Shards
from augtree_fx.dtensor_ops.site import LaneTables, attend
from augtree_fx.examples.bench import grpo, models
from augtree_fx.examples.bench.cp.contender import Contender
from augtree_fx.examples.bench.cp.parts import PARTS
from augtree_fx.examples.bench.cp.rollout import Rollout
from augtree_fx.examples.bench.cp.shard import Shard


@dataclass(frozen=True)
class Plan:
    """What attention of a batch needs.

    Attributes:
        lane: tables of this rank.
        share: tokens of every rank, padding included.
        rollout: the batch.
        packed: what the model is called with, from the first step on; like others' shards it is no part of the time.
    """

    lane: LaneTables
    share: int
    rollout: Rollout
    packed: dict[str, Any] = field(default_factory=dict)


class Ours(Contender):
    """Prompts once, zigzag; responses whole on the rank with fewest tokens; keys or queries move.

    Args:
        group: the ranks of the axis.
        schedule: who moves; ``None`` for what `transform` takes by itself.
    """

    reuse = True

    def __init__(self, group: distributed.ProcessGroup, schedule: str | None = None) -> None:
        super().__init__(group)
        self.schedule = schedule
        kind = "cuda" if distributed.get_backend(group) == "nccl" else "cpu"
        self.mesh = DeviceMesh.from_group(group, kind)

    def shard(self, rollout: Rollout, device: torch.device) -> Shard:
        """See `Contender.shard`."""
        layout = _layout(rollout, torch.from_numpy(rollout.distinct), device)
        shards = Shards.of(layout, self.size)
        tokens = shards.tokens(self.rank)
        held = layout.source[tokens[tokens >= 0]]
        moves = self.schedule or one_pass_schedule(layout)
        lane = LaneTables.of(shards, self.rank, {None}, moves, self.group.group_name)
        return Shard.of(rollout, held, device, Plan(lane, shards.share, rollout), reuse=True)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, shard: Shard, scale: float, kernel: str) -> Tensor:
        """See `Contender.attend`."""
        plan: Plan = shard.plan
        missing = plan.share - len(q)
        if missing:
            q, k, v = (pad(x, (0, 0, 0, 0, 0, missing)) for x in (q, k, v))
        out, _ = attend(q, k, v, plan.lane, None, None, scale, 0.0, kernel)
        return out[: plan.share - missing]

    def parts(self) -> dict[str, AbstractContextManager[Any]]:
        """See `Contender.parts`."""
        return {name: part() for name, part in PARTS.items()} if self.size > 1 else {}

    @contextmanager
    def prepared(self, model: Any) -> Iterator[None]:
        """The model transformed for the time being."""
        models.use_rows_kernel(model, "sdpa")
        augtree_fx.transform(model, mesh=self.mesh, schedule=self.schedule)
        try:
            yield
        finally:
            augtree_fx.restore(model)

    def log_probs(self, model: Any, input_ids: Tensor, shard: Shard, kernel: str) -> Tensor:
        """See `Contender.log_probs`."""
        plan: Plan = shard.plan
        if not plan.packed:
            layout = _layout(plan.rollout, input_ids.cpu(), input_ids.device)
            plan.packed.update(augtree_fx.pack(model, layout).arguments)
        hidden = model.model(**plan.packed).last_hidden_state[0]
        return grpo.token_log_probs(hidden[shard.predictor], model.lm_head.weight, input_ids[shard.target])


def _layout(rollout: Rollout, ids: Tensor, device: torch.device) -> TreeLayout:
    """The tree of a batch whose row tokens are ``ids``, on the host."""
    if rollout.common:  # more levels than a group declares
        starts = torch.from_numpy(rollout.row_starts).to(device)
        return TreeLayout.from_packed(ids[None].to(device), cu_seq_lens=starts)
    rows = list(ids.split(rollout.row_lengths))
    prompts: list[Tensor] = []
    responses: list[list[Tensor]] = []
    for row, group in zip(rows, rollout.group_of_row, strict=True):
        length = rollout.prompts[group]
        if group == len(prompts):
            prompts.append(row[:length])
            responses.append([])
        responses[group].append(row[length:])
    return TreeLayout.from_groups(prompts, responses, device=device)
