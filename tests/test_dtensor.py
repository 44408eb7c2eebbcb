"""DTensors on 1, 3 and 4 gloo ranks, meshes of one and two axes: partials merge, ops take sharded arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dtensor_workers import check_attention_op, check_ops, merge_errors, merge_rule_errors, op_errors, rule_errors
from ranks import Ranks
from torch.distributed.tensor import Replicate, Shard

from augtree_fx.dtensor_ops.attention import SCHEDULES
from augtree_fx.dtensor_ops.placement import PartialSoftmax

EXACT = 1e-10  # float64, sums in another order


def all_of(worker, cases):
    """One call for several cases, by number of the case."""
    return [worker(*case) for case in cases]


def assert_exact(ranks: Ranks, worker, cases) -> None:
    for rank, found in enumerate(ranks.run(all_of, worker, cases)):
        for case, errors in zip(cases, found, strict=True):
            assert max(errors.values()) <= EXACT, f"rank {rank}, {case}: {errors}"


def test_partials_merge_to_shards_of_tokens_and_heads_and_to_all(ranks: Ranks) -> None:
    merged = PartialSoftmax()
    cases = [((ranks.num_ranks,), [merged], [target]) for target in (Shard(0), Shard(1), Replicate())]
    if ranks.num_ranks == 4:
        cases += [
            ((2, 2), [merged, merged], [Shard(0), Shard(1)]),
            ((2, 2), [merged, merged], [Replicate(), Replicate()]),
            ((2, 2), [merged, merged], [Shard(0), Shard(0)]),
            ((2, 2), [merged, Shard(1)], [Shard(0), Shard(1)]),
            ((2, 2), [Shard(0), merged], [Shard(0), Shard(1)]),
            ((2, 2), [Replicate(), merged], [Shard(1), Replicate()]),
        ]
    assert_exact(ranks, merge_errors, cases)


def test_reduce_scatter_of_partials(ranks: Ranks) -> None:
    assert_exact(ranks, op_errors, [()])


TOKENS, HEADS, SIZES, ALL = Shard(0), Shard(1), Shard(2), Replicate()


def test_attention_of_sharded_tensors(ranks: Ranks) -> None:
    """Eight heads on four key heads: three ranks cannot have a part of them each, and then all compute all."""
    one = (ranks.num_ranks,)
    cases = [
        ("replay_attention", one, [TOKENS], [ALL]),
        ("replay_attention", one, [HEADS], [Shard(0)]),
        ("replay_attention", one, [HEADS], "plain"),
        ("replay_attention", one, [SIZES], None),
        ("prefill_attention", one, [TOKENS], [Shard(0)]),
        ("prefill_attention", one, [HEADS], [ALL]),
    ]
    if ranks.num_ranks == 4:
        cases += [
            ("replay_attention", (2, 2), [TOKENS, HEADS], [ALL, Shard(0)]),
            ("replay_attention", (2, 2), [HEADS, HEADS], [Shard(0), Shard(0)]),
            ("prefill_attention", (2, 2), [HEADS, TOKENS], "plain"),
            ("prefill_attention", (2, 2), [ALL, HEADS], None),
        ]
    assert_exact(ranks, rule_errors, cases)


def test_merging_of_sharded_tensors(ranks: Ranks) -> None:
    cases = [((ranks.num_ranks,), [placement]) for placement in (TOKENS, HEADS, ALL)]
    if ranks.num_ranks == 4:
        cases += [((2, 2), [TOKENS, HEADS]), ((2, 2), [ALL, TOKENS]), ((2, 2), [TOKENS, TOKENS])]
    assert_exact(ranks, merge_rule_errors, cases)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_ops_are_contracts(worlds: Callable[[int], Ranks], num_ranks: int) -> None:
    worlds(num_ranks).run(check_ops)
    for schedule in SCHEDULES:
        worlds(num_ranks).run(check_attention_op, schedule)
