"""One wave of branches: hidden states, logits or log-probs of its scored tokens, and which tokens those are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from augtree_fx.computed_stage import ComputedStage
from augtree_fx.predictions import Predictions
from augtree_fx.stages import HEAD_TOKENS, StageRunner
from augtree_fx.trie import IntArray


class Wave:
    """Branches that are computed together; taken from `Tree.waves`, and used until its backward.

    n scored tokens, in row order. Any loss can be written with them: a sum over waves of sums over tokens is a sum over
    the batch.

    Attributes:
        row: ``[n]`` int64, the row of each scored token.
        index: ``[n]`` int64, its place in its row, the prompt included.
        slot: ``[n]`` int64, its flat place in the caller's ``[batch, sequence]``.
        labels: ``[n]`` int64, the token.
        num_tokens: packed tokens that were computed for this wave.
    """

    def __init__(
        self,
        runner: StageRunner,
        predictions: Predictions,
        stages: list[ComputedStage],
        own: tuple[IntArray, Tensor] | None,
    ) -> None:
        layout = runner.layout
        device = layout.device
        self.row, self.index, self.slot, self.labels = (
            torch.from_numpy(x).to(device)
            for x in (predictions.row, predictions.index, predictions.slot, layout.input_ids[predictions.target])
        )
        self.num_tokens = 0 if own is None else len(own[0])
        self._runner, self._spent, self._ran, self._closed = runner, False, False, False
        self._arrivals = [
            stage.arrivals
            for stage in stages
            if stage.arrivals is not None and (stage.has_handles or np.isin(predictions.source, stage.sources).any())
        ]
        self._arrived = self._num_arrivals()
        self._hidden: Tensor | None = _gather(predictions.source, stages, own)
        self.wants_backward = self._hidden.requires_grad
        if self.wants_backward:
            self._hidden.register_hook(self._note_backward)

    def __len__(self) -> int:
        return len(self.row)

    def hidden_states(self) -> Tensor:
        """``[n, hidden size]``: what predicts each scored token, before the model's head.

        Raises:
            RuntimeError: the wave's backward has run, or the next wave was asked for.
        """
        if self._spent or self._hidden is None:
            raise RuntimeError(
                "this wave is used up: its backward has run, or the next wave was asked for; sum all losses of a wave "
                "before backward, or take the log-probs that you need with .detach()"
            )
        return self._hidden

    def logits(self) -> Tensor:
        """``[n, vocabulary]`` logits in the model's dtype, all of them at once.

        Raises:
            RuntimeError: as `hidden_states`.
            NotImplementedError: the model has no head with a token's logits.
        """
        return self._guarded(_logits(self._runner.head(self.hidden_states()), self._runner))

    def logprobs(self, temperature: float = 1.0) -> Tensor:
        """``[n]`` log-probs of the scored tokens in float32 (float64 of a float64 model), natural.

        The head runs in chunks and again in backward: no tensor of all logits ever lives.

        Args:
            temperature: what logits are divided by.

        Raises:
            ValueError: ``temperature`` is not above 0.
            RuntimeError, NotImplementedError: as `logits`.
        """
        _check_temperature(temperature)
        return self._through_head(lambda logits, labels: _logprobs(logits / temperature, labels))

    def logprobs_and_entropies(self, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """``[n]`` log-probs, and ``[n]`` entropies in nats of the whole distributions; see `logprobs`."""
        _check_temperature(temperature)

        def both(logits: Tensor, labels: Tensor) -> Tensor:
            logits = logits / temperature
            logprobs = logits.log_softmax(-1)
            possible = logprobs.masked_fill(logprobs == -torch.inf, 0.0)  # logits of -inf: 0 times -inf is NaN
            return torch.stack([_logprobs(logits, labels), -(logprobs.exp() * possible).sum(-1)], dim=-1)

        found = self._through_head(both)
        return found[:, 0], found[:, 1]

    def _through_head(self, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        def chunk(hidden: Tensor, labels: Tensor) -> Tensor:
            logits = _logits(self._runner.head(hidden), self._runner)
            return function(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)

        pairs = zip(self.hidden_states().split(HEAD_TOKENS), self.labels.split(HEAD_TOKENS), strict=True)
        chunks = [checkpoint(chunk, hidden, labels, use_reentrant=False) for hidden, labels in pairs]
        return self._guarded(torch.cat(chunks))

    def _guarded(self, output: Tensor) -> Tensor:
        """An output whose backward is refused at its start once the wave is over: no gradient of the head adds up."""
        if output.requires_grad:
            output.register_hook(self._refuse_if_over)
        return output

    def _refuse_if_over(self, gradient: Tensor) -> None:
        if self._closed:
            raise RuntimeError(
                "this wave is over: the next one was asked for, or the block was left, and its gradient would miss the "
                "prompts; call backward inside the loop over tree.waves(), before the next wave"
            )

    def _note_backward(self, gradient: Tensor) -> None:
        self._refuse_if_over(gradient)
        self._free()
        self._ran, self.wants_backward = True, False

    def _num_arrivals(self) -> int:
        return sum(map(len, self._arrivals))

    @property
    def ran_backward(self) -> bool:
        """Whether a backward ran through the wave."""
        return self._ran

    @property
    def misses_prompts(self) -> bool:
        """Whether a backward ran that did not go on to the prompts."""
        return self._ran and bool(self._arrivals) and self._num_arrivals() == self._arrived

    def close(self) -> None:
        """End the wave: drop what it holds, and let no backward run through it any more; its indices stay."""
        self._free()
        self._closed = True

    def _free(self) -> None:
        self._hidden, self._spent = None, True

    def __repr__(self) -> str:
        return f"Wave({len(self)} scored tokens of {len(self.row.unique())} rows, {self.num_tokens} tokens computed)"


def _gather(source: IntArray, stages: list[ComputedStage], own: tuple[IntArray, Tensor] | None) -> Tensor:
    """Hidden states of packed tokens that lie in a wave, or are sources of the stages above it."""
    held = [(stage.sources, stage.leaf) for stage in stages if len(stage.sources)]
    dtype = own[1].dtype if own is not None else stages[0].hidden.dtype
    parts = ([] if own is None else [own]) + [(tokens, leaf) for tokens, leaf in held]
    tokens = np.concatenate([part[0] for part in parts])
    order = np.argsort(tokens, kind="stable")
    place = order[np.minimum(np.searchsorted(tokens, source, sorter=order), len(order) - 1)]
    assert np.array_equal(tokens[place], source), "every source must be in the wave or a source of a stage above"
    used, renumbered = np.unique(place, return_inverse=True)
    picked, first = [], 0
    for part_tokens, hidden in parts:  # pick before joining and rounding: gradients of a leaf add up in its dtype
        local = used[(used >= first) & (used < first + len(part_tokens))] - first
        picked.append(hidden[torch.from_numpy(local).to(hidden.device)].to(dtype))
        first += len(part_tokens)
    joined = torch.cat(picked)
    return joined[torch.from_numpy(renumbered).to(joined.device)]


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")


def _logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.gather(-1, labels[:, None])[:, 0] - logits.logsumexp(-1)


def _logits(outputs: Any, runner: StageRunner) -> Tensor:
    logits = getattr(outputs, "logits", None)
    if logits is None or logits.ndim != 3:
        raise NotImplementedError(
            f"{type(runner.model).__name__} gives no logits of tokens; use wave.hidden_states() and your own head"
        )
    return logits[0]
