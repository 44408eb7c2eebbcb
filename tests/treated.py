"""What tests of treated models share: the treated model, transformed before or after, against the unmodified one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from families import (
    Batch,
    Result,
    build,
    computed,
    errors,
    reference,
)
from torch import nn

import augtree_fx
from augtree_fx import CostModel

FLOAT32 = 1e-5  # a float64 model with float32 up-casts, see test_models.py

Treatment = Callable[[nn.Module], nn.Module]
in_either_order = pytest.mark.parametrize("transform_first", [True, False], ids=["transform first", "transform last"])


def shared(model: nn.Module) -> nn.Module:
    return augtree_fx.transform(model, costs=CostModel.free())


def num_shared(model: nn.Module) -> int:
    said = augtree_fx.explain(model)
    assert said.fallbacks == {}
    return said.num_shared


def assert_equal(got: Result, expected: Result) -> None:
    assert {name: value for name, value in errors(got, expected).items() if not value <= FLOAT32} == {}


def check(treat: Treatment, batch: Batch, transform_first: bool, family: str = "llama", **changes: object) -> nn.Module:
    """The treated model, transformed before or after, against the treated model; returns the former."""
    expected = reference(treat(build(family, torch.float64, **changes)), batch)
    model = build(family, torch.float64, **changes)
    model = treat(shared(model)) if transform_first else shared(treat(model))
    assert_equal(computed(model, batch), expected)
    assert num_shared(model) == 1
    return model
