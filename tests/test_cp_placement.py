"""Who holds what under context parallelism: zigzag shards, dynamic degrees, numbers of tokens; in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from augtree_fx.examples.bench.cp import model as cp_model
from augtree_fx.examples.bench.cp.ring import Ring
from augtree_fx.examples.bench.cp.rollout import Rollout
from augtree_fx.examples.bench.cp.schedule import blocks_of, cost, schedule
from augtree_fx.examples.bench.cp.zigzag import Zigzag, make_calls, unmasked_calls
from augtree_fx.tables import AttentionCall

CPU = torch.device("cpu")


def calls_between(zigzag: Zigzag, rank: int, source: int) -> list[AttentionCall]:
    causal, unmasked = zigzag.families(rank, source)
    return [c for family in causal for c in make_calls(family, True, CPU)] + unmasked_calls(unmasked, CPU)


def seen(call: AttentionCall, num_queries: int, num_keys: int) -> np.ndarray:
    """``[queries, keys]`` how often a call computes each pair."""
    pairs = np.zeros((num_queries, num_keys), dtype=np.int64)
    for s in call.segments:
        offset = s.num_keys - s.num_queries
        mask = np.tri(s.num_queries, s.num_keys, offset) if call.causal else np.ones((s.num_queries, s.num_keys))
        pairs[s.q_begin : s.q_end, s.k_begin : s.k_end] += mask.astype(np.int64)
    return pairs


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", [(23,), (7, 1, 30, 12), (64, 64), (3, 50)])
def test_calls_compute_every_causal_pair_once(num_ranks: int, lengths: tuple[int, ...]) -> None:
    zigzag = Zigzag(lengths, num_ranks)
    starts = np.cumsum([0, *lengths])
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    found = np.zeros((starts[-1], starts[-1]), dtype=np.int64)
    for rank in range(num_ranks):
        queries = zigzag.tokens(rank, starts[:-1].tolist())
        for source in range(num_ranks):
            keys = zigzag.tokens(source, starts[:-1].tolist())
            for call in calls_between(zigzag, rank, source):
                assert call.cu_q.tolist() == np.cumsum([0, *(s.num_queries for s in call.segments)]).tolist()
                assert call.cu_k.tolist() == np.cumsum([0, *(s.num_keys for s in call.segments)]).tolist()
                found[np.ix_(queries, keys)] += seen(call, len(queries), len(keys))
    assert np.array_equal(found, np.tri(len(found), dtype=np.int64) * (sequence[:, None] == sequence))


def test_a_single_sequence_needs_one_call_a_step() -> None:
    zigzag = Zigzag((4096,), 4)
    assert [[len(calls_between(zigzag, rank, source)) for source in range(4)] for rank in range(4)] == [[1] * 4] * 4


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_zigzag_shares_are_balanced(num_ranks: int) -> None:
    zigzag = Zigzag((3000, 5001, 777), num_ranks)
    pairs = [
        sum(
            int(seen(call, zigzag.num_tokens(rank), zigzag.num_tokens(source)).sum())
            for source in range(num_ranks)
            for call in calls_between(zigzag, rank, source)
        )
        for rank in range(num_ranks)
    ]
    assert max(pairs) <= 1.01 * np.mean(pairs)  # chunks of a sequence differ by one token at most


def test_numbers_of_a_rollout() -> None:
    rollout = Rollout((3, 2), ((1, 2), (2,)))
    assert rollout.row_lengths == [4, 5, 4] and rollout.num_row_tokens == 13 and rollout.num_distinct == 10
    assert rollout.distinct.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert rollout.position.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert rollout.scored.tolist() == [3, 7, 8, 11, 12]
    assert rollout.copies.tolist() == [2, 2, 2, 1, 1, 1, 1, 1, 1, 1]
    assert rollout.first_copy.tolist() == [0, 1, 2, 3, 7, 8, 9, 10, 11, 12]


def test_equal_sequences_stay_on_a_rank_each() -> None:
    plan = schedule([1000] * 8, 4)
    assert [(block.ranks, len(block.sequences)) for block in plan.blocks] == [(range(r, r + 1), 2) for r in range(4)]
    assert plan.moved_tokens == 0 and len(set(plan.loads)) == 1


def test_a_long_sequence_gets_as_many_ranks_as_it_needs() -> None:
    lengths = [64_000, 2000, 1500, 900]
    plan = schedule(lengths, 8)
    degree = {sequence: len(block.ranks) for block in plan.blocks for sequence in block.sequences}
    assert degree[0] == 8 and max(plan.loads) <= 1.05 * np.mean(plan.loads)
    assert sum(plan.loads) == pytest.approx(sum(map(cost, lengths)))


def test_what_does_not_divide_is_spread() -> None:
    plan = schedule([8000] * 5, 4)
    assert sorted(len(block.ranks) for block in plan.blocks) == [1, 1, 1, 1, 4]
    assert max(plan.loads) == pytest.approx(np.mean(plan.loads))


def test_degrees_are_powers_of_two_on_aligned_ranks() -> None:
    assert blocks_of(3) == [range(0, 2), range(0, 1), range(1, 2), range(2, 3)]
    assert blocks_of(4)[:3] == [range(0, 4), range(0, 2), range(2, 4)]
    (block,) = schedule([3], 4).blocks
    assert len(block.ranks) == 1  # three tokens do not fill the four chunks of two ranks


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"at least 1 token, got lengths \[5, 0\]; leave empty ones out"):
        schedule([5, 0], 2)
    with pytest.raises(
        ValueError, match=r"every rank of a ring must hold a token, got \[4, 0\] tokens by rank; use few"
    ):
        Ring(slice(0, 4), (4, 0), ((), ()), None)
    with pytest.raises(ValueError, match="got 2 prompts and 1 tuples; pass lists of one length"):
        Rollout((3, 4), ((1,),))
    with pytest.raises(ValueError, match=r"prompts must have at least 1 token .* got \(0,\)"):
        Rollout((0,), ((1,),))
    x = torch.zeros(1, 1, 2, 8)
    with pytest.raises(NotImplementedError, match="got a mask=False and sliding_window=4; use a model without"):
        cp_model._attention(
            nn.Module(), x, x, x, None, scaling=1.0, context_parallel_run=cp_model.Run(None, None, "auto"),
            sliding_window=4,
        )  # fmt: skip
