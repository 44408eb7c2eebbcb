"""Lengths of a batch, and the numbers that its tokens go by, on the host.

    row tokens        P1 a | P1 b | P2 c      one for each token of each row; what a trainer has
    distinct tokens   P1 a b | P2 c           one for each token that is computed when prompts are shared

A contender says which row tokens a rank holds. All else follows from that: ids, positions, and which of its tokens
predicts which label, looked up in the whole rows, never by a shift inside a shard.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from augtree_fx.examples.bench.shapes import Shape


@dataclass(frozen=True)
class Rollout:
    """Groups of one prompt with its responses, lengths in tokens.

    Attributes:
        prompts: length of each group's prompt, at least 1.
        responses: lengths of each group's responses.
        common: tokens that all prompts begin with, which only a tree of several levels computes once.
    """

    prompts: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    common: int = 0

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.responses) or not self.prompts:
            raise ValueError(
                f"every prompt must have a tuple of responses, got {len(self.prompts)} prompts and "
                f"{len(self.responses)} tuples; pass lists of one length, at least 1"
            )
        if min(self.prompts) < 1 or min((r for group in self.responses for r in group), default=0) < 0:
            raise ValueError(
                f"prompts must have at least 1 token and responses none below 0, got {self.prompts} and "
                f"{self.responses}; leave the group out"
            )
        if not 0 <= self.common <= min(self.prompts):
            raise ValueError(
                f"all prompts begin with what is common, got {self.common} tokens and prompts of {self.prompts}; "
                "leave less common"
            )

    @staticmethod
    def of(shape: Shape) -> Rollout:
        """The groups of a benchmark's shape."""
        groups = ((shape.response,) * shape.branches,) * shape.groups
        return Rollout((shape.prompt,) * shape.groups, groups, shape.common)

    def first(self, rows: int) -> Rollout:
        """Its first rows alone."""
        left, groups = rows, []
        for group in self.responses:
            groups.append(group[:left])
            left -= len(groups[-1])
            if not left:
                break
        return Rollout(self.prompts[: len(groups)], tuple(groups), self.common)

    @property
    def apart(self) -> Rollout:
        """The same groups, of which each computes its whole prompt."""
        return replace(self, common=0)

    @property
    def flat_responses(self) -> list[int]:
        """Lengths of all responses, group after group, which is the order of rows."""
        return [length for group in self.responses for length in group]

    @property
    def group_of_row(self) -> list[int]:
        return [number for number, group in enumerate(self.responses) for _ in group]

    @property
    def row_lengths(self) -> list[int]:
        """Prompt and response of each row."""
        return [self.prompts[g] + r for g, r in zip(self.group_of_row, self.flat_responses, strict=True)]

    @cached_property
    def row_starts(self) -> np.ndarray:
        """``[rows + 1]`` first row token of each row, and their number."""
        return _starts(self.row_lengths)

    @property
    def num_row_tokens(self) -> int:
        return int(self.row_starts[-1])

    @property
    def num_distinct(self) -> int:
        return sum(self.prompts) + sum(self.flat_responses) - (len(self.prompts) - 1) * self.common

    @cached_property
    def position(self) -> np.ndarray:
        """``[row tokens]`` place of each row token in its row."""
        return np.concatenate([np.arange(length) for length in self.row_lengths])

    @property
    def prompt_starts(self) -> list[int]:
        """First distinct token of each prompt, were nothing common to two of them; `apart` has no other."""
        sizes = [prompt + sum(group) for prompt, group in zip(self.prompts, self.responses, strict=True)]
        return _starts(sizes)[:-1].tolist()

    @property
    def response_starts(self) -> list[int]:
        """First distinct token of each response, as of `prompt_starts`."""
        groups = zip(self.prompt_starts, self.prompts, self.responses, strict=True)
        return [start for first, prompt, group in groups for start in (first + prompt + _starts(group)[:-1]).tolist()]

    @cached_property
    def distinct(self) -> np.ndarray:
        """``[row tokens]`` distinct token of each row token."""
        parts = []
        for group, start, length in zip(self.group_of_row, self.response_starts, self.flat_responses, strict=True):
            prompt = self.prompt_starts[group]
            parts += [np.arange(prompt, prompt + self.prompts[group]), np.arange(start, start + length)]
            parts[-2][: self.common] = np.arange(self.common)
        return np.unique(np.concatenate(parts), return_inverse=True)[1]

    @cached_property
    def first_copy(self) -> np.ndarray:
        """``[distinct tokens]`` the first row token of each."""
        return np.unique(self.distinct, return_index=True)[1]

    @cached_property
    def scored(self) -> np.ndarray:
        """``[response tokens of all rows]`` row token of each; the row token before it predicts it."""
        return np.flatnonzero(
            self.position >= np.repeat([self.prompts[g] for g in self.group_of_row], self.row_lengths)
        )

    @cached_property
    def copies(self) -> np.ndarray:
        """``[distinct tokens]`` number of rows that each is in."""
        return np.bincount(self.distinct, minlength=self.num_distinct)


def _starts(lengths: list[int] | tuple[int, ...]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
