"""PEFT and checkpointing before and after transform: what is shared, and what cannot be.

Each test compares with the adapted, unmodified model, row by row, logits and every gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from families import (
    Batch,
    Result,
    build,
    computed,
    error,
    one_thread,
    padded,
    reference,
    rollout,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from treated import FLOAT32, Treatment, assert_equal, check, in_either_order, num_shared, shared

import augtree_fx
from augtree_fx.face import RewriteError


@pytest.fixture(autouse=True, scope="module")
def single_threaded() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def batch() -> Batch:
    return padded(rollout(3), "right")


PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
ADAPTERS: dict[str, tuple[str, dict[str, object]]] = {
    "DoRA": ("LoraConfig", {"use_dora": True, "target_modules": PROJECTIONS, "init_lora_weights": False}),
    "LoRA, everywhere": ("LoraConfig", {"target_modules": "all-linear", "init_lora_weights": False}),
    "LoRA, embeddings too": (
        "LoraConfig",
        {"target_modules": [*PROJECTIONS, "embed_tokens", "lm_head"], "init_lora_weights": False},
    ),
    "LoRA, whole embeddings": (
        "LoraConfig",
        {"target_modules": PROJECTIONS, "modules_to_save": ["embed_tokens", "lm_head"], "init_lora_weights": False},
    ),
    "IA3": (
        "IA3Config",
        {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "OFT": ("OFTConfig", {"target_modules": PROJECTIONS, "oft_block_size": 8, "init_weights": False}),
    "norms": ("LNTuningConfig", {"target_modules": ["input_layernorm", "norm"]}),
    "token embeddings": ("TrainableTokensConfig", {"token_indices": [3, 4, 5]}),
}


def adapted(name: str) -> Treatment:
    peft = pytest.importorskip("peft")
    class_name, options = ADAPTERS[name]

    def treat(model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return peft.get_peft_model(model, getattr(peft, class_name)(**options)).double()

    return treat


@in_either_order
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name: str, transform_first: bool, batch: Batch) -> None:
    treat = adapted(name)
    model = check(treat, batch, transform_first)
    expected = torch.cat(reference(treat(build("llama", torch.float64)), batch).logits)
    with torch.no_grad():
        merged = batch.rows_of(model.merge_and_unload()(**batch.inputs(), use_cache=False).logits)
    assert error(torch.cat(merged), expected) < FLOAT32


@in_either_order
def test_adapters_that_are_switched(transform_first: bool, batch: Batch) -> None:
    """A policy and a reference adapter on one model, and the model without any: TRL and verl use them so."""
    peft = pytest.importorskip("peft")

    def treat(model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=PROJECTIONS, init_lora_weights=False)
        model = peft.get_peft_model(model, config)
        model.add_adapter("ref", config)
        return model.double()

    plain = treat(build("llama", torch.float64))
    model = build("llama", torch.float64)
    model = treat(shared(model)) if transform_first else shared(treat(model))
    for adapter in ("ref", "default"):
        plain.set_adapter(adapter)
        model.set_adapter(adapter)
        assert_equal(computed(model, batch), reference(plain, batch))
    with plain.disable_adapter(), model.disable_adapter(), torch.no_grad():
        logits = [batch.rows_of(each(**batch.inputs(), use_cache=False).logits) for each in (plain, model)]
    rows = build("llama", torch.float64)
    assert error(torch.cat(logits[1]), torch.cat(reference(rows, batch).logits)) < FLOAT32
    assert num_shared(model) == 3


@in_either_order
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_prompt_tuning_runs_the_original_forward_and_says_so(kind: str, transform_first: bool, batch: Batch) -> None:
    """Virtual tokens are vectors beside those of the table: which of them are one computation is not known."""
    peft = pytest.importorskip("peft")

    def treat(model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return peft.get_peft_model(model, getattr(peft, kind)(num_virtual_tokens=4, task_type="CAUSAL_LM"))

    model = treat(shared(build("llama"))) if transform_first else shared(treat(build("llama")))
    logits = [m(**batch.inputs(), use_cache=False).logits for m in (treat(build("llama")), model)]
    assert torch.equal(*logits)
    (reason,) = augtree_fx.explain(model).fallbacks
    assert reason.startswith("inputs_embeds take gradients through CatBackward0")


@in_either_order
def test_prefix_tuning_is_refused_with_gradients(transform_first: bool, batch: Batch) -> None:
    peft = pytest.importorskip("peft")

    def treat(model: nn.Module) -> nn.Module:
        return peft.get_peft_model(model, peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))

    model = treat(shared(build("llama"))) if transform_first else shared(treat(build("llama")))
    with pytest.raises(NotImplementedError, match="KV cache of 4 tokens.*prefix tuning.*strict=False"):
        model(**batch.inputs(), use_cache=False)


def test_an_adapter_that_replaces_attention_is_refused(batch: Batch) -> None:
    """LLaMA-Adapter puts a module of its own in the place of the attention module."""
    peft = pytest.importorskip("peft")
    config = {"adapter_len": 4, "adapter_layers": 2, "task_type": "CAUSAL_LM"}
    with pytest.raises(RewriteError, match=r"layers.1 .*does not call its attention module"):
        shared(peft.get_peft_model(build("llama"), peft.AdaptionPromptConfig(**config)))
    model = peft.get_peft_model(shared(build("llama")), peft.AdaptionPromptConfig(**config))
    with pytest.raises(RuntimeError, match=r"changed since transform at layers.1.self_attn.*transform again"):
        model(**batch.inputs(), use_cache=False)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")  # see test_composition.py
@in_either_order
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_adapters(reentrant: bool, transform_first: bool, batch: Batch) -> None:
    def treat(model: nn.Module) -> nn.Module:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return adapted("LoRA, everywhere")(model).train()

    model = check(treat, batch, transform_first)
    assert model.get_base_model().model.layers[0].gradient_checkpointing


@in_either_order
def test_checkpoint_wrapper_of_torch(transform_first: bool, batch: Batch) -> None:
    """What accelerate applies under FSDP: a module around each layer, which also shows in the names of parameters."""
    expected = reference(build("llama", torch.float64), batch)
    model = build("llama", torch.float64)
    layer_class = type(model.model.layers[0])
    if transform_first:
        shared(model)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, layer_class))
    if not transform_first:
        shared(model)
    runs: list[int] = []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    got = computed(model, batch)
    gradients = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in got.gradients.items()}
    assert_equal(Result(got.logits, gradients), expected)
    assert len(runs) == 2 and num_shared(model) == 1
    augtree_fx.restore(model)
    assert not any("augtree" in name for module in model.modules() for name in vars(module))


def test_adapters_are_saved_and_loaded_around_transform(batch: Batch, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = adapted("LoRA, everywhere")(shared(build("llama"))).float()
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(shared(build("llama")), tmp_path)
    logits = [each(**batch.inputs(), use_cache=False).logits for each in (model, loaded, copy.deepcopy(model))]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    assert num_shared(loaded) == 1
