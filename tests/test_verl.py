"""verl's real `FSDPEngine` with its ``external_lib``: log-probs, losses, gradient norms and weight names of verl alone.

Run on one CPU rank: building, LoRA, FSDP2, dynamic micro-batches, padded and packed inputs, fused kernels, scoring,
adapters switched off, updates, the names of synchronised weights. Not run: Ray workers, rollouts, FSDP1 and GPUs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed (pip install verl==0.9.1)", allow_module_level=True)

import verl_runs
from ranks import Ranks
from trl_runs import model
from verl_runs import Outcome


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(1, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tied: verl's fused kernels read the head's weight, which its FSDP2 leaves sharded where it is not tied."""
    folder = str(tmp_path_factory.mktemp("qwen3"))
    model("qwen3", torch.float32, tie_word_embeddings=True).save_pretrained(folder)
    return folder


def both(ranks: Ranks, path: str, settings: dict[str, Any] | None = None, **changes: Any) -> tuple[Outcome, Outcome]:
    expected, got = (
        ranks.run(verl_runs.run, path, hooked, settings or {}, changes, seconds=120)[0] for hooked in (False, True)
    )
    return expected, got


def test_a_limit_that_no_group_fits_leaves_whole_halves(one_rank: Ranks, checkpoint: str) -> None:
    expected, got = both(one_rank, checkpoint, {"max_token_len_per_gpu": 180})
    assert got.losses == pytest.approx(expected.losses, rel=2e-5)
    assert {size for sizes in got.groups for size in sizes} == {2}


def test_installing_is_undone(one_rank: Ranks) -> None:
    assert one_rank.run(verl_runs.installed_and_undone) == [(True, True)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_remove_padding": True},
        {"use_remove_padding": True, "lora_rank": 4},
        # Last of all tests, because verl replaces the forward of the model's class for the rest of the process.
        {"use_remove_padding": True, "use_fused_kernels": True},
    ],
    ids=["padded", "packed", "LoRA", "fused kernels"],
)
def test_the_engine_computes_what_verl_does(one_rank: Ranks, checkpoint: str, changes: dict[str, Any]) -> None:
    expected, got = both(one_rank, checkpoint, **changes)
    # float32: verl's FSDP engine takes no float64
    assert got.losses == pytest.approx(expected.losses, rel=2e-5)
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=2e-5)
    assert min(expected.grad_norms) > 1e-3
    torch.testing.assert_close(got.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)
    if "lora_rank" in changes:
        torch.testing.assert_close(got.reference, expected.reference, rtol=1e-5, atol=1e-5)
    assert got.names == expected.names
    assert expected.groups != got.groups and all(size == 4 for sizes in got.groups for size in sizes)
    assert got.num_shared == len(got.groups) * (5 if "lora_rank" in changes else 4) // 3
    assert got.fallbacks == {}
