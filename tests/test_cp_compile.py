"""torch.compile of a model on a mesh of 2 and 3 gloo ranks: exact in float64, and one graph for all batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import families
import pytest
import torch
from cp_workers import averaged, model_and_truth, parallel_model
from ranks import Ranks
from torch._dynamo.utils import counters

import augtree_fx
from augtree_fx import CostModel, TreeLayout

EXACT = 1e-10  # float64 throughout, sums in another order
Found = tuple[list[float], list[int], dict[str, int]]  # largest errors, graphs so far, breaks


def compiled_errors(name: str, backend: str, seeds: list[int], *, explicit: bool, **options: Any) -> Found:
    """Batches of depth 2 and 3 by turns, through one compiled model."""
    torch._dynamo.reset()
    counters.clear()
    plain, _, _ = model_and_truth(name, 2, "right")
    model = parallel_model(plain, **options)
    compiled = torch.compile(
        model, dynamic=True, backend=backend, fullgraph=explicit and name != "deepseek_v3"
    )  # its experts break graphs
    errors, graphs = [], []
    for seed in seeds:
        batch = families.padded(families.rollout(2 + seed % 2, seed), "right")
        with families.KeepFloat64():
            truth = families.reference(plain, batch)
        if explicit:
            layout = TreeLayout.from_padded(batch.input_ids, batch.attention_mask, costs=CostModel.free())
            packed = augtree_fx.pack(model, layout)
            logits = packed.show(compiled(**packed.arguments)).logits
        else:
            logits = compiled(**batch.inputs(), use_cache=False).logits
        errors.append(
            max(families.errors(averaged(families.result_of(model, batch.rows_of(logits), batch)), truth).values())
        )
        graphs.append(counters["stats"]["unique_graphs"])
    breaks = dict(counters["graph_break"])
    torch._dynamo.reset()
    return errors, graphs, breaks


def compiled_in_options(name: str, backend: str, seeds: list[int], explicit: bool, options: dict[str, Any]) -> Found:
    return compiled_errors(name, backend, seeds, explicit=explicit, **options)


@pytest.mark.parametrize(
    ("num_ranks", "schedule"),
    [
        (3, "rotate_kv"),
        pytest.param(2, "gather_kv", marks=pytest.mark.slow),
        pytest.param(3, "move_q", marks=pytest.mark.slow),
        pytest.param(3, "gather_kv", marks=pytest.mark.slow),
    ],
)
def test_explicit_layouts_are_one_graph(worlds: Callable[[int], Ranks], num_ranks: int, schedule: str) -> None:
    """What differs between batches is data: no batch after the first one is compiled, on any rank."""
    arguments = ("llama", "aot_eager", [0, 1, 2, 3, 4, 5], True, {"schedule": schedule})
    for errors, graphs, breaks in worlds(num_ranks).run(compiled_in_options, *arguments, seconds=200):
        assert max(errors) <= EXACT and graphs == [1] * 6 and not breaks, (errors, graphs, breaks)


@pytest.mark.parametrize(("num_ranks", "rows"), [(2, "replicated"), pytest.param(3, "pooled", marks=pytest.mark.slow)])
def test_rows_have_one_break(worlds: Callable[[int], Ranks], num_ranks: int, rows: str) -> None:
    """Detection runs between two graphs. Pooled: the same rows on every rank, whose loss then counts once for each."""
    arguments = ("llama", "aot_eager", [0, 1, 2, 3], False, {"rows": rows})
    for errors, graphs, breaks in worlds(num_ranks).run(compiled_in_options, *arguments, seconds=200):
        assert max(errors) <= EXACT and graphs[0] == graphs[-1], (errors, graphs)
        assert len(breaks) == 1 and "pack" in next(iter(breaks)), breaks


@pytest.mark.slow
def test_windows(worlds: Callable[[int], Ranks]) -> None:
    """Keys that a window reaches are fetched, so many as each rank needs; the first graph is of one batch's size."""
    arguments = ("mistral", "aot_eager", [0, 1, 2, 3], True, {})
    for errors, graphs, breaks in worlds(3).run(compiled_in_options, *arguments, seconds=200):
        assert max(errors) <= EXACT and graphs[-1] == graphs[1] <= 2 and not breaks, (errors, graphs, breaks)


@pytest.mark.slow
def test_inductor(worlds: Callable[[int], Ranks]) -> None:
    arguments = ("llama", "inductor", [0, 1, 2], True, {})
    for errors, graphs, breaks in worlds(2).run(compiled_in_options, *arguments, seconds=400):
        assert max(errors) <= EXACT and graphs == [1] * 3 and not breaks, (errors, graphs, breaks)


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [False, True])
def test_latents_are_expanded_before_they_travel(worlds: Callable[[int], Ranks], explicit: bool) -> None:
    """Models with latents, too: keys and values travel in a compiled graph. Norms compute in float32."""
    arguments = ("deepseek_v3", "aot_eager", [0, 1], explicit, {})
    for errors, _, _ in worlds(2).run(compiled_in_options, *arguments, seconds=200):
        assert max(errors) <= 1e-4
