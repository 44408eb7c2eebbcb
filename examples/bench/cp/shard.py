"""What one rank holds of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

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

        def local(numbers: np.ndarray) -> Tensor:
            return torch.from_numpy(numbers.astype(np.int64)).to(device)

        return Shard(
            row_token=local(np.atleast_2d(row_token)),
            position=local(np.atleast_2d(rollout.position[row_token])),
            distinct=local(rollout.distinct[held]),
            predictor=local(predictor[here]),
            target=local(rollout.scored[here]),
            scored=local(here),
            plan=plan,
        )

    @property
    def num_tokens(self) -> int:
        """Local tokens, over the whole batch dim."""
        return self.row_token.numel()
