"""torch.compile of a transformed model, as it is and with an explicit layout, and torch.export: as eager, counted."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

import augtree_fx
from augtree_fx import CostModel, TreeLayout
from augtree_fx.transforms.skeleton import CONTEXT

FREE = CostModel.free()
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8,
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


def num_compilations() -> int:
    return counters["stats"]["unique_graphs"]


def llama(layers: int = 2) -> Any:
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SIZES))


def windowed() -> Any:
    """Sliding layers gather keys only where a row is longer than the window: two buckets."""
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(num_hidden_layers=2, sliding_window=16, layer_types=kinds, **SIZES))


def random_rows(seed: int, longest: int = 40) -> tuple[Tensor, Tensor]:
    """Right-padded rows of some groups, ragged, at times with a turn that several rows share."""
    draw = random.Random(seed)

    def tokens(most: int) -> list[int]:
        return [draw.randrange(50) for _ in range(draw.randint(1, most))]

    rows = []
    for _ in range(draw.randint(1, 3)):
        prompt = tokens(longest)
        for _ in range(draw.randint(1, 2)):
            turn = tokens(longest // 2) if draw.random() < 0.5 else []
            rows += [prompt + turn + tokens(longest // 2) for _ in range(draw.randint(2, 3))]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask


def assert_same_step(model: nn.Module, plain: nn.Module, logits: Tensor, ids: Tensor, mask: Tensor) -> None:
    """Logits of tokens and gradients of all parameters; float32 sums of some hundred terms in another order."""
    weight = torch.randn_like(logits) * mask[..., None]
    truth = plain(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(logits * mask[..., None], truth * mask[..., None], rtol=1e-4, atol=1e-5)
    model.zero_grad()
    plain.zero_grad()
    (logits * weight).sum().backward()
    (truth * weight).sum().backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None, name
        assert (p.grad - q.grad).norm() <= 1e-5 * p.grad.norm(), name


@pytest.mark.parametrize(
    ("make", "checkpointing"),
    [
        (llama, True),
        (windowed, False),
        pytest.param(llama, False, marks=pytest.mark.slow),
        pytest.param(windowed, True, marks=pytest.mark.slow),
    ],
)
def test_one_graph_a_bucket_over_random_batches(make: Any, checkpointing: bool) -> None:
    """200 batches, forward and backward, one graph each: as many compilations as buckets."""
    plain = make()
    model = augtree_fx.transform(copy.deepcopy(plain))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    buckets, shared = set(), 0
    for seed in range(200):
        ids, mask = random_rows(seed, 12 if seed % 4 == 0 else 40)
        packed = augtree_fx.pack(model, TreeLayout.from_padded(ids, mask, costs=FREE))
        shared += packed.num_tokens < int(mask.sum())
        buckets.add(packed.arguments[CONTEXT].bucket)
        logits = packed.show(compiled(**packed.arguments)).logits
        if seed % 20 < 2:
            assert_same_step(model, plain, logits, ids, mask)
        else:
            logits.sum().backward()
        assert num_compilations() == len(buckets), (seed, len(buckets))
    assert shared > 150 and len(buckets) == (2 if make is windowed else 1)


def test_as_it_is_with_one_break() -> None:
    """`torch.compile(transform(model))`: detection runs between graphs, and nothing is compiled anew after that."""
    plain = llama()
    model = augtree_fx.transform(copy.deepcopy(plain), costs=FREE)
    compiled = torch.compile(model, dynamic=True, backend="aot_eager")
    seen = []
    for seed in range(12):
        ids, mask = random_rows(seed)
        assert_same_step(model, plain, compiled(ids, attention_mask=mask, use_cache=False).logits, ids, mask)
        seen.append(num_compilations())
    assert seen[0] == seen[-1], seen
    reasons = [reason for reason in counters["graph_break"] if "torch.compiler.disable" in reason]
    assert len(counters["graph_break"]) == len(reasons) == 1, counters["graph_break"]
    assert "pack" in reasons[0]


def test_as_it_is_where_nothing_is_shared() -> None:
    plain = llama()
    model = augtree_fx.transform(copy.deepcopy(plain))
    compiled = torch.compile(model, dynamic=True, backend="aot_eager")
    ids = torch.arange(24).view(3, 8)
    mask = torch.ones_like(ids)
    assert_same_step(model, plain, compiled(ids, attention_mask=mask, use_cache=False).logits, ids, mask)


def test_inductor() -> None:
    plain = llama()
    model = augtree_fx.transform(copy.deepcopy(plain))
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for seed in (1, 2, 3):
        ids, mask = random_rows(seed)
        packed = augtree_fx.pack(model, TreeLayout.from_padded(ids, mask, costs=FREE))
        assert_same_step(model, plain, packed.show(compiled(**packed.arguments)).logits, ids, mask)
    assert num_compilations() == 1


@pytest.mark.parametrize("layers", [2, 12])
def test_layers_are_not_compiled_one_by_one(layers: int) -> None:
    model = augtree_fx.transform(llama(layers))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    ids, mask = random_rows(5)
    compiled(**augtree_fx.pack(model, TreeLayout.from_padded(ids, mask, costs=FREE)).arguments)
    assert num_compilations() == 1


def test_attention_is_a_node_of_the_graph() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(copy.deepcopy(graph))
        return graph.forward

    model = augtree_fx.transform(llama())
    ids, mask = random_rows(5)
    packed = augtree_fx.pack(model, TreeLayout.from_padded(ids, mask, costs=FREE))
    torch.compile(model, fullgraph=True, dynamic=True, backend=keep)(**packed.arguments)
    called = [node.target for node in graphs[-1].graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.augtree.replay_attention) == 2


class Explicit(nn.Module):
    """Arguments by position, as torch.export likes them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, context: Any) -> Tensor:
        given = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False, CONTEXT: context}
        return self.model(input_ids=input_ids, **given).logits


def test_export_with_other_sizes_and_from_a_file() -> None:
    model = augtree_fx.transform(llama())

    def inputs(seed: int) -> tuple[Any, ...]:
        ids, mask = random_rows(seed)
        packed = augtree_fx.pack(model, TreeLayout.from_padded(ids, mask, costs=FREE)).arguments
        return tuple(packed[name] for name in ("input_ids", "attention_mask", "position_ids", CONTEXT))

    explicit, auto = Explicit(model), torch.export.Dim.AUTO
    sizes = ({1: auto}, None, {1: auto}, [{0: auto}, {1: auto}, None])
    program = torch.export.export(explicit, inputs(0), dynamic_shapes=sizes, strict=False)
    assert [node for node in program.graph.nodes if node.target is torch.ops.augtree.replay_attention.default]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for seed in (1, 2, 3):
        torch.testing.assert_close(loaded(*inputs(seed)), explicit(*inputs(seed)), rtol=1e-5, atol=1e-6)


def test_pack_needs_a_transformed_model() -> None:
    layout = TreeLayout.from_groups([[1, 2]], [[[3], [4]]])
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM is not transformed; augtree_fx.transform\(model\) does that"
    ):
        augtree_fx.pack(llama(), layout)


@pytest.mark.parametrize("multiple", [1, 64, 1000])
@pytest.mark.parametrize("make", [llama, windowed])
def test_packed_outputs_without_compiling(make: Any, multiple: int) -> None:
    plain = make()
    model = augtree_fx.transform(copy.deepcopy(plain))
    for seed in (0, 5, 7):
        ids, mask = random_rows(seed)
        layout = TreeLayout.from_padded(ids, mask, costs=FREE)
        packed = augtree_fx.pack(model, layout, pad_to_multiple_of=multiple)
        out = model(**packed.arguments)
        assert out.logits.shape[:2] == (1, packed.num_tokens)
        assert packed.num_tokens % multiple == 0 and 0 <= packed.num_tokens - layout.num_tokens < multiple
        assert_same_step(model, plain, packed.show(out).logits, ids, mask)


def test_padding_needs_a_multiple() -> None:
    layout = TreeLayout.from_groups([[1, 2]], [[[3], [4]]])
    with pytest.raises(ValueError, match="at least 1, got 0"):
        augtree_fx.pack(augtree_fx.transform(llama()), layout, pad_to_multiple_of=0)
