"""Dynamic context parallelism without reuse: every row over as many ranks as it needs, rings inside sub-groups.

A rank's tokens are its chunks of the rows of every block that it is in, larger blocks first; rows of one rank are whole
and talk to nobody. With many rows of one length this is data parallelism, which is hard to beat without reuse.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, distributed

from augtree_fx.dtensor_ops.agreement import HostGroup
from augtree_fx.examples.bench.cp.contender import Contender
from augtree_fx.examples.bench.cp.ring import ring_attention
from augtree_fx.examples.bench.cp.ring_rows import causal_ring
from augtree_fx.examples.bench.cp.rollout import Rollout
from augtree_fx.examples.bench.cp.schedule import TOKEN_PAIRS, blocks_of, schedule
from augtree_fx.examples.bench.cp.shard import Shard
from augtree_fx.examples.bench.cp.zigzag import Zigzag
from augtree_fx.reference import AttentionSpec


def make_groups(group: distributed.ProcessGroup) -> dict[range, distributed.ProcessGroup]:
    """Process groups of all blocks of several ranks that this rank is in.

    All ranks call this once and keep the result: a communicator takes seconds to make and memory to keep.
    """
    host = HostGroup(group)
    made: dict[range, distributed.ProcessGroup | None] = {}
    for block in blocks_of(len(host.ranks)):
        if len(block) == len(host.ranks):
            made[block] = group
        elif len(block) > 1:
            made[block] = host.new_group(list(block) if host.rank in block else None)
    return {block: found for block, found in made.items() if found is not None}


class DynamicRows(Contender):
    """Rows placed by `schedule`.

    Args:
        group: the ranks of the axis.
        token_pairs: what a token costs outside attention, in (query, key) pairs.
    """

    def __init__(self, group: distributed.ProcessGroup, token_pairs: int = TOKEN_PAIRS) -> None:
        super().__init__(group)
        self.token_pairs = token_pairs
        self._groups = make_groups(group)

    def shard(self, rollout: Rollout, device: torch.device) -> Shard:
        """See `Contender.shard`; a rank that no row is placed on holds nothing."""
        lengths, starts = rollout.row_lengths, rollout.row_starts
        held, rings, begin = [np.arange(0)], [], 0
        for block in schedule(lengths, self.size, self.token_pairs).blocks:
            if self.rank not in block.ranks:
                continue
            chosen = [lengths[row] for row in block.sequences]
            zigzag = Zigzag(tuple(chosen), len(block.ranks))
            held.append(zigzag.tokens(self.rank - block.ranks.start, [int(starts[row]) for row in block.sequences]))
            tokens = slice(begin, begin + len(held[-1]))
            rings.append(causal_ring(chosen, tokens, self._groups.get(block.ranks), device))
            begin = tokens.stop
        return Shard.of(rollout, np.concatenate(held), device, tuple(rings), reuse=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, shard: Shard, scale: float, kernel: str) -> Tensor:
        """See `Contender.attend`."""
        return ring_attention(q, k, v, shard.plan, AttentionSpec(scale), kernel)
