"""Merging partial attentions against one softmax over all keys in float64, which shares no code with the library.

The truth takes every partial for one key whose logit is its LSE, after the partials were rounded to the case's dtype.
Tolerances are worst cases: one rounding of the result in its dtype, and arithmetic in float32 (float64 for float64).
There a weight exp(lse_i - lse) is off by some eps times the size of the LSEs, because these are rounded to start with.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from augtree_fx import compiled, merge, reference

ROOT = Path(__file__).resolve().parents[1]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
EPSILON = {torch.float64: 1e-13, torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}
if INTERPRETED:
    EPSILON[torch.bfloat16] *= 2  # Triton's interpreter truncates to bfloat16; compiled, it rounds
LAYOUTS = ("token-major", "head-major", "padded", "fused heads", "last dim strided")


@dataclass
class Case:
    """Partials in ``dtype`` and, in float64, what they are partials of; gradients of a weighted sum of both results."""

    outs: list[Tensor]
    lses: list[Tensor]
    sinks: Tensor | None
    dout: Tensor
    dlse: Tensor | None
    true_out: Tensor
    true_lse: Tensor
    true_douts: list[Tensor]
    true_dlses: list[Tensor]
    true_dsinks: Tensor | None


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The numbers of ``x [T, H, E]`` behind other strides; what lies between them is NaN."""
    tokens, heads, size = x.shape
    if layout == "head-major":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "padded":  # a kernel's head size rounded up
        view = x.new_full((tokens, heads, size + 8), torch.nan)[..., :size]
    elif layout == "fused heads":  # starts in the middle of an allocation, at an address that is no multiple of 16
        view = x.new_full((tokens + 2, heads + 1, size), torch.nan)[1:-1, 1:]
    elif layout == "last dim strided":
        view = x.new_full((tokens, heads, size, 2), torch.nan)[..., 1]
    else:
        return x.contiguous()
    return view.copy_(x)


def make_case(
    tokens: int = 6,
    heads: int = 3,
    size: int = 8,
    parts: int = 3,
    dtype: torch.dtype = torch.float64,
    *,
    sinks: bool = False,
    dlse: bool = True,
    empty: float = 0.3,
    layout: str = "token-major",
    garbage: float = torch.nan,
    scale: float = 3.0,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """Three keys a partial; ``empty`` is the share of (partial, head, token) that see none of them."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(parts, 3, heads, tokens, generator=rng, dtype=torch.float64) * scale
    values = torch.randn(parts, 3, tokens, heads, size, generator=rng, dtype=torch.float64)
    unseen = torch.rand(parts, heads, tokens, generator=rng) < empty
    logits = logits.masked_fill(unseen[:, None], -torch.inf)
    sink = torch.randn(heads, generator=rng, dtype=torch.float64).to(dtype) if sinks else None
    dout = torch.randn(tokens, heads, size, generator=rng, dtype=torch.float64).to(dtype)
    wide = dtype if dtype == torch.float64 else torch.float32
    dlse_HT = torch.randn(heads, tokens, generator=rng, dtype=torch.float64).to(wide) if dlse else None

    weights = torch.softmax(logits, dim=1).nan_to_num()
    outs = torch.einsum("pkht,pkthe->pthe", weights, values).to(dtype)
    lses = logits.logsumexp(dim=1).to(wide)
    truth = concatenated_softmax(outs.double(), lses.double(), None if sink is None else sink.double(), dout, dlse_HT)
    hidden = unseen.transpose(1, 2)[..., None].expand_as(outs)
    outs = torch.where(hidden, torch.tensor(garbage, dtype=dtype), outs)
    columns = torch.full((parts, heads + 1, tokens + 5), torch.nan, dtype=wide, device=device)  # LSEs of a query range
    columns[:, :heads, 3 : tokens + 3] = lses.to(device)
    return Case(
        [laid_out(x.to(device), layout) for x in outs],
        [x[:heads, 3 : tokens + 3] for x in columns],
        *(None if x is None else x.to(device) for x in (sink, dout, dlse_HT)),  # type: ignore[arg-type]
        *truth,
    )


def concatenated_softmax(outs: Tensor, lses: Tensor, sinks: Tensor | None, dout: Tensor, dlse: Tensor | None) -> Any:
    """Every partial is one key with logit ``lse`` and value ``out``; plain softmax over those keys, and autograd."""
    leaves = [*outs.clone(), *lses.clone(), *([] if sinks is None else [sinks.clone()])]
    for leaf in leaves:
        leaf.requires_grad_()
    parts = len(outs)
    logits = torch.stack(leaves[parts : 2 * parts], dim=-1)
    if sinks is not None:
        logits = torch.cat([logits, leaves[-1][:, None, None].expand(*logits.shape[:2], 1)], dim=-1)
    alive = (logits > -torch.inf).any(-1)
    weights = torch.softmax(torch.where(alive[..., None], logits, 0.0), dim=-1) * alive[..., None]
    out = torch.einsum("htp,pthe->the", weights[..., :parts], torch.stack(leaves[:parts]))
    lse = torch.where(alive[..., None], logits, 0.0).logsumexp(dim=-1)
    loss = (out * dout.double()).sum() + (0.0 if dlse is None else (lse * dlse.double() * alive).sum())
    grads = torch.autograd.grad(loss, leaves)
    lse = torch.where(alive, lse, -torch.inf)
    dsinks = None if sinks is None else grads[-1]
    return out.detach(), lse.detach(), list(grads[:parts]), list(grads[parts : 2 * parts]), dsinks


def assert_close(found: Tensor, truth: Tensor, tolerance: float, what: str) -> None:
    assert found.shape == truth.shape, what
    found, finite = found.double().cpu(), torch.isfinite(truth)
    assert torch.equal(torch.isfinite(found), finite), f"{what}: NaN or infinity in the wrong place"
    assert torch.equal(found[~finite], truth[~finite]), what
    error = float((found - truth)[finite].abs().max()) if finite.any() else 0.0
    assert error <= tolerance, f"{what} is off by {error}, more than {tolerance}"


@dataclass
class Bounds:
    """What rounding can do to the results of a case."""

    rounding: float  # relative error of one number in the dtype
    weight: float  # relative error of a weight, and absolute error of an LSE
    largest: float  # of any output or output gradient
    product: float  # of sums over E of |dout * out|

    @classmethod
    def of(cls, case: Case) -> Bounds:
        lses = torch.cat([x.flatten() for x in (*case.lses, case.true_lse.to(case.lses[0].device))])
        sinks = [] if case.sinks is None else [case.sinks.double().abs().max().cpu()]
        largest_lse = max([1.0, *lses[torch.isfinite(lses)].abs().tolist(), *map(float, sinks)])
        outs = torch.stack([x.double().cpu() for x in case.outs])
        outs = torch.where((torch.stack(case.lses).cpu() > -torch.inf).transpose(1, 2)[..., None], outs, 0.0).abs()
        dout = case.dout.double().cpu().abs()
        dlse = 0.0 if case.dlse is None else float(case.dlse.abs().max())
        largest = max(1.0, float(outs.max()), float(dout.max()))
        product = max(1.0, float((outs.amax(0) * dout).sum(-1).max()) + dlse)
        wide = EPSILON[case.lses[0].dtype]
        return cls(EPSILON[case.outs[0].dtype], 4 * wide * largest_lse, largest, product)


Forward = Callable[..., tuple[Tensor, Tensor]]


def check_forward(case: Case, run: Forward = merge.partial_softmax, *, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """In place: out is the memory of the first partial, LSE that of its LSE, a part of a larger array."""
    dtype, bounds = case.outs[0].dtype, Bounds.of(case)
    kept = [x.clone() for x in (*case.outs[1:], *case.lses[1:])]
    found = (
        run(case.outs, case.lses, case.sinks, out=case.outs[0], lse=case.lses[0])
        if in_place
        else run(case.outs, case.lses, case.sinks)
    )
    for before, after in zip(kept, (*case.outs[1:], *case.lses[1:]), strict=True):
        assert torch.equal(before.nan_to_num(), after.nan_to_num()), "an input was written to"
    if in_place:
        assert found[0].data_ptr() == case.outs[0].data_ptr() and found[1].data_ptr() == case.lses[0].data_ptr()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert found[0].dtype == dtype and found[1].dtype == wide
    assert_close(found[0], case.true_out, (bounds.rounding + bounds.weight) * bounds.largest, "out")
    assert_close(found[1], case.true_lse, bounds.weight, "lse")
    return found


def check_backward(case: Case, run: Callable[..., Any] = merge.partial_softmax_backward) -> None:
    """The deltas see an ``out`` that was rounded to the dtype."""
    dtype, wide, bounds = case.outs[0].dtype, case.lses[0].dtype, Bounds.of(case)
    out, lse = case.true_out.to(case.dout), case.true_lse.to(case.lses[0])
    douts, dlses, dsinks = run(case.dout, case.dlse, case.outs, case.lses, case.sinks, out, lse)
    relative = bounds.rounding + bounds.weight
    for number, (found, truth) in enumerate(zip(douts, case.true_douts, strict=True)):
        assert found.dtype == dtype
        assert_close(found, truth, relative * bounds.largest, f"dout {number}")
    for number, (found, truth) in enumerate(zip(dlses, case.true_dlses, strict=True)):
        assert found.dtype == wide
        assert_close(found, truth, relative * bounds.product, f"dlse {number}")
    assert (dsinks is None) == (case.sinks is None)
    if case.sinks is not None and case.true_dsinks is not None:
        assert dsinks.dtype == case.sinks.dtype
        assert_close(dsinks, case.true_dsinks, 2 * relative * bounds.product * len(out), "dsinks")


def check_sink_gradient(case: Case, sink: Any = merge.sink_gradient) -> None:
    dtype, bounds = case.outs[0].dtype, Bounds.of(case)
    out, lse = case.true_out.to(case.dout), case.true_lse.to(case.lses[0])
    if case.sinks is not None and case.true_dsinks is not None:
        found = sink(case.dout, case.dlse, out, lse, case.sinks)
        assert found.dtype == dtype
        tolerance = 2 * (bounds.rounding + bounds.weight) * bounds.product * len(out)
        assert_close(found, case.true_dsinks, tolerance, "dsinks")


def check_all(case_of: Callable[[], Case], kernels: Any = merge) -> None:
    """``case_of`` makes a fresh case each time, because merging in place consumes one."""
    check_backward(case_of(), kernels.partial_softmax_backward)
    check_sink_gradient(case_of(), kernels.sink_gradient)
    first = check_forward(case_of(), kernels.partial_softmax)
    if case_of().outs[0].stride(-1) == 1:
        second = check_forward(case_of(), kernels.partial_softmax, in_place=True)
        assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


CASES = {
    "tokens": st.integers(1, 40),
    "heads": st.integers(1, 9),
    "size": st.integers(1, 40) | st.sampled_from([64, 80, 128]),
    "parts": st.integers(1, 10),
    "sinks": st.booleans(),
    "dlse": st.booleans(),
    "empty": st.sampled_from([0.0, 0.3, 1.0]),
    "layout": st.sampled_from(LAYOUTS),
    "garbage": st.sampled_from([torch.nan, torch.inf, 7.0]),
    "scale": st.sampled_from([1.0, 30.0]),
    "seed": st.integers(0, 9),
}


@given(**CASES, dtype=st.sampled_from(list(EPSILON)))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_one_softmax_over_all_keys(**arguments: Any) -> None:
    check_all(lambda: make_case(**arguments))


@given(tokens=st.integers(1, 6), heads=st.integers(1, 3), size=st.integers(1, 4), parts=st.integers(1, 4))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_nothing_else_than_the_reference(tokens: int, heads: int, size: int, parts: int) -> None:
    """Bit for bit where every partial saw keys: float64 on the CPU runs what the specification says."""
    case = make_case(tokens, heads, size, parts, empty=0.0)
    found = merge.partial_softmax(case.outs, case.lses, case.sinks)
    for ours, theirs in zip(found, reference.partial_softmax(case.outs, case.lses, case.sinks), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 2, 0)], ids=["tokens", "heads", "size"])
def test_no_numbers_at_all(shape: tuple[int, int, int]) -> None:
    outs, lses = [torch.empty(shape)] * 2, [torch.zeros(shape[1], shape[0])] * 2
    out, lse = merge.partial_softmax(outs, lses, None)
    assert out.shape == shape
    torch.testing.assert_close(lse, torch.full_like(lse, 2.0).log())


T3 = torch.zeros(5, 2, 4)
L2 = torch.zeros(2, 5)


@pytest.mark.parametrize(
    ("arguments", "destinations", "text"),
    [
        (([], [], None), {}, "partials must be pairs of an output and an LSE, one or more, got 0 outputs and 0 LSEs"),
        (([T3], [L2, L2], None), {}, "got 1 outputs and 2 LSEs; pass lists of equal length"),
        (
            ([T3, T3[1:]], [L2, L2], None),
            {},
            "outputs of partials must be [T, H, E] of one shape and dtype, got [5, 2, 4] torch.float32, "
            "[4, 2, 4] torch.float32; slice them alike",
        ),
        (([T3, T3.half()], [L2, L2], None), {}, "got [5, 2, 4] torch.float32, [5, 2, 4] torch.float16; slice them"),
        (([T3], [L2.T], None), {}, "LSEs must be [H, T], got [5, 2] for outputs [5, 2, 4]; pass [2, 5]"),
        (([T3], [L2], L2[0]), {}, "sinks must be [H], got [5] for outputs [5, 2, 4]; pass [2]"),
        (
            ([T3], [L2], None),
            {"out": T3.double()},
            "destination out must be like the partials, [5, 2, 4] torch.float32, got [5, 2, 4] torch.float64; make it",
        ),
        (
            ([T3], [L2], None),
            {"lse": L2[:, 1:]},
            "destination lse must be like the partials, [2, 5] torch.float32, got",
        ),
        (
            ([T3], [L2], None),
            {"out": torch.zeros(4, 2, 5).permute(2, 1, 0)},
            "destination out must have a contiguous last dim, got strides (1, 5, 10); leave out=None and copy",
        ),
    ],
)
def test_what_does_not_fit_is_refused(arguments: Any, destinations: dict[str, Tensor], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        merge.partial_softmax(*arguments, **destinations)
    if not destinations:
        with pytest.raises(ValueError, match=re.escape(text)):
            merge.partial_softmax_backward(T3, None, *arguments, T3, L2)


class TestCompiled:
    """The CPU's compiled merge. The threshold is lowered, so that small cases take it."""

    @pytest.fixture(autouse=True)
    def from_one_number_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compiled, "COMPILE_FROM", 1)
        torch._dynamo.reset()
        if compiled._why_never() is not None:
            pytest.skip(f"this machine cannot compile: {compiled._why_never()}")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("sinks", [False, True])
    def test_against_float64(self, dtype: torch.dtype, sinks: bool) -> None:
        check_all(lambda: make_case(17, 5, 24, 3, dtype, sinks=sinks))

    def test_compiles_once_for_all_sizes_and_layouts(self) -> None:
        # Sizes that differ in what a compiler may specialise on: 0 and 1, equal sizes, multiples of 16.
        torch._dynamo.utils.counters.clear()
        for tokens in (7, 16, 33, 5, 128, 2, 250, 64):
            for layout in LAYOUTS:
                check_forward(make_case(tokens, 3, 8, 2, torch.float32, layout=layout))
                check_backward(make_case(tokens, 3, 8, 2, torch.float32, layout=layout))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
        assert not torch._dynamo.utils.counters["graph_break"]

    def test_many_variants_stay_bounded(self) -> None:
        """Past torch's limit of variants of one function it runs eagerly, still right."""
        torch._dynamo.utils.counters.clear()
        for parts in range(1, 9):
            for sinks in (False, True):
                check_forward(make_case(9, 3, 8, parts, torch.float32, sinks=sinks))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= torch._dynamo.config.recompile_limit

    def test_inside_a_users_compiled_function(self) -> None:
        """The op in a compiled model, with gradients: at run time its implementation compiles the merge."""

        def loss(outs: list[Tensor], lses: list[Tensor]) -> Tensor:
            out, lse = torch.ops.augtree.partial_softmax(outs, lses, None)
            return (out * 2).sum() + lse.sum()

        for tokens in (6, 11):
            case = make_case(tokens, dtype=torch.float32, empty=0.0, dlse=False)
            leaves = [x.detach().requires_grad_() for x in (*case.outs, *case.lses)]
            expected = torch.autograd.grad(loss(leaves[:3], leaves[3:]), leaves)
            found = torch.autograd.grad(torch.compile(loss, dynamic=True)(leaves[:3], leaves[3:]), leaves)
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    def test_where_it_is_not_compiled(self) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        why = compiled.why_eager
        small = [torch.zeros(3)]
        assert why(small) is None
        with FlopCounterMode(display=False):
            assert why(small) == "something watches or stands in for the tensors"
        assert (
            why([torch.zeros(3, dtype=torch.float64)]) == "float64 is for exact comparisons: it runs as it is written"
        )
        assert why([torch.zeros(3, device="meta")]) == "it is not on the CPU"
        assert why([torch.zeros(0)]) == "it is too small to pay"
        assert why([torch.nn.Parameter(torch.zeros(3))]) is None


NO_COMPILER = """
import logging, sys, torch
from augtree_fx import compiled, merge
logging.basicConfig(stream=sys.stderr)
compiled.COMPILE_FROM = 1
outs, lses = [torch.ones(4, 2, 3)] * 2, [torch.zeros(2, 4)] * 2
for _ in range(3):
    out, lse = merge.partial_softmax(outs, lses, None)
torch.testing.assert_close(out, outs[0])
"""


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])  # packages may lie outside of site-packages
    env = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)


def test_without_a_compiler_it_stays_eager_and_says_so_once() -> None:
    done = run_python("-c", NO_COMPILER, CXX="/nowhere/c++")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "augtree_fx" in line and "stays eager" in line]
    assert len(said) == 1, done.stderr


def test_small_merges_do_not_try_the_compiler(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_why_never", lambda: pytest.fail("tried to compile"))
    with caplog.at_level(logging.INFO, logger="augtree_fx"):
        check_forward(make_case(dtype=torch.float32))
    assert not caplog.records


class LaunchesOnCpu:
    """The Triton kernels behind the interface of `merge`, for CPU tensors under Triton's interpreter."""

    @staticmethod
    def partial_softmax(
        outs: list[Tensor], lses: list[Tensor], sinks: Tensor | None, out: Tensor | None = None, lse: Any = None
    ) -> tuple[Tensor, Tensor]:
        from augtree_fx.kernels import merge_triton

        out = torch.full_like(outs[0].contiguous(), torch.nan) if out is None else out
        lse = torch.full_like(lses[0].contiguous(), torch.nan) if lse is None else lse
        merge_triton.partial_softmax(outs, lses, sinks, out, lse)
        return out, lse

    def __getattr__(self, name: str) -> Any:
        from augtree_fx.kernels import merge_triton

        return getattr(merge_triton, name)


@pytest.mark.skipif(not (HAS_TRITON and INTERPRETED), reason="needs triton and TRITON_INTERPRET=1")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
class TestInterpreted:
    @given(**CASES, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.differing_executors])
    def test_one_softmax_over_all_keys(self, **arguments: Any) -> None:
        check_all(lambda: make_case(**arguments), LaunchesOnCpu())


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.skipif(INTERPRETED, reason="runs what is being run")
def test_triton_kernels_under_its_interpreter() -> None:
    done = run_python("-m", "pytest", "-q", f"{__file__}::TestInterpreted", TRITON_INTERPRET="1")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCuda:
    """The real kernels; without Triton the same checks run the reference on the GPU."""

    @given(**CASES, dtype=st.sampled_from(list(EPSILON)))
    @settings(
        max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.differing_executors]
    )
    def test_one_softmax_over_all_keys(self, **arguments: Any) -> None:
        check_all(lambda: make_case(**arguments, device="cuda"))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("size", [64, 128, 192, 256, 512])
    @pytest.mark.parametrize("parts", [1, 2, 4, 8, 11])
    def test_head_sizes(self, size: int, parts: int, dtype: torch.dtype) -> None:
        check_all(lambda: make_case(333, 16, size, parts, dtype, sinks=True, device="cuda"))

    def test_compiles_once_for_all_query_ranges(self) -> None:
        """Beginnings and lengths of ranges take every residue of 16; Triton must not compile a variant for each."""
        merge_triton = pytest.importorskip("augtree_fx.kernels.merge_triton")
        case = make_case(200, 4, 64, 2, torch.bfloat16, empty=0.0, device="cuda")

        def run(begin: int, end: int) -> None:
            outs, lses = [x[begin:end] for x in case.outs], [x[:, begin:end] for x in case.lses]
            out, lse = merge.partial_softmax(outs, lses, None)
            merge.partial_softmax(outs, lses, None, out=out, lse=case.lses[0][:, begin:end].clone())
            merge.partial_softmax_backward(out, lse, outs, lses, None, out, lse)

        def variants() -> list[int]:
            kernels = (merge_triton._merge_kernel, merge_triton._merge_backward_kernel)
            return [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]

        run(0, 16)
        before = variants()
        for begin in range(20):
            run(begin, begin + 1)
            run(begin, 199 - 3 * begin)
        assert variants() == before

    def test_gradients_do_not_vary(self) -> None:
        case = make_case(4096, 8, 64, 2, torch.bfloat16, sinks=True, empty=0.0, device="cuda")
        out, lse = merge.partial_softmax(case.outs, case.lses, case.sinks)
        runs = [
            merge.partial_softmax_backward(case.dout, case.dlse, case.outs, case.lses, case.sinks, out, lse)[2]
            for _ in range(3)
        ]
        assert all(torch.equal(x, runs[0]) for x in runs)

    def test_offsets_past_two_to_the_31(self) -> None:
        tokens, heads, size = (1 << 31) // (32 * 128) + 100, 32, 128
        if torch.cuda.mem_get_info()[0] < 30e9:
            pytest.skip("needs 30 GB of GPU memory")
        outs = [torch.zeros(tokens, heads, size, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        lses = [torch.zeros(heads, tokens, device="cuda") for _ in range(2)]
        outs[0][-50:], outs[1][-50:] = 1.0, 3.0
        lses[1][:, -50:] = torch.tensor(3.0).log()
        out, lse = merge.partial_softmax(outs, lses, None, out=outs[0], lse=lses[0])
        torch.testing.assert_close(out[-50:], torch.full_like(out[-50:], 2.5))
        torch.testing.assert_close(lse[:, -50:], torch.full_like(lse[:, -50:], 4.0).log())
        assert not out[:-50].any()
