"""Ulysses: all-to-all from shards of tokens to shards of heads and back; each rank attends to whole rows in between.

    [T/C tokens, H heads]  ->  [T tokens, H/C heads]  -> attention of whole rows ->  [T/C tokens, H heads]

Queries, keys and values go in one all-to-all (DeepSpeed-Ulysses, arXiv:2309.14509, sends three). Rows are not reused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from augtree_fx.examples.bench import varlen
from augtree_fx.examples.bench.cp.contender import Contender
from augtree_fx.examples.bench.cp.rollout import Rollout
from augtree_fx.examples.bench.cp.shard import Shard
from augtree_fx.examples.bench.cp.zigzag import make_calls, pieces
from augtree_fx.tables import AttentionCall


class Ulysses(Contender):
    """Rows packed without padding, cut into as many runs of tokens as there are ranks."""

    def shard(self, rollout: Rollout, device: torch.device) -> Shard:
        """See `Contender.shard`."""
        total = rollout.num_row_tokens
        if total < self.size:
            raise ValueError(f"every rank must hold a token, got {total} tokens and {self.size} ranks; use fewer ranks")
        cuts = torch.arange(self.size + 1) * total // self.size
        held = torch.arange(int(cuts[self.rank]), int(cuts[self.rank + 1])).numpy()
        (rows,) = make_calls(pieces(rollout.row_starts, rollout.row_starts), True, device)
        return Shard.of(rollout, held, device, (rows, cuts.diff().tolist()), reuse=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, shard: Shard, scale: float, kernel: str) -> Tensor:
        """See `Contender.attend`.

        Raises:
            NotImplementedError: the ranks do not divide the key heads, so that some would have to be copied.
        """
        self._check_heads(q.shape[1], k.shape[1])
        call: AttentionCall
        call, lengths = shard.plan
        heads = [x.unflatten(1, (self.size, -1)) for x in (q, k, v)]  # [tokens, ranks, heads of a rank, head size]
        gathered = _AllToAll.apply(torch.cat(heads, dim=2).transpose(0, 1), lengths, self.group, True)
        q, k, v = gathered.split([x.shape[2] for x in heads], dim=1)
        out = varlen.attend(q, k, v, call, scale, kernel)
        return _AllToAll.apply(out, lengths, self.group, False).transpose(0, 1).flatten(1, 2)

    def _check_heads(self, heads: int, kv_heads: int) -> None:
        if kv_heads % self.size:
            divisors = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
            raise NotImplementedError(
                f"Ulysses gives every rank whole key heads, so the ranks must divide them, got {self.size} ranks and "
                f"{kv_heads} key heads (of {heads} heads); use {', '.join(map(str, divisors))} ranks"
            )


class _AllToAll(torch.autograd.Function):
    """Tokens gathered and heads scattered, or the other way; each is the other's backward.

    scatter: ``[ranks, local tokens, heads, size] -> [all tokens, heads, size]``; not scatter: the inverse.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: list[int], group: distributed.ProcessGroup, scatter: bool) -> Tensor:
        ctx.rest = (lengths, group, scatter)
        return _exchange(x, lengths, group, scatter)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        lengths, group, scatter = ctx.rest
        return _exchange(gradients[0], lengths, group, not scatter), None, None, None


def _exchange(x: Tensor, lengths: list[int], group: distributed.ProcessGroup, scatter: bool) -> Tensor:
    mine = lengths[distributed.get_rank(group)]
    equal = [mine] * len(lengths)
    x = x.flatten(0, 1) if scatter else x
    result = x.new_empty(sum(lengths) if scatter else sum(equal), *x.shape[1:])
    received, sent = (lengths, equal) if scatter else (equal, lengths)
    distributed.all_to_all_single(result, x.contiguous(), received, sent, group=group)
    return result if scatter else result.unflatten(0, (len(lengths), mine))
