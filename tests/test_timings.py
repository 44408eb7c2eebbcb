"""`measure`: what is timed, how parts add up, what they are compared with, and that nothing of it stays behind."""

from __future__ import annotations

import copy
import pickle
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3Config, Qwen3ForCausalLM

import augtree_fx
from augtree_fx import CostModel, Planner, Timings, TreeLayout
from augtree_fx.dtensor_ops import collectives
from augtree_fx.planner import Execution
from augtree_fx.planner.memory import MemoryModel
from augtree_fx.recorder import Clock, Phase, Record, Recorder
from augtree_fx.timings import measured_parts
from augtree_fx.transforms import ReplayContext, find_stack
from augtree_fx.transforms.install import STATE

LAYERS = 2
WAIT = 0.05  # seconds that a test puts into one part of a step


def tiny() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64,
        num_hidden_layers=LAYERS,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def group(branches: int = 3, prompt: int = 40, response: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(64, (1, prompt), generator=generator).expand(branches, -1)
    own = torch.randint(64, (branches, response), generator=generator)
    own[:, 0] = torch.arange(branches)
    return torch.cat([shared, own], 1)


def transformed(**options: Any) -> Any:
    return augtree_fx.transform(tiny(), costs=CostModel.free(), **options)


def step(model: Any, rows: Tensor) -> None:
    model(rows, labels=rows).loss.backward()


def timings(model: Any) -> Timings:
    found = augtree_fx.explain(model).timings
    assert found is not None
    return found


def record_of(model: Any) -> Record:
    return getattr(find_stack(model), STATE).measured.last


def test_parts_are_sums_of_spans() -> None:
    """Stamps of a stubbed clock: waits inside of attention are no attention, waits outside of it no other layers."""
    waited: list[str] = []
    clock = Clock(lambda: 0.0, lambda begin, end: end - begin, lambda: waited.append("device"))
    spans = {
        Phase.PACKING: [(100.0, 102.0)], Phase.FORWARD: [(102.0, 110.0)], Phase.BACKWARD: [(115.0, 130.0)],
        Phase.ATTENTION: [(103.0, 105.0), (120.0, 126.0)], Phase.COMMUNICATION: [(103.5, 104.0), (108.0, 109.0)],
    }  # fmt: skip
    parts = measured_parts(Record(spans), clock)
    assert waited == ["device"]
    assert parts == {
        "packing": 2.0, "attention": 7.5, "communication": 1.5, "other layers": 14.0, "head and loss": 5.0,
        "forward": 8.0, "backward": 15.0, "step": 30.0,
    }  # fmt: skip
    assert measured_parts(Record(), clock) == {}
    no_backward = Record(spans | {Phase.BACKWARD: [], Phase.ATTENTION: [(103.0, 105.0)]})
    parts = measured_parts(no_backward, clock)
    assert parts["step"] == 10.0 and parts["other layers"] == 5.0 and "head and loss" not in parts


def test_on_cuda_events_are_recorded_and_waited_for_when_read() -> None:
    """A stand-in for CUDA: nothing waits until the spans are read, then the device does, once."""
    said: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = float(len(said))

        def record(self) -> None:
            said.append("record")

        def elapsed_time(self, end: Event) -> float:
            assert "wait" in said
            return end.at - self.at

    device = torch.device("cuda", 0)
    with (
        mock.patch.object(torch.cuda, "Event", Event),
        mock.patch.object(torch.cuda, "synchronize", lambda where: said.append("wait") if where == device else None),
    ):
        recorder = Recorder(Clock.of(device))
        with recorder.span(Phase.FORWARD), recorder.span(Phase.ATTENTION):
            pass
        assert said == ["record"] * 4
        parts = measured_parts(recorder.last, recorder.clock)
    assert said == [*["record"] * 4, "wait"] and parts["forward"] == 3.0 and parts["attention"] == 1.0


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_has_every_part_and_the_gradients_of_the_plain_model(checkpointing: bool) -> None:
    plain, model, rows = tiny(), transformed(), group()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    step(plain, rows)
    with augtree_fx.measure(model, planner=Planner("cpu")):
        step(model, rows)
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6)
    seen, record = timings(model), record_of(model)
    assert len(record.spans[Phase.ATTENTION]) == LAYERS * (3 if checkpointing else 2)
    assert record.checkpointing == checkpointing and record.gradients
    names = ("attention", "communication", "other layers", "head and loss", "packing")
    measured = {row.name: row.measured_ms for row in seen.rows}
    assert all(measured[name] > 0 for name in names if name != "communication") and measured["communication"] == 0
    assert sum(measured[name] for name in names) == pytest.approx(measured["step"])
    assert measured["step"] <= measured["block"]
    predicted = {row.name: row.predicted_ms for row in seen.rows}
    assert sum(predicted[name] for name in names[:4]) == pytest.approx(predicted["step"])
    execution = Execution(checkpointing=checkpointing)
    shape = augtree_fx.ReplayShape.from_layout(TreeLayout.from_padded(rows, costs=CostModel.free()))
    config = augtree_fx.ModelShape.from_model(model)
    plan = Planner("cpu", execution=execution, bucketed=False).plan(shape, config, world_size=1)
    assert predicted["step"] == pytest.approx(plan.total_us / 1e3) or not plan.reuse


@pytest.mark.parametrize("part", ["attention", "other layers", "head and loss", "packing"])
def test_time_is_found_where_it_is_spent(part: str) -> None:
    model, rows = transformed(), group()
    stack = find_stack(model)
    step(model, rows)  # what happens once

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            time.sleep(WAIT)
            return function(*arguments, **options)

        return run

    places = {
        "attention": lambda: mock.patch(
            "augtree_fx.tree_attention.forward", late(augtree_fx.ops.tree_attention.forward)
        ),
        "packing": lambda: mock.patch.object(TreeLayout, "from_rows", late(TreeLayout.from_rows)),
        "other layers": lambda: mock.patch.object(stack.layers[0].mlp, "forward", late(stack.layers[0].mlp.forward)),
        "head and loss": lambda: mock.patch.object(model.lm_head, "forward", late(model.lm_head.forward)),
    }
    with places[part](), augtree_fx.measure(model):
        step(model, rows)
    measured = {row.name: row.measured_ms or 0.0 for row in timings(model).rows}
    assert measured[part] >= 1e3 * WAIT * (LAYERS if part == "attention" else 1)
    assert measured["step"] >= measured[part]


def test_nothing_is_recorded_outside_of_the_block() -> None:
    model, rows = transformed(), group()
    assert augtree_fx.explain(model).timings is None and "last step" not in str(augtree_fx.explain(model))
    with augtree_fx.measure(model):
        step(model, rows)
    before = timings(model)
    contexts: list[ReplayContext] = []
    hook = (
        find_stack(model)
        .layers[0]
        .self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: contexts.append(kwargs["augtree_context"]), with_kwargs=True
        )
    )
    step(model, rows)
    hook.remove()
    assert [context.recorder for context in contexts] == [None] and not collectives._WATCHED
    assert timings(model) == before
    with augtree_fx.measure(model), torch.no_grad():
        model(rows)
    assert timings(model)["backward"].measured_ms is None and timings(model)["forward"].measured_ms


def test_batches_that_share_nothing_and_packed_calls() -> None:
    model, rows = transformed(), group()
    alone = torch.arange(12).view(2, 6)
    with augtree_fx.measure(model):
        step(model, alone)
    assert timings(model)["attention"].measured_ms is None and timings(model)["step"].measured_ms
    packed = augtree_fx.pack(model, TreeLayout.from_padded(rows, costs=CostModel.free()))
    with augtree_fx.measure(model, planner=Planner("cpu")):
        packed.show(model.model(**packed.arguments)).last_hidden_state.sum().backward()
    seen = timings(model)
    assert seen["attention"].measured_ms and seen["packing"].measured_ms == 0
    assert "the tree was not built in the forward" in seen.note


def test_waves() -> None:
    """In one forward all of them are the step; in `prefill` it is the last one, with its backward."""
    model, rows = transformed(max_wave_tokens=10), group(4)
    with augtree_fx.measure(model):
        step(model, rows)
    assert len(record_of(model).spans[Phase.ATTENTION]) > 3 * LAYERS and timings(model)["backward"].measured_ms
    augtree_fx.transform(model)
    layout = TreeLayout.from_padded(rows, costs=CostModel.free())
    with augtree_fx.measure(model), augtree_fx.prefill(model, layout) as tree:
        for wave in tree.waves(max_tokens=20):
            wave.logprobs().sum().backward()
        assert timings(model)["backward"].measured_ms
        assert len(record_of(model).spans[Phase.ATTENTION]) == 2 * LAYERS


def planned_by(planner: Planner, rows: Tensor, tokens: int) -> Any:
    """A model with a planner whose machine holds the model and so many branch tokens beside a prompt."""
    model = transformed(planner=planner)
    memory = MemoryModel.of(planner.costs(augtree_fx.ModelShape.from_model(model), world_size=1))
    limit = memory.peak_bytes(rows.shape[1] - 32, tokens, 1, waved=True)
    planner.hardware = replace(planner.hardware, memory_bytes=int(limit) + 1)
    with augtree_fx.measure(model):
        step(model, rows)
    return model


@pytest.mark.parametrize(
    ("prompt", "tokens", "said"),
    [(8, 128, "it takes rows by themselves in"), (600, 10**6, None), (600, 128, None)],
)
def test_a_plan_that_one_forward_cannot_obey(prompt: int, tokens: int, said: str | None) -> None:
    """Rows one after another are not what one forward does: the note says what ran."""
    rows = group(8, prompt, 32)
    execution = Execution(checkpointing=False, state_bytes_per_weight=2.0, usable_memory=1.0)
    model = planned_by(Planner("cpu", execution=execution, bucketed=False), rows, tokens)
    note = timings(model).note
    if said is None:
        assert note.startswith("predicted by the plan that ran, for")
    else:
        assert note.startswith(f"predicted by a plan that was not obeyed ({said}")
    assert str(augtree_fx.explain(model, rows[:2]).timings) == str(timings(model))  # of the step, not of these rows


def test_rounds_and_other_waves_are_named() -> None:
    """Plans of other batches stand for what a machine with less memory would be told."""
    model, rows = transformed(planner=Planner("cpu", bucketed=False)), group(4)
    with augtree_fx.measure(model):
        step(model, rows)
    planned, record = getattr(find_stack(model), STATE).planned, record_of(model)
    planned.last = replace(planned.last, reuse=True, num_rounds=3)
    assert "not obeyed (it takes trees in 3 rounds; all of them ran in one pass)" in timings(model).note
    planned.last = replace(planned.last, num_rounds=1)
    record.waves = 4
    assert "not obeyed (it takes one pass; branches ran in 4 waves beside all prompts)" in timings(model).note
    record.waves = None
    assert "not obeyed (no batch of rows was shared" in timings(model).note


def test_a_compiled_model_is_timed_as_a_block() -> None:
    model, rows = transformed(), group()
    compiled = torch.compile(model, backend="eager")
    with augtree_fx.measure(compiled):
        compiled(rows)
    seen = timings(model)
    assert [row.name for row in seen.rows] == ["block"] and seen["block"].measured_ms
    assert "torch.compile hides it" in seen.note


def test_copies_and_pickles_have_no_times() -> None:
    model = transformed()
    with augtree_fx.measure(model):
        step(model, group())
        inside = copy.deepcopy(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), inside):
        assert augtree_fx.explain(other).timings is None
        step(other, group())


def test_the_table() -> None:
    rows = (augtree_fx.timings.Timing("attention", 10.0, 12.5), augtree_fx.timings.Timing("block", 11.0, None))
    seen = Timings(rows, "of what")
    assert seen["attention"].error == pytest.approx(0.25) and seen["block"].error is None
    assert re.search(r"attention +10\.000 +12\.500 +\+25\.0%\nblock +11\.000 +-\nof what", str(seen))
    with pytest.raises(KeyError, match="timings have the rows attention, block, got 'merge'"):
        seen["merge"]


def test_errors() -> None:
    with pytest.raises(ValueError, match="is not transformed"), augtree_fx.measure(tiny()):
        pass
    model = transformed()
    with augtree_fx.measure(model), pytest.raises(ValueError, match="is measured already"), augtree_fx.measure(model):
        pass
    model.model.layers[0].to("meta")
    with pytest.raises(ValueError, match=r"one device, got \['cpu', 'meta'\]"), augtree_fx.measure(model):
        pass


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield found
    found.stop()


def on_two_ranks(options: dict[str, Any], planner: Planner | None) -> tuple[Timings, int, int]:
    """Timings of a step in which the second rank comes late to attention, spans of waits, and watched groups left."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = transformed(mesh=mesh["cp"], **options)
    rank = torch.distributed.get_rank()
    find_stack(model).layers[1].self_attn.register_forward_pre_hook(lambda *_: time.sleep(4 * WAIT * rank))
    step(model, group())
    with augtree_fx.measure(model, planner=planner):
        step(model, group())
    return timings(model), len(record_of(model).spans[Phase.COMMUNICATION]), len(collectives._WATCHED)


def test_waits_for_other_ranks_are_communication(ranks: Ranks) -> None:
    (first, spans, left), (second, _, _) = ranks.run(on_two_ranks, {"schedule": "rotate_kv"}, Planner("cpu"))
    assert spans >= 3 * LAYERS and left == 0
    waited, late = (found["communication"].measured_ms for found in (first, second))
    assert waited is not None and late is not None and waited >= 0.8 * 4e3 * WAIT
    assert first["attention"].measured_ms < waited  # the wait lies inside of attention and is taken out of it
    assert first["communication"].predicted_ms > 0 and "predicted for 1 x 2, rotate_kv of cpu" in first.note


def test_the_planner_of_the_model_is_what_is_compared(ranks: Ranks) -> None:
    """So small a batch is planned as rows by themselves."""
    (first, _, _), _ = ranks.run(on_two_ranks, {"planner": Planner("cpu")}, None)
    assert first["step"].predicted_ms and "predicted by a plan that was not obeyed" in first.note
    assert "(it takes rows by themselves; their tree ran in one pass)" in first.note
    assert "ran without gradient checkpointing, the plan was made with it" in first.note
