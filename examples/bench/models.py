"""Qwen3 of its public sizes with random weights, its FLOPs, and rows through a variable-length kernel as a baseline."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3Config

from augtree_fx.examples.bench import varlen
from augtree_fx.examples.bench.shapes import BACKWARD_FLOP, FORWARD_FLOP

ROWS_ATTENTION = "augtree_bench_rows"  # no "flash" in it: transformers would take it for one of its own


@dataclass(frozen=True)
class Size:
    """Numbers of a config; names as in `transformers.Qwen3Config`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    tie_word_embeddings: bool
    head_dim: int = 128
    vocab_size: int = 151936


# The config.json files of Qwen/Qwen3-0.6B, -1.7B, -4B and -8B (2025-04).
SIZES = {
    "tiny": Size(64, 128, 2, 4, 2, True, head_dim=16, vocab_size=512),
    "0.6B": Size(1024, 3072, 28, 16, 8, True),
    "1.7B": Size(2048, 6144, 28, 16, 8, True),
    "4B": Size(2560, 9728, 36, 32, 8, True),
    "8B": Size(4096, 12288, 36, 32, 8, False),
}


def build(name: str, layers: int | None, device: torch.device, dtype: torch.dtype) -> Any:
    """A model with random weights, made on the device, in training mode.

    Args:
        name: one of `SIZES`.
        layers: number of decoder layers, or ``None`` for all of them.
        device: where to make it.
        dtype: dtype of the weights, and so of their gradients.
    """
    size = SIZES[name]
    size = replace(size, num_hidden_layers=layers or size.num_hidden_layers)
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
    config = Qwen3Config(**asdict(size), max_position_embeddings=131_072, rope_parameters=rope, use_cache=False)
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()


def set_checkpointing(model: Any, on: bool) -> None:
    """Turn gradient checkpointing of whole layers on or off."""
    if on:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


def use_rows_kernel(model: Any, kernel: str) -> None:
    """Let an unmodified model run its rows through ``"sdpa"``, or through a kernel of `varlen.attend`."""
    if kernel != "sdpa":
        AttentionInterface.register(ROWS_ATTENTION, partial(_rows_attention, kernel=kernel))
    model.set_attn_implementation("sdpa" if kernel == "sdpa" else ROWS_ATTENTION)


def _rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kernel: str,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention of full rows ``[rows, heads, tokens, head size]`` as one variable-length call."""
    rows, _, tokens, _ = query.shape
    call = varlen.rows_call(rows, tokens, tokens, query.device)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    return varlen.attend(q, k, v, call, scaling, kernel).view(rows, tokens, *q.shape[1:]), None


@dataclass(frozen=True)
class Work:
    """What a contender computes in one update step.

    Attributes:
        tokens: tokens through the decoder layers.
        pairs: causal (query, key) pairs of one layer.
        scored: response tokens through the LM head.
    """

    tokens: int
    pairs: int
    scored: int

    def model_flop(self, model: Any) -> int:
        """FLOPs of the model on these tokens: 6 a weight and token, 14 an attention pair; nothing is counted twice."""
        return self._flop(model, 6, 6, FORWARD_FLOP + BACKWARD_FLOP)

    def executed_flop(self, model: Any, checkpointing: bool) -> int:
        """The same with what is recomputed: the head always, the layers' forward under checkpointing."""
        again = int(checkpointing)
        return self._flop(model, 6 + 2 * again, 8, FORWARD_FLOP * (1 + again) + BACKWARD_FLOP)

    def _flop(self, model: Any, weight: int, head: int, pair: int) -> int:
        config = model.config
        linears = (module for module in model.model.layers.modules() if isinstance(module, nn.Linear))
        dense = sum(module.weight.numel() for module in linears)
        width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
        vocabulary = config.hidden_size * config.vocab_size
        return weight * dense * self.tokens + head * vocabulary * self.scored + pair * self.pairs * width
