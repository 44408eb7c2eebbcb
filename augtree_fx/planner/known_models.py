"""Sizes of well-known models, so that plans need no download; other names go through `AutoConfig`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from augtree_fx.planner.model_shape import ModelShape


def _qwen3(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": tied,
    }  # fmt: skip


def _qwen3_moe(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    sparse = {"moe_intermediate_size": inner, "num_experts": 128, "num_experts_per_tok": 8}
    return _qwen3(hidden, 3 * hidden, layers, heads, 4, False) | sparse


def _llama(hidden: int, inner: int, layers: int, heads: int, vocabulary: int, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 8, "head_dim": hidden // heads, "vocab_size": vocabulary, "tie_word_embeddings": tied,
    }  # fmt: skip


# Numbers of the config.json files on huggingface.co; Qwen3 of 2025-04 (also arXiv 2505.09388, table 1 and 2), Llama 3.x
# of 2024 (also arXiv 2407.21783, table 3).
CONFIGS = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, 8, True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, 8, True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, 8, True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, 8, False),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40, 8, False),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64, 8, False),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(2048, 768, 48, 32),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(4096, 1536, 94, 64),
    "meta-llama/Llama-3.2-1B": _llama(2048, 8192, 16, 32, 128256, True),
    "meta-llama/Llama-3.2-3B": _llama(3072, 8192, 28, 24, 128256, True),
    "meta-llama/Llama-3.1-8B": _llama(4096, 14336, 32, 32, 128256, False),
    "meta-llama/Llama-3.1-70B": _llama(8192, 28672, 80, 64, 128256, False),
}


def model_shape(name: str) -> ModelShape:
    """Sizes of a model by the name of a well-known one, a config.json, a folder, or any Hub id.

    Args:
        name: ``Qwen/Qwen3-8B`` or ``Qwen3-8B``, a path, or a Hub id that `transformers.AutoConfig` can load.

    Raises:
        ValueError: nothing of that name is built in, on disk, or can be loaded.
    """
    for known, config in CONFIGS.items():
        if name in (known, known.split("/")[1]):
            return ModelShape.from_config(config, name=known)
    if Path(name).exists():
        return ModelShape.from_config(name, name=name)
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"a model must be a built-in name, a config.json or a Hub id that can be reached, got {name!r} "
            f"({type(error).__name__}); built in are {', '.join(CONFIGS)}"
        ) from error
    return ModelShape.from_config(config, name=name)
