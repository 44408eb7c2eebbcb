"""The ops as contracts: schema, fake kernels and autograd (`opcheck`), raw calls, kernels, and odd inputs.

Tolerances: float64 results that differ only in the order of sums agree to 1e-12 relative to values of order 1.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_reference import Site, attend, by_rows, leaves_of, make_inputs, packed_prefixes
from row_reference import packed, padded
from torch import Tensor
from torch.autograd import gradcheck
from torch.library import opcheck

from augtree_fx import CostModel, TreeLayout, kernels, ops

OPS = torch.ops.augtree
BATCH = packed([[1, 1, 2, 3], [1, 1, 2, 4, 5], [1, 1, 6], [7, 7]])
LAYOUT = TreeLayout.from_packed(BATCH.input_ids, BATCH.position_ids, costs=CostModel.free())
ORDER = packed_prefixes(BATCH, LAYOUT)
SITES = {
    "grouped": Site(),
    "multi-query": Site(kv_heads=1),
    "value size": Site(head_dim=6, v_head_dim=10),
    "window": Site(window=2),
    "soft-cap": Site(softcap=1.5),
    "sinks": Site(sinks=True, window=3, v_head_dim=4),
}
CASES = [(name, dtype) for name in SITES for dtype in (torch.float64, torch.float32)]
RUNS = [(name, "reference") for name in SITES]
RUNS += [(name, "cpu_flash") for name, site in SITES.items() if not site.softcap]  # torch's CPU kernel has none


@pytest.fixture(autouse=True)
def poison_empty_tensors() -> Iterator[None]:
    """Fills every torch.empty with NaN (what deterministic mode does), so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def replay_arguments(site: Site, dtype: torch.dtype, *, kernel: str = "auto", grad: bool = True) -> tuple[Any, ...]:
    """Arguments of replay_attention for the small tree."""
    inputs = make_inputs(site, BATCH, dtype)
    q, k, v = (inputs[name][ORDER].requires_grad_(grad) for name in "qkv")
    sinks = inputs["sinks"].requires_grad_(grad) if site.sinks else None
    tables = LAYOUT.tables(site.window or None)
    spec = (site.scale, site.window, site.softcap, kernel)
    return q, k, v, tables.segments, tables.cu_seqlens, tables.kv_index, sinks, *spec


def backward_arguments(arguments: tuple[Any, ...], *, with_dlse: bool) -> tuple[Any, ...]:
    """Arguments of replay_attention_backward after a forward with ``arguments``."""
    plain = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    out, lse = OPS.replay_attention(*plain)
    return torch.randn_like(out), torch.randn_like(lse) if with_dlse else None, *plain[:3], out, lse, *plain[3:]


def merge_arguments(dtype: torch.dtype, *, sinks: bool, grad: bool = True) -> tuple[list[Tensor], list[Tensor], Any]:
    """Three partials of five tokens; the second one saw no key for token 1."""
    generator = torch.Generator().manual_seed(1)
    outs = [torch.randn(5, 4, 3, dtype=dtype, generator=generator) for _ in range(3)]
    lses = [torch.randn(4, 5, dtype=dtype, generator=generator) for _ in range(3)]
    outs[1][1], lses[1][:, 1] = 0, -torch.inf
    sink = torch.randn(4, dtype=dtype, generator=generator) if sinks else None
    for tensor in (*outs, *lses, *([sink] if sinks else [])):
        tensor.requires_grad_(grad)
    return outs, lses, sink


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_opcheck_replay(name: str, dtype: torch.dtype) -> None:
    opcheck(OPS.replay_attention.default, replay_arguments(SITES[name], dtype))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_opcheck_replay_backward(name: str, dtype: torch.dtype) -> None:
    arguments = replay_arguments(SITES[name], dtype)
    for with_dlse in (False, True):
        opcheck(OPS.replay_attention_backward.default, backward_arguments(arguments, with_dlse=with_dlse))


@pytest.mark.parametrize("name", ["grouped", "value size", "soft-cap", "sinks"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_opcheck_prefill(name: str, dtype: torch.dtype) -> None:
    q, k, v, _, _, _, *rest = replay_arguments(SITES[name], dtype)
    tables = TreeLayout.from_groups([[1, 2, 3], [4] * (len(q) - 3)], [[[]], [[]]]).tables()
    opcheck(OPS.prefill_attention.default, (q, k, v, tables.segments, tables.cu_seqlens, *rest))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_opcheck_partial_softmax(sinks: bool, dtype: torch.dtype) -> None:
    outs, lses, sink = merge_arguments(dtype, sinks=sinks)
    opcheck(OPS.partial_softmax.default, (outs, lses, sink))
    plain = merge_arguments(dtype, sinks=sinks, grad=False)
    out, lse = OPS.partial_softmax(*plain)
    opcheck(OPS.partial_softmax_backward.default, (torch.randn_like(out), torch.randn_like(lse), *plain, out, lse))


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 2, 4)])
@pytest.mark.parametrize("chunk", [2, 1 << 15])
def test_slots(shape: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_COLLECTED_SLOTS", chunk)
    index = torch.tensor([2, -1, 0, 0, -1, 2, 2])
    tokens = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    slots = torch.randn(7, *shape[1:], dtype=torch.float64)
    opcheck(OPS.show_slots.default, (tokens, index))
    opcheck(OPS.collect_slots.default, (slots, index, 3))
    shown, collected = OPS.show_slots(tokens, index), OPS.collect_slots(slots, index, 3)
    for number, token in enumerate(index.tolist()):
        assert torch.equal(shown[number], tokens[token] if token >= 0 else torch.zeros_like(tokens[0]))
    sums = torch.stack([slots[2] + slots[3], torch.zeros_like(slots[0]), slots[0] + slots[5] + slots[6]])
    torch.testing.assert_close(collected, sums, rtol=1e-12, atol=1e-12)
    assert gradcheck(OPS.show_slots, (tokens, index))


@pytest.mark.filterwarnings("error")
def test_collected_slots_have_a_gradient() -> None:
    """The transpose of `show_slots`; also its own gradient, when a loss is differentiated twice."""
    index = torch.tensor([2, -1, 0, 0])
    slots = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    opcheck(OPS.collect_slots.default, (slots, index, 3))
    assert gradcheck(lambda x: OPS.collect_slots(x, index, 3), (slots,))


def test_half_precision_slots_are_summed_in_float32() -> None:
    slots = torch.full((1001,), 0.001, dtype=torch.bfloat16)
    slots[0] = 1.0  # summed in bfloat16, what follows would vanish
    collected = OPS.collect_slots(slots, torch.zeros(1001, dtype=torch.int64), 1)
    assert torch.equal(collected, slots.double().sum(0, keepdim=True).bfloat16())


@pytest.mark.parametrize("name", SITES)
def test_raw_backward_is_the_gradient(name: str) -> None:
    arguments = replay_arguments(SITES[name], torch.float64)
    raw = backward_arguments(arguments, with_dlse=True)
    leaves = [x for x in (*arguments[:3], arguments[6]) if x is not None]
    expected = torch.autograd.grad(OPS.replay_attention(*arguments), leaves, raw[:2])
    for found, gradient in zip(OPS.replay_attention_backward(*raw), expected, strict=False):
        torch.testing.assert_close(found, gradient, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "kernel"), RUNS)
@pytest.mark.parametrize("output", [0, 1], ids=["out", "lse"])
def test_gradcheck(name: str, kernel: str, output: int) -> None:
    """Loss on one output alone: the gradient of the other is None, not zeros."""
    q, k, v, *tables, sinks, scale, window, softcap, _ = replay_arguments(SITES[name], torch.float64)

    def outputs(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        return OPS.replay_attention(q, k, v, *tables, sinks, scale, window, softcap, kernel)[output]

    assert gradcheck(outputs, (q, k, v, sinks), fast_mode=True)


@pytest.mark.parametrize("sinks", [False, True])
def test_partial_softmax_is_attention_over_all_keys(sinks: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 5, 9, dtype=torch.float64, generator=generator)
    values = torch.randn(9, 3, dtype=torch.float64, generator=generator)
    sink = torch.randn(4, dtype=torch.float64, generator=generator) if sinks else None
    parts = [slice(0, 2), slice(2, 8), slice(8, 9)]
    outs = [(logits[..., part].softmax(-1) @ values[part]).transpose(0, 1) for part in parts]
    out, lse = OPS.partial_softmax(outs, [logits[..., part].logsumexp(-1) for part in parts], sink)
    columns = logits if sink is None else torch.cat([logits, sink[:, None, None].expand(4, 5, 1)], dim=-1)
    torch.testing.assert_close(lse, columns.logsumexp(-1), rtol=1e-12, atol=1e-12)
    expected = (columns.softmax(-1)[..., :9] @ values).transpose(0, 1)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_empty_partials_stay_empty() -> None:
    outs = [torch.zeros(2, 4, 3, requires_grad=True) for _ in range(2)]
    lses = [torch.full((4, 2), -torch.inf, requires_grad=True) for _ in range(2)]
    out, lse = OPS.partial_softmax(outs, lses, None)
    assert torch.equal(out, torch.zeros(2, 4, 3)) and torch.equal(lse, torch.full((4, 2), -torch.inf))
    for gradient in torch.autograd.grad((out * 3).sum(), [*outs, *lses]):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    out, lse = OPS.partial_softmax(outs, lses, torch.arange(4.0))
    assert torch.equal(out, torch.zeros(2, 4, 3)) and torch.equal(lse, torch.arange(4.0)[:, None].expand(4, 2))


@pytest.mark.parametrize("sinks", [False, True])
def test_partial_softmax_gradcheck(sinks: bool) -> None:
    outs, lses, sink = merge_arguments(torch.float64, sinks=sinks)
    lses[1] = lses[1].detach().nan_to_num(neginf=-2.0).requires_grad_()  # no finite difference at -inf
    assert gradcheck(lambda *x: OPS.partial_softmax(list(x[:3]), list(x[3:6]), x[6]), (*outs, *lses, sink))


@pytest.mark.parametrize("site", [Site(), Site(window=3), Site(sinks=True, softcap=2.0)], ids=str)
def test_prefill_of_separate_prompts(site: Site) -> None:
    """No tree: own causal blocks only, with a window that the kernel applies."""
    batch = padded([[1, 2, 3, 4, 5], [6], [7, 8, 9]], [0, 2, 1], 6, "column")
    layout = TreeLayout.from_padded(batch.input_ids, batch.attention_mask)
    inputs, order, tables = make_inputs(site, batch), packed_prefixes(batch, layout), layout.tables()
    leaves = leaves_of(inputs)
    q, k, v = (leaves[name][order] for name in "qkv")
    spec = (leaves.get("sinks"), site.scale, site.window, site.softcap, "auto")
    out, lse = OPS.prefill_attention(q, k, v, tables.segments, tables.cu_seqlens, *spec)
    truth = by_rows(site, batch, inputs)
    rank = torch.argsort(order)  # prefixes are numbered row by row
    torch.testing.assert_close(out[rank], truth.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse.T[rank], truth.lse, rtol=1e-12, atol=1e-12)
    loss = (out[rank] * inputs["weigh_out"]).sum() + (lse.T[rank] * inputs["weigh_lse"]).sum()
    for name, gradient in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
        torch.testing.assert_close(gradient, truth.gradients[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("kernel", "softcap", "error", "text"),
    [
        (
            "cpu_flash",
            1.0,
            NotImplementedError,
            "kernel 'cpu_flash' cannot run this attention: torch's CPU kernel has no soft-cap; use kernel='auto'",
        ),
        (
            "aten_flash",
            0.0,
            NotImplementedError,
            "kernel 'aten_flash' cannot run this attention: it runs on CUDA, the tensors are on cpu; use kernel='auto'",
        ),
        (
            "cudnn",
            0.0,
            NotImplementedError,
            "kernel 'cudnn' cannot run this attention: it runs on CUDA, the tensors are",
        ),
        ("flash", 0.0, ValueError, f"kernel must be one of {', '.join(kernels.NAMES)}, got 'flash'"),
    ],
)
def test_a_kernel_runs_or_raises(kernel: str, softcap: float, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        OPS.replay_attention(*replay_arguments(Site(softcap=softcap), torch.float32, kernel=kernel))


@pytest.mark.parametrize("kernel", ["reference", "cpu_flash"])
@pytest.mark.parametrize("site", [Site(), Site(window=2, v_head_dim=5), Site(sinks=True)], ids=["", "window", "sinks"])
@pytest.mark.parametrize("with_dlse", [False, True])
def test_tokens_outside_all_calls_do_not_matter(site: Site, kernel: str, with_dlse: bool) -> None:
    """Padding at the end of the packed tokens, full of NaN: 0 and -inf forward, 0 backward, and nobody else notices."""
    arguments = replay_arguments(site, torch.float64, kernel=kernel, grad=False)
    torch.manual_seed(0)
    clean = backward_arguments(arguments, with_dlse=with_dlse)
    poison = [torch.cat([x, x.new_full((3, *x.shape[1:]), torch.nan)]) for x in arguments[:3]]
    out, lse = OPS.replay_attention(*poison, *arguments[3:])
    count = len(arguments[0])
    assert torch.equal(out[:count], clean[5]) and torch.equal(lse[:, :count], clean[6])
    assert not out[count:].any() and (lse[:, count:] == -torch.inf).all()
    dout = torch.cat([clean[0], torch.ones_like(clean[0][:3])])
    dlse = torch.cat([clean[1], torch.ones_like(clean[1][:, :3])], dim=1) if with_dlse else None
    found = OPS.replay_attention_backward(dout, dlse, *poison, out, lse, *arguments[3:])
    for gradient, expected in zip(found[:3], OPS.replay_attention_backward(*clean), strict=False):
        assert torch.equal(gradient[:count], expected) and not gradient[count:].any()
    torch.testing.assert_close(found[3], OPS.replay_attention_backward(*clean)[3], rtol=1e-12, atol=1e-12)


def views(x: Tensor) -> dict[str, Tensor]:
    """The same numbers behind other strides: a transposed ``[1, H, T, D]``, a part of a fused projection, odd ones."""
    fused = torch.cat([x, x + 1, x - 1], dim=1)
    apart = torch.stack([x, x + 1], dim=-1)
    return {
        "heads first": x.transpose(0, 1).contiguous().transpose(0, 1),
        "fused": fused[:, : x.shape[1]],
        "last dim not contiguous": apart[..., 0],
        "last dim first": x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    }


@pytest.mark.parametrize("kernel", ["reference", "cpu_flash"])
@pytest.mark.parametrize("site", [Site(), Site(window=2, v_head_dim=5, sinks=True)], ids=["plain", "window"])
@pytest.mark.parametrize("view", ["heads first", "fused", "last dim not contiguous", "last dim first"])
def test_strides_do_not_matter(site: Site, view: str, kernel: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, loss_weights: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = attend(site, LAYOUT, *leaves, sinks, kernel)
        return [out, lse, *torch.autograd.grad((out * loss_weights).sum() + lse.sum(), leaves)]

    q, k, v, *_ = replay_arguments(site, torch.float64, grad=False)
    sinks = torch.ones(site.heads, dtype=torch.float64) if site.sinks else None
    weights = torch.randn(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    plain = run(q, k, v, weights)
    strided = run(*(views(x)[view] for x in (q, k, v)), views(weights)[view])
    for found, expected in zip(strided, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    out, _ = attend(site, LAYOUT, q.requires_grad_(), k, v, sinks, kernel)
    expanded = torch.autograd.grad(out.sum(), q)[0]  # the gradient of a sum has strides 0
    out, _ = attend(site, LAYOUT, q, k, v, sinks, kernel)
    torch.testing.assert_close(expanded, torch.autograd.grad(out, q, torch.ones_like(out))[0], rtol=1e-12, atol=1e-12)


def small_call(**changes: Any) -> tuple[Any, ...]:
    """Arguments of `replay_attention` for a small tree, some of them changed."""
    tables = TreeLayout.from_groups([[1, 2, 3]], [[[4], [5, 6]]]).tables()
    given = {
        "q": torch.randn(6, 4, 8), "k": torch.randn(6, 2, 8), "v": torch.randn(6, 2, 8), "segments": tables.segments,
        "cu_seqlens": tables.cu_seqlens, "kv_index": None, "sinks": None, "scale": 1.0, "window": 0, "softcap": 0.0,
        "kernel": "auto",
    }  # fmt: skip
    return tuple((given | changes).values())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"q": torch.randn(5, 4, 8)}, "the tables are of 6 queries and 6 keys, got 5 and 6"),
        ({"k": torch.randn(4, 2, 8), "v": torch.randn(4, 2, 8)}, "6 queries and 6 keys, got 6 and 4"),
        ({"q": torch.randn(6, 3, 8)}, "query heads must be a multiple of key heads, got 3 and 2"),
        ({"v": torch.randn(6, 1, 8)}, r"q must be \[T, H, D\], k \[S, K, D\], v \[S, K, E\]"),
        ({"k": torch.randn(6, 2, 4)}, r"q must be \[T, H, D\]"),
        ({"window": -3}, "window and softcap must be at least 0 .none., got -3"),
        ({"softcap": -1.0}, "got 0 and -1.0"),
        ({"window": 3}, "a window of 3 needs tables of that window"),
        ({"segments": torch.zeros(3, 6, dtype=torch.int32)}, r"segments must be \[segments, 6\] int64, got \(3, 6\)"),
        ({"cu_seqlens": torch.zeros(2, 3, dtype=torch.int32)}, r"cu_seqlens must be \[2, 6\] for these segments"),
    ],
)
def test_what_kernels_take_for_granted_is_checked(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        torch.ops.augtree.replay_attention(*small_call(**changes))


def test_first_derivatives_with_a_graph_and_no_second_ones() -> None:
    q = torch.randn(6, 4, 8, requires_grad=True)
    out, _ = torch.ops.augtree.replay_attention(*small_call(q=q))
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    (expected,) = torch.autograd.grad(torch.ops.augtree.replay_attention(*small_call(q=q))[0].sum(), q)
    assert dq.shape == expected.shape
    with pytest.raises(NotImplementedError, match="attention has no second derivative; call backward without create_g"):
        torch.autograd.grad(dq.sum(), q)
