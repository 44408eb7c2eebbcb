"""An unmodified Hugging Face model under a contender: its tokens are the shard's, its attention is the contender's.

The contender reaches the attention function as a keyword of the model's forward, so gradient checkpointing and several
models at a time are no matter. Everything else in a decoder works token by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from transformers import AttentionInterface

from augtree_fx.examples.bench import grpo
from augtree_fx.examples.bench.cp.shard import Shard

if TYPE_CHECKING:
    from augtree_fx.examples.bench.cp.contender import Contender

ATTENTION = "augtree_bench_cp"  # no "flash" in it: transformers would take it for one of its own


@dataclass(frozen=True, eq=False)
class Run:
    """How the attention of one forward is computed.

    Attributes:
        contender: whose attention.
        shard: of that contender, what this rank holds.
        kernel: one of `augtree_fx.kernels.NAMES`.
    """

    contender: Contender
    shard: Shard
    kernel: str


@contextmanager
def with_contenders(model: Any) -> Iterator[None]:
    """Let a model take its attention from the contender that `log_probs` is given."""
    before = model.config._attn_implementation
    AttentionInterface.register(ATTENTION, _attention)
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    context_parallel_run: Run,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention of local tokens ``[batch, heads, tokens, head size]`` to all that they see on any rank."""
    if attention_mask is not None or sliding_window is not None:
        raise NotImplementedError(
            f"contenders run causal attention over whole rows, got a mask={attention_mask is not None} and "
            f"sliding_window={sliding_window}; use a model without"
        )
    run = context_parallel_run
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = run.contender.attend(q, k, v, run.shard, scaling, run.kernel)
    return out.unflatten(0, (len(query), -1)), None


def log_probs(model: Any, input_ids: Tensor, run: Run) -> Tensor:
    """Log-probs of the response tokens that this rank's tokens predict; inside `Contender.active`.

    Args:
        model: inside `with_contenders`.
        input_ids: ``[row tokens]`` int64, those of all rows, the same on every rank.
        run: how.

    Returns:
        ``[scored here]``, float32 or wider, in the order of ``run.shard.scored``. It has a graph even when it is empty,
        since other ranks' attention goes through this one's.
    """
    shard = run.shard
    if not shard.num_tokens:  # nobody waits for a rank that holds nothing
        return input_ids.new_zeros(0, dtype=torch.float32)
    hidden = model.model(
        input_ids[shard.row_token], position_ids=shard.position, use_cache=False, context_parallel_run=run
    ).last_hidden_state
    predictors = hidden.flatten(0, 1)[shard.predictor]
    return grpo.token_log_probs(predictors, model.lm_head.weight, input_ids[shard.target])


def sum_gradients(model: nn.Module, group: distributed.ProcessGroup) -> None:
    """Sum all gradients over the ranks, each of which has those of its own share of ONE loss.

    The sum is the gradient of the loss of all rows. Wrappers that take the mean over these ranks (DDP, FSDP) would need
    each loss multiplied by their number.
    """
    works = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        works.append(distributed.all_reduce(parameter.grad, group=group, async_op=True))
    for work in works:
        work.wait()
