"""The examples that people copy run, and the loop's gradient is that of the unmodified model on rows."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import augtree_fx

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_agent_turns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tasks", "1", "--trajectories", "2", "--turns", "2", "--system-tokens", "64", "--wave-tokens", "64"]
    monkeypatch.setattr(sys, "argv", ["agent_turns.py", *arguments])
    assert load("agent_turns").main() == 0
    assert "PASSED: same loss and gradients" in capsys.readouterr().out


def test_plain_grpo_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--steps", "1", "--generations", "3", "--completion-tokens", "5"]
    monkeypatch.setattr(sys, "argv", ["plain_grpo.py", *arguments])
    load("plain_grpo").main()
    assert "mean reward" in capsys.readouterr().out


def test_long_context_of_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    arguments = ["--prompt-tokens", "150", "--completion-tokens", "4", "--gradient-checkpointing"]
    run = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            EXAMPLES / "trl_long_context.py", *arguments, "--json", tmp_path / "figures.json",
        ],
        capture_output=True, text=True, timeout=280,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), *sys.path]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "PASSED: same losses and gradient norms" in run.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    plain, pooled = figures["computed_tokens"]
    assert sum(record["unique_tokens"] for record in figures["shared"]) <= pooled < 0.6 * plain, "shares are padded"


def test_plain_grpo_has_the_gradient_of_rows() -> None:
    example = load("plain_grpo")
    args = argparse.Namespace(
        model=None, generations=4, completion_tokens=6, wave_tokens=12, clip=0.2, learning_rate=0.0, prompts=2
    )
    torch.manual_seed(0)
    model, tokenizer = example.build(args)
    plain = augtree_fx.restore(copy.deepcopy(model))
    rollout = example.sample(model.eval(), tokenizer, example.QUESTIONS[:2], args)
    rollout.advantages = torch.arange(8.0) - 3.5  # rewards of random weights may be equal, and tell nothing
    layout = augtree_fx.TreeLayout.from_groups(rollout.prompts, rollout.responses)
    old = example.old_logprobs(model, layout, args) + 0.05 * torch.randn(layout.shape[1])
    loss, norm = example.update(model, torch.optim.SGD(model.parameters(), lr=0.0), layout, rollout, old, args)

    expected = torch.zeros(())
    pairs = [
        (prompt, response)
        for prompt, group in zip(rollout.prompts, rollout.responses, strict=True)
        for response in group
    ]
    num_tokens, begin = sum(len(response) for _, response in pairs), 0
    for advantage, (prompt, response) in zip(rollout.advantages, pairs, strict=True):
        logits = plain(torch.cat([prompt, response])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        slots = slice(begin + len(prompt), begin + len(prompt) + len(response))
        ratio = (logprobs - old[slots]).exp()
        clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
        expected = expected - torch.minimum(ratio * advantage, clipped * advantage).sum() / num_tokens
        begin = slots.stop
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)
    expected_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    assert norm == pytest.approx(expected_norm.item(), rel=1e-4)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
