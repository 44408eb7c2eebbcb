"""The one interface of all contenders: who holds which token, attention between them, and a model's step around it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn

from augtree_fx.examples.bench.cp import model as cp_model
from augtree_fx.examples.bench.cp.rollout import Rollout
from augtree_fx.examples.bench.cp.shard import Shard


class Contender(ABC):
    """One way to run a batch under context parallelism.

    Every rank makes one with the same arguments, and calls its methods in lock step with the same batch. The abstract
    methods are all that attention needs; those of a step are the same for all that compute attention in the unmodified
    model's attention function, and a contender that transforms the model overrides them.

    Attributes:
        reuse: whether a prompt is computed once for all of its responses.
        group: the ranks of the axis.
        rank, size: of this rank in it, and of it.
    """

    reuse: bool = False

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)

    @abstractmethod
    def shard(self, rollout: Rollout, device: torch.device) -> Shard:
        """This rank's share of a batch.

        Raises:
            ValueError: the batch is too small for this many ranks.
        """

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, shard: Shard, scale: float, kernel: str) -> Tensor:
        """Differentiable attention of the local tokens to every token of the batch that they see.

        Args:
            q: ``[tokens, heads, head size]``, local; k, v: ``[tokens, key heads, head size]``; one dtype.
            shard: of this contender.
            scale: factor of the logits.
            kernel: one of `augtree_fx.kernels.NAMES`, for each attention piece.

        Returns:
            ``[tokens, heads, head size]``, local.
        """

    def active(self, shard: Shard) -> AbstractContextManager[Any]:
        """What has to be entered around forward and backward."""
        return nullcontext()

    def parts(self) -> dict[str, AbstractContextManager[Any]]:
        """What to enter to run attention without its transfers, or without its arithmetic; for its time alone."""
        return {}

    def prepared(self, model: Any) -> AbstractContextManager[Any]:
        """The model as this contender runs it, for the time being."""
        return cp_model.with_contenders(model)

    def log_probs(self, model: Any, input_ids: Tensor, shard: Shard, kernel: str) -> Tensor:
        """Log-probs of the response tokens that this rank has the loss of; inside `prepared` and `active`.

        Args:
            model: the causal LM.
            input_ids: ``[row tokens]`` int64, those of all rows, the same on every rank.
            shard: of this contender.
            kernel: of the attention pieces.

        Returns:
            ``[scored here]``, float32 or wider, in the order of ``shard.scored``.
        """
        return cp_model.log_probs(model, input_ids, cp_model.Run(self, shard, kernel))

    def reduce_gradients(self, model: nn.Module) -> None:
        """Turn every rank's gradients of its own part of the loss into those of the whole loss."""
        cp_model.sum_gradients(model, self.group)
