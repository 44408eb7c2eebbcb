"""Ways to compute the attention of one group, each a differentiable function on inputs in its own format.

    packed    prompt | a | b | c        the tree, FlexAttention, PrefixGrouper: [tokens, heads, head size]
    rows      prompt a | prompt b | ..  what runs without reuse: [rows x row length, heads, head size]

Gathering rows is not timed: without reuse the model itself would have computed them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from augtree_fx import TreeLayout
from augtree_fx.examples.bench import varlen
from augtree_fx.examples.bench.shapes import Heads, Shape

# Elements of the queries from which torch's sdpa returned wrong gradients: dq was off by 9e-2 at 16 rows of 33k tokens,
# 32 heads of 128 (H200, torch 2.11, 2026-11-29); offsets no longer fit 32 bits there.
SDPA_ELEMENTS = 1 << 31


class Inputs(NamedTuple):
    """q, k, v and the output's gradient, ``[tokens, heads or key heads, head size]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


class Outcome(NamedTuple):
    """Output and gradients of an attention, for packed tokens."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Rival:
    """One way to compute the attention of a group.

    Attributes:
        name: as in the table.
        key: what ``--skip`` calls it.
        build: makes the attention function; raises what is missing.
        rows: whether it takes rows instead of packed tokens.
    """

    name: str
    key: str
    build: Callable[[], Attend]
    rows: bool = False


@dataclass(frozen=True)
class Case:
    """A group, its layout and the dtype and device it runs on."""

    shape: Shape
    heads: Heads
    dtype: torch.dtype
    device: torch.device
    layout: TreeLayout

    @staticmethod
    def of(shape: Shape, heads: Heads, dtype: torch.dtype, device: torch.device) -> Case:
        """The case of a shape."""
        responses = [[2] * shape.response] * shape.branches
        return Case(
            shape, heads, dtype, device, TreeLayout.from_groups([[1] * shape.prompt], [responses], device=device)
        )

    @property
    def scale(self) -> float:
        return self.heads.head_dim**-0.5

    def draw(self) -> Inputs:
        """Random packed inputs, the same ones every time."""
        generator = torch.Generator(self.device).manual_seed(0)
        sizes = (self.heads.heads, self.heads.kv_heads, self.heads.kv_heads, self.heads.heads)
        shapes = ((self.shape.num_tokens, size, self.heads.head_dim) for size in sizes)
        return Inputs(*(torch.randn(s, generator=generator, dtype=self.dtype, device=self.device) for s in shapes))

    def row_index(self) -> Tensor:
        """``[rows x row length]`` packed token of every token of every row."""
        return torch.from_numpy(self.layout.packed_index).to(self.device)

    def to_rows(self, inputs: Inputs) -> Inputs:
        """Rows of packed inputs; a prompt token's output gradient is divided among the rows, so that it counts once.

        It is zero in none: matrix units draw less power on zeros, and run faster.
        """
        index = self.row_index()
        q, k, v, dout = (x[index] for x in inputs)
        dout.unflatten(0, (self.shape.branches, -1))[:, : self.shape.prompt] /= self.shape.branches
        return Inputs(q, k, v, dout)

    def from_rows(self, outcome: Outcome) -> Outcome:
        """Packed outputs, any row's, and packed gradients, summed over rows in float32 or wider."""
        index, tokens = self.row_index(), self.shape.num_tokens
        out = outcome.out.new_empty(tokens, *outcome.out.shape[1:])
        out[index] = outcome.out
        wide = torch.promote_types(self.dtype, torch.float32)
        grads = (x.new_zeros(tokens, *x.shape[1:], dtype=wide).index_add_(0, index, x.to(wide)) for x in outcome[1:])
        return Outcome(out, *grads)


def rivals(case: Case, kernels: list[str]) -> list[Rival]:
    """All rivals of a case, ours first; ``kernels`` are those of our op to run besides ``"auto"``."""
    sizes = (case.heads.heads, case.heads.kv_heads)
    best = varlen.best_kernel(
        *(torch.empty(2, size, case.heads.head_dim, dtype=case.dtype, device=case.device) for size in sizes)
    )
    usual = "cpu_flash" if case.device.type == "cpu" else "aten_flash"
    ours = [Rival(f"tree, {name}", f"tree-{name}", partial(tree, case, name)) for name in ["auto", *kernels]]
    return [
        *ours,
        Rival(f"rows, {best} (no reuse)", "rows", partial(rows, case, best), rows=True),
        Rival(f"prompt once, KV copied, {best}", "copied", partial(copied, case, best)),
        Rival(f"PrefixGrouper, {usual}", "prefix-grouper", partial(prefix_grouper, case, usual)),
        Rival("FlexAttention, tree mask", "flex", partial(flex, case)),
        Rival("rows, transformers' sdpa", "sdpa", partial(sdpa, case), rows=True),
    ]


def tree(case: Case, kernel: str) -> Attend:
    """Our op."""
    tables = case.layout.tables()
    rest = (tables.segments, tables.cu_seqlens, tables.kv_index, None, case.scale, 0, 0.0, kernel)
    return lambda q, k, v: torch.ops.augtree.replay_attention(q, k, v, *rest)[0]


def rows(case: Case, kernel: str) -> Attend:
    """No reuse: one variable-length causal call over all rows."""
    call = varlen.rows_call(case.shape.branches, case.shape.row_length, case.shape.row_length, case.device)
    return lambda q, k, v: varlen.attend(q, k, v, call, case.scale, kernel)


def copied(case: Case, kernel: str) -> Attend:
    """PrefixGrouper's scheme: the prompt once, then every response on a copy of the prompt's KV and its own."""
    prompt, branches, device = case.shape.prompt, case.shape.branches, case.device
    first = varlen.rows_call(1, prompt, prompt, device)
    second = varlen.rows_call(branches, case.shape.response, case.shape.row_length, device)

    def copies(x: Tensor) -> Tensor:
        own = x[prompt:].unflatten(0, (branches, -1))
        return torch.cat([x[:prompt].expand(branches, *x[:prompt].shape), own], dim=1).flatten(0, 1)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        prompt_out = varlen.attend(q[:prompt], k[:prompt], v[:prompt], first, case.scale, kernel)
        return torch.cat([prompt_out, varlen.attend(q[prompt:], copies(k), copies(v), second, case.scale, kernel)])

    return run


def prefix_grouper(case: Case, kernel: str) -> Attend:
    """The package, with FlashAttention-2 (on the CPU, its flash) as its attention function.

    It pads responses to one length. Here all are equally long, so no padding has to be taken out around the kernel.
    """
    try:
        from prefix_grouper import PrefixGrouper
    except ModuleNotFoundError as error:
        raise ImportError("it is not installed; pip install prefix-grouper") from error
    shape = case.shape
    grouper = PrefixGrouper([[shape.prompt] + [shape.response] * shape.branches], device=case.device)

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        call = varlen.rows_call(len(q), q.shape[1], k.shape[1], case.device)
        out = varlen.attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), call, case.scale, kernel)
        return out.view(q.shape)

    return lambda q, k, v: grouper.forward(attention, *(x[None].transpose(1, 2) for x in (q, k, v)))[0]


def flex(case: Case) -> Attend:
    """The tree as a block mask of FlexAttention, compiled."""
    from torch._functorch import config as functorch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens, device = case.shape.num_tokens, case.device
    node = torch.zeros(tokens, dtype=torch.int32, device=device)
    node[case.shape.prompt :] = torch.arange(tokens - case.shape.prompt, device=device) // case.shape.response + 1

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & ((node[k] == 0) | (node[k] == node[q]))

    mask = create_block_mask(visible, None, None, tokens, tokens, device=device, _compile=device.type == "cuda")
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    # Timing backward alone runs it several times on what forward saved, which donated buffers do not survive. Backward
    # is compiled when it first runs, so this has to stay.
    functorch.donated_buffer = False

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[None].transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=mask, scale=case.scale, enable_gqa=True)[0].transpose(0, 1)

    return run


def sdpa(case: Case) -> Attend:
    """What transformers runs without us: padded rows through its own sdpa function."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    elements = case.shape.num_row_tokens * case.heads.heads * case.heads.head_dim
    if elements >= SDPA_ELEMENTS:
        raise NotImplementedError(f"{elements} elements of queries; torch's sdpa has wrong gradients from 2^31")
    module: Any = SimpleNamespace(num_key_value_groups=case.heads.heads // case.heads.kv_heads, is_causal=True)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (case.shape.branches, -1)).transpose(1, 2) for x in (q, k, v))
        return sdpa_attention_forward(module, q, k, v, None, scaling=case.scale)[0].flatten(0, 1)

    return run
