"""Weights that a planner counts: of configs beside models of the same sizes on the meta device, and of live models."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from families import build
from ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import augtree_fx
from augtree_fx import ModelShape, Planner
from augtree_fx.transforms import find_stack
from augtree_fx.transforms.install import STATE

TWO_MATRICES = ("apertus", "arcee", "bloom", "falcon", "fuyu", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "jais2",
                "nanochat", "opt", "phi", "starcoder2")  # fmt: skip
OTHERS = ("deepseek_v3", "gemma3n_text", "gemma4_text", "gpt_oss", "kimi_linear", "llama", "qwen2_moe", "qwen3_moe")
LIVE = ("aria_text", "bamba", "jamba", "lfm2", "llama4_text", "qwen3_5_text", "qwen3_next")  # beyond their configs


def on_meta(model_type: str) -> nn.Module:
    """A model of a type's default sizes, without memory."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have it")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type]())


def matrices_of(model: nn.Module) -> int:
    """Numbers of a decoder's matrices and experts, embeddings aside."""
    stack = find_stack(model)
    embedded = {id(module.weight) for module in stack.modules() if isinstance(module, nn.Embedding)}
    return sum(each.numel() for each in stack.parameters() if each.ndim > 1 and id(each) not in embedded)


def layers_of(shape: ModelShape) -> float:
    """The same by a shape, all experts included."""
    experts = shape.expert_weights * shape.num_experts / max(shape.experts_per_token, 1)
    return (shape.dense_weights + experts) * shape.num_layers


@pytest.mark.parametrize("model_type", TWO_MATRICES + OTHERS)
def test_layers_of_a_config_are_those_of_its_model(model_type: str) -> None:
    """Within 4%: gemma's attention has other heads in some layers, Kimi's recurrent layers are taken for attention."""
    model = on_meta(model_type)
    shape = ModelShape.from_config(find_stack(model).config)
    assert layers_of(shape) == pytest.approx(matrices_of(model), rel=0.04)
    if matrices_of(model) > 10**9:  # positions, norms and biases are nothing beside
        counted = sum(each.numel() for each in model.parameters())
        assert shape.total_weights == pytest.approx(counted, rel=0.04)


@pytest.mark.parametrize("model_type", TWO_MATRICES + OTHERS + LIVE)
def test_live_weights_are_exact(model_type: str) -> None:
    model = on_meta(model_type)
    shape = ModelShape.from_model(model)
    assert shape.total_weights == sum(each.numel() for each in model.parameters())
    assert layers_of(shape) == pytest.approx(matrices_of(model), rel=1e-4)  # whole weights a layer
    assert (shape.expert_weights > 0) == (shape.num_experts > 0)


def test_layers_that_hold_two() -> None:
    """LongCat-Flash: 560 billion weights, 27 of them active, in 28 double layers (arXiv 2509.01322)."""
    if "longcat_flash" not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have it")
    shape = ModelShape.from_config(CONFIG_MAPPING["longcat_flash"]())
    assert (shape.num_layers, shape.experts_per_token) == (56, 8)
    assert shape.total_weights / 1e9 == pytest.approx(560, rel=0.02)
    active = (shape.dense_weights + shape.expert_weights) * shape.num_layers + shape.vocab_size * shape.hidden_size
    assert active / 1e9 == pytest.approx(27, rel=0.05)


def test_one_key_head_for_all_queries() -> None:
    for model_type in ("falcon", "gpt_bigcode"):
        shape = ModelShape.from_config(CONFIG_MAPPING[model_type]())
        assert shape.num_kv_heads == 1 and shape.kv_values_per_token == 2 * shape.head_dim


def sharded() -> tuple[ModelShape, ModelShape]:
    """Sizes of a model, and of its copy whose parameters FSDP2 shards."""
    model = build("qwen3_moe", torch.float32)
    plain = ModelShape.from_model(model)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return plain, ModelShape.from_model(fully_shard(model, mesh=mesh))


def test_a_sharded_model_has_all_of_its_weights(worlds: Callable[[int], Ranks]) -> None:
    for plain, found in worlds(3).run(sharded):
        assert found == plain


def test_adapters_count_and_transform_reads_the_model() -> None:
    import peft

    model = build("qwen3", torch.float32)
    plain = ModelShape.from_model(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    adapters = sum(each.numel() for name, each in adapted.named_parameters() if "lora_" in name)
    augtree_fx.transform(adapted, planner=Planner("cpu"))
    found = getattr(find_stack(adapted), STATE).planned.model
    assert found == ModelShape.from_model(adapted)
    assert found.total_weights == plain.total_weights + adapters
    assert found.dense_weights == plain.dense_weights + adapters // plain.num_layers


class Packed(nn.Module):
    """A linear layer as quantisers leave it: two weights a byte."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)


def test_quantised_linear_layers_count_by_their_sizes() -> None:
    model = build("llama", torch.float32)
    quantised = copy.deepcopy(model)
    for layer in quantised.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, Packed(getattr(layer.mlp, name)))
    assert ModelShape.from_model(quantised) == ModelShape.from_model(model)


def test_tied_heads_count_once_and_blocks_that_layers_share_in_each() -> None:
    model = build("llama", torch.float32)
    plain = ModelShape.from_model(model)
    model.lm_head.weight = model.model.embed_tokens.weight
    assert ModelShape.from_model(model).total_weights == plain.total_weights - model.lm_head.weight.numel()
    gone = sum(each.numel() for each in model.model.layers[1].mlp.parameters())
    model.model.layers[1].mlp = model.model.layers[0].mlp
    found = ModelShape.from_model(model)
    assert found.dense_weights == plain.dense_weights
    assert found.total_weights == plain.total_weights - model.lm_head.weight.numel() - gone
