"""Adapters of FlashAttention-2, -3 and -4: arithmetic through stand-ins on the CPU, and every reason to pass them over.

Tolerance: inputs are float32, as is the LSE; sums of up to a hundred terms of order 1 agree to 1e-5 (eps 6e-8).
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import fake_flash_attention as fakes
import fake_flash_attention_4 as fakes_4
import pytest
import torch
from attention_reference import Site, assert_same, by_rows, by_tree, make_inputs
from row_reference import padded
from torch import Tensor

from augtree_fx import CostModel, TreeLayout, kernels
from augtree_fx.kernels import flash_attn_2, flash_attn_3, flash_attn_4, packages, reference
from augtree_fx.kernels.problem import Problem
from augtree_fx.reference import AttentionSpec
from augtree_fx.tables import AttentionCall, Segment

BUILDS = {
    "flash_attn_2": (flash_attn_2, fakes.flash_attn_2),
    "flash_attn_3": (flash_attn_3, fakes.flash_attn_3),
    "flash_attn_3 beta": (flash_attn_3, fakes.flash_attn_3_beta),
    "flash_attn_4": (flash_attn_4, fakes_4.interface),
}
PROBLEM = Problem(
    device_type="cuda",
    capability=(9, 0),
    dtype=torch.bfloat16,
    head_dim=64,
    v_head_dim=64,
    grouped=True,
    causal=True,
    window=0,
    softcap=0.0,
    num_segments=3,
    num_queries=100,
    num_keys=100,
    aligned=True,
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No package is remembered from before or after, and every torch.empty is NaN."""
    packages.forget()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    packages.forget()


Install = Callable[[str, ModuleType | None, str], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """Puts a module in place under a distribution's version; ``None`` makes it absent."""
    for name in (
        "flash_attn.flash_attn_interface",
        "flash_attn.cute.interface",
        "flash_attn_interface",
        "flash_attn_config",
    ):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.syspath_prepend(tmp_path)

    def put(distribution: str, module: ModuleType | None, version: str = "") -> None:
        if module is not None:
            monkeypatch.setitem(sys.modules, module.__name__, module)
        if version:
            info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        packages.forget()

    return put


def make_call(lengths: list[tuple[int, int]], causal: bool) -> AttentionCall:
    """Neighbouring segments of so many queries and keys, of a call that starts at query 5 and key 7."""
    segments, q, k = [], 5, 7
    for num_queries, num_keys in lengths:
        segments.append(Segment(q, q + num_queries, k, k + num_keys))
        q, k = q + num_queries, k + num_keys
    columns = torch.tensor([(0, 0), *lengths]).cumsum(0).int().T.contiguous()
    return AttentionCall(tuple(segments), causal, *columns)


SAME, LONGER, EMPTY = [(5, 5), (1, 1), (40, 40)], [(3, 9), (1, 60), (6, 6)], [(4, 0), (3, 5), (0, 2), (2, 7)]
CASES = {
    "causal": (Site(head_dim=16, v_head_dim=16), SAME, True),
    "unmasked": (Site(head_dim=16, v_head_dim=16), LONGER, False),
    "multi-query": (Site(kv_heads=1), SAME, True),
    "aligned at the last key": (Site(), LONGER, True),
    "window": (Site(window=4), LONGER, True),
    "window of one": (Site(window=1), LONGER, True),
    "window of an unmasked call": (Site(window=4), LONGER, False),
    "soft-cap": (Site(softcap=1.5), SAME, True),
    "soft-cap and window": (Site(softcap=1.5, window=3), LONGER, True),
    "odd head size": (Site(head_dim=6, v_head_dim=6), SAME, True),
    "narrow values": (Site(head_dim=24, v_head_dim=5), LONGER, False),
    "wide values": (Site(head_dim=6, v_head_dim=20), LONGER, True),
    "empty segments": (Site(), EMPTY, False),
    "empty causal segments": (Site(), EMPTY, True),
    "fewer keys than queries": (Site(window=2), [(6, 2), (3, 3)], True),
}


def views(x: Tensor) -> dict[str, Tensor]:
    """The same numbers behind other strides."""
    return {
        "contiguous": x.contiguous(),
        "heads first": x.transpose(0, 1).contiguous().transpose(0, 1),
        "part of a fused projection": torch.cat([x - 1, x, x + 1], dim=1)[:, x.shape[1] : 2 * x.shape[1]],
        "last dim not contiguous": torch.stack([x, x + 1], dim=-1)[..., 0],
    }


@pytest.mark.parametrize("view", ["contiguous", "heads first", "part of a fused projection", "last dim not contiguous"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("build", BUILDS)
def test_adapter_matches_the_reference_with_global_lse(build: str, case: str, view: str, install: Install) -> None:
    adapter, make = BUILDS[build]
    site, lengths, causal = CASES[case]
    install(adapter.PACKAGE.distribution, make())
    assert adapter.why_not(replace(PROBLEM, softcap=site.softcap, window=site.window), explicit=True) is None
    torch.manual_seed(0)
    call, spec = make_call(lengths, causal), AttentionSpec(site.scale, site.window, site.softcap)
    num_queries, num_keys = (sum(column) for column in zip(*lengths, strict=True))
    q = torch.randn(num_queries, site.heads, site.head_dim)
    k, v = (torch.randn(num_keys, site.kv_heads, size) for size in (site.head_dim, site.v_head_dim))
    dout = torch.randn(num_queries, site.heads, site.v_head_dim)
    wide = [x.double() for x in (q, k, v)]
    true_out, true_lse = reference.forward(*wide, call, spec)
    out, lse = adapter.forward(*(views(x)[view] for x in (q, k, v)), call, spec)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), true_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-5, atol=1e-5)  # also -inf and -inf
    # As if another partial held three quarters of the weight; a query without keys here has them there, but for one.
    global_lse = torch.where(true_lse == -torch.inf, 0.3, true_lse + 1.4)
    global_lse[:, 0] = true_lse[:, 0]
    global_out = true_out * 0.3
    given = [views(x.float())[view] for x in (dout, q, k, v, global_out)]
    around = torch.cat([torch.full((site.heads, 5), torch.nan), global_lse.float()], dim=1)
    given_lse = around.T.contiguous().T[:, 5:] if view == "heads first" else around[:, 5:]
    found = adapter.backward(*given, given_lse, call, spec)
    truth = reference.backward(dout.double(), *wide, global_out, global_lse, call, spec)
    for gradient, expected in zip(found, truth, strict=True):
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=2e-5)
    assert all(torch.equal(x, y.float()) for x, y in zip((q, k, v), wide, strict=True)), "inputs were written to"


@pytest.mark.parametrize("build", BUILDS)
def test_forward_without_any_key(build: str, install: Install) -> None:
    """A path of its own in the packages: their kernel does not run. No layout makes such a call."""
    adapter, make = BUILDS[build]
    install(adapter.PACKAGE.distribution, make())
    q, k = torch.randn(6, 4, 8), torch.randn(0, 2, 8)
    out, lse = adapter.forward(q, k, k, make_call([(4, 0), (2, 0)], False), AttentionSpec(0.4))
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("build", BUILDS)
def test_expanded_output_gradient(build: str, install: Install) -> None:
    adapter, make = BUILDS[build]
    install(adapter.PACKAGE.distribution, make())
    call, spec = make_call(SAME, True), AttentionSpec(0.4)
    q = torch.randn(46, 4, 8)
    out, lse = adapter.forward(q, q, q, call, spec)
    one = torch.ones(())
    found = adapter.backward(one.expand_as(q), q, q, q, out, lse, call, spec)
    for gradient, expected in zip(
        found, reference.backward(one.expand_as(q), q, q, q, out, lse, call, spec), strict=True
    ):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "site",
    [
        Site(),
        Site(sinks=True, v_head_dim=12),
        Site(window=3),
        Site(softcap=1.5),
        Site(softcap=2.0, window=5, head_dim=6),
    ],
    ids=["plain", "sinks", "window", "soft-cap", "all"],
)
@pytest.mark.parametrize("build", BUILDS)
def test_tree_through_an_adapter(build: str, site: Site, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three levels, merged partials, and the LSE's own gradient, as the ops run them."""
    adapter, make = BUILDS[build]
    install(adapter.PACKAGE.distribution, make())
    monkeypatch.setattr(adapter, "why_not", lambda problem, *, explicit: None)  # it wants a GPU
    rows = [[9, 8, 7, 6, *task, *turn] for task in ([1] * 3, [2]) for turn in ([1], [2, 3], [2, 4, 4, 3], [2, 4, 5])]
    batch = padded([*rows, [3, 3, 3]], [20 - len(row) for row in rows] + [17], 20, "mask")
    costs = CostModel.free()
    layout = TreeLayout.from_padded(batch.input_ids, batch.attention_mask, batch.position_ids, costs=costs)
    assert layout.num_levels >= 3
    truth = by_rows(site, batch, make_inputs(site, batch))
    inputs = make_inputs(site, batch, torch.float32)
    assert_same(by_tree(site, batch, inputs, layout, adapter.NAME), truth, 1e-5)


ADAPTERS = pytest.mark.parametrize(
    "adapter", [flash_attn_2, flash_attn_3, flash_attn_4], ids=lambda module: module.NAME
)


def refusal(adapter: ModuleType, problem: Problem = PROBLEM) -> str:
    """The reason of an explicit choice, which is also what ``auto`` notes before it takes another kernel."""
    with pytest.raises(NotImplementedError) as raised:
        kernels.choose(problem, adapter.NAME)
    reason = adapter.why_not(problem, explicit=False)
    start = f"kernel {adapter.NAME!r} cannot run this attention: "
    assert reason and str(raised.value) == f"{start}{reason}; use kernel='auto'"
    choice = kernels.choose(problem)
    assert choice.name != adapter.NAME
    if adapter.NAME in dict(choice.passed_over):
        assert dict(choice.passed_over)[adapter.NAME] == reason
    return reason


@ADAPTERS
def test_absent_package_is_passed_over(adapter: ModuleType, install: Install) -> None:
    assert refusal(adapter) == f"{adapter.PACKAGE.distribution} is not installed"
    assert kernels.choose(replace(PROBLEM, softcap=20.0)).name == "reference"


def test_preference(install: Install) -> None:
    """FlashAttention-4, -3, then torch's kernels; flash-attn for nothing but what torch's copy cannot do."""
    softcapped, ampere = replace(PROBLEM, softcap=20.0), replace(PROBLEM, capability=(8, 0))
    install("flash-attn", fakes.flash_attn_2())
    assert kernels.choose(PROBLEM).name == "aten_flash"
    assert kernels.choose(softcapped).name == "flash_attn_2"
    assert kernels.choose(softcapped).passed_over[:2] == (
        ("flash_attn_4", "flash-attn-4 is not installed"),
        ("flash_attn_3", "flash-attn-3 is not installed"),
    )
    assert kernels.choose(replace(softcapped, capability=(8, 0))).name == "flash_attn_2"
    install("flash-attn-3", fakes.flash_attn_3())
    assert kernels.choose(PROBLEM).name == kernels.choose(softcapped).name == "flash_attn_3"
    assert kernels.choose(PROBLEM).passed_over == (("flash_attn_4", "flash-attn-4 is not installed"),)
    assert kernels.choose(ampere).name == "aten_flash"
    assert kernels.choose(PROBLEM, "flash_attn_2").name == "flash_attn_2"
    install("flash-attn-4", fakes_4.interface())
    assert kernels.choose(PROBLEM) == kernels.choose(softcapped) == kernels.Choice("flash_attn_4", ())
    assert kernels.choose(replace(PROBLEM, capability=(10, 0))).name == "flash_attn_4"
    assert kernels.choose(ampere).name == "aten_flash"
    assert dict(kernels.choose(ampere).passed_over)["flash_attn_4"] == (
        "it is used on compute capability 9 and 10, this device has 8.0"
    )
    assert kernels.choose(PROBLEM, "flash_attn_3").name == "flash_attn_3"


def test_changed_flash_attn_4_gives_way_to_flash_attn_3(install: Install) -> None:
    """What a later release drops or demands is named, and the next kernel is taken."""
    install("flash-attn-3", fakes.flash_attn_3())
    module = fakes_4.interface()
    backward = module._flash_attn_bwd

    def _flash_attn_bwd(q, k, v, out, dout, lse, plan, **rest): ...

    module._flash_attn_bwd = _flash_attn_bwd
    install("flash-attn-4", module, "4.1.0")
    choice = kernels.choose(PROBLEM)
    assert choice.name == "flash_attn_3"
    assert choice.passed_over[0][1] == (
        "flash-attn-4 4.1.0's _flash_attn_bwd has no parameter 'cu_seqlens_q'; this adapter was written for 4.0.0b36"
    )
    module._flash_attn_bwd = backward
    del module._flash_attn_fwd
    packages.forget()
    assert refusal(flash_attn_4) == ("flash-attn-4 4.1.0 has no _flash_attn_fwd; this adapter was written for 4.0.0b36")


@pytest.mark.parametrize(("old", "new"), [("softcap", "cap"), ("softmax_scale", "scale"), ("dq", "dq_out")])
@pytest.mark.parametrize("build", BUILDS)
def test_renamed_parameter(build: str, old: str, new: str, install: Install) -> None:
    """Signature drift: the reason names package, version, function and parameter."""
    adapter, make = BUILDS[build]
    module = make()
    names = [name for name in vars(module) if name.startswith("_flash")]
    changed = next(name for name in names if old in packages.parameters(getattr(module, name)))
    known = [new if name == old else name for name in packages.parameters(getattr(module, changed))]
    namespace: dict[str, object] = {}
    exec(f"def {changed}({', '.join(known)}): raise AssertionError", namespace)
    setattr(module, changed, namespace[changed])
    install(adapter.PACKAGE.distribution, module, "9.9.1")
    package = adapter.PACKAGE
    start = f"{package.distribution} 9.9.1's "
    text = refusal(adapter)
    assert text.startswith(start) and text.endswith(f"; this adapter was written for {package.written_for}")
    if "beta" not in build:  # a changed beta is told what the main branch has
        assert text == f"{start}{changed} has no parameter {old!r}; this adapter was written for {package.written_for}"


def test_renamed_parameter_of_a_custom_op(install: Install) -> None:
    """What `torch.library.custom_op` returns shows (*args, **kwargs) to inspect; its schema is read instead."""

    @torch.library.custom_op("fake_flash_attn_2::changed", mutates_args=())
    def changed(q: torch.Tensor, keys: torch.Tensor, softcap: float = 0.0) -> torch.Tensor:
        return q + keys

    assert packages.parameters(changed) == {"q": True, "keys": True, "softcap": False}
    module = fakes.flash_attn_2()
    module._flash_attn_varlen_forward = changed
    install("flash-attn", module, "2.9.0")
    assert refusal(flash_attn_2) == (
        "flash-attn 2.9.0's _flash_attn_varlen_forward has no parameter 'k'; this adapter was written for 2.8"
    )


def test_new_required_parameter(install: Install) -> None:
    def changed(sinks: object, **_: object) -> None: ...

    module = ModuleType("flash_attn_interface")
    module.changed = changed
    install("flash-attn-3", module)
    assert packages.missing_or_changed(flash_attn_3.PACKAGE, "changed", ()) == (
        "flash-attn-3 (version unknown)'s changed requires a parameter 'sinks'; this adapter was written for 3.0.0"
    )


@ADAPTERS
def test_function_that_is_gone(adapter: ModuleType, install: Install) -> None:
    install(adapter.PACKAGE.distribution, ModuleType(adapter.PACKAGE.module), "9.9.1")
    start = rf"{adapter.PACKAGE.distribution} 9\.9\.1 has no _flash_attn_\w*(forward|fwd)"
    assert re.fullmatch(rf"{start}; this adapter was written for [\d.b]+", refusal(adapter))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import flash_attn_2_cuda_", "No module named 'flash_attn_2_cuda_'"),
        ("raise ImportError('libflash.so: undefined symbol: _ZN3c10\\nmore')", "ImportError: libflash.so: undefined"),
        ("raise OSError('libcudart.so.12: cannot open')", "OSError: libcudart.so.12: cannot open"),
    ],
)
def test_broken_package(body: str, reason: str, install: Install, monkeypatch, tmp_path: Path) -> None:
    """A build for another torch or CUDA does not import; that is a reason, not a crash."""
    install("flash-attn-3", None, "3.0.0")
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    (tmp_path / "flash_attn_interface.py").write_text(body)
    text = refusal(flash_attn_3)
    assert text.startswith(f"flash-attn-3 3.0.0 cannot be imported: {reason}") and "\n" not in text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device_type": "cpu"}, "it runs on CUDA, the tensors are on cpu"),
        ({"dtype": torch.float32}, "it takes float16 and bfloat16, got torch.float32"),
        ({"v_head_dim": 257}, "it takes head sizes up to 256, got 264"),
    ],
)
@ADAPTERS
def test_limits(adapter: ModuleType, change: dict[str, object], reason: str, install: Install) -> None:
    install("flash-attn", fakes.flash_attn_2())
    install("flash-attn-3", fakes.flash_attn_3())
    assert refusal(adapter, replace(PROBLEM, **change)) == reason


def test_limits_of_devices_and_builds(install: Install) -> None:
    install("flash-attn", fakes.flash_attn_2())
    install("flash-attn-3", fakes.flash_attn_3(), "3.0.0")
    old = replace(PROBLEM, capability=(7, 5))
    assert refusal(flash_attn_2, old) == "it needs compute capability 8.0, this device has 7.5"
    blackwell = replace(PROBLEM, capability=(10, 0))
    assert refusal(flash_attn_3, blackwell) == "it is used on compute capability 9.0, this device has 10.0"
    large = replace(PROBLEM, head_dim=200)
    assert refusal(flash_attn_3, large) == "its deterministic backward takes head sizes up to 192, got 200"
    torch.use_deterministic_algorithms(False)
    assert kernels.choose(large).name == "flash_attn_3"
    config = ModuleType("flash_attn_config")
    config.CONFIG = {
        "build_flags": {f"FLASHATTENTION_DISABLE_{x}": True for x in ("SOFTCAP", "LOCAL", "FP16", "HDIM256")}
    }
    install("flash-attn-3", config)
    assert kernels.choose(PROBLEM).name == "flash_attn_3"
    built = "flash-attn-3 3.0.0 was built without"
    assert refusal(flash_attn_3, replace(PROBLEM, softcap=20.0)) == f"{built} SOFTCAP"
    assert refusal(flash_attn_3, replace(PROBLEM, window=20)) == f"{built} LOCAL"
    assert refusal(flash_attn_3, replace(PROBLEM, dtype=torch.float16)) == f"{built} FP16"
    assert refusal(flash_attn_3, large) == "it takes head sizes up to 192, got 200"


def test_limits_of_flash_attn_4(install: Install) -> None:
    install("flash-attn-4", fakes_4.interface())
    blackwell, wide = replace(PROBLEM, capability=(10, 0)), replace(PROBLEM, head_dim=192, v_head_dim=128)
    old = replace(PROBLEM, capability=(7, 5))
    assert refusal(flash_attn_4, old) == "it is used on compute capability 9 and 10, this device has 7.5"
    for size, tile in ((136, 192), (192, 192), (200, 256), (256, 256)):
        problem = replace(blackwell, head_dim=size, v_head_dim=size)
        assert refusal(flash_attn_4, problem) == f"it takes head size {tile} on compute capability 9 alone"
        assert kernels.choose(replace(problem, capability=(9, 0))).name == "flash_attn_4"
    assert (
        refusal(flash_attn_4, replace(wide, capability=(10, 0)))
        == "it takes head size 192 on compute capability 9 alone"
    )
    assert kernels.choose(replace(wide, capability=(10, 0), grouped=False)).name == "flash_attn_4"


@pytest.mark.parametrize(
    ("sizes", "grouped", "given"),
    [
        ((8, 8), True, (64, 64)),
        ((64, 64), True, (64, 64)),
        ((65, 64), True, (96, 96)),
        ((64, 80), False, (96, 96)),
        ((128, 128), False, (128, 128)),
        ((192, 128), False, (192, 128)),
        ((192, 128), True, (192, 192)),
        ((128, 192), False, (192, 192)),
        ((256, 8), True, (256, 256)),
    ],
)
def test_head_sizes_that_flash_attn_4_gets(sizes: tuple[int, int], grouped: bool, given: tuple[int, int]) -> None:
    """Only sizes that have a tile of their own."""
    problem = replace(PROBLEM, head_dim=sizes[0], v_head_dim=sizes[1], grouped=grouped)
    assert flash_attn_4.head_dims(problem) == given


def test_packages_are_not_imported_before_they_are_asked() -> None:
    code = (
        "import sys, torch, augtree_fx; from augtree_fx.kernels.problem import Problem; "
        f"augtree_fx.kernels.choose({replace(PROBLEM, device_type='cpu')!r}); "
        "assert not {'flash_attn', 'flash_attn_interface', 'flash_attn_config', 'cutlass'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
