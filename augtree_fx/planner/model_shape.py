"""What a planner needs to know of a model: sizes, read off a Hugging Face config, its JSON, or a model."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_NAMES = {  # older configs' names of the same numbers
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "vocab_size": ("vocab_size",),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_INNER = ("intermediate_size", "ffn_hidden_size", "n_inner")
_TWO_MATRICES = frozenset(  # types whose MLPs have no gate, which no field of theirs says
    """apertus apertus1p5_text arcee bert bert-generation big_bird biogpt bloom camembert codegen data2vec-text electra
    ernie falcon fuyu git gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gptj jais2 megatron-bert nanochat nemotron
    openai-gpt opt persimmon phi rembert roberta roberta-prelayernorm roc_bert roformer starcoder2 xlm-roberta
    xlm-roberta-xl xmod""".split()
)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder.

    Attributes:
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key heads.
        head_dim: size of a query and key head.
        value_head_dim: size of a value head.
        kv_values_per_token: numbers that move for one token's keys and values in one layer; MLA moves its latent.
        dense_weights: weights of one layer that every token passes through, averaged over layers.
        expert_weights: weights of one layer's routed experts that one token passes through, averaged over layers.
        num_experts: routed experts of a layer, 0 without.
        experts_per_token: of them, how many a token passes through.
        total_weights: all parameters, embeddings and head included.
        vocab_size: rows of the LM head.
        windows: ``((window in tokens, or None), number of layers)`` pairs that add up to `num_layers`.
        dtype_bytes: bytes of a weight and of an activation.
        name: for tables.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    kv_values_per_token: int
    dense_weights: int
    expert_weights: int
    num_experts: int
    experts_per_token: int
    total_weights: int
    vocab_size: int
    windows: tuple[tuple[int | None, int], ...]
    dtype_bytes: int = 2
    name: str = "model"

    @property
    def pair_flop(self) -> int:
        """FLOP of one (query, key) pair in one layer, forward: two products a head."""
        return 2 * self.num_heads * (self.head_dim + self.value_head_dim)

    @property
    def query_values_per_token(self) -> int:
        """Numbers of one token's queries in one layer."""
        return self.num_heads * self.head_dim

    @property
    def output_values_per_token(self) -> int:
        """Numbers of one token's attention output in one layer."""
        return self.num_heads * self.value_head_dim

    @staticmethod
    def from_config(config: Any, *, name: str | None = None) -> ModelShape:
        """Sizes off a config.

        Weights are sums of what configs say: attention, also of latents, MLPs of three matrices or two, routed and
        shared experts, LongCat's double layers, gemma's embeddings by layer, the vocabulary. Of 158 types of causal LMs
        of transformers 5.24, layers are within 3% of the model's own in 128 and within 6% in 137. Not counted are
        norms, biases, towers of other modalities, recurrent and convolution states (Qwen3.5 has 8% more in all, Bamba
        20%), gates of attention, and layers that differ in heads or experts (Llama 4; Jamba, LFM2 and Zamba have
        fewer). `from_model` counts all of them, also of a model on the ``meta`` device.

        Args:
            config: a transformers config, a mapping as in config.json, or the path of such a file or its folder.
            name: for tables; by default the config's own.

        Raises:
            ValueError: a file holds no config, a size is missing, or heads do not divide.
            FileNotFoundError: no such file.
        """
        values = _values(config)
        if isinstance(values.get("text_config"), Mapping):
            values = dict(values["text_config"])
        layers, hidden = _number(values, "num_hidden_layers"), _number(values, "hidden_size")
        heads = _number(values, "num_attention_heads")
        kv_heads = values.get("num_key_value_heads") or values.get("num_kv_heads") or heads
        if not isinstance(kv_heads, int) or heads % kv_heads:
            raise ValueError(f"query heads must be a multiple of key heads, got {heads} and {kv_heads}; see the config")
        latent, rope = values.get("kv_lora_rank"), values.get("qk_rope_head_dim") or 0
        head_dim = values.get("head_dim") or hidden // heads
        value_dim = values.get("v_head_dim") or head_dim
        if latent:
            head_dim = (values.get("qk_nope_head_dim") or 0) + rope
            attention = _latent_weights(values, hidden, heads, head_dim, value_dim)
        else:
            attention = hidden * (heads * (head_dim + value_dim) + kv_heads * (head_dim + value_dim))
        mlp = _mlp_weights(values, hidden, layers)
        by_layer = values.get("hidden_size_per_layer_input") or 0  # of gemma's embeddings, and three products with them
        vocabulary = _number(values, "vocab_size")
        embeddings = vocabulary * hidden * (1 if values.get("tie_word_embeddings") else 2)
        embeddings += by_layer * layers * (values.get("vocab_size_per_layer_input") or vocabulary)
        every_token = attention + 3 * hidden * by_layer + mlp.dense // layers
        return ModelShape(
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            value_head_dim=value_dim,
            kv_values_per_token=latent + rope if latent else kv_heads * (head_dim + value_dim),
            dense_weights=every_token,
            expert_weights=mlp.active // layers,
            num_experts=mlp.experts,
            experts_per_token=mlp.experts_per_token,
            total_weights=every_token * layers + mlp.all_experts + embeddings,
            vocab_size=vocabulary,
            windows=_windows(values, layers),
            dtype_bytes=4 if "float32" in str(values.get("dtype") or values.get("torch_dtype")) else 2,
            name=name or values.get("_name_or_path") or values.get("model_type") or "model",
        )

    @staticmethod
    def from_model(model: Any) -> ModelShape:
        """Sizes off a live model: its config, and its parameters' own count and dtype.

        Every parameter counts once in `total_weights`, also towers of other modalities and adapters of PEFT, whole
        where FSDP2 shards it, a quantised linear layer by its sizes. Matrices of the decoder but embeddings make up
        `dense_weights` and `expert_weights`, once for each layer that uses them. Where experts differ between layers,
        or some of those chosen are empty, a token's share is an average. Not exact: experts quantised in one tensor, as
        they are stored; bytes of quantised weights, which count as the dtype of others.

        Args:
            model: a transformers model, also wrapped by PEFT or DDP, also on the ``meta`` device; nothing of it is
                changed.

        Raises:
            TypeError, NotImplementedError: not a decoder of transformers.
            ValueError: its config lacks a size.
        """
        from augtree_fx.planner.live_weights import LiveWeights
        from augtree_fx.transforms.stack import find_stack

        stack: Any = find_stack(model)
        shape = ModelShape.from_config(stack.config)
        weights = LiveWeights.of(model, stack, shape.num_experts)
        active = weights.routed * shape.experts_per_token // max(shape.num_experts, 1)
        return replace(
            shape,
            dense_weights=weights.dense // shape.num_layers,
            expert_weights=active // shape.num_layers,
            total_weights=weights.total,
            dtype_bytes=next(each.dtype.itemsize for each in model.parameters() if each.is_floating_point()),
        )


@dataclass(frozen=True)
class _Mlp:
    """Weights of all layers' MLPs: `dense` for every token, `active` for a token's experts, `all_experts` stored."""

    dense: int
    active: int = 0
    all_experts: int = 0
    experts: int = 0
    experts_per_token: int = 0


def _values(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return _filled(config)
    if isinstance(config, str | Path):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(f"config must be a config.json or its folder, found no file {str(path)!r}")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:  # JSON's and UTF-8's are too
            raise ValueError(f"a config must be JSON, {str(path)!r} is not: {error}") from error
        if not isinstance(values, Mapping):
            raise ValueError(f"a config must be a JSON object, {str(path)!r} holds {type(values).__name__}")
        return _filled(values)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    values = dict(text.to_dict())
    if values.get("model_type") == "longcat_flash":  # its layers hold two of attention, as its num_hidden_layers says
        values["num_hidden_layers"] = 2 * values["num_layers"]
    if values.get("model_type") == "falcon" and not values["new_decoder_architecture"] and values["multi_query"]:
        values["num_kv_heads"] = 1
    return values


def _filled(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with what it leaves out: gemma's windows by layer, sizes of an inner config that are defaults."""
    from transformers import CONFIG_MAPPING

    kind = values.get("model_type")
    if kind not in CONFIG_MAPPING:
        return dict(values)
    return _values(CONFIG_MAPPING[kind].from_dict(copy.deepcopy(dict(values))))


def _number(values: Mapping[str, Any], name: str) -> int:
    for alias in _NAMES[name]:
        if isinstance(values.get(alias), int):
            if values[alias] < 1:
                raise ValueError(f"{alias} of a config must be at least 1, got {values[alias]}; see the config")
            return int(values[alias])
    raise ValueError(
        f"a config must have {name}, found {sorted(values)[:8]}; pass ModelShape(...) with the numbers themselves"
    )


def _latent_weights(values: Mapping[str, Any], hidden: int, heads: int, head_dim: int, value_dim: int) -> int:
    """Weights of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""
    rank, rope = values["kv_lora_rank"], values.get("qk_rope_head_dim") or 0
    low = values.get("q_lora_rank")
    queries = hidden * low + low * heads * head_dim if low else hidden * heads * head_dim
    keys = hidden * (rank + rope) + rank * heads * (head_dim - rope + value_dim)
    return queries + keys + heads * value_dim * hidden


def _first(values: Mapping[str, Any], names: Sequence[str]) -> Any:
    """What a config has under the first of some names that says something, or 0."""
    return next((values[name] for name in names if values.get(name)), 0)


def _mlp_weights(values: Mapping[str, Any], hidden: int, layers: int) -> _Mlp:
    inner = _first(values, _INNER) or 4 * hidden
    if isinstance(inner, Sequence):  # one for each layer, as in gemma3n
        inner = sum(inner) // len(inner)
    matrices = 2 if values.get("model_type") in _TWO_MATRICES else 3
    experts = _first(values, _EXPERTS)
    if not experts:
        return _Mlp(dense=matrices * hidden * inner * layers)
    per_token = _first(values, _EXPERTS_PER_TOKEN) or 1
    expert = 3 * hidden * (values.get("moe_intermediate_size") or values.get("expert_ffn_hidden_size") or inner)
    dense_layers = len(values.get("mlp_only_layers") or ()) or values.get("first_k_dense_replace") or 0
    shared_inner = values.get("shared_expert_intermediate_size") or 0
    shared = 3 * hidden * shared_inner or expert * _first(values, _SHARED_EXPERTS)
    sparse = layers - dense_layers
    router = hidden * experts
    if "zero_expert_num" in values:  # LongCat: some experts are empty, every second layer has them beside its MLP
        per_token = per_token * experts // (experts + values["zero_expert_num"])
        dense_layers, sparse = layers, layers // 2
    return _Mlp(
        dense=3 * hidden * inner * dense_layers + (shared + router) * sparse,
        active=expert * per_token * sparse,
        all_experts=expert * experts * sparse,
        experts=experts,
        experts_per_token=per_token,
    )


def _windows(values: Mapping[str, Any], layers: int) -> tuple[tuple[int | None, int], ...]:
    window = values.get("sliding_window") or values.get("attention_chunk_size")
    types = values.get("layer_types")
    if not window or values.get("use_sliding_window") is False:
        return ((None, layers),)
    if not types:
        return ((int(window), layers),)
    counts = Counter(int(window) if kind in ("sliding_attention", "chunked_attention") else None for kind in types)
    return tuple(sorted(counts.items(), key=lambda item: (item[0] is not None, item[0] or 0)))
