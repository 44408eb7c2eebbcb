"""How many ranks each sequence is sharded over, and which: dynamic context parallelism's scheduler, on the host.

A degree is a power of two, and a block is an aligned run of as many ranks (0-3, 4-7; 0-1, 2-3, ...). A sequence gets
the smallest degree at which its share of the cost fits a limit; longest first, it goes to the block whose most loaded
rank has the least. Limits are tried from the mean load of a rank downwards, each with some of the shortest sequences
spread over the largest block to even things out; the plan whose most loaded rank has the least wins, then the one that
moves the fewest keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# What a token costs outside attention, in (query, key) pairs of it: a layer of Qwen3-8B has 193M weights at 6 FLOP a
# token, and a pair costs 14 x 32 heads x 128 FLOP; 1.16e9 / 57e3.
TOKEN_PAIRS = 20_000


@dataclass(frozen=True)
class Block:
    """Some neighbouring ranks, and the sequences that are sharded over them.

    Attributes:
        ranks: a power of two of them.
        sequences: numbers of the sequences, in increasing order.
    """

    ranks: range
    sequences: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """Where each sequence goes.

    Attributes:
        blocks: those that have sequences, larger ones first.
        loads: ``[ranks]`` cost of each rank, in pairs.
        moved_tokens: sum over sequences of the tokens whose keys travel.
    """

    blocks: tuple[Block, ...]
    loads: tuple[float, ...]
    moved_tokens: int


def cost(length: int, token_pairs: int = TOKEN_PAIRS) -> int:
    """Cost of a causal sequence, in pairs."""
    return length * (length + 1) // 2 + token_pairs * length


def degrees(num_ranks: int) -> list[int]:
    """Powers of two up to the number of ranks, in increasing order."""
    return [1 << exponent for exponent in range(num_ranks.bit_length())]


def blocks_of(num_ranks: int) -> list[range]:
    """All blocks, larger ones first."""
    return [
        range(begin, begin + degree)
        for degree in reversed(degrees(num_ranks))
        for begin in range(0, num_ranks - degree + 1, degree)
    ]


def schedule(lengths: Sequence[int], num_ranks: int, token_pairs: int = TOKEN_PAIRS) -> Schedule:
    """Place sequences.

    Args:
        lengths: in tokens, each at least 1.
        num_ranks: of the axis.
        token_pairs: what a token costs outside attention, in pairs.
    """
    if min(lengths, default=0) < 1:
        raise ValueError(f"sequences must have at least 1 token, got lengths {list(lengths)}; leave empty ones out")
    costs = [cost(length, token_pairs) for length in lengths]
    mean = sum(costs) / num_ranks
    plans = []
    for divisor in degrees(num_ranks):
        chosen = [
            _degree(length, price, mean / divisor, num_ranks) for length, price in zip(lengths, costs, strict=True)
        ]
        for spread in range(min(num_ranks, len(lengths)) + 1):
            plans.append(_place(lengths, costs, _spread(lengths, chosen, spread, num_ranks), num_ranks))
    return min(plans, key=lambda plan: (max(plan.loads), plan.moved_tokens))


def _degree(length: int, price: int, limit: float, num_ranks: int) -> int:
    """The smallest degree whose share fits the limit; every chunk of the zigzag has a token."""
    allowed = [degree for degree in degrees(num_ranks) if degree == 1 or 2 * degree <= length]
    return next((degree for degree in allowed if price / degree <= limit), allowed[-1])


def _spread(lengths: Sequence[int], chosen: list[int], number: int, num_ranks: int) -> list[int]:
    """The same degrees, with ``number`` of the shortest sequences over the largest block that they fill."""
    result = list(chosen)
    for sequence in sorted(range(len(lengths)), key=lambda i: lengths[i])[:number]:
        result[sequence] = _degree(lengths[sequence], 1, 0, num_ranks)
    return result


def _place(lengths: Sequence[int], costs: list[int], chosen: list[int], num_ranks: int) -> Schedule:
    loads = [0.0] * num_ranks
    members: dict[range, list[int]] = {block: [] for block in blocks_of(num_ranks)}
    # Larger degrees first, so that small sequences fill what they leave uneven.
    for sequence in sorted(range(len(lengths)), key=lambda i: (-chosen[i], -costs[i])):
        degree = chosen[sequence]
        block = min((b for b in members if len(b) == degree), key=lambda b: (max(loads[r] for r in b), b.start))
        members[block].append(sequence)
        for rank in block:
            loads[rank] += costs[sequence] / degree
    blocks = tuple(Block(block, tuple(sorted(inside))) for block, inside in members.items() if inside)
    moved = sum(length * (degree - 1) for length, degree in zip(lengths, chosen, strict=True))
    return Schedule(blocks, tuple(loads), moved)
