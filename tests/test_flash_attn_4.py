"""FlashAttention-4 under a tree: calls and one whole-tree launch through a stand-in, and the rule that picks one.

The tensors are float32 on the CPU; the stand-in takes them for bfloat16 on Hopper. Tolerance: logits, LSE and
gradients are sums of up to a few hundred terms of order 1 in float32 (eps 6e-8), and agree to 1e-5.
"""

import functools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType

import fake_flash_attention_4 as fakes
import numpy as np
import pytest
import torch
from attention_reference import Result, Site, assert_same, by_rows, by_tree, make_inputs, packed_prefixes
from row_reference import Batch, packed, padded
from test_workloads import W2B, batch_rows, layouts, lengths
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from augtree_fx import CostModel, TreeLayout, blocks, kernels, tree_attention
from augtree_fx.kernels import flash_attn_4, packages, whole_tree
from augtree_fx.kernels.problem import Problem
from augtree_fx.reference import AttentionSpec
from augtree_fx.tables import Calls, decode_calls

CALLS, TREE = flash_attn_4.NAME, whole_tree.NAME
FORWARD, BACKWARD = "_flash_attn_fwd", "_flash_attn_bwd"
Launch = tuple[str, dict[str, object]]  # function and named arguments


class Watch(TorchDispatchMode):
    """Fills every new tensor with NaN, and notes which ops ran; what the stand-in does is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.ops.append(name)
        return result.fill_(torch.nan) if "empty" in name and result.is_floating_point() else result


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Puts the stand-in in place, on what looks like Hopper; the calls of its functions in order."""

    def noted(function: Callable) -> Callable:
        @functools.wraps(function)
        def note(*args, **kwargs):
            seen.append((function.__name__, kwargs))
            with _disable_current_modes():
                return function(*args, **kwargs)

        return note

    def on_hopper(q: Tensor, v: Tensor, call, spec) -> Problem:
        problem = original(q, v, call, spec)
        dtype = torch.bfloat16 if problem.dtype == torch.float32 else problem.dtype
        return replace(problem, device_type="cuda", capability=(9, 0), dtype=dtype)

    seen: list[Launch] = []
    original = Problem.of
    monkeypatch.setattr(Problem, "of", staticmethod(on_hopper))
    interface = fakes.interface()
    for name in (FORWARD, BACKWARD):
        setattr(interface, name, noted(getattr(interface, name)))
    put(monkeypatch, interface, fakes.block_sparsity(), *fakes.language(fakes.vector_of))
    put(monkeypatch, fakes.tree_mask())
    packages.forget()
    yield seen
    packages.forget()


def put(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)


def site(head_dim: int = 64, v_head_dim: int = 0, **rest) -> Site:
    return Site(head_dim=head_dim, v_head_dim=v_head_dim or head_dim, scale=head_dim**-0.5, **rest)


def deep_batch(scale: int) -> Batch:
    """Two tasks under a system prompt of ``4 * scale`` tokens, turns that branch again, another root, an empty row."""
    turns = ([1], [2, 3], [2, 4, 4, 3], [2, 4, 5], [2, 4], [2, 3])
    rows = [[9, 8, 7, 6] + [task] * 3 + [5, 5, 4] + turn for task in (1, 2) for turn in turns]
    rows = [[token for token in row for _ in range(scale)] for row in [*rows, [3, 3, 3], [], [9, 8, 1]]]
    width = 1 + max(map(len, rows))
    return padded(rows, [width - len(row) for row in rows], width, "mask")


def large_batch() -> Batch:
    """Nodes of 400, 150 and 40 tokens, a short tree beside them: many full, partial and absent blocks."""
    rows = [[9] * 400 + [task] * 150 + [turn] * 40 for task in (1, 2) for turn in (3, 4, 5)] + [[3] * 70]
    width = max(map(len, rows))
    return padded(rows, [0] * len(rows), width, "mask")


def layout_of(batch: Batch) -> TreeLayout:
    return TreeLayout.from_padded(batch.input_ids, batch.attention_mask, batch.position_ids, costs=CostModel.free())


def calls_of(layout: TreeLayout, window: int | None = None) -> Calls:
    tables = layout.tables(window)
    return decode_calls(tables.segments, tables.cu_seqlens)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "part of a fused projection": lambda x: torch.cat([x - 1, x, x + 1], dim=1)[:, x.shape[1] : 2 * x.shape[1]],
    "last dim not contiguous": lambda x: torch.stack([x, x + 1], dim=-1)[..., 0],
}


def by_parts(
    at: Site, batch: Batch, inputs: dict[str, Tensor], layout: TreeLayout, kernel: str, view: str = "contiguous"
) -> Result:
    """What `by_tree` gives, with forward and backward called one by one under `Watch`."""
    order, index = packed_prefixes(batch, layout), torch.from_numpy(layout.packed_index)
    shown = index[np.concatenate([slots for slots in batch.slots if slots])]
    q, k, v = (VIEWS[view](inputs[name][order]) for name in "qkv")
    tables = layout.tables(at.window or None)
    spec = AttentionSpec(at.scale, at.window if tables.kv_index is not None else 0, at.softcap)
    rest = (decode_calls(tables.segments, tables.cu_seqlens), tables.kv_index, inputs.get("sinks"), spec, kernel)
    before = [x.clone() for x in (q, k, v)]
    with Watch() as watch:
        out, lse = tree_attention.forward(q, k, v, *rest)
    wide = torch.zeros(out.shape, dtype=torch.float64)
    dout = wide.index_add(0, shown, inputs["weigh_out"].double()).to(out.dtype)
    dlse = wide[..., 0].index_add(0, shown, inputs["weigh_lse"].double()).to(lse.dtype).T
    dout, saved = VIEWS[view](dout), VIEWS[view](out)
    with watch:
        dq, dk, dv, dsinks = tree_attention.backward(dout, dlse, q, k, v, saved, lse, *rest)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True)), "inputs were written to"
    sums = {name: torch.zeros(inputs[name].shape, dtype=torch.float64) for name in "qkv"}
    gradients = {name: sums[name].index_add_(0, order, x.double()) for name, x in zip("qkv", (dq, dk, dv), strict=True)}
    if dsinks is not None:
        gradients["sinks"] = dsinks
    return Result(out[shown], lse.T[shown], gradients)


SITES = {
    "multi-head": site(kv_heads=4),
    "grouped": site(128),
    "multi-query": site(96, kv_heads=1),
    "sinks": site(sinks=True),
    "soft-cap": site(softcap=1.5),
    "latent": site(192, 128, kv_heads=4),
    "grouped latent": site(192, 128),
    "values of a quarter": site(256, 64),
    "size 20": site(20),
    "size 80": site(80),
    "wide values": site(64, 96),
    "narrow values": site(128, 64),
    "odd values": site(6, 5, sinks=True),
    "window": site(window=5),
    "window of one": site(window=1, sinks=True),
    "all but the window": site(20, softcap=2.0, sinks=True, kv_heads=1),
    "all at once": site(6, 10, window=4, softcap=2.0, sinks=True),
}
ONE_LAUNCH = ("multi-head", "grouped", "multi-query", "sinks", "soft-cap")


@pytest.mark.parametrize("name", SITES)
def test_calls_of_a_deep_tree(name: str, launches: list[Launch]) -> None:
    """Merged partials, the global LSE, its gradient, sums of gradients, and no element left as it was allocated."""
    at, batch = SITES[name], deep_batch(1)
    layout, truth = layout_of(batch), by_rows(at, batch, make_inputs(at, batch))
    inputs = make_inputs(at, batch, torch.float32)
    result = by_parts(at, batch, inputs, layout, CALLS)
    assert_same(result, truth, 1e-5)
    num_calls = layout.tables(at.window or None).num_calls
    assert layout.num_levels == 6 and (num_calls == 1 if at.window else num_calls > 10)
    assert [launch for launch, _ in launches] == [FORWARD] * num_calls + [BACKWARD] * num_calls
    assert not any("mask_mod" in passed for _, passed in launches)
    assert_same(by_tree(at, batch, inputs, layout, "auto"), truth, 1e-5)


@pytest.mark.parametrize("name", ONE_LAUNCH)
def test_one_launch_of_a_deep_tree(name: str, launches: list[Launch]) -> None:
    """Full, partial and absent blocks, several of each; nodes are shorter and longer than a block."""
    at, batch = SITES[name], large_batch()
    layout, truth = layout_of(batch), by_rows(at, batch, make_inputs(at, batch))
    inputs = make_inputs(at, batch, torch.float32)
    result = by_parts(at, batch, inputs, layout, TREE)
    assert_same(result, truth, 1e-5)
    assert [launch for launch, _ in launches] == [FORWARD, BACKWARD]
    found = blocks.tree_blocks(calls_of(layout).key, layout.num_tokens, torch.device("cpu")).by_query
    assert int(found.full_count.sum()) > 3 and int(found.partial_count.sum()) > 10 and len(found.full_count) == 8
    assert_same(by_tree(at, batch, inputs, layout, TREE), truth, 1e-5)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kernel", [CALLS, TREE])
def test_strides(kernel: str, view: str, launches: list[Launch]) -> None:
    at, batch = site(sinks=True), deep_batch(3)
    truth = by_rows(at, batch, make_inputs(at, batch))
    inputs = make_inputs(at, batch, torch.float32)
    assert_same(by_parts(at, batch, inputs, layout_of(batch), kernel, view), truth, 1e-5)
    assert launches


@pytest.mark.parametrize(
    "rows",
    [[[1] * 9], [[1] * 9, [2] * 140, [3]], [[1] * 9, [], [1] * 9, [1, 1]]],
    ids=["one row", "rows that share nothing", "one node shown thrice"],
)
@pytest.mark.parametrize("kernel", [CALLS, TREE])
def test_trees_of_one_level(kernel: str, rows: list[list[int]], launches: list[Launch]) -> None:
    at, batch = site(), packed(rows)
    layout = TreeLayout.from_packed(batch.input_ids, batch.position_ids, costs=CostModel.free())
    truth = by_rows(at, batch, make_inputs(at, batch))
    assert_same(by_parts(at, batch, make_inputs(at, batch, torch.float32), layout, kernel), truth, 1e-5)
    assert len(launches) == 2


@pytest.mark.parametrize("kernel", [CALLS, TREE, "auto"])
def test_responses_without_a_token(kernel: str, launches: list[Launch]) -> None:
    prompts, responses = [[1] * 5, [2] * 3], [[[3] * 4, [], [4]], [[], []]]
    layout = TreeLayout.from_groups(prompts, responses)
    batch = packed([[*prompt, *tail] for prompt, tails in zip(prompts, responses, strict=True) for tail in tails])
    at = site()
    truth = by_rows(at, batch, make_inputs(at, batch))
    assert_same(by_parts(at, batch, make_inputs(at, batch, torch.float32), layout, kernel), truth, 1e-5)
    assert launches


def plain(layout: TreeLayout, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(torch.randn(layout.num_tokens, heads, 64, dtype=dtype) for heads in (4, 2, 2))


def address(x: object) -> int:
    assert isinstance(x, Tensor)
    return x.data_ptr()


def test_results_are_written_in_place(launches: list[Launch]) -> None:
    """Two levels: the first call of a row writes the results, and so do the first gradients; the rest lies beside."""
    torch.manual_seed(0)
    layout = TreeLayout.from_groups([[1] * 6, [2] * 5], [[[3] * 4, [4] * 2], [[5] * 3, [6] * 9]])
    (q, k, v), calls, spec = plain(layout), calls_of(layout), AttentionSpec(0.125)
    out, lse = tree_attention.forward(q, k, v, calls, None, None, spec, CALLS)
    given = [launch for _, launch in launches]
    assert len(given) == 2 and address(given[0]["out"]) == out.data_ptr() and address(given[0]["lse"]) == lse.data_ptr()
    assert given[0]["out"].shape == out.shape and given[1]["out"] is None is given[1]["lse"]
    launches.clear()
    with Watch() as watch:
        found = tree_attention.backward(torch.randn_like(out), None, q, k, v, out, lse, calls, None, None, spec, CALLS)
    for name, gradient in zip(("dq", "dk", "dv"), found, strict=False):
        own, replayed = (launch[name] for _, launch in launches)
        assert address(own) == gradient.data_ptr() and own.shape == gradient.shape
        assert address(replayed) != gradient.data_ptr()
    # One sum a gradient; nothing is copied, padded or made contiguous.
    assert watch.ops.count("add") == 3
    assert not {"copy_", "clone", "_to_copy", "constant_pad_nd", "cat"} & set(watch.ops), watch.ops


def test_gradients_have_their_places_before_the_first_call(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls run side by side: memory that one is done with must not become another's place while it still runs."""

    def place(total: tree_attention.Sum, number: int) -> Tensor:
        launched.append(len(launches))
        return original(total, number)

    launched: list[int] = []
    original = tree_attention.Sum.place
    monkeypatch.setattr(tree_attention.Sum, "place", place)
    layout = layout_of(deep_batch(1))
    (q, k, v), calls, spec = plain(layout), calls_of(layout), AttentionSpec(0.125)
    out, lse = torch.randn_like(q), torch.randn(q.shape[1], len(q))
    tree_attention.backward(out, None, q, k, v, out, lse, calls, None, None, spec, CALLS)
    assert launched == [0] * 3 * len(calls) and len(launches) == len(calls)


def test_a_call_of_a_large_segment_is_dense_and_in_place(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments of their own have a batch dim; of several calls over disjoint rows, each writes its own rows."""
    monkeypatch.setattr("augtree_fx.tables.DENSE_PAIRS", 100)
    layout = TreeLayout.from_groups([[1] * 20, [2] * 5], [[[3] * 4, [4] * 2], [[5] * 3, [6] * 12]])
    at, batch = site(), packed([[1] * 20 + [3] * 4, [1] * 20 + [4] * 2, [2] * 5 + [5] * 3, [2] * 5 + [6] * 12])
    truth = by_rows(at, batch, make_inputs(at, batch))
    assert_same(by_parts(at, batch, make_inputs(at, batch, torch.float32), layout, CALLS), truth, 1e-5)
    forwards = [passed for name, passed in launches if name == FORWARD]
    written = [passed["out"] for passed in forwards if passed["out"] is not None]
    assert {x.ndim for x in written} == {3, 4} and sum(x.shape[-3] for x in written) == layout.num_tokens
    assert len({x.untyped_storage().data_ptr() for x in written}) == 1
    assert {"cu_seqlens_q" in passed for passed in forwards} == {True, False}
    assert {passed["pack_gqa"] for passed in forwards} == {None, False}


def test_one_launch_writes_in_place(launches: list[Launch]) -> None:
    layout = layout_of(deep_batch(3))
    (q, k, v), calls, spec = plain(layout), calls_of(layout), AttentionSpec(0.125)
    with Watch() as watch:
        out, lse = tree_attention.forward(q, k, v, calls, None, None, spec, TREE)
        found = tree_attention.backward(torch.randn_like(out), None, q, k, v, out, lse, calls, None, None, spec, TREE)
    (_, forward), (_, backward) = launches
    assert address(forward["out"]) == out.data_ptr() and address(forward["lse"]) == lse.data_ptr()
    for name, gradient in zip(("dq", "dk", "dv"), found, strict=False):
        assert address(backward[name]) == gradient.data_ptr() and gradient.is_contiguous()
    assert not {"copy_", "clone", "_to_copy", "add"} & set(watch.ops), watch.ops


@pytest.mark.parametrize("kernel", [CALLS, TREE])
def test_bfloat16_is_at_most_twice_as_far_off_as_without_reuse(kernel: str, launches: list[Launch]) -> None:
    """Dtypes of the results, and against float64, in the 2-norm, at most twice the error of the rows' own attention."""
    at, batch = site(), packed([[9] * 50 + [task] * 30 + [turn] * 20 for task in (1, 2) for turn in (3, 4, 5)])
    inputs = make_inputs(at, batch, torch.bfloat16)
    inputs["weigh_lse"] = inputs["weigh_lse"].float()
    truth = by_rows(at, batch, {name: x.double() for name, x in inputs.items()})
    tree, rows = (
        by_parts(
            at, batch, inputs, TreeLayout.from_packed(batch.input_ids, batch.position_ids, costs=costs), one_kernel
        )
        for costs, one_kernel in ((CostModel.free(), kernel), (CostModel(1e9), CALLS))
    )
    assert tree.lse.dtype == torch.float32 and tree.out.dtype == torch.bfloat16
    assert len(tree.out) == len(rows.out) == 600 and "mask_mod" not in launches[-1][1]

    def error(found: Tensor, expected: Tensor) -> float:
        return ((found.double() - expected).norm() / expected.norm()).item()

    pairs = {"out": (tree.out, rows.out, truth.out)}
    pairs |= {name: (tree.gradients[name], rows.gradients[name], truth.gradients[name]) for name in "qkv"}
    errors = {name: (error(ours, exact), error(eager, exact)) for name, (ours, eager, exact) in pairs.items()}
    assert all(ours <= 2 * eager for ours, eager in errors.values()), errors


def test_deterministic_algorithms(launches: list[Launch]) -> None:
    """The calls' backward is told; one launch has no deterministic backward, and calls take its place."""
    at, batch = site(), deep_batch(3)
    layout, inputs = layout_of(batch), make_inputs(at, batch, torch.float32)
    truth = by_rows(at, batch, make_inputs(at, batch))
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(by_tree(at, batch, inputs, layout, "auto"), truth, 1e-5)
        assert {passed["deterministic"] for name, passed in launches if name == BACKWARD} == {True}
        with pytest.raises(NotImplementedError, match="adds up the queries' gradients in no fixed order; use kernel="):
            by_tree(at, batch, inputs, layout, TREE)
    finally:
        torch.use_deterministic_algorithms(False)


def mask_on_integers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """The library's mask with lists of one number for its language's vectors."""
    put(monkeypatch, *fakes.language(lambda number, dtype: [number]))
    return fakes.tree_mask().tree_mask


def test_mask_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file as it is, run on plain numbers: a query sees its path up to itself."""
    mask = mask_on_integers(monkeypatch)
    rows = [[7, 7, 1], [7, 7, 2, 3, 3], [7, 7, 2, 4], [5, 5], [5, 6]]
    batch = packed(rows)
    layout = TreeLayout.from_packed(batch.input_ids, batch.position_ids, costs=CostModel.free())
    found = blocks.tree_blocks(calls_of(layout).key, layout.num_tokens, torch.device("cpu"))
    aux = [found.first.tolist(), found.last.tolist()]
    index = torch.from_numpy(layout.packed_index).tolist()
    paths = {tuple(index[slot] for slot in slots) for slots in batch.slots}
    pairs = {(query, key) for path in paths for place, query in enumerate(path) for key in path[: place + 1]}
    tokens = range(layout.num_tokens)
    assert {(i, j) for i in tokens for j in tokens if mask([0], [0], [i], [j], None, aux)} == pairs


Fault = Callable[[pytest.MonkeyPatch], None]


def edit_blocks(**changes: Callable) -> Fault:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        def tree_blocks(*args):
            made = original(*args)
            return replace(made, **{name: change(made) for name, change in changes.items()})

        original = whole_tree.tree_blocks
        monkeypatch.setattr(whole_tree, "tree_blocks", tree_blocks)

    return plant


def all_full(lists: blocks.BlockLists) -> blocks.BlockLists:
    return replace(
        lists, partial_count=torch.zeros_like(lists.partial_count), full_count=lists.partial_count, full=lists.partial
    )


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(edit_blocks(last=lambda made: made.last + 1), id="a sibling is seen"),
        pytest.param(edit_blocks(first=lambda made: made.first * 0), id="no mask but the order"),
        pytest.param(
            edit_blocks(by_query=lambda made: replace(made.by_query, full_count=made.by_query.full_count * 0)),
            id="full blocks are lost in forward",
        ),
        pytest.param(
            edit_blocks(by_key=lambda made: replace(made.by_key, full_count=made.by_key.full_count * 0)),
            id="full blocks are lost in backward",
        ),
        pytest.param(edit_blocks(by_query=lambda made: all_full(made.by_query)), id="partial blocks are unmasked"),
    ],
)
def test_planted_faults_are_noticed(plant: Fault, launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    at, batch = site(), large_batch()
    layout, truth = layout_of(batch), by_rows(at, batch, make_inputs(at, batch))
    inputs = make_inputs(at, batch, torch.float32)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="is off by"):
        assert_same(by_parts(at, batch, inputs, layout, TREE), truth, 1e-4)


# Which of the two: ratios measured on an H200 and fitted by `whole_tree.Speed`; the rule has no package to ask here.
WIDTH = 32 * 128


def group(prompt: int, count: int, response: int) -> TreeLayout:
    return TreeLayout.from_groups([[1] * prompt], [[[2 + number] * response for number in range(count)]])


def deep_tree() -> TreeLayout:
    """A system prompt of 256 tokens under which turns of 64 branch in two, seven times: 255 nodes."""
    rows: list[list[int]] = [[0] * 256]
    for level in range(7):
        rows = [[*row, *[2 * level + branch] * 64] for row in rows for branch in (1, 2)]
    ids = torch.tensor(rows).flatten()
    return TreeLayout.from_packed(ids, None, torch.arange(len(rows) + 1) * len(rows[0]))


def slower(layout: TreeLayout, speed: whole_tree.Speed) -> str | None:
    key = calls_of(layout).key
    assert whole_tree._not_a_tree(key, layout.num_tokens) is None
    return whole_tree._slower(key, layout.num_tokens, speed, WIDTH)


def assert_calls(text: str | None) -> None:
    assert text is not None
    match = re.fullmatch(r"([\d.]+) ms in one launch, ([\d.]+) ms in calls", text)
    assert match and float(match[1]) >= float(match[2]), text


@pytest.mark.parametrize("shape", [(32768, 16, 1024), (65536, 8, 256)])
def test_few_large_nodes_take_calls(shape: tuple[int, int, int]) -> None:
    for speed in (whole_tree.FORWARD, whole_tree.BACKWARD):
        assert_calls(slower(group(*shape), speed))


def test_many_responses_take_one_launch_forward() -> None:
    assert slower(group(1024, 64, 1024), whole_tree.FORWARD) is None
    assert_calls(slower(group(1024, 64, 1024), whole_tree.BACKWARD))


@pytest.mark.parametrize("make", [deep_tree, lambda: group(512, 256, 64)], ids=["deep", "wide"])
def test_hundreds_of_small_nodes_take_one_launch(make: Callable[[], TreeLayout]) -> None:
    layout = make()
    assert layout.num_nodes > 250
    assert slower(layout, whole_tree.FORWARD) is None and slower(layout, whole_tree.BACKWARD) is None


def test_a_batch_of_agents_takes_calls() -> None:
    """Real lengths: 205 nodes, but of 2700 tokens each, so that most of the work is in large segments."""
    layout, _ = layouts(batch_rows(lengths(W2B), np.random.default_rng(0)))
    assert layout.num_nodes == 205
    assert_calls(slower(layout, whole_tree.FORWARD))
    assert_calls(slower(layout, whole_tree.BACKWARD))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.00012345, "0.123 ms"), (0.0278, "27.8 ms"), (0.1644, "164 ms"), (12.3456, "12346 ms")]
)
def test_times_are_told_in_milliseconds(seconds: float, text: str) -> None:
    assert whole_tree._ms(seconds) == text


def reason(
    at: Site, calls: Calls, requested: str, tokens: int, speed: whole_tree.Speed = whole_tree.FORWARD
) -> str | None:
    q, v = torch.empty(tokens, at.heads, at.head_dim), torch.empty(tokens, at.kv_heads, at.v_head_dim)
    spec = AttentionSpec(at.scale, at.window, at.softcap)
    return kernels.why_not_whole_tree(q, v, calls, spec, requested, speed)


def refusal(at: Site, calls: Calls, tokens: int, speed: whole_tree.Speed = whole_tree.FORWARD) -> str:
    """Why one launch cannot be: what an explicit choice raises, and what ``auto`` notes."""
    with pytest.raises(NotImplementedError) as raised:
        reason(at, calls, TREE, tokens, speed)
    text = reason(at, calls, "auto", tokens, speed)
    assert str(raised.value) == f"kernel {TREE!r} cannot run this attention: {text}; use kernel='auto'"
    assert text is not None
    return text


def test_reasons_for_calls(launches: list[Launch]) -> None:
    layout = layout_of(deep_batch(3))
    calls, tokens = calls_of(layout), layout.num_tokens
    assert reason(site(), calls, TREE, tokens) is None
    assert reason(site(), calls, CALLS, tokens) == "kernel 'flash_attn_4' is asked for"
    assert reason(site(), calls, "reference", tokens) == "kernel 'reference' is asked for"
    assert reason(site(), Calls((), b""), "auto", 0) == "there are no calls"
    assert refusal(site(window=5), calls_of(layout, 5), tokens) == "it has no windows"
    assert refusal(site(), calls_of(layout, 5), tokens) == "a window gathers the keys of its calls"
    for sizes in ((80, 80), (192, 128), (256, 256), (64, 96)):
        text = f"it takes head sizes 64, 96, 128, got {sizes[0]} and {sizes[1]}"
        assert refusal(site(*sizes), calls, tokens) == text
    assert refusal(site(264), calls, tokens) == "it takes head sizes up to 256, got 264"
    part = Calls(calls.items, calls.key[48:])
    assert refusal(site(), part, tokens) == "its calls are not those of a whole tree"
    large = group(32768, 16, 1024)
    slow = kernels.why_not_whole_tree(
        torch.empty(large.num_tokens, 32, 128, device="meta"),
        torch.empty(large.num_tokens, 8, 128, device="meta"),
        calls_of(large),
        AttentionSpec(1.0),
        "auto",
        whole_tree.FORWARD,
    )
    assert_calls(slow)


def test_reasons_of_devices(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(deep_batch(3))
    calls, tokens = calls_of(layout), layout.num_tokens
    hopper = Problem.of
    monkeypatch.setattr(Problem, "of", staticmethod(lambda *args: replace(hopper(*args), capability=(10, 0))))
    assert refusal(site(), calls, tokens) == "it was tried on compute capability 9 only"
    monkeypatch.setattr(Problem, "of", staticmethod(lambda *args: replace(hopper(*args), device_type="cpu")))
    assert refusal(site(), calls, tokens) == "it runs on CUDA, the tensors are on cpu"


def test_reasons_of_packages(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch needs more of the package than calls do."""
    layout = layout_of(deep_batch(3))
    calls, tokens = calls_of(layout), layout.num_tokens
    tail = "; this adapter was written for 4.0.0b36"
    changed = fakes.block_sparsity()
    del changed.BlockSparseTensorsTorch
    put(monkeypatch, changed)
    packages.forget()
    text = refusal(site(), calls, tokens)
    assert text.startswith("flash-attn-4 ") and text.endswith(f" has no BlockSparseTensorsTorch{tail}")
    monkeypatch.setitem(sys.modules, "flash_attn.cute.block_sparsity", None)
    packages.forget()
    assert refusal(site(), calls, tokens) == "flash-attn-4 is not installed"
    call = kernels.choose(Problem.of(torch.empty(1, 4, 64), torch.empty(1, 2, 64), calls[0], AttentionSpec(1.0)))
    assert call.name == CALLS and not call.passed_over


@pytest.mark.parametrize("launched", [FORWARD, BACKWARD])
def test_auto_decides_each_direction(launched: str, launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch in one direction, calls in the other: out and LSE of either serve either."""
    at, batch = site(), deep_batch(3)
    layout, inputs = layout_of(batch), make_inputs(at, batch, torch.float32)

    def slower(key: bytes, tokens: int, speed: whole_tree.Speed, width: int) -> str | None:
        assert key == calls_of(layout).key and tokens == layout.num_tokens and width == at.heads * at.head_dim
        return None if (speed is whole_tree.FORWARD) == (launched == FORWARD) else "calls are faster"

    monkeypatch.setattr(whole_tree, "_slower", slower)
    assert_same(by_parts(at, batch, inputs, layout, "auto"), by_rows(at, batch, make_inputs(at, batch)), 1e-5)
    assert [name for name, passed in launches if "mask_mod" in passed] == [launched]
    assert len(launches) == 1 + layout.tables(None).num_calls
