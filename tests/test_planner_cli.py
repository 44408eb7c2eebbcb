"""``plan``, ``simulate``, ``calibrate`` and ``bench planner`` from the command line, and their errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from augtree_fx.__main__ import main
from augtree_fx.planner import Hardware, Planner

ROOT = Path(__file__).resolve().parents[1]
PLAN = ["plan", "--world", "8", "--prompt", "4096", "--responses", "4x256"]
PIECES = ["--max-size", "64", "--repeats", "1", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]


def usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def workload(tmp_path: Path) -> str:
    file = tmp_path / "work.jsonl"
    lines = [{"prompt_tokens": 2000 + i, "response_tokens": [100, 200, 1500]} for i in range(6)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


def test_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "plan.json", tmp_path / "plan.svg"]
    assert main([*PLAN, "--model", "Qwen3-4B", "--json", str(files[0]), "--figure", str(files[1])]) == 0
    printed = capsys.readouterr().out
    assert "Qwen/Qwen3-4B, 8 ranks of h200" in printed and "baseline: ulysses" in printed
    assert json.loads(files[0].read_text())["world_size"] == 8
    assert files[1].read_text().lstrip().startswith("<?xml")


def test_plan_of_a_workload(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--world", "4", "--workload", workload, "--limit", "3", "--table", "groups"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("groups") and len(printed.splitlines()) == 3 + 3


def test_plan_of_unequal_groups(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--world", "2", "--prompt", "100", "--prompt", "200", "--responses", "2x10,1x20"]
    assert main([*arguments, "--responses", "1x5", "--groups", "2", "--exact", "--forward-only"]) == 0
    assert "4 trees, 8 rows, 1090 tokens, 690 distinct" in capsys.readouterr().out


def test_usage_errors_of_plan(
    workload: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # its environment was read at import
    assert "--prompt and --responses, or --workload, got neither" in usage_error(["plan", "--world", "2"], capsys)
    assert "drop one" in usage_error([*PLAN, "--workload", workload], capsys)
    assert "responses must be NxR" in usage_error([*PLAN, "--responses", "4"], capsys)
    assert "got 2 for 1 prompts" in usage_error([*PLAN, "--responses", "1x1"], capsys)
    assert "hardware must be one of h200" in usage_error([*PLAN, "--hardware", "abacus"], capsys)
    assert "built in are Qwen/Qwen3-0.6B" in usage_error([*PLAN, "--model", "no/such"], capsys)
    assert "at least 1, got '0'" in usage_error([*PLAN, "--world", "0"], capsys)
    assert "use more ranks" in usage_error([*PLAN, "--hardware", "a100", "--world", "1"], capsys)


def test_simulate(workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    arguments = ["simulate", "--workload", workload, "--model", "Qwen3-0.6B", "--groups-per-step", "3", "--steps", "2"]
    assert main([*arguments, "--world", "1", "--world", "4", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    for text in ("1.18x average, 2.23x best", "2.63x", "7.08x", "not simulated: contention", "4 x h200, 2 steps"):
        assert text in printed
    results = json.loads(file.read_text())
    assert [result["world"] for result in results] == [1, 4]
    for result in results:
        ours, *theirs = result["outcomes"]
        assert all(one["simulated_ms"] > 1.2 * ours["simulated_ms"] for one in theirs if "reuse" not in one["name"])


def test_simulate_needs_a_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in usage_error(["simulate", "--workload", "/nowhere", "--world", "2"], capsys)


def test_calibrate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A profile of this machine, which plans take; links that were not measured say so."""
    file = tmp_path / "machine.json"
    assert main(["calibrate", str(file), "--device", "cpu", "--name", "here", *PIECES]) == 0
    assert "not measured" in capsys.readouterr().out
    machine = Hardware.load(file)
    assert machine.name == "here" and machine.unmeasured() == ["links.loopback"]
    assert machine.causal_forward.sizes == (64,) and machine.matmul.sizes == (16, 64)
    assert Planner(str(file)).hardware == machine
    assert main([*PLAN, "--model", "Qwen3-0.6B", "--hardware", str(file)]) == 0


@pytest.mark.slow
def test_calibrate_measures_links_between_ranks(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
         "--rdzv-endpoint", "localhost:0", "-m", "augtree_fx", "calibrate", str(file), "--device", "cpu", *PIECES],
        cwd=ROOT, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    machine = Hardware.load(file)
    assert [link.name for link in machine.links] == ["local"] and not machine.unmeasured()


def test_usage_errors_of_calibrate(capsys: pytest.CaptureFixture[str]) -> None:
    assert "folder that exists, got '/nowhere/x'" in usage_error(["calibrate", "/nowhere/x"], capsys)
    assert "multiple of --kv-heads, got 3 and 8" in usage_error(["calibrate", "x.json", "--heads", "3"], capsys)


def test_bench_planner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything is timed; how long it takes on a shared core is not looked at."""
    file = tmp_path / "times.json"
    assert main(["bench", "planner", "--repeats", "1", "--profile", "5", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "new plan: 4096 groups x 16 branches, 1024 ranks" in printed and "cumtime" in printed
    assert len(json.loads(file.read_text())) == 6
