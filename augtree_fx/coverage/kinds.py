"""What kinds of attention a model has, read off its config and its modules; for the table, not for any decision."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import nn

_LAYER_TYPES = {
    "full_attention": "full",
    "hybrid": "full",
    "sliding_attention": "window",
    "hybrid_sliding": "window",
    "chunked_attention": "chunked",
    "global": "full",
    "local": "window",
}
_RECURRENT_TYPES = {"linear_attention", "mamba", "recurrent"}
_RECURRENT = re.compile(
    r"Mamba|Bamba|SSM|Mixer$|Recurrent|Rwkv|DeltaNet|DeltaAttention|LinearAttention|Lightning|RgLru|Retention|LSTM"
)
_CONVOLUTION = re.compile(r"ShortConv|Conv1d")


def attention_kinds(model: nn.Module) -> tuple[str, ...]:
    """Names of the kinds of attention, and of other mixing of tokens, in a model; most important first."""
    config: Any = model.config
    config = config.get_text_config(decoder=True)
    modules = [(name, module) for name, module in model.named_modules() if _is_text(name)]
    attentions = [module for _, module in modules if _is_attention(module)]
    types = {*(getattr(config, "layer_types", None) or ())}
    recurrent = bool(types & _RECURRENT_TYPES) or any(_RECURRENT.search(type(module).__name__) for _, module in modules)
    convolution = any(_CONVOLUTION.search(type(module).__name__) for _, module in modules)
    parameters = [name for name, _ in model.named_parameters()]
    found = _by_layer_types(config) if attentions else {}
    flags = {
        "hybrid": recurrent and bool(attentions),
        "recurrent": recurrent,
        "convolution": convolution and not recurrent,
        "MLA": bool(getattr(config, "kv_lora_rank", None)),
        "soft-cap": bool(getattr(config, "attn_logit_softcapping", None)),
        "sink": any("sink" in name for name in parameters),
        "gated": any(_has_gate(module) for module in attentions),
        "QK-norm": any(re.search(r"\.(q|k|query|key)_?(layer)?norm", name, re.I) for name in parameters),
        "indexer": any("indexer" in name.lower() for name, _ in modules),
        "cross": any("cross" in type(module).__name__.lower() for module in attentions)
        or any(re.search(r"cross_?att|encoder_attn", name) for name in parameters),
        "relative bias": any(re.search(r"rel(ative)?_(pos|bias|att)|position_bias|r_w_bias", x) for x in parameters),
        "alibi": bool(getattr(config, "alibi", False)) or config.model_type in ("bloom", "mpt"),
    }
    return (*found, *(name for name, present in flags.items() if present))


def _is_text(name: str) -> bool:
    return not re.search(r"vision|visual|audio|image|vq", name)


def _is_attention(module: nn.Module) -> bool:
    name = type(module).__name__
    return "Attention" in name and not name.endswith(("Norm", "Output")) and not _RECURRENT.search(name)


def _by_layer_types(config: Any) -> dict[str, None]:
    types = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if types:
        kinds = [kind for kind in types if kind in _LAYER_TYPES or kind.endswith("_attention")]
        names = [_LAYER_TYPES.get(kind, kind.removesuffix("_attention")) for kind in kinds]
        return dict.fromkeys(name for name in names if name != "linear")
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return {"window" if window else "full": None}


def _has_gate(attention: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(attention).forward), "__code__", None)
    return code is not None and any("gate" in name for name in (*code.co_names, *code.co_varnames))
