"""Attention of a tree against its rows one by one: outputs, LSE, all gradients, and faults that must be noticed."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from attention_reference import Result, Site, assert_same, by_rows, by_tree, make_inputs
from row_reference import Batch, padded, prefix_numbers
from torch import Tensor

from augtree_fx import CostModel, TreeLayout, kernels, merge, ops
from augtree_fx import tables as tables_module
from augtree_fx.kernels import reference as reference_kernel
from augtree_fx.tables import Calls

FREE = CostModel.free()
# Float64 sums of at most a few hundred terms of order 1 differ by about 1e-14 when their order changes; the truth
# and the kernels exponentiate differently shifted logits, which costs another digit. 1e-10 is the design's bound.
EXACT = 1e-10
SITES = {
    "multi-head": Site(kv_heads=4),
    "grouped": Site(),
    "multi-query": Site(kv_heads=1, head_dim=16, scale=0.25),
    "wide values": Site(head_dim=6, v_head_dim=10),
    "narrow values": Site(head_dim=12, v_head_dim=5),
    "sinks": Site(sinks=True),
    "window": Site(window=5),
    "window of one": Site(window=1, sinks=True),
    "soft-cap": Site(softcap=1.5),
    "all at once": Site(head_dim=6, v_head_dim=10, window=4, softcap=2.0, sinks=True),
}
RUNS = [
    (name, kernel)
    for name, site in SITES.items()
    for kernel in ("reference", "cpu_flash", "auto")
    if not (site.softcap and kernel == "cpu_flash")
]


@pytest.fixture(autouse=True)
def poison_empty_tensors() -> Iterator[None]:
    """Fills every torch.empty with NaN (what deterministic mode does), so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def deep_batch(*, scale: int = 1) -> Batch:
    """Two tasks under one system prompt, turns that branch again, a duplicate, prefixes of other rows, an empty row."""
    system, tool = [9, 8, 7, 6], [5, 5, 4]
    turns = ([1], [2, 3], [2, 4, 4, 3], [2, 4, 5], [2, 4], [2, 3])
    rows = [(system + [task] * 3 + tool + turn) for task in (1, 2) for turn in turns]
    rows = [[token for token in row for _ in range(scale)] for row in [*rows, [3, 3, 3], [], [9, 8, 1]]]
    order = [number * 7 % len(rows) for number in range(len(rows))]  # members of a group are not neighbours
    rows = [rows[number] for number in order]
    width = 1 + max(map(len, rows))
    return padded(rows, [width - len(row) for row in rows], width, "mask")


def layout_of(batch: Batch, costs: CostModel = FREE) -> TreeLayout:
    return TreeLayout.from_padded(batch.input_ids, batch.attention_mask, batch.position_ids, costs=costs)


@pytest.mark.parametrize(("name", "kernel"), RUNS)
@pytest.mark.parametrize("costs", [FREE, CostModel(7.0, 0.0)], ids=["free", "threshold"])
def test_rows_one_by_one(name: str, kernel: str, costs: CostModel) -> None:
    site, batch = SITES[name], deep_batch()
    inputs, layout = make_inputs(SITES[name], batch), layout_of(batch, costs)
    assert layout.shares and layout.num_levels >= (3 if costs == FREE else 2)
    assert_same(by_tree(site, batch, inputs, layout, kernel), by_rows(site, batch, inputs), EXACT)


@pytest.mark.parametrize("kernel", ["reference", "cpu_flash"])
@pytest.mark.parametrize("site", [Site(), Site(window=70, sinks=True)], ids=["full", "window"])
def test_blocks_of_long_nodes(site: Site, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes longer than a kernel's block of queries, and segments large enough for calls of their own."""
    monkeypatch.setattr(reference_kernel, "_BLOCK_LOGITS", 1 << 12)
    monkeypatch.setattr(tables_module, "DENSE_PAIRS", 100 * 100)
    batch = padded([[1] * 300 + [2] * 150, [1] * 300 + [3] * 90, [1] * 300 + [4] * 20], [0] * 3, 450, "column")
    inputs, layout = make_inputs(site, batch), layout_of(batch)
    assert_same(by_tree(site, batch, inputs, layout, kernel), by_rows(site, batch, inputs), EXACT)


@pytest.mark.parametrize("kernel", ["reference", "cpu_flash"])
@pytest.mark.parametrize("costs", [FREE, CostModel(1e9)], ids=["tree", "rows"])
def test_float32_is_as_good_as_float32_gets(kernel: str, costs: CostModel) -> None:
    batch = deep_batch()
    truth = by_rows(Site(), batch, make_inputs(Site(), batch))
    found = by_tree(Site(), batch, make_inputs(Site(), batch, torch.float32), layout_of(batch, costs), kernel)
    assert_same(found, truth, 1e-5)  # eps 6e-8, sums of up to a hundred terms


def bfloat16_rows(site: Site, batch: Batch, inputs: dict[str, Tensor]) -> Result:
    """No reuse in bfloat16: torch's attention, row by row; the gradients of the rows are summed without rounding."""
    sums = {name: torch.zeros_like(inputs[name], dtype=torch.float64) for name in "qkv"}
    outs, begin = [], 0
    for path in filter(None, prefix_numbers(batch.rows)):
        rows = {name: inputs[name][path].requires_grad_() for name in "qkv"}
        q, k, v = (x.transpose(0, 1)[None] for x in rows.values())
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=site.scale, enable_gqa=True
        )[0].transpose(0, 1)
        weights = inputs["weigh_out"][begin : begin + len(path)]
        gradients = torch.autograd.grad((out * weights).sum(), list(rows.values()))
        for total, gradient in zip(sums.values(), gradients, strict=True):
            total.index_add_(0, torch.tensor(path), gradient.double())
        outs.append(out.detach())
        begin += len(path)
    return Result(torch.cat(outs), torch.empty(0), sums)


@pytest.mark.parametrize("kernel", ["reference", "cpu_flash"])
def test_bfloat16_is_at_most_twice_as_far_off_as_without_reuse(kernel: str) -> None:
    """Invariant 2. The inputs are bfloat16 numbers, so the truth has the same ones; error in the 2-norm."""
    site, batch = Site(head_dim=32, v_head_dim=32, scale=32**-0.5), deep_batch(scale=4)
    low = make_inputs(site, batch, torch.bfloat16)
    low["weigh_lse"].zero_()
    truth = by_rows(site, batch, {name: x.double() for name, x in low.items()})
    tree = by_tree(site, batch, low, layout_of(batch), kernel)
    rows = bfloat16_rows(site, batch, low)

    def error(found: Tensor, expected: Tensor) -> float:
        return ((found.double() - expected).norm() / expected.norm()).item()

    pairs = {"out": (tree.out, rows.out, truth.out)}
    pairs |= {name: (tree.gradients[name], rows.gradients[name], truth.gradients[name]) for name in "qkv"}
    errors = {name: (error(ours, exact), error(eager, exact)) for name, (ours, eager, exact) in pairs.items()}
    assert all(ours <= 2 * eager for ours, eager in errors.values()), errors


Fault = Callable[[pytest.MonkeyPatch], None]


def local_softmax_in_backward(patch: pytest.MonkeyPatch) -> None:
    def backward(dout, dlse, q, k, v, out, lse, call, spec, requested, **into):
        own_out, own_lse = kernels.forward(q, k, v, call, spec, requested)
        return original(dout, dlse, q, k, v, own_out, own_lse, call, spec, requested, **into)

    original = kernels.backward
    patch.setattr(kernels, "backward", backward)


def local_lse_in_backward(patch: pytest.MonkeyPatch) -> None:
    def backward(dout, dlse, q, k, v, out, lse, call, spec, requested, **into):
        own_lse = kernels.forward(q, k, v, call, spec, requested)[1]
        return original(dout, dlse, q, k, v, out, own_lse, call, spec, requested, **into)

    original = kernels.backward
    patch.setattr(kernels, "backward", backward)


def stale_keys_in_backward(patch: pytest.MonkeyPatch) -> None:
    def backward(dout, dlse, q, k, v, out, lse, call, spec, requested, **into):
        stale = k if call.causal else k.roll(1, 0)
        return original(dout, dlse, q, stale, v, out, lse, call, spec, requested, **into)

    original = kernels.backward
    patch.setattr(kernels, "backward", backward)


def merge_in_base_two(patch: pytest.MonkeyPatch) -> None:
    def partial_softmax(outs, lses, sinks, *, out, lse):
        original(outs, [x / math.log(2) for x in lses], sinks, out=out, lse=lse)
        lse *= math.log(2)

    original = merge.partial_softmax
    patch.setattr(merge, "partial_softmax", partial_softmax)


def sink_counted_twice(patch: pytest.MonkeyPatch) -> None:
    def partial_softmax(outs, lses, sinks, **into):
        original(outs, lses, sinks + math.log(2), **into)

    original = merge.partial_softmax
    patch.setattr(merge, "partial_softmax", partial_softmax)


def edit_calls(edit: Callable[[list], list]) -> Fault:
    def plant(patch: pytest.MonkeyPatch) -> None:
        original = ops.decode_calls
        patch.setattr(ops, "decode_calls", lambda *tables: Calls(tuple(edit([*original(*tables)])), b""))

    return plant


def extend_replay(calls: list) -> list:
    """The first unmasked segment also sees the token after its keys: one of a sibling, or of another prompt."""
    for number, call in enumerate(calls):
        if not call.causal:
            first, *rest = call.segments
            calls[number] = replace(call, segments=(replace(first, k_end=first.k_end + 1), *rest))
            return calls
    raise AssertionError("no replay call")


def lose_branch_point_gradients(patch: pytest.MonkeyPatch) -> None:
    """A token shown in several rows gets the gradient of the first one only."""

    def show_slots(packed: Tensor, index: Tensor) -> Tensor:
        values = index.tolist()
        first = torch.tensor([number == values.index(value) for number, value in enumerate(values)])
        shown, cut = original(packed, index), original(packed.detach(), index)
        return torch.where(first.view(-1, *[1] * (packed.ndim - 1)), shown, cut)

    original = torch.ops.augtree.show_slots
    patch.setattr(torch.ops.augtree, "show_slots", show_slots)


@pytest.mark.parametrize(
    "plant",
    [
        local_softmax_in_backward,
        local_lse_in_backward,
        stale_keys_in_backward,
        merge_in_base_two,
        sink_counted_twice,
        lose_branch_point_gradients,
        pytest.param(edit_calls(lambda calls: calls[:-1]), id="a branch's call is dropped"),
        pytest.param(edit_calls(lambda calls: [*calls, calls[-1]]), id="a call runs twice"),
        pytest.param(edit_calls(extend_replay), id="a sibling's token leaks"),
    ],
)
@pytest.mark.parametrize("kernel", ["reference", "cpu_flash"])
def test_planted_faults_are_noticed(plant: Fault, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    site, batch = Site(sinks=True), deep_batch()
    inputs, layout = make_inputs(site, batch), layout_of(batch)
    truth = by_rows(site, batch, inputs)
    assert_same(by_tree(site, batch, inputs, layout, kernel), truth, EXACT)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="is off by"):
        assert_same(by_tree(site, batch, inputs, layout, kernel), truth, 1e-4)
