"""A tiny config of any causal-LM type: the default one, shrunk field by field, with one layer of every kind it has.

A default config says which fields a type has and which kinds of layers it mixes; sizes come from one table of names,
exceptions of single types from `overrides`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from augtree_fx.coverage.overrides import KEY_HEADS, NO_KIND, OVERRIDES, PARTS, SIZES, UNSET, WINDOW, WINDOWS

_MIN_LAYERS = 2
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def model_types() -> list[str]:
    """Every causal-LM type of the installed transformers."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def class_name(model_type: str) -> str:
    """Name of the class that transformers builds for a type."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return names if isinstance(names, str) else names[0]


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Config that the class of a type is built from, tiny; dropout and router noise are 0."""
    cls = CONFIG_MAPPING[model_type]
    if model_type in PARTS:
        cls = cls.sub_configs[PARTS[model_type]]
    return shrunk(cls, OVERRIDES.get(model_type, {}))


def build(model_type: str, attention: str, seed: int = 0) -> nn.Module:
    """A model of a type in training mode without noise, float32; every parameter is random and away from 0."""
    options = {"attn_implementation": attention, "experts_implementation": "eager"}
    config = tiny_config(model_type)
    if model_type in PARTS:  # the auto class knows it by the whole config only
        model = getattr(transformers, class_name(model_type))._from_config(config, **options)
    else:
        model = AutoModelForCausalLM.from_config(config, **options)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    randomise(model, seed)
    return model.train()


def shrunk(cls: type[PreTrainedConfig], overrides: Mapping[str, Any]) -> PreTrainedConfig:
    """A config of a class with every known size made small.

    Args:
        cls: class of the config.
        overrides: fields to set as they are; a dict at the name of a sub-config holds overrides of that.
    """
    parts = [name for name in getattr(cls, "sub_configs", {}) if name != "per_layer_config"]
    fixed = {name: value for name, value in overrides.items() if name not in parts}
    default = _values(cls(**{name: overrides[name] for name in parts if name in overrides}))
    changes: dict[str, Any] = {}
    for name in parts:
        if isinstance(part := default.get(name), PreTrainedConfig):
            changes[name] = shrunk(type(part), overrides.get(name, {}))
    layers = next((name for name in _LAYERS if default.get(name)), None)
    picked = _one_of_each_kind(default, default[layers]) if layers else []
    for field in dataclasses.fields(cls):
        name, value = field.name, default.get(field.name)
        derived = field.default is None and name not in WINDOWS
        if name in changes or not field.init or value is None:
            continue
        if name == layers:
            changes[name] = len(picked)
        elif layers and _is_per_layer(value, default[layers]):
            if not derived or len(set(map(str, value))) > 1:
                changes[name] = [_small(name, value[index], default) for index in picked]
        elif name == "is_decoder":
            changes[name] = True  # models that are bidirectional otherwise
        elif not derived:
            changes[name] = _small(name, value, default)
    changes |= fixed
    return cls(**_underived(cls, _values(cls(**changes)), set(changes)), **changes)


def _underived(cls: type[PreTrainedConfig], values: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Fields without a default of their own: sizes that a class does not derive from others, or leaves unset."""
    changes = {}
    for name in {field.name for field in dataclasses.fields(cls) if field.init} - known:
        value = values.get(name)
        if value is None and name in UNSET:
            changes[name] = UNSET[name]
        elif name in SIZES and (small := _small(name, value, values)) != value:
            changes[name] = small
    return changes


def _values(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields of a config by all their names."""
    values = dict(vars(config))
    aliases = {name: values[stored] for name, stored in type(config).attribute_map.items() if stored in values}
    return {**aliases, **values}


def _is_per_layer(value: Any, num_layers: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == num_layers


def _one_of_each_kind(default: Mapping[str, Any], num_layers: int) -> list[int]:
    """Layers of the default config, the first of every kind, in order; at least two."""
    lists = [v for name, v in default.items() if _is_per_layer(v, num_layers) and name not in NO_KIND]
    kinds = list(zip(*lists, strict=True)) if lists else [()] * num_layers
    first = {str(kind): index for index, kind in reversed(list(enumerate(kinds)))}
    picked = sorted(first.values())
    return picked if len(picked) >= _MIN_LAYERS else picked * _MIN_LAYERS


def _small(name: str, value: Any, default: Mapping[str, Any]) -> Any:
    """The value of a field, or of one item of it, in a tiny config."""
    if isinstance(value, bool):
        return value
    if isinstance(value, float) and ("drop" in name or "jitter" in name):
        return 0.0
    if not isinstance(value, int) or value <= 0:
        return value
    if name in KEY_HEADS:
        queries = default.get(KEY_HEADS[name])
        return 1 if value == 1 else 4 if value == queries else 2
    if name in WINDOWS:
        return WINDOW
    if name.endswith(("token_id", "token_index")):
        return _SPECIAL.get(name, min(value, 3))
    return min(value, SIZES.get(name, value))


def randomise(model: nn.Module, seed: int) -> None:
    """Fill parameters so that no gradient is trivially 0 and activations keep their size.

    Norms, biases and sinks too; buffers that shift a router's choice move as well.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "sink" in name:
                parameter.copy_(noise)  # logits are of this size, so a sink takes a fair share of the softmax
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif parameter.ndim <= 1:
                parameter.add_(0.3 * noise)  # scale of a norm: it starts from 1, in some families from 0
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
