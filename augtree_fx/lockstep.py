"""Ranks that shard one model run the same forwards: each rank's plan is padded with those that others have more.

rank 0   P | w w w      FSDP2 gathers a layer's parameters on all ranks at once, in every forward and backward
rank 1   P | w w -      in place of what is missing: one token that nobody sees, and a gradient of 0
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import distributed, nn

from augtree_fx.waves import Stage

_NOTHING = np.empty(0, dtype=np.int64)


def groups_of(module: nn.Module) -> list[Any]:
    """Process groups over which FSDP2 shards parameters inside of a module; none where nothing is sharded."""
    if not distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    for inner in module.modules():
        for parameter in _sharded_parameters(inner) if isinstance(inner, FSDPModule) else ():
            return list(parameter.device_mesh.get_all_groups())
    return []


def _sharded_parameters(module: Any) -> Iterator[Any]:
    """Of a module that FSDP2 wraps, as they are while sharded.

    The module itself has whole ones from a forward on that leaves them gathered, which the last module's does.
    """
    state = vars(module._get_fsdp_state())
    for group in state.get("_fsdp_param_groups") or [state.get("_fsdp_param_group")]:  # one in older torch
        yield from () if group is None else (each.sharded_param for each in group.fsdp_params)


def pad_to_all(plan: Stage, groups: list[Any]) -> None:
    """Pad a plan, in place, so that all ranks of all groups have as many stages and waves, in one order.

    A wave without nodes, and a stage without nodes that is ``idle``, stand for what another rank computes there.

    Raises:
        RuntimeError: other ranks have no plan.
    """
    failed: set[int] = set()
    for group in groups:  # after the first group's turn its ranks have one plan, which the next group's ranks exchange
        found = _gathered(None if failed else _encoded(plan), group)
        failed |= {rank for rank, other in enumerate(found) if other is None}
        for other in found:
            _pad(plan, other or [])
    if failed:
        raise RuntimeError(
            f"ranks that shard a model run the same forwards, and rank {', '.join(map(str, sorted(failed)))} of them "
            "cannot run its batch; what it raised says why"
        )


def pad_alike(plan: Stage, others: list[Stage]) -> None:
    """What `pad_to_all` does, among ranks that know the plans of all: nothing is exchanged."""
    for other in [_encoded(each) for each in others if each is not plan]:
        _pad(plan, other)


def give_up(groups: list[Any]) -> None:
    """Tell ranks that wait in `pad_to_all` that this one has no plan."""
    for group in groups:
        _gathered(None, group)


def smallest(number: int, groups: list[Any]) -> int:
    """The smallest of a number that each rank has."""
    for group in groups:
        number = min(_gathered(number, group))
    return number


def _gathered(mine: Any, group: Any) -> list[Any]:
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, mine, group)
    return found


def _encoded(plan: Stage) -> list[tuple[bool, bool, int, int]]:
    """Of each stage, in order: whether it computes, whether its own tokens are scored, its waves and inner stages."""
    return [(stage.computes, stage.scored, len(stage.waves), len(stage.inner)) for stage in plan.stages()]


def _pad(plan: Stage, other: list[tuple[bool, bool, int, int]]) -> None:
    frontier = [plan]
    for computes, scored, num_waves, num_inner in other:
        stage = frontier.pop()
        stage.idle |= computes and not len(stage.nodes)
        stage.scored |= scored
        stage.waves += [_NOTHING] * (num_waves - len(stage.waves))
        stage.inner += [Stage(_NOTHING) for _ in range(num_inner - len(stage.inner))]
        frontier += reversed(stage.inner[:num_inner])
