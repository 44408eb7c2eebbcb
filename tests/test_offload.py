"""Order of copies of `activations="offload"`, by a stand-in for a device that copies when it is waited for.

Until then the target of a copy is NaN.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from cp_workers import wave_errors
from families import one_thread, without_upcasts
from ranks import Ranks
from test_parallel_wrappers import fsdp2
from torch import Tensor
from wave_reference import assert_equal, by_rows, groups_case, in_waves, run_of, shared

from augtree_fx import offload as offload_module
from augtree_fx import stages
from augtree_fx.offload import Offload


@pytest.fixture(autouse=True)
def small_tensors_move(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(offload_module, "SMALLEST_BYTES", 0)
    with one_thread():
        yield


class LateMover:
    """Copies that happen when they are waited for; ``log`` says what was asked for, by number of the tensor."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.number: dict[int, int] = {}

    def moves(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point()

    def out(self, tensor: Tensor) -> tuple[Tensor, Any]:
        host = torch.full_like(tensor, torch.nan)
        self.number[id(host)] = len(self.number)
        return host, self._later("out", host, tensor, self.number[id(host)])

    def back(self, host: Tensor, like: Tensor) -> tuple[Tensor, Any]:
        tensor = torch.full_like(host, torch.nan)
        return tensor, self._later("back", tensor, host, self.number[id(host)])

    def wait(self, copied: list[Any]) -> None:
        while copied:
            name, target, source, number = copied.pop()
            target.copy_(source)
            self.log.append((f"{name} done", number))

    def _later(self, name: str, target: Tensor, source: Tensor, number: int) -> list[Any]:
        self.log.append((name, number))
        return [(name, target, source, number)]


def chain(offload: Offload, num_layers: int) -> tuple[Tensor, Tensor]:
    """Some layers that save one tensor each, of one size."""
    x = torch.linspace(-1, 1, 8, dtype=torch.float64, requires_grad=True)
    y = x
    with offload.hooks():
        for _ in range(num_layers):
            y = torch.tanh(y)
    return x, y


def test_copies_are_in_order_and_ahead() -> None:
    mover = LateMover()
    x, y = chain(offload := Offload(mover, lambda tensor: False, 4), 4)
    # One tensor is under way at a time; the computation waits for it before the next but one.
    began = [("out", 0), ("out", 1), ("out done", 0), ("out", 2), ("out done", 1), ("out", 3), ("out done", 2)]
    assert mover.log == [*began, ("out done", 3)] and not offload._leaving
    mover.log.clear()
    y.sum().backward()
    back = [number for name, number in mover.log if name == "back"]
    read = [number for name, number in mover.log if name == "back done"]
    assert back == read == [3, 2, 1, 0]
    for number in range(3):  # asked for before the backward comes to the layer in front of it
        assert mover.log.index(("back", number)) < mover.log.index(("back done", number))
        assert mover.log.index(("back", number)) == mover.log.index(("back done", number + 1)) + 1
    expected = torch.linspace(-1, 1, 8, dtype=torch.float64, requires_grad=True)
    z = expected
    for _ in range(4):
        z = torch.tanh(z)
    z.sum().backward()
    torch.testing.assert_close(x.grad, expected.grad, rtol=0, atol=0)
    assert offload._ahead_bytes == 0 and all(entry.device is None for entry in offload._entries)


def test_what_is_saved_twice_is_copied_once_and_a_graph_may_be_kept() -> None:
    mover = LateMover()
    x = torch.randn(8, dtype=torch.float64, requires_grad=True)
    with (offload := Offload(mover, lambda tensor: False, 1)).hooks():
        y = torch.tanh(x)
        z = (y * y + y.exp()).sum()
    assert sum(name == "out" for name, _ in mover.log) == 2  # tanh's output, saved three times, and exp's
    for _ in range(2):
        x.grad = None
        z.backward(retain_graph=True)
        wanted = (2 * y + y.exp()).detach() * (1 - y.detach() ** 2)
        torch.testing.assert_close(x.grad, wanted)
    assert all(entry.device is None for entry in offload._entries)


def test_what_stays_and_what_is_left_over() -> None:
    mover = LateMover()
    x, y = chain(offload := Offload(mover, lambda tensor: bool(tensor.abs().max() < 0.7), 2), 3)
    assert sum(name == "out" for name, _ in mover.log) == 1  # tanh(1) = 0.76, tanh(0.76) = 0.64
    del y
    offload.close()
    assert ("out done", 0) in mover.log and not offload._entries


@pytest.mark.parametrize("options", [{}, {"max_prompt_tokens": 3}], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_prefill(options: dict[str, Any], checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    movers: list[LateMover] = []
    monkeypatch.setattr(stages, "CudaMover", lambda: movers.append(LateMover()) or movers[-1])
    plain = without_upcasts("llama")
    model = shared(copy.deepcopy(plain))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    case = groups_case([run_of(7, 1), run_of(5, 2)], [[run_of(4, 3), run_of(2, 4)], [run_of(3, 5), run_of(3, 6)]])
    assert_equal(in_waves(model, case, 4, activations="offload", **options), by_rows(plain, case))
    for mover in movers:
        for name in ("out", "back"):
            asked, done = ([n for what, n in mover.log if what == x] for x in (name, f"{name} done"))
            assert asked and sorted(asked) == sorted(done)
        outward = [number for name, number in mover.log if name == "out"]
        assert len(set(outward)) == len(outward)
    assert len(movers) == (1 if not options else 4)


def sharded_on_a_mesh() -> tuple[dict[str, float], list[tuple[int, ...]]]:
    """Errors of prefill under FSDP2 over the ranks of a mesh, and shapes of what left the device."""
    shapes: list[tuple[int, ...]] = []

    class Mover(LateMover):
        def out(self, tensor: Tensor) -> tuple[Tensor, Any]:
            shapes.append(tuple(tensor.shape))
            return super().out(tensor)

    with mock.patch.object(stages, "CudaMover", Mover), mock.patch.object(offload_module, "SMALLEST_BYTES", 0):
        errors = wave_errors("llama", 3, 12, "rotate_kv", fsdp2, activations="offload")
    return errors, shapes


def test_prefill_on_a_mesh_under_fsdp2(worlds: Callable[[int], Ranks]) -> None:
    """Activations of a rank's share leave the device, of every kind that a layer saves; gathered weights do not."""
    for errors, shapes in worlds(3).run(sharded_on_a_mesh):
        assert max(errors.values()) <= 1e-10
        for size in (64, 96):  # hidden states, inside of the MLP: of three layers, of 8 of the 23 tokens of prompts
            assert sum(shape == (1, 8, size) for shape in shapes) >= 3, shapes
        assert not [shape for shape in shapes if shape in ((64, 64), (32, 64), (96, 64), (64, 96), (64,))]
