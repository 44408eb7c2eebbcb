"""`python -m augtree_fx bench cp` end to end on gloo ranks: the gate, what it catches, what it prints, its errors."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks
from torch import Tensor, distributed

from augtree_fx.__main__ import main
from augtree_fx.dtensor_ops import collectives
from augtree_fx.examples.bench.cp import exchange, ring, turns

CP = ["bench", "cp", "--device", "cpu", "--repeats", "1"]
ATTENTION = [*CP, "--shape", "45x3x11", "--heads", "6", "--kv-heads", "3"]
STEP = [*CP, "--step", "--shape", "30x3x12", "--layers", "1"]
RATIO = re.compile(r"\d\.\d\dx")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    group = Ranks(3, tmp_path_factory.mktemp("ranks"))
    yield group
    group.stop()


def _without_arriving_gradients() -> Any:
    """What other ranks say about our keys is lost: each hop of gradients arrives empty."""

    def wait(hop: exchange.Hop) -> Tensor:
        arrived = right(hop)
        return arrived.zero_() if hop.tag == ring._GRADIENTS else arrived

    right = exchange.Hop.wait
    return mock.patch.object(exchange.Hop, "wait", wait)


def _stale_keys() -> Any:
    """The keys that visit are those that this rank sent away."""

    def wait(hop: exchange.Hop) -> Tensor:
        arrived = right(hop)
        same = min(len(arrived), len(hop.leaving))
        if hop.tag == ring._KV:
            arrived[:same] = hop.leaving[:same]
        return arrived

    right = exchange.Hop.wait
    return mock.patch.object(exchange.Hop, "wait", wait)


FAULTS = {"none": contextlib.nullcontext, "lost gradients": _without_arriving_gradients, "stale keys": _stale_keys}


def bench(arguments: list[str], fault: str = "none") -> tuple[int, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), FAULTS[fault]():
        return main(arguments), printed.getvalue()


def run(ranks: Ranks, arguments: list[str], file: Path, fault: str = "none") -> tuple[int, str, dict[str, Any]]:
    """Exit status (that of all ranks), what the first rank printed, and the JSON file."""
    results = ranks.run(bench, [*arguments, "--json", str(file)], fault, seconds=120)
    assert len({status for status, _ in results}) == 1 and not any(text for _, text in results[1:])
    return *results[0], json.loads(file.read_text())


def test_attention_of_all_contenders(ranks: Ranks, tmp_path: Path) -> None:
    status, printed, figures = run(ranks, ATTENTION, tmp_path / "a.json")
    assert status == 0 and figures["ranks"] == 3
    (case,) = figures["cases"]
    rows = {row["key"]: row for row in case["rows"]}
    assert case["against"] == "augtree"
    ours = [key for key in rows if key.startswith("augtree")]
    assert len(ours) == 4 and all({"compute", "transfer"} <= set(rows[key]) for key in ours)
    for key in (*ours, "ring-reuse", "ring", "ulysses", "dynamic"):
        row = rows[key]
        assert row["passed"] and max(row["errors"].values()) < 1e-6, row
        assert sum(row["tokens"]) == (78 if key in (*ours, "ring-reuse") else 168)
        assert row["ratio"] == pytest.approx(row["both"]["median_ms"] / rows["augtree"]["both"]["median_ms"])
        assert f"{row['ratio']:.2f}x" in printed
    assert "got 56 tokens and 3 ranks; use a multiple of 6" in rows["torch-flash"]["reason"]


def test_a_step_of_a_model(ranks: Ranks, tmp_path: Path) -> None:
    """Micro-batches without reuse, and contenders that cannot run this model: 3 ranks, 2 key heads."""
    arguments = [*STEP, "--only", "ring-reuse", "ring", "dynamic", "ulysses", "torch-flash", "--rows", "3", "2"]
    status, printed, figures = run(ranks, arguments, tmp_path / "s.json")
    rows = figures["cases"][0]["rows"]
    assert status == 0 and [row["name"] for row in rows if row["passed"]] == [
        "ring, prompt reused", "ring, no reuse", "ring, no reuse, 2 rows at a time", "dynamic CP, no reuse",
        "dynamic CP, no reuse, 2 rows at a time",
    ]  # fmt: skip
    assert all(row["differences"]["gradients"] < 1e-5 and "step" in row for row in rows if row["passed"])
    assert "the ranks must divide them, got 3 ranks and 2 key heads (of 4 heads); use 1, 2 ranks" in printed
    assert "torch CP, flash: torch's ring patches sdpa's CUDA kernels, the tensors are on cpu" in printed


def test_ranks_take_turns_on_one_device(ranks: Ranks, tmp_path: Path) -> None:
    """Checked with transfers, timed without; every rank has a time of its own, and the slowest one is the step's."""
    shared = ["--turns", "--groups", "3", "--common", "20", "--only", "augtree", "ring-reuse", "ring", "dynamic"]
    status, printed, figures = run(ranks, [*STEP, *shared], tmp_path / "t.json")
    (case,) = figures["cases"]
    assert status == 0 and case["turns"] and "3 ranks on one CPU" in printed
    for row in case["rows"]:
        assert len(row["step_by_rank"]) == 3 and row["step"]["median_ms"] >= max(row["step_by_rank"]) > 0
        assert row["differences"]["gradients"] < 1e-5 and f"{row['name']}: ranks take" in printed
    tokens = {row["key"]: sum(row["tokens"]) for row in case["rows"]}
    # Three groups of 30 and 3 x 12 whose prompts begin with 20 common tokens; the ring computes these for each group.
    assert tokens["augtree"] == 20 + 3 * (10 + 36) < tokens["ring-reuse"] == 3 * (30 + 36) < tokens["ring"]


def stood_in() -> dict[str, Any]:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    own, group = torch.arange(3.0) + rank + 1, distributed.group.WORLD
    with turns.without_transfers():
        passed_on = collectives.pass_on(own, group).wait()
        gathered = collectives.gather(own, group).wait()
        exchanged = collectives.exchange(own[:, None], [1] * size, [2] * size, group).wait()
        summed = own.clone()
        distributed.all_reduce(summed)
    return {"own": own, "passed on": passed_on, "gathered": gathered, "exchanged": exchanged, "summed": summed}


def test_stand_ins_have_the_shapes_of_transfers_and_values_of_the_rank(ranks: Ranks) -> None:
    for found in ranks.run(stood_in):
        own = found["own"]
        assert torch.equal(found["passed on"], own) and torch.equal(found["summed"], own)
        assert torch.equal(found["gathered"], own.expand(3, 3))
        assert torch.equal(found["exchanged"][:, 0], own.repeat(2))


def test_the_gate_of_turns_sees_stale_keys(ranks: Ranks, tmp_path: Path) -> None:
    arguments = [*STEP, "--turns", "--only", "ring-reuse", "--check-rows", "2"]
    status, printed, _ = run(ranks, arguments, tmp_path / "t.json", "stale keys")
    assert status == 1 and "parity failed" in printed and not RATIO.search(printed)


@pytest.mark.parametrize(("fault", "wrong"), [("lost gradients", {"dk", "dv"}), ("stale keys", {"out", "dq"})])
def test_the_gate_of_attention_sees_faults_of_a_ring(ranks: Ranks, tmp_path: Path, fault: str, wrong: set[str]) -> None:
    arguments = [*ATTENTION, "--only", "ring-reuse", "ring", "ulysses"]
    status, printed, figures = run(ranks, arguments, tmp_path / "a.json", fault)
    *rings, ulysses = figures["cases"][0]["rows"]
    assert status == 1 and "FAILED" in printed and ulysses["passed"]
    for row in rings:
        assert row["passed"] is False and "both" not in row and "ratio" not in row
        assert {name for name, error in row["errors"].items() if error > 1e-2} >= wrong
        (line,) = (line for line in printed.splitlines() if line.startswith(row["name"]))
        assert "parity failed" in line and not RATIO.search(line)


def test_the_gate_of_a_step_sees_lost_gradients(ranks: Ranks, tmp_path: Path) -> None:
    arguments = [*STEP, "--only", "ring-reuse", "ring", "--check-rows", "2"]
    status, printed, figures = run(ranks, arguments, tmp_path / "s.json", "lost gradients")
    assert status == 1 and "FAILED" in printed and not RATIO.search(printed)
    assert [row["reason"] for row in figures["cases"][0]["rows"]] == ["parity failed", "parity failed"]


def test_usage_errors(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for arguments, said in (
        (CP, "got one without RANK in its environment; run it as torchrun --nproc-per-node 2 -m augtree_fx bench cp"),
        ([*CP, "--turns"], "--groups, --common and --turns are of a step; attention is that of one group, on all"),
        ([*CP, "--only", "rings"], "contenders are augtree, .*ring-reuse, ring, ulysses, dynamic, .* got rings"),
    ):
        with pytest.raises(SystemExit) as refused:
            main(arguments)
        assert refused.value.code == 2 and re.search(said, " ".join(capsys.readouterr().err.split()))


@pytest.mark.parametrize("common", ["20", "30"])
def test_a_step_of_groups_whose_prompts_begin_alike(ranks: Ranks, tmp_path: Path, common: str) -> None:
    """The tree computes what is common once, the ring for each group; both have the gradients of rows."""
    arguments = [
        *STEP,
        "--groups",
        "2",
        "--common",
        common,
        "--only",
        "augtree",
        "ring-reuse",
        "ring",
        "--rows",
        "6",
        "4",
    ]
    status, printed, figures = run(ranks, arguments, tmp_path / "s.json")
    rows = {row["name"]: row for row in figures["cases"][0]["rows"]}
    assert status == 0 and all(row["passed"] and row["differences"]["gradients"] < 1e-5 for row in rows.values()), rows
    assert sum(rows["augtree"]["tokens"]) == 2 * 30 - int(common) + 6 * 12
    assert sum(rows["ring, prompt reused"]["tokens"]) == 2 * 30 + 6 * 12
    assert sum(rows["ring, no reuse"]["tokens"]) == sum(rows["ring, no reuse, 4 rows at a time"]["tokens"]) == 6 * 42
    assert f"2 groups of 30x3x12, {common} common, tokens" in printed


def test_groups_and_what_is_common_are_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        ([*ATTENTION, "--groups", "2"], "are of a step; attention is that of one group"),
        ([*STEP, "--common", "31"], "a part of every prompt, got 31 tokens and shapes 30x3x12"),
    ):
        with pytest.raises(SystemExit) as refused:
            main(arguments)
        assert refused.value.code == 2 and said in " ".join(capsys.readouterr().err.split())
