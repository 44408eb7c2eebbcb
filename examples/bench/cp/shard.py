"""What one rank holds of a batch, and the one interface of all contenders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from augtree_fx.examples.bench.cp.rollout import Rollout


@dataclass(frozen=True, eq=False)
class Shard:
    """The tokens of one rank; all tensors are int64, local, and on the rank's device.

    Attributes:
        row_token: ``[batch, tokens]`` row token of each local token, in the order that the model sees; batch is 1
            unless the contender needs dense rows.
        position: ``[batch, tokens]`` its place in its row.
        distinct: ``[batch x tokens]`` its distinct token.
        predictor: ``[scored here]`` local token, counted through the batch, that predicts a response token.
        target: ``[scored here]`` row token of the label; labels are read off the rows of the whole batch.
        scored: ``[scored here]`` which of all response tokens of the batch that is.
        plan: what the contender's attention needs.
    """

    row_token: Tensor
    position: Tensor
    distinct: Tensor
    predictor: Tensor
    target: Tensor
    scored: Tensor
    plan: Any

    @staticmethod
    def of(rollout: Rollout, row_token: np.ndarray, device: torch.device, plan: Any, *, reuse: bool) -> Shard:
        """The shard of some row tokens.

        Args:
            rollout: the batch.
            row_token: ``[tokens]`` or ``[batch, tokens]``, those that this rank holds.
            device: where the tensors go.
            plan: of the contender.
            reuse: a local token stands for all copies of its distinct token, and predicts what any of them does.
        """
        held = row_token.reshape(-1)
        number = rollout.distinct if reuse else np.arange(rollout.num_row_tokens)
        place = np.full(rollout.num_row_tokens, -1)  # local token by number
        place[number[held]] = np.arange(len(held))
        predictor = place[number[rollout.scored - 1]]
        here = np.flatnonzero(predictor >= 0)
        arrays = (
            np.atleast_2d(row_token), np.atleast_2d(rollout.position[row_token]), rollout.distinct[held],
            predictor[here], rollout.scored[here], here,
        )  # fmt: skip
        return Shard(*(torch.from_numpy(x.astype(np.int64)).to(device) for x in arrays), plan)

    @property
    def num_tokens(self) -> int:
        """Local tokens, over the whole batch dim."""
        return self.row_token.numel()


class Contender(ABC):
    """One way to run a batch under context parallelism: who holds which token, and attention between them.

    Every rank makes one with the same arguments, and calls its methods in lock step with the same batch.

    Attributes:
        reuse: whether a prompt is computed once for all of its responses.
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
