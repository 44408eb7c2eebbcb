"""What one more attention piece costs, in tokens: the threshold for sharing a run of tokens.

A node saves the tokens it does not repeat. It costs kernel launches, and one more partial to merge for every
token below it. Both are expressed in token-layers of the model, so that the comparison needs no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# One attention piece, forward and backward, in seconds. CPU: 25 us a call, 4 calls, measured on 2 cores, torch 2.13
# (2026-11). CUDA: about 5 launches of 8 us hidden or not, H200, torch 2.11 (2026-11).
_PIECE_SECONDS = {"cpu": 1.0e-4, "cuda": 4.0e-5}
# Sustained matmul rate in FLOP/s. CPU: two AVX-512 cores; CUDA: half of the 771 TFLOP/s of an 8192^3 bf16 matmul.
_MATMUL_FLOPS = {"cpu": 1.0e11, "cuda": 4.0e14}
# Memory bandwidth in bytes/s. CPU: two cores; CUDA: H200 copy.
_MEMORY_BYTES_PER_S = {"cpu": 1.0e10, "cuda": 4.2e12}
_MERGE_PASSES = 6  # reads and writes of one partial, forward and backward


def attention_heads(config: Any) -> tuple[int, int]:
    """Query heads and their size, read off a transformers config."""
    heads = config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // heads


@dataclass(frozen=True)
class CostModel:
    """Cost of an attention piece in tokens.

    Attributes:
        node_tokens: tokens whose computation takes as long as one more piece.
        merge_fraction: cost of merging one partial, as a fraction of computing the token.
    """

    node_tokens: float = 16.0
    merge_fraction: float = 0.01

    def piece_tokens(self, descendant_tokens: int) -> float:
        """Tokens that a node has to save before it pays, given the tokens that attend to it."""
        return self.node_tokens + self.merge_fraction * descendant_tokens

    @staticmethod
    def free() -> CostModel:
        """Share whatever can be shared, however small."""
        return CostModel(node_tokens=0.0, merge_fraction=0.0)

    @staticmethod
    def of_layer(params_per_token: float, attention_width: int, device_type: str, dtype: torch.dtype) -> CostModel:
        """Cost model of one decoder layer on one kind of device.

        Args:
            params_per_token: weights of one layer that one token passes through (routed experts counted once).
            attention_width: query heads x value head size.
            device_type: ``"cpu"`` or ``"cuda"``; others count as ``"cuda"``.
            dtype: dtype of the activations.
        """
        kind = device_type if device_type in _PIECE_SECONDS else "cuda"
        token_seconds = 6 * max(params_per_token, 1.0) / _MATMUL_FLOPS[kind]  # forward 2, backward 4 FLOP a weight
        merge_bytes = _MERGE_PASSES * attention_width * dtype.itemsize
        node_tokens = min(max(_PIECE_SECONDS[kind] / token_seconds, 1.0), 64.0)
        merge_fraction = min(merge_bytes / _MEMORY_BYTES_PER_S[kind] / token_seconds, 0.05)
        return CostModel(node_tokens, merge_fraction)
