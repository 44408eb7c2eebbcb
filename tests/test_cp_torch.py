"""torch's context parallelism as a contender, on the CPU: its own ring and dispatch, with a CPU kernel put inside.

torch's ring calls CUDA's flash op. Here that op's local computation is the CPU's flash in float64; nothing else
changes, so the order of tokens, rows, GQA, backward and recomputation inside the context are those of the benchmark.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks
from test_cp_rivals import CONTENDERS, ROLLOUTS, TOLERANCE, Found, check_attention, check_step
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from augtree_fx.examples.bench.cp.rollout import Rollout
from augtree_fx.examples.bench.cp.torch_cp import TorchContextParallel

ring = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention")
EQUAL = Rollout((37, 20), ((11, 11), (28,)))  # rows of 48, which 8 chunks divide
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    group = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield group
    group.stop()


def _forward(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, dropout_p: float, scale: float) -> Any:
    out, lse = FORWARD(query, key, value, dropout_p, is_causal, scale=scale)
    return out, lse, None, None, query.shape[2], key.shape[2], *(torch.zeros(()) for _ in range(3))


def _backward(*, grad_out: Tensor, dropout_p: float, is_causal: bool, scale: float, **rest: Any) -> Any:
    tensors = (rest[name] for name in ("query", "key", "value", "out", "logsumexp"))
    return BACKWARD(grad_out, *tensors, dropout_p, is_causal, scale=scale)


def _ring_forward(
    mesh: Any, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, *, scale: float
) -> Any:
    options = {"is_causal": is_causal, "dropout_p": dropout_p, "scale": scale}
    return ring._templated_ring_attention(mesh.get_group(), 2, _forward, query=query, key=key, value=value, **options)


def _ring_backward(
    mesh: Any, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *random: Any, scale: float,
) -> Any:  # fmt: skip
    tensors = {"query": query, "key": key, "value": value, "out": out, "logsumexp": logsumexp, "grad_out": grad_out}
    options = {"grad_out_name": "grad_out", "is_causal": is_causal, "dropout_p": dropout_p, "scale": scale}
    return ring._templated_ring_attention_backward(mesh.get_group(), 2, _backward, **tensors, **options)


@contextlib.contextmanager
def on_the_cpu(repeat_kv: bool) -> Iterator[None]:
    """sdpa on sharded tensors takes the flash op, whose local computation is the CPU's; elsewhere it is as always."""
    sdpa = functional.scaled_dot_product_attention

    def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if not isinstance(q, DTensor):
            return sdpa(q, k, v, **options)
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=options["scale"])[0]

    with contextlib.ExitStack() as stack:
        for where, name, value in (
            (functional, "scaled_dot_product_attention", scaled_dot_product_attention),
            (ring, "_scaled_dot_product_ring_flash_attention", _ring_forward),
            (ring, "_scaled_dot_product_ring_flash_attention_backward", _ring_backward),
            (ring._cp_options, "convert_to_f32", False),
            (TorchContextParallel, "_check_device", lambda self, device: None),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        stack.enter_context(mock.patch.dict(ROLLOUTS, equal=EQUAL))
        flash = SDPBackend.FLASH_ATTENTION
        stack.enter_context(
            mock.patch.dict(CONTENDERS, torch=lambda group: TorchContextParallel(group, flash, repeat_kv))
        )
        yield


def attention_and_step(repeat_kv: bool) -> tuple[Found, dict[str, float]]:
    with on_the_cpu(repeat_kv):
        return check_attention("torch", "equal", 4, 2), check_step("torch", "equal", "qwen3", 2, True)


@pytest.mark.parametrize("repeat_kv", [False, True])
def test_attention_and_a_step_equal_dense_rows(ranks: Ranks, repeat_kv: bool) -> None:
    results = ranks.run(attention_and_step, repeat_kv)
    assert sorted(token for found, _ in results for token in found.held) == list(range(EQUAL.num_row_tokens))
    for found, step in results:
        assert max(*found.errors.values(), *step.values()) <= TOLERANCE, (found.errors, step)


def refusal(name: str) -> str:
    contender = TorchContextParallel(distributed.group.WORLD, SDPBackend.FLASH_ATTENTION)
    with pytest.raises(NotImplementedError) as refused:
        contender.shard(ROLLOUTS[name], torch.device("cpu"))
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("one group", "takes dense rows of one length, got lengths [46, 48, 51]; pad them"),
        ("one row", "a multiple of twice the ranks, got 43 tokens and 4 ranks; use a multiple of 8"),
    ],
)
def test_rows_that_it_does_not_take(ranks: Ranks, name: str, said: str) -> None:
    assert all(said in text for text in ranks.run(refusal, name))
