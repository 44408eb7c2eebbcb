"""Ring context parallelism without reuse: every row is a sequence of its own, zigzag over all ranks."""

from __future__ import annotations

import torch
from torch import Tensor, distributed

from augtree_fx.examples.bench.cp.contender import Contender
from augtree_fx.examples.bench.cp.ring import Ring, ring_attention
from augtree_fx.examples.bench.cp.rollout import Rollout
from augtree_fx.examples.bench.cp.shard import Shard
from augtree_fx.examples.bench.cp.zigzag import Zigzag, make_calls, unmasked_calls
from augtree_fx.reference import AttentionSpec


def causal_ring(
    lengths: list[int], tokens: slice, group: distributed.ProcessGroup | None, device: torch.device
) -> Ring:
    """The ring of some causal sequences.

    Args:
        lengths: of the sequences, in tokens.
        tokens: where this rank's chunks of them lie among its local tokens.
        group: the ranks; ``None`` for this one alone.
        device: where the tensors of the calls go.
    """
    rank, size = (0, 1) if group is None else (distributed.get_rank(group), distributed.get_world_size(group))
    zigzag, steps = Zigzag(tuple(lengths), size), []
    for step in range(size):
        causal, unmasked = zigzag.families(rank, (rank - step) % size)
        calls = [call for family in causal for call in make_calls(family, True, device)]
        steps.append((*calls, *unmasked_calls(unmasked, device)))
    return Ring(tokens, tuple(map(zigzag.num_tokens, range(size))), tuple(steps), group if size > 1 else None)


class RingRows(Contender):
    """Rows packed without padding, each cut into zigzag chunks; keys and values of all rows rotate."""

    def shard(self, rollout: Rollout, device: torch.device) -> Shard:
        """See `Contender.shard`."""
        zigzag = Zigzag(tuple(rollout.row_lengths), self.size)
        held = zigzag.tokens(self.rank, rollout.row_starts[:-1].tolist())
        ring = causal_ring(rollout.row_lengths, slice(0, len(held)), self.group, device)
        return Shard.of(rollout, held, device, (ring,), reuse=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, shard: Shard, scale: float, kernel: str) -> Tensor:
        """See `Contender.attend`."""
        return ring_attention(q, k, v, shard.plan, AttentionSpec(scale), kernel)
