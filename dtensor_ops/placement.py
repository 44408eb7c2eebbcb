"""`PartialSoftmax`: a DTensor whose ranks each attended to other keys, and whose value is the merged attention.

                  rank 0        rank 1        rank 2
PartialSoftmax    [T, H, E|L]   [T, H, E|L]   [T, H, E|L]    out and LSE over the keys of a rank, packed
                     \\  all-to-all: rows of each other's shard, then a merge of all ranks' rows  /
Shard(0)          [T/3, H, ..]  [T/3, H, ..]  [T/3, H, ..]   out and LSE over all keys
                     \\  all-gather  /
Replicate         [T, H, E|L]   [T, H, E|L]   [T, H, E|L]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Shard


class PartialSoftmax(Partial):
    """Placement of partial attentions: ranks of the mesh axis hold results over disjoint sets of keys.

    The local tensor is ``[T, H, E + 1]``: the output, and behind it the LSE, in the LSE's dtype. Redistributing it to
    ``Shard(0)`` (tokens), ``Shard(1)`` (heads) or ``Replicate()`` merges. It is made by `partials_from_local` and read
    by `unpack_partials`; nothing but ``redistribute`` is meant for what is in between.

    As with every DTensor its gradient is that of its value, the merged tensor. Only `partials_from_local` turns it into
    gradients of what a rank put in; ``DTensor.from_local`` does not.
    """

    def __init__(self) -> None:
        super().__init__("softmax")

    def _reduce_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        group = mesh.get_group(mesh_dim).group_name
        merged = _merged(tensor, group, mesh.size(mesh_dim))
        return torch.ops.augtree.gather_shares(merged, group)[: len(tensor)].contiguous()

    def _reduce_shard_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, shard_spec: Placement) -> Tensor:
        assert isinstance(shard_spec, Shard), f"partials are reduced to shards, got {shard_spec}"
        if shard_spec.dim not in (0, 1):
            raise ValueError(
                f"partials are [T, H, E + 1] with the LSE in the last dim, which cannot be parted from outputs, got "
                f"{shard_spec}; redistribute to Shard(0), Shard(1) or Replicate()"
            )
        rows = tensor.movedim(shard_spec.dim, 0)  # tokens and heads are alike here
        merged = _merged(rows, mesh.get_group(mesh_dim).group_name, mesh.size(mesh_dim))
        own = len(rows) - mesh.get_local_rank(mesh_dim) * len(merged)  # the last shards may be short, as in torch.chunk
        return merged[: max(own, 0)].movedim(0, shard_spec.dim).contiguous()

    def _partition_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        """Every rank has an equal part of the softmax, which merges to the same."""
        out, lse = tensor[..., :-1], tensor[..., -1:]
        return torch.cat([out, lse - math.log(mesh.size(mesh_dim))], -1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartialSoftmax)

    def __hash__(self) -> int:
        return hash(PartialSoftmax)

    def __repr__(self) -> str:
        return "PartialSoftmax()"

    def __str__(self) -> str:
        return "P(softmax)"


def _merged(packed: Tensor, group: str, num_ranks: int) -> Tensor:
    """``[ceil(T / ranks), H, E + 1]``: this rank's share of the merged rows; missing rows are 0 and -inf."""
    out, lse = packed[..., :-1], packed[..., -1].T
    missing = -len(packed) % num_ranks
    out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, missing))
    lse = torch.nn.functional.pad(lse, (0, missing), value=-torch.inf)
    return torch.ops.augtree.pack_partials(*torch.ops.augtree.reduce_partials(out, lse, group), [])


def partials_from_local(out: Tensor, lse: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A DTensor of partial attentions.

    Args:
        out: ``[T, H, E]``, local: of a rank's queries over its keys. May hold anything where ``lse`` is -inf.
        lse: ``[H, T]``, local, natural, in the accumulation dtype; -inf where a query saw no key.
        mesh: ranks; placements: one for each axis, `PartialSoftmax` where ranks hold other keys, and ``Shard(0)``,
            ``Shard(1)`` or ``Replicate()`` where they hold other tokens or heads, equally many, or the same.

    Returns:
        ``[T, H, E + 1]``, global, differentiable by ``out`` and ``lse``.

    Raises:
        ValueError: shapes do not fit together.
    """
    if out.ndim != 3 or lse.shape != (out.shape[1], out.shape[0]):
        raise ValueError(
            f"a partial is an output [T, H, E] and an LSE [H, T], got {list(out.shape)} and {list(lse.shape)}; "
            "pass them as an attention op returns them"
        )
    reduced = [axis for axis, placement in enumerate(placements) if isinstance(placement, PartialSoftmax)]
    packed = torch.ops.augtree.pack_partials(out, lse, [mesh.get_group(axis).group_name for axis in reduced])
    return DTensor.from_local(packed, mesh, placements, run_check=False)


def unpack_partials(packed: DTensor, dtype: torch.dtype | None = None) -> tuple[DTensor, DTensor]:
    """Output and LSE of what was merged.

    Args:
        packed: ``[T, H, E + 1]``, global, redistributed.
        dtype: of the output; ``None`` for that of the LSE.

    Returns:
        ``out [T, H, E]`` and ``lse [H, T]``, global, sharded alike.

    Raises:
        ValueError: it is not merged yet.
    """
    if any(isinstance(placement, PartialSoftmax) for placement in packed.placements):
        raise ValueError(
            f"partials must be merged before they are read, got placements {packed.placements}; "
            "redistribute(placements=[Shard(0)]) first"
        )
    merged: Any = packed  # indexing is annotated as that of tensors
    out, lse = merged[..., :-1], merged[..., -1].T
    return out if dtype is None else out.to(dtype), lse
