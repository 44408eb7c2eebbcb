"""What ranks of a lane run in tests of context parallelism: attention of random trees, compared with rows on their own."""

from __future__ import annotations

import numpy as np
import torch
from attention_reference import Site, by_rows, leaves_of, make_inputs, packed_prefixes
from row_reference import Batch
from torch import Tensor, distributed

from augtree_fx import CostModel, TreeLayout
from augtree_fx.dtensor_ops.shards import Shards
from augtree_fx.dtensor_ops.site import LaneTables, attend
from augtree_fx.tables import Span


def lane_name(ranks: list[int] | None = None) -> str:
    """Name of the group of all ranks."""
    return distributed.group.WORLD.group_name


def attention_errors(
    at: Site, batch: Batch, schedule: str, min_chunk: int = 1, span: Span = None, kernel: str = "reference"
) -> dict[str, float]:
    """Largest differences from the truth, relative to its largest value, of results and gradients summed over ranks."""
    rank, ranks, group = distributed.get_rank(), distributed.get_world_size(), lane_name()
    inputs = make_inputs(at, batch)
    truth = by_rows(at, batch, inputs)
    layout = TreeLayout.from_padded(batch.input_ids, batch.attention_mask, batch.position_ids, costs=CostModel.free())
    shards = Shards.of(layout, ranks, min_chunk_tokens=min_chunk)
    lane = LaneTables.of(shards, rank, {span}, schedule, group)
    leaves, order = leaves_of(inputs), packed_prefixes(batch, layout)
    tokens = torch.from_numpy(shards.tokens(rank))
    own: list[Tensor] = []
    for name in "qkv":
        local = leaves[name][order][tokens.clamp(min=0)]
        own.append(torch.where((tokens < 0)[:, None, None], torch.nan, local))  # padding must reach no result
    out, lse = attend(*own, lane, span, leaves.get("sinks"), at.scale, at.softcap, kernel)
    assert torch.isfinite(out).all() and (out[tokens < 0] == 0).all()
    slots = np.concatenate([slots for slots in batch.slots if slots])
    index = torch.from_numpy(shards.slot[layout.packed_index[slots]])
    whole, whole_lse = (torch.ops.augtree.gather_shares(x.contiguous(), group)[index] for x in (out, lse.T))
    loss = (whole * inputs["weigh_out"]).sum() + (whole_lse * inputs["weigh_lse"]).sum()
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))
    errors = {"out": relative(whole, truth.out), "lse": relative(whole_lse, truth.lse)}
    for name, expected in truth.gradients.items():
        found = gradients[name]
        found = torch.zeros_like(expected) if found is None else found.contiguous()
        distributed.all_reduce(found)
        errors[name] = relative(found / ranks, expected)
    return errors


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest value of the truth."""
    return float((found.detach() - expected).abs().max() / expected.abs().max())
