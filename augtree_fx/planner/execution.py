"""How a step is run, as far as it changes what a plan costs: forward only or not, checkpointing, what memory holds."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Execution:
    """Settings of one pass over a batch.

    Attributes:
        forward_only: no backward follows (old and reference log-probs).
        checkpointing: layers keep their inputs alone and run forward again in backward.
        shard_weights: FSDP over all ranks: weights are gathered layer by layer in each pass.
        state_bytes_per_weight: gradients and optimizer, beside the weight itself, sharded as the weights are. 14 is
            a bf16 gradient and three float32 numbers of AdamW.
        usable_memory: fraction of a rank's memory that a plan may fill; the rest is for the allocator and libraries.
    """

    forward_only: bool = False
    checkpointing: bool = True
    shard_weights: bool = True
    state_bytes_per_weight: float = 14.0
    usable_memory: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.usable_memory <= 1:
            raise ValueError(f"usable_memory must be in (0, 1], got {self.usable_memory}; leave it out for 0.9")
        if not 0 <= self.state_bytes_per_weight < math.inf:
            raise ValueError(
                "bytes of gradient and optimizer for each weight must be 0 or more, got "
                f"{self.state_bytes_per_weight}; leave it out for 14"
            )

    @property
    def forwards(self) -> int:
        """Times that a layer's forward runs."""
        return 2 if self.checkpointing and not self.forward_only else 1

    @property
    def backwards(self) -> int:
        """Times that its backward runs."""
        return 0 if self.forward_only else 1
