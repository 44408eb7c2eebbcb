"""torch's own context parallelism (`torch.distributed.tensor.experimental.context_parallel`) on dense rows.

It replaces `torch.nn.functional.scaled_dot_product_attention` while it is entered, forward and backward, and takes rows
of one length without a mask. Its head-tail balancer is a zigzag of 2C chunks. torch 2.11 and 2.13 have the same public
name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from augtree_fx.examples.bench.cp.contender import Contender
from augtree_fx.examples.bench.cp.rollout import Rollout
from augtree_fx.examples.bench.cp.shard import Shard


class TorchContextParallel(Contender):
    """Rows ``[rows, row length / ranks]``; the kernel is one of sdpa's, not of `augtree_fx.kernels`.

    Args:
        group: the ranks.
        backend: of sdpa; torch's ring knows flash, cuDNN and memory-efficient attention on CUDA.
        repeat_kv: copy key heads up to the number of heads before the ring, where a backend needs that.
    """

    def __init__(self, group: distributed.ProcessGroup, backend: SDPBackend, repeat_kv: bool = False) -> None:
        super().__init__(group)
        self.backend, self.repeat_kv = backend, repeat_kv

    def shard(self, rollout: Rollout, device: torch.device) -> Shard:
        """See `Contender.shard`.

        Raises:
            NotImplementedError: rows of unequal lengths, or such that do not divide into zigzag chunks.
        """
        lengths = set(rollout.row_lengths)
        if len(lengths) != 1:
            raise NotImplementedError(
                f"context_parallel takes dense rows of one length, got lengths {sorted(lengths)}; pad them, or race "
                "the others alone"
            )
        (length,) = lengths
        if length % (2 * self.size):
            raise NotImplementedError(
                f"context_parallel balances rows whose length is a multiple of twice the ranks, got {length} tokens "
                f"and {self.size} ranks; use a multiple of {2 * self.size}"
            )
        mesh = DeviceMesh.from_group(self.group, device.type)
        numbers = torch.arange(rollout.num_row_tokens, device=device).view(-1, length)
        with context_parallel(mesh, buffers=[numbers], buffer_seq_dims=[1]):
            held = numbers.cpu().numpy().copy()
        return Shard.of(rollout, held, device, (mesh, length), reuse=False)

    @contextmanager
    def active(self, shard: Shard) -> Iterator[None]:
        """Replaces sdpa; the buffer is there for the length of a row, which decides on load balancing."""
        mesh, length = shard.plan
        replaced = context_parallel(mesh, buffers=[shard.row_token.new_empty(length)], buffer_seq_dims=[0])
        replaced.__enter__()
        try:
            yield
        finally:  # torch 2.11 puts sdpa back only if it is told of no exception; later contenders would run in the ring
            replaced.__exit__(None, None, None)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, shard: Shard, scale: float, kernel: str) -> Tensor:
        """See `Contender.attend`; ``kernel`` is not used.

        Raises:
            NotImplementedError: the tensors are not on CUDA.
        """
        self._check_device(q.device)
        if self.repeat_kv:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        rows = len(shard.row_token)
        q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(self.backend):
            grouped = q.shape[1] != k.shape[1]
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1)

    def _check_device(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise NotImplementedError(f"torch's ring patches sdpa's CUDA kernels, the tensors are on {device.type}")
