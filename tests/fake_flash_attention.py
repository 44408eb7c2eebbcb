"""Stand-ins for FlashAttention-2 and -3 on the CPU: their private functions' signatures, checks, layouts and oddities,
computed segment by segment with the plain reference. Read off flash-attn 2.8.3 (and the folder hopper in it, 3.0.0.b1)
and the main branch of the repository; see each function for what is odd.

No ``from __future__ import annotations`` here: `torch.library.custom_op` reads the signatures.
"""

from types import ModuleType
from typing import Optional

import torch
from torch import Tensor

from augtree_fx import reference
from augtree_fx.reference import AttentionSpec


def _pieces(cu_q: Tensor, cu_k: Tensor, causal: bool, left: int, right: int) -> list[tuple[slice, slice, Tensor]]:
    """Query and key range and mask of each segment; masks are aligned at the last key, -1 is no bound."""
    pieces = []
    right = 0 if causal else right
    ends = torch.stack([cu_q, cu_k])
    for q0, k0, q1, k1 in torch.cat([ends[:, :-1], ends[:, 1:]]).T.tolist():
        distance = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - torch.arange(k1 - k0)
        seen = torch.ones_like(distance, dtype=torch.bool)
        seen &= distance <= left if left >= 0 else True
        seen &= distance >= -right if right >= 0 else True
        pieces.append((slice(q0, q1), slice(k0, k1), seen))
    return pieces


def _check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> None:
    size = q.shape[-1]
    assert size == k.shape[-1] == v.shape[-1] and size % 8 == 0 and size <= 256, "one head size, in eights, up to 256"
    assert all(x.stride(-1) == 1 for x in (q, k, v)), "the last dim must be contiguous"
    for cu, longest, total in ((cu_q, max_q, len(q)), (cu_k, max_k, len(k))):
        assert cu.dtype == torch.int32 and cu.is_contiguous() and int(cu[-1]) == total
        assert longest == int(cu.diff().max())


def _forward(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, left, right, softcap, no_keys) -> tuple[Tensor, Tensor]:
    _check(q, k, v, cu_q, cu_k, max_q, max_k)
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[1], len(q), dtype=torch.float32)
    spec = AttentionSpec(scale, softcap=softcap)
    for queries, keys, seen in _pieces(cu_q, cu_k, causal, left, right):
        out[queries], lse[:, queries] = reference.attend(q[queries], k[keys], v[keys], seen, spec)
    # A call without any key never reaches the kernel: its LSE is filled with +inf, in FlashAttention-3 as well.
    return out, lse.masked_fill_(lse == -torch.inf, no_keys if len(k) else torch.inf)


def _backward(
    dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, max_q, max_k, scale, causal, left, right, softcap
) -> None:
    _check(q, k, v, cu_q, cu_k, max_q, max_k)
    assert dout.stride(-1) == out.stride(-1) == 1 and dout.shape == out.shape == q.shape
    assert lse.dtype == torch.float32 and lse.shape == (q.shape[1], len(q))
    lse = lse.as_strided(lse.shape, (len(q), 1))  # the kernels read it by pointer
    spec = AttentionSpec(scale, softcap=softcap)
    for queries, keys, seen in _pieces(cu_q, cu_k, causal, left, right):
        dq[queries], dk[keys], dv[keys] = reference.attend_backward(
            dout[queries], q[queries], k[keys], v[keys], out[queries], lse[:, queries], seen, spec
        )


@torch.library.custom_op("fake_flash_attn_2::_flash_attn_varlen_forward", mutates_args=())
def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,  # noqa: UP045
    return_softmax: bool = False,
    block_table: Optional[Tensor] = None,  # noqa: UP045
    leftpad_k: Optional[Tensor] = None,  # noqa: UP045
    seqused_k: Optional[Tensor] = None,  # noqa: UP045
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The LSE of a query without keys is +inf; also returned: dropout's mask and the state of its generator."""
    assert dropout_p == 0.0
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = (window_size_left, window_size_right)
    out, lse = _forward(q, k, v, *lengths, softmax_scale, causal, *window, softcap, torch.inf)
    return out, lse, torch.empty(0, dtype=q.dtype), torch.zeros(2, dtype=torch.int64)


@torch.library.custom_op("fake_flash_attn_2::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"))
def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Optional[Tensor],  # noqa: UP045
    dk: Optional[Tensor],  # noqa: UP045
    dv: Optional[Tensor],  # noqa: UP045
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],  # noqa: UP045
    deterministic: bool,
    rng_state: Optional[Tensor] = None,  # noqa: UP045
    zero_tensors: bool = False,
) -> Tensor:
    """A query without keys must have an LSE of +inf: with -inf its weights would be exp(+inf)."""
    assert dropout_p == 0.0 and not (softmax_lse == -torch.inf).any()
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = (window_size_left, window_size_right)
    _backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *lengths, softmax_scale, causal, *window, softcap)
    return torch.empty(q.shape[1], len(q) + 128 * (len(cu_seqlens_q) - 1))


@torch.library.custom_op("fake_flash_attn_3::_flash_attn_forward", mutates_args=())
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Optional[Tensor] = None,  # noqa: UP045
    v_new: Optional[Tensor] = None,  # noqa: UP045
    qv: Optional[Tensor] = None,  # noqa: UP045
    out_: Optional[Tensor] = None,  # noqa: UP045
    cu_seqlens_q: Optional[Tensor] = None,  # noqa: UP045
    cu_seqlens_k: Optional[Tensor] = None,  # noqa: UP045
    cu_seqlens_k_new: Optional[Tensor] = None,  # noqa: UP045
    seqused_q: Optional[Tensor] = None,  # noqa: UP045
    seqused_k: Optional[Tensor] = None,  # noqa: UP045
    max_seqlen_q: Optional[int] = None,  # noqa: UP045
    max_seqlen_k: Optional[int] = None,  # noqa: UP045
    page_table: Optional[Tensor] = None,  # noqa: UP045
    kv_batch_idx: Optional[Tensor] = None,  # noqa: UP045
    leftpad_k: Optional[Tensor] = None,  # noqa: UP045
    rotary_cos: Optional[Tensor] = None,  # noqa: UP045
    rotary_sin: Optional[Tensor] = None,  # noqa: UP045
    seqlens_rotary: Optional[Tensor] = None,  # noqa: UP045
    q_descale: Optional[Tensor] = None,  # noqa: UP045
    k_descale: Optional[Tensor] = None,  # noqa: UP045
    v_descale: Optional[Tensor] = None,  # noqa: UP045
    softmax_scale: Optional[float] = None,  # noqa: UP045
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Optional[Tensor] = None,  # noqa: UP045
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,  # noqa: UP045
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The LSE of a query without keys is -inf; also returned: the partial results of splits, none here."""
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = (window_size_left, window_size_right)
    out, lse = _forward(q, k, v, *lengths, softmax_scale, causal, *window, softcap, -torch.inf)
    return out, lse, torch.tensor([]), torch.tensor([])


@torch.library.custom_op("fake_flash_attn_3::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Optional[Tensor] = None,  # noqa: UP045
    cu_seqlens_k: Optional[Tensor] = None,  # noqa: UP045
    sequed_q: Optional[Tensor] = None,  # noqa: UP045
    sequed_k: Optional[Tensor] = None,  # noqa: UP045
    max_seqlen_q: Optional[int] = None,  # noqa: UP045
    max_seqlen_k: Optional[int] = None,  # noqa: UP045
    dq: Optional[Tensor] = None,  # noqa: UP045
    dk: Optional[Tensor] = None,  # noqa: UP045
    dv: Optional[Tensor] = None,  # noqa: UP045
    softmax_scale: Optional[float] = None,  # noqa: UP045
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """The causal flag has another name than in the forward."""
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = (window_size_left, window_size_right)
    _backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *lengths, softmax_scale, is_causal, *window, softcap)
    return torch.empty(q.shape[1], len(q))


def _beta_flash_attn_forward(
    q,
    k,
    v,
    k_new,
    v_new,
    qv,
    out,
    cu_seqlens_q,
    cu_seqlens_k,
    cu_seqlens_k_new,
    seqused_q,
    seqused_k,
    max_seqlen_q,
    max_seqlen_k,
    page_table,
    kv_batch_idx,
    leftpad_k,
    rotary_cos,
    rotary_sin,
    seqlens_rotary,
    q_descale,
    k_descale,
    v_descale,
    softmax_scale,
    causal,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=1,
    pack_gqa=None,
    sm_margin=0,
):
    """A plain function; the window is a pair; what is not used has to be passed all the same."""
    unused = (k_new, v_new, qv, out, cu_seqlens_k_new, seqused_q, seqused_k, page_table, kv_batch_idx, leftpad_k)
    assert all(x is None for x in (*unused, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale))
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = _forward(q, k, v, *lengths, softmax_scale, causal, *window_size, softcap, -torch.inf)
    return out, lse, None, None


def _beta_flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    cu_seqlens_q,
    cu_seqlens_k,
    sequed_q,
    sequed_k,
    max_seqlen_q,
    max_seqlen_k,
    dq,
    dk,
    dv,
    softmax_scale,
    causal,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
    sm_margin=0,
):
    assert sequed_q is None and sequed_k is None
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *lengths, softmax_scale, causal, *window_size, softcap)
    return dq, dk, dv, torch.empty(q.shape[1], len(q))


def _module(name: str, **functions: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(functions)
    return module


def flash_attn_2() -> ModuleType:
    return _module(
        "flash_attn.flash_attn_interface",
        _flash_attn_varlen_forward=_flash_attn_varlen_forward,
        _flash_attn_varlen_backward=_flash_attn_varlen_backward,
    )


def flash_attn_3() -> ModuleType:
    return _module(
        "flash_attn_interface", _flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward
    )


def flash_attn_3_beta() -> ModuleType:
    return _module(
        "flash_attn_interface",
        _flash_attn_forward=_beta_flash_attn_forward,
        _flash_attn_backward=_beta_flash_attn_backward,
    )
