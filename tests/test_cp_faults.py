"""Ranks that differ, are late or die: every rank gets an error that says who and what, soon; odd worlds work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
from attention_reference import Site
from cp_workers import halves, model_errors, pooled_errors
from fault_workers import (
    PLANTED,
    dies,
    disagreements,
    errors_after_an_error,
    lanes_errors,
    late,
    partition_errors,
    planted_errors,
    prefill_disagreements,
    small_errors,
    without_rows_errors,
)
from ranks import Ranks
from test_cp_attention import EXACT, groups

from augtree_fx.dtensor_ops.lanes import LanePlan
from augtree_fx.dtensor_ops.schedules import SCHEDULES

World = Callable[[int], Ranks]

DIFFERENCES = {
    "token": "token ids and positions (",
    "shape": "shape ((3, ",
    "schedule": "lanes (all ranks in one lane, schedule move_q, not all ranks in one lane, schedule None)",
    "costs": "costs (CostModel(node_tokens=3.0",
    "kernel": "kernel (reference, not auto)",
    "pooled": "rows are (pooled, not replicated)",
    "lanes": "lanes (halves, not all ranks in one lane",
    "plan": "lane 0 (ranks [2], ",
    "gradients": "gradients (False, not True)",
    "dtype": "dtype (torch.float32, not torch.float64)",
    "cache": "what hinders sharing (",
    "layout": "tokens (",
    "compiled": "compiled (True, not False)",
}


def test_ranks_that_disagree(worlds: World) -> None:
    """Every rank says who differs in what, before any of them starts to compute; the next call works."""
    for rank, found in enumerate(worlds(3).run(disagreements)):
        assert found.keys() == DIFFERENCES.keys()
        for name, difference in DIFFERENCES.items():
            expected = f"must be the same on ranks [0, 1, 2]: rank 1 differs from rank 0 in {difference}"
            if name in ("pooled", "layout"):  # other things differ with them
                expected = difference
            assert expected in found[name] and "rank 1 differs from rank 0" in found[name], (rank, name, found[name])


PREFILL_DIFFERENCES = {
    "max_prompt_tokens": ("a prefill", "nodes ("),
    "activations": ("a prefill", "activations (recompute, not keep)"),
    "scored": ("a prefill", "scored tokens ("),
    "max_wave_tokens": ("the cut into waves", "waves (1, not "),
}


def test_ranks_that_enter_prefill_with_other_settings(worlds: World) -> None:
    """Every rank says who differs in what; nothing of it is left, and the next prefill works."""
    for rank, found in enumerate(worlds(3).run(prefill_disagreements)):
        assert found.pop("none") == "no error" and found.keys() == PREFILL_DIFFERENCES.keys()
        for name, (what, difference) in PREFILL_DIFFERENCES.items():
            expected = f"{what} must be the same on ranks [0, 1, 2]: rank 1 differs from rank 0 in {difference}"
            assert expected in found[name], (rank, name, found[name])


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_come(worlds: World, absent: int) -> None:
    """It raised before its forward, as a rank that ran out of memory in a reward model does."""
    for rank, text in enumerate(worlds(3).run(late, absent, 1.0)):
        if rank != absent:
            assert f"rank {rank} was left waiting by rank {absent}; look for its own error" in text, text


def test_batches_that_are_small_for_their_ranks(worlds: World) -> None:
    for rank, errors in enumerate(worlds(4).run(small_errors)):
        assert max(errors.values()) <= EXACT, f"rank {rank}: {errors}"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_after_an_error(worlds: World, schedule: str) -> None:
    """What was under way when the error came is not taken for what the next step sends."""
    for rank, errors in enumerate(worlds(3).run(errors_after_an_error, schedule)):
        assert max(errors.values()) <= EXACT, f"rank {rank}: {errors}"


def test_lanes_that_change_in_a_world_of_groups_that_differ(worlds: World) -> None:
    """It does not hang: ranks agree on the name of a group which only some of them make."""
    for rank, errors in enumerate(worlds(3).run(partition_errors)):
        assert max(errors.values()) <= EXACT, f"rank {rank}: {errors}"


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [5, 6])
def test_odd_worlds(worlds: World, num_ranks: int) -> None:
    """More ranks than some parts of the tree have tokens, in one lane and in two, rows replicated and pooled."""
    for worker, options in (
        (small_errors, {}),
        (model_errors, {"name": "llama", "depth": 3, "style": "left", "schedule": "move_q"}),
        (model_errors, {"name": "gpt_oss", "depth": 2, "style": "right", "lanes": halves}),
        (pooled_errors, {"name": "llama", "depth": 2, "style": "right", "lonely": True}),
    ):
        for rank, errors in enumerate(worlds(num_ranks).run(with_options, worker, options)):
            assert max(errors.values()) <= EXACT, f"rank {rank}: {errors}"


def with_options(worker, options):
    return worker(**options)


# What each planted fault must spoil, and what it leaves as it is.
SPOILT = {
    "stale keys in backward": ({"q"}, {"out", "lse"}),
    "stale gathered keys in backward": ({"q"}, {"out", "lse"}),
    "a missing step of the ring": ({"out", "lse", "q", "k", "v"}, set()),
    "the LSE of another rank": ({"out", "lse", "q", "k", "v"}, set()),
    "a sink in every partial": ({"out", "lse", "sinks"}, set()),
    "lost gradients of one rank's keys": ({"k", "v"}, {"out", "lse", "q", "sinks"}),
}


def test_planted_faults_are_far_above_tolerance(worlds: World) -> None:
    """What the tests of attention compare would fail by a factor of a million."""
    assert SPOILT.keys() == PLANTED.keys()
    for rank, found in enumerate(worlds(3).run(planted_errors, Site(sinks=True), groups())):
        assert max(found["none"].values()) <= EXACT
        for name, (spoilt, kept) in SPOILT.items():
            # Not `>=`: what a rank never received may be anything, NaN too, which no comparison lets pass.
            assert not any(found[name][each] < 1e6 * EXACT for each in spoilt), (rank, name, found[name])
            assert all(found[name][each] <= EXACT for each in kept), (rank, name, found[name])


@pytest.mark.parametrize(
    ("num_ranks", "schedule", "where"),
    [
        (3, "rotate_kv", "forward"),
        pytest.param(4, "rotate_kv", "backward", marks=pytest.mark.slow),
        pytest.param(4, "gather_kv", "forward", marks=pytest.mark.slow),
        pytest.param(4, "move_q", "backward", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_between_transfers(
    worlds: World, tmp_path: Path, num_ranks: int, schedule: str, where: str
) -> None:
    """Nobody waits on; each says which ranks it was waiting for, and its neighbours name it."""
    with pytest.raises(AssertionError, match="dies: "):  # all leave, as a trainer does at an error
        worlds(num_ranks).run(dies, tmp_path, schedule, 1, where, seconds=30)
    found = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
    assert found.keys() == set(range(num_ranks)) - {1}
    for rank, text in found.items():
        assert f"rank {rank} was left by rank " in text and "look for its own error" in text, text
    named = [text for text in found.values() if "1" in text.split("was left by rank")[1].split(";")[0]]
    assert len(named) >= 2, found


def test_a_rank_without_rows_computes_a_share_of_the_others(worlds: World) -> None:
    for rank, (errors, text) in enumerate(worlds(3).run(without_rows_errors)):
        assert max(errors.values()) <= EXACT, f"rank {rank}: {errors}"
        assert "the batch is empty on all ranks" in text


@pytest.mark.parametrize("given", [None, ["all"]])
def test_lanes_that_are_none(worlds: World, given: Any) -> None:
    for texts in worlds(1).run(lanes_errors, given):
        assert all(f"lanes must give a list of LanePlan, got {given!r}" in text for text in texts)


def test_a_lane_without_ranks(worlds: World) -> None:
    given = [LanePlan((0,), tuple(range(len(families.rollout(2)))), None), LanePlan((), (), None)]
    for texts in worlds(1).run(lanes_errors, given):
        assert all("lanes must partition 1 ranks, each some in ascending order, got [(0,), ()]" in x for x in texts)
