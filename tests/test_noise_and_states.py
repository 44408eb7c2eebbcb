"""Randomness besides attention dropout, masks from content, masks blind to positions: refused or original."""

import copy

import pytest
import torch
from families import build
from torch import nn
from transformers import (
    DogeConfig,
    DogeForCausalLM,
    PersimmonConfig,
    PersimmonForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

import augtree_fx
from augtree_fx import CostModel, RewriteError

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
IDS = torch.cat([torch.arange(3, 23).expand(4, -1), torch.randint(3, 97, (4, 6))], dim=1)


def shared(model: nn.Module, **options: object) -> nn.Module:
    return augtree_fx.transform(model, costs=CostModel.free(), **options)


def num_shared(model: nn.Module) -> int:
    return augtree_fx.explain(model).num_shared


@pytest.mark.parametrize(("field", "where"), [("resid_pdrop", "resid_dropout"), ("embd_pdrop", "embed_dropout")])
def test_dropout_outside_attention_is_refused_in_training(field: str, where: str) -> None:
    model = shared(PhiForCausalLM(PhiConfig(**SIZES, num_key_value_heads=2, **{field: 0.5})))
    with pytest.raises(NotImplementedError, match=f"dropout and router noise must be 0.*{where} has 0.5"):
        model.train()(IDS, use_cache=False)
    model.eval()(IDS, use_cache=False)
    assert num_shared(model) == 1


def test_adapter_dropout_is_refused_in_training() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.5, task_type="CAUSAL_LM")
    model = peft.get_peft_model(shared(build("llama")), config).train()
    with pytest.raises(NotImplementedError, match="q_proj.lora_dropout.default has 0.5"):
        model(input_ids=IDS, use_cache=False)


def test_a_dropout_module_of_rate_0_in_attention_trains() -> None:
    plain = PersimmonForCausalLM(PersimmonConfig(**SIZES)).train()
    model = shared(copy.deepcopy(plain))
    # float32 models: 6e-8 a rounding, through three layers
    torch.testing.assert_close(
        model(IDS, use_cache=False).logits, plain(IDS, use_cache=False).logits, rtol=1e-4, atol=1e-5
    )
    assert num_shared(model) == 1


def test_of_a_refused_model_nothing_is_left_behind() -> None:
    model = DogeForCausalLM(DogeConfig(**SIZES, num_key_value_heads=2))
    before = [(type(module), list(vars(module))) for module in model.modules()]
    with pytest.raises(RewriteError, match="it makes a mask of its own inside its attention module"):
        shared(model)
    assert [(type(module), list(vars(module))) for module in model.modules()] == before


def test_positions_that_masks_do_not_see_run_the_original_forward() -> None:
    """gpt_oss builds its masks without position ids: the unmodified model does not separate packed sequences."""
    plain = build("gpt_oss", torch.float64)
    model = shared(copy.deepcopy(plain))
    packed = IDS.reshape(1, -1)
    positions = torch.arange(IDS.shape[1]).repeat(len(IDS))[None]
    given = {"input_ids": packed, "position_ids": positions, "use_cache": False}
    assert torch.equal(model(**given).logits, plain(**given).logits)
    explanation = augtree_fx.explain(model)
    assert explanation.num_shared == 0 and "do not look at position_ids" in str(explanation)
