"""What tests of `prefill` hold waves against: rows one by one through the unmodified model, a random weight a token.

Nothing here is built from the library's layout: rows, slots and weights are those of the rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from families import VOCABULARY, Row, error, padded
from torch import Tensor, nn

import augtree_fx
from augtree_fx import CostModel, TreeLayout, Wave

FREE = CostModel.free()


@dataclass(frozen=True)
class Case:
    """A batch, and for the reference each row's tokens, first position, flat slots and weights of its log-probs.

    Attributes:
        scored: what `prefill` is told; ``None`` for its default.
        inputs: keywords of a forward, where a model takes the batch as it is.
    """

    layout: TreeLayout
    tokens: list[Tensor]
    position: list[int]
    slots: list[Tensor]
    weights: list[Tensor]
    scored: Tensor | None
    inputs: dict[str, Tensor]

    @property
    def weight(self) -> Tensor:
        """``[batch * sequence]`` weight of the log-prob at each slot."""
        flat = torch.zeros(self.layout.shape[0] * self.layout.shape[1], dtype=torch.float64)
        for slots, weights in zip(self.slots, self.weights, strict=True):
            flat[slots] = weights
        return flat


def weights_of(tokens: Sequence[Tensor], keep: Callable[[int, int], bool] = lambda row, index: True) -> list[Tensor]:
    """Random weights, 0 at each row's first token and where ``keep(row, index)`` says so."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for number, row in enumerate(tokens):
        weights = torch.randn(len(row), generator=generator, dtype=torch.float64)
        kept = [index > 0 and keep(number, index) for index in range(len(row))]
        found.append(torch.where(torch.tensor(kept, dtype=torch.bool), weights, 0.0))
    return found


def padded_case(
    rows: list[Row], style: str = "right", keep: Callable[[int, int], bool] = lambda row, index: True
) -> Case:
    """Padded rows, see `families.padded`; all tokens are scored for which ``keep(row, index)`` holds."""
    batch = padded(rows, style)
    width = batch.input_ids.shape[1]
    slots = [
        row * width + first + torch.arange(len(tokens))
        for row, (tokens, first) in enumerate(zip(batch.tokens, batch.column, strict=True))
    ]
    layout = TreeLayout.from_padded(batch.input_ids, batch.attention_mask, batch.position_ids, costs=FREE)
    weights = weights_of(batch.tokens, keep)
    scored = torch.zeros(batch.input_ids.numel(), dtype=torch.bool)
    for where, weight in zip(slots, weights, strict=True):
        scored[where] = weight != 0
    scored = scored.view(batch.input_ids.shape)
    return Case(layout, batch.tokens, batch.position, slots, weights, scored, batch.inputs())


def packed_case(rows: list[Row]) -> Case:
    """Rows one after another; all tokens are scored."""
    tokens = [torch.cat(row) for row in rows]
    bounds = torch.tensor([0, *map(len, tokens)]).cumsum(0)
    slots = [torch.arange(first, last) for first, last in zip(bounds[:-1], bounds[1:], strict=True)]
    ids, positions = torch.cat(tokens)[None], torch.cat([torch.arange(len(row)) for row in tokens])[None]
    layout = TreeLayout.from_packed(ids, positions, costs=FREE)
    scored = torch.ones_like(ids)
    given = {"input_ids": ids, "position_ids": positions}
    return Case(layout, tokens, [0] * len(rows), slots, weights_of(tokens), scored, given)


def groups_case(prompts: list[Tensor], responses: list[list[Tensor]]) -> Case:
    """Declared groups under the default scoring: responses alone."""
    tokens, first = [], []
    for prompt, branches in zip(prompts, responses, strict=True):
        tokens += [torch.cat([prompt, response]) for response in branches]
        first += [len(prompt)] * len(branches)
    bounds = torch.tensor([0, *map(len, tokens)]).cumsum(0)
    slots = [torch.arange(begin, end) for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]
    weights = weights_of(tokens, lambda row, index: index >= first[row])
    return Case(TreeLayout.from_groups(prompts, responses), tokens, [0] * len(tokens), slots, weights, None, {})


def run_of(length: int, seed: int) -> Tensor:
    """Random tokens."""
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def deep_rows() -> list[Row]:
    """Ragged rows of a prompt, two turns and a response; one ends inside a turn, one is there twice."""
    prompt, rows = run_of(9, 1), []
    for turn in (2, 3):
        for inner in (4, 5):
            shared = [prompt, run_of(3 + turn, turn), run_of(inner, 10 * turn + inner)]
            rows += [[*shared, run_of(length, 100 * turn + 10 * inner + length)] for length in (1, 4, 6)]
    rows += [[*rows[0][:2], rows[0][2][:2]], list(rows[4]), [run_of(7, 99)]]
    return [rows[index] for index in torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


@dataclass(frozen=True)
class Found:
    """Loss, log-probs at scored slots (0 elsewhere), and the gradient of every parameter that got one."""

    loss: Tensor
    logprobs: Tensor
    gradients: dict[str, Tensor]


def by_rows(model: nn.Module, case: Case) -> Found:
    """The truth: each row alone, without padding, through an unmodified model."""
    model.zero_grad()
    loss, logprobs = torch.zeros((), dtype=torch.float64), torch.zeros_like(case.weight)
    for tokens, first, slots, weights in zip(case.tokens, case.position, case.slots, case.weights, strict=True):
        if len(tokens) < 2:
            continue
        positions = torch.arange(first, first + len(tokens))[None]
        mask = torch.ones_like(positions)
        logits = model(tokens[None], attention_mask=mask, position_ids=positions, use_cache=False).logits[0]
        picked = widened(logits)[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        loss = loss - (weights[1:] * picked).sum()
        logprobs[slots[1:]] = torch.where(weights[1:] != 0, picked.detach().double(), 0.0)
    loss.backward()
    return Found(loss.detach(), logprobs, gradients_of(model))


def widened(logits: Tensor) -> Tensor:
    """In float32 at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def in_waves(model: nn.Module, case: Case, max_tokens: int | None = None, **options: Any) -> Found:
    """The same by `prefill`."""
    model.zero_grad()
    weight, total = case.weight, torch.zeros((), dtype=torch.float64)
    logprobs = torch.zeros_like(weight)
    with augtree_fx.prefill(model, case.layout, scored=case.scored, max_wave_tokens=max_tokens, **options) as tree:
        for wave in tree.waves():
            total += backward_of(wave, weight, logprobs)
    return Found(total, logprobs, gradients_of(model))


def backward_of(wave: Wave, weight: Tensor, logprobs: Tensor | None = None) -> Tensor:
    """Backward of a wave's share of the loss, which is returned."""
    found = wave.logprobs()
    loss = -(weight[wave.slot] * found).sum()
    loss.backward()
    if logprobs is not None:
        assert not logprobs[wave.slot].any(), "no slot is in two waves"
        logprobs[wave.slot] = found.detach().double()
    return loss.detach()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients that are there; they are cleared."""
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def errors(got: Found, expected: Found, compare: Callable[[Tensor, Tensor], float] = error) -> dict[str, float]:
    """Error of loss, log-probs and every gradient, relative to its size, or to the largest if it is rounding."""
    assert got.gradients.keys() == expected.gradients.keys()
    largest = max((x.abs().max().item() for x in expected.gradients.values()), default=0.0)
    pairs = {"loss": (got.loss, expected.loss), "logprobs": (got.logprobs, expected.logprobs)}
    pairs |= {name: (got.gradients[name], expected.gradients[name]) for name in expected.gradients}
    return {
        name: compare(*pair) if pair[1].abs().max() > 1e-14 * largest else (pair[0].abs().max() / largest).item()
        for name, pair in pairs.items()
    }


def assert_equal(got: Found, expected: Found, tolerance: float = 1e-10) -> None:
    """Everything agrees, relative to the largest value; sums in another order, float64, differ by about 1e-14."""
    assert {name: value for name, value in errors(got, expected).items() if not value <= tolerance} == {}


def shared(model: nn.Module) -> nn.Module:
    """Transformed; every token is shared that can be."""
    return augtree_fx.transform(model, costs=FREE)
