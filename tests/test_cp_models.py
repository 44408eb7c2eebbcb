"""Models under context parallelism on 1, 3 and 4 gloo ranks against the unmodified model, row by row, in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cp_workers import halves, layout_errors, model_errors, pooled_errors, sharded_errors, wave_errors
from ranks import Ranks

from augtree_fx.dtensor_ops.attention import SCHEDULES

EXACT = 1e-10  # float64 throughout, sums in another order


@pytest.fixture(scope="module", params=[1, 3, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    group = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    yield group
    group.stop()


def run(ranks: Ranks, worker, *args, **options) -> None:
    for rank, errors in enumerate(ranks.run(call, worker, args, options)):
        wrong = {name: error for name, error in errors.items() if not error <= EXACT}
        assert not wrong, f"rank {rank}: {wrong}"


def call(worker, args, options):
    return worker(*args, **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("depth", [2, 3])
def test_every_schedule_at_every_depth(ranks: Ranks, schedule: str, depth: int) -> None:
    run(ranks, model_errors, "llama", depth, "right", schedule=schedule)


@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "deepseek_v3", "gemma3_text", "qwen3_moe"])
def test_families(ranks: Ranks, name: str) -> None:
    run(ranks, model_errors, name, 3, "left")


@pytest.mark.parametrize("depth", [2, 3])
def test_lanes_of_unequal_sizes(ranks: Ranks, depth: int) -> None:
    if ranks.num_ranks == 1:
        pytest.skip("one rank is one lane")
    run(ranks, model_errors, "llama", depth, "trl", lanes=halves)


def test_checkpointing(ranks: Ranks) -> None:
    run(ranks, model_errors, "llama", 2, "right", checkpointing=True, schedule="move_q")


@pytest.mark.parametrize("lonely", [False, True])
def test_rows_of_all_ranks_are_pooled(ranks: Ranks, lonely: bool) -> None:
    run(ranks, pooled_errors, "llama", 2, "right", lonely)


@pytest.mark.parametrize("rows", ["replicated", "pooled"])
def test_fsdp2_over_the_same_ranks(ranks: Ranks, rows: str) -> None:
    run(ranks, sharded_errors, rows)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_explicit_layout(ranks: Ranks, schedule: str) -> None:
    run(ranks, layout_errors, schedule)


@pytest.mark.parametrize("schedule", [*SCHEDULES, None])
@pytest.mark.parametrize(("depth", "max_tokens"), [(2, 9), (3, 12), (3, 1000)])
def test_waves(ranks: Ranks, schedule: str | None, depth: int, max_tokens: int) -> None:
    run(ranks, wave_errors, "llama", depth, max_tokens, schedule)


@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "deepseek_v3"])
def test_waves_of_families(ranks: Ranks, name: str) -> None:
    run(ranks, wave_errors, name, 3, 12)


@pytest.mark.parametrize(
    "options",
    [{"max_prompt_tokens": 4}, {"max_prompt_tokens": 5, "activations": "recompute"}],
)
def test_waves_on_prompts_in_chunks(ranks: Ranks, options: dict[str, object]) -> None:
    run(ranks, wave_errors, "llama", 3, 12, **options)
