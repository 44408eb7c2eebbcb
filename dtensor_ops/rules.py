"""Attention ops on DTensors: what each rank computes when q, k, v or partials are sharded.

    heads sharded on an axis, q Shard(1)     each rank computes its heads: query heads of a key head lie with it
    tokens sharded on an axis, q Shard(0)    tokens are brought together, all ranks compute all of them, and each keeps
                                             its own. Right, not fast: `augtree::context_parallel_attention` is the op
                                             that divides the work
    anything else                            brought together

Results and gradients come back in the placements of what they belong to. Tables are of the whole tree, the same on all
ranks, tensors or replicated DTensors; sinks are sharded by heads, replicated or plain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, Placement

Placements = tuple[Placement, ...]

_TOKENS = ("q", "k", "v", "out", "dout")  # arguments [T, H, ...]
_HEADS = ("lse", "dlse", "sinks")  # arguments [H, ...]
_TABLES = ("segments", "cu_seqlens", "kv_index")


@torch.no_grad()
def _attention(cls: type, op: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Prefill or replay, forward or backward."""
    given = _by_name(op, args, kwargs)
    q, k, v = (given[name] for name in "qkv")
    mesh = _mesh_of(op, {"q": q, "k": k, "v": v})
    heads = _head_axes(q, k.shape[1])
    computed = {0: _placed(mesh, heads, 0), 1: _placed(mesh, heads, 1)}
    where = dict.fromkeys(_TOKENS, computed[1]) | dict.fromkeys(_HEADS, computed[0])
    where |= dict.fromkeys(_TABLES, _placed(mesh, [], 0))
    results = op(**{name: _local(x, mesh, where[name]) if name in where else x for name, x in given.items()})
    if "dout" in given:
        *gradients, dsinks = results
        gradients = [_like(x, given[name], mesh, computed[1]) for x, name in zip(gradients, "qkv", strict=True)]
        return *gradients, dsinks if given["sinks"] is None else _like(dsinks, given["sinks"], mesh, computed[0])
    kept = _tokens_or_heads(q)
    out = _result(results[0], torch.Size([*q.shape[:2], v.shape[2]]), mesh, computed[1], kept)
    return out, _result(results[1], torch.Size([q.shape[1], q.shape[0]]), mesh, computed[0], _swapped(kept))


@torch.no_grad()
def _merge(cls: type, op: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Merging, forward or backward, which is done where tokens and heads are."""
    given = _by_name(op, args, kwargs)
    outs, lses, sinks = (given[name] for name in ("outs", "lses", "sinks"))
    mesh = _mesh_of(op, {f"{name}[{n}]": x for name in ("outs", "lses") for n, x in enumerate(given[name])})
    by_token = _tokens_or_heads(outs[0])
    by_head = _swapped(by_token)
    where = dict.fromkeys(("outs", "out", "dout"), by_token) | dict.fromkeys(("lses", "lse", "dlse"), by_head)
    where["sinks"] = tuple(placement if placement == Shard(0) else Replicate() for placement in by_head)
    local: dict[str, Any] = {}
    for name, value in given.items():
        many = isinstance(value, list)
        local[name] = [_local(x, mesh, where[name]) for x in value] if many else _local(value, mesh, where[name])
    results = op(**local)
    if "dout" in given:
        *gradients, dsinks = results
        gradients = [
            [_like(x, other, mesh, where[name]) for x, other in zip(found, given[name], strict=True)]
            for found, name in zip(gradients, ("outs", "lses"), strict=True)
        ]
        summed = tuple(Partial() if placement == Shard(1) else placement for placement in by_head)
        return *gradients, dsinks if sinks is None else _like(dsinks, sinks, mesh, summed)
    out, lse = results
    return _result(out, outs[0].shape, mesh, by_token, by_token), _result(lse, lses[0].shape, mesh, by_head, by_head)


def _by_name(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs


def _head_axes(q: DTensor, num_heads: int) -> list[int]:
    """Mesh axes that shard the heads of ``q [T, H, D]``, as far as they also divide ``num_heads`` of keys."""
    heads: list[int] = []
    for axis, placement in enumerate(q.placements):
        if placement == Shard(1) and num_heads % math.prod(q.device_mesh.size(each) for each in (*heads, axis)) == 0:
            heads.append(axis)
    return heads


def _placed(mesh: DeviceMesh, axes: list[int], dim: int) -> Placements:
    return tuple(Shard(dim) if axis in axes else Replicate() for axis in range(mesh.ndim))


def _tokens_or_heads(tensor: DTensor) -> Placements:
    """What of the placements of ``[T, H, ...]`` shards tokens or heads."""
    return tuple(placement if placement in (Shard(0), Shard(1)) else Replicate() for placement in tensor.placements)


def _swapped(placements: Placements) -> Placements:
    """Placements of ``[H, T]`` for those of ``[T, H, ...]``."""
    return tuple(Shard(1 - placement.dim) if isinstance(placement, Shard) else placement for placement in placements)


def _local(tensor: Tensor | None, mesh: DeviceMesh, placements: Placements) -> Tensor | None:
    """This rank's part; a plain tensor is taken to be the same on all ranks."""
    whole = _placed(mesh, [], 0)
    if tensor is None or (not isinstance(tensor, DTensor) and placements == whole):
        return tensor  # tables stay on the host where they are read
    tensor = tensor.detach()  # no gradient is recorded here, and torch 2.11 would call `detach_`, which DTensors lack
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, whole, run_check=False)
    return tensor.redistribute(mesh, placements).to_local()


def _result(local: Tensor, shape: torch.Size, mesh: DeviceMesh, computed: Placements, wanted: Placements) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    found = DTensor.from_local(local, mesh, computed, run_check=False, shape=shape, stride=stride)
    return found.redistribute(mesh, wanted)


def _like(local: Tensor, other: Tensor, mesh: DeviceMesh, computed: Placements) -> Tensor:
    """A gradient, placed as what it belongs to; of pending sums, and of plain tensors, all of it."""
    if not isinstance(other, DTensor):
        return _result(local, other.shape, mesh, computed, _placed(mesh, [], 0)).to_local()
    wanted = tuple(Replicate() if placement.is_partial() else placement for placement in other.placements)
    return _result(local, other.shape, mesh, computed, wanted)


def _mesh_of(op: Any, tensors: dict[str, Tensor]) -> DeviceMesh:
    meshes = {name: tensor.device_mesh if isinstance(tensor, DTensor) else None for name, tensor in tensors.items()}
    found = next((mesh for mesh in meshes.values() if mesh is not None), None)
    wrong = [name for name, mesh in meshes.items() if mesh is None or mesh != found]
    if found is None or wrong:
        raise ValueError(
            f"{op} takes {', '.join(tensors)} as DTensors of one mesh, got {wrong[0]} on {meshes[wrong[0]]} and one on "
            f"{found}; use distribute_tensor, with Replicate() if need be"
        )
    return found


for _name in ("prefill_attention", "replay_attention", "replay_attention_backward"):  # prefill's backward is replay's
    torch.library.register_torch_dispatch(f"augtree::{_name}", DTensor, _attention)
for _name in ("partial_softmax", "partial_softmax_backward"):
    torch.library.register_torch_dispatch(f"augtree::{_name}", DTensor, _merge)
