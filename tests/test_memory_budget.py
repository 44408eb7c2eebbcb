"""Waves sized by a budget of memory: what is allocated stays in it, and more of it means fewer waves.

Memory is that of all tensors that live, read off the operators of an update on the CPU.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Iterator
from typing import Any

import families
import pytest
import torch
from families import one_thread, without_upcasts
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from wave_reference import FREE, assert_equal, backward_of, by_rows, groups_case, in_waves, run_of, shared

import augtree_fx
from augtree_fx.memory import budget_bytes, shown

CASE = groups_case([run_of(60, 0)], [[run_of(20 + n, n) for n in range(12)]])


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


class Live(TorchDispatchMode):
    """Bytes of tensors made inside that live, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage()._cdata for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        found = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(found):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in known | self.seen:
                self.add(x.untyped_storage())
        return found

    def add(self, storage: torch.UntypedStorage) -> None:
        number, size = storage._cdata, storage.nbytes()
        self.seen.add(number)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

        def gone() -> None:
            self.bytes -= size
            self.seen.discard(number)

        weakref.finalize(storage, gone)


def model_of(checkpointing: bool) -> nn.Module:
    model = families.build("llama", hidden_size=64, intermediate_size=256, num_hidden_layers=6).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return augtree_fx.transform(model, costs=FREE)


def update(model: nn.Module, memory: int | str, **options: Any) -> tuple[int, int]:
    """Bytes that were live at the peak, and how many waves there were."""
    model.zero_grad()
    weight, number = CASE.weight.float(), 0
    with Live() as live, augtree_fx.prefill(model, CASE.layout, memory=memory, **options) as tree:
        for wave in tree.waves():
            number += 1
            backward_of(wave, weight)
            del wave
    return live.peak, number


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"activations": "recompute", "max_prompt_tokens": 20}], ids=["keep", "recompute"]
)
def test_what_lives_stays_in_the_budget(checkpointing: bool, options: dict[str, Any]) -> None:
    model, numbers = model_of(checkpointing), []
    update(model, "64MiB", **options)  # the first one counts bytes a token, on tokens of its own
    for mebibytes in (2.6, 3.2, 64) if checkpointing else (6, 9, 64):
        peak, number = update(model, f"{mebibytes}MiB", **options)
        numbers.append(number)
        budget = model.model._augtree_state.budget
        assert peak <= budget.memory, (shown(peak), str(budget))
        assert number == 1 or peak > 0.6 * budget.memory, (shown(peak), str(budget))  # and it is made use of
    assert numbers[0] > numbers[1] > numbers[2] == 1


@pytest.mark.parametrize("checkpointing", [True, False])
def test_one_forward_stays_in_the_budget(checkpointing: bool) -> None:
    model, sizes = model_of(checkpointing).model, []
    rows = torch.cat([run_of(60, 0).expand(12, -1), torch.stack([run_of(24, n) for n in range(12)])], dim=1)
    for mebibytes in (3.2, 4, 64) if checkpointing else (6, 9, 64):
        augtree_fx.transform(model, costs=FREE, memory=f"{mebibytes}MiB")
        model.zero_grad()
        with Live() as live:
            model(rows, use_cache=False).last_hidden_state.square().sum().backward()
        budget = model._augtree_state.budget
        sizes.append(budget.max_tokens)
        assert live.peak <= budget.memory, (shown(live.peak), str(budget))
        assert budget.max_tokens is None or live.peak > 0.6 * budget.memory, (shown(live.peak), str(budget))
    assert sizes[0] < sizes[1] and sizes[2] is None
    assert "last budget of memory: all in one forward" in str(augtree_fx.explain(model))


def test_gradients_are_those_of_the_rows() -> None:
    plain = without_upcasts("llama")
    model = shared(copy.deepcopy(plain))
    assert_equal(in_waves(model, CASE, memory="5MiB"), by_rows(plain, CASE))
    said = str(augtree_fx.explain(model))
    assert re.search(r"last budget of memory: waves of \d+ tokens, .* each: 5.0 MiB - prompts .* - gradients of", said)
    assert model.model._augtree_state.budget.max_tokens < sum(range(20, 32))
    with torch.no_grad(), augtree_fx.prefill(model, CASE.layout, memory="5MiB") as tree:  # nothing is kept
        assert len(list(tree.waves())) == 1


def test_what_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(False)
    text = r"memory must hold prompts and a wave of at least 1 token, which takes .*; 3.0 MiB - prompts .* leaves -"
    with pytest.raises(ValueError, match=text), augtree_fx.prefill(model, CASE.layout, memory="3MiB"):
        pass
    assert all(parameter.grad is None for parameter in model.parameters())
    update(model, "2.9MiB", activations="recompute")
    assert "a response of 31 tokens, which is a wave of its own, may take 1.5 MiB, " in caplog.text
    assert "of memory are left; checkpoint the layers, or give more" in caplog.text
    assert "the backward of the prompts may take 2.8 MiB, " in caplog.text
    assert "of memory are left; max_prompt_tokens of augtree_fx.prefill cuts them" in caplog.text


def test_what_is_not_a_budget() -> None:
    model = model_of(False)
    for memory in (0, -1, True, 1.5, "much", "0GiB", "4GB"):
        text = f"memory must be 'auto', a number of bytes, or a string like '40GiB', got {memory!r}"
        with pytest.raises(ValueError, match=re.escape(text)):
            augtree_fx.prefill(model, CASE.layout, memory=memory)
        with pytest.raises(ValueError, match=re.escape(text)):
            augtree_fx.transform(model, memory=memory)
    both = r"max_wave_tokens=12 and memory='1GiB'; leave one out"
    with pytest.raises(ValueError, match=both):
        augtree_fx.prefill(model, CASE.layout, max_wave_tokens=12, memory="1GiB")
    with pytest.raises(ValueError, match=both):
        augtree_fx.transform(model, max_wave_tokens=12, memory="1GiB")
    with augtree_fx.prefill(model, CASE.layout, memory="1GiB", on_unused="skip") as tree:
        with pytest.raises(ValueError, match=both):
            tree.waves(12)
    with pytest.raises(
        ValueError, match="memory='auto' reads the free memory of a CUDA device, and the model is on cpu"
    ):
        augtree_fx.prefill(model, CASE.layout, memory="auto").__enter__()


def test_budgets_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda:0")
    assert [budget_bytes(x, cpu, 0.9) for x in (5, "1 KiB", "1.5MiB", "2GiB")] == [5, 1024, 3 * 2**19, 2**31]
    assert [shown(x) for x in (512, 2**20, -3 * 2**29)] == ["0.5 KiB", "1.0 MiB", "-1.5 GiB"]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 40)
    assert budget_bytes("auto", cuda, 0.5) == 65  # what the allocator holds and nobody has is free too
