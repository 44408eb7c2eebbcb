"""`python -m augtree_fx bench trl` in one process on the CPU: what it compares, what its gate catches, its errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from augtree_fx import tree_attention
from augtree_fx.__main__ import main
from augtree_fx.examples.bench import models

BENCH = ["bench", "trl", "--device", "cpu", "--repeats", "1", "--shape", "4:96:16"]
RATIO = re.compile(r"\d\.\d\dx")


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def run(
    arguments: list[str], file: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, list[dict[str, Any]], dict[str, Any]]:
    status = main([*BENCH, *arguments, "--json", str(file)])
    figures = json.loads(file.read_text())
    return status, capsys.readouterr().out, figures["cases"][0]["rows"], figures


def test_plain_and_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed, (plain, ours), figures = run(["--rows", "2"], tmp_path / "t.json", capsys)
    assert status == 0, printed
    assert (plain["name"], ours["name"]) == ("TRL, 2 rows a micro-batch", "TRL, augtree, 4 rows a micro-batch")
    assert (plain["tokens"], ours["tokens"]) == (4 * 112, 96 + 4 * 16)
    assert ours["differences"] == pytest.approx({"loss": 0, "grad_norm": 0, "gradients": 0}, abs=1e-5)
    assert len(ours["loss"]) == len(ours["grad_norm"]) == 2 and min(ours["grad_norm"]) > 1e-3
    assert ours["speed_up"] == pytest.approx(plain["time"]["median_ms"] / ours["time"]["median_ms"])
    model = models.build("tiny", None, torch.device("cpu"), torch.float32)
    flop = [
        models.Work(tokens, pairs, 64).executed_flop(model, True)
        for tokens, pairs in ((4 * 112, 4 * 112 * 113 // 2), (160, 96 * 97 // 2 + 4 * (16 * 96 + 16 * 17 // 2)))
    ]
    assert ours["flop_ceiling"] == pytest.approx(flop[0] / flop[1])
    assert f"{ours['speed_up']:.2f}x" in printed and figures["ranks"] == 1


def test_a_wrong_gradient_shows_no_ratio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = tree_attention.backward

    def wrong(*given: Any, **options: Any) -> Any:
        dq, dk, dv, *rest = right(*given, **options)
        return dq, dk, 0.5 * dv, *rest

    monkeypatch.setattr(tree_attention, "backward", wrong)
    status, printed, (plain, ours), _ = run([], tmp_path / "t.json", capsys)
    assert status == 1 and plain["passed"] and ours["passed"] is False and "speed_up" not in ours
    (line,) = (line for line in printed.splitlines() if line.startswith(ours["name"]))
    assert "parity failed" in line and not RATIO.search(line) and "FAILED: a difference above" in printed


def test_bfloat16_is_told_by_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm that the trainer logs is too coarse to tell."""
    status, printed, (_, ours), _ = run(["--dtype", "bfloat16"], tmp_path / "t.json", capsys)
    assert status == 0 and 0 < ours["differences"]["gradients"] < 5e-2, printed
    right = tree_attention.backward

    def wrong(*given: Any, **options: Any) -> Any:
        dq, *rest = right(*given, **options)
        return -dq, *rest

    monkeypatch.setattr(tree_attention, "backward", wrong)
    status, printed, (_, ours), _ = run(["--dtype", "bfloat16"], tmp_path / "t.json", capsys)
    assert status == 1 and ours["passed"] is False and ours["differences"]["gradients"] > 1, printed


def test_what_does_not_run_is_a_row_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("augtree_fx.integrations.trl.enable", lambda trainer, **options: trainer)
    status, printed, (_, ours), _ = run([], tmp_path / "t.json", capsys)
    assert status == 1 and ours["passed"] is None and "did not run" in printed
    assert ours["reason"].startswith("RuntimeError: a group has 160 tokens, computed tokens and unshared batches were")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--rows", "3"],
            "4 responses must be split over 1 ranks in micro-batches of 3 rows; use a number of responses",
        ),
        (["--shape", "4:96"], "got '4:96'; BRANCHES:PROMPT:RESPONSE is another way to write it"),
    ],
)
def test_usage_errors(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main([*BENCH, *arguments])
    assert refused.value.code == 2 and said in " ".join(capsys.readouterr().err.split())
