"""`python -m augtree_fx bench`: both benchmarks end to end on the CPU, their gates, their errors.

Times on the CPU mean nothing and are not looked at; that a ratio is shown only behind parity is.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from augtree_fx import tree_attention
from augtree_fx.__main__ import COMMANDS, main
from augtree_fx.examples.bench import grpo, grpo_waves, models, rivals, timing
from augtree_fx.examples.bench.shapes import Shape, parse_shape

ROOT = Path(__file__).resolve().parents[1]
STEP = ["bench", "step", "--device", "cpu", "--shape", "48x3x8", "--repeats", "1"]
RATIO = re.compile(r"\d\.\d\dx")
ATTENTION = [
    "bench",
    "attention",
    "--device",
    "cpu",
    "--shape",
    "24x3x8",
    "--repeats",
    "1",
    "--heads",
    "2",
    "--kv-heads",
    "1",
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors on several threads mostly wait for a core that another process has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(arguments: list[str], json_file: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, dict[str, Any]]:
    """Exit status, what was printed, and the JSON file."""
    status = main([*arguments, "--json", str(json_file)])
    return status, capsys.readouterr().out, json.loads(json_file.read_text())


def usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is printed for a command line that is refused; the exit status must be 2."""
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    return capsys.readouterr().err


def test_counts_of_a_shape_are_those_of_its_layout() -> None:
    shape = parse_shape("7x3x5")
    case = rivals.Case.of(shape, rivals.Heads(2, 1, 8), torch.float64, torch.device("cpu"))
    assert (shape.num_tokens, shape.num_row_tokens) == (case.layout.num_tokens, case.layout.num_row_tokens) == (22, 36)
    assert shape.tree_pairs == case.layout.num_attention_pairs
    assert shape.row_pairs == 3 * sum(range(1, 13))


def test_attention_runs_and_checks_every_rival(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed, figures = run([*ATTENTION, "--kernel", "reference"], tmp_path / "a.json", capsys)
    assert status == 0, printed
    (case,) = figures["cases"]
    assert case["shape"] == {
        "prompt": 24,
        "branches": 3,
        "response": 8,
        "groups": 1,
        "common": 0,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 16,
    }
    rows = {row["key"]: row for row in case["rows"]}
    assert list(rows) == ["tree-auto", "tree-reference", "rows", "copied", "prefix-grouper", "flex", "sdpa"]
    work = Shape(24, 3, 8).tree_pairs * 2 * 16 / 1e9
    for key in ("tree-auto", "tree-reference", "rows", "copied", "sdpa"):
        row = rows[key]
        assert row["passed"] and max(row["errors"].values()) < 1e-6, row
        assert row["tflops"]["both"] == pytest.approx(14 * work / row["both"]["median_ms"])
        assert row["ratio"] == pytest.approx(row["both"]["median_ms"] / rows["tree-auto"]["both"]["median_ms"])
        assert f"{row['ratio']:.2f}x" in printed
    assert "does not support backward on CPU" in rows["flex"]["reason"]
    assert f"FlexAttention, tree mask: {rows['flex']['reason']}" in printed
    assert torch.__version__ in printed and "24x3x8 tokens" in printed


def test_a_package_that_is_missing_is_a_row_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prefix_grouper", None)
    status, printed, figures = run([*ATTENTION, "--skip", "flex", "sdpa", "copied"], tmp_path / "a.json", capsys)
    rows = {row["key"]: row for row in figures["cases"][0]["rows"]}
    assert status == 0 and list(rows) == ["tree-auto", "rows", "prefix-grouper"]
    assert rows["prefix-grouper"]["reason"] == "it is not installed; pip install prefix-grouper"
    assert "PrefixGrouper, cpu_flash: it is not installed; pip install prefix-grouper" in printed


def off_by_a_percent(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An attention that is wrong by a little: output and gradients by the same factor."""
    return lambda q, k, v: 1.01 * attend(q, k, v)


def test_a_rival_that_fails_parity_shows_no_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = rivals.copied
    monkeypatch.setattr(rivals, "copied", lambda *arguments: off_by_a_percent(right(*arguments)))
    status, printed, figures = run([*ATTENTION, "--skip", "flex", "sdpa"], tmp_path / "a.json", capsys)
    rows = {row["key"]: row for row in figures["cases"][0]["rows"]}
    assert status == 1 and "FAILED: an error above 1e-05" in printed
    (line,) = (line for line in printed.splitlines() if line.startswith("prompt once, KV copied"))
    assert "parity failed" in line and not RATIO.search(line)
    assert rows["copied"]["passed"] is False and "both" not in rows["copied"]
    assert "ratio" in rows["rows"]


def test_no_ratio_is_shown_when_ours_fails_parity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = rivals.tree
    monkeypatch.setattr(rivals, "tree", lambda *arguments: off_by_a_percent(right(*arguments)))
    status, printed, figures = run([*ATTENTION, "--skip", "flex", "sdpa", "copied"], tmp_path / "a.json", capsys)
    ours, rows, *_ = figures["cases"][0]["rows"]
    assert status == 1 and ours["passed"] is False and rows["passed"] is True
    assert "ratio" not in rows and not RATIO.search(printed)


def test_a_rival_that_breaks_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Callable[..., Tensor]:
        raise torch.OutOfMemoryError("Tried to allocate 1 TiB")

    monkeypatch.setattr(rivals, "rows", broken)
    status, printed, figures = run([*ATTENTION, "--skip", "flex", "prefix-grouper"], tmp_path / "a.json", capsys)
    rows = {row["key"]: row for row in figures["cases"][0]["rows"]}
    assert status == 0 and rows["rows"]["reason"] == "out of memory" and rows["sdpa"]["passed"]
    assert "rows, cpu_flash (no reuse): out of memory" in printed


def test_results_are_written_after_every_row(tmp_path: Path) -> None:
    results = timing.Results(str(tmp_path / "r.json"), dtype="float32")
    case = results.case(shape="1x1x1")
    case["rows"].append({"both": timing.Time(1.5, 0.25)})
    results.save()
    read = json.loads((tmp_path / "r.json").read_text())
    assert read["cases"] == [{"shape": "1x1x1", "rows": [{"both": {"median_ms": 1.5, "spread_ms": 0.25}}]}]
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_the_picture_is_made_from_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    run([*ATTENTION, "--skip", "flex", "sdpa", "prefix-grouper"], tmp_path / "a.json", capsys)
    script = [sys.executable, ROOT / "examples" / "plot_bench.py", tmp_path / "a.json", tmp_path / "a.png"]
    subprocess.run(script, check=True, capture_output=True)
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_step_runs_and_compares_every_contender(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = ["--baseline-kernel", "sdpa", "--baseline-kernel", "cpu_flash"]
    status, printed, figures = run([*STEP, *kernels], tmp_path / "s.json", capsys)
    assert status == 0, printed
    assert [case["checkpointing"] for case in figures["cases"]] == [True, False]
    for case in figures["cases"]:
        ours, *others = case["rows"]
        assert [(row["key"], row["kernel"]) for row in others] == [
            (key, kernel) for kernel in ("sdpa", "cpu_flash") for key in ("one-forward", "micro-batch")
        ]
        assert ours["work"] == {"tokens": 48 + 24, "pairs": Shape(48, 3, 8).tree_pairs, "scored": 24}
        for row in others:
            assert row["passed"] and row["work"]["tokens"] == 3 * 56, row
            assert row["ratio"] == pytest.approx(row["time"]["median_ms"] / ours["time"]["median_ms"])
            assert row["of_flop_ceiling"] == pytest.approx(row["ratio"] / case["flop_ceiling"])
            assert f"{row['ratio']:.2f}x" in printed
        assert case["speedup"]["over"] == others[0]["name"] == "no reuse, sdpa"
        assert case["rounding"]["kernels"] == ["sdpa", "cpu_flash"]
        assert 0 <= case["rounding"]["differences"]["gradients"] < 1e-4
    assert "no reuse, sdpa against cpu_flash, rounding alone: " in printed
    assert "Qwen3 tiny, 2 of 2 layers, gradient checkpointing off, 48x3x8 tokens" in printed


def test_flops_are_those_of_the_matmuls() -> None:
    model = models.build("tiny", 1, torch.device("cpu"), torch.float32)
    dense = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128  # q; k and v; out; gate, up and down
    work = models.Work(tokens=7, pairs=28, scored=3)
    head, attention = 64 * 512 * 3, 28 * 4 * 16
    assert work.model_flop(model) == 6 * dense * 7 + 6 * head + 14 * attention
    assert work.executed_flop(model, False) == 6 * dense * 7 + 8 * head + 14 * attention
    assert work.executed_flop(model, True) == 8 * dense * 7 + 8 * head + 18 * attention


def test_log_probs_and_loss_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo, "HEAD_TOKENS", 5)  # chunks that do not divide the rows
    model = models.build("tiny", 2, torch.device("cpu"), torch.float64)
    batch = grpo.draw_batch(Shape(6, 3, 4), 512, torch.device("cpu"))
    ids = batch.input_ids
    found = grpo.log_probs(model, batch)
    expected = torch.log_softmax(model(ids).logits, -1)[:, 5:-1].gather(-1, ids[:, 6:, None])[..., 0]
    torch.testing.assert_close(found, expected)
    ratio, advantages = torch.exp(expected - batch.old_logps), batch.advantages[:, None].expand(-1, 4)
    clipped = torch.where(advantages > 0, ratio.clamp(max=1.2), ratio.clamp(min=0.8)) * advantages
    whole, logps = grpo.update(model, batch, rows=3)
    torch.testing.assert_close(logps, expected.detach())
    torch.testing.assert_close(whole.double(), -clipped.mean())
    grads = [p.grad.clone() for p in model.parameters()]
    torch.testing.assert_close(grpo.update(model, batch, rows=1), (whole, logps))
    for p, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-9, atol=1e-12)


def test_no_ratio_is_shown_when_a_gradient_of_the_step_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = tree_attention.backward

    def wrong(*arguments: Any) -> tuple[Tensor | None, ...]:
        dq, dk, dv, dsinks = right(*arguments)
        dk[:48] = 0  # what the responses' losses say about the prompt's keys is lost
        return dq, dk, dv, dsinks

    monkeypatch.setattr(tree_attention, "backward", wrong)
    status, printed, figures = run([*STEP, "--checkpointing", "off"], tmp_path / "s.json", capsys)
    ours, *others = figures["cases"][0]["rows"]
    assert status == 1 and "FAILED: a difference above" in printed and not RATIO.search(printed.split("FLOPs")[1])
    assert ours["passed"] is False and "speedup" not in figures["cases"][0]
    for row in others:
        assert row["reason"] == "parity failed" and "time" not in row and row["differences"]["gradients"] > 0.1


def test_a_wrong_baseline_is_no_measure_of_rounding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The baseline is wrong by far, and so is what is measured as rounding: nothing passes, and no ratio is shown."""
    right = models.varlen.attend
    monkeypatch.setattr(models.varlen, "attend", lambda *given: 1.5 * right(*given))
    arguments = [*STEP, "--checkpointing", "off", "--baseline-kernel", "cpu_flash"]
    status, printed, figures = run(arguments, tmp_path / "s.json", capsys)
    (case,) = figures["cases"]
    assert status == 1 and case["rounding"]["differences"]["gradients"] > 0.1
    assert all(row["passed"] is False for row in case["rows"]) and "speedup" not in case


def test_the_gate_checks_the_batch_that_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of ours that only batches of three rows have is seen where two rows of the others are timed."""
    right = tree_attention.backward

    def wrong(*arguments: Any) -> tuple[Tensor | None, ...]:
        dq, dk, dv, dsinks = right(*arguments)
        if len(dq) == 48 + 3 * 8:
            dk[:48] = 0
        return dq, dk, dv, dsinks

    monkeypatch.setattr(tree_attention, "backward", wrong)
    status, printed, _ = run([*STEP, "--checkpointing", "off", "--time-rows", "2"], tmp_path / "s.json", capsys)
    assert status == 1 and "parity failed" in printed


def test_out_of_memory_is_a_row_and_the_ratio_is_over_micro_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = models.varlen.attend

    def small_rows_alone(q: Tensor, *arguments: Any) -> Tensor:
        if len(q) > 56:
            raise torch.OutOfMemoryError("Tried to allocate 1 TiB")
        return right(q, *arguments)

    monkeypatch.setattr(models.varlen, "attend", small_rows_alone)
    arguments = [*STEP, "--checkpointing", "on", "--baseline-kernel", "cpu_flash", "--time-rows", "2", "--layers", "1"]
    status, printed, figures = run(arguments, tmp_path / "s.json", capsys)
    (case,) = figures["cases"]
    ours, one_forward, micro = case["rows"]
    assert status == 0 and ours["passed"] and micro["passed"] and one_forward["reason"] == "out of memory"
    assert "no reuse, cpu_flash: out of memory" in printed and "1 of 2 layers" in printed
    assert case["speedup"]["over"] == "no reuse, micro-batch 1, cpu_flash (2 of 3 rows timed)"
    assert f"the speed of {case['speedup']['over']}" in printed


def test_out_of_memory_of_ours_is_no_failure_of_the_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("Tried to allocate 1 TiB")

    monkeypatch.setattr(grpo, "update", full)
    status, printed, figures = run([*STEP, "--checkpointing", "off"], tmp_path / "s.json", capsys)
    assert status == 0 and "augtree, auto: out of memory" in printed
    assert [row["reason"] for row in figures["cases"][0]["rows"]] == ["out of memory"]


@pytest.mark.parametrize("fits", [True, False])
def test_waves_are_a_contender_and_lead_where_one_forward_does_not_fit(
    fits: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = grpo.update

    def one_row_fits(model: Any, batch: grpo.Batch, rows: int) -> tuple[Tensor, Tensor]:
        if rows > 1 and not fits:
            raise torch.OutOfMemoryError("Tried to allocate 1 TiB")
        return right(model, batch, rows)

    monkeypatch.setattr(grpo, "update", one_row_fits)
    arguments = [*STEP, "--checkpointing", "on", "--baseline-kernel", "sdpa", "--skip", "one-forward"]
    status, printed, figures = run([*arguments, "--wave-tokens", "8"], tmp_path / "s.json", capsys)
    (case,) = figures["cases"]
    once, waves, micro = case["rows"]
    assert status == 0 and waves["passed"] and micro["passed"], printed
    assert waves["work"] == {"tokens": 48 + 24, "pairs": Shape(48, 3, 8).tree_pairs, "scored": 24}
    lead = once if fits else waves
    assert micro["ratio"] == pytest.approx(micro["time"]["median_ms"] / lead["time"]["median_ms"])
    assert ("ratio" in waves) == fits and case["speedup"]["over"] == micro["name"]
    assert (once["reason"] is None) == fits and "augtree, waves of 8, auto" in printed


def test_a_wave_that_misses_its_gradient_fails_the_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = grpo_waves.clipped_loss
    monkeypatch.setattr(grpo_waves, "clipped_loss", lambda *given: 0.5 * right(*given))
    arguments = [*STEP, "--checkpointing", "on", "--baseline-kernel", "sdpa", "--wave-tokens", "8"]
    status, printed, figures = run(arguments, tmp_path / "s.json", capsys)
    waves = figures["cases"][0]["rows"][1]
    assert status == 1 and waves["passed"] is False and "parity failed" in printed


def test_step_without_sharing_or_package_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once = [*STEP, "--checkpointing", "off", "--skip", "micro-batch"]
    status, printed, figures = run([*once, "--baseline-kernel", "flash_attn_4"], tmp_path / "s.json", capsys)
    assert status == 0 and "it runs on CUDA, the tensors are on cpu" in figures["cases"][0]["rows"][1]["reason"]
    assert "it runs on CUDA" in figures["cases"][0]["rounding"]["reason"]
    assert "not checked: nothing ran without reuse" in printed
    status, printed, figures = run([*once, "--shape", "1x2x8"], tmp_path / "s.json", capsys)
    assert status == 1 and "RuntimeError: nothing was shared" in figures["cases"][1]["rows"][0]["reason"]


@pytest.mark.parametrize("arguments", [[], ["bench"], ["bench", "attention"], ["bench", "step"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and printed.startswith(f"usage: {' '.join(['python -m augtree_fx', *arguments])} [-h]")


def test_a_command_is_imported_only_when_it_is_chosen() -> None:
    code = (
        "import sys; from augtree_fx.__main__ import main\n"
        "try: main(['--help'])\n"
        "finally: assert not [name for name in sys.modules if name.startswith('augtree_fx.examples')]"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert all(hasattr(importlib.import_module(item.module), "main") for item in COMMANDS.values())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "required: COMMAND"),
        (["benchmark"], "invalid choice: 'benchmark' (choose from"),
        (["bench"], "required: attention | step"),
        (["bench", "attention", "--shape", "32x16"], "PROMPTxBRANCHESxRESPONSE in tokens, three positive numbers"),
        (["bench", "attention", "--shape", "0x1x1"], "such as 32768x16x1024, got '0x1x1'"),
        (["bench", "attention", "--repeats", "0"], "must be a whole number of at least 1, got '0'"),
        ([*ATTENTION, "--prompt", "8"], "make one shape: give all three"),
        ([*ATTENTION, "--heads", "3", "--kv-heads", "2"], "--heads must be a multiple of --kv-heads, got 3 and 2"),
        ([*ATTENTION, "--kernel", "fa9"], "invalid choice: 'fa9'"),
        ([*STEP, "--time-rows", "1"], "--time-rows must be at least 2, got 1: one row shares nothing"),
        ([*STEP, "--model", "70B"], "invalid choice: '70B'"),
        ([*STEP, "--json", "/nowhere/a.json"], "must be a file in a folder that exists, got '/nowhere/a.json'"),
        ([*STEP, "--skip", "one-forward", "micro-batch"], "leaves nothing to compare with"),
        ([*STEP, "--shape", "24x1x8"], "a group must have at least 2 branches to share a prompt, got 24x1x8"),
    ],
)
def test_what_a_wrong_command_line_says(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert text in usage_error(arguments, capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what to do without CUDA")
@pytest.mark.parametrize("bench", ["attention", "step"])
def test_without_cuda_the_error_says_what_is_needed(bench: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = usage_error(["bench", bench], capsys)
    assert "need a CUDA device" in text and "--device cpu runs the same comparison on small shapes" in text


def test_a_package_without_the_benchmarks_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("augtree_fx.examples")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("augtree_fx.__path__", [])
    monkeypatch.delattr("augtree_fx.examples", raising=False)
    assert "install the whole package, or run from its checkout" in usage_error(["bench", "attention"], capsys)
