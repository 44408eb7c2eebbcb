"""CUDA kernels against the float64 reference, and a transformed model on the GPU; skipped without one.

Tolerance: half-precision attention is compared with a float64 truth, and may be at most twice as far from it as the
same rows computed without reuse by torch's FlashAttention (invariant 2 of the design).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

import augtree_fx
from augtree_fx import CostModel, TreeLayout, streams
from augtree_fx.kernels import flash_attn_2, flash_attn_3, flash_attn_4, whole_tree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS, RESPONSES = (300, 129), ((70, 5, 33), (64, 1, 200))


def make_layout(scale: int = 1) -> TreeLayout:
    prompts = [[1] * (length * scale) for length in PROMPTS]
    responses = [[[2] * (length * scale) for length in branch] for branch in RESPONSES]
    return TreeLayout.from_groups(prompts, responses, device="cuda")


def row_tokens(layout: TreeLayout) -> list[Tensor]:
    """Packed tokens of every row, in order: what a forward without reuse would see."""
    index = torch.from_numpy(layout.packed_index)
    ends = zip(layout.row_begin.tolist(), layout.row_length.tolist(), strict=True)
    return [index[begin : begin + length].cuda() for begin, length in ends]


def dense(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, layout: TreeLayout, window: int, softcap: float
) -> tuple[Tensor, ...]:
    """Softmax attention row by row, in the dtype of the inputs; a shared token's output gradient counts once."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out: list[Tensor | None] = [None] * len(q)
    group = q.shape[1] // k.shape[1]
    for tokens in row_tokens(layout):
        q_r, k_r, v_r = (leaf[tokens] for leaf in leaves)
        k_r, v_r = (x.repeat_interleave(group, 1) for x in (k_r, v_r))
        logits = torch.einsum("thd,shd->hts", q_r, k_r) * q.shape[-1] ** -0.5
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        place = torch.arange(len(tokens), device="cuda")
        seen = place[:, None] >= place
        seen &= place > place[:, None] - window if window else True
        weights = torch.softmax(logits.masked_fill(~seen, -torch.inf), -1)
        row_out = torch.einsum("hts,she->the", weights, v_r)
        for position, token in enumerate(tokens.tolist()):
            out[token] = row_out[position] if out[token] is None else out[token]
    stacked = torch.stack([x for x in out if x is not None])
    return (stacked.detach(), *torch.autograd.grad(stacked, leaves, dout))


def ours(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, layout: TreeLayout, window: int, softcap: float, kernel: str
) -> tuple[Tensor, ...]:
    tables = layout.tables(window or None)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    spec = (q.shape[-1] ** -0.5, window if tables.kv_index is not None else 0, softcap, kernel)
    out, _ = torch.ops.augtree.replay_attention(
        *leaves, tables.segments, tables.cu_seqlens, tables.kv_index, None, *spec
    )
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def errors(result: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> list[float]:
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(result, truth, strict=True)]


@pytest.mark.parametrize(
    ("kernel", "head_dim", "v_head_dim", "kv_heads", "window", "softcap"),
    [
        ("auto", 64, 64, 2, 0, 0.0),
        ("aten_flash", 128, 128, 1, 0, 0.0),
        ("aten_flash", 64, 64, 4, 50, 0.0),
        ("aten_flash", 48, 32, 4, 0, 0.0),
        ("reference", 64, 64, 2, 0, 20.0),
        ("reference", 64, 64, 2, 50, 20.0),
    ],
)
def test_tree_attention_matches_rows(
    kernel: str, head_dim: int, v_head_dim: int, kv_heads: int, window: int, softcap: float
) -> None:
    assert_at_most_twice_as_far_off(kernel, head_dim, v_head_dim, kv_heads, window, softcap)


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "kv_heads", "window", "softcap"),
    [
        (64, 64, 2, 0, 0.0),
        (128, 128, 1, 0, 0.0),
        (256, 256, 4, 0, 0.0),
        (64, 64, 4, 50, 0.0),
        (48, 32, 4, 0, 0.0),
        (80, 48, 2, 0, 0.0),
        (192, 128, 4, 0, 0.0),
        (64, 64, 2, 0, 20.0),
        (128, 128, 2, 50, 20.0),
        (256, 256, 2, 50, 20.0),
    ],
)
@pytest.mark.parametrize("module", [flash_attn_2, flash_attn_3, flash_attn_4], ids=lambda module: module.NAME)
def test_installed_packages_match_rows(
    module: ModuleType, head_dim: int, v_head_dim: int, kv_heads: int, window: int, softcap: float
) -> None:
    """A package that is there but refused fails here: its adapter has to be brought up to date."""
    package = module.PACKAGE
    pytest.importorskip(package.module, reason=f"{package.distribution} is not installed")
    if module is flash_attn_3 and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashAttention-3 is used on compute capability 9.0")
    assert_at_most_twice_as_far_off(module.NAME, head_dim, v_head_dim, kv_heads, window, softcap)


@pytest.mark.parametrize(("head_dim", "kv_heads", "softcap"), [(64, 4, 0.0), (128, 2, 0.0), (96, 1, 20.0)])
def test_whole_tree_matches_rows(head_dim: int, kv_heads: int, softcap: float) -> None:
    require_flash_attention_4()
    assert_at_most_twice_as_far_off(whole_tree.NAME, head_dim, head_dim, kv_heads, 0, softcap)


def require_flash_attention_4() -> None:
    pytest.importorskip(flash_attn_4.PACKAGE.module, reason="flash-attn-4 is not installed")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the whole-tree launch was tried on compute capability 9")


Step = Callable[[Tensor, Tensor, Tensor], Tensor]


def two_layers(layout: TreeLayout, kernel: str, head_dim: int) -> Step:
    """Two layers of attention with arithmetic between them."""
    tables = layout.tables()
    args = (tables.segments, tables.cu_seqlens, tables.kv_index, None, head_dim**-0.5, 0, 0.0, kernel)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(2):
            q = torch.nn.functional.silu(torch.ops.augtree.replay_attention(q, k, v, *args)[0]) + q
        return q

    return step


def differentiated(step: Step, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients; leaves are made on the current stream, which a captured backward asks for."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = step(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def draw(layout: TreeLayout, head_dim: int = 64) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    sizes = (layout.num_tokens, head_dim)
    return tuple(torch.randn(sizes[0], h, sizes[1], device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2, 4))


# Atomic float32 sums of dq and of grouped dk, dv differ in order from run to run; bf16 then rounds a few the other way.
SAME = 1e-3


def worst(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    return max(errors(found, tuple(x.double() for x in expected)))


@pytest.mark.parametrize("kernel", ["aten_flash", flash_attn_4.NAME, whole_tree.NAME])
def test_capture_in_a_cuda_graph(kernel: str) -> None:
    if kernel != "aten_flash":
        require_flash_attention_4()
    layout = make_layout()
    inputs, step = draw(layout), two_layers(layout, kernel, 64)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        eager = differentiated(step, *inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = differentiated(step, *inputs)
    for x in captured:
        x.fill_(torch.nan)
    graph.replay()
    assert worst(captured, eager) < SAME


@pytest.mark.parametrize("kernel", ["aten_flash", "auto"])
def test_compiled_with_reduce_overhead(kernel: str) -> None:
    layout = make_layout()
    inputs, step = draw(layout), two_layers(layout, kernel, 64)
    eager = differentiated(step, *inputs)
    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):  # warm-up, recording, replays
        torch.compiler.cudagraph_mark_step_begin()
        found = differentiated(compiled, *inputs)
    # Fused arithmetic rounds once where eager rounds twice: half a unit in bf16, 2^-9 = 2e-3, in each of two layers.
    assert worst(found, eager) < 1e-2


def test_reduce_overhead_of_a_model_with_padded_batches() -> None:
    """Batches of any length in two padded sizes: one compilation, two recordings, and what eager gives."""
    from torch._dynamo.utils import counters
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch._dynamo.reset()
    config = LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    model = augtree_fx.transform(LlamaForCausalLM(config).cuda().bfloat16())
    compiled = torch.compile(model, fullgraph=True, dynamic=True, mode="reduce-overhead")
    counters.clear()
    sizes = set()
    for number, length in enumerate([60, 70, 80, 350, 360, 90, 370, 100, 340, 65]):
        prompt, *responses = (torch.randint(0, 128, (length - place,)).tolist() for place in range(4))
        layout = TreeLayout.from_groups([prompt], [responses], device="cuda")
        packed = augtree_fx.pack(model, layout, pad_to_multiple_of=512)
        sizes.add(packed.num_tokens)
        torch.compiler.cudagraph_mark_step_begin()
        found = []
        for run in (model, compiled):
            model.zero_grad()
            logits = packed.show(run(**packed.arguments)).logits
            torch.manual_seed(number)
            (logits * torch.randn_like(logits)).sum().backward()
            found.append((logits.detach().clone(), *(p.grad.clone() for p in model.parameters())))
        # Fusion keeps in float32 what eager rounds to bf16, 2^-9 each, some ten times a layer: sqrt(20) 2^-9 = 1e-2.
        assert worst(found[1], found[0]) < 3e-2
    assert sizes == {512, 1536}
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["inductor"]["cudagraph_skips"]


def test_calls_side_by_side_do_not_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large call beside a small one: with memory handed out in the wrong order, dv was off by 1."""
    require_flash_attention_4()
    prompt, responses = [1] * 8192, [[2] * 1024] * 8
    layout = TreeLayout.from_groups([prompt], [responses], device="cuda")
    inputs, step = draw(layout, 128), two_layers(layout, flash_attn_4.NAME, 128)
    monkeypatch.setattr(streams, "_MOST", 1)
    apart = differentiated(step, *inputs)
    monkeypatch.setattr(streams, "_MOST", 3)
    for _ in range(5):
        torch.cuda.empty_cache()
        assert worst(differentiated(step, *inputs), apart) < SAME


def assert_at_most_twice_as_far_off(
    kernel: str, head_dim: int, v_head_dim: int, kv_heads: int, window: int, softcap: float
) -> None:
    torch.manual_seed(0)
    layout = make_layout()
    sizes = ((4, head_dim), (kv_heads, head_dim), (kv_heads, v_head_dim), (4, v_head_dim))
    inputs = tuple(torch.randn(layout.num_tokens, *size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    truth = dense(*(x.double() for x in inputs), layout, window, softcap)
    eager = errors(dense(*inputs, layout, window, softcap), truth)
    found = errors(ours(*inputs, layout, window, softcap, kernel), truth)
    assert all(mine <= 2 * theirs for mine, theirs in zip(found, eager, strict=True)), (found, eager)


@pytest.mark.parametrize("causal", [True, False])
def test_cudnn_matches_the_reference_with_global_lse(causal: bool) -> None:
    from augtree_fx.kernels import cudnn, reference
    from augtree_fx.reference import AttentionSpec
    from augtree_fx.tables import AttentionCall, Segment

    torch.manual_seed(0)
    num_keys = 700
    num_queries = num_keys if causal else 333
    cu = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (num_queries, num_keys)]
    call = AttentionCall((Segment(0, num_queries, 0, num_keys),), causal, *cu)
    q = torch.randn(num_queries, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(num_keys, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    dout, spec = torch.randn_like(q), AttentionSpec(128**-0.5)
    out, lse = cudnn.forward(q, k, v, call, spec)
    wide = [x.double() for x in (q, k, v)]
    true_out, true_lse = reference.forward(*wide, call, spec)
    # 5e-3: bf16 keeps 8 bits, 2^-8 = 4e-3 relative a rounding; the LSE is float32 from bf16 inputs: 1e-5.
    assert errors((out,), (true_out,))[0] < 5e-3
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-5, atol=1e-5)
    # As if another partial held three quarters of the weight: the backward must use what it is given.
    global_lse, global_out = true_lse + 1.4, true_out * 0.3
    truth = reference.backward(dout.double(), *wide, global_out, global_lse, call, spec)
    found = cudnn.backward(dout, q, k, v, global_out.bfloat16(), global_lse.float(), call, spec)
    assert max(errors(found, truth)) < 1e-2


def test_model_in_bf16_matches_float64() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    truth_model = Qwen3ForCausalLM(config).cuda().double()
    plain = copy.deepcopy(truth_model).bfloat16()
    shared = augtree_fx.transform(copy.deepcopy(plain), costs=CostModel.free())
    prompt = torch.randint(0, 128, (1, 200), device="cuda").expand(6, -1)
    ids = torch.cat([prompt, torch.randint(0, 128, (6, 40), device="cuda")], dim=1)
    weight = torch.randn(6, 240, 128, device="cuda")
    results = []
    for model in (truth_model, plain, shared):
        logits = model(ids, use_cache=False).logits
        (logits * weight.to(logits.dtype)).sum().backward()
        grads = [p.grad for p in model.parameters()]
        results.append((logits.detach(), *grads))
    truth = tuple(x.double() for x in results[0])
    theirs, mine = (errors(result, truth) for result in results[1:])
    assert shared.base_model._augtree_state.num_shared == 1
    assert all(a <= 2 * b for a, b in zip(mine, theirs, strict=True)), (mine, theirs)


def test_detection_costs_two_percent_at_most() -> None:
    """64 rows of 32k tokens against the forward that sharing saves, of a 0.6B model (28 layers of 15.7M weights)."""
    prompt = torch.randint(0, 150_000, (8, 1, 30_720), device="cuda").expand(8, 8, -1).reshape(64, -1)
    ids = torch.cat([prompt, torch.randint(0, 150_000, (64, 2048), device="cuda")], dim=1)
    mask = torch.ones_like(ids)
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        layout = TreeLayout.from_padded(ids, mask)
        layout.tables()
        assert len(layout.packed_index) == ids.numel()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    saved_tokens = layout.num_row_tokens - layout.num_tokens
    x, w = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        _ = [x @ w for _ in range(20)]
        torch.cuda.synchronize()
        flops = 20 * 2 * 8192**3 / (time.perf_counter() - begin)
    saved_seconds = saved_tokens * 2 * 28 * 15.7e6 / flops  # matmuls alone, at full speed: the least it can save
    assert min(seconds) < 0.02 * saved_seconds, f"{min(seconds):.3f} s of {saved_seconds:.3f} s saved"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_offloaded_prompts_have_the_same_gradients_and_leave_the_device(checkpointing: bool) -> None:
    """The same kernels on the same values: bit for bit but for atomic sums; and the prompt's activations are away."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128,
    )  # fmt: skip
    model = augtree_fx.transform(Qwen3ForCausalLM(config).cuda().bfloat16().train())
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    prompt, *responses = (torch.randint(0, 128, (length,)) for length in (8192, 256, 200, 100))
    layout = TreeLayout.from_groups([prompt], [responses], device="cuda")
    kept, found = [], []
    for activations in ("keep", "offload", "offload"):
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with augtree_fx.prefill(model, layout, max_wave_tokens=300, activations=activations) as tree:
            kept.append(torch.cuda.memory_allocated() - before)
            for wave in tree.waves():
                wave.logprobs().sum().backward()
        found.append(tuple(parameter.grad.clone() for parameter in model.parameters()))
    assert worst(found[1], found[0]) < SAME and worst(found[2], found[0]) < SAME
    hidden = 8192 * 1024 * 2
    away = kept[0] - kept[1]
    assert away > (6 * hidden if checkpointing else 50 * hidden), [size / hidden for size in kept]


def test_waves_stay_in_a_budget_of_memory() -> None:
    """Peak beyond what was allocated, of budgets in which 32 responses take several waves; and "auto" takes one."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32_000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128,
    )  # fmt: skip
    model = augtree_fx.transform(Qwen3ForCausalLM(config).cuda().bfloat16().train())
    prompt, *responses = (torch.randint(0, 128, (length,)) for length in (4096, *[512] * 32))
    layout = TreeLayout.from_groups([prompt], [responses], device="cuda")
    for memory, several in (("5GiB", True), ("7GiB", True), ("auto", False)):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        before, number = torch.cuda.memory_allocated(), 0
        torch.cuda.reset_peak_memory_stats()
        with augtree_fx.prefill(model, layout, memory=memory) as tree:
            for wave in tree.waves():
                wave.logprobs().sum().backward()
                number += 1
        budget = model.base_model._augtree_state.budget
        assert torch.cuda.max_memory_allocated() - before <= budget.memory, str(budget)
        assert (number > 1) == several, str(budget)
