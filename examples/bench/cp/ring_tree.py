"""Ring context parallelism with prompt reuse: prefix sharing put together with ring attention, as a user would.

Prompts are zigzag shards, computed once; every response is a zigzag shard too. One ring carries the keys of both:

    a rank's tokens    prompts low | prompts high | responses low | responses high

    prompts on prompts         causal, as any ring
    responses on themselves    causal, as any ring
    responses on prompts       unmasked: all local responses of a group against the visiting shard of its prompt

Keys always move, whatever is longer; there is no other direction to choose. What prompts of several groups
have in common is computed for each of them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from augtree_fx.examples.bench.cp.contender import Contender
from augtree_fx.examples.bench.cp.ring import Ring, ring_attention
from augtree_fx.examples.bench.cp.rollout import Rollout
from augtree_fx.examples.bench.cp.shard import Shard
from augtree_fx.examples.bench.cp.zigzag import Family, Zigzag, make_calls, pieces, shifted, unmasked_calls
from augtree_fx.reference import AttentionSpec
from augtree_fx.tables import AttentionCall


class RingTree(Contender):
    """Every prompt once, its responses sharded over all ranks; keys and values of both rotate."""

    reuse = True

    def shard(self, rollout: Rollout, device: torch.device) -> Shard:
        """See `Contender.shard`."""
        rollout = rollout.apart
        prompts, responses = self._zigzags(rollout)
        held = np.concatenate(
            [
                prompts.tokens(self.rank, rollout.prompt_starts),
                responses.tokens(self.rank, rollout.response_starts),
            ]
        )
        steps = tuple(self._calls(rollout, (self.rank - step) % self.size, device) for step in range(self.size))
        num_tokens = tuple(prompts.num_tokens(rank) + responses.num_tokens(rank) for rank in range(self.size))
        ring = Ring(slice(0, len(held)), num_tokens, steps, self.group if self.size > 1 else None)
        return Shard.of(rollout, rollout.first_copy[held], device, (ring,), reuse=True)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, shard: Shard, scale: float, kernel: str) -> Tensor:
        """See `Contender.attend`."""
        return ring_attention(q, k, v, shard.plan, AttentionSpec(scale), kernel)

    def _zigzags(self, rollout: Rollout) -> tuple[Zigzag, Zigzag]:
        return Zigzag(rollout.prompts, self.size), Zigzag(tuple(rollout.flat_responses), self.size)

    def _calls(self, rollout: Rollout, source: int, device: torch.device) -> tuple[AttentionCall, ...]:
        """Calls of this rank's queries with the keys of rank ``source``."""
        prompts, responses = self._zigzags(rollout)
        q_before, k_before = prompts.num_tokens(self.rank), prompts.num_tokens(source)
        causal, unmasked = prompts.families(self.rank, source)
        own_causal, own_unmasked = responses.families(self.rank, source)
        causal = causal + [shifted(family, q_before, k_before) for family in own_causal]
        calls = [call for family in causal for call in make_calls(family, True, device)]
        calls += unmasked_calls(unmasked, device)
        calls += unmasked_calls([shifted(family, q_before, k_before) for family in own_unmasked], device)
        return (*calls, *unmasked_calls(self._on_prompts(rollout, source), device))

    def _on_prompts(self, rollout: Rollout, source: int) -> list[Family]:
        """Each group's responses, low and high, on the low and high chunk of its prompt that ``source`` holds."""
        prompts, responses = self._zigzags(rollout)
        group_ends = np.concatenate([[0], np.cumsum([len(group) for group in rollout.responses])])
        before = prompts.num_tokens(self.rank)
        queries = [before + places[group_ends] for places in responses.places(self.rank)]
        return [pieces(q, k) for q in queries for k in prompts.places(source)]
