"""Tree attention on one GPU, forward + backward, against what else torch ships, in one run and behind a parity gate.

One prompt of P tokens, N responses of R tokens. Rivals: every row on its own with FlashAttention-2 (no reuse), the
tree with FlashAttention-2 alone, and the tree as a FlexAttention block mask. All get the same random inputs.

    python examples/bench_tree_attention.py --prompt 32768 --branches 16 --response 1024
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tabulate import tabulate
from torch import Tensor

from augtree_fx import TreeLayout
from augtree_fx.tables import AttentionTables, decode_calls


@dataclass(frozen=True)
class Shape:
    """Sizes of one benchmark: tokens, heads, head size."""

    prompt: int
    branches: int
    response: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def tree_tflop(self) -> float:
        """Forward + backward of the tree: 4 + 10 FLOP a (query, key) pair, head and dim (FlashAttention counts so)."""
        pairs = self.prompt**2 / 2 + self.branches * (self.response * self.prompt + self.response**2 / 2)
        return 14 * pairs * self.heads * self.head_dim / 1e12


@dataclass(frozen=True)
class Inputs:
    """Packed q, k, v and the output's gradient, ``[tokens, heads, head size]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


Step = Callable[[Inputs], tuple[Tensor, Tensor, Tensor, Tensor]]


def make_inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    """Random inputs of one tree."""
    torch.manual_seed(0)
    tokens = shape.prompt + shape.branches * shape.response

    def draw(heads: int) -> Tensor:
        return torch.randn(tokens, heads, shape.head_dim, dtype=dtype, device=device)

    return Inputs(draw(shape.heads), draw(shape.kv_heads), draw(shape.kv_heads), draw(shape.heads))


def make_layout(shape: Shape, device: str) -> TreeLayout:
    """Layout of the one group."""
    prompt, responses = [1] * shape.prompt, [[2] * shape.response] * shape.branches
    return TreeLayout.from_groups([prompt], [responses], device=device)


def with_grad(inputs: Inputs, run: Callable[[Tensor, Tensor, Tensor], Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients of one attention function."""
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = run(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def tree_step(tables: AttentionTables, kernel: str) -> Step:
    """Our op, with a kernel choice."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        args = (tables.segments, tables.cu_seqlens, tables.kv_index, None, q.shape[-1] ** -0.5, 0, 0.0, kernel)
        return torch.ops.augtree.replay_attention(q, k, v, *args)[0]

    return lambda inputs: with_grad(inputs, run, inputs.dout)  # type: ignore[return-value]


def rows_step(shape: Shape, device: str) -> Step:
    """No reuse: every row is prompt + response, one variable-length causal FlashAttention-2 call over all rows."""
    index = row_index(shape, device)
    length = shape.prompt + shape.response
    cu = torch.arange(shape.branches + 1, dtype=torch.int32, device=device) * length
    philox, unused = torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
    first = torch.zeros(len(index), 1, 1, device=device, dtype=torch.bool)
    first[:length] = True
    own = torch.arange(len(index), device=device).view(-1, length) % length >= shape.prompt
    keep = own.flatten()[:, None, None] | first

    def step(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v = (x[index] for x in (inputs.q, inputs.k, inputs.v))
        dout = inputs.dout[index] * keep  # a prompt token's output gradient counts once
        scale = shape.head_dim**-0.5
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu, cu, length, length, 0.0, True, False, scale=scale
        )
        grads = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, cu, cu, length, length, 0.0, True, philox, unused, scale=scale
        )
        return out, *grads  # type: ignore[return-value]

    return step


def row_index(shape: Shape, device: str) -> Tensor:
    """Packed token of every token of every row."""
    prompt = torch.arange(shape.prompt, device=device).expand(shape.branches, -1)
    own = torch.arange(shape.branches * shape.response, device=device).view(shape.branches, -1) + shape.prompt
    return torch.cat([prompt, own], dim=1).flatten()


def packed_from_rows(shape: Shape, result: tuple[Tensor, ...], index: Tensor, tokens: int) -> tuple[Tensor, ...]:
    """Rows' output and gradients as those of the tree: outputs picked, gradients summed in float32."""
    out = torch.empty(tokens, *result[0].shape[1:], dtype=result[0].dtype, device=index.device)
    out[index] = result[0]
    summed = [
        torch.zeros(tokens, *x.shape[1:], device=index.device).index_add_(0, index, x.float()) for x in result[1:]
    ]
    return (out, *summed)


def flex_step(shape: Shape, device: str) -> Step:
    """The tree as a FlexAttention block mask, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens = shape.prompt + shape.branches * shape.response
    node = torch.zeros(tokens, dtype=torch.int32, device=device)
    node[shape.prompt :] = torch.arange(shape.branches * shape.response, device=device) // shape.response + 1

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & ((node[k] == 0) | (node[k] == node[q]))

    mask = create_block_mask(visible, None, None, tokens, tokens, device=device, _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[None].transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return lambda inputs: with_grad(inputs, run, inputs.dout)  # type: ignore[return-value]


def milliseconds(step: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and spread (max - min) over timed repeats, after two warm-ups."""
    for _ in range(2):
        step()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times), max(times) - min(times)


def error(result: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> list[float]:
    """Relative error in norm of out, dq, dk, dv."""
    return [float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(result, truth, strict=True)]


def matmul_tflops(device: str) -> float:
    """The ceiling: an 8192^3 bf16 matmul on random data."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * 8192**3 / 1e9 / milliseconds(lambda: a @ b, 10)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=32768, help="tokens of the prompt")
    parser.add_argument("--branches", type=int, default=16, help="responses")
    parser.add_argument("--response", type=int, default=1024, help="tokens of a response")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--skip", nargs="*", default=[], help="rivals to leave out: rows, flex")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    shape = Shape(args.prompt, args.branches, args.response, args.heads, args.kv_heads, args.head_dim)
    return report(shape, args)


def report(shape: Shape, args: argparse.Namespace) -> int:
    """Run all steps, check them against the float32 reference, print the table."""
    device = "cuda"
    inputs = make_inputs(shape, torch.bfloat16, device)
    tables = make_layout(shape, device).tables()
    wide = Inputs(*(x.float() for x in (inputs.q, inputs.k, inputs.v, inputs.dout)))
    truth = tree_step(tables, "reference")(wide)
    del wide
    steps: dict[str, Step] = {"tree, auto": tree_step(tables, "auto"), "tree, FA2": tree_step(tables, "aten_flash")}
    if "flex" not in args.skip:
        steps["tree, FlexAttention"] = flex_step(shape, device)
    if "rows" not in args.skip:
        steps["rows, FA2 (no reuse)"] = rows_step(shape, device)
    ceiling = matmul_tflops(device)
    rows, failed = [], False
    for name, step in steps.items():
        result = step(inputs)
        if name.startswith("rows"):
            result = packed_from_rows(shape, result, row_index(shape, device), len(inputs.q))
        errors = error(result, truth)
        del result
        failed |= max(errors) > 1e-2 or any(value != value for value in errors)
        median, spread = milliseconds(lambda step=step: step(inputs), args.repeats)
        tflops = shape.tree_tflop / median * 1e3
        rows.append([name, median, spread, tflops, tflops / ceiling, *(f"{value:.1e}" for value in errors)])
    calls = [
        f"{call.q_range.stop - call.q_range.start} x {call.k_range.stop - call.k_range.start}"
        for call in decode_calls(tables.segments, tables.cu_seqlens)
    ]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {shape}")
    print(f"calls: {', '.join(calls)}; 8192^3 matmul {ceiling:.0f} TFLOP/s")
    headers = ["fwd + bwd", "ms", "spread", "tree TFLOP/s", "of matmul", "err out", "dq", "dk", "dv"]
    print(tabulate(rows, headers=headers, floatfmt=".2f", disable_numparse=[5, 6, 7, 8]))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "shape": vars(shape), "ceiling": ceiling, "rows": rows},
                file,
                indent=1,
            )
    if failed:
        print("parity failed: an error above 1e-2 against the float32 reference; no time above means anything")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
