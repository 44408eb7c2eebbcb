"""`python -m augtree_fx bench planner --steps`: batches, plans by kind, steps on gloo ranks, what is printed."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks

from augtree_fx import CostModel, TreeLayout
from augtree_fx.__main__ import main
from augtree_fx.examples.bench import plan_cases, plan_report, plan_steps, planner
from augtree_fx.planner import Execution, Planner, ReplayShape, model_shape
from augtree_fx.planner.alternatives import alternatives, kind_of

STEPS = ["bench", "planner", "--steps", "--device", "cpu", "--repeats", "1"]
KINDS = {"2 x 1", "1 x 2, rotate_kv", "1 x 2, move_q", "1 x 2, gather_kv"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    group = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield group
    group.stop()


def bench(arguments: list[str], wrong: bool = False) -> tuple[int, str]:
    """Run it; with ``wrong`` what moves under one schedule is lost, and with it some of the loss."""
    printed, step = io.StringIO(), plan_steps._step

    def faulty(model: Any, share: plan_steps.Share, num_scored: int) -> torch.Tensor:
        lane = share.arguments["augtree_context"].lane
        return step(model, share, num_scored) * (1.01 if lane.schedule == "move_q" else 1)

    fault = mock.patch.object(plan_steps, "_step", faulty) if wrong else contextlib.nullcontext()
    with contextlib.redirect_stdout(printed), fault:
        return main(arguments), printed.getvalue()


def run(ranks: Ranks, arguments: list[str], file: Path, wrong: bool = False) -> tuple[int, str, dict[str, Any]]:
    results = ranks.run(bench, [*arguments, "--json", str(file)], wrong, seconds=120)
    assert results[0][0] == results[1][0] and not results[1][1]
    return *results[0], json.loads(file.read_text())


def test_rows_of_a_case_are_the_paths_of_its_trees() -> None:
    trees = [[6, [[3, [2, 4]], 5]], plan_cases.group(7, [1, 2])]
    rows = plan_cases.draw(trees, 512)
    assert rows.attention_mask.sum(1).tolist() == [11, 13, 11, 8, 9]
    assert rows.scored.sum(1).tolist() == [2, 4, 5, 1, 2]
    layout = TreeLayout.from_padded(rows.input_ids, rows.attention_mask, costs=CostModel.free())
    shape = ReplayShape.from_layout(layout)
    assert shape.parent.tolist() == [-1, -1, 0, 0, 1, 1, 2, 2] and shape.length.tolist() == [6, 7, 3, 5, 1, 2, 2, 4]


def test_built_in_cases_are_enough_and_small() -> None:
    cases = plan_cases.CUDA_CASES
    assert len(cases) >= 24 and len({str(case) for case in cases}) == len(cases)
    assert sum(len(case.trees) > 1 for case in cases) >= 5
    assert {case.model for case in cases} == {"0.6B", "1.7B", "8B"} and max(case.layers for case in cases) <= 6


def test_timed_batches_ask_for_all_that_planning_does() -> None:
    """Even and skewed lengths, one pass and waves, sharing and rows by themselves: the smaller ones, at their size."""
    cases = [case for case in planner.CASES if case.groups == 64]
    assert {(case.world_size, case.limit_ms) for case in cases} == {(64, 10.0)} and len({*map(str, planner.CASES)}) == 7
    assert {(case.lengths, case.limit_ms) for case in planner.CASES if case.groups == 4096} == {
        (lengths, 1000.0) for lengths in ("even", "skewed", "short prompts")
    }
    model = model_shape("Qwen3-8B")
    plans = [case.planner().plan(case.batch(), model, world_size=case.world_size) for case in cases]
    assert [plan.reuse for plan in plans] == [True, True, False, True]
    assert [plan.num_waves > 1 for plan in plans] == [False, False, False, True]


def test_alternatives_are_of_every_kind_and_none_beats_the_plan() -> None:
    shape = ReplayShape.from_groups([8192, 4096], [[1024] * 4, [512, 700, 900]])
    planner = Planner("h200", execution=Execution(shard_weights=False, state_bytes_per_weight=2.0), bucketed=False)
    model = model_shape("Qwen3-8B")  # large enough that no device waits for its host, whoever moves
    found = alternatives(shape, planner.costs(model, world_size=2))
    assert set(found) == KINDS and all(kind == kind_of(plan) for kind, plan in found.items())
    chosen = planner.plan(shape, model, world_size=2)
    assert min(plan.total_us for plan in found.values()) >= chosen.total_us
    assert found[kind_of(chosen)].total_us == pytest.approx(chosen.total_us, rel=0.02)
    assert len({plan.total_us for plan in found.values()}) == len(found)


def test_steps_are_measured_under_every_plan(ranks: Ranks, tmp_path: Path) -> None:
    status, printed, figures = run(ranks, STEPS, tmp_path / "s.json")
    assert status == 0 and figures["ranks"] == 2 and len(figures["cases"]) == len(plan_cases.CPU_CASES)
    for case in figures["cases"]:
        rows = {row["kind"]: row for row in case["rows"]}
        assert set(rows) >= KINDS and case["chosen"] in rows
        for row in rows.values():
            assert row["step_ms"] > 0 and row["predicted_ms"] > 0 and row["reason"] is None
            assert row["loss"] == pytest.approx(6.24, abs=0.3)  # a uniform distribution over 512 tokens
            exposed = {"prefill_transfer_us", "transfer_us", "prefill_gathers"}
            assert len(row["parts_ms"]) == 2 and all(parts["attention"] > 0 for parts in row["parts_ms"])
            total = sum(value for name, value in row["terms_us"].items() if name not in exposed)
            assert total / 1e3 == pytest.approx(row["predicted_ms"], rel=1e-6)
    assert "chosen plan: the best measured in" in printed and "3 of 3 batches measured" in printed


def test_ranks_take_turns_on_one_device(ranks: Ranks, tmp_path: Path) -> None:
    """Neither times nor prices have transfers; an earlier run of this kind is priced alike."""
    file, arguments = tmp_path / "s.json", [*STEPS, "--shape", "60x3x40", "--layers", "1"]
    status, printed, figures = run(ranks, [*arguments, "--turns"], file)
    assert status == 0 and figures["turns"] and "2 ranks on one CPU" in printed and "without transfers" in printed
    rows = {row["kind"]: row for row in figures["cases"][0]["rows"]}
    assert set(rows) >= KINDS
    for row in rows.values():
        assert len(row["by_rank_ms"]) == 2 and row["step_ms"] >= max(row["by_rank_ms"]) > 0
        without = {"prefill_transfer_us", "transfer_us", "prefill_gathers", "prefill_exposed_us", "exposed_us"}
        total = sum(value for name, value in row["terms_us"].items() if name not in without)
        assert total / 1e3 == pytest.approx(row["predicted_ms"], rel=1e-6)
    assert rows["1 x 2, move_q"]["terms_us"]["exposed_us"] > 0
    second = tmp_path / "t.json"
    bench(["bench", "planner", "--again", str(file), "--hardware", "cpu", "--json", str(second)])
    again = {row["kind"]: row for row in json.loads(second.read_text())["cases"][0]["rows"]}
    for kind, row in rows.items():
        assert again[kind]["predicted_ms"] == pytest.approx(row["predicted_ms"])


def test_a_plan_with_another_loss_has_no_time(ranks: Ranks, tmp_path: Path) -> None:
    arguments = [*STEPS, "--shape", "30x3x12", "--layers", "1"]
    status, printed, figures = run(ranks, arguments, tmp_path / "s.json", wrong=True)
    rows = {row["kind"]: row for row in figures["cases"][0]["rows"]}
    assert status == 1 and "1 x 2, move_q: loss" in printed
    assert [kind for kind, row in rows.items() if row["step_ms"] is None] == ["1 x 2, move_q"]


def test_one_process_needs_no_torchrun_and_an_earlier_run_is_predicted_anew(tmp_path: Path) -> None:
    file, second = tmp_path / "s.json", tmp_path / "t.json"
    status, printed = bench([*STEPS, "--shape", "300x3x40", "--json", str(file)])
    assert status == 0 and "1 ranks of CPU" in printed and not torch.distributed.is_initialized()
    again = ["bench", "planner", "--again", str(file), "--hardware"]
    status, printed = bench([*again, "cpu", "--json", str(second)])
    old, new = (json.loads(each.read_text())["cases"][0]["rows"] for each in (file, second))
    assert status == 0 and "1 of 1 batches measured" in printed
    assert [row["step_ms"] for row in new] == [row["step_ms"] for row in old]
    assert [row["predicted_ms"] for row in new] == pytest.approx([row["predicted_ms"] for row in old])
    bench([*again[:-1], "--json", str(second)])  # on the machine of that run
    assert [row["predicted_ms"] for row in json.loads(second.read_text())["cases"][0]["rows"]] == pytest.approx(
        [row["predicted_ms"] for row in old]
    )
    bench([*again, "h200", "--json", str(second)])
    assert json.loads(second.read_text())["hardware"] == "h200"
    assert json.loads(second.read_text())["cases"][0]["rows"][0]["predicted_ms"] != old[0]["predicted_ms"]


def test_a_run_that_is_late_begins_no_batch(tmp_path: Path) -> None:
    with mock.patch.object(plan_steps.time, "monotonic", side_effect=[0.0, *[301.0] * 9]):
        status, printed = bench([*STEPS, "--json", str(tmp_path / "s.json")])
    assert status == 1 and "nothing was measured" in printed


def test_the_summary_counts_errors_and_choices() -> None:
    def row(kind: str, step_ms: float, predicted_ms: float) -> dict[str, Any]:
        return {"kind": kind, "step_ms": step_ms, "predicted_ms": predicted_ms, "reason": None}

    cases = [
        {"chosen": "a", "rows": [row("a", 10.0, 11.0), row("b", 8.0, 12.0)]},
        {"chosen": "b", "rows": [row("a", 10.0, 10.0), row("b", 10.2, 10.0)]},
        {"chosen": "b", "rows": [row("a", 11.0, 11.0), row("b", 10.0, 8.0)]},
    ]
    text, passed = plan_report.summary(cases, 4)
    assert passed and "3 of 4 batches measured" in text
    assert "the best measured in 1 of 3 batches, within 5% of it in 2; at worst 25.0% behind" in text
    assert "+50.0%" in text and "-20.0%" in text  # worst of all plans, and of the chosen ones


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--steps", "--device", "cpu", "--model", "8B"], "no batch is of model 8B"),
        (["--steps", "--device", "cpu", "--hardware", "h300"], "hardware must be one of h200, h100"),
        (["--steps", "--device", "cpu", "--profile", "3"], "--profile is of planning's host time"),
        (["--again", "missing.json"], "--again must be the JSON of an earlier --steps, got 'missing.json'"),
    ],
)
def test_what_a_wrong_command_line_says(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "planner", *arguments])
    assert ended.value.code == 2 and text in capsys.readouterr().err
