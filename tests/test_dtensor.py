"""DTensors on 1, 3 and 4 gloo ranks, meshes of one and two axes: partials merge, ops take sharded arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dtensor_workers import (
    check_attention_op,
    check_ops,
    half_precision_errors,
    merge_errors,
    merge_rule_errors,
    mesh_of,
    op_errors,
    random,
    rule_errors,
)
from ranks import Ranks
from torch import distributed
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from augtree_fx.dtensor_ops.placement import PartialSoftmax, partials_from_local, unpack_partials
from augtree_fx.dtensor_ops.schedules import SCHEDULES

EXACT = 1e-10  # float64, sums in another order
TOKENS, HEADS, SIZES, ALL = Shard(0), Shard(1), Shard(2), Replicate()


def all_of(worker, cases):
    """One call for several cases, by number of the case."""
    return [worker(*case) for case in cases]


def assert_exact(ranks: Ranks, worker, cases) -> None:
    for rank, found in enumerate(ranks.run(all_of, worker, cases)):
        for case, errors in zip(cases, found, strict=True):
            assert max(errors.values()) <= EXACT, f"rank {rank}, {case}: {errors}"


def merge_cases(num_ranks: int) -> list[Any]:
    merged = PartialSoftmax()
    cases = [((num_ranks,), [merged], [target]) for target in (TOKENS, HEADS, ALL)]
    if num_ranks == 4:
        cases += [
            ((2, 2), [merged, merged], [TOKENS, HEADS]),
            ((2, 2), [merged, merged], [ALL, ALL]),
            ((2, 2), [merged, merged], [TOKENS, TOKENS]),
            ((2, 2), [merged, HEADS], [TOKENS, HEADS]),
            ((2, 2), [TOKENS, merged], [TOKENS, HEADS]),
            ((2, 2), [ALL, merged], [HEADS, ALL]),
        ]
    return cases


def attention_cases(num_ranks: int) -> list[Any]:
    """Eight heads on four key heads: three ranks cannot have a part of them each, and then all compute all."""
    one = (num_ranks,)
    cases = [
        ("replay_attention", one, [TOKENS], [ALL]),
        ("replay_attention", one, [HEADS], [Shard(0)]),
        ("replay_attention", one, [HEADS], "plain"),
        ("replay_attention", one, [SIZES], None),
        ("prefill_attention", one, [TOKENS], [Shard(0)]),
        ("prefill_attention", one, [HEADS], [ALL]),
    ]
    if num_ranks == 4:
        cases += [
            ("replay_attention", (2, 2), [TOKENS, HEADS], [ALL, Shard(0)]),
            ("replay_attention", (2, 2), [HEADS, HEADS], [Shard(0), Shard(0)]),
            ("prefill_attention", (2, 2), [HEADS, TOKENS], "plain"),
            ("prefill_attention", (2, 2), [ALL, HEADS], None),
        ]
    return cases


def test_partials_merge_to_shards_of_tokens_and_heads_and_to_all(ranks: Ranks) -> None:
    assert_exact(ranks, merge_errors, merge_cases(ranks.num_ranks))


def test_reduce_scatter_of_partials(ranks: Ranks) -> None:
    assert_exact(ranks, op_errors, [()])


def test_half_precision_partials(worlds: Callable[[int], Ranks]) -> None:
    """Merged in float32 and rounded once: outputs to half a unit of bfloat16, LSEs to float32."""
    for errors in worlds(3).run(half_precision_errors):
        assert max(error for name, error in errors.items() if name.endswith("out")) <= 2**-8, errors
        assert max(error for name, error in errors.items() if name.endswith("lse")) <= 2**-20, errors


def test_attention_of_sharded_tensors(ranks: Ranks) -> None:
    assert_exact(ranks, rule_errors, attention_cases(ranks.num_ranks))


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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl(tmp_path: Path) -> None:
    ranks = Ranks(2, tmp_path, "nccl")
    assert_exact(ranks, merge_errors, merge_cases(2))
    assert_exact(ranks, op_errors, [()])
    assert_exact(ranks, rule_errors, attention_cases(2))
    assert_exact(ranks, merge_rule_errors, [((2,), [placement]) for placement in (TOKENS, HEADS, ALL)])
    ranks.stop()


def errors_said() -> list[str]:
    """What misuse says."""
    mesh, x = mesh_of((distributed.get_world_size(),)), random(4, 2, 3, seed=1)
    packed = partials_from_local(x, random(2, 4, seed=2), mesh, [PartialSoftmax()])
    whole = distribute_tensor(x, mesh, [ALL])
    lse = random(2, 4, seed=2)
    said = []
    for call in (
        lambda: partials_from_local(x, x, mesh, [PartialSoftmax()]),
        lambda: unpack_partials(packed),
        lambda: packed.redistribute(placements=[SIZES]),
        lambda: torch.ops.augtree.reduce_partials(x, lse, distributed.group.WORLD.group_name),
        lambda: torch.ops.augtree.partial_softmax([whole], [lse], None),
    ):
        with pytest.raises(ValueError) as error:
            call()
        said.append(str(error.value))
    return said


def test_misuse_says_what_to_do(worlds: Callable[[int], Ranks]) -> None:
    for said in worlds(3).run(errors_said):
        assert "a partial is an output [T, H, E] and an LSE [H, T], got [4, 2, 3] and [4, 2, 3]; pass them" in said[0]
        assert "partials must be merged before they are read, got placements (PartialSoftmax(),); red" in said[1]
        assert "the LSE in the last dim, which cannot be parted from outputs, got S(2); redistribute to" in said[2]
        assert "T a multiple of the 3 ranks, got [4, 2, 3] and [2, 4]; pad tokens, with an LSE of -inf" in said[3]
        assert "takes outs[0], lses[0] as DTensors of one mesh, got lses[0] on None and one on" in said[4]
