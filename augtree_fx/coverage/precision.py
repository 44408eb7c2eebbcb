"""Run a float64 model in float64 throughout: the float32 up-casts in modelling code become float64 ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class KeepFloat64(TorchFunctionMode):
    """Norms, RoPE, softmax and routers ask for float32 by name; under this mode they get float64.

    Build models outside of it, or their buffers differ from what transformers computes.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        named = {name: _double(value) for name, value in (kwargs or {}).items()}
        return func(*map(_double, args), **named)


def _double(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
