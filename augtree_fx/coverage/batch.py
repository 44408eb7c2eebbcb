"""The batch of the check: two prompts with several responses each, padded on the right, and a policy-gradient loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_PROMPTS = (21, 17)  # tokens: more than twice the tiny windows and chunks, and odd
_RESPONSES = ((7, 1, 11), (4, 9, 2))
_FIRST_TOKEN = 5  # below are special tokens of tiny configs
_WIDTH = 40  # columns, a multiple of the tiny chunks, which some types ask for


@dataclass(frozen=True)
class Batch:
    """Rows as a trainer passes them.

    Attributes:
        input_ids: ``[batch, sequence]`` int64; padding holds token 0.
        attention_mask: ``[batch, sequence]`` int64, 1 at tokens.
        rows: tokens of each row, without padding.
    """

    input_ids: Tensor
    attention_mask: Tensor
    rows: tuple[Tensor, ...]

    def tokens_of(self, output: Tensor) -> list[Tensor]:
        """The part of a ``[batch, sequence, ...]`` output that belongs to tokens, row by row."""
        return [output[index, : len(row)] for index, row in enumerate(self.rows)]


def grouped_batch(vocabulary: int, seed: int = 0) -> Batch:
    """Two groups, their rows interleaved.

    Args:
        vocabulary: number of token ids.
        seed: of the tokens.
    """
    generator = torch.Generator().manual_seed(seed)

    def run(length: int) -> Tensor:
        return torch.randint(_FIRST_TOKEN, vocabulary, (length,), generator=generator)

    prompts = [run(length) for length in _PROMPTS]
    pairs = [
        (prompt, run(length))
        for lengths in zip(*_RESPONSES, strict=True)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    rows = tuple(torch.cat(pair) for pair in pairs)
    input_ids = torch.zeros(len(rows), _WIDTH, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for index, row in enumerate(rows):
        input_ids[index, : len(row)] = row
        mask[index, : len(row)] = 1
    return Batch(input_ids, mask, rows)


def objective(logits: list[Tensor], batch: Batch) -> Tensor:
    """Sum over rows of the log-probability of every next token, each times a random advantage."""
    generator = torch.Generator().manual_seed(7)
    total = logits[0].new_zeros(())
    for row_logits, row in zip(logits, batch.rows, strict=True):
        advantage = torch.randn(len(row) - 1, generator=generator, dtype=torch.float64).to(row_logits.dtype)
        picked = row_logits[:-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]
        total = total - (advantage * picked).sum()
    return total
