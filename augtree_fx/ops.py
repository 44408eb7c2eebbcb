"""The ops as contracts: schema, fake kernel, autograd, each declared once. The work is in `tree_attention`.

T packed tokens, H query heads, K key heads, D head size of q and k, E of v. LSE is ``[H, T]``, natural, float32
(float64 for float64 inputs). ``segments``, ``cu_seqlens`` and ``kv_index`` are an `AttentionTables`; ``window`` 0 and
``softcap`` 0 mean none. All outputs are differentiable, the LSE included. Every op is local to its rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from augtree_fx import merge, tree_attention
from augtree_fx.reference import AttentionSpec, accumulation_dtype
from augtree_fx.tables import Calls, decode_calls

_TABLES = "Tensor segments, Tensor cu_seqlens, Tensor? kv_index"
_SPEC = "float scale, int window, float softcap, str kernel"
_SAVED = "Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"


# The tables say on the host which launches an attention op makes. A CUDA graph would keep those of the batch it was
# recorded with: Inductor is told to leave the op between its graphs, as it runs host code.
READS_HOST_TABLES = (torch.Tag.cudagraph_unsafe,)


def define(
    name: str,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    tags: tuple[torch.Tag, ...] = (),
) -> None:
    torch.library.define(f"augtree::{name}", schema, tags=tags)
    torch.library.impl(f"augtree::{name}", "CompositeExplicitAutograd")(implementation)
    torch.library.register_fake(f"augtree::{name}")(fake)


def _no_second_derivative(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError(
        "augtree-fx's attention has no second derivative; call backward without create_graph=True, or run what needs "
        "it on the unmodified model (augtree_fx.restore)"
    )


def differentiable_once(name: str) -> None:
    """Let a backward op run under ``create_graph=True``; only going through it again is refused."""
    torch.library.register_autograd(f"augtree::{name}", _no_second_derivative, setup_context=lambda *_, **__: None)


def _check(q: Tensor, k: Tensor, v: Tensor, calls: Calls, kv_index: Tensor | None, window: int, softcap: float) -> None:
    """What kernels take for granted; a wrong table reads past the end of a tensor in them."""
    queries = max((call.q_range.stop for call in calls), default=0)
    keys = max((call.k_range.stop for call in calls), default=0)
    num_keys = len(k) if kv_index is None else len(kv_index)
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3 or k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q must be [T, H, D], k [S, K, D], v [S, K, E], got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of key heads, got {q.shape[1]} and {k.shape[1]}")
    if queries > len(q) or keys > num_keys:
        raise ValueError(f"the tables are of {queries} queries and {keys} keys, got {len(q)} and {num_keys}")
    if window < 0 or softcap < 0:
        raise ValueError(f"window and softcap must be at least 0 (none), got {window} and {softcap}")
    if window and not all(call.causal for call in calls):
        raise ValueError(f"a window of {window} needs tables of that window; layout.tables(window) makes them")


def _replay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor,
    cu_seqlens: Tensor,
    kv_index: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    calls = decode_calls(segments, cu_seqlens)
    _check(q, k, v, calls, kv_index, window, softcap)
    return tree_attention.forward(q, k, v, calls, kv_index, sinks, AttentionSpec(scale, window, softcap), kernel)


def _replay_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=accumulation_dtype(q.dtype))
    return q.new_empty(q.shape[0], q.shape[1], v.shape[-1]), lse


def _replay_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor,
    cu_seqlens: Tensor,
    kv_index: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    calls = decode_calls(segments, cu_seqlens)
    spec = AttentionSpec(scale, window, softcap)
    dq, dk, dv, dsinks = tree_attention.backward(dout, dlse, q, k, v, out, lse, calls, kv_index, sinks, spec, kernel)
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


def _replay_backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor,
    cu_seqlens: Tensor,
    kv_index: Tensor | None,
    sinks: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return (*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)), dsinks)  # type: ignore[return-value]


def _save_replay(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, segments, cu_seqlens, kv_index, sinks, *spec = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, segments, cu_seqlens, kv_index, sinks)
    ctx.spec = spec


def _replay_grad(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, segments, cu_seqlens, kv_index, sinks = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dsinks = torch.ops.augtree.replay_attention_backward(
        dout, dlse, q, k, v, out, lse, segments, cu_seqlens, kv_index, sinks, *ctx.spec
    )
    return dq, dk, dv, None, None, None, None if sinks is None else dsinks, None, None, None, None


define(
    "replay_attention",
    f"(Tensor q, Tensor k, Tensor v, {_TABLES}, Tensor? sinks, {_SPEC}) -> (Tensor out, Tensor lse)",
    _replay,
    _replay_fake,
    READS_HOST_TABLES,
)
define(
    "replay_attention_backward",
    f"(Tensor dout, Tensor? dlse, {_SAVED}, {_TABLES}, Tensor? sinks, {_SPEC}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    _replay_backward,
    _replay_backward_fake,
    READS_HOST_TABLES,
)
torch.library.register_autograd("augtree::replay_attention", _replay_grad, setup_context=_save_replay)
differentiable_once("replay_attention_backward")


def _prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    return _replay(q, k, v, segments, cu_seqlens, None, sinks, scale, window, softcap, kernel)


def _save_prefill(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, segments, cu_seqlens, sinks, *spec = inputs
    _save_replay(ctx, (q, k, v, segments, cu_seqlens, None, sinks, *spec), output)


def _prefill_grad(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    dq, dk, dv, _, _, _, dsinks, *spec = _replay_grad(ctx, dout, dlse)
    return dq, dk, dv, None, None, dsinks, *spec


define(
    "prefill_attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor segments, Tensor cu_seqlens, Tensor? sinks, {_SPEC}) "
    "-> (Tensor out, Tensor lse)",
    _prefill,
    _replay_fake,
    READS_HOST_TABLES,
)
torch.library.register_autograd("augtree::prefill_attention", _prefill_grad, setup_context=_save_prefill)


def _wave(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prompt_k: Tensor,
    prompt_v: Tensor,
    k_handle: Tensor,
    v_handle: Tensor,
    *tables_and_spec: Any,
) -> tuple[Tensor, Tensor]:
    return _replay(q, torch.cat([prompt_k, k]), torch.cat([prompt_v, v]), *tables_and_spec)


def _wave_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _replay_fake(q, k, v)


def _wave_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    prompt_k: Tensor,
    prompt_v: Tensor,
    *tables_and_spec: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    keys, values, wide = torch.cat([prompt_k, k]), torch.cat([prompt_v, v]), accumulation_dtype(q.dtype)
    dq, dk, dv, dsinks = _replay_backward(dout, dlse, q, keys, values, out, lse, *tables_and_spec)
    first = len(prompt_k)
    # Copies: a handle keeps the prompts' part, and would keep the wave's with it.
    dk_prompt, dv_prompt = (x[:first].to(wide, copy=True) for x in (dk, dv))
    return dq, dk[first:].clone(), dv[first:].clone(), dk_prompt, dv_prompt, dsinks


def _wave_backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    prompt_k: Tensor,
    prompt_v: Tensor,
    *tables_and_spec: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dsinks = _replay_backward_fake(dout, dlse, q, k, v, out, lse, *tables_and_spec)
    wide = accumulation_dtype(q.dtype)
    prompts = (torch.empty_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (prompt_k, prompt_v))
    return dq, dk, dv, *prompts, dsinks  # type: ignore[return-value]


def _save_wave(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, prompt_k, prompt_v, _, _, segments, cu_seqlens, kv_index, sinks, *spec = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, prompt_k, prompt_v, segments, cu_seqlens, kv_index, sinks)
    ctx.spec = spec


def _wave_grad(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *rest, sinks = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dk_prompt, dv_prompt, dsinks = torch.ops.augtree.wave_attention_backward(
        dout, dlse, q, k, v, out, lse, *rest, sinks, *ctx.spec
    )
    dsinks = None if sinks is None else dsinks
    return dq, dk, dv, None, None, dk_prompt, dv_prompt, None, None, None, dsinks, None, None, None, None


# Queries and keys of one wave on top of the prompts' keys. These carry no gradient themselves: their handles do, which
# are never read, of a wide dtype and so may lie on one element. Autograd adds up handles' gradients over waves in it.
_PROMPT = "Tensor prompt_k, Tensor prompt_v"
define(
    "wave_attention",
    f"(Tensor q, Tensor k, Tensor v, {_PROMPT}, Tensor k_handle, Tensor v_handle, {_TABLES}, Tensor? sinks, {_SPEC}) "
    "-> (Tensor out, Tensor lse)",
    _wave,
    _wave_fake,
    READS_HOST_TABLES,
)
define(
    "wave_attention_backward",
    f"(Tensor dout, Tensor? dlse, {_SAVED}, {_PROMPT}, {_TABLES}, Tensor? sinks, {_SPEC}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dk_prompt, Tensor dv_prompt, Tensor dsinks)",
    _wave_backward,
    _wave_backward_fake,
    READS_HOST_TABLES,
)
torch.library.register_autograd("augtree::wave_attention", _wave_grad, setup_context=_save_wave)
differentiable_once("wave_attention_backward")


def _merge_fake(outs: list[Tensor], lses: list[Tensor], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(outs[0], memory_format=torch.contiguous_format), torch.empty_like(
        lses[0], memory_format=torch.contiguous_format
    )


def _merge(outs: list[Tensor], lses: list[Tensor], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    out, lse = merge.partial_softmax(outs, lses, sinks)
    return out.contiguous(), lse.contiguous()


def _merge_backward(
    dout: Tensor,
    dlse: Tensor | None,
    outs: list[Tensor],
    lses: list[Tensor],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    douts, dlses, dsinks = merge.partial_softmax_backward(dout, dlse, outs, lses, sinks, out, lse)
    return (
        [x.contiguous() for x in douts],
        [x.contiguous() for x in dlses],
        dout.new_empty(0) if dsinks is None else dsinks,
    )


def _merge_backward_fake(
    dout: Tensor, dlse: Tensor | None, outs: list[Tensor], lses: list[Tensor], sinks: Tensor | None, *_: Any
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    like = [[torch.empty_like(x, memory_format=torch.contiguous_format) for x in part] for part in (outs, lses)]
    return like[0], like[1], dout.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _save_merge(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    outs, lses, sinks = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*outs, *lses, *output, sinks)


def _merge_grad(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    *partials, out, lse, sinks = ctx.saved_tensors
    outs, lses = partials[: len(partials) // 2], partials[len(partials) // 2 :]
    dout = torch.zeros_like(out) if dout is None else dout
    douts, dlses, dsinks = torch.ops.augtree.partial_softmax_backward(dout, dlse, outs, lses, sinks, out, lse)
    return douts, dlses, None if sinks is None else dsinks


define(
    "partial_softmax",
    "(Tensor[] outs, Tensor[] lses, Tensor? sinks) -> (Tensor out, Tensor lse)",
    _merge,
    _merge_fake,
)
define(
    "partial_softmax_backward",
    "(Tensor dout, Tensor? dlse, Tensor[] outs, Tensor[] lses, Tensor? sinks, Tensor out, Tensor lse) "
    "-> (Tensor[] douts, Tensor[] dlses, Tensor dsinks)",
    _merge_backward,
    _merge_backward_fake,
)
torch.library.register_autograd("augtree::partial_softmax", _merge_grad, setup_context=_save_merge)
differentiable_once("partial_softmax_backward")


_COLLECTED_SLOTS = 1 << 15


def _spread(packed: Tensor, index: Tensor) -> Tensor:
    picked = packed.index_select(0, index.clamp(min=0))
    return picked.masked_fill_((index < 0).view(-1, *[1] * (packed.ndim - 1)), 0)


def _spread_fake(packed: Tensor, index: Tensor) -> Tensor:
    return packed.new_empty(index.shape[0], *packed.shape[1:])


def _collect(spread: Tensor, index: Tensor, num_tokens: int) -> Tensor:
    """Sum over the slots that show a token, in the accumulation dtype, rounded once."""
    total = spread.new_zeros(num_tokens + 1, *spread.shape[1:], dtype=accumulation_dtype(spread.dtype))
    where = torch.where(index < 0, num_tokens, index)
    for begin in range(0, len(where), _COLLECTED_SLOTS):  # in chunks: a wide copy of all slots would double the memory
        chunk = slice(begin, begin + _COLLECTED_SLOTS)
        total.index_add_(0, where[chunk], spread[chunk].to(total.dtype))
    return total[:num_tokens].to(spread.dtype)


def _collect_fake(spread: Tensor, index: Tensor, num_tokens: int) -> Tensor:
    return spread.new_empty(num_tokens, *spread.shape[1:])


def _save_spread(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.num_tokens = inputs[0].shape[0]


def _save_collect(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _collect_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.augtree.show_slots(grad, ctx.saved_tensors[0]), None, None


def _spread_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.augtree.collect_slots(grad, ctx.saved_tensors[0], ctx.num_tokens), None


# What the caller sees: slot i shows packed token index[i], or zeros where index[i] is -1 (padding). The gradient of a
# token is the sum over its slots: branch points and prompts get the gradients of all their branches.
define("show_slots", "(Tensor packed, Tensor index) -> Tensor", _spread, _spread_fake)
define("collect_slots", "(Tensor slots, Tensor index, SymInt num_tokens) -> Tensor", _collect, _collect_fake)
torch.library.register_autograd("augtree::show_slots", _spread_grad, setup_context=_save_spread)
torch.library.register_autograd("augtree::collect_slots", _collect_grad, setup_context=_save_collect)
