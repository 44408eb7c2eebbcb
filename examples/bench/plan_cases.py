"""Batches whose steps are measured against their plans: trees of random tokens, and the rows that a trainer would pass.

A node is ``[tokens, children]``, a branch its tokens alone: ``[8192, [1024, 1024]]`` is a prompt with two responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from augtree_fx.examples.bench.shapes import Shape

Node = Any  # int, or [int, list[Node]]


@dataclass(frozen=True)
class PlanCase:
    """A batch and the model that runs it.

    Attributes:
        model: one of `models.SIZES`.
        layers: decoder layers, few, so that a run has time for many batches.
        trees: the batch.
    """

    model: str
    layers: int
    trees: list[Node]

    def __str__(self) -> str:
        return f"{self.model}, {self.layers} layers: {' + '.join(_text(tree) for tree in self.trees)}"


@dataclass(frozen=True)
class Rows:
    """Rows padded on the right.

    Attributes:
        input_ids, attention_mask: ``[rows, longest]`` int64, on the host.
        scored: ``[rows, longest]`` bool, tokens of branches: those that have a log-prob.
    """

    input_ids: Tensor
    attention_mask: Tensor
    scored: Tensor


def group(prompt: int, responses: int | Sequence[int], length: int = 0) -> Node:
    """A prompt with ``responses`` responses of one length, or with responses of the lengths given."""
    return [prompt, [length] * responses if isinstance(responses, int) else list(responses)]


def of_shape(model: str, layers: int, shape: Shape) -> PlanCase:
    """The one group of a benchmark's shape."""
    return PlanCase(model, layers, [group(shape.prompt, shape.branches, shape.response)])


def draw(trees: list[Node], vocabulary: int) -> Rows:
    """Random tokens, the same in every process; the first token of a node tells it from its siblings."""
    generator = torch.Generator().manual_seed(0)
    paths = [path for number, tree in enumerate(trees) for path in _paths(tree, number, vocabulary, generator)]
    longest = max(sum(map(len, path)) for path in paths)
    ids, mask, scored = (torch.zeros(len(paths), longest, dtype=torch.int64) for _ in range(3))
    for row, path in enumerate(paths):
        tokens = torch.cat(path)
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        scored[row, len(tokens) - len(path[-1]) : len(tokens)] = 1
    return Rows(ids, mask, scored.bool())


def _paths(node: Node, number: int, vocabulary: int, generator: torch.Generator) -> Iterator[list[Tensor]]:
    """Tokens of every node from here to each branch below."""
    length, children = (node, []) if isinstance(node, int) else node
    tokens = torch.randint(vocabulary, (length,), generator=generator)
    tokens[:1] = number
    if not children:
        yield [tokens]
    for place, child in enumerate(children):
        for path in _paths(child, place, vocabulary, generator):
            yield [tokens, *path]


def _text(node: Node) -> str:
    if isinstance(node, int):
        return str(node)
    length, children = node
    texts = [_text(child) for child in children]
    if len(set(texts)) == 1:
        inner = texts[0] if isinstance(children[0], int) else f"({texts[0]})"
        return f"{length}x{len(texts)}x{inner}"
    return f"{length}x[{', '.join(texts)}]"


# Ordered so that a run that is cut short has seen every model but the smallest. Few layers: no step above 0.3 s.
CUDA_CASES = [
    *(
        PlanCase("1.7B", 4, trees)
        for trees in (
            [group(2048, 4, 4096)],
            [group(4096, 8, 1024)],
            [group(16384, 4, 512)],
            [group(16384, 16, 1024)],
            [group(32768, 8, 256)],
            [group(8192, [256, 512, 1024, 2048, 4096, 1024, 512, 256])],
            [group(8192, 8, 512)] * 2,
            [group(4096, 4, 1024)] * 4,
            [group(16384, 8, 512), group(4096, 8, 512)],
            [[4096, [group(2048, 4, 512)] * 4]],
            [[8192, [[1024, [[1024, [512] * 4]] * 2]] * 2]],
        )
    ),
    *(
        PlanCase("8B", 2, trees)
        for trees in (
            [group(2048, 4, 1024)],
            [group(4096, 16, 512)],
            [group(8192, 8, 2048)],
            [group(16384, 4, 1024)],
            [group(32768, 16, 256)],
            [group(32768, 16, 1024)],
            [group(8192, 8, 512), group(8192, 8, 512), group(2048, 8, 1024)],
            [[16384, [group(1024, 4, 512)] * 4]],
            [[2048, [group(8192, 4, 512), group(2048, 8, 512)]]],
        )
    ),
    *(
        PlanCase("0.6B", 6, trees)
        for trees in (
            [group(8192, 4, 256)],
            [group(2048, 8, 1024)],
            [group(8192, 16, 512)],
            [group(32768, 16, 256)],
            [group(32768, 4, 4096)],
            [group(8192, 4, 1024)] * 3,
            [group(12288, [4096, 256, 256, 256]), group(2048, [1024] * 6)],
            [[4096, [[4096, [group(1024, 4, 256)] * 2]] * 2]],
        )
    ),
]
CPU_CASES = [
    PlanCase("tiny", 2, [group(48, 4, 12)]),
    PlanCase("tiny", 2, [group(24, 3, 8), group(16, [9, 4])]),
    PlanCase("tiny", 1, [[16, [group(8, 2, 6)] * 2]]),
]
