"""An update step of GRPO without the optimizer: log-probs of the response tokens, clipped loss, backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from augtree_fx.examples.bench.shapes import Shape

CLIP = 0.2  # GRPO's usual epsilon
HEAD_TOKENS = 2048  # tokens of one chunk of the LM head: 1.2 GB of float32 logits with Qwen3's vocabulary


@dataclass(frozen=True)
class Batch:
    """Rows and what GRPO knows about them.

    Attributes:
        input_ids: ``[rows, prompt + response]``, no padding, group after group.
        prompt: tokens of each prompt.
        advantages: ``[rows]`` float32.
        old_logps: ``[rows, response]`` float32.
        num_scored: response tokens that the loss is the mean of; a micro-batch keeps that of its batch.
    """

    input_ids: Tensor
    prompt: int
    advantages: Tensor
    old_logps: Tensor
    num_scored: int

    def first(self, rows: int) -> Batch:
        """A batch of the first rows alone."""
        part = self._rows(slice(0, rows))
        return replace(part, num_scored=part.old_logps.numel())

    def only(self, rows: int) -> Batch:
        """The whole batch with the loss of its first rows, whose gradient is that of `first`."""
        advantages = self.advantages.clone()
        advantages[rows:] = 0
        return replace(self, advantages=advantages, num_scored=self.old_logps[:rows].numel())

    def split(self, rows: int) -> Iterator[Batch]:
        """Micro-batches whose losses add up to the batch's."""
        for begin in range(0, len(self.input_ids), rows):
            yield self._rows(slice(begin, begin + rows))

    def _rows(self, rows: slice) -> Batch:
        return replace(
            self,
            input_ids=self.input_ids[rows],
            advantages=self.advantages[rows],
            old_logps=self.old_logps[rows],
        )


def draw_batch(shape: Shape, vocabulary: int, device: torch.device) -> Batch:
    """Random tokens and advantages; old log-probs are still those of a uniform distribution."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(vocabulary, (shape.groups, shape.prompt), generator=generator)
    prompts[:, : shape.common] = prompts[0, : shape.common].clone()
    responses = torch.randint(vocabulary, (shape.num_rows, shape.response), generator=generator)
    return Batch(
        input_ids=torch.cat([prompts.repeat_interleave(shape.branches, 0), responses], dim=1).to(device),
        prompt=shape.prompt,
        advantages=torch.randn(shape.num_rows, generator=generator).to(device),
        old_logps=torch.full((shape.num_rows, shape.response), -torch.log(torch.tensor(vocabulary)).item()).to(device),
        num_scored=responses.numel(),
    )


@torch.no_grad()
def with_old_logps(batch: Batch, model: Any) -> Batch:
    """The batch after one update of somebody else: log-probs of this model with noise of 0.05.

    Few tokens then lie near the clip bound (4 sigma away), where rounding would decide whether they have a gradient.
    """
    logps = log_probs(model, batch)
    generator = torch.Generator(logps.device).manual_seed(1)
    noise = torch.randn(logps.shape, generator=generator, dtype=logps.dtype, device=logps.device)
    return replace(batch, old_logps=logps + 0.05 * noise)


def log_probs(model: Any, batch: Batch) -> Tensor:
    """``[rows, response]`` log-probs of the response tokens, float32 or wider; no ``[tokens, vocabulary]`` lives."""
    ids = batch.input_ids
    hidden = model.model(ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state
    predictors, targets = hidden[:, batch.prompt - 1 : -1].flatten(0, 1), ids[:, batch.prompt :].flatten()
    return token_log_probs(predictors, model.lm_head.weight, targets).view(batch.old_logps.shape)


def token_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Log-prob of each target under an LM head, in chunks that are recomputed in backward.

    Args:
        hidden: ``[tokens, hidden size]``, of the tokens that predict.
        weight: ``[vocabulary, hidden size]``, the head's.
        targets: ``[tokens]`` int64.

    Returns:
        ``[tokens]``, float32 or wider.
    """
    pairs = zip(hidden.split(HEAD_TOKENS), targets.split(HEAD_TOKENS), strict=True)
    return torch.cat([checkpoint(_score, h, weight, t, use_reentrant=False) for h, t in pairs])


def _score(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)


def grpo_loss(logps: Tensor, batch: Batch) -> Tensor:
    """Clipped policy loss, a mean over all response tokens of the batch."""
    return clipped_loss(logps, batch.old_logps, batch.advantages[:, None], batch.num_scored)


def clipped_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor, num_scored: int) -> Tensor:
    """Clipped policy loss of some tokens, as a part of a mean over ``num_scored``."""
    ratio = torch.exp(logps - old_logps)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -gain.sum() / num_scored


def update(model: Any, batch: Batch, rows: int) -> tuple[Tensor, Tensor]:
    """Fresh gradients of a batch in the parameters' ``.grad``, ``rows`` rows at a time.

    Returns:
        The loss, and ``[rows, response]`` log-probs.
    """
    model.zero_grad(set_to_none=True)
    total, logps = torch.zeros((), device=batch.input_ids.device), []
    for part in batch.split(rows):
        logps.append(log_probs(model, part))
        loss = grpo_loss(logps[-1], part)
        loss.backward()
        total = total + loss.detach()
    return total, torch.cat([x.detach() for x in logps])


@dataclass(frozen=True)
class Outcome:
    """What an update leaves behind, to compare contenders by.

    Attributes:
        loss: of the batch.
        logps: ``[rows, response]`` log-probs, on the host.
        grad_norm: over all parameters.
        samples: gradients of some parameters by name, on the host.
    """

    loss: float
    logps: Tensor
    grad_norm: float
    samples: dict[str, Tensor]

    @staticmethod
    def of(model: Any, found: tuple[Tensor, Tensor]) -> Outcome:
        """Outcome of an update that returned ``found``; samples are attention and an MLP matrix of three layers."""
        loss, logps = found
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        norms = [
            torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
            for grad in grads.values()
        ]
        last = model.config.num_hidden_layers - 1
        sampled = [
            f"model.layers.{layer}.{part}.weight"
            for layer in sorted({0, last // 2, last})
            for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
        ]
        return Outcome(
            float(loss),
            logps.cpu(),
            float(torch.stack(norms).norm()),
            {name: grads[name].to("cpu", copy=True) for name in sampled},
        )

    def differences(self, other: Outcome) -> dict[str, float]:
        """How far another outcome is: root mean square of log-probs in nats, all else relative to this outcome.

        The loss is left out: its difference is a mean of log-probs' differences of either sign, a matter of luck. Rows
        that only one of the two has count in neither.
        """
        rows = min(len(self.logps), len(other.logps))
        samples = [
            float((other.samples[name].double() - grad.double()).norm() / grad.double().norm())
            for name, grad in self.samples.items()
        ]
        return {
            "log_probs": float((other.logps[:rows].double() - self.logps[:rows].double()).square().mean().sqrt()),
            "grad_norm": abs(other.grad_norm - self.grad_norm) / self.grad_norm,
            "gradients": max(samples),
        }
