"""Waves, budgets of memory, offloaded activations and the clock of `measure` on a CUDA device; skipped without one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import families
import pytest
import torch
from torch import Tensor, nn
from wave_reference import FREE, backward_of, by_rows, groups_case, run_of

import augtree_fx
from augtree_fx.transforms import find_stack
from augtree_fx.transforms.install import STATE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 2**20
PROMPT, RESPONSES, RESPONSE = 4096, 12, 1024


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def tiny(checkpointing: bool = False, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> nn.Module:
    """A Llama on the GPU; by default eight layers of a size at which a token's activations are some kilobytes."""
    given = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
             "num_key_value_heads": 2, "max_position_embeddings": 8192} | sizes  # fmt: skip
    model = families.build("llama", **given).to("cuda", dtype).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def group() -> Any:
    case = groups_case([run_of(PROMPT, 0)], [[run_of(RESPONSE - 8 * n, n) for n in range(RESPONSES)]])
    layout = augtree_fx.TreeLayout.from_groups(
        [run_of(PROMPT, 0)], [[run_of(RESPONSE - 8 * n, n) for n in range(RESPONSES)]], device="cuda"
    )
    return layout, case.weight.float().cuda()


def update(model: nn.Module, layout: Any, weight: Tensor, **options: Any) -> tuple[int, int, dict[str, Tensor]]:
    """Peak bytes beyond what was there, waves, and gradients."""
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    before, number = torch.cuda.memory_allocated(), 0
    torch.cuda.reset_peak_memory_stats()
    with augtree_fx.prefill(model, layout, **options) as tree:
        for wave in tree.waves():
            number += 1
            backward_of(wave, weight)
            del wave
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return peak, number, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest error of a parameter's gradient, over its norm."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - x).norm() / x.norm()) for name, x in expected.items())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_offloaded_activations_give_the_same_gradients_in_less_memory(checkpointing: bool) -> None:
    model = augtree_fx.transform(tiny(checkpointing), costs=FREE)
    layout, weight = group()
    keep, _, expected = update(model, layout, weight, max_wave_tokens=2048)
    for _ in range(3):  # copies and their memory are reused
        offload, _, found = update(model, layout, weight, max_wave_tokens=2048, activations="offload")
        # The same kernels on the same numbers; atomics of backward kernels and of sums differ in the last bits.
        assert furthest(found, expected) <= 2e-2
    assert offload < keep


def test_offload_reads_what_it_wrote() -> None:
    """In float32, against rows: no tensor is read before its copy is there."""
    plain = tiny(dtype=torch.float32, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    case = groups_case([run_of(300, 0)], [[run_of(40, n) for n in range(4)]])
    truth = by_rows(copy.deepcopy(plain).cpu(), case)
    model = augtree_fx.transform(plain, costs=FREE, kernel="reference")
    layout = augtree_fx.TreeLayout.from_groups([run_of(300, 0)], [[run_of(40, n) for n in range(4)]], device="cuda")
    for _ in range(5):
        _, _, found = update(model, layout, case.weight.float().cuda(), max_wave_tokens=80, activations="offload")
        assert furthest({name: x.cpu() for name, x in found.items()}, truth.gradients) <= 1e-4


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_waves_stay_in_a_budget_and_make_use_of_it(checkpointing: bool, activations: str) -> None:
    model = augtree_fx.transform(tiny(checkpointing), costs=FREE)
    layout, weight = group()
    options: dict[str, Any] = {"activations": activations}
    if activations == "recompute":
        options["max_prompt_tokens"] = 1024
    update(model, layout, weight, memory="64GiB", **options)
    whole, number, _ = update(model, layout, weight, memory="64GiB", **options)
    assert number == 1
    budget = int(0.8 * whole)
    peak, number, _ = update(model, layout, weight, memory=budget, **options)
    chosen = getattr(find_stack(model), STATE).budget
    assert number > 1 and 0.5 * budget < peak <= budget, (peak / MIB, str(chosen))


def test_auto_takes_most_of_what_is_free() -> None:
    model = augtree_fx.transform(tiny(True), costs=FREE)
    layout, weight = group()
    _, number, _ = update(model, layout, weight, memory="auto")
    free, total = torch.cuda.mem_get_info()
    budget = getattr(find_stack(model), STATE).budget
    assert number == 1 and 0.8 * total < budget.memory < 0.9 * total
    held = torch.empty(free - 1200 * MIB, dtype=torch.uint8, device="cuda")
    peak, number, _ = update(model, layout, weight, memory="auto")
    budget = getattr(find_stack(model), STATE).budget
    assert peak <= budget.memory < 0.2 * total and held.numel(), str(budget)


def test_the_clock_of_measure_agrees_with_events_around_the_step() -> None:
    model = augtree_fx.transform(tiny(), costs=FREE)
    rows = torch.cat([run_of(PROMPT, 0).expand(8, -1), torch.stack([run_of(512, n) for n in range(8)])], dim=1).cuda()

    def step() -> None:
        model(rows, labels=rows, use_cache=False).loss.backward()

    step()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    with augtree_fx.measure(model, planner=augtree_fx.Planner("h200")):
        begin.record()
        step()
        end.record()
    timings = augtree_fx.explain(model).timings
    assert timings is not None
    measured = {row.name: row.measured_ms for row in timings.rows}
    outside = begin.elapsed_time(end)
    assert 0.8 * outside <= measured["step"] <= 1.05 * outside, (outside, str(timings))
    parts = ("packing", "attention", "communication", "other layers", "head and loss")
    assert sum(measured[name] for name in parts) == pytest.approx(measured["step"], rel=1e-3)
    assert 0 < measured["attention"] < measured["step"] and measured["communication"] == 0
    assert timings["step"].predicted_ms is not None
