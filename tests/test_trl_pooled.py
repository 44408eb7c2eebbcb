"""TRL's real trainers whose data-parallel ranks pool their rows: DDP and FSDP2, two to four gloo ranks.

The plain trainer runs on the same ranks, with rows in the same order by code of its own (`pooled_runs.across_ranks`).
Models are float64, and differences are those of what they compute in float32, see `test_trl.py`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from ranks import Ranks
from transformers import GPT2Config, GPT2LMHeadModel

import augtree_fx
from augtree_fx.__main__ import main
from augtree_fx.integrations import trl as integration
from augtree_fx.integrations.pooled import Pool, pool_mesh
from augtree_fx.integrations.report import state_of

trl = pytest.importorskip("trl")

import pooled_runs  # noqa: E402  (imports trainers' packages)
import trl_runs  # noqa: E402
from pooled_runs import Found  # noqa: E402
from test_trl import LOSS_FLOOR, Unknown, assert_same  # noqa: E402

World = Callable[[int], Ranks]
GROUP = 4

# Sharded by FSDP2, checkpointing, LoRA, beta, rows of a micro-batch, iterations. Four rows of two ranks are one group;
# of twelve, a group is on both ranks. Every value of every option; all 64 are slow.
COVERING = {(False, True, False, 0.1, 2, 2), (False, False, True, 0.0, 6, 1), (True, True, False, 0.1, 6, 1)}
ALL = itertools.product((False, True), (False, True), (False, True), (0.0, 0.1), (2, 6), (1, 2))
SWEEP = [pytest.param(*case, marks=() if case in COVERING else pytest.mark.slow) for case in ALL]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("pooled")
    for family in trl_runs.FAMILIES:
        trl_runs.saved(family, str(made / family))
    return str(made)


def pooled(ranks: Ranks, kind: str, family: str, folder: str, **options: Any) -> list[Found]:
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    if kind in ("grpo", "rloo"):
        given |= {"num_generations": GROUP, "max_completion_length": 8}
    found: list[Found] = ranks.run(pooled_runs.both, kind, family, folder, {**given, **options}, seconds=180)
    for each in found:
        assert_same(each.ours, each.plain)
        assert bool(each.num_sharded) == bool(options.get("sharded"))
    return found


def assert_whole(found: list[Found], group: int) -> None:
    """Groups are whole in the batch of a pool, and none of its tokens is computed by two ranks."""
    logged = found[0].ours
    assert logged.metric("augtree/rows_per_group") == [group] * 5
    assert min(logged.metric("augtree/token_ratio")) > 1.3
    assert logged.metric("augtree/unshared_batches") == [0] * 5
    assert len({tuple(each.ours.metric("augtree/tokens")) for each in found}) == 1


@pytest.mark.parametrize(("sharded", "checkpointing", "use_lora", "beta", "size", "iterations"), SWEEP)
def test_grpo_is_that_of_the_plain_trainer(
    worlds: World, folder: str, sharded: bool, checkpointing: bool, use_lora: bool, beta: float, size: int,
    iterations: int,
) -> None:  # fmt: skip
    found = pooled(
        worlds(2), "grpo", "qwen3" if use_lora else "llama", folder, sharded=sharded, use_lora=use_lora,
        gradient_checkpointing=checkpointing, beta=beta, num_iterations=iterations, per_device_train_batch_size=size,
    )  # fmt: skip
    assert_whole(found, GROUP)
    rows = [sum(len(batch) for batch in each.ours.rows) for each in found]
    assert rows == [size * 2 * 5] * 2, "each rank trains as many rows as it is given"
    scored = found[0].ours.metric("augtree/scoring_rows_per_group")
    assert set(scored) == ({GROUP} if beta or iterations > 1 else set())
    if not checkpointing:  # which computes again
        tokens = sum(found[0].ours.metric("augtree/computed_tokens"))
        assert all(each.computed < 0.7 * tokens for each in found), "a rank computes its share"
        assert sum(each.computed for each in found) >= tokens


@pytest.mark.slow  # starting ranks that import trl takes most of it
def test_three_ranks_that_evaluate_too(worlds: World, folder: str) -> None:
    """Groups of 3 on ranks with 4 rows of a generation batch, 2 rows of an evaluation: prompts of different width."""
    found = pooled(
        worlds(3), "grpo", "llama", folder, num_generations=3, beta=0.1, evaluate=True, per_device_eval_batch_size=2
    )
    assert_whole(found, 3)
    ours, plain = found[0].ours.logs[-1], found[0].plain.logs[-1]
    assert ours["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-5, abs=1e-5 * LOSS_FLOOR)
    assert ours["eval_kl"] == pytest.approx(plain["eval_kl"], rel=1e-5)
    assert ours["eval_augtree/scoring_rows_per_group"] == 3


@pytest.mark.slow  # starting ranks that import trl takes most of it
def test_pools_smaller_than_the_world(worlds: World, folder: str) -> None:
    """Two pools of two ranks: a group each, as the unmodified trainer deals them."""
    options = {"degree": 2, "as_dealt": True, "gradient_accumulation_steps": 1}
    found = pooled(worlds(4), "grpo", "llama", folder, **options)
    assert_whole(found[:2], GROUP)
    assert_whole(found[2:], GROUP)


def test_torn_groups_are_those_of_the_pool(worlds: World, folder: str) -> None:
    for said in worlds(2).run(pooled_runs.torn, folder, seconds=180):
        assert "rows of one prompt arrive in different micro-batches: 4.0 rows a group of 8" in said
        assert "make per_device_train_batch_size, which is 2, a multiple of 4, so that rows of the 2 ranks of" in said
        assert "of a pool together are one of num_generations 8, with fewer gradient_accumulation_steps" in said


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rloo(worlds: World, folder: str, sharded: bool) -> None:
    """Ranks generate each for itself, one longer than the other; a forward without a KV cache could be one of rows."""
    assert_whole(pooled(worlds(2), "rloo", "llama", folder, beta=0.1, sharded=sharded, uneven=not sharded), GROUP)


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dpo(worlds: World, folder: str, sharded: bool) -> None:
    assert_whole(pooled(worlds(2), "dpo", "llama", folder, sharded=sharded), 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kto", "online"])
def test_other_trainers(worlds: World, folder: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    assert_whole(pooled(worlds(2), kind, "llama", folder, per_device_train_batch_size=4), 2)


def test_ranks_that_disagree(worlds: World, folder: str) -> None:
    expected = (
        "what ranks compute together must be the same on ranks [0, 1]: rank 1 differs from rank 0 in forwards of its",
        "what ranks compute together must be the same on ranks [0, 1]: rank 1 differs from rank 0 in rows (4, not 3)",
        "a generation batch must be the same on ranks [0, 1]: rank 1 differs from rank 0 in rows ([1], not [2])",
        "a generation batch must be the same on ranks [0, 1]: rank 1 differs from rank 0 in micro-batches (2, not 1)",
        "rows of several ranks must have one shape, token_type_ids has [(8,), (9,)]",
    )
    for told in worlds(2).run(pooled_runs.disagreements, folder):
        assert [text in said for text, said in zip(expected, told, strict=True)] == [True] * 5, told


def test_disabling_leaves_nothing(worlds: World, folder: str) -> None:
    assert worlds(2).run(pooled_runs.disabled, folder) == [[]] * 2


def bench(arguments: list[str]) -> tuple[int, str]:
    """`bench trl` on a rank: its status, and what it printed."""
    AcceleratorState._reset_state(True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = main(["bench", "trl", "--device", "cpu", "--repeats", "1", *arguments])
    AcceleratorState._reset_state(True)
    return status, printed.getvalue()


def test_the_benchmark_on_two_ranks(worlds: World, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    (status, printed), (other, silent) = worlds(2).run(bench, ["--shape", "4:96:16", "--json", str(file)], seconds=120)
    assert status == other == 0 and not silent, printed
    plain, own, ours = json.loads(file.read_text())["cases"][0]["rows"]
    assert [row["tokens"] for row in (plain, own, ours)] == [4 * 112, 2 * (96 + 2 * 16), 96 + 4 * 16]
    for row in (own, ours):
        assert row["passed"] and row["differences"]["grad_norm"] < 1e-5
        assert row["of_flop_ceiling"] == pytest.approx(row["speed_up"] / row["flop_ceiling"])
        assert f"{row['speed_up']:.2f}x" in printed
    assert 1 < own["flop_ceiling"] < ours["flop_ceiling"] < 4


def accelerator(world: int, kind: str = "DistributedType.MULTI_GPU", **changes: Any) -> Any:
    """What `pool_mesh` looks at, of an accelerator that is refused."""
    return SimpleNamespace(
        num_processes=world, distributed_type=kind, state=SimpleNamespace(), **{"parallelism_config": None, **changes}
    )


@pytest.mark.parametrize(
    ("given", "degree", "error", "said"),
    [
        (accelerator(6), 4, ValueError, "degree must divide the number of processes 6, got 4; use one of 1, 2, 3, 6"),
        (accelerator(2, "DistributedType.DEEPSPEED"), None, NotImplementedError, "DDP and FSDP2, got DEEPSPEED"),
        (
            accelerator(2, parallelism_config=SimpleNamespace(tp_enabled=True, cp_enabled=False)), None,
            NotImplementedError, "accelerate's tp ranks share them",
        ),
    ],
)  # fmt: skip
def test_accelerators_that_are_refused(given: Any, degree: int | None, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        pool_mesh(given, degree)


def test_fsdp1_is_refused() -> None:
    given = accelerator(2, "DistributedType.FSDP")
    given.state.fsdp_plugin = SimpleNamespace(fsdp_version=1)
    with pytest.raises(NotImplementedError, match="needs FSDP2, got fsdp_version=1"):
        pool_mesh(given, None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows": "replicated"}, "rows must be 'pooled' or None, got 'replicated'"),
        ({"degree": 2}, "pass rows='pooled' with them"),
        ({"rows": "pooled", "degree": 2, "mesh": object()}, "pass degree=2 or a mesh, not both"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        integration.enable(Unknown(), **options)


def test_one_process_has_its_rows_together() -> None:
    trainer = Unknown()
    trainer.accelerator = accelerator(1, "DistributedType.NO")
    integration.enable(trainer, rows="pooled")
    assert state_of(trainer.model).lanes is None


def test_a_model_that_is_transformed_without_a_mesh_is_not_pooled() -> None:
    trainer = Unknown()
    augtree_fx.transform(trainer.model)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM of this trainer is transformed already"):
        integration.enable(trainer, rows="pooled")


def test_rows_of_a_model_with_a_table_of_positions_stay() -> None:
    """More padding in front of a row would give its tokens other positions."""
    model = augtree_fx.transform(GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=2)))
    other = augtree_fx.transform(trl_runs.model("llama"))
    assert Pool.of([model], 0) is Pool.of([other], 0) is None
    for each, movable in ((model, False), (other, True)):
        state_of(each).lanes = SimpleNamespace(rows="pooled", host=None)
        pool = Pool.of([each], 0)
        assert pool is not None and pool.movable is movable
        with pool.apart():
            assert state_of(each).lanes is None
        assert state_of(each).lanes is not None


def test_a_callback_steps_out_of_the_pool() -> None:
    trainer = integration.group_shuffle(Unknown())
    state = state_of(augtree_fx.transform(trainer.model))
    state.lanes = lanes = SimpleNamespace(rows="pooled", host=None)
    with integration.apart(trainer):
        assert state.lanes is None
    assert state.lanes is lanes
