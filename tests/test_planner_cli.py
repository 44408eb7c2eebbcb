"""``plan``, ``simulate``, ``calibrate`` and ``bench planner`` from the command line, and their errors."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from augtree_fx.__main__ import main
from augtree_fx.planner import Hardware, Planner, simulate_cli
from augtree_fx.planner.profiles import profile
from augtree_fx.planner.simulate_cli import Outcome

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
    assert "got --prompt and --responses too; drop one" in usage_error([*PLAN, "--workload", workload], capsys)
    of_file = ["plan", "--world", "2", "--workload", workload, "--groups", "1"]
    assert "--workload has all groups already, got --groups too; drop one" in usage_error(of_file, capsys)
    assert "--limit is of the groups of --workload, got 3 without" in usage_error([*PLAN, "--limit", "3"], capsys)
    assert "responses must be NxR" in usage_error([*PLAN, "--responses", "4"], capsys)
    assert "got 2 for 1 prompts" in usage_error([*PLAN, "--responses", "1x1"], capsys)
    assert "hardware must be one of h200" in usage_error([*PLAN, "--hardware", "abacus"], capsys)
    assert "built in are Qwen/Qwen3-0.6B" in usage_error([*PLAN, "--model", "no/such"], capsys)
    assert "at least 1, got '0'" in usage_error([*PLAN, "--world", "0"], capsys)
    assert "use more ranks" in usage_error([*PLAN, "--hardware", "a100", "--world", "1"], capsys)


BAD_PROFILES = {
    "matmul": ({"sizes": [1, 2]}, "must have curves of sizes and flop_per_s"),
    "causal_forward": ({"sizes": [1], "flop_per_s": ["fast"]}, "sizes and rates of a curve must be numbers"),
    "links": ([{"name": "x"}], "must have curves of sizes and flop_per_s, links and origins"),
    "memory_bytes_per_s": (0, r"needs numbers above 0 and at least one link, 'h200' has {'memory_bytes_per_s': 0}"),
    "call_us": ("fast", "'h200' has {'call_us': 'fast'}"),
    "origins": ([1], "links and origins, got other fields"),
}


@pytest.mark.parametrize("field", BAD_PROFILES)
def test_profiles_with_wrong_numbers(field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value, text = BAD_PROFILES[field]
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(profile("h200").to_json() | {field: value}))
    said = usage_error([*PLAN, "--hardware", str(file)], capsys)
    assert text in said and f"{str(file)!r} holds no hardware profile" in said


def test_links_of_a_profile_are_there_and_above_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, values = tmp_path / "machine.json", profile("cpu").to_json()
    file.write_text(json.dumps(values | {"links": []}))
    assert "'cpu' has no link" in usage_error([*PLAN, "--hardware", str(file)], capsys)
    file.write_text(json.dumps(values | {"links": [values["links"][0] | {"ring_bytes_per_s": -1}]}))
    assert "link 'loopback' has {'ring_bytes_per_s': -1}" in usage_error([*PLAN, "--hardware", str(file)], capsys)


@pytest.mark.parametrize("content", [b"nonsense", b"\x80\x81", b"[1, 2]", b'{"name": "x"}'])
def test_files_that_hold_something_else(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is asked of such a file, the error names it or what it lacks, and the status is 2."""
    file = tmp_path / "file.json"
    file.write_bytes(content)
    assert f"{str(file)!r} holds no hardware profile" in usage_error([*PLAN, "--hardware", str(file)], capsys)
    said = usage_error([*PLAN, "--model", str(file)], capsys)
    assert any(text in said for text in ("a config must be JSON", "a config must be a JSON object", "must have num_"))
    for command in ("plan", "simulate"):
        said = usage_error([command, "--world", "2", "--workload", str(file)], capsys)
        assert "a workload must be JSON lines" in said or f"line 1 of {str(file)!r}" in said


@pytest.mark.parametrize(
    "line",
    [
        {"prompt_tokens": -5, "response_tokens": [3]},
        {"prompt_tokens": 5, "response_tokens": [3, -1]},
        {"prompt_tokens": 5, "response_tokens": [3], "static_prompt_tokens": 9},
        {"doc_tokens": 4, "instructions": [{"prompt_tokens": 0, "response_tokens": [1]}]},
    ],
)
def test_lengths_that_cannot_be(line: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "work.jsonl"
    file.write_text('{"prompt_tokens": 5, "response_tokens": [3]}\n' + json.dumps(line))
    for command in ("plan", "simulate"):
        said = usage_error([command, "--world", "2", "--workload", str(file)], capsys)
        assert "line 2 of" in said and "prompts must have at least 1 token, responses none below 0" in said


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt_tokens": 10.7, "response_tokens": [3]}, "lengths must be whole numbers, got 10.7"),
        ({"prompt_tokens": 10, "response_tokens": [3, 4.5]}, "lengths must be whole numbers, got 4.5"),
        ({"prompt_tokens": "10", "response_tokens": [3]}, "lengths must be whole numbers, got '10'"),
        ({"prompt_tokens": 10, "response_tokens": "123"}, "response_tokens must be a list of lengths, got '123'"),
        ({"prompt_tokens": 10, "response_tokens": [True]}, "lengths must be whole numbers, got True"),
        ({"prompt_tokens": 9, "response_tokens": [3], "static_prompt_tokens": 1.5}, "whole numbers, got 1.5"),
        ({"doc_tokens": 4.5, "instructions": [{"prompt_tokens": 9, "response_tokens": [1]}]}, "numbers, got 4.5"),
        ({"doc_tokens": 4, "instructions": [{"prompt_tokens": 9, "response_tokens": "1"}]}, "of lengths, got '1'"),
    ],
)
def test_lengths_that_are_no_whole_numbers(
    line: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "work.jsonl"
    file.write_text(json.dumps(line))
    assert message in usage_error(["plan", "--world", "2", "--workload", str(file)], capsys)


@pytest.mark.parametrize(("tokens", "message"), [("1e999", "line 1 of"), ("1" + 30 * "0", "than 64 bits hold")])
def test_lengths_beyond_all_bounds(
    tokens: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "work.jsonl"
    file.write_text(f'{{"prompt_tokens": {tokens}, "response_tokens": [3]}}')
    for command in ("plan", "simulate"):
        assert message in usage_error([command, "--world", "2", "--workload", str(file)], capsys)


def test_numbers_below_what_they_can_be(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option, value in (("--prompt", "-5"), ("--groups", "0"), ("--limit", "x"), ("--world", "-3")):
        assert f"at least 1, got {value!r}" in usage_error([*PLAN, option, value], capsys)
    assert "responses must be NxR" in usage_error([*PLAN, "--responses", "2x-10"], capsys)
    for value in ("-1", "nan", "inf"):
        assert f"must be 0 or more, got {float(value)}" in usage_error([*PLAN, "--state-bytes", value], capsys)
    simulate = ["simulate", "--workload", workload, "--world"]
    assert "at least 1, got '0'" in usage_error([*simulate, "0"], capsys)
    assert "hardware must be one of" in usage_error([*simulate, "2", "--hardware", "h900"], capsys)


def test_simulate(workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    arguments = ["simulate", "--workload", workload, "--model", "Qwen3-1.7B", "--groups-per-step", "3", "--steps", "2"]
    assert main([*arguments, "--world", "1", "--world", "4", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    for text in ("1.18x average, 2.23x best", "2.63x", "7.08x", "not simulated: contention", "4 x h200, 2 steps"):
        assert text in printed
    results = json.loads(file.read_text())
    assert [result["world"] for result in results] == [1, 4]
    for result in results:
        ours, *theirs = result["outcomes"]
        least = {1: 1.2, 4: 1.0}[result["world"]] * ours["simulated_ms"]  # on four ranks all wait for their hosts
        assert all(one["simulated_ms"] >= least for one in theirs if "reuse" not in one["name"])


def test_baselines_that_do_not_fit_have_no_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has no infinity."""
    file, work = tmp_path / "result.json", tmp_path / "work.jsonl"
    work.write_text(json.dumps({"prompt_tokens": 2000, "response_tokens": [100] * 4}))
    ring = Outcome("ring", math.inf, math.inf, 0.0, math.inf, "does not fit in 4.0 MiB a rank")
    with mock.patch.object(simulate_cli, "compare", lambda *_: [Outcome("augtree", 1.0, 1.0, 0.5, 1.0), ring]):
        assert main(["simulate", "--world", "1", "--workload", str(work), "--json", str(file)]) == 0
    assert "does not fit" in capsys.readouterr().out
    (result,) = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert result["outcomes"][1] | {"note": "", "name": ""} == {
        "name": "", "simulated_ms": None, "predicted_ms": None, "busy": 0.0, "best": None, "note": "",
    }  # fmt: skip


def test_figures_of_simulate_need_a_folder(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--workload", workload, "--world", "2", "--model", "Qwen3-0.6B", "--steps", "1"]
    assert "No such file" in usage_error([*arguments, "--json", "/nowhere/figures.json"], capsys)


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
    assert Planner(str(file)).hardware == Planner(file).hardware == machine
    assert main([*PLAN, "--model", "Qwen3-0.6B", "--hardware", str(file)]) == 0


@pytest.mark.slow
def test_calibrate_measures_links_between_ranks(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
         "--rdzv-endpoint", "localhost:0", "-m", "augtree_fx", "calibrate", str(file), "--device", "cpu", *PIECES],
        cwd=ROOT, check=True, capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    machine = Hardware.load(file)
    assert [link.name for link in machine.links] == ["local"] and not machine.unmeasured()


def test_usage_errors_of_calibrate(capsys: pytest.CaptureFixture[str]) -> None:
    assert "folder that exists, got '/nowhere/x'" in usage_error(["calibrate", "/nowhere/x"], capsys)
    assert "a file in a folder" in usage_error(["calibrate", "/"], capsys)
    assert "multiple of --kv-heads, got 3 and 8" in usage_error(["calibrate", "x.json", "--heads", "3"], capsys)
    for option in ("--heads", "--kv-heads", "--head-dim", "--repeats", "--max-size"):
        assert "at least 1, got '0'" in usage_error(["calibrate", "x.json", option, "0"], capsys)
    assert "invalid choice: 'abacus'" in usage_error(["calibrate", "x.json", "--kernel", "abacus"], capsys)


def test_bench_planner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything is timed; how long it takes on a shared core is not looked at."""
    file = tmp_path / "times.json"
    assert main(["bench", "planner", "--repeats", "1", "--profile", "5", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "new plan: 4096 groups x 16 branches, 1024 ranks" in printed and "cumtime" in printed
    assert len(json.loads(file.read_text())) == 7 + 2 * 2  # new plans, and cached ones of the even batches
