"""An update step of GRPO under a contender: each rank has the loss of what its tokens predict; gradients are summed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed

import augtree_fx
from augtree_fx.examples.bench import contenders as one_device
from augtree_fx.examples.bench import grpo, models, timing
from augtree_fx.examples.bench.cp.contender import Contender
from augtree_fx.examples.bench.cp.rollout import Rollout
from augtree_fx.examples.bench.cp.shard import Shard
from augtree_fx.examples.bench.cp.world import World
from augtree_fx.examples.bench.grpo import Batch, Outcome
from augtree_fx.examples.bench.shapes import Shape

LONG_MS = 15_000  # a step that takes as long is timed once: a warm-up would change little


@dataclass(frozen=True)
class Case:
    """A model and a batch on every rank, and what an unmodified step in one process gives for the batch's first rows.

    Attributes:
        model: the same weights everywhere; gradient checkpointing as asked for.
        batch: all rows.
        rollout: their lengths.
        check_rows: how many rows of the batch have a loss in the parity gate.
        truth: of those rows, one at a time, without context parallelism.
        bounds: largest differences from it that pass.
    """

    model: Any
    batch: Batch
    rollout: Rollout
    check_rows: int
    truth: Outcome
    bounds: dict[str, float]


def prepare(world: World, model: Any, shape: Shape, check_rows: int, kernel: str, checkpointing: bool) -> Case:
    """Draw a batch and compute the truth, on every rank alike.

    The bounds are those of ``bench step``: fixed ones, or twice what another kernel changes in the same rows.
    """
    batch = grpo.draw_batch(shape, model.config.vocab_size, world.device)
    augtree_fx.transform(model)  # old log-probs from a shared pass, which takes the least time
    try:
        batch = grpo.with_old_logps(batch, model)
    finally:
        augtree_fx.restore(model)
    distributed.broadcast(batch.old_logps, 0, group=world.group)
    models.set_checkpointing(model, True)
    found = []
    for rows_kernel in (kernel, "sdpa"):
        models.use_rows_kernel(model, rows_kernel)
        found.append(Outcome.of(model, grpo.update(model, batch.first(check_rows), 1)))
    rounding, dtype = found[0].differences(found[1]), model.dtype
    bounds = {
        name: min(max(bound, 2 * rounding[name]), one_device.MOST[dtype])
        for name, bound in one_device.TOLERANCE[dtype].items()
    }
    models.set_checkpointing(model, checkpointing)
    return Case(model, batch, Rollout.of(shape), check_rows, found[0], bounds)


def measure(
    world: World, contender: Contender, case: Case, rows_at_a_time: int, kernel: str, repeats: int
) -> dict[str, Any]:
    """Figures of a contender's step: micro-batches of the first rows are checked, with their loss; all are timed."""
    with contender.prepared(case.model):
        return _measure(world, contender, case, rows_at_a_time, kernel, repeats)


def _measure(
    world: World, contender: Contender, case: Case, rows_at_a_time: int, kernel: str, repeats: int
) -> dict[str, Any]:
    shards, figures = checked(world, contender, case, rows_at_a_time, kernel)
    if not figures["passed"]:
        return figures
    others = timing.allocated_gib(world.device)  # weights, gradients, the batch
    timing.reset_peak(world.device)

    def step() -> object:
        return update(case.model, case.batch, contender, shards, rows_at_a_time, kernel)

    figures["step"] = world.measure(step, 1, warmups=0)
    if figures["step"].median_ms < LONG_MS:  # that one was a warm-up
        figures["step"] = world.measure(step, repeats, warmups=0)
    figures["peak_gib"], figures["activations_gib"] = world.peak_gib(), world.peak_gib(others)
    return figures


def checked(
    world: World, contender: Contender, case: Case, rows_at_a_time: int, kernel: str
) -> tuple[list[Shard], dict[str, Any]]:
    """This rank's shares, and whether micro-batches of the first rows, with their loss, pass the gate."""
    shards = make_shards(contender, case, rows_at_a_time)
    parts = -(-case.check_rows // rows_at_a_time)
    check = case.batch.first(parts * rows_at_a_time).only(case.check_rows)
    loss, logps = update(case.model, check, contender, shards[:parts], rows_at_a_time, kernel)
    found = case.truth.differences(Outcome.of(case.model, (loss, logps[: case.check_rows])))
    passed = all(found[name] <= bound for name, bound in case.bounds.items())
    figures = {
        "tokens": world.all_of(sum(shard.num_tokens for shard in shards)), "differences": found, "passed": passed
    }  # fmt: skip
    return shards, figures if passed else figures | {"reason": "parity failed"}


def make_shards(contender: Contender, case: Case, rows_at_a_time: int) -> list[Shard]:
    """This rank's share of each micro-batch; one that is not the whole batch is of rows that are not reused."""
    device, num_rows = case.batch.input_ids.device, len(case.batch.input_ids)
    if rows_at_a_time >= num_rows:
        return [contender.shard(case.rollout, device)]
    assert not contender.reuse, "what is reused is looked for in the whole batch"
    rows = [len(part.input_ids) for part in case.batch.split(rows_at_a_time)]
    made = {count: contender.shard(case.rollout.first(count).apart, device) for count in set(rows)}
    return [made[count] for count in rows]


def update(
    model: Any, batch: Batch, contender: Contender, shards: list[Shard], rows_at_a_time: int, kernel: str
) -> tuple[Tensor, Tensor]:
    """Fresh gradients of the batch's loss in the parameters' ``.grad``, the same on every rank.

    Returns:
        The loss, and ``[rows, response]`` log-probs, of all ranks.
    """
    model.zero_grad(set_to_none=True)
    total, logps = torch.zeros((), device=batch.input_ids.device), torch.zeros_like(batch.old_logps)
    parts = zip(batch.split(rows_at_a_time), logps.split(rows_at_a_time), shards, strict=True)
    for part, part_logps, shard in parts:
        with contender.active(shard):
            found = contender.log_probs(model, part.input_ids.flatten(), shard, kernel)
            loss = local_loss(found, part, shard)
            if loss.requires_grad:
                loss.backward()
        total += loss.detach()
        part_logps.view(-1)[shard.scored] = found.detach().to(part_logps.dtype)
    contender.reduce_gradients(model)
    for tensor in (total, logps):
        distributed.all_reduce(tensor, group=contender.group)
    return total, logps


def local_loss(logps: Tensor, batch: Batch, shard: Shard) -> Tensor:
    """This rank's part of the batch's loss; the sum over ranks is the loss.

    Args:
        logps: ``[scored here]``.
        batch: all rows of the micro-batch.
        shard: what this rank holds of it.
    """
    advantages = batch.advantages[:, None].expand_as(batch.old_logps).flatten()[shard.scored]
    old_logps = batch.old_logps.flatten()[shard.scored]
    return grpo.grpo_loss(logps[:, None], replace(batch, advantages=advantages, old_logps=old_logps[:, None]))
