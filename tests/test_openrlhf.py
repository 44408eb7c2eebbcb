"""OpenRLHF's real `Actor` and replay buffer with `integrations.openrlhf.install`: what OpenRLHF alone computes.

Run on one CPU rank: loading, LoRA, padded and packed inputs, updates with entropy, the shuffle, dynamic micro-batches.
Not run: Ray workers (and so the hook on their `DataLoader` in place), DeepSpeed, ring attention and GPUs.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import openrlhf_runs
import pytest
import torch
from ranks import Ranks
from trl_runs import model

from augtree_fx.integrations.hooks import Hook, install_hooks, remove_hooks

installed = pytest.mark.skipif(
    importlib.util.find_spec("openrlhf") is None,
    reason="openrlhf is not installed (pip install --no-deps openrlhf==0.11.2)",
)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(1, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


@installed
@pytest.mark.parametrize(
    "changes",
    [{}, {"packing_samples": True}, {"packing_samples": True, "lora_rank": 4, "target_modules": "all-linear"}],
    ids=["padded", "packed", "LoRA"],
)
def test_the_actor_computes_what_openrlhf_does(one_rank: Ranks, tmp_path: Any, changes: dict[str, Any]) -> None:
    model("qwen3", torch.float32).save_pretrained(tmp_path)
    expected, got = (one_rank.run(openrlhf_runs.run, str(tmp_path), hooked, changes)[0] for hooked in (False, True))
    assert got.losses == pytest.approx(expected.losses, rel=2e-5)  # float32, since `Actor` loads no float64
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=2e-5)
    assert min(expected.grad_norms) > 1e-3
    assert got.names == expected.names
    assert (got.num_shared, got.fallbacks) == (3, {})


@installed
def test_the_shuffle_keeps_groups_together(one_rank: Ranks) -> None:
    batches = one_rank.run(openrlhf_runs.sampled)[0]
    assert sorted(batches) == [[group] * 4 for group in range(4)]


@installed
def test_dynamic_batches_hold_whole_groups(one_rank: Ranks) -> None:
    chunks, weights, plain = one_rank.run(openrlhf_runs.in_dynamic_batches)[0]
    assert len(chunks) == len(plain) == 4
    assert sorted(map(sorted, chunks)) == [list(range(4 * group, 4 * group + 4)) for group in range(4)]
    assert sorted(map(sorted, chunks)) != sorted(map(sorted, plain))
    assert weights == [0.25] * 4


def test_hooks_wait_for_their_module_and_are_undone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "framework_of_this_test.py").write_text("class Maker:\n    def make(self):\n        return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "framework_of_this_test"
    hooks = [Hook(name, "Maker.make", lambda original: lambda self: original(self) + 1)]
    finders = list(sys.meta_path)
    install_hooks(hooks)
    install_hooks(hooks)
    assert name not in sys.modules
    framework = __import__(name)
    try:
        install_hooks(hooks)
        assert framework.Maker().make() == 2
        remove_hooks(hooks)
        assert framework.Maker().make() == 1
        install_hooks(hooks)
        assert framework.Maker().make() == 2
    finally:
        remove_hooks(hooks)
        del sys.modules[name]
    assert sys.meta_path == finders
