"""Ranks that shard one model and have different numbers of stages and waves: nobody waits, and gradients are exact.

Float64 throughout; sums of some hundred terms in another order differ by about 1e-14.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import families
import numpy as np
import pytest
from families import padded, rollout, without_upcasts
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks
from test_parallel_wrappers import fsdp2, whole
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from wave_reference import FREE, Case, Found, by_rows, deep_rows, errors, groups_case, in_waves, padded_case, run_of

import augtree_fx
from augtree_fx import TreeLayout, lockstep
from augtree_fx.dtensor_ops.lanes import LanePlan
from augtree_fx.waves import Stage

EXACT = 1e-10


def plans(depth: int = 3) -> st.SearchStrategy[Stage]:
    nodes = st.lists(st.integers(0, 9), max_size=2).map(lambda x: np.array(x, dtype=np.int64))
    inner = st.lists(st.deferred(lambda: plans(depth - 1)), max_size=2) if depth else st.just([])
    waves = st.integers(0, 3).map(lambda number: [np.zeros(1, dtype=np.int64) for _ in range(number)])
    return st.builds(Stage, nodes, waves, inner, st.booleans())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(plans(), min_size=1, max_size=4))
def test_padded_plans_are_of_one_form(found: list[Stage]) -> None:
    own = [[x.tolist() for stage in plan.stages() for x in (stage.nodes, *stage.waves) if len(x)] for plan in found]
    forms = [lockstep._encoded(plan) for plan in found]
    for plan in found:
        for form in forms:
            lockstep._pad(plan, form)
    first, *others = [lockstep._encoded(plan) for plan in found]
    assert all(other == first for other in others)
    # What was there is there, in its order; and no wave or stage is added that no rank has.
    assert own == [
        [x.tolist() for stage in plan.stages() for x in (stage.nodes, *stage.waves) if len(x)] for plan in found
    ]
    assert first[0][2] == max(form[0][2] for form in forms) and first[0][3] == max(form[0][3] for form in forms)


def test_without_ranks_nothing_is_padded() -> None:
    plan = Stage(np.zeros(1, dtype=np.int64))
    lockstep.pad_to_all(plan, lockstep.groups_of(nn.Linear(2, 2)))
    assert not plan.waves and not plan.idle and lockstep.smallest(3, []) == 3


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    group = Ranks(3, tmp_path_factory.mktemp("ranks"))
    yield group
    group.stop()


def case_of(rank: int) -> Case:
    """Responses alone in three waves; a deep tree that is scored throughout; one row, of which nothing is shared."""
    if rank == 0:
        return groups_case([run_of(11, 0)], [[run_of(n, 10 + n) for n in (9, 2, 8, 1, 7)]])
    return padded_case(deep_rows()) if rank == 1 else padded_case([[run_of(7, 3)]])


def in_lockstep(options: dict[str, Any]) -> tuple[dict[str, float], int, int]:
    """Errors, and how many waves this rank got, how many of them empty."""
    rank, number = distributed.get_rank(), distributed.get_world_size()
    results = [by_rows(without_upcasts("llama"), case_of(each)) for each in range(number)]
    means = {name: sum(x.gradients[name] for x in results) / number for name in results[0].gradients}
    model = fsdp2(augtree_fx.transform(without_upcasts("llama"), costs=FREE))
    if options.pop("checkpointing", False):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sizes: list[int] = []
    waves = augtree_fx.Tree.waves
    augtree_fx.Tree.waves = lambda tree: (sizes.append(len(wave)) or wave for wave in waves(tree))
    try:
        got = in_waves(model, case_of(rank), None if "memory" in options else 10, **options)
    finally:
        augtree_fx.Tree.waves = waves
    gathered = {name: whole(gradient) for name, gradient in got.gradients.items()}
    found = errors(Found(got.loss, got.logprobs, gathered), Found(results[rank].loss, results[rank].logprobs, means))
    return found, len(sizes), sizes.count(0)


def assert_in_lockstep(found: list[tuple[dict[str, float], int, int]]) -> None:
    for differences, _, _ in found:
        assert {name: value for name, value in differences.items() if not value <= EXACT} == {}
    assert len({number for _, number, _ in found}) == 1 and any(empty for _, _, empty in found)


@pytest.mark.parametrize(
    "options",
    [{"memory": "2.8MiB"}, {"checkpointing": True, "activations": "recompute", "max_prompt_tokens": 4}],
    ids=["memory", "recompute"],
)
def test_prefill(three: Ranks, options: dict[str, Any]) -> None:
    assert_in_lockstep(three.run(in_lockstep, options))


def one_forward(lonely: int, options: dict[str, Any]) -> dict[str, float]:
    """Waves behind one forward: trees of other depths on all ranks; a lonely rank's rows share nothing."""
    rank, number = distributed.get_rank(), distributed.get_world_size()
    batches = [
        padded(
            [[run_of(9, 50 + row)] for row in range(3)] if each == lonely else rollout(2 + each % 2, seed=each), "right"
        )
        for each in range(number)
    ]
    plain = without_upcasts("llama")
    results = [families.reference(copy.deepcopy(plain), batch) for batch in batches]
    means = {name: sum(x.gradients[name] for x in results) / number for name in results[0].gradients}
    model = fsdp2(augtree_fx.transform(copy.deepcopy(plain), costs=FREE, **options))
    for _ in range(2):
        got = families.computed(model, batches[rank])
        gathered = {name: whole(gradient) for name, gradient in got.gradients.items()}
        model.zero_grad()
    budget = model.model._augtree_state.budget
    assert budget is None or budget.max_tokens is not None, budget
    return families.errors(families.Result(got.logits, gathered), families.Result(results[rank].logits, means))


def too_little() -> str:
    """What each rank says when one of them has too large a prompt."""
    model = fsdp2(augtree_fx.transform(without_upcasts("llama"), costs=FREE))
    length = 400 if distributed.get_rank() == 1 else 4
    case = groups_case([run_of(length, 0)], [[run_of(3, 1), run_of(2, 2)]])
    try:
        augtree_fx.prefill(model, case.layout, memory="4MiB").__enter__()
    except ValueError as error:
        return str(error)
    return ""


def refused() -> str:
    """What each rank says when one of them has a batch that is refused."""
    model = fsdp2(augtree_fx.transform(without_upcasts("llama"), costs=FREE, max_wave_tokens=16))
    batch = padded(rollout(2), "right")
    mask = batch.attention_mask.clone()
    mask[0, 1] = int(distributed.get_rank() != 2)  # a hole
    try:
        model(batch.input_ids, attention_mask=mask, use_cache=False)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def lanes_raise() -> str:
    """What each rank says, each an axis of its own, when the caller's function raises on one of them."""
    rank, mesh = distributed.get_rank(), init_device_mesh("cpu", (3, 1), mesh_dim_names=("dp", "cp"))

    def lanes(layout: TreeLayout, num_ranks: int) -> list[LanePlan]:
        return [{0: LanePlan((0,), tuple(range(layout.num_rows)), None, 16)}[rank // 2]]

    model = fsdp2(augtree_fx.transform(without_upcasts("llama"), costs=FREE, mesh=mesh["cp"], lanes=lanes))
    try:
        model(**padded(rollout(2), "right").inputs(), use_cache=False)
    except (KeyError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_lanes_that_raise_on_one_rank(three: Ranks) -> None:
    first, second, third = three.run(lanes_raise)
    assert first == second and third == "KeyError: 1"
    assert "RuntimeError: ranks that shard a model run the same forwards, and rank 2 of them cannot run" in first


def test_a_batch_that_is_refused_on_one_rank(three: Ranks) -> None:
    first, second, third = three.run(refused)
    assert first == second and third.startswith("ValueError")
    text = "RuntimeError: ranks that shard a model run the same forwards, and rank 2 of them cannot run its batch; what"
    assert first.startswith(text)


def test_a_budget_that_is_too_small_on_one_rank(three: Ranks) -> None:
    first, second, third = three.run(too_little)
    assert first == third == "memory='4MiB' does not hold the prompts and a wave of another rank; give more"
    assert second.startswith("memory must hold prompts and a wave of at least 1 token")


@pytest.mark.parametrize(("lonely", "options"), [(-1, {"memory": "3.4MiB"}), (1, {"max_wave_tokens": 16})])
def test_one_forward(three: Ranks, lonely: int, options: dict[str, Any]) -> None:
    for found in three.run(one_forward, lonely, options):
        assert {name: value for name, value in found.items() if not value <= EXACT} == {}
