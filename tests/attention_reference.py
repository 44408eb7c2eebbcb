"""Attention row by row, in plain dense PyTorch, and the same rows through the ops of a tree: outputs and gradients.

Every distinct prefix of the rows has one query, key and value, whose gradient is the sum over all rows that have this
prefix. The rows say which these are; the library's layout only says how they are packed.
"""

from dataclasses import dataclass

import numpy as np
import torch
from row_reference import Batch, prefix_numbers
from torch import Tensor

from augtree_fx import TreeLayout


@dataclass(frozen=True)
class Site:
    """What an attention module does: heads, head sizes of q and k and of v, scale, window, soft-cap, sinks."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    v_head_dim: int = 8
    scale: float = 0.4
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False


@dataclass
class Result:
    """Output, LSE (both a token of a row, rows one after another) and gradients of a weighted sum of both."""

    out: Tensor
    lse: Tensor
    gradients: dict[str, Tensor]


def make_inputs(site: Site, batch: Batch, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    """Query, key and value of each distinct prefix, sinks, and the weights of out and LSE in the loss."""
    generator = torch.Generator().manual_seed(seed)
    numbers = prefix_numbers(batch.rows)
    count, tokens = max(map(max, filter(None, numbers))) + 1, sum(map(len, numbers))
    shapes = {
        "q": (count, site.heads, site.head_dim),
        "k": (count, site.kv_heads, site.head_dim),
        "v": (count, site.kv_heads, site.v_head_dim),
        "sinks": (site.heads,),
        "weigh_out": (tokens, site.heads, site.v_head_dim),
        "weigh_lse": (tokens, site.heads),
    }
    made = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: tensor.to(dtype) for name, tensor in made.items() if site.sinks or name != "sinks"}


def leaves_of(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fresh leaves of everything that gets a gradient."""
    return {name: x.detach().clone().requires_grad_() for name, x in inputs.items() if not name.startswith("weigh")}


def dense_row(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, site: Site) -> tuple[Tensor, Tensor]:
    """Causal attention of one row, ``[T, H, E]``, and its LSE, ``[T, H]``; a sink is a key whose value is 0."""
    group = site.heads // site.kv_heads
    logits = torch.einsum("thd,shd->ths", q, k.repeat_interleave(group, dim=1)) * site.scale
    if site.softcap:
        logits = site.softcap * torch.tanh(logits / site.softcap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    hidden = (distance < 0) | (distance >= site.window if site.window else False)
    logits = logits.masked_fill(hidden[:, None], -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[None, :, None].expand(len(q), -1, 1)], dim=-1)
    weights = logits.softmax(dim=-1)[..., : len(q)]
    return torch.einsum("ths,she->the", weights, v.repeat_interleave(group, dim=1)), logits.logsumexp(dim=-1)


def _result(out: Tensor, lse: Tensor, inputs: dict[str, Tensor], leaves: dict[str, Tensor]) -> Result:
    loss = (out * inputs["weigh_out"]).sum() + (lse * inputs["weigh_lse"]).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return Result(out.detach(), lse.detach(), dict(zip(leaves, gradients, strict=True)))


def by_rows(site: Site, batch: Batch, inputs: dict[str, Tensor]) -> Result:
    """The truth: every row on its own."""
    leaves = leaves_of(inputs)
    results = [
        dense_row(*(leaves[name][path] for name in "qkv"), leaves.get("sinks"), site)
        for path in prefix_numbers(batch.rows)
        if path
    ]
    out, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
    return _result(out, lse, inputs, leaves)


def packed_prefixes(batch: Batch, layout: TreeLayout) -> Tensor:
    """Which prefix each packed token is, by the slot it is read from."""
    number_at = {
        slot: number
        for slots, path in zip(batch.slots, prefix_numbers(batch.rows), strict=True)
        for slot, number in zip(slots, path, strict=True)
    }
    return torch.tensor([number_at[slot] for slot in layout.source.tolist()])


def attend(
    site: Site, layout: TreeLayout, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, kernel: str
) -> tuple[Tensor, Tensor]:
    """Attention of packed tokens by `replay_attention`, as the FX pass calls it."""
    tables = layout.tables(site.window or None)
    window = site.window if tables.kv_index is not None else 0
    return torch.ops.augtree.replay_attention(
        q, k, v, tables.segments, tables.cu_seqlens, tables.kv_index, sinks, site.scale, window, site.softcap, kernel
    )


def by_tree(site: Site, batch: Batch, inputs: dict[str, Tensor], layout: TreeLayout, kernel: str) -> Result:
    """The same rows packed into a tree, attended to, and shown row by row."""
    leaves, order = leaves_of(inputs), packed_prefixes(batch, layout)
    out, lse = attend(site, layout, *(leaves[name][order] for name in "qkv"), leaves.get("sinks"), kernel)
    slots = np.concatenate([slots for slots in batch.slots if slots])
    index = torch.from_numpy(layout.packed_index)
    shown, shown_lse = (torch.ops.augtree.show_slots(x, index)[slots] for x in (out, lse.T))
    return _result(shown, shown_lse, inputs, leaves)


def assert_same(result: Result, truth: Result, tolerance: float) -> None:
    """Out, LSE and every gradient agree relative to the largest value of the truth."""
    pairs = {"out": (result.out, truth.out), "lse": (result.lse, truth.lse)}
    pairs |= {f"gradient of {name}": (result.gradients[name], truth.gradients[name]) for name in truth.gradients}
    for name, (found, expected) in pairs.items():
        assert found.shape == expected.shape, name
        error = ((found - expected).abs().max() / expected.abs().max()).item()
        assert error <= tolerance, f"{name} is off by {error:.2e}, allowed {tolerance:.0e}"
