"""A batch that shares nothing costs one cheap check, and its output is bit for bit the unmodified model's."""

from __future__ import annotations

import copy
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import augtree_fx
from augtree_fx.transforms.install import STATE
from augtree_fx.transforms.requests import Unshared, decide


def model_100m() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024, hidden_size=768, intermediate_size=3072, num_hidden_layers=10, num_attention_heads=12,
        num_key_value_heads=12, head_dim=64,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def test_the_check_costs_under_one_percent_at_8_rows_of_2k() -> None:
    model = augtree_fx.transform(model_100m())
    assert 9e7 < sum(parameter.numel() for parameter in model.parameters()) < 1.1e8
    stack = model.base_model
    rows = torch.randint(0, 1024, (8, 2048))
    rows[:, 0] = 7  # a common first token, as every tokenizer with a BOS token makes them
    given = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
    checks = []
    for _ in range(5):
        begin = time.perf_counter()
        try:
            decide(stack, getattr(stack, STATE), given)
        except Unshared as reason:
            assert not str(reason)
        else:
            raise AssertionError("a common first token must not be shared")
        checks.append(time.perf_counter() - begin)
    with torch.no_grad():  # forward alone, a sixteenth of the tokens: its time grows at least linearly
        begin = time.perf_counter()
        model(rows[:1, :1024], use_cache=False)
        forward = 16 * (time.perf_counter() - begin)
    assert sorted(checks)[2] < 0.01 * forward, f"check {sorted(checks)[2]:.4f} s, forward {forward:.1f} s"


def test_an_unshared_batch_is_bitwise_the_unmodified_models() -> None:
    plain = model_100m()
    model = augtree_fx.transform(copy.deepcopy(plain))
    rows = torch.randint(0, 1024, (4, 64))
    mask = torch.ones_like(rows)
    mask[1, 50:] = 0
    outputs = []
    for each in (plain, model):
        logits = each(rows, attention_mask=mask).logits
        logits.square().mean().backward()
        outputs.append((logits, *(parameter.grad for parameter in each.parameters())))
    assert all(torch.equal(x, y) for x, y in zip(*outputs, strict=True))
