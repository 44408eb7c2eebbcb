"""One contender's attention of one group, forward and backward: checked against single-process rows, then timed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from augtree_fx.examples.bench import timing
from augtree_fx.examples.bench.attention import TOLERANCE, leaves_of
from augtree_fx.examples.bench.cp.contender import Contender
from augtree_fx.examples.bench.cp.rollout import Rollout
from augtree_fx.examples.bench.cp.shard import Shard
from augtree_fx.examples.bench.cp.world import World
from augtree_fx.examples.bench.rivals import Case, Inputs, Outcome


def measure(
    world: World, contender: Contender, case: Case, inputs: Inputs, truth: Outcome, kernel: str, repeats: int
) -> dict[str, Any]:
    """Figures of a contender.

    Args:
        world: the ranks.
        contender: on this rank.
        case: the group; ``Case`` packs its tokens as `Rollout` numbers its distinct ones.
        inputs: of all distinct tokens, the same on every rank.
        truth: output and gradients of the same.
        kernel: of the attention pieces.
        repeats: of the timed runs.
    """
    rollout = Rollout.of(case.shape)
    shard = contender.shard(rollout, case.device)
    others = timing.allocated_gib(case.device)  # inputs and truth of all tokens, which no contender needs
    local = local_inputs(rollout, shard, inputs, contender.reuse)
    figures: dict[str, Any] = {"tokens": world.all_of(shard.num_tokens)}
    with contender.active(shard):

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return contender.attend(q, k, v, shard, case.scale, kernel)

        leaves = leaves_of(local)
        out = attend(*leaves)
        gradients = torch.autograd.grad(out, leaves, local.dout)
        figures["errors"] = errors(world, shard, Outcome(out.detach(), *gradients), truth)
        del out, gradients
        if not all(error <= TOLERANCE[case.dtype] for error in figures["errors"].values()):  # a NaN fails too
            return figures | {"passed": False, "reason": "parity failed"}
        figures["passed"] = True
        timing.free_memory(case.device)
        timing.reset_peak(case.device)
        figures["forward"] = world.measure(lambda: attend(*leaves), repeats)
        figures["both"] = world.measure(lambda: torch.autograd.grad(attend(*leaves), leaves, local.dout), repeats)
        figures["peak_gib"] = world.peak_gib(others)
        for name, part in contender.parts().items():
            with part:
                figures[name] = world.measure(lambda: torch.autograd.grad(attend(*leaves), leaves, local.dout), repeats)
        out = attend(*leaves)
        figures["backward"] = world.measure(
            lambda: torch.autograd.grad(out, leaves, local.dout, retain_graph=True), repeats
        )
    return figures


def local_inputs(rollout: Rollout, shard: Shard, inputs: Inputs, reuse: bool) -> Inputs:
    """What this rank holds; without reuse, a prompt token's output gradient is divided among its copies."""
    q, k, v, dout = (x[shard.distinct] for x in inputs)
    if not reuse:
        copies = torch.from_numpy(rollout.copies).to(dout.device)[shard.distinct]
        dout = (dout / copies[:, None, None]).to(q.dtype)
    return Inputs(q, k, v, dout)


def errors(world: World, shard: Shard, found: Outcome, truth: Outcome) -> dict[str, float]:
    """Relative errors in norm over all ranks: of every copy's output, and of gradients summed over copies."""
    expected = truth.out[shard.distinct]
    difference = (found.out.to(expected.dtype) - expected).double().square().sum()
    norms = world.sum(torch.stack([difference, expected.double().square().sum()]))
    result = {"out": float((norms[0] / norms[1]).sqrt())}
    for name, gradient, whole in zip(Outcome._fields[1:], found[1:], truth[1:], strict=True):
        total = torch.zeros_like(whole).index_add_(0, shard.distinct, gradient.to(whole.dtype))
        result[name] = float((world.sum(total) - whole).norm() / whole.norm())
    return result
