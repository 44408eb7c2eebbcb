"""Tiny models of any type in float64, and what they compute: for tests of types that `families` has no sizes of."""

from __future__ import annotations

import sys

import pytest
import torch
from families import Batch, Result, objective
from torch import nn

import augtree_fx
from augtree_fx import CostModel
from augtree_fx.coverage import tiny
from augtree_fx.coverage.precision import KeepFloat64
from augtree_fx.transforms import find_stack
from augtree_fx.transforms.install import STATE


def build(model_type: str, attention: str = "eager") -> nn.Module:
    if model_type not in tiny.model_types():
        pytest.skip("this transformers does not have it")
    model = tiny.build(model_type, attention).double()
    builders = vars(sys.modules[type(find_stack(model)).__module__])
    if "create_bidirectional_mask" in builders and "create_causal_mask" not in builders:
        pytest.skip("this transformers masks it as an encoder, whatever its config says")  # rembert in 5.17
    return model


def shared(model: nn.Module) -> nn.Module:
    return augtree_fx.transform(model, costs=CostModel.free())


def state_of(model: nn.Module) -> object:
    return getattr(find_stack(model), STATE)


def with_gradients(model: nn.Module, batch: Batch) -> Result:
    """Logits at tokens and the gradient of every parameter; 0 of one that takes none, as an unchosen expert."""
    model.zero_grad()
    logits = batch.rows_of(model(**batch.inputs(), use_cache=False).logits)
    objective(logits, batch.tokens).backward()
    gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in model.named_parameters()}
    model.zero_grad()
    return Result([row.detach() for row in logits], gradients)


def result(model: nn.Module, batch: Batch) -> Result:
    with KeepFloat64():
        return with_gradients(model, batch)
